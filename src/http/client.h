/*
 * A blocking HTTP/1.1 client on one kept-alive connection: for worker threads that talk to a guest's agent, and for the
 * CLI. Answers come from hostile guests: heads and bodies are bounded, parsing is strict (llhttp without lenient
 * flags).
 */
#ifndef SPACE_HTTP_CLIENT_H
#define SPACE_HTTP_CLIENT_H

#include <sys/types.h>

#include "base/buf.h"
#include "base/error.h"

#define HTTP_HEAD_BYTES_MAX 65536
#define HTTP_HEADERS_MAX 128

struct http_header {
	const char *name;
	const char *value;
};

struct http_client;

/* Takes ownership of a connected stream socket (also on failure). `host` goes into the Host header. */
int http_client_from_fd(int fd, const char *host, struct http_client **ret, struct error *e);
int http_client_connect_unix(const char *path, const char *host, struct http_client **ret, struct error *e);
/* `url` is "http://HOST:PORT" or "unix:/path". */
int http_client_connect_url(const char *url, unsigned timeout_ms, struct http_client **ret, struct error *e);
void http_client_free(struct http_client *client);
/* The socket, for poll(); stays the client's. */
int http_client_fd(const struct http_client *client);

struct http_call {
	const char *method;
	const char *target; /* origin form, "/path?query" */
	const struct http_header *headers;
	size_t header_count;
	const void *body; /* NULL = none */
	size_t body_size;
	int stream_body;     /* the body follows through http_client_write(), sent chunked */
	unsigned timeout_ms; /* for the whole call of http_client_call(), for each read of a stream; 0 = none */
	size_t answer_limit; /* greatest body http_client_call() takes; 0 = 16 MiB */
};

struct http_answer {
	int status;
	struct buf head;                              /* raw header block, owned */
	struct buf body;                              /* owned */
	struct http_header headers[HTTP_HEADERS_MAX]; /* point into head; names in lower case */
	size_t header_count;
	int keep_alive;
};
void http_answer_free(struct http_answer *answer);
/* Case-blind; NULL if absent. */
const char *http_answer_header(const struct http_answer *answer, const char *name);

/* One whole exchange. A status of 400 and above is not an error here. */
int http_client_call(struct http_client *client, const struct http_call *call, struct http_answer *ret,
                     struct error *e);

/* Streaming: start sends the head (and body if given), then any writes (only with stream_body), then finish_body, then
 * read_head waits for the answer's head, then read returns body bytes: count, 0 at the end, -errno (-ETIMEDOUT).
 * Writing and reading may happen in two threads. After 101 the bytes on http_client_fd() are the peer's, but first
 * take what was read ahead with http_client_read(). */
int http_client_start(struct http_client *client, const struct http_call *call, struct error *e);
int http_client_write(struct http_client *client, const void *data, size_t size, struct error *e);
int http_client_finish_body(struct http_client *client, struct error *e);
int http_client_read_head(struct http_client *client, struct http_answer *ret, struct error *e);
ssize_t http_client_read(struct http_client *client, void *data, size_t size, struct error *e);
/* True while the connection can carry another call. */
int http_client_reusable(const struct http_client *client);

#endif
