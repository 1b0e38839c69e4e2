/* Worker threads for what the scheduler starts, and a way to do the same for many sessions at once. */
#ifndef SPACE_SESSION_JOBS_H
#define SPACE_SESSION_JOBS_H

#include <stddef.h>

#include "base/error.h"

#define JOBS_THREADS 4
#define JOBS_STACK_BYTES (512 * 1024)

struct jobs;

int jobs_new(struct jobs **ret, struct error *e);
/* Waits for jobs in progress; those still waiting are dropped through `drop` (see jobs_add). */
void jobs_free(struct jobs *jobs);
/* `drop` (may be NULL) is called instead of `work` if the job is never run. -ENOMEM: neither is called. */
int jobs_add(struct jobs *jobs, void (*work)(void *context), void (*drop)(void *context), void *context);
/* Calls work(context, 0 … count-1) from up to `threads` threads, the caller's one of them; returns when all are done.
 */
void jobs_parallel(size_t count, unsigned threads, void (*work)(void *context, size_t index), void *context);

#endif
