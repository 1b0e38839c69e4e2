#include "http/parser.h"

#include <ctype.h>
#include <errno.h>
#include <string.h>
#include <strings.h>

/* Empty lines a robust server should skip in front of a request (RFC 9112, 2.2). */
#define SKIPPED_BYTES_MAX 8
/* Trailers are read and dropped. */
#define TRAILER_BYTES_MAX 16384

static int on_headers_complete(llhttp_t *l)
{
	struct http_parser *p = l->data;
	/* The parser stops here: whether and how a body follows is decided by decide_framing(). */
	return p->head_done ? 0 : HPE_PAUSED;
}

static int on_header_field(llhttp_t *l, const char *at, size_t size)
{
	struct http_parser *p = l->data;
	if (p->head_done) {
		p->trailer_bytes += size;
		return p->trailer_bytes > TRAILER_BYTES_MAX ? -1 : 0;
	}
	if (p->header_count == HTTP_HEADERS_MAX) {
		p->too_many = 1;
		return -1;
	}
	/* Lengths are kept in `value` until the head is cut into strings: spans of one execute call are contiguous. */
	struct http_header *h = &p->headers[p->header_count++];
	h->name = at;
	h->value = at + size;
	return 0;
}

static int on_header_value(llhttp_t *l, const char *at, size_t size)
{
	struct http_parser *p = l->data;
	if (p->head_done) {
		p->trailer_bytes += size;
		return p->trailer_bytes > TRAILER_BYTES_MAX ? -1 : 0;
	}
	return 0;
}

static int on_body(llhttp_t *l, const char *at, size_t size)
{
	struct http_parser *p = l->data;
	return p->sink(p->sink_context, at, size) < 0 ? HPE_USER : 0;
}

static int on_message_complete(llhttp_t *l)
{
	struct http_parser *p = l->data;
	p->done = 1;
	return HPE_PAUSED;
}

static const llhttp_settings_t settings = {
    .on_header_field = on_header_field,
    .on_header_value = on_header_value,
    .on_headers_complete = on_headers_complete,
    .on_body = on_body,
    .on_message_complete = on_message_complete,
};

void http_parser_init(struct http_parser *p, enum http_parser_kind kind, size_t head_limit)
{
	*p = (struct http_parser){.kind = kind, .head_limit = head_limit};
	llhttp_init(&p->llhttp, kind == HTTP_PARSER_REQUEST ? HTTP_REQUEST : HTTP_RESPONSE, &settings);
	p->llhttp.data = p;
}

void http_parser_free(struct http_parser *p)
{
	buf_free(&p->head);
}

void http_parser_reset(struct http_parser *p)
{
	enum http_parser_kind kind = p->kind;
	size_t limit = p->head_limit;
	int keep_case = p->keep_case;
	buf_free(&p->head);
	http_parser_init(p, kind, limit);
	p->keep_case = keep_case;
}

static int refuse(struct http_parser *p, int status, struct error *e, const char *what)
{
	p->suggest_status = status;
	/* Our own request is not to blame for an answer that cannot be understood. */
	enum error_code code = p->kind == HTTP_PARSER_ANSWER ? ERROR_UNAVAILABLE
	                       : status == 431               ? ERROR_TOO_LARGE
	                                                     : ERROR_INVALID;
	return error_set(e, code, "malformed HTTP %s: %s", p->kind == HTTP_PARSER_REQUEST ? "request" : "answer", what);
}

/* Looks at the bytes not yet scanned; returns 1 once the empty line was seen (scanned is then the head's size). */
static int scan_lines(struct http_parser *p, struct error *e)
{
	const char *s = p->head.data;
	while (p->scanned < p->head.size) {
		size_t i = p->scanned;
		unsigned char c = (unsigned char)s[i];
		if (c == '\r') {
			if (i + 1 == p->head.size)
				return 0; /* its partner has not arrived */
			if (s[i + 1] != '\n')
				return refuse(p, 400, e, "carriage return without line feed");
			p->scanned += 2;
			if (i == p->line_start)
				return 1;
			p->line_start = p->scanned;
			continue;
		}
		if (c == '\n')
			return refuse(p, 400, e, "line feed without carriage return");
		if (c == 0)
			return refuse(p, 400, e, "NUL byte in the head");
		if (i == p->line_start && (c == ' ' || c == '\t'))
			return refuse(p, 400, e, i ? "folded header line" : "blank in front of the first line");
		p->scanned++;
	}
	return 0;
}

/* Cuts the request or status line into strings. llhttp has accepted it, so the separators are where they should be. */
static int cut_first_line(struct http_parser *p, struct error *e)
{
	char *line = p->head.data;
	char *end = strstr(line, "\r\n");
	if (!end)
		return refuse(p, 400, e, "no first line");
	*end = '\0';
	if (p->kind == HTTP_PARSER_ANSWER) {
		p->status = p->llhttp.status_code;
		return 0;
	}
	char *target = strchr(line, ' ');
	char *version = target ? strrchr(line, ' ') : NULL;
	if (!target || version == target)
		return refuse(p, 400, e, "request line without target and version");
	*target++ = '\0';
	*version = '\0';
	for (const char *c = target; *c; c++) {
		if ((unsigned char)*c <= ' ' || (unsigned char)*c == 0x7f)
			return refuse(p, 400, e, "blank or control character in the target");
	}
	p->method = line;
	p->target = target;
	return 0;
}

static int cut_headers(struct http_parser *p, struct error *e)
{
	char *base = p->head.data;
	for (size_t i = 0; i < p->header_count; i++) {
		struct http_header *h = &p->headers[i];
		char *name = base + (h->name - base);
		char *colon = base + (h->value - base);
		if (*colon != ':' || colon == name)
			return refuse(p, 400, e, "blank between header name and colon");
		*colon = '\0';
		if (!http_name_is_valid(name))
			return refuse(p, 400, e, "header name is not a token");
		for (char *c = name; *c && !p->keep_case; c++)
			*c = (char)tolower((unsigned char)*c);
		char *value = colon + 1;
		char *end = strstr(value, "\r\n");
		value += strspn(value, " \t");
		while (end > value && (end[-1] == ' ' || end[-1] == '\t'))
			end--;
		*end = '\0';
		if (!http_value_is_valid(value))
			return refuse(p, 400, e, "control character in a header value");
		h->name = name;
		h->value = value;
	}
	return 0;
}

static int decide_framing(struct http_parser *p, struct error *e)
{
	const char *coding = NULL, *length = NULL;
	size_t codings = 0, lengths = 0, hosts = 0;
	for (size_t i = 0; i < p->header_count; i++) {
		const struct http_header *h = &p->headers[i];
		if (!strcasecmp(h->name, "transfer-encoding")) {
			coding = h->value;
			codings++;
		} else if (!strcasecmp(h->name, "content-length")) {
			length = h->value;
			lengths++;
		} else if (!strcasecmp(h->name, "host")) {
			hosts++;
		}
	}
	if (codings && lengths)
		return refuse(p, 400, e, "Content-Length together with Transfer-Encoding");
	if (lengths > 1)
		return refuse(p, 400, e, "more than one Content-Length");
	if (codings && p->minor == 0)
		return refuse(p, 400, e, "Transfer-Encoding in an HTTP/1.0 message");
	if (codings > 1 || (codings && strcasecmp(coding, "chunked") != 0))
		return refuse(p, 501, e, "a transfer coding other than chunked");
	if (p->kind == HTTP_PARSER_REQUEST && (hosts > 1 || (hosts == 0 && p->minor == 1)))
		return refuse(p, 400, e, hosts ? "more than one Host" : "no Host");
	uint64_t bytes = 0;
	if (length) {
		if (!*length || strspn(length, "0123456789") != strlen(length) || strlen(length) > 18)
			return refuse(p, 400, e, "Content-Length is not a number");
		for (const char *c = length; *c; c++)
			bytes = bytes * 10 + (uint64_t)(*c - '0');
	}
	int no_body =
	    p->kind == HTTP_PARSER_ANSWER && (p->head_answer || p->status < 200 || p->status == 204 || p->status == 304);
	if (no_body)
		p->framing = HTTP_FRAMING_NONE;
	else if (codings)
		p->framing = HTTP_FRAMING_CHUNKED;
	else if (length)
		p->framing = HTTP_FRAMING_LENGTH;
	else
		p->framing = p->kind == HTTP_PARSER_ANSWER ? HTTP_FRAMING_UNTIL_CLOSE : HTTP_FRAMING_NONE;
	p->content_length = p->framing == HTTP_FRAMING_LENGTH ? bytes : 0;
	p->body_length = bytes;
	return 0;
}

static void decide_connection(struct http_parser *p)
{
	int close = 0, keep = 0, upgrade = 0, protocol = 0;
	for (size_t i = 0; i < p->header_count; i++) {
		const struct http_header *h = &p->headers[i];
		if (!strcasecmp(h->name, "connection")) {
			close |= http_list_has(h->value, "close");
			keep |= http_list_has(h->value, "keep-alive");
			upgrade |= http_list_has(h->value, "upgrade");
		} else if (!strcasecmp(h->name, "upgrade")) {
			protocol = *h->value != '\0';
		}
	}
	p->keep_alive = !close && (p->minor >= 1 || keep) && p->framing != HTTP_FRAMING_UNTIL_CLOSE;
	p->upgrade = p->kind == HTTP_PARSER_REQUEST ? upgrade && protocol && p->minor >= 1 : p->status == 101;
}

static int finish_head(struct http_parser *p, struct error *e)
{
	enum llhttp_errno r = llhttp_execute(&p->llhttp, p->head.data, p->head.size);
	if (p->too_many)
		return refuse(p, 431, e, "too many header lines");
	if (r == HPE_INVALID_VERSION)
		return refuse(p, 505, e, "protocol version");
	if (r != HPE_PAUSED) {
		const char *reason = llhttp_get_error_reason(&p->llhttp);
		return refuse(p, 400, e, reason && *reason ? reason : llhttp_errno_name(r));
	}
	if (p->llhttp.http_major != 1 || p->llhttp.http_minor > 1)
		return refuse(p, 505, e, "protocol version is not HTTP/1.0 or HTTP/1.1");
	p->minor = p->llhttp.http_minor;
	/* Headers first: cut_first_line() ends the first line's string. */
	int s = cut_headers(p, e);
	if (s == 0)
		s = cut_first_line(p, e);
	if (s == 0)
		s = decide_framing(p, e);
	if (s < 0)
		return s;
	decide_connection(p);
	p->head_done = 1;
	p->done = p->framing == HTTP_FRAMING_NONE || (p->framing == HTTP_FRAMING_LENGTH && p->content_length == 0);
	if (p->framing == HTTP_FRAMING_CHUNKED)
		llhttp_resume(&p->llhttp);
	return 0;
}

ssize_t http_parser_head(struct http_parser *p, const char *data, size_t size, struct error *e)
{
	size_t used = 0;
	if (p->head.size == 0 && p->kind == HTTP_PARSER_REQUEST) {
		while (used < size && (data[used] == '\r' || data[used] == '\n')) {
			if (++p->skipped > SKIPPED_BYTES_MAX)
				return refuse(p, 400, e, "empty lines in front of the request");
			used++;
		}
	}
	size_t before = p->head.size;
	/* One byte beyond the limit is enough to know that it was passed. */
	size_t take = MIN(size - used, p->head_limit + 1 - before);
	int r = buf_append(&p->head, data + used, take);
	if (r < 0)
		return error_set_errno(e, r, "head of a message");
	r = scan_lines(p, e);
	if (r < 0)
		return r;
	if (r == 0) {
		if (p->head.size > p->head_limit)
			return refuse(p, 431, e, "head is too large");
		return (ssize_t)(used + take);
	}
	if (p->scanned > p->head_limit)
		return refuse(p, 431, e, "head is too large");
	used += p->scanned - before;
	p->head.size = p->scanned;
	p->head.data[p->head.size] = '\0';
	r = finish_head(p, e);
	return r < 0 ? r : (ssize_t)used;
}

struct counting_sink {
	int (*sink)(void *context, const char *data, size_t size);
	void *context;
	int result;
};

static int counting_sink_take(void *context, const char *data, size_t size)
{
	struct counting_sink *c = context;
	c->result = c->sink(c->context, data, size);
	return c->result;
}

static ssize_t chunked_body(struct http_parser *p, const char *data, size_t size, struct counting_sink *sink,
                            struct error *e)
{
	p->sink = counting_sink_take;
	p->sink_context = sink;
	enum llhttp_errno r = llhttp_execute(&p->llhttp, data, size);
	p->sink = NULL;
	if (sink->result < 0)
		return sink->result;
	if (r == HPE_OK)
		return (ssize_t)size;
	if (p->done && (r == HPE_PAUSED || r == HPE_PAUSED_UPGRADE))
		return llhttp_get_error_pos(&p->llhttp) - data;
	const char *reason = llhttp_get_error_reason(&p->llhttp);
	return refuse(p, 400, e, reason && *reason ? reason : llhttp_errno_name(r));
}

ssize_t http_parser_body(struct http_parser *p, const char *data, size_t size,
                         int (*sink)(void *context, const char *data, size_t size), void *context, struct error *e)
{
	if (p->done || size == 0)
		return 0;
	struct counting_sink c = {.sink = sink, .context = context};
	if (p->framing == HTTP_FRAMING_CHUNKED)
		return chunked_body(p, data, size, &c, e);
	size_t take = size;
	if (p->framing == HTTP_FRAMING_LENGTH) {
		take = (size_t)MIN((uint64_t)size, p->content_length);
		p->content_length -= take;
		p->done = p->content_length == 0;
	}
	int r = sink(context, data, take);
	return r < 0 ? r : (ssize_t)take;
}

int http_parser_eof(struct http_parser *p, struct error *e)
{
	if (p->done)
		return 0;
	if (p->head_done && p->framing == HTTP_FRAMING_UNTIL_CLOSE) {
		p->done = 1;
		return 0;
	}
	return error_set(e, ERROR_UNAVAILABLE, "connection closed %s",
	                 p->head_done ? "in the middle of a body" : "before a whole head was received");
}

const char *http_parser_header(const struct http_parser *p, const char *name)
{
	for (size_t i = 0; i < p->header_count; i++) {
		if (!strcasecmp(p->headers[i].name, name))
			return p->headers[i].value;
	}
	return NULL;
}

int http_list_has(const char *list, const char *token)
{
	size_t size = strlen(token);
	for (const char *c = list; c && *c;) {
		c += strspn(c, " \t,");
		size_t n = strcspn(c, ",");
		size_t trimmed = n;
		while (trimmed && (c[trimmed - 1] == ' ' || c[trimmed - 1] == '\t'))
			trimmed--;
		if (trimmed == size && !strncasecmp(c, token, size))
			return 1;
		c += n;
	}
	return 0;
}

int http_value_is_valid(const char *value)
{
	for (const char *c = value; *c; c++) {
		unsigned char u = (unsigned char)*c;
		if ((u < ' ' && u != '\t') || u == 0x7f)
			return 0;
	}
	return 1;
}

int http_name_is_valid(const char *name)
{
	static const char extra[] = "!#$%&'*+-.^_`|~";
	if (!*name)
		return 0;
	for (const char *c = name; *c; c++) {
		if (!isalnum((unsigned char)*c) && !strchr(extra, *c))
			return 0;
	}
	return 1;
}
