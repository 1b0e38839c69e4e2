/* JSON of clients and guests, and the field readers behind it. */
#include <string.h>

#include "fuzz.h"
#include "http/json.h"

#define SIZE_MAX_JSON 65536

static size_t depth_of(const json_t *value)
{
	size_t deepest = 0;
	size_t index;
	const char *key;
	json_t *child;
	if (json_is_array(value)) {
		json_array_foreach(value, index, child) deepest = MAX(deepest, depth_of(child));
		return deepest + 1;
	}
	if (json_is_object(value)) {
		json_object_foreach((json_t *)(uintptr_t)value, key, child) deepest = MAX(deepest, depth_of(child));
		return deepest + 1;
	}
	return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	char *copy = fuzz_copy(data, size);
	json_t *value = NULL;
	struct error e = {0};
	if (json_read(copy, size, SIZE_MAX_JSON, &value, &e) == 0) {
		FUZZ_CHECK(size <= SIZE_MAX_JSON && depth_of(value) <= JSON_DEPTH_MAX);
		json_decref(value);
	} else {
		FUZZ_CHECK(e.code != ERROR_NONE && e.message[0]);
	}
	value = NULL;
	if (json_read_object(copy, size, SIZE_MAX_JSON, &value, &e) == 0) {
		static const char *const allowed[] = {"name", "labels", "timeout", NULL};
		const char *text = NULL;
		uint64_t number = 0;
		json_t *map = NULL;
		FUZZ_CHECK(json_is_object(value));
		(void)json_check_fields(value, allowed, &e);
		if (json_read_string(value, "name", 64, &text, &e) == 1)
			FUZZ_CHECK(text && strlen(text) <= 64);
		if (json_read_u64(value, "timeout", 1, 100, &number, &e) == 1)
			FUZZ_CHECK(number >= 1 && number <= 100);
		if (json_read_string_map(value, "labels", 8, 64, &map, &e) == 1)
			FUZZ_CHECK(json_is_object(map) && json_object_size(map) <= 8);
		(void)json_read_string_array(value, "labels", 8, 64, &map, &e);
		json_decref(value);
	}
	free(copy);
	return 0;
}
