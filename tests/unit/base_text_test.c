#include <errno.h>

#include "base/text.h"
#include "check.h"

static void test_copy_tells_truncation(void)
{
	char to[4];
	CHECK_INT(text_copy(to, sizeof(to), "abc"), 0);
	CHECK_STR(to, "abc");
	CHECK_INT(text_copy(to, sizeof(to), "abcd"), -ENAMETOOLONG);
	CHECK_STR(to, "");
	CHECK_INT(text_copy(to, 0, ""), -ENAMETOOLONG);
	CHECK_INT(text_format(to, sizeof(to), "%d", 999), 0);
	CHECK_INT(text_format(to, sizeof(to), "%d", 1000), -ENAMETOOLONG);
}

static void test_numbers_are_strict(void)
{
	static const char *const bad[] = {"", " 1", "1 ", "+1", "-1", "0x10", "1.0", "1e3", "ten", "1\n"};
	uint64_t value = 77;
	for (size_t i = 0; i < ARRAY_SIZE(bad); i++)
		CHECK_INT(text_parse_u64(bad[i], UINT64_MAX, &value), -EINVAL);
	CHECK_INT(text_parse_u64(NULL, 1, &value), -EINVAL);
	CHECK_INT(text_parse_u64("18446744073709551616", UINT64_MAX, &value), -ERANGE);
	CHECK_INT(text_parse_u64("65536", 65535, &value), -ERANGE);
	CHECK_INT(value, 77);
	CHECK_INT(text_parse_u64("18446744073709551615", UINT64_MAX, &value), 0);
	CHECK(value == UINT64_MAX);
	CHECK_INT(text_parse_u64("0", 0, &value), 0);
	CHECK_INT(value, 0);
	CHECK_INT(text_parse_u64("0065535", 65535, &value), 0);
	CHECK_INT(value, 65535);
}

static void test_sizes(void)
{
	static const struct {
		const char *text;
		uint64_t bytes;
	} good[] = {
	    {"0", 0},
	    {"512", 512},
	    {"512B", 512},
	    {"64K", 65536},
	    {"64k", 65536},
	    {"1KiB", 1024},
	    {"4G", 4 * GIB},
	    {"4GB", 4 * GIB},
	    {"1T", 1024 * GIB},
	    {"512M", 512 * MIB},
	    {"16777215T", UINT64_C(16777215) << 40},
	};
	static const char *const bad[] = {"", "K", "1X", "1KK", "1 K", "-1K", "1iB", "1Ki", "1BB", "1.5G"};
	uint64_t bytes;
	for (size_t i = 0; i < ARRAY_SIZE(good); i++) {
		CHECK_INT(text_parse_size(good[i].text, &bytes), 0);
		CHECK(bytes == good[i].bytes);
	}
	for (size_t i = 0; i < ARRAY_SIZE(bad); i++)
		CHECK_INT(text_parse_size(bad[i], &bytes), -EINVAL);
	CHECK_INT(text_parse_size("16777216T", &bytes), -ERANGE);
	CHECK_INT(text_parse_size("99999999999999999999", &bytes), -ERANGE);
}

static void test_durations(void)
{
	uint64_t s;
	CHECK_INT(text_parse_duration("90", &s), 0);
	CHECK_INT(s, 90);
	CHECK_INT(text_parse_duration("90s", &s), 0);
	CHECK_INT(s, 90);
	CHECK_INT(text_parse_duration("5m", &s), 0);
	CHECK_INT(s, 300);
	CHECK_INT(text_parse_duration("2h", &s), 0);
	CHECK_INT(s, 7200);
	CHECK_INT(text_parse_duration("7d", &s), 0);
	CHECK_INT(s, 604800);
	CHECK_INT(text_parse_duration("5w", &s), -EINVAL);
	CHECK_INT(text_parse_duration("5ms", &s), -EINVAL);
	CHECK_INT(text_parse_duration("m", &s), -EINVAL);
	CHECK_INT(text_parse_duration("", &s), -EINVAL);
	CHECK_INT(text_parse_duration("213503982334602d", &s), -ERANGE);
}

static void test_size_format(void)
{
	char to[16];
	text_format_size(to, sizeof(to), 0);
	CHECK_STR(to, "0 B");
	text_format_size(to, sizeof(to), 1023);
	CHECK_STR(to, "1023 B");
	text_format_size(to, sizeof(to), 1536);
	CHECK_STR(to, "1.5 KiB");
	text_format_size(to, sizeof(to), 4 * GIB);
	CHECK_STR(to, "4.0 GiB");
	text_format_size(to, sizeof(to), UINT64_MAX);
	CHECK(strlen(to) < sizeof(to));
}

/* Cases of RFC 3629 section 3 and 10: overlong forms, surrogates, above U+10FFFF, cut sequences. */
static void test_utf8(void)
{
	static const char *const good[] = {"",
	                                   "plain",
	                                   "\xc3\xa4",
	                                   "\xe4\xb8\xad",
	                                   "\xed\x9f\xbf",
	                                   "\xee\x80\x80",
	                                   "\xf0\x9f\x98\x80",
	                                   "\xf4\x8f\xbf\xbf"};
	static const char *const bad[] = {"\x80",
	                                  "\xc0\x80",
	                                  "\xc1\xbf",
	                                  "\xe0\x9f\xbf",
	                                  "\xed\xa0\x80",
	                                  "\xf0\x8f\xbf\xbf",
	                                  "\xf4\x90\x80\x80",
	                                  "\xf5\x80\x80\x80",
	                                  "\xff",
	                                  "\xe4\xb8",
	                                  "\xc3",
	                                  "a\303b"};
	for (size_t i = 0; i < ARRAY_SIZE(good); i++)
		CHECK(text_is_utf8(good[i], strlen(good[i])));
	for (size_t i = 0; i < ARRAY_SIZE(bad); i++)
		CHECK(!text_is_utf8(bad[i], strlen(bad[i])));
	CHECK(text_is_utf8("a\0b", 3));
}

/* Vectors of RFC 4648 section 10. */
static void test_base64(void)
{
	static const char *const pairs[][2] = {{"", ""},
	                                       {"f", "Zg=="},
	                                       {"fo", "Zm8="},
	                                       {"foo", "Zm9v"},
	                                       {"foob", "Zm9vYg=="},
	                                       {"fooba", "Zm9vYmE="},
	                                       {"foobar", "Zm9vYmFy"}};
	char to[64];
	for (size_t i = 0; i < ARRAY_SIZE(pairs); i++) {
		size_t n = strlen(pairs[i][0]);
		CHECK_INT(text_base64(to, pairs[i][0], n), strlen(pairs[i][1]));
		CHECK_STR(to, pairs[i][1]);
		CHECK_INT(text_base64_size(n), strlen(pairs[i][1]) + 1);
		CHECK_INT(text_base64_decode(to, pairs[i][1], strlen(pairs[i][1])), n);
		CHECK(memcmp(to, pairs[i][0], n) == 0);
	}
	CHECK_INT(text_base64_decode(to, "Zg", 2), 1);   /* padding may be left out */
	CHECK_INT(text_base64_decode(to, "-_-_", 4), 3); /* URL alphabet as well */
	static const char *const bad[] = {"Z", "Zg=", "Zg===", "Z===", "====", "Z g=", "Zm9v\n", "=Zm9", "Zm=v"};
	for (size_t i = 0; i < ARRAY_SIZE(bad); i++)
		CHECK_INT(text_base64_decode(to, bad[i], strlen(bad[i])), -EINVAL);
	unsigned char all[256];
	char encoded[352];
	unsigned char back[256 + 3];
	for (unsigned i = 0; i < 256; i++)
		all[i] = (unsigned char)i;
	size_t n = text_base64(encoded, all, sizeof(all));
	CHECK_INT(text_base64_decode(back, encoded, n), 256);
	CHECK(memcmp(all, back, 256) == 0);
}

static void test_hex_and_prefixes(void)
{
	char to[16];
	text_hex(to, "\x00\xff\x1a", 3);
	CHECK_STR(to, "00ff1a");
	CHECK(text_starts_with("abc", "ab"));
	CHECK(text_starts_with("abc", ""));
	CHECK(!text_starts_with("a", "ab"));
	CHECK(text_ends_with("abc", "bc"));
	CHECK(text_ends_with("abc", ""));
	CHECK(!text_ends_with("c", "bc"));
}

static void test_secret_comparison(void)
{
	CHECK(text_equal_secret("", ""));
	CHECK(text_equal_secret("token", "token"));
	CHECK(!text_equal_secret("token", "tokem"));
	CHECK(!text_equal_secret("token", "toke"));
	CHECK(!text_equal_secret("toke", "token"));
	CHECK(!text_equal_secret("", "x"));
	CHECK(!text_equal_secret("x", ""));
	CHECK(!text_equal_secret("aa", "a")); /* a repeated shorter one must not pass */
}

static void test_ids(void)
{
	char a[ID_BYTES];
	char b[ID_BYTES];
	id_make(a, 's');
	id_make(b, 's');
	CHECK(strcmp(a, b) != 0);
	CHECK(id_is_valid(a, 's'));
	CHECK(!id_is_valid(a, 'b'));
	CHECK(!id_is_valid(NULL, 's'));
	CHECK(!id_is_valid("", 's'));
	CHECK(!id_is_valid("s", 's'));
	CHECK(!id_is_valid("s../../../etc/passwd", 's'));
	a[3] = 'A';
	CHECK(!id_is_valid(a, 's'));
	char longer[ID_BYTES + 2];
	snprintf(longer, sizeof(longer), "%sx", b);
	CHECK(!id_is_valid(longer, 's'));
	char token[TOKEN_BYTES];
	token_make(token);
	CHECK_INT(strlen(token), 64);
	CHECK_INT(strspn(token, "0123456789abcdef"), 64);
}

static void test_time(void)
{
	char to[32];
	time_format_rfc3339(to, sizeof(to), 0);
	CHECK_STR(to, "1970-01-01T00:00:00.000Z");
	time_format_rfc3339(to, sizeof(to), UINT64_C(1769860800007));
	CHECK_STR(to, "2026-01-31T12:00:00.007Z");
	uint64_t before = time_monotonic_us();
	CHECK(time_monotonic_us() >= before);
	CHECK(time_realtime_ns() / 1000000 <= time_realtime_ms());
}

int main(void)
{
	test_copy_tells_truncation();
	test_numbers_are_strict();
	test_sizes();
	test_durations();
	test_size_format();
	test_utf8();
	test_base64();
	test_hex_and_prefixes();
	test_secret_comparison();
	test_ids();
	test_time();
	return 0;
}
