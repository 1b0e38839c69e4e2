#include <errno.h>

#include "check.h"
#include "guest/json_text.h"
#include "guest/request.h"

static json_t *parse(const char *text)
{
	struct error e;
	json_t *value = NULL;
	CHECK_INT(json_text_parse(text, strlen(text), &value, &e), 0);
	return value;
}

static void refuse(const char *text, const char *part)
{
	struct error e;
	json_t *value = NULL;
	CHECK(json_text_parse(text, strlen(text), &value, &e) < 0);
	CHECK_INT(e.code, ERROR_INVALID);
	CHECK(strstr(e.message, part) != NULL);
}

/* `size` characters 'A', with `special` put into the middle. */
static char *long_text(size_t size, const char *special)
{
	char *text = malloc(size + 1);
	CHECK(text != NULL);
	memset(text, 'A', size);
	text[size] = '\0';
	memcpy(text + size / 2, special, strlen(special));
	return text;
}

/* A long string comes back byte for byte, however it is written. */
static void test_long_strings(void)
{
	static const struct {
		const char *written;
		const char *read;
	} cases[] = {{"+/", "+/"}, {"\\\"\\\\", NULL}, {"\xc3\xa9", "\xc3\xa9"}, {"\\u0041", NULL}, {"{[", "{["}};
	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		for (size_t size = JSON_TEXT_LONG_BYTES - 1; size <= JSON_TEXT_LONG_BYTES + 9; size++) {
			char *body = long_text(size, cases[i].written);
			struct buf text = {0};
			CHECK_INT(buf_printf(&text, "{\"a\":{\"pid\":7,\"b\": \"%s\" },\"c\":[\"x\",\"%s\"]}", body, body), 0);
			json_t *plain = json_loads(text.data, 0, NULL);
			json_t *value = parse(text.data);
			CHECK(json_equal(plain, value));
			const char *got = json_string_value(json_object_get(json_object_get(value, "a"), "b"));
			if (cases[i].read)
				CHECK_STR(got, body);
			json_decref(plain);
			json_decref(value);
			buf_free(&text);
			free(body);
		}
	}
}

/* More of them than are taken around the parser, long keys, and what only looks like one. */
static void test_many_and_keys(void)
{
	char *body = long_text(JSON_TEXT_LONG_BYTES, "");
	struct buf text = {0};
	CHECK_INT(buf_append_string(&text, "{"), 0);
	for (int i = 0; i < JSON_TEXT_LONG_MAX + 3; i++)
		CHECK_INT(buf_printf(&text, "\"%s%d\" : \"%s\",", body, i, body), 0);
	CHECK_INT(buf_append_string(&text, "\"last\":\"long-0-0\"}"), 0);
	json_t *value = parse(text.data);
	CHECK_INT(json_object_size(value), JSON_TEXT_LONG_MAX + 4);
	CHECK_STR(json_string_value(json_object_get(value, "last")), "long-0-0");
	json_decref(value);
	buf_free(&text);
	free(body);
}

static void test_refusals(void)
{
	char *body = long_text(JSON_TEXT_LONG_BYTES, "\n");
	char *cut = long_text(JSON_TEXT_LONG_BYTES, "");
	struct buf text = {0};
	CHECK_INT(buf_printf(&text, "{\"a\":\"%s\"}", body), 0);
	refuse(text.data, "invalid JSON"); /* a raw control character */
	buf_free(&text);
	CHECK_INT(buf_printf(&text, "{\"a\":\"%s", cut), 0);
	refuse(text.data, "invalid JSON");
	buf_free(&text);
	CHECK_INT(buf_printf(&text, "{\"a\":\"%s\",\"a\":1}", cut), 0);
	refuse(text.data, "invalid JSON"); /* the same key twice */
	buf_free(&text);
	CHECK_INT(buf_printf(&text, "\"%s\"", cut), 0);
	refuse(text.data, "JSON"); /* no object */
	buf_free(&text);
	refuse("[]", "must be a JSON object");
	refuse("{\"a\":\"\\", "invalid JSON");
	refuse("{\"a\":\"\\\"", "invalid JSON");
	free(body);
	free(cut);
}

static void test_depth(void)
{
	for (int depth = AGENT_JSON_DEPTH_MAX - 1; depth <= AGENT_JSON_DEPTH_MAX; depth++) {
		struct buf text = {0};
		CHECK_INT(buf_append_string(&text, "{\"a\":"), 0);
		for (int i = 0; i < depth; i++)
			CHECK_INT(buf_append_string(&text, "["), 0);
		for (int i = 0; i < depth; i++)
			CHECK_INT(buf_append_string(&text, "]"), 0);
		CHECK_INT(buf_append_string(&text, "}"), 0);
		if (depth < AGENT_JSON_DEPTH_MAX)
			json_decref(parse(text.data));
		else
			refuse(text.data, "nested deeper");
		buf_free(&text);
	}
}

int main(void)
{
	struct error e;
	json_t *empty = NULL;
	CHECK_INT(json_text_parse("", 0, &empty, &e), 0);
	CHECK_INT(json_object_size(empty), 0);
	json_decref(empty);
	test_long_strings();
	test_many_and_keys();
	test_refusals();
	test_depth();
	return 0;
}
