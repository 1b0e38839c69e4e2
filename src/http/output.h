/*
 * Buffered output to a libuv stream: writes at once what the socket takes, keeps the rest in order, and tells when to
 * stop and when to go on. Used by both ends of the proxy: the server's connections and those to guests.
 */
#ifndef SPACE_HTTP_OUTPUT_H
#define SPACE_HTTP_OUTPUT_H

#include <uv.h>

#include "base/buf.h"

#define HTTP_OUTPUT_HIGH_BYTES 65536
#define HTTP_OUTPUT_LOW_BYTES 16384

struct http_output {
	uv_stream_t *stream;
	/* Called from the loop after bytes left or failed to leave the queue; `drained` once the queue has shrunk after a
	 * write returned 1. */
	void (*moved)(void *context, int drained);
	void *context;
	struct buf flight; /* being written */
	struct buf pending;
	int writing;
	int wants_drain;
	int failed; /* the peer does not take any more */
	uint64_t progress_ms;
	uint64_t total;
	uv_write_t request;
};

/* 0, 1 = taken, but wait for drained, -EPIPE = failed, -ENOMEM. */
int http_output_write(struct http_output *o, uv_buf_t *bufs, unsigned count);
size_t http_output_queued(const struct http_output *o);
/* One chunk of a chunked body; size > 0. */
int http_output_chunk(struct http_output *o, const void *data, size_t size);
int http_output_bytes(struct http_output *o, const void *data, size_t size);
/* Gives back memory while nothing is queued. */
void http_output_shrink(struct http_output *o);
/* After the stream's handle was closed. */
void http_output_free(struct http_output *o);

#endif
