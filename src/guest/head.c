#include "guest/head.h"

#include <ctype.h>
#include <errno.h>
#include <string.h>
#include <strings.h>

#include "base/text.h"

static int on_url(llhttp_t *l, const char *at, size_t size)
{
	struct head *h = l->data;
	h->path = (char *)(uintptr_t)at;
	h->target_size = size;
	return 0;
}

static int on_field(llhttp_t *l, const char *at, size_t size)
{
	struct head *h = l->data;
	if (h->parsed) {
		h->trailer_bytes += size;
		return h->trailer_bytes > HEAD_TRAILER_BYTES_MAX ? HPE_USER : 0;
	}
	if (h->field_count == HEAD_FIELDS_MAX) {
		h->failed_status = 431;
		return HPE_USER;
	}
	char *name = (char *)(uintptr_t)at;
	/* Strings are cut in finish_fields(), when the parser no longer needs the separators. */
	h->fields[h->field_count++] = (struct request_header){.name = name, .value = name + size};
	return 0;
}

static int on_value(llhttp_t *l, const char *at, size_t size)
{
	struct head *h = l->data;
	if (h->parsed) {
		h->trailer_bytes += size;
		return h->trailer_bytes > HEAD_TRAILER_BYTES_MAX ? HPE_USER : 0;
	}
	return 0;
}

static int on_headers_complete(llhttp_t *l)
{
	/* How the body is framed is our own decision. */
	return HPE_PAUSED;
}

static int on_body(llhttp_t *l, const char *at, size_t size)
{
	struct head *h = l->data;
	memmove(h->sink + h->sink_size, at, size);
	h->sink_size += size;
	return 0;
}

static int on_message_complete(llhttp_t *l)
{
	struct head *h = l->data;
	h->body_done = 1;
	return HPE_PAUSED;
}

static const llhttp_settings_t settings = {
    .on_url = on_url,
    .on_header_field = on_field,
    .on_header_value = on_value,
    .on_headers_complete = on_headers_complete,
    .on_body = on_body,
    .on_message_complete = on_message_complete,
};

ssize_t head_find_end(const char *data, size_t size, size_t *scanned)
{
	/* *scanned always stands at the start of a line. */
	while (*scanned < size) {
		const char *line = data + *scanned;
		const char *feed = memchr(line, '\n', size - *scanned);
		if (!feed)
			return size > AGENT_HEAD_BYTES_MAX ? -431 : 0;
		size_t length = (size_t)(feed - line);
		if (!length || feed[-1] != '\r' || memchr(line, '\r', length - 1) || memchr(line, '\0', length))
			return -400;
		if (*line == ' ' || *line == '\t')
			return -400;
		if (*scanned == 0 && length == 1)
			return -400;
		*scanned += length + 1;
		if (*scanned > AGENT_HEAD_BYTES_MAX)
			return -431;
		if (length == 1)
			return (ssize_t)*scanned;
	}
	return 0;
}

/* Terminates names and values; all separators are where llhttp and head_find_end() saw them. */
static int finish_fields(struct head *h, const char *limit)
{
	for (size_t i = 0; i < h->field_count; i++) {
		char *value = h->fields[i].value;
		for (char *c = h->fields[i].name; c < value; c++) {
			if (!isalnum((unsigned char)*c) && !strchr("!#$%&'*+-.^_`|~", *c))
				return 400;
			*c = (char)tolower((unsigned char)*c);
		}
		*value++ = '\0';
		while (*value == ' ' || *value == '\t')
			value++;
		char *end = memchr(value, '\r', (size_t)(limit - value));
		if (!end)
			return 400;
		while (end > value && (end[-1] == ' ' || end[-1] == '\t'))
			end--;
		*end = '\0';
		h->fields[i].value = value;
	}
	return 0;
}

static int decide_framing(struct head *h)
{
	const char *length = NULL;
	const char *coding = NULL;
	for (size_t i = 0; i < h->field_count; i++) {
		if (strcmp(h->fields[i].name, "content-length") == 0) {
			if (length)
				return 400;
			length = h->fields[i].value;
		} else if (strcmp(h->fields[i].name, "transfer-encoding") == 0) {
			if (coding)
				return 400;
			coding = h->fields[i].value;
		}
	}
	if (coding && (length || h->is_http_1_0))
		return 400;
	if (coding && strcasecmp(coding, "chunked") != 0)
		return 501;
	h->is_chunked = coding != NULL;
	if (length) {
		if (text_parse_u64(length, INT64_MAX, &h->length) < 0)
			return 400;
		h->has_length = 1;
	}
	return 0;
}

static int cut_target(struct head *h)
{
	if (!h->path)
		return 400;
	h->path[h->target_size] = '\0'; /* the blank in front of the version */
	if (strncasecmp(h->path, "http://", 7) == 0) {
		char *slash = strchr(h->path + 7, '/');
		if (!slash)
			return 400;
		h->path = slash;
	}
	if (h->path[0] != '/' && strcmp(h->path, "*") != 0)
		return 400;
	char *mark = strchr(h->path, '?');
	if (mark)
		*mark++ = '\0';
	h->query = mark ? mark : h->path + strlen(h->path);
	return 0;
}

int head_parse(struct head *h, char *data, size_t size)
{
	memset(h, 0, sizeof(*h));
	llhttp_init(&h->parser, HTTP_REQUEST, &settings);
	h->parser.data = h;
	llhttp_errno_t r = llhttp_execute(&h->parser, data, size);
	if (r != HPE_PAUSED)
		return h->failed_status ? h->failed_status : 400;
	h->parsed = 1;
	if (h->parser.http_major != 1)
		return 505;
	h->is_http_1_0 = h->parser.http_minor == 0;
	char *blank = memchr(data, ' ', size);
	if (!blank)
		return 400;
	*blank = '\0';
	h->method = data;
	int status = cut_target(h);
	if (status)
		return status;
	status = finish_fields(h, data + size);
	if (status)
		return status;
	const char *connection = head_field(h, "connection");
	h->keep_alive = h->is_http_1_0 ? head_list_has(connection, "keep-alive") : !head_list_has(connection, "close");
	h->is_upgrade = head_list_has(connection, "upgrade") && head_field(h, "upgrade") != NULL;
	return decide_framing(h);
}

ssize_t head_decode_chunks(struct head *h, char *data, size_t size, size_t *ret_decoded)
{
	h->sink = data;
	h->sink_size = 0;
	llhttp_resume(&h->parser);
	llhttp_errno_t r = llhttp_execute(&h->parser, data, size);
	*ret_decoded = h->sink_size;
	if (r == HPE_OK)
		return (ssize_t)size;
	if ((r == HPE_PAUSED || r == HPE_PAUSED_UPGRADE) && h->body_done)
		return llhttp_get_error_pos(&h->parser) - data;
	return -EBADMSG;
}

const char *head_field(const struct head *h, const char *name)
{
	for (size_t i = 0; i < h->field_count; i++)
		if (strcmp(h->fields[i].name, name) == 0)
			return h->fields[i].value;
	return NULL;
}

int head_list_has(const char *list, const char *token)
{
	size_t length = strlen(token);
	for (const char *p = list; p && *p;) {
		p += strspn(p, " \t,");
		size_t n = strcspn(p, ",");
		while (n && (p[n - 1] == ' ' || p[n - 1] == '\t'))
			n--;
		if (n == length && strncasecmp(p, token, length) == 0)
			return 1;
		p += strcspn(p, ",");
	}
	return 0;
}
