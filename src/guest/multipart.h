/*
 * Push parser for multipart bodies (RFC 2046, RFC 7578): bytes come in pieces of any size, parts go out through
 * callbacks. It keeps no more than one part's header lines and half a delimiter.
 *
 *   PREAMBLE -> LINE -> HEADER -> DATA -> LINE -> … -> EPILOGUE
 */
#ifndef SPACE_GUEST_MULTIPART_H
#define SPACE_GUEST_MULTIPART_H

#include "base/error.h"

#define MULTIPART_BOUNDARY_MAX 70 /* RFC 2046, 5.1.1 */
#define MULTIPART_HEADER_BYTES_MAX 32768
#define MULTIPART_PREAMBLE_BYTES_MAX 65536
#define MULTIPART_PARTS_MAX 4096
#define MULTIPART_NAME_BYTES 256
#define MULTIPART_FILENAME_BYTES 4097

struct multipart_part {
	char name[MULTIPART_NAME_BYTES]; /* of the form field, "" if none */
	int has_filename;
	char filename[MULTIPART_FILENAME_BYTES]; /* with its folders, decoded to the bytes that the client meant */
};

struct multipart_callbacks {
	/* Each returns 0, or a negative errno that ends the parse and is handed through. */
	int (*begin)(void *context, const struct multipart_part *part);
	int (*data)(void *context, const void *data, size_t size);
	int (*end)(void *context);
	void *context;
};

enum multipart_state {
	MULTIPART_PREAMBLE,
	MULTIPART_LINE,
	MULTIPART_HEADER,
	MULTIPART_DATA,
	MULTIPART_EPILOGUE,
};

struct multipart {
	enum multipart_state state;
	char delimiter[MULTIPART_BOUNDARY_MAX + 8]; /* CR LF "--" boundary */
	size_t delimiter_size;
	size_t matched; /* bytes of the delimiter that have been seen last */
	size_t preamble_bytes;
	size_t part_count;
	size_t line_bytes; /* after a delimiter: bytes of the rest of its line so far */
	char line[4];
	size_t header_size;
	char header[MULTIPART_HEADER_BYTES_MAX];
	struct multipart_part part;
	struct error *error; /* of the feed that is under way */
};

/* Finds the boundary in a Content-Type value and starts the parser. ERROR_INVALID if there is none. */
int multipart_init(struct multipart *m, const char *content_type, struct error *e);
/* 0, ERROR_INVALID / ERROR_TOO_LARGE for a bad body, or what a callback returned (e is the callback's concern then). */
int multipart_feed(struct multipart *m, const void *data, size_t size, const struct multipart_callbacks *callbacks,
                   struct error *e);
/* At the end of the body: ERROR_INVALID unless the closing delimiter has been seen. */
int multipart_finish(const struct multipart *m, struct error *e);
/* Reads parameter `name` of a header value such as `form-data; name="a"; filename=b`. Quoted strings are unescaped.
 * Length, -ENOENT, -EINVAL or -ENAMETOOLONG. */
long multipart_parameter(const char *value, const char *name, char *to, size_t to_size);

#endif
