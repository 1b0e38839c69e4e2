/* Shared by server.c (listeners, sweep) and http1.c (the protocol); nobody else includes it. */
#ifndef SPACE_HTTP_SERVER_INTERNAL_H
#define SPACE_HTTP_SERVER_INTERNAL_H

#include "http/output.h"
#include "http/parser.h"
#include "http/server.h"

#define SERVER_LISTENERS_MAX 8
#define SERVER_SWEEP_MS 250

union server_handle {
	uv_handle_t handle;
	uv_stream_t stream;
	uv_tcp_t tcp;
	uv_pipe_t pipe;
};

struct connection;

struct http_server {
	uv_loop_t *loop;
	struct http_server_limits limits;
	void (*on_request)(void *context, struct http_stream *s);
	void *context;
	struct http_server_stats stats;
	union server_handle listeners[SERVER_LISTENERS_MAX];
	size_t listener_count;
	uv_timer_t sweep;
	uv_idle_t idle; /* runs deferred connections */
	int stopping;
	int closed;
	struct connection *connections; /* doubly linked */
	struct connection *deferred;    /* singly linked */
	uint64_t date_s;
	char date[40];
	char input[HTTP_STREAM_READ_BYTES]; /* one read at a time: the loop has one thread */
};

enum connection_state {
	CONNECTION_HEAD,     /* waits for a request head, or has a part of it */
	CONNECTION_EXCHANGE, /* has a stream */
	CONNECTION_RAW,      /* has an upgraded stream */
	CONNECTION_LINGER,   /* answered, sending side shut down, discards what the client still sends */
	CONNECTION_CLOSING
};

struct connection {
	union server_handle handle; /* first */
	struct http_server *server;
	struct connection *next, *previous;
	struct connection *next_deferred;
	int is_deferred;
	enum connection_state state;
	struct http_peer peer;
	struct http_parser parser;
	struct buf leftover; /* read, but not yet wanted */
	int reading;         /* uv_read_start is on */
	int reading_body;    /* the handler wants body bytes */
	int input_ended;     /* raw: the peer half-closed */
	int dead;            /* the peer is gone or must be cut */
	int close_after;     /* no further request on this connection */
	struct http_output output;
	int output_shut;
	uv_shutdown_t shutdown;
	uint64_t deadline_ms; /* of the state HEAD or LINGER */
	int head_begun;
	int has_stream;
	struct http1_answer {
		int is_chunked;
		int has_no_body;
		int64_t remaining; /* -1 = no announced length */
	} answer;
	struct http_stream stream;
};

/* server.c */
void server_defer(struct connection *c);
const char *server_date(struct http_server *server);

/* http1.c */
void http1_begin(struct connection *c);
void http1_advance(struct connection *c); /* deferred work: finish, cut, go on with the next request */
void http1_sweep(struct connection *c, uint64_t now_ms);
void http1_close(struct connection *c);

#endif
