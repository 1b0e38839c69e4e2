/*
 * One HTTP/1.x message at a time, request or answer, from bytes of a hostile peer.
 *
 * The head is collected whole (bounded), each line's framing is checked here (CRLF only, no folding, no NUL), then it
 * is tokenised by llhttp without lenient flags. Framing of the body is decided once, from the head: Transfer-Encoding
 * together with Content-Length, any coding but a single "chunked", and repeated lengths are refused, so that two
 * parsers in a row can never disagree about where a message ends. Bodies of known length are only counted.
 */
#ifndef SPACE_HTTP_PARSER_H
#define SPACE_HTTP_PARSER_H

#include <llhttp.h>
#include <sys/types.h>

#include "base/buf.h"
#include "base/error.h"
#include "http/client.h"

enum http_parser_kind { HTTP_PARSER_REQUEST, HTTP_PARSER_ANSWER };

enum http_framing {
	HTTP_FRAMING_NONE,
	HTTP_FRAMING_LENGTH,
	HTTP_FRAMING_CHUNKED,
	HTTP_FRAMING_UNTIL_CLOSE /* answers only */
};

struct http_parser {
	enum http_parser_kind kind;
	size_t head_limit;
	int keep_case;   /* set by the caller: header names stay as sent; else they become lower case */
	int head_answer; /* set by the caller for an answer to HEAD: it has no body whatever its head says */

	/* Valid once head_done. Strings point into `head`. */
	struct buf head; /* owned; may be taken with TAKE (struct copy and zeroing) once head_done */
	int head_done;
	const char *method; /* requests */
	const char *target; /* requests, as sent */
	int status;         /* answers */
	unsigned minor;     /* HTTP/1.minor */
	struct http_header headers[HTTP_HEADERS_MAX];
	size_t header_count;
	enum http_framing framing;
	uint64_t content_length; /* of HTTP_FRAMING_LENGTH: bytes still to come */
	uint64_t body_length;    /* the same, as announced */
	int keep_alive;
	int upgrade;        /* request: "Connection: upgrade" and Upgrade; answer: 101 */
	int done;           /* the whole message was read */
	int suggest_status; /* after an error: what to answer a client with (400, 431, 501, 505) */

	/* Private. */
	llhttp_t llhttp;
	size_t line_start;
	size_t scanned;
	size_t skipped; /* empty lines in front of a message */
	int too_many;
	int (*sink)(void *context, const char *data, size_t size);
	void *sink_context;
	size_t trailer_bytes;
};

void http_parser_init(struct http_parser *p, enum http_parser_kind kind, size_t head_limit);
/* Ready for the next message of the connection; keeps kind and limit. */
void http_parser_reset(struct http_parser *p);
void http_parser_free(struct http_parser *p);

/* Takes bytes for the head until head_done; returns how many were used (the rest belongs to the body) or -errno. */
ssize_t http_parser_head(struct http_parser *p, const char *data, size_t size, struct error *e);
/* Takes bytes of the body, gives each decoded run to `sink` (a negative return of which ends the call with it), sets
 * done at the end of the message. Returns how many bytes were used or -errno. */
ssize_t http_parser_body(struct http_parser *p, const char *data, size_t size,
                         int (*sink)(void *context, const char *data, size_t size), void *context, struct error *e);
/* The peer closed its side: 0 if that ends the message properly (done is set), else ERROR_UNAVAILABLE. */
int http_parser_eof(struct http_parser *p, struct error *e);
/* Case-blind search; NULL if absent. */
const char *http_parser_header(const struct http_parser *p, const char *name);
/* True if `token` is one of the comma-separated elements of `list` (case-blind; NULL list = none). */
int http_list_has(const char *list, const char *token);
/* True if the text may stand as a header value (no control characters but tab), as a header name (a token). */
int http_value_is_valid(const char *value);
int http_name_is_valid(const char *name);

#endif
