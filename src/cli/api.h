/*
 * Calls to spaced: over its unix socket, or over TCP with an API key.
 *
 * An object belongs to one thread; api_clone() makes another for a second one. Errors carry the server's message; what
 * the user may do about them comes from api_hint().
 */
#ifndef SPACE_CLI_API_H
#define SPACE_CLI_API_H

#include <jansson.h>

#include "base/error.h"
#include "http/client.h"

#define API_SOCKET_DEFAULT "/run/space/space.sock"
#define API_CONNECT_TIMEOUT_MS 10000
#define API_CALL_TIMEOUT_MS 600000

struct api;

/* Any of the three may be NULL: then SPACE_SOCKET, SPACE_URL with SPACE_API_KEY, the default socket are looked at in
 * this order. Does not connect. */
int api_new(const char *socket_path, const char *url, const char *key, struct api **ret, struct error *e);
struct api *api_clone(const struct api *api);
void api_free(struct api *api);
/* "http://HOST:PORT" or "unix:/path". */
const char *api_url(const struct api *api);
int api_is_local(const struct api *api);

/* One exchange of JSON. `body` NULL = none; *ret NULL for an empty answer; `ret` may be NULL. */
int api_call(struct api *api, const char *method, const char *target, const json_t *body, json_t **ret,
             struct error *e);
/* The same for the guest agent's own calls, as `user` (NULL = the default user). */
int api_agent_call(struct api *api, const char *session, const char *method, const char *user, const json_t *body,
                   json_t **ret, struct error *e);

struct api_stream_call {
	const char *method;
	const char *target;
	const char *user; /* NULL = default */
	const char *content_type;
	const char *accept;
	const char *last_event_id; /* NULL = none */
	const void *body;
	size_t body_size;
	int stream_body;          /* the caller writes the body and then calls api_stream_head() */
	unsigned read_timeout_ms; /* for each read of the answer; 0 = none */
	/* Called with the client once it is connected, so that another thread may shut its socket down, and with NULL
	 * before it is freed after a failure. May be NULL. */
	void (*publish)(void *context, struct http_client *client);
	void *context;
};
/* Opens a connection of its own. Without stream_body the answer's head has been read and was good. */
int api_stream(const struct api *api, const struct api_stream_call *call, struct http_client **ret, struct error *e);
/* Reads the head and turns a status of 400 and above into an error. */
int api_stream_head(struct http_client *client, struct error *e);
/* Like api_call() with a body that is JSON text already. */
int api_call_text(struct api *api, const struct api_stream_call *call, json_t **ret, struct error *e);
/* From another thread: ends the call in progress, and all later ones fail. */
void api_cut(struct api *api);
/* Limit for one whole api_call(); API_CALL_TIMEOUT_MS unless set. */
void api_set_timeout(struct api *api, unsigned timeout_ms);
/* True if no connection could be made at all: nothing was sent. */
int api_is_refused(const struct error *e);
/* True if the last error answer of this thread was the guest agent's own and not spaced's. */
int api_is_from_guest(void);
/* True if `e` came from the connection and not from an answer: the call may or may not have been carried out. */
int api_is_connection_error(const struct error *e);

/* PREFIX, the percent-encoded word, SUFFIX; abort()s without memory. free() it. */
char *api_path(const char *prefix, const char *word, const char *suffix);
/* "/v1/sessions/ID" + suffix. */
char *api_session_path(const char *session, const char *suffix);
/* Percent-encodes one path segment or query value. */
int api_escape(struct buf *to, const char *text);

/* What to do next about an error, or NULL. `kind` is what the call was about: "session", "template", … or NULL. */
const char *api_hint(const struct api *api, const struct error *e, const char *kind);

#endif
