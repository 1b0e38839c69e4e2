#include "api/uri.h"

#include <ctype.h>
#include <errno.h>
#include <string.h>

#include "base/text.h"

static int hex_value(char c)
{
	if (c >= '0' && c <= '9')
		return c - '0';
	c = (char)tolower((unsigned char)c);
	return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

static int decode(char *to, size_t capacity, const char *text, size_t size, int plus_is_blank)
{
	size_t n = 0;
	for (size_t i = 0; i < size; i++) {
		char c = text[i];
		if (c == '%') {
			int high = i + 2 < size ? hex_value(text[i + 1]) : -1;
			int low = i + 2 < size ? hex_value(text[i + 2]) : -1;
			if (high < 0 || low < 0)
				return -EINVAL;
			c = (char)(high * 16 + low);
			i += 2;
			if (c == '\0')
				return -EINVAL;
		} else if (c == '+' && plus_is_blank) {
			c = ' ';
		}
		if (n + 1 >= capacity)
			return -ENAMETOOLONG;
		to[n++] = c;
	}
	to[n] = '\0';
	return 0;
}

int uri_decode(char *to, size_t capacity, const char *text, size_t size)
{
	return decode(to, capacity, text, size, 0);
}

static int add(json_t *object, const char *name, const char *value)
{
	json_t *old = json_object_get(object, name);
	if (!old)
		return json_object_set_new(object, name, json_string(value));
	if (json_is_array(old))
		return json_array_append_new(old, json_string(value));
	json_t *list = json_array();
	if (json_array_append(list, old) < 0 || json_array_append_new(list, json_string(value)) < 0) {
		json_decref(list);
		return -1;
	}
	return json_object_set_new(object, name, list);
}

json_t *uri_query(const char *text, struct error *e)
{
	json_t *object = json_object();
	size_t capacity = strlen(text) + 1, count = 0;
	CLEANUP_FREE char *name = malloc(capacity);
	CLEANUP_FREE char *value = malloc(capacity);
	int r = object && name && value ? 0 : -ENOMEM;
	for (const char *c = text; r == 0 && *c;) {
		size_t size = strcspn(c, "&");
		size_t split = strcspn(c, "=&");
		if (size) {
			const char *from = split < size ? c + split + 1 : c + size;
			r = decode(name, capacity, c, MIN(split, size), 1);
			if (r == 0)
				r = decode(value, capacity, from, (size_t)(c + size - from), 1);
			if (r == 0 && (++count > URI_QUERY_PARAMETERS_MAX || !text_is_utf8(name, strlen(name)) ||
			               !text_is_utf8(value, strlen(value))))
				r = -EINVAL;
			if (r == 0 && add(object, name, value) < 0)
				r = -ENOMEM;
		}
		c += size + (c[size] == '&');
	}
	if (r == 0)
		return object;
	json_decref(object);
	if (r == -ENOMEM)
		error_set_errno(e, ENOMEM, "query");
	else
		error_set(e, ERROR_INVALID, "the query is malformed: percent-encoded UTF-8, at most %d parameters",
		          URI_QUERY_PARAMETERS_MAX);
	return NULL;
}
