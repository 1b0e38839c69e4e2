/*
 * Which guest and port a request is for, and what it needs to get there.
 *
 * Forms: host name PORT-ID.DOMAIN, headers E2b-Sandbox-Id and E2b-Sandbox-Port, paths /v1/sessions/ID/ports/PORT/… and
 * /v1/sessions/ID/agent/…. The first two name sessions by id only: names can be guessed.
 */
#ifndef SPACE_API_PREVIEW_H
#define SPACE_API_PREVIEW_H

#include "http/stream.h"
#include "session/session.h"

#define PREVIEW_ID_BYTES 128
#define PREVIEW_PREFIX_BYTES 256

enum preview_kind {
	PREVIEW_AGENT,      /* /agent/…: the caller is authenticated here, the agent's token is added */
	PREVIEW_AGENT_PORT, /* the agent's port by host or port path: it checks the client's own token */
	PREVIEW_PORT        /* any other port of the guest */
};

struct preview {
	enum preview_kind kind;
	char id[PREVIEW_ID_BYTES];
	unsigned port;
	const char *target;                /* for the guest: points into the request's target, or "" for "/" */
	char prefix[PREVIEW_PREFIX_BYTES]; /* path form: what was cut off in front; else "" */
};

/* 1 = it is traffic for a guest, 0 = it is not, negative with an error: it tries to be, but is malformed. */
int preview_match(const char *domain, const struct http_request *request, struct preview *ret, struct error *e);

/* A token a client may present to a private session: from X-Access-Token, query or cookie space_token, in this
 * order.
 * Returns 1 if there is one (`to` has TOKEN_BYTES bytes; one that is too long becomes ""). */
#define PREVIEW_TOKEN_NAME "space_token"
int preview_token(const struct http_request *request, const char *target, char to[TOKEN_BYTES], int *ret_from_query);
/* Appends the target without its space_token parameter. */
int preview_strip_query(struct buf *to, const char *target);
/* Appends a Cookie value without space_token; appends nothing if nothing is left. */
int preview_strip_cookie(struct buf *to, const char *value);

#endif
