/* The stream of events, GET /v1/events: a bounded ring for clients that come back, and the clients that follow it. */
#ifndef SPACE_API_EVENTS_H
#define SPACE_API_EVENTS_H

#include <jansson.h>

#include "api/api.h"

#define EVENTS_KEPT_MAX 4096
#define EVENTS_KEPT_BYTES_MAX (8 * 1024 * 1024)
#define EVENTS_FOLLOWERS_MAX 1024
/* A follower that is this far behind is cut; it comes back with Last-Event-ID. */
#define EVENTS_BEHIND_BYTES_MAX (256 * 1024)
#define EVENTS_HEARTBEAT_MS 15000

struct api_call;

int events_new(struct api *api, struct events **ret, struct error *e);
/* The session manager's sink: any thread. */
void events_sink(void *context, const json_t *event);
/* Works off what the sink has taken so far: a session's events that came before a worker's result are then dealt with
 * before that result. */
void events_drain(struct events *events);
/* `finish` of the route: turns the call's stream into a follower's. */
void events_follow(struct api_call *call);
unsigned events_followers(const struct events *events);
uint64_t events_total(const struct events *events);
/* Ends all followers' streams. */
void events_stop(struct events *events);
void events_free(struct events *events);

#endif
