/*
 * Starting a VMM: a process that is born into cgroup and network namespace of the calling thread, gets other namespaces
 * of its own, puts itself into the jail and then waits for the word to execute the program. Should the helper die
 * before that, the process sees the pipe close and ends.
 */
#ifndef SPACE_HOST_LAUNCH_H
#define SPACE_HOST_LAUNCH_H

#include <sys/types.h>

#include "base/error.h"
#include "host/jail.h"

struct launch_spec {
	const char *program;
	char *const *argv;
	char *const *environment;
	const int *fds; /* become 3, 4, …; the tap's number is 3 + fd_count */
	size_t fd_count;
	int tap_fd;
	int null_fd;
	int output_fd; /* becomes stderr */
	uid_t uid;
	const struct jail *jail;
	int cgroup_fd; /* v2 group to be born in, or -1 */
};

struct launch_child {
	pid_t pid;
	int pidfd;
	int go_fd;
	int status_fd;
};

int launch_begin(const struct launch_spec *spec, struct launch_child *ret, struct error *e);
/* Lets it execute; returns once it has, or why not (then call launch_abort). */
int launch_commit(struct launch_child *child, struct error *e);
/* Kills and reaps. */
void launch_abort(struct launch_child *child);

#endif
