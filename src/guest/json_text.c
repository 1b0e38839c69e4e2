#include "guest/json_text.h"

#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/text.h"
#include "guest/request.h"

struct long_string {
	const char *text; /* between the quotes */
	size_t size;
};

struct scan {
	struct long_string found[JSON_TEXT_LONG_MAX];
	size_t count;
	int too_deep;
};

/* Printable ASCII without a backslash stands for itself in JSON and is valid UTF-8; eight bytes at a time. */
static int is_plain(const char *text, size_t size)
{
	const uint64_t ones = UINT64_C(0x0101010101010101);
	const uint64_t high = ones * 128;
	for (; size >= 8; size -= 8, text += 8) {
		uint64_t word;
		memcpy(&word, text, 8);
		if ((word & high) || ((word - ones * 0x20) & ~word & high))
			return 0;
	}
	for (; size; size--, text++)
		if ((unsigned char)*text < 0x20 || (unsigned char)*text > 0x7e)
			return 0;
	return 1;
}

/* `p` is behind the opening quote; returns what is behind the closing one, or `end` if there is none. */
static const char *skip_string(const char *p, const char *end, struct scan *scan)
{
	const char *start = p;
	int has_escape = 0;
	for (;;) {
		const char *quote = memchr(p, '"', (size_t)(end - p));
		if (!quote)
			return end;
		const char *escape = memchr(p, '\\', (size_t)(quote - p));
		if (!escape) {
			p = quote + 1;
			break;
		}
		has_escape = 1;
		if (end - escape < 2)
			return end;
		p = escape + 2;
	}
	size_t size = (size_t)(p - 1 - start);
	const char *next = p;
	while (next < end && (*next == ' ' || *next == '\t' || *next == '\r' || *next == '\n'))
		next++;
	int is_key = next < end && *next == ':';
	if (!has_escape && !is_key && size >= JSON_TEXT_LONG_BYTES && scan->count < JSON_TEXT_LONG_MAX &&
	    is_plain(start, size))
		scan->found[scan->count++] = (struct long_string){start, size};
	return p;
}

static void scan_text(const char *text, size_t size, struct scan *scan)
{
	const char *end = text + size;
	int depth = 0;
	for (const char *p = text; p < end;) {
		char c = *p++;
		if (c == '"')
			p = skip_string(p, end, scan);
		else if ((c == '{' || c == '[') && ++depth > AGENT_JSON_DEPTH_MAX)
			scan->too_deep = 1;
		else if ((c == '}' || c == ']') && depth)
			depth--;
	}
}

/* Stands for a long string while the library parses. No text can hold it by chance: it has a fresh random part. */
#define MARK_BYTES 64
static void mark_make(char to[MARK_BYTES], const char *nonce, size_t index)
{
	snprintf(to, MARK_BYTES, "long-%s-%zu", nonce, index);
}

static json_t *replacement(const json_t *value, const struct scan *scan, const char *nonce)
{
	const char *text = json_string_value(value);
	if (!text)
		return NULL;
	for (size_t i = 0; i < scan->count; i++) {
		char mark[MARK_BYTES];
		mark_make(mark, nonce, i);
		if (strcmp(text, mark) == 0)
			return json_stringn_nocheck(scan->found[i].text, scan->found[i].size);
	}
	return NULL;
}

/* Depth is bounded by scan_text(). */
static void put_back(json_t *tree, const struct scan *scan, const char *nonce)
{
	json_t *value;
	if (json_is_object(tree)) {
		for (void *i = json_object_iter(tree); i; i = json_object_iter_next(tree, i)) {
			value = replacement(json_object_iter_value(i), scan, nonce);
			if (value)
				json_object_iter_set_new(tree, i, value);
			else
				put_back(json_object_iter_value(i), scan, nonce);
		}
	}
	for (size_t i = 0; i < json_array_size(tree); i++) {
		value = replacement(json_array_get(tree, i), scan, nonce);
		if (value)
			json_array_set_new(tree, i, value);
		else
			put_back(json_array_get(tree, i), scan, nonce);
	}
}

static json_t *parse_short(const char *text, size_t size, const struct scan *scan, json_error_t *where)
{
	CLEANUP_BUF struct buf rest = {0};
	char token[TOKEN_BYTES];
	char nonce[17];
	const char *from = text;
	token_make(token);
	snprintf(nonce, sizeof(nonce), "%.16s", token);
	for (size_t i = 0; i < scan->count; i++) {
		char mark[MARK_BYTES];
		mark_make(mark, nonce, i);
		if (buf_append(&rest, from, (size_t)(scan->found[i].text - from)) < 0 || buf_append_string(&rest, mark) < 0)
			return NULL;
		from = scan->found[i].text + scan->found[i].size;
	}
	if (buf_append(&rest, from, (size_t)(text + size - from)) < 0)
		return NULL;
	json_t *tree = json_loadb(rest.data, rest.size, JSON_REJECT_DUPLICATES, where);
	if (tree)
		put_back(tree, scan, nonce);
	return tree;
}

int json_text_parse(const char *text, size_t size, json_t **ret, struct error *e)
{
	if (size == 0) {
		*ret = json_object();
		return *ret ? 0 : error_set(e, ERROR_EXHAUSTED, "out of memory");
	}
	struct scan scan = {0};
	scan_text(text, size, &scan);
	if (scan.too_deep)
		return error_set(e, ERROR_INVALID, "JSON is nested deeper than %d levels", AGENT_JSON_DEPTH_MAX);
	json_error_t where = {.text = "out of memory"};
	json_t *value =
	    scan.count ? parse_short(text, size, &scan, &where) : json_loadb(text, size, JSON_REJECT_DUPLICATES, &where);
	if (!value)
		return error_set(e, ERROR_INVALID, "invalid JSON at line %d, column %d: %s", where.line, where.column,
		                 where.text);
	if (!json_is_object(value)) {
		json_decref(value);
		return error_set(e, ERROR_INVALID, "the request must be a JSON object");
	}
	*ret = value;
	return 0;
}
