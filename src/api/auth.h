/* Who asks: an operator on the local socket, or the holder of an API key. */
#ifndef SPACE_API_AUTH_H
#define SPACE_API_AUTH_H

#include "http/stream.h"
#include "session/session.h"

#define AUTH_KEY_BYTES 128

struct auth {
	int is_local; /* the socket's file mode let the peer in */
	int has_key;
	char key[AUTH_KEY_BYTES];
};

/* Reads peer and headers (X-API-Key, or Authorization: Bearer). A key that is too long is treated as a wrong one. */
void auth_read(struct auth *auth, const struct http_stream *s);
/* The same without Authorization, which may belong to somebody else. */
void auth_read_key_header(struct auth *auth, const struct http_stream *s);
/* On a worker. A key counts even on the local socket: so a tenant's view can be had there too. */
int auth_check(struct session_manager *manager, const struct auth *auth, struct session_caller *ret, struct error *e);
/* True if the text has the form of an API key. */
int auth_looks_like_key(const char *text);

#endif
