#include "http/stream.h"

#include <errno.h>
#include <jansson.h>
#include <string.h>
#include <strings.h>

void http_stream_handle(struct http_stream *s, const struct http_stream_handler *handler, void *context)
{
	s->handler = handler;
	s->context = context;
}

const char *http_request_header(const struct http_request *r, const char *name)
{
	for (size_t i = 0; i < r->header_count; i++) {
		if (!strcasecmp(r->headers[i].name, name))
			return r->headers[i].value;
	}
	return NULL;
}

void http_stream_read(struct http_stream *s, int on)
{
	s->ops->read(s, on);
}

int http_stream_interim(struct http_stream *s, int status, const struct http_header *headers, size_t count)
{
	if (s->answered || s->request.minor == 0)
		return 0;
	return s->ops->interim(s, status, headers, count);
}

int http_stream_respond(struct http_stream *s, int status, const struct http_header *headers, size_t count,
                        int64_t length)
{
	if (s->answered)
		return -EBUSY;
	s->answered = 1;
	s->status = status;
	return s->ops->respond(s, status, headers, count, length);
}

int http_stream_upgrade(struct http_stream *s, const struct http_header *headers, size_t count)
{
	if (s->answered)
		return -EBUSY;
	s->answered = 1;
	s->status = 101;
	return s->ops->upgrade(s, headers, count);
}

int http_stream_write(struct http_stream *s, const void *data, size_t size)
{
	if (!s->answered || s->ended)
		return -EPIPE;
	return size ? s->ops->write(s, data, size) : 0;
}

void http_stream_end(struct http_stream *s)
{
	if (s->ended)
		return;
	s->ended = 1;
	s->ops->end(s);
}

void http_stream_abort(struct http_stream *s)
{
	s->ended = 1;
	s->ops->abort(s);
}

size_t http_stream_queued(const struct http_stream *s)
{
	return s->ops->queued(s);
}

#define ANSWER_HEADERS_MAX 16

void http_stream_answer(struct http_stream *s, int status, const char *content_type, const void *body, size_t size,
                        const struct http_header *headers, size_t count)
{
	struct http_header all[ANSWER_HEADERS_MAX + 1];
	size_t n = 0;
	if (content_type)
		all[n++] = (struct http_header){"content-type", content_type};
	for (size_t i = 0; i < count && n <= ANSWER_HEADERS_MAX; i++)
		all[n++] = headers[i];
	if (http_stream_respond(s, status, all, n, (int64_t)size) < 0) {
		http_stream_abort(s);
		return;
	}
	http_stream_write(s, body, size);
	http_stream_end(s);
}

int http_error_body(struct buf *ret, const char *code, const char *message)
{
	json_t *object = json_pack("{s:s, s:s, s:{}}", "code", code, "message", message, "details");
	char *text = object ? json_dumps(object, JSON_COMPACT) : NULL;
	json_decref(object);
	int r = text ? buf_append_string(ret, text) : -ENOMEM;
	free(text);
	return r;
}

const char *http_status_text(int status)
{
	static const struct {
		int status;
		const char *text;
	} texts[] = {
	    {100, "Continue"},
	    {101, "Switching Protocols"},
	    {103, "Early Hints"},
	    {200, "OK"},
	    {201, "Created"},
	    {202, "Accepted"},
	    {204, "No Content"},
	    {206, "Partial Content"},
	    {301, "Moved Permanently"},
	    {302, "Found"},
	    {303, "See Other"},
	    {304, "Not Modified"},
	    {307, "Temporary Redirect"},
	    {308, "Permanent Redirect"},
	    {400, "Bad Request"},
	    {401, "Unauthorized"},
	    {403, "Forbidden"},
	    {404, "Not Found"},
	    {405, "Method Not Allowed"},
	    {408, "Request Timeout"},
	    {409, "Conflict"},
	    {413, "Content Too Large"},
	    {416, "Range Not Satisfiable"},
	    {429, "Too Many Requests"},
	    {431, "Request Header Fields Too Large"},
	    {499, "Client Closed Request"},
	    {500, "Internal Server Error"},
	    {501, "Not Implemented"},
	    {502, "Bad Gateway"},
	    {503, "Service Unavailable"},
	    {504, "Gateway Timeout"},
	    {505, "HTTP Version Not Supported"},
	    {507, "Insufficient Storage"},
	};
	for (size_t i = 0; i < ARRAY_SIZE(texts); i++) {
		if (texts[i].status == status)
			return texts[i].text;
	}
	return "Status";
}
