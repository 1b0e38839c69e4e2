#include "guest/connect.h"

#include <errno.h>
#include <string.h>
#include <strings.h>

#include "base/text.h"
#include "guest/json_text.h"

#define CONNECT_TIMEOUT_MS_MAX UINT64_C(9999999999) /* ten digits, as the protocol allows */

/* The protocol's own table; it differs from plain HTTP answers in a few places. */
static int http_status(const char *code)
{
	static const struct {
		const char *code;
		int status;
	} table[] = {
	    {"canceled", 499},        {"invalid_argument", 400},  {"deadline_exceeded", 504},  {"not_found", 404},
	    {"already_exists", 409},  {"permission_denied", 403}, {"resource_exhausted", 429}, {"failed_precondition", 400},
	    {"aborted", 409},         {"out_of_range", 400},      {"unimplemented", 501},      {"unavailable", 503},
	    {"unauthenticated", 401},
	};
	for (size_t i = 0; i < ARRAY_SIZE(table); i++)
		if (strcmp(table[i].code, code) == 0)
			return table[i].status;
	return 500;
}

int connect_reply(struct request *r, json_t *message)
{
	return response_json(r, 200, message);
}

int connect_fail(struct request *r, const struct error *e)
{
	const char *code = error_code_connect(e->code);
	return response_json(r, http_status(code), json_pack("{s:s,s:s}", "code", code, "message", e->message));
}

int connect_timeout_ms(const struct request *r, uint64_t *ret, struct error *e)
{
	const char *text = request_header(r, "connect-timeout-ms");
	*ret = 0;
	if (text && text_parse_u64(text, CONNECT_TIMEOUT_MS_MAX, ret) < 0)
		return error_set(e, ERROR_INVALID, "Connect-Timeout-Ms is not a number of milliseconds");
	return 0;
}

int connect_envelope_parse(const unsigned char prefix[CONNECT_ENVELOPE_BYTES], unsigned *ret_flags, size_t *ret_size,
                           struct error *e)
{
	size_t size = (size_t)prefix[1] << 24 | (size_t)prefix[2] << 16 | (size_t)prefix[3] << 8 | prefix[4];
	if (prefix[0] & CONNECT_FLAG_COMPRESSED)
		return error_set(e, ERROR_UNSUPPORTED, "compressed messages are not supported");
	if (prefix[0] & ~(CONNECT_FLAG_COMPRESSED | CONNECT_FLAG_END))
		return error_set(e, ERROR_INVALID, "unknown envelope flags 0x%02x", prefix[0]);
	if (size > AGENT_JSON_BYTES_MAX)
		return error_set(e, ERROR_TOO_LARGE, "a message of %zu bytes is above the limit of %d", size,
		                 AGENT_JSON_BYTES_MAX);
	*ret_flags = prefix[0];
	*ret_size = size;
	return 0;
}

static int is_stream_type(const struct request *r)
{
	const char *type = request_header(r, "content-type");
	return type && strncasecmp(type, "application/connect+json", 24) == 0 &&
	       (type[24] == '\0' || type[24] == ';' || type[24] == ' ');
}

/* Reads exactly `size` bytes of the body; fewer are left only at its end. */
static ssize_t read_exactly(struct request *r, void *data, size_t size)
{
	size_t done = 0;
	while (done < size) {
		ssize_t n = request_read(r, (char *)data + done, size - done);
		if (n < 0)
			return n;
		if (n == 0)
			break;
		done += (size_t)n;
	}
	return (ssize_t)done;
}

int connect_stream_next(struct request *r, json_t **ret, struct error *e)
{
	unsigned char prefix[CONNECT_ENVELOPE_BYTES];
	unsigned flags;
	size_t size;
	*ret = NULL;
	if (!is_stream_type(r))
		return error_set(e, ERROR_INVALID, "a stream needs Content-Type: application/connect+json");
	ssize_t n = read_exactly(r, prefix, sizeof(prefix));
	if (n == 0)
		return 0;
	if (n < (ssize_t)sizeof(prefix))
		return error_set(e, n < 0 && n != -EBADMSG ? ERROR_CANCELED : ERROR_INVALID, "the request stream was cut off");
	int x = connect_envelope_parse(prefix, &flags, &size, e);
	if (x < 0)
		return x;
	if (flags & CONNECT_FLAG_END)
		return 0;
	CLEANUP_FREE char *text = malloc(size + 1);
	if (!text)
		return error_set(e, ERROR_EXHAUSTED, "out of memory");
	if (read_exactly(r, text, size) != (ssize_t)size)
		return error_set(e, ERROR_CANCELED, "the request stream was cut off");
	return json_text_parse(text, size, ret, e);
}

int connect_stream_request(struct request *r, json_t **ret, struct error *e)
{
	int x = connect_stream_next(r, ret, e);
	if (x < 0)
		return x;
	return *ret ? 0 : error_set(e, ERROR_INVALID, "the request message is missing");
}

int connect_stream_start(struct request *r)
{
	static const struct request_header headers[] = {
	    {.name = (char *)(uintptr_t) "Content-Type", .value = (char *)(uintptr_t) "application/connect+json"},
	    {.name = (char *)(uintptr_t) "Cache-Control", .value = (char *)(uintptr_t) "no-store"},
	};
	return response_start(r, 200, headers, ARRAY_SIZE(headers), -1);
}

static int queue_message(struct request *r, unsigned flags, const char *json, size_t size)
{
	struct connection *c = r->connection;
	size_t whole = size + CONNECT_ENVELOPE_BYTES;
	unsigned char prefix[CONNECT_ENVELOPE_BYTES] = {(unsigned char)flags, (unsigned char)(size >> 24),
	                                                (unsigned char)(size >> 16), (unsigned char)(size >> 8),
	                                                (unsigned char)size};
	if (c->failure || c->is_head)
		return c->failure;
	int e = c->is_chunked ? buf_printf(&c->out, "%zx\r\n", whole) : 0;
	if (e == 0)
		e = buf_append(&c->out, prefix, sizeof(prefix));
	if (e == 0)
		e = buf_append(&c->out, json, size);
	if (e == 0 && c->is_chunked)
		e = buf_append(&c->out, "\r\n", 2);
	if (e < 0)
		c->failure = e;
	return e;
}

int connect_stream_queue(struct request *r, const char *json, size_t size)
{
	return queue_message(r, 0, json, size);
}

int connect_stream_send_text(struct request *r, const char *json, size_t size)
{
	int e = queue_message(r, 0, json, size);
	return e < 0 ? e : connection_flush(r->connection);
}

int connect_stream_send(struct request *r, json_t *message)
{
	CLEANUP_FREE char *text = message ? json_dumps(message, JSON_COMPACT) : NULL;
	json_decref(message);
	if (!text)
		return r->connection->failure = -ENOMEM;
	return connect_stream_send_text(r, text, strlen(text));
}

int connect_stream_end_with(struct request *r, const struct error *e, const char *field, int value)
{
	if (r->connection->state == RESPONSE_NONE)
		connect_stream_start(r);
	CLEANUP_FREE char *text = NULL;
	if (e) {
		json_t *detail = json_pack("{s:s,s:s}", "code", error_code_connect(e->code), "message", e->message);
		if (detail && field)
			json_object_set_new(detail, field, json_integer(value));
		json_t *end = json_pack("{s:o}", "error", detail);
		text = end ? json_dumps(end, JSON_COMPACT) : NULL;
		json_decref(end);
	}
	const char *json = text ? text : "{}";
	int x = queue_message(r, CONNECT_FLAG_END, json, strlen(json));
	return x < 0 ? x : response_end(r);
}

int connect_stream_end(struct request *r, const struct error *e)
{
	return connect_stream_end_with(r, e, NULL, 0);
}
