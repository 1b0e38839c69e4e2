/*
 * A connection to a guest, on the loop: HTTP/1.1 towards its agent or, through the agent's tunnel, towards a server in
 * the guest; after an upgrade, raw bytes.
 *
 * What comes from a guest is hostile: heads are bounded and parsed strictly, nothing is followed, at most one read is
 * in memory. Callbacks may close the connection. It carries the claim that session_open() made and gives it back when
 * it is closed.
 */
#ifndef SPACE_API_UPSTREAM_H
#define SPACE_API_UPSTREAM_H

#include "api/api.h"
#include "http/output.h"
#include "http/parser.h"

struct upstream;

struct upstream_handler {
	void (*head)(void *context, struct http_parser *answer); /* final, or 101 */
	void (*interim)(void *context, struct http_parser *answer);
	void (*body)(void *context, const char *data, size_t size); /* raw bytes after upstream_set_raw() */
	/* The answer's body is complete; raw: the guest sends no more. */
	void (*body_end)(void *context);
	void (*drained)(void *context);
	/* The connection broke; the upstream is closed already. */
	void (*failed)(void *context, const struct error *e);
};

/* Takes over the descriptor and the session's claim (also on failure). */
int upstream_new(struct api *api, int fd, const char *session_id, struct upstream **ret, struct error *e);
void upstream_attach(struct upstream *u, const struct upstream_handler *handler, void *context);
/* Makes ready for the answer to another request. */
void upstream_expect(struct upstream *u, int head_answer);
/* 0, 1 = wait for drained, -errno (failed follows from the loop). */
int upstream_write(struct upstream *u, const void *data, size_t size);
int upstream_write_chunk(struct upstream *u, const void *data, size_t size);
/* Half-closes after all output. */
void upstream_shutdown(struct upstream *u);
void upstream_read(struct upstream *u, int on);
/* From the head callback of a 101: all that follows is raw. */
void upstream_set_raw(struct upstream *u);
/* From the head callback of a tunnel's 101: HTTP starts anew on the same connection. */
void upstream_restart(struct upstream *u);
/* True if its answer is complete and it may carry another request. */
int upstream_is_reusable(const struct upstream *u);
const char *upstream_session(const struct upstream *u);
/* No more callbacks; closes the connection and gives the claim back. NULL is fine. */
void upstream_close(struct upstream *u);

/* Gives a claim of session_open() back, on a worker. */
void upstream_give_back(struct api *api, const char *session_id);

#endif
