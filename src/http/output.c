#include "http/output.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/text.h"

size_t http_output_queued(const struct http_output *o)
{
	return o->flight.size + o->pending.size;
}

static void flush(struct http_output *o);

static void on_written(uv_write_t *request, int status)
{
	struct http_output *o = request->data;
	o->writing = 0;
	o->flight.size = 0;
	o->progress_ms = time_monotonic_ms();
	if (status < 0) {
		o->failed = 1;
		o->pending.size = 0;
	}
	flush(o);
	int drained = o->wants_drain && !o->failed && http_output_queued(o) <= HTTP_OUTPUT_LOW_BYTES;
	if (drained)
		o->wants_drain = 0;
	o->moved(o->context, drained);
}

static void flush(struct http_output *o)
{
	if (o->writing || o->failed || !o->pending.size)
		return;
	struct buf spare = o->flight;
	o->flight = o->pending;
	o->pending = spare;
	o->pending.size = 0;
	uv_buf_t buf = uv_buf_init(o->flight.data, (unsigned)o->flight.size);
	o->request.data = o;
	if (uv_write(&o->request, o->stream, &buf, 1, on_written) < 0) {
		o->flight.size = 0;
		o->failed = 1;
	} else {
		o->writing = 1;
	}
}

int http_output_write(struct http_output *o, uv_buf_t *bufs, unsigned count)
{
	if (o->failed)
		return -EPIPE;
	size_t sent = 0;
	if (!http_output_queued(o)) {
		int r = uv_try_write(o->stream, bufs, count);
		if (r < 0 && r != UV_EAGAIN) {
			o->failed = 1;
			return -EPIPE;
		}
		sent = r > 0 ? (size_t)r : 0;
		o->progress_ms = time_monotonic_ms();
	}
	for (unsigned i = 0; i < count; i++) {
		size_t skip = MIN(sent, bufs[i].len);
		sent -= skip;
		o->total += bufs[i].len;
		if (skip == bufs[i].len)
			continue;
		if (buf_append(&o->pending, bufs[i].base + skip, bufs[i].len - skip) < 0) {
			o->failed = 1;
			return -ENOMEM;
		}
	}
	flush(o);
	if (o->failed)
		return -EPIPE;
	if (http_output_queued(o) <= HTTP_OUTPUT_HIGH_BYTES)
		return 0;
	o->wants_drain = 1;
	return 1;
}

int http_output_bytes(struct http_output *o, const void *data, size_t size)
{
	uv_buf_t buf = uv_buf_init((char *)(uintptr_t)data, (unsigned)size);
	return size ? http_output_write(o, &buf, 1) : 0;
}

int http_output_chunk(struct http_output *o, const void *data, size_t size)
{
	char line[24];
	int n = snprintf(line, sizeof(line), "%zx\r\n", size);
	uv_buf_t bufs[3] = {uv_buf_init(line, (unsigned)n), uv_buf_init((char *)(uintptr_t)data, (unsigned)size),
	                    uv_buf_init((char *)(uintptr_t) "\r\n", 2)};
	return http_output_write(o, bufs, 3);
}

void http_output_shrink(struct http_output *o)
{
	if (http_output_queued(o) || o->writing)
		return;
	buf_free(&o->flight);
	buf_free(&o->pending);
}

void http_output_free(struct http_output *o)
{
	buf_free(&o->flight);
	buf_free(&o->pending);
}
