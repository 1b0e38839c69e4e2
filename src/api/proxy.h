/*
 * Traffic for guests: agent calls and previews of guest ports.
 *
 * Theory of operation: an exchange joins one client stream with one connection to the guest (upstream.h). First a
 * worker looks the session up and checks the caller; then a kept connection of that session is taken, or a worker opens
 * one (which wakes the session); for a port the agent's tunnel is asked for. From then on everything runs on the loop
 * and streams both ways at once, each direction holding at most one read and one write queue: the faster side is not
 * read while the slower one has more than HTTP_OUTPUT_HIGH_BYTES to take. The answer may overtake the request's body.
 *
 * A client that goes away closes the guest's side at once; a guest that goes away cuts the client's stream, or is
 * answered with 502 if nothing was sent yet. Nothing is retried and no redirect is followed.
 */
#ifndef SPACE_API_PROXY_H
#define SPACE_API_PROXY_H

#include "api/api.h"
#include "api/preview.h"

struct proxy;

struct proxy_stats {
	uint64_t exchanges;
	uint64_t upgrades;
	uint64_t failures; /* 502 and cut streams */
	uint64_t reused;   /* kept connections that served again */
	uint64_t bytes_to_guests;
	uint64_t bytes_from_guests;
	unsigned in_progress;
	unsigned idle;
};

int proxy_new(struct api *api, struct proxy **ret, struct error *e);
void proxy_begin(struct proxy *proxy, struct http_stream *s, const struct preview *preview);
/* The session's sandbox has ended or is about to be replaced: kept connections are dropped, and with `cut` the
 * exchanges in progress too. */
void proxy_session_changed(struct proxy *proxy, const char *session_id, int cut);
const struct proxy_stats *proxy_stats(const struct proxy *proxy);
/* Drops kept connections and timers, so that the loop can run out. */
void proxy_stop(struct proxy *proxy);
void proxy_free(struct proxy *proxy);

#endif
