#include "host/spawner.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <unistd.h>

#include "base/text.h"
#include "host/netns.h"

#define SPAWNER_STACK_BYTES (256 * 1024)

struct job {
	spawner_job *run;
	void *context;
	struct error *e;
	int result;
	int done;
	struct job *next;
};

/* Lives as long as the process. */
struct spawner {
	const struct cgroup_host *cgroups;
	pthread_mutex_t lock;
	pthread_cond_t arrived;
	pthread_cond_t finished;
	struct job *first;
	struct job **last;
	unsigned threads;
};

static int prepare(const struct spawner *spawner, struct spawner_place *place, struct error *e)
{
	const char *step = "namespace";
	*place = (struct spawner_place){.netns = -1, .tap = -1, .group = place->group};
	int r = cgroup_prepare(spawner->cgroups, place->group, e);
	if (r < 0)
		return r;
	if (unshare(CLONE_NEWNET) < 0)
		return error_set_errno(e, errno, "new network namespace");
	place->tap = netns_configure(&step);
	if (place->tap < 0)
		return error_set_errno(e, place->tap, "network of a sandbox: %s", step);
	place->netns = open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC);
	if (place->netns < 0) {
		r = error_set_errno(e, errno, "/proc/thread-self/ns/net");
		close(place->tap);
		place->tap = -1;
	}
	return r;
}

static void discard(struct spawner_place *place)
{
	if (place->netns >= 0)
		close(place->netns);
	if (place->tap >= 0)
		close(place->tap);
	place->netns = place->tap = -1;
}

static struct job *wait_for_job(struct spawner *spawner)
{
	pthread_mutex_lock(&spawner->lock);
	while (!spawner->first)
		pthread_cond_wait(&spawner->arrived, &spawner->lock);
	struct job *job = spawner->first;
	spawner->first = job->next;
	if (!spawner->first)
		spawner->last = &spawner->first;
	pthread_mutex_unlock(&spawner->lock);
	return job;
}

static void *thread_main(void *context)
{
	struct spawner *spawner = context;
	char name[32];
	pthread_mutex_lock(&spawner->lock);
	text_format(name, sizeof(name), CGROUP_READY_PREFIX "%u", spawner->threads++);
	pthread_mutex_unlock(&spawner->lock);
	for (;;) {
		struct error e;
		struct spawner_place place = {.group = name};
		int r = prepare(spawner, &place, &e);
		struct job *job = wait_for_job(spawner);
		/* What was missing may be there by now. */
		if (r < 0)
			r = prepare(spawner, &place, &e);
		if (r < 0 && job->e)
			*job->e = e;
		if (r == 0)
			r = job->run(job->context, &place, job->e);
		pthread_mutex_lock(&spawner->lock);
		job->result = r;
		job->done = 1;
		pthread_cond_broadcast(&spawner->finished);
		pthread_mutex_unlock(&spawner->lock);
		discard(&place);
	}
	return NULL;
}

int spawner_new(const struct cgroup_host *cgroups, struct spawner **ret, struct error *e)
{
	struct spawner *spawner = calloc(1, sizeof(*spawner));
	if (!spawner)
		return error_set_errno(e, ENOMEM, "spawner");
	spawner->cgroups = cgroups;
	spawner->last = &spawner->first;
	pthread_mutex_init(&spawner->lock, NULL);
	pthread_cond_init(&spawner->arrived, NULL);
	pthread_cond_init(&spawner->finished, NULL);
	pthread_attr_t attributes;
	pthread_attr_init(&attributes);
	pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
	pthread_attr_setstacksize(&attributes, SPAWNER_STACK_BYTES);
	int started = 0;
	for (int i = 0; i < SPAWNER_THREADS; i++) {
		pthread_t thread;
		started += pthread_create(&thread, &attributes, thread_main, spawner) == 0;
	}
	pthread_attr_destroy(&attributes);
	/* One is enough to work; the object stays in any case, for the threads that did start. */
	if (!started)
		return error_set(e, ERROR_EXHAUSTED, "no thread can be started");
	*ret = spawner;
	return 0;
}

int spawner_run(struct spawner *spawner, spawner_job *run, void *context, struct error *e)
{
	struct job job = {.run = run, .context = context, .e = e};
	pthread_mutex_lock(&spawner->lock);
	*spawner->last = &job;
	spawner->last = &job.next;
	pthread_cond_signal(&spawner->arrived);
	while (!job.done)
		pthread_cond_wait(&spawner->finished, &spawner->lock);
	pthread_mutex_unlock(&spawner->lock);
	return job.result;
}
