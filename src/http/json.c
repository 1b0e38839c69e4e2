#include "http/json.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>

/* jansson's own depth limit is fixed at 2048 when it is built; hostile nesting is refused before it allocates. */
static int check_depth(const char *data, size_t size, struct error *e)
{
	unsigned depth = 0;
	int in_string = 0;
	for (size_t i = 0; i < size; i++) {
		char c = data[i];
		if (in_string) {
			if (c == '\\')
				i++;
			else if (c == '"')
				in_string = 0;
		} else if (c == '"') {
			in_string = 1;
		} else if (c == '[' || c == '{') {
			if (++depth > JSON_DEPTH_MAX)
				return error_set(e, ERROR_INVALID, "JSON is nested deeper than %d levels (byte %zu)", JSON_DEPTH_MAX,
				                 i + 1);
		} else if ((c == ']' || c == '}') && depth) {
			depth--;
		}
	}
	return 0;
}

int json_read(const char *data, size_t size, size_t size_max, json_t **ret, struct error *e)
{
	*ret = NULL;
	if (size > size_max)
		return error_set(e, ERROR_TOO_LARGE, "JSON body of %zu bytes is larger than the limit of %zu", size, size_max);
	int r = check_depth(data, size, e);
	if (r < 0)
		return r;
	json_error_t error;
	json_t *value = json_loadb(data, size, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, &error);
	if (!value) {
		if (json_error_code(&error) == json_error_out_of_memory)
			return error_set_errno(e, ENOMEM, "JSON body");
		return error_set(e, ERROR_INVALID, "JSON body, line %d column %d (byte %d): %s", error.line, error.column,
		                 error.position, error.text);
	}
	*ret = value;
	return 0;
}

int json_read_object(const char *data, size_t size, size_t size_max, json_t **ret, struct error *e)
{
	size_t blank = 0;
	while (blank < size && strchr(" \t\r\n", data[blank]) && data[blank])
		blank++;
	if (blank == size && size <= size_max) {
		*ret = json_object();
		return *ret ? 0 : error_set_errno(e, ENOMEM, "JSON body");
	}
	int r = json_read(data, size, size_max, ret, e);
	if (r == 0 && !json_is_object(*ret)) {
		json_decref(*ret);
		*ret = NULL;
		return error_set(e, ERROR_INVALID, "JSON body must be an object");
	}
	return r;
}

int json_check_fields(const json_t *object, const char *const *allowed, struct error *e)
{
	for (void *i = json_object_iter((json_t *)(uintptr_t)object); i;
	     i = json_object_iter_next((json_t *)(uintptr_t)object, i)) {
		const char *key = json_object_iter_key(i);
		size_t n = 0;
		while (allowed[n] && strcmp(allowed[n], key) != 0)
			n++;
		if (!allowed[n])
			return error_set(e, ERROR_INVALID, "unknown field \"%.64s\"", key);
	}
	return 0;
}

static json_t *present(const json_t *object, const char *field)
{
	json_t *value = json_object_get(object, field);
	return json_is_null(value) ? NULL : value;
}

int json_read_string(const json_t *object, const char *field, size_t bytes_max, const char **ret, struct error *e)
{
	const json_t *value = present(object, field);
	if (!value)
		return 0;
	if (!json_is_string(value))
		return error_set(e, ERROR_INVALID, "field \"%s\" must be a string", field);
	if (json_string_length(value) > bytes_max)
		return error_set(e, ERROR_INVALID, "field \"%s\" is longer than %zu bytes", field, bytes_max);
	*ret = json_string_value(value);
	return 1;
}

int json_read_u64(const json_t *object, const char *field, uint64_t min, uint64_t max, uint64_t *ret, struct error *e)
{
	const json_t *value = present(object, field);
	if (!value)
		return 0;
	if (!json_is_integer(value))
		return error_set(e, ERROR_INVALID, "field \"%s\" must be a whole number", field);
	json_int_t number = json_integer_value(value);
	if (number < 0 || (uint64_t)number < min || (uint64_t)number > max)
		return error_set(e, ERROR_INVALID, "field \"%s\" must be between %" PRIu64 " and %" PRIu64, field, min, max);
	*ret = (uint64_t)number;
	return 1;
}

int json_read_bool(const json_t *object, const char *field, int *ret, struct error *e)
{
	const json_t *value = present(object, field);
	if (!value)
		return 0;
	if (!json_is_boolean(value))
		return error_set(e, ERROR_INVALID, "field \"%s\" must be true or false", field);
	*ret = json_is_true(value);
	return 1;
}

int json_read_object_field(const json_t *object, const char *field, size_t entries_max, json_t **ret, struct error *e)
{
	json_t *value = present(object, field);
	if (!value)
		return 0;
	if (!json_is_object(value))
		return error_set(e, ERROR_INVALID, "field \"%s\" must be an object", field);
	if (json_object_size(value) > entries_max)
		return error_set(e, ERROR_INVALID, "field \"%s\" has more than %zu entries", field, entries_max);
	*ret = value;
	return 1;
}

int json_read_array(const json_t *object, const char *field, size_t entries_max, json_t **ret, struct error *e)
{
	json_t *value = present(object, field);
	if (!value)
		return 0;
	if (!json_is_array(value))
		return error_set(e, ERROR_INVALID, "field \"%s\" must be an array", field);
	if (json_array_size(value) > entries_max)
		return error_set(e, ERROR_INVALID, "field \"%s\" has more than %zu elements", field, entries_max);
	*ret = value;
	return 1;
}

int json_read_string_array(const json_t *object, const char *field, size_t entries_max, size_t bytes_max, json_t **ret,
                           struct error *e)
{
	json_t *array;
	int r = json_read_array(object, field, entries_max, &array, e);
	if (r <= 0)
		return r;
	for (size_t i = 0; i < json_array_size(array); i++) {
		const json_t *item = json_array_get(array, i);
		if (!json_is_string(item) || json_string_length(item) == 0 || json_string_length(item) > bytes_max)
			return error_set(e, ERROR_INVALID, "field \"%s\": element %zu must be a string of 1 to %zu bytes", field, i,
			                 bytes_max);
	}
	*ret = array;
	return 1;
}

int json_read_string_map(const json_t *object, const char *field, size_t entries_max, size_t bytes_max, json_t **ret,
                         struct error *e)
{
	json_t *map;
	int r = json_read_object_field(object, field, entries_max, &map, e);
	if (r <= 0)
		return r;
	const char *key;
	json_t *value;
	json_object_foreach(map, key, value)
	{
		if (!json_is_string(value) || json_string_length(value) > bytes_max)
			return error_set(e, ERROR_INVALID, "field \"%s\": value of \"%.64s\" must be a string of at most %zu bytes",
			                 field, key, bytes_max);
	}
	*ret = map;
	return 1;
}
