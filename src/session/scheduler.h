/*
 * The scheduler: one thread that watches the VMMs' pidfds and the clock, and hands what is due to the workers.
 *
 * It decides nothing itself: a timeout is a suspend (or delete) verb, a rolling snapshot is a snapshot verb, the end of
 * a VMM is looked at with the session's turn held.
 */
#ifndef SPACE_SESSION_SCHEDULER_H
#define SPACE_SESSION_SCHEDULER_H

#include "base/error.h"

struct session_manager;
struct sandbox;

#define SCHEDULER_TICK_MS 250

/* Before anything may be watched; then start when all that was adopted is in place. */
int scheduler_prepare(struct session_manager *m, struct error *e);
int scheduler_start(struct session_manager *m, struct error *e);
/* Waits for its thread. */
void scheduler_stop(struct session_manager *m);
void scheduler_free(struct session_manager *m);
/* Something may have become due (a session has begun to run, a timeout was changed). */
void scheduler_wake(struct session_manager *m);
/* Watches a sandbox's VMM; session_id "" for a pooled one. A second call changes the session. */
int scheduler_watch(struct session_manager *m, struct sandbox *sandbox, const char *session_id, struct error *e);
/* The sandbox is about to be ended by us: its end is no news. Must come before its vmm is freed. */
void scheduler_forget(struct session_manager *m, struct sandbox *sandbox);
/* Ends a sandbox later, again and again until it works. */
void scheduler_doom(struct session_manager *m, const char *sandbox_id);

#endif
