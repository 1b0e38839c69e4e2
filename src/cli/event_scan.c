#include "cli/event_scan.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/text.h"

#define ENVELOPE_HEAD 5
#define FLAG_COMPRESSED 1
#define FLAG_END 2

long event_scan_decode(unsigned char *to, const char *text, size_t size)
{
	return size % 4 ? -EINVAL : text_base64_decode(to, text, size);
}

char *event_scan_space(struct event_scan *scan, size_t size)
{
	if (scan->capacity - scan->end >= size)
		return scan->buffer + scan->end;
	size_t unread = scan->end - scan->start;
	if (scan->capacity < unread + size) {
		size_t capacity = MAX(scan->capacity * 2, unread + size);
		char *grown = malloc(capacity);
		if (!grown)
			return NULL;
		if (unread)
			memcpy(grown, scan->buffer + scan->start, unread);
		free(scan->buffer);
		scan->buffer = grown;
		scan->capacity = capacity;
	} else if (unread) {
		memmove(scan->buffer, scan->buffer + scan->start, unread);
	}
	scan->start = 0;
	scan->end = unread;
	return scan->buffer + scan->end;
}

void event_scan_filled(struct event_scan *scan, size_t size)
{
	scan->end += size;
}

void event_scan_reset(struct event_scan *scan)
{
	scan->start = scan->end = 0;
	json_decref(scan->tree);
	scan->tree = NULL;
}

void event_scan_free(struct event_scan *scan)
{
	event_scan_reset(scan);
	free(scan->buffer);
	memset(scan, 0, sizeof(*scan));
}

struct cursor {
	const char *p;
	const char *end;
};

static void skip_space(struct cursor *c)
{
	while (c->p < c->end && (*c->p == ' ' || *c->p == '\n' || *c->p == '\t' || *c->p == '\r'))
		c->p++;
}

static int take(struct cursor *c, char wanted)
{
	skip_space(c);
	if (c->p == c->end || *c->p != wanted)
		return 0;
	c->p++;
	return 1;
}

/* A string without escapes; anything else is left to the slow path. */
static int take_string(struct cursor *c, const char **ret, size_t *ret_size)
{
	if (!take(c, '"'))
		return 0;
	const char *close = memchr(c->p, '"', (size_t)(c->end - c->p));
	if (!close)
		return 0;
	*ret = c->p;
	*ret_size = (size_t)(close - c->p);
	c->p = close + 1;
	return 1;
}

static int take_key(struct cursor *c, const char *name)
{
	const char *key;
	size_t size;
	return take_string(c, &key, &size) && size == strlen(name) && memcmp(key, name, size) == 0 && take(c, ':');
}

/* A decimal number, plain or (as 64-bit numbers are in protobuf's JSON) in quotes. */
static int take_number(struct cursor *c, uint64_t *ret)
{
	int quoted = take(c, '"');
	skip_space(c);
	uint64_t value = 0;
	unsigned digits = 0;
	for (; c->p < c->end && *c->p >= '0' && *c->p <= '9'; c->p++, digits++)
		value = value * 10 + (uint64_t)(*c->p - '0');
	if (digits == 0 || digits > 18)
		return 0;
	*ret = value;
	return !quoted || take(c, '"');
}

static enum event_scan_channel channel_of(const char *key, size_t size)
{
	if (size == 6 && memcmp(key, "stdout", 6) == 0)
		return EVENT_SCAN_STDOUT;
	if (size == 6 && memcmp(key, "stderr", 6) == 0)
		return EVENT_SCAN_STDERR;
	if (size == 3 && memcmp(key, "pty", 3) == 0)
		return EVENT_SCAN_PTY;
	return 0;
}

/* {"event":{"data":{"stdout":"…","offset":N}}}, members of data in any order, offset also one level up. */
static int scan_data(const char *text, size_t size, struct event_scan_event *ret)
{
	struct cursor c = {text, text + size};
	if (!take(&c, '{') || !take_key(&c, "event") || !take(&c, '{') || !take_key(&c, "data") || !take(&c, '{'))
		return 0;
	do {
		const char *key;
		size_t key_size;
		if (!take_string(&c, &key, &key_size) || !take(&c, ':'))
			return 0;
		if (key_size == 6 && memcmp(key, "offset", 6) == 0) {
			if (!take_number(&c, &ret->offset))
				return 0;
			ret->has_offset = 1;
			continue;
		}
		enum event_scan_channel channel = channel_of(key, key_size);
		if (!channel || ret->base64 || !take_string(&c, &ret->base64, &ret->base64_size))
			return 0;
		ret->channel = channel;
	} while (take(&c, ','));
	if (!take(&c, '}'))
		return 0;
	if (take(&c, ',')) {
		if (!take_key(&c, "offset") || !take_number(&c, &ret->offset))
			return 0;
		ret->has_offset = 1;
	}
	if (!take(&c, '}') || !take(&c, '}'))
		return 0;
	skip_space(&c);
	/* A backslash would mean escapes in the string ("\/"): the slow path knows them. Base64 has none, so the decoder
	 * would refuse it anyhow; look only at the odd case of a length that is no multiple of four. */
	if (c.p != c.end || !ret->base64 || ret->base64_size % 4 || memchr(ret->base64, '\\', ret->base64_size))
		return 0;
	ret->kind = EVENT_SCAN_DATA;
	return 1;
}

static int64_t json_int(const json_t *object, const char *key)
{
	const json_t *value = json_object_get(object, key);
	if (json_is_integer(value))
		return json_integer_value(value);
	uint64_t number;
	if (json_is_string(value) && text_parse_u64(json_string_value(value), INT64_MAX, &number) == 0)
		return (int64_t)number;
	return 0;
}

static void read_data(const json_t *event, const json_t *data, struct event_scan_event *ret)
{
	const char *key;
	json_t *value;
	ret->kind = EVENT_SCAN_OTHER;
	json_object_foreach((json_t *)(uintptr_t)data, key, value)
	{
		enum event_scan_channel channel = channel_of(key, strlen(key));
		if (channel && json_is_string(value)) {
			ret->kind = EVENT_SCAN_DATA;
			ret->channel = channel;
			ret->base64 = json_string_value(value);
			ret->base64_size = json_string_length(value);
		}
	}
	const json_t *where = json_object_get(data, "offset") ? data : event;
	if (json_object_get(where, "offset")) {
		ret->offset = (uint64_t)MAX(json_int(where, "offset"), 0);
		ret->has_offset = 1;
	}
}

static void read_end(const json_t *end, struct event_scan_event *ret)
{
	const char *error = json_string_value(json_object_get(end, "error"));
	const char *status = json_string_value(json_object_get(end, "status"));
	ret->kind = EVENT_SCAN_END;
	ret->exit_code = (int)json_int(end, "exitCode");
	ret->exited = json_is_true(json_object_get(end, "exited"));
	ret->signal = (int)json_int(end, "signal");
	ret->timed_out = json_is_true(json_object_get(end, "timedOut"));
	snprintf(ret->text, sizeof(ret->text), "%s", error && *error ? error : status ? status : "");
}

static int read_tree(struct event_scan *scan, const char *text, size_t size, struct event_scan_event *ret,
                     struct error *e)
{
	json_error_t json_error;
	json_decref(scan->tree);
	scan->tree = json_loadb(text, size, JSON_REJECT_DUPLICATES, &json_error);
	if (!scan->tree)
		return error_set(e, ERROR_INTERNAL, "the process stream holds bad JSON: %s", json_error.text);
	const json_t *event = json_object_get(scan->tree, "event");
	const json_t *part;
	ret->kind = EVENT_SCAN_OTHER;
	if ((part = json_object_get(event, "data"))) {
		read_data(event, part, ret);
	} else if ((part = json_object_get(event, "start"))) {
		ret->kind = EVENT_SCAN_START;
		ret->pid = (uint64_t)MAX(json_int(part, "pid"), 0);
	} else if ((part = json_object_get(event, "end"))) {
		read_end(part, ret);
	} else if ((part = json_object_get(event, "gap"))) {
		ret->kind = EVENT_SCAN_GAP;
		ret->from = (uint64_t)MAX(json_int(part, "from"), 0);
		ret->to = (uint64_t)MAX(json_int(part, "to"), 0);
	}
	return 0;
}

static enum error_code code_from_connect(const char *name)
{
	for (enum error_code code = ERROR_INVALID; name && code < ERROR_CODE_COUNT; code++)
		if (strcmp(error_code_connect(code), name) == 0 || strcmp(error_code_name(code), name) == 0)
			return code;
	return ERROR_INTERNAL;
}

/* The last envelope: {} or {"error":{"code","message"}}. */
static int read_finish(struct event_scan *scan, const char *text, size_t size, struct event_scan_event *ret,
                       struct error *e)
{
	json_error_t json_error;
	ret->kind = EVENT_SCAN_FINISH;
	json_decref(scan->tree);
	scan->tree = json_loadb(text, size, 0, &json_error);
	if (!scan->tree && size)
		return error_set(e, ERROR_INTERNAL, "the process stream ends with bad JSON: %s", json_error.text);
	const json_t *error = json_object_get(scan->tree, "error");
	if (!error)
		return 0;
	const char *message = json_string_value(json_object_get(error, "message"));
	const char *code = json_string_value(json_object_get(error, "code"));
	ret->failed = 1;
	ret->exit_status = (int)json_int(error, "exitStatus");
	error_set(&ret->error, code_from_connect(code), "%s",
	          message && *message ? message
	          : code              ? code
	                              : "no reason given");
	return 0;
}

int event_scan_next(struct event_scan *scan, struct event_scan_event *ret, struct error *e)
{
	ret->kind = EVENT_SCAN_NONE;
	size_t unread = scan->end - scan->start;
	if (unread < ENVELOPE_HEAD)
		return 0;
	const unsigned char *head = (const unsigned char *)scan->buffer + scan->start;
	size_t size = (size_t)head[1] << 24 | (size_t)head[2] << 16 | (size_t)head[3] << 8 | head[4];
	if (head[0] & ~(FLAG_END | FLAG_COMPRESSED))
		return error_set(e, ERROR_INTERNAL, "the process stream is not a Connect stream (flags 0x%02x)", head[0]);
	if (head[0] & FLAG_COMPRESSED)
		return error_set(e, ERROR_UNSUPPORTED, "the process stream is compressed, which was not asked for");
	if (size > EVENT_SCAN_MESSAGE_MAX)
		return error_set(e, ERROR_TOO_LARGE, "the process stream announces a message of %zu bytes (limit %u)", size,
		                 EVENT_SCAN_MESSAGE_MAX);
	if (unread - ENVELOPE_HEAD < size)
		return 0;
	const char *text = (const char *)head + ENVELOPE_HEAD;
	int is_end = head[0] & FLAG_END;
	scan->start += ENVELOPE_HEAD + size;
	memset(ret, 0, offsetof(struct event_scan_event, text));
	ret->text[0] = '\0';
	ret->from = ret->to = 0;
	ret->failed = 0;
	ret->exit_status = 0;
	if (is_end)
		return read_finish(scan, text, size, ret, e);
	if (scan_data(text, size, ret))
		return 0;
	memset(ret, 0, offsetof(struct event_scan_event, text));
	return read_tree(scan, text, size, ret, e);
}
