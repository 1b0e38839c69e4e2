#include "guest/gzip.h"

#include <errno.h>
#include <string.h>

/* 15 bits of window; 16 more select the gzip format. */
#define GZIP_WINDOW_BITS (15 + 16)
/* Downloads are compressed while they are sent: speed counts for more than ratio. */
#define GZIP_LEVEL 1
#define GZIP_MEMORY_LEVEL 8

int gzip_open_decoder(struct gzip *g)
{
	memset(&g->stream, 0, sizeof(g->stream));
	g->is_decoder = 1;
	g->member_ended = 0;
	g->is_open = inflateInit2(&g->stream, GZIP_WINDOW_BITS) == Z_OK;
	return g->is_open ? 0 : -ENOMEM;
}

int gzip_open_encoder(struct gzip *g)
{
	memset(&g->stream, 0, sizeof(g->stream));
	g->is_decoder = 0;
	g->member_ended = 0;
	g->is_open = deflateInit2(&g->stream, GZIP_LEVEL, Z_DEFLATED, GZIP_WINDOW_BITS, GZIP_MEMORY_LEVEL,
	                          Z_DEFAULT_STRATEGY) == Z_OK;
	return g->is_open ? 0 : -ENOMEM;
}

/* One call into zlib and one to the sink. Returns zlib's positive state or 0, or -errno. */
static int step(struct gzip *g, int flush, gzip_sink sink, void *context)
{
	g->stream.next_out = g->chunk;
	g->stream.avail_out = sizeof(g->chunk);
	int z = g->is_decoder ? inflate(&g->stream, Z_NO_FLUSH) : deflate(&g->stream, flush);
	if (z == Z_MEM_ERROR)
		return -ENOMEM;
	if (z != Z_OK && z != Z_STREAM_END && z != Z_BUF_ERROR)
		return -EBADMSG;
	size_t made = sizeof(g->chunk) - g->stream.avail_out;
	if (made > 0) {
		int r = sink(context, g->chunk, made);
		if (r < 0)
			return r;
	}
	return z == Z_STREAM_END ? Z_STREAM_END : 0;
}

int gzip_feed(struct gzip *g, const void *data, size_t size, gzip_sink sink, void *context)
{
	union {
		const void *in;
		Bytef *out;
	} cast = {.in = data}; /* zlib does not write there, its type just lacks the const */
	if (size == 0)
		return 0;
	g->stream.next_in = cast.out;
	g->stream.avail_in = (uInt)size;
	do {
		if (g->member_ended) {
			if (inflateReset(&g->stream) != Z_OK)
				return -EBADMSG;
			g->member_ended = 0;
		}
		int r = step(g, Z_NO_FLUSH, sink, context);
		if (r < 0)
			return r;
		if (r == Z_STREAM_END)
			g->member_ended = 1;
		/* A full output buffer may mean that more waits inside zlib although its input is used up. */
	} while (g->stream.avail_in > 0 || (g->stream.avail_out == 0 && !g->member_ended));
	return 0;
}

int gzip_finish(struct gzip *g, gzip_sink sink, void *context)
{
	if (g->is_decoder)
		return g->member_ended ? 0 : -EBADMSG;
	g->stream.next_in = NULL;
	g->stream.avail_in = 0;
	int r;
	do
		r = step(g, Z_FINISH, sink, context);
	while (r == 0);
	return r < 0 ? r : 0;
}

void gzip_close(struct gzip *g)
{
	if (!g->is_open)
		return;
	if (g->is_decoder)
		inflateEnd(&g->stream);
	else
		deflateEnd(&g->stream);
	g->is_open = 0;
}
