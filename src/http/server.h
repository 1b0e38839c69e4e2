/*
 * The HTTP server on a libuv loop: listeners on TCP and unix sockets, named limits, and the sweep that ends connections
 * which keep us waiting. HTTP/1.x is spoken by http1.c; requests reach the program as streams (stream.h).
 */
#ifndef SPACE_HTTP_SERVER_H
#define SPACE_HTTP_SERVER_H

#include "http/stream.h"

struct http_server;

struct http_server_limits {
	size_t head_bytes;          /* greatest request head */
	unsigned connections_max;   /* of all listeners; more are answered 503 and closed */
	unsigned header_timeout_ms; /* from accept, or from a head's first byte, to the head's end */
	unsigned idle_timeout_ms;   /* kept-alive connection without a request */
	unsigned linger_timeout_ms; /* time a client gets to read a final answer while it still sends */
	unsigned stall_timeout_ms;  /* output that makes no progress at all */
};
#define HTTP_SERVER_LIMITS_DEFAULT                                                                                     \
	{                                                                                                                  \
		.head_bytes = 65536, .connections_max = 4096, .header_timeout_ms = 10000, .idle_timeout_ms = 90000,            \
		.linger_timeout_ms = 2000, .stall_timeout_ms = 900000,                                                         \
	}

struct http_server_stats {
	uint64_t accepted;
	uint64_t refused; /* over connections_max */
	uint64_t requests;
	uint64_t malformed; /* answered 400, 431, 501 or 505 by the transport */
	uint64_t timed_out; /* half-open, idle or stalled connections that were ended */
	uint64_t bytes_out;
	unsigned connections; /* open now */
	unsigned streams;     /* in progress now */
};

/* `on_request` is called for every request head; it must call http_stream_handle(). */
int http_server_new(uv_loop_t *loop, const struct http_server_limits *limits,
                    void (*on_request)(void *context, struct http_stream *s), void *context, struct http_server **ret,
                    struct error *e);
/* `host` is a numeric address. *ret_port (may be NULL) is the port in use, for port 0. */
int http_server_listen_tcp(struct http_server *server, const char *host, unsigned port, unsigned *ret_port,
                           struct error *e);
/* Replaces a stale socket of that name (one that nobody listens on); an active one is ERROR_CONFLICT. */
int http_server_listen_unix(struct http_server *server, const char *path, mode_t mode, struct error *e);
/* Takes over a bound or listening socket (also on failure). */
int http_server_listen_fd(struct http_server *server, int fd, struct error *e);
const struct http_server_stats *http_server_stats(const struct http_server *server);
/* Closes listeners and idle connections; streams in progress may end. The loop runs out once all have. */
void http_server_stop(struct http_server *server);
/* Cuts all connections. */
void http_server_abort(struct http_server *server);
/* After the loop has run out. */
void http_server_free(struct http_server *server);

#endif
