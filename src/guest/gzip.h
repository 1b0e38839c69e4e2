/* Streaming gzip (RFC 1952) both ways; bytes go out through a callback in pieces of at most GZIP_CHUNK_BYTES. */
#ifndef SPACE_GUEST_GZIP_H
#define SPACE_GUEST_GZIP_H

#include <zlib.h>

#include "base/macros.h"

#define GZIP_CHUNK_BYTES 65536

typedef int (*gzip_sink)(void *context, const void *data, size_t size);

struct gzip {
	z_stream stream;
	int is_open;
	int is_decoder;
	int member_ended; /* decoder: at the end of a member, where the input may end or another may begin */
	unsigned char chunk[GZIP_CHUNK_BYTES];
};

/* 0 or -ENOMEM. End both with gzip_close(). */
int gzip_open_decoder(struct gzip *g);
int gzip_open_encoder(struct gzip *g);
/* 0, -EBADMSG for data that is not gzip or damaged, -ENOMEM, or what the sink returned. */
int gzip_feed(struct gzip *g, const void *data, size_t size, gzip_sink sink, void *context);
/* Ends the stream: the encoder writes its trailer, the decoder returns -EBADMSG if the input was cut. */
int gzip_finish(struct gzip *g, gzip_sink sink, void *context);
void gzip_close(struct gzip *g);

#endif
