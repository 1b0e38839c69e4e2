/*
 * Starting one program: a child that shares the agent's memory until its exec (as vfork does), created straight into
 * the users' cgroup, so that the cost does not depend on the agent's size and no exec of a helper is needed.
 */
#ifndef SPACE_GUEST_SPAWN_H
#define SPACE_GUEST_SPAWN_H

#include <sys/types.h>

#include "base/error.h"
#include "guest/request.h"

struct spawn {
	const char *program; /* with a slash: a path; without: searched in `search` */
	char **argv;         /* two unused entries in front of argv[0], for a script without interpreter */
	char **envp;
	const char *search;   /* PATH of the new environment, or NULL */
	const char *workdir;  /* absolute */
	int workdir_optional; /* if it cannot be entered: the user's home, else "/" */
	const struct guest_user *user;
	int fds[3];
	int is_terminal; /* fds[0] becomes the controlling terminal */
};

/* What the child was doing when it failed. */
enum spawn_stage {
	SPAWN_STAGE_SETUP,
	SPAWN_STAGE_USER,
	SPAWN_STAGE_WORKDIR,
	SPAWN_STAGE_EXEC,
};

/* *pid is written by the kernel before the child runs, so that whoever reaps it finds its number there. Returns 0, or
 * -errno with the error; *ret_exec_errno is then the errno of the exec, 0 if something else failed. The child has to be
 * reaped in both cases if *pid is set. */
int spawn_start(const struct spawn *s, volatile pid_t *pid, int *ret_exec_errno, struct error *e);

#endif
