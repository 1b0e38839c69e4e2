/* A growable byte buffer. Zero-initialise it; every append can fail with -ENOMEM or -EMSGSIZE and then changes nothing.
 */
#ifndef SPACE_BASE_BUF_H
#define SPACE_BASE_BUF_H

#include "base/macros.h"

struct buf {
	char *data; /* owned; always followed by a NUL that is not counted */
	size_t size;
	size_t capacity;
	size_t limit; /* greatest size allowed, 0 = no limit */
};

int buf_append(struct buf *b, const void *data, size_t size);
int buf_append_string(struct buf *b, const char *text);
int buf_printf(struct buf *b, const char *format, ...) PRINTF_LIKE(2, 3);
/* Makes room for `extra` more bytes after size and returns a pointer there, or NULL. */
char *buf_reserve(struct buf *b, size_t extra);
/* Drops the first n bytes. */
void buf_consume(struct buf *b, size_t n);
void buf_free(struct buf *b);
#define CLEANUP_BUF __attribute__((cleanup(buf_free)))

#endif
