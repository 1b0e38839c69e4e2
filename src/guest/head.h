/*
 * The head of one HTTP/1.x request and the chunked coding of its body, from buffers.
 *
 * A head is collected whole (bounded) and cut into strings in place; its lines are checked here (CRLF only, no folding,
 * no NUL) before llhttp tokenises them without lenient flags. How the body is framed is decided once, from the head:
 * Transfer-Encoding together with Content-Length and any coding but a single "chunked" are refused.
 */
#ifndef SPACE_GUEST_HEAD_H
#define SPACE_GUEST_HEAD_H

#include <llhttp.h>
#include <sys/types.h>

#include "guest/request.h"

#define HEAD_FIELDS_MAX 100
#define HEAD_TRAILER_BYTES_MAX 16384

struct head {
	char *method;
	char *path;  /* as sent, up to '?' */
	char *query; /* after '?', "" if none */
	struct request_header fields[HEAD_FIELDS_MAX];
	size_t field_count;
	int keep_alive;
	int is_upgrade;
	int is_http_1_0;
	int is_chunked;
	int has_length;
	uint64_t length; /* of has_length */

	/* Private. */
	llhttp_t parser;
	size_t target_size;
	int parsed;
	int failed_status;
	int body_done;
	char *sink;
	size_t sink_size;
	size_t trailer_bytes;
};

/* Looks for the empty line that ends a head. *scanned (0 at first) remembers how far earlier calls came. Returns the
 * head's length, 0 if more bytes are needed, or the negative HTTP status to answer with. */
ssize_t head_find_end(const char *data, size_t size, size_t *scanned);
/* Cuts the head in data[0..size), as head_find_end() measured it, into strings in place. 0 or the HTTP status to
 * answer with. The strings live as long as `data`. */
int head_parse(struct head *h, char *data, size_t size);
/* Decodes chunked body bytes in place: *ret_decoded bytes stand at `data` afterwards. Returns how many bytes were
 * used or -EBADMSG; h->body_done is set behind the last chunk. */
ssize_t head_decode_chunks(struct head *h, char *data, size_t size, size_t *ret_decoded);
const char *head_field(const struct head *h, const char *name);
/* True if `token` is one of the comma-separated elements of `list` (case-blind). */
int head_list_has(const char *list, const char *token);

#endif
