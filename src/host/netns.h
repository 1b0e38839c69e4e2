/* The network of a sandbox: a namespace with lo and one tap, fixed addresses, no route that leads out. */
#ifndef SPACE_HOST_NETNS_H
#define SPACE_HOST_NETNS_H

#include "base/error.h"

#define NETNS_TAP_NAME "tap0"

/*
 * Sets up the namespace that the calling process has just been created in: lo up, IPv6 off, tap with address and MAC
 * of the gateway, permanent neighbour entry for the guest. Returns the tap's descriptor or -errno; *ret_step names
 * what failed. Runs between clone and exec: makes system calls only.
 */
int netns_configure(const char **ret_step);

/* Makes `count` TCP sockets in the namespace that netns_fd is a handle of. The calling thread is back in home_fd's
 * namespace when this returns; if it cannot go back the process aborts (it would serve others in a foreign network). */
int netns_sockets(int netns_fd, int home_fd, int *fds, size_t count, struct error *e);

#endif
