/*
 * Threads that keep places for sandboxes ready: a network namespace with its tap, and on cgroup v1 a group.
 *
 * Making a namespace and a tap takes milliseconds, moving a process between v1 groups waits for an RCU grace period. A
 * thread can do both for itself beforehand, and the process that it then clones inherits them. A place is used once;
 * the thread goes on to prepare the next one.
 */
#ifndef SPACE_HOST_SPAWNER_H
#define SPACE_HOST_SPAWNER_H

#include "base/error.h"
#include "host/cgroup.h"

#define SPAWNER_THREADS 4

struct spawner;

/* Where the calling thread is. A job that uses netns or tap takes them by setting them to -1. */
struct spawner_place {
	int netns;
	int tap;
	const char *group; /* cgroup_prepare() was called for this name */
};

typedef int spawner_job(void *context, struct spawner_place *place, struct error *e);

/* Starts the threads; the first places may be under way when this returns. */
int spawner_new(const struct cgroup_host *cgroups, struct spawner **ret, struct error *e);
/* Runs the job on a thread that stands in a fresh place, and returns its result. */
int spawner_run(struct spawner *spawner, spawner_job *job, void *context, struct error *e);

#endif
