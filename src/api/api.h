/*
 * The API: everything between the HTTP server and the session manager. One struct api per daemon, on one loop.
 *
 * A request takes one of two ways: a call (call.h) is answered by a handler of the route table (router.h) that runs on
 * a worker; traffic for a guest is an exchange of the proxy (proxy.h).
 */
#ifndef SPACE_API_API_H
#define SPACE_API_API_H

#include <uv.h>

#include "api/work.h"
#include "http/server.h"
#include "session/session.h"

#define API_BODY_BYTES_MAX (1024 * 1024)
/* Bodies of all calls that are being read: clients without a valid key cannot make the daemon keep more. */
#define API_BODIES_BYTES_MAX (64 * 1024 * 1024)
#define API_BODY_TIMEOUT_MS 30000

struct events;
struct proxy;

struct api {
	uv_loop_t *loop;
	struct session_manager *manager;
	struct http_server *server;
	struct work_queue work;
	struct events *events;
	struct proxy *proxy;
	char domain[64];
	char listen[80]; /* ADDRESS:PORT in use, or "none" */
	uint64_t started_ms;
	size_t bodies_bytes;
	uint64_t calls_in_progress;
	uint64_t answers_by_class[6]; /* 1xx … 5xx */
};

int api_new(uv_loop_t *loop, struct session_manager *manager, const char *domain, struct api **ret, struct error *e);
/* No more connections; open ones end when their answers are complete, streams of events at once. */
void api_stop(struct api *api);
/* Cuts what is still open. */
void api_abort(struct api *api);
/* After the loop has run out and the session manager is freed: its threads publish events until then. */
void api_free(struct api *api);

#endif
