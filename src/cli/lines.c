#include "cli/lines.h"

#include <string.h>

int lines_next(struct lines *lines, const char **ret, struct error *e)
{
	buf_consume(&lines->pending, lines->used);
	lines->used = 0;
	for (;;) {
		char *end = lines->pending.size ? memchr(lines->pending.data, '\n', lines->pending.size) : NULL;
		if (end) {
			lines->used = (size_t)(end - lines->pending.data) + 1;
			*end = '\0';
			if (end > lines->pending.data && end[-1] == '\r')
				end[-1] = '\0';
			*ret = lines->pending.data;
			return 1;
		}
		if (lines->pending.size > LINES_BYTES_MAX)
			return error_set(e, ERROR_TOO_LARGE, "the server sent a line of more than %u bytes", LINES_BYTES_MAX);
		char *room = buf_reserve(&lines->pending, 16384);
		if (!room)
			return error_set(e, ERROR_EXHAUSTED, "out of memory");
		ssize_t n = http_client_read(lines->client, room, 16384, e);
		if (n < 0)
			return (int)n;
		if (n == 0 && lines->pending.size == 0)
			return 0;
		if (n == 0) {
			*room = '\0';
			lines->used = lines->pending.size;
			*ret = lines->pending.data;
			return 1;
		}
		lines->pending.size += (size_t)n;
		lines->pending.data[lines->pending.size] = '\0';
	}
}

void lines_free(struct lines *lines)
{
	buf_free(&lines->pending);
}
