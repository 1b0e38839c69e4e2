/*
 * The helper's table of sandboxes: start, kill, list, and taking over those of an earlier helper.
 *
 * An entry exists from the moment a start is accepted until its process, cgroup, namespace and record are gone; its
 * user id is not given to another sandbox before that. All functions are thread-safe; work on one sandbox is
 * serialised, work on different ones is not.
 */
#ifndef SPACE_HOST_SANDBOX_H
#define SPACE_HOST_SANDBOX_H

#include "base/config.h"
#include "base/error.h"
#include "host/client.h"

struct sandbox_host;

/* Prepares cgroups and jail, takes over the sandboxes of an earlier helper, removes what belongs to none. To be
 * called before there are threads; the object then lives as long as the process. */
int sandbox_host_open(struct sandbox_host **ret, const struct config *config, struct error *e);
size_t sandbox_count(struct sandbox_host *host);

/* A second call with the nonce of a first one that succeeded gives the sandbox that this one started. */
int sandbox_start(struct sandbox_host *host, const struct host_sandbox_spec *spec, uint64_t nonce, pid_t *ret_pid,
                  int *ret_pidfd, struct error *e);
int sandbox_kill(struct sandbox_host *host, const char *id, struct error *e);
/* As host_sandbox_list(). */
int sandbox_list(struct sandbox_host *host, struct host_sandbox_info **ret, size_t *ret_count, struct error *e);
int sandbox_sockets(struct sandbox_host *host, const char *id, int *fds, size_t count, struct error *e);
/* As host_sandbox_output(), into a buffer of PROTOCOL_OUTPUT_BYTES_MAX + 1 bytes. */
int sandbox_output(struct sandbox_host *host, const char *id, char *ret, size_t *ret_size, struct error *e);
int sandbox_memory_copy(struct sandbox_host *host, const char *id, int base_fd, uint64_t size, int pages_fd,
                        int bitmap_fd, uint64_t *ret_pages, struct error *e);
/* After the reply to a kill or a memory copy: has a thread close the devices of killed sandboxes and give back what
 * memory copies keep for the next one (at once after the second copy; else it goes after MEMORY_KEEP_MS). */
void sandbox_settle(struct sandbox_host *host);
/* Reaps children that have ended; call on SIGCHLD. */
void sandbox_reap(struct sandbox_host *host);

/* For doctor.c. */
struct cgroup_host;
struct jail;
const struct cgroup_host *sandbox_cgroups(const struct sandbox_host *host);
const struct jail *sandbox_jail(const struct sandbox_host *host);

#endif
