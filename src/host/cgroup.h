/*
 * Limits and tracking of a sandbox's processes: one group INSTANCE/ID in every hierarchy that matters.
 *
 * Memory, cpu and pids are taken from cgroup v2 where it offers them, else from their v1 hierarchies, else they are
 * missing (cgroup_describe() says so). A mounted v2 hierarchy is used for tracking even if it has no controllers: a
 * process can be born in it and all of it can be killed at once.
 */
#ifndef SPACE_HOST_CGROUP_H
#define SPACE_HOST_CGROUP_H

#include "base/error.h"
#include "base/text.h"

#define CGROUP_PATH_BYTES 256
#define CGROUP_DIRS_MAX 4
/* Groups that wait for a sandbox. No id starts like this. */
#define CGROUP_READY_PREFIX "ready-"

enum cgroup_controller { CGROUP_MEMORY, CGROUP_CPU, CGROUP_PIDS, CGROUP_CONTROLLER_COUNT };

struct cgroup_dir {
	char path[CGROUP_PATH_BYTES]; /* MOUNT/INSTANCE */
	int unified;
	unsigned controllers; /* bit mask of those taken from here */
};

struct cgroup_host {
	struct cgroup_dir dirs[CGROUP_DIRS_MAX]; /* the one for tracking first */
	size_t dir_count;
	unsigned version[CGROUP_CONTROLLER_COUNT]; /* 2, 1, or 0 = not available */
};

struct cgroup_limits {
	uint64_t memory_max_bytes; /* 0 = none, as with the others */
	unsigned cpu_percent;
	unsigned pids_max;
};

/* Finds the hierarchies and makes the instance's groups. Fails if there is no hierarchy at all. */
int cgroup_open(struct cgroup_host *host, const char *instance, struct error *e);
/* Makes a group of this name on v1 and puts the calling thread into it; a process that the thread clones is born there.
 * Nothing to do on v2, where clone3() says which group the new process is born in. */
int cgroup_prepare(const struct cgroup_host *host, const char *name, struct error *e);
/* Makes the group of `id`, on v1 by renaming the prepared one. *ret_unified_fd is its folder, for CLONE_INTO_CGROUP; -1
 * without v2. */
int cgroup_create(const struct cgroup_host *host, const char *prepared, const char *id,
                  const struct cgroup_limits *limits, int *ret_unified_fd, struct error *e);
/* Takes the calling thread out of whatever cgroup_prepare() put it into. */
void cgroup_leave(const struct cgroup_host *host);
/* Kills whatever lives in the group, waits for it to be gone, removes the group; at most wait_ms. No group: success. */
int cgroup_remove(const struct cgroup_host *host, const char *id, unsigned wait_ms, struct error *e);
/* Removes the groups of all ids for which `keep` says 0. Returns how many were removed. */
unsigned cgroup_sweep(const struct cgroup_host *host, int (*keep)(void *context, const char *id), void *context);
/* Removes the instance's (empty) groups. */
void cgroup_close(const struct cgroup_host *host);

#endif
