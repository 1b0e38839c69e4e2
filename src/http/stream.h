/*
 * One request and its answer, whatever protocol version carries them.
 *
 * Theory of operation: a server (server.h) makes a stream for each request head and calls its request function, which
 * must call http_stream_handle() before it returns. From then on the handler gets body bytes (only after
 * http_stream_read(s, 1)), and answers with respond, write…, end. `closed` is the last call for every stream, exactly
 * once, always from the loop and never from inside another call on the stream; the pointer is dead afterwards. All
 * functions belong to the loop's thread.
 *
 * Back-pressure: write() returns 1 once more than HTTP_STREAM_HIGH_BYTES wait to be sent; the handler then stops
 * producing until `drained`. Reading is stopped with http_stream_read(s, 0); what was read already (at most
 * HTTP_STREAM_READ_BYTES) may still be delivered.
 */
#ifndef SPACE_HTTP_STREAM_H
#define SPACE_HTTP_STREAM_H

#include <sys/types.h>
#include <uv.h>

#include "base/buf.h"
#include "base/error.h"
#include "http/client.h"

#define HTTP_STREAM_READ_BYTES 65536
#define HTTP_STREAM_HIGH_BYTES 65536

struct http_request {
	const char *method;
	const char *target; /* as sent */
	const struct http_header *headers;
	size_t header_count;
	int has_body;
	int64_t content_length; /* -1 = unknown (chunked) */
	unsigned minor;         /* HTTP/1.minor */
	int is_upgrade;         /* asks for another protocol on this connection */
	int expects_continue;
	int is_head;
};

struct http_peer {
	int is_unix;
	uid_t uid; /* of a unix peer */
	gid_t gid;
	pid_t pid;
	char address[64]; /* text for X-Forwarded-For; "" for a unix peer */
};

struct http_stream;

struct http_stream_handler {
	void (*body)(struct http_stream *s, void *context, const char *data, size_t size);
	/* The request's body is complete; after an upgrade: the peer sends no more. */
	void (*body_end)(struct http_stream *s, void *context);
	void (*drained)(struct http_stream *s, void *context);
	/* `complete` = the whole answer was handed to the kernel; else the client went away or broke the protocol. */
	void (*closed)(struct http_stream *s, void *context, int complete);
};

struct http_stream_ops {
	void (*read)(struct http_stream *s, int on);
	int (*interim)(struct http_stream *s, int status, const struct http_header *headers, size_t count);
	int (*respond)(struct http_stream *s, int status, const struct http_header *headers, size_t count, int64_t length);
	int (*upgrade)(struct http_stream *s, const struct http_header *headers, size_t count);
	int (*write)(struct http_stream *s, const void *data, size_t size);
	void (*end)(struct http_stream *s);
	void (*abort)(struct http_stream *s);
	size_t (*queued)(const struct http_stream *s);
};

/* What the transport fills in; handlers use the functions below. */
struct http_stream {
	const struct http_stream_ops *ops;
	const struct http_stream_handler *handler;
	void *context;
	uv_loop_t *loop;
	struct http_request request;
	const struct http_peer *peer;
	int answered; /* the final head was sent */
	int status;   /* that head's */
	int ended;
	uint64_t body_deadline_ms; /* monotonic; the request's body must be complete by then; 0 = none */
};

void http_stream_handle(struct http_stream *s, const struct http_stream_handler *handler, void *context);
/* Case-blind; the first of that name; NULL if absent. */
const char *http_request_header(const struct http_request *r, const char *name);
/* Body flow (or raw bytes after an upgrade) on or off; off at first. */
void http_stream_read(struct http_stream *s, int on);
/* 100 (Continue) and other 1xx answers but 101. */
int http_stream_interim(struct http_stream *s, int status, const struct http_header *headers, size_t count);
/* Sends the answer's head. `length` -1 = not known (chunked, or until close for HTTP/1.0). Framing and connection
 * headers are the transport's own and must not be among `headers`. 0 or -errno. */
int http_stream_respond(struct http_stream *s, int status, const struct http_header *headers, size_t count,
                        int64_t length);
/* 101, and from now on raw bytes both ways. `headers` must name the protocol in Upgrade. */
int http_stream_upgrade(struct http_stream *s, const struct http_header *headers, size_t count);
/* 0, 1 = taken, but wait for drained before writing more, -errno = the client is gone (closed follows). */
int http_stream_write(struct http_stream *s, const void *data, size_t size);
/* The answer is complete (raw: no more will be sent). An answer shorter than its announced length is cut. */
void http_stream_end(struct http_stream *s);
/* Cuts the connection so that the client cannot take the answer for complete. */
void http_stream_abort(struct http_stream *s);
size_t http_stream_queued(const struct http_stream *s);

/* A whole answer at once. `content_type` NULL = no body. */
void http_stream_answer(struct http_stream *s, int status, const char *content_type, const void *body, size_t size,
                        const struct http_header *headers, size_t count);
/* Appends {"code","message","details":{}} as every error body of ours looks. */
int http_error_body(struct buf *ret, const char *code, const char *message);
const char *http_status_text(int status);

#endif
