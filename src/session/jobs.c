#include "session/jobs.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>

struct job {
	struct job *next;
	void (*work)(void *context);
	void (*drop)(void *context);
	void *context;
};

struct jobs {
	pthread_mutex_t mutex;
	pthread_cond_t changed;
	struct job *first;
	struct job **last;
	int stopping;
	size_t thread_count;
	pthread_t threads[JOBS_THREADS];
};

static void *jobs_thread(void *context)
{
	struct jobs *jobs = context;
	pthread_mutex_lock(&jobs->mutex);
	for (;;) {
		while (!jobs->first && !jobs->stopping)
			pthread_cond_wait(&jobs->changed, &jobs->mutex);
		if (jobs->stopping)
			break;
		struct job *job = jobs->first;
		jobs->first = job->next;
		if (!jobs->first)
			jobs->last = &jobs->first;
		pthread_mutex_unlock(&jobs->mutex);
		job->work(job->context);
		free(job);
		pthread_mutex_lock(&jobs->mutex);
	}
	pthread_mutex_unlock(&jobs->mutex);
	return NULL;
}

static int start_thread(pthread_t *ret, void *(*run)(void *), void *context)
{
	pthread_attr_t attributes;
	pthread_attr_init(&attributes);
	pthread_attr_setstacksize(&attributes, JOBS_STACK_BYTES);
	int r = pthread_create(ret, &attributes, run, context);
	pthread_attr_destroy(&attributes);
	return r;
}

int jobs_new(struct jobs **ret, struct error *e)
{
	struct jobs *jobs = calloc(1, sizeof(*jobs));
	if (!jobs)
		return error_set_errno(e, ENOMEM, "worker threads");
	pthread_mutex_init(&jobs->mutex, NULL);
	pthread_cond_init(&jobs->changed, NULL);
	jobs->last = &jobs->first;
	for (; jobs->thread_count < JOBS_THREADS; jobs->thread_count++) {
		int r = start_thread(&jobs->threads[jobs->thread_count], jobs_thread, jobs);
		if (r) {
			jobs_free(jobs);
			return error_set_errno(e, r, "worker threads");
		}
	}
	*ret = jobs;
	return 0;
}

void jobs_free(struct jobs *jobs)
{
	if (!jobs)
		return;
	pthread_mutex_lock(&jobs->mutex);
	jobs->stopping = 1;
	pthread_cond_broadcast(&jobs->changed);
	pthread_mutex_unlock(&jobs->mutex);
	for (size_t i = 0; i < jobs->thread_count; i++)
		pthread_join(jobs->threads[i], NULL);
	while (jobs->first) {
		struct job *job = jobs->first;
		jobs->first = job->next;
		if (job->drop)
			job->drop(job->context);
		free(job);
	}
	pthread_cond_destroy(&jobs->changed);
	pthread_mutex_destroy(&jobs->mutex);
	free(jobs);
}

int jobs_add(struct jobs *jobs, void (*work)(void *context), void (*drop)(void *context), void *context)
{
	struct job *job = malloc(sizeof(*job));
	if (!job)
		return -ENOMEM;
	*job = (struct job){.work = work, .drop = drop, .context = context};
	pthread_mutex_lock(&jobs->mutex);
	*jobs->last = job;
	jobs->last = &job->next;
	pthread_cond_signal(&jobs->changed);
	pthread_mutex_unlock(&jobs->mutex);
	return 0;
}

struct parallel {
	atomic_size_t next;
	size_t count;
	void (*work)(void *context, size_t index);
	void *context;
};

static void *parallel_thread(void *context)
{
	struct parallel *p = context;
	size_t index;
	while ((index = atomic_fetch_add(&p->next, 1)) < p->count)
		p->work(p->context, index);
	return NULL;
}

void jobs_parallel(size_t count, unsigned threads, void (*work)(void *context, size_t index), void *context)
{
	enum { HELPERS_MAX = 15 };
	struct parallel p = {.count = count, .work = work, .context = context};
	pthread_t helpers[HELPERS_MAX];
	size_t started = 0;
	size_t want = MIN(MIN((size_t)threads, count), (size_t)HELPERS_MAX + 1);
	/* Fewer threads than wanted only make it slower. */
	while (started + 1 < want && start_thread(&helpers[started], parallel_thread, &p) == 0)
		started++;
	parallel_thread(&p);
	for (size_t i = 0; i < started; i++)
		pthread_join(helpers[i], NULL);
}
