/*
 * The warm pool: sandboxes of the default template that have been restored, warmed and frozen again, so that creating
 * a session is one transaction and one call to a guest that is there already. One thread of low priority fills it.
 *
 * A pooled guest is given an identity of its own before it is warmed, and another one when it is handed out; entropy
 * and clock are fresh both times.
 */
#ifndef SPACE_SESSION_WARM_POOL_H
#define SPACE_SESSION_WARM_POOL_H

#include "base/error.h"

struct session_manager;
struct sandbox;

int warm_pool_start(struct session_manager *m, struct error *e);
/* Ends the thread and the pooled sandboxes. */
void warm_pool_stop(struct session_manager *m);
/* Takes one that was restored from this template, or NULL. Its row is in the store, without a session. */
struct sandbox *warm_pool_take(struct session_manager *m, const char *template_id);
/* A started sandbox gets an identity of nobody's and runs a command as a client would; then it is stopped. */
int warm_pool_warm_up(struct sandbox *sandbox, struct error *e);
/* Ends one pooled sandbox to make room; false if there was none. */
int warm_pool_evict(struct session_manager *m);
/* Something was taken: its thread looks whether there is something to fill. */
void warm_pool_poke(struct session_manager *m);
/* The default template has changed. */
void warm_pool_refresh(struct session_manager *m);
unsigned warm_pool_ready(struct session_manager *m);

#endif
