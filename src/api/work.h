/*
 * Blocking work for the loop's sake, in classes that cannot starve one another: libuv's thread pool is first come first
 * served, so a flood of slow verbs would otherwise keep lookups and proxied traffic waiting.
 */
#ifndef SPACE_API_WORK_H
#define SPACE_API_WORK_H

#include <uv.h>

#define WORK_THREADS 64
#define WORK_WAITING_MAX 2048 /* a class */

enum work_class {
	WORK_QUICK, /* lookups: microseconds to a few milliseconds */
	WORK_OPEN,  /* ways into a guest: may wake a session */
	WORK_VERB,  /* everything that changes a session */
	WORK_BUILD, /* template builds: tens of seconds */
	WORK_CLASS_COUNT
};

struct work_queue;

struct work {
	uv_work_t uv;
	void (*run)(struct work *work);  /* on a worker thread */
	void (*done)(struct work *work); /* on the loop; may free it */
	struct work_queue *queue;
	enum work_class class;
	struct work *next;
};

struct work_queue {
	uv_loop_t *loop;
	struct {
		unsigned running;
		unsigned waiting;
		struct work *first;
		struct work *last;
	} classes[WORK_CLASS_COUNT];
};

/* Sets the size of libuv's thread pool; before anything uses it. */
int work_set_threads(void);
void work_queue_init(struct work_queue *queue, uv_loop_t *loop);
/* 0, or -EAGAIN if too many wait (then neither function is called). */
int work_submit(struct work_queue *queue, struct work *work, enum work_class class, void (*run)(struct work *),
                void (*done)(struct work *));

#endif
