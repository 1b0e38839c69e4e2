#include "base/buf.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

char *buf_reserve(struct buf *b, size_t extra)
{
	if (extra > SIZE_MAX - b->size - 1)
		return NULL;
	size_t need = b->size + extra + 1;
	if (b->limit && need - 1 > b->limit)
		return NULL;
	if (need > b->capacity) {
		size_t capacity = b->capacity ? b->capacity : 256;
		while (capacity < need)
			capacity = capacity > SIZE_MAX / 2 ? need : capacity * 2;
		char *data = realloc(b->data, capacity);
		if (!data)
			return NULL;
		b->data = data;
		b->capacity = capacity;
	}
	return b->data + b->size;
}

int buf_append(struct buf *b, const void *data, size_t size)
{
	char *room = buf_reserve(b, size);
	if (!room)
		return b->limit && b->size + size > b->limit ? -EMSGSIZE : -ENOMEM;
	if (size)
		memcpy(room, data, size);
	b->size += size;
	b->data[b->size] = '\0';
	return 0;
}

int buf_append_string(struct buf *b, const char *text)
{
	return buf_append(b, text, strlen(text));
}

int buf_printf(struct buf *b, const char *format, ...)
{
	va_list args;
	va_start(args, format);
	va_list again;
	va_copy(again, args);
	int need = vsnprintf(NULL, 0, format, args);
	va_end(args);
	int r = -EINVAL;
	if (need >= 0) {
		char *room = buf_reserve(b, (size_t)need);
		r = room ? 0 : (b->limit ? -EMSGSIZE : -ENOMEM);
		if (room) {
			vsnprintf(room, (size_t)need + 1, format, again);
			b->size += (size_t)need;
		}
	}
	va_end(again);
	return r;
}

void buf_consume(struct buf *b, size_t n)
{
	if (n >= b->size) {
		b->size = 0;
	} else {
		memmove(b->data, b->data + n, b->size - n);
		b->size -= n;
	}
	if (b->data)
		b->data[b->size] = '\0';
}

void buf_free(struct buf *b)
{
	free(b->data);
	*b = (struct buf){.limit = b->limit};
}
