/* Lines of a streamed answer (newline-delimited JSON, server-sent events). */
#ifndef SPACE_CLI_LINES_H
#define SPACE_CLI_LINES_H

#include "base/buf.h"
#include "http/client.h"

#define LINES_BYTES_MAX (4u * 1024 * 1024)

struct lines {
	struct http_client *client; /* borrowed */
	struct buf pending;
	size_t used; /* bytes of pending that the last line took */
};

/* The next line without its end: 1, 0 at the end of the answer, -errno. *ret is valid until the next call. */
int lines_next(struct lines *lines, const char **ret, struct error *e);
void lines_free(struct lines *lines);

#endif
