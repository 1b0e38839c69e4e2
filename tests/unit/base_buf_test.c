#include <errno.h>

#include "base/buf.h"
#include "check.h"

static void test_append_keeps_a_terminator(void)
{
	CLEANUP_BUF struct buf b = {0};
	CHECK_INT(buf_append(&b, "ab\0c", 4), 0);
	CHECK_INT(b.size, 4);
	CHECK_INT(b.data[4], 0);
	CHECK_INT(buf_append(&b, NULL, 0), 0);
	CHECK_INT(buf_append_string(&b, "de"), 0);
	CHECK(memcmp(b.data, "ab\0cde", 7) == 0);
	CHECK_INT(buf_printf(&b, "%05d", 42), 0);
	CHECK(memcmp(b.data, "ab\0cde00042", 12) == 0);
}

static void test_limit_changes_nothing(void)
{
	CLEANUP_BUF struct buf b = {.limit = 4};
	CHECK_INT(buf_append(&b, "abc", 3), 0);
	CHECK_INT(buf_append(&b, "de", 2), -EMSGSIZE);
	CHECK_INT(buf_printf(&b, "%s", "de"), -EMSGSIZE);
	CHECK_STR(b.data, "abc");
	CHECK_INT(buf_append(&b, "d", 1), 0);
	CHECK_STR(b.data, "abcd");
	CHECK(!buf_reserve(&b, 1));
	CHECK(!buf_reserve(&b, SIZE_MAX));
	CHECK_STR(b.data, "abcd");
}

static void test_consume(void)
{
	CLEANUP_BUF struct buf b = {0};
	buf_consume(&b, 5); /* empty and never allocated */
	CHECK_INT(b.size, 0);
	buf_append_string(&b, "hello world");
	buf_consume(&b, 6);
	CHECK_STR(b.data, "world");
	buf_consume(&b, 0);
	CHECK_STR(b.data, "world");
	buf_consume(&b, 99);
	CHECK_STR(b.data, "");
	CHECK_INT(b.size, 0);
}

static void test_growth(void)
{
	CLEANUP_BUF struct buf b = {0};
	for (int i = 0; i < 100000; i++)
		CHECK_INT(buf_append(&b, &(char){(char)i}, 1), 0);
	CHECK_INT(b.size, 100000);
	for (int i = 0; i < 100000; i++)
		CHECK_INT(b.data[i], (char)i);
	buf_free(&b);
	CHECK(!b.data);
	CHECK_INT(b.size, 0);
	CHECK_INT(buf_append_string(&b, "again"), 0);
	CHECK_STR(b.data, "again");
}

int main(void)
{
	test_append_keeps_a_terminator();
	test_limit_changes_nothing();
	test_consume();
	test_growth();
	return 0;
}
