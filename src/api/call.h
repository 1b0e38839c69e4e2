/*
 * One call of the REST interface, from its head to its answer.
 *
 * On the loop: the route is found, the body is read (bounded in bytes and time). On a worker: the caller is
 * authenticated, the body parsed, the route's `run` works. On the loop again: the answer, or the route's own `finish`
 * for answers that are streams. A client that leaves does not stop a verb that has begun.
 */
#ifndef SPACE_API_CALL_H
#define SPACE_API_CALL_H

#include <jansson.h>

#include "api/api.h"
#include "api/auth.h"

#define CALL_PARAMETERS_MAX 2
#define CALL_PARAMETER_BYTES 256

struct api_route;

struct api_call {
	struct work work; /* first */
	struct api *api;
	struct http_stream *stream; /* NULL once the client has gone */
	const struct api_route *route;
	char parameters[CALL_PARAMETERS_MAX][CALL_PARAMETER_BYTES];
	json_t *query;   /* decoded, an object of strings; a repeated name makes an array */
	struct buf text; /* the request's body */
	size_t accounted;
	char request_id[ID_BYTES];
	struct auth auth;
	struct session_caller caller;
	/* For `run`. */
	json_t *body;     /* object; {} if there was none */
	int status;       /* 200 unless set */
	json_t *answer;   /* owned; NULL with status 204 */
	struct buf plain; /* an answer that is not JSON, with */
	const char *content_type;
	/* Outcome. */
	int result;
	struct error error;
	int submitted;
};

/* Starts a call for a route that was found; takes over the stream. */
void call_begin(struct api *api, struct http_stream *s, const struct api_route *route,
                const char parameters[CALL_PARAMETERS_MAX][CALL_PARAMETER_BYTES], json_t *query /* stolen */);
/* The answer for an error, on a stream that has not been answered. Messages about the inside of the daemon are for
 * operators only: others get the request's id. */
void call_answer_error(struct api *api, struct http_stream *s, const char *request_id, int is_admin,
                       const struct error *e, const struct http_header *headers, size_t count);
/* Parameter of the path, of the query (NULL if absent or repeated). */
const char *call_query(const struct api_call *call, const char *name);
/* Frees a call whose stream was handed to somebody else by `finish`. */
void call_free(struct api_call *call);

#endif
