#include "api/work.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/macros.h"

/* Together less than WORK_THREADS, so that quick work always finds a thread. */
static const unsigned running_max[WORK_CLASS_COUNT] = {
    [WORK_QUICK] = WORK_THREADS,
    [WORK_OPEN] = 24,
    [WORK_VERB] = 24,
    [WORK_BUILD] = 4,
};

int work_set_threads(void)
{
	char count[16];
	snprintf(count, sizeof(count), "%d", WORK_THREADS);
	return setenv("UV_THREADPOOL_SIZE", count, 1) < 0 ? -errno : 0;
}

void work_queue_init(struct work_queue *queue, uv_loop_t *loop)
{
	*queue = (struct work_queue){.loop = loop};
}

static void on_run(uv_work_t *uv)
{
	struct work *work = uv->data;
	work->run(work);
}

static void start(struct work *work);

static void on_done(uv_work_t *uv, int status)
{
	struct work *work = uv->data;
	struct work_queue *queue = work->queue;
	enum work_class class = work->class;
	queue->classes[class].running--;
	struct work *next = queue->classes[class].first;
	if (next && queue->classes[class].running < running_max[class]) {
		queue->classes[class].first = next->next;
		if (!next->next)
			queue->classes[class].last = NULL;
		queue->classes[class].waiting--;
		start(next);
	}
	work->done(work);
}

static void start(struct work *work)
{
	work->queue->classes[work->class].running++;
	work->uv.data = work;
	/* Fails only for a NULL callback. */
	uv_queue_work(work->queue->loop, &work->uv, on_run, on_done);
}

int work_submit(struct work_queue *queue, struct work *work, enum work_class class, void (*run)(struct work *),
                void (*done)(struct work *))
{
	*work = (struct work){.run = run, .done = done, .queue = queue, .class = class};
	if (queue->classes[class].running < running_max[class]) {
		start(work);
		return 0;
	}
	if (queue->classes[class].waiting >= WORK_WAITING_MAX)
		return -EAGAIN;
	queue->classes[class].waiting++;
	if (queue->classes[class].last)
		queue->classes[class].last->next = work;
	else
		queue->classes[class].first = work;
	queue->classes[class].last = work;
	return 0;
}
