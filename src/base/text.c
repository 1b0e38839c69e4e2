#include "base/text.h"

#include <ctype.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

int text_copy(char *to, size_t size, const char *from)
{
	size_t length = strlen(from);
	if (length >= size) {
		if (size)
			*to = '\0';
		return -ENAMETOOLONG;
	}
	memcpy(to, from, length + 1);
	return 0;
}

int text_format(char *to, size_t size, const char *format, ...)
{
	va_list args;
	va_start(args, format);
	int n = vsnprintf(to, size, format, args);
	va_end(args);
	return n < 0 || (size_t)n >= size ? -ENAMETOOLONG : 0;
}

static int parse_prefix_u64(const char **text, uint64_t *ret)
{
	const char *p = *text;
	uint64_t value = 0;
	if (!isdigit((unsigned char)*p))
		return -EINVAL;
	for (; isdigit((unsigned char)*p); p++) {
		uint64_t digit = (uint64_t)(*p - '0');
		if (value > (UINT64_MAX - digit) / 10)
			return -ERANGE;
		value = value * 10 + digit;
	}
	*text = p;
	*ret = value;
	return 0;
}

int text_parse_u64(const char *text, uint64_t max, uint64_t *ret)
{
	uint64_t value;
	if (!text)
		return -EINVAL;
	int r = parse_prefix_u64(&text, &value);
	if (r < 0)
		return r;
	if (*text)
		return -EINVAL;
	if (value > max)
		return -ERANGE;
	*ret = value;
	return 0;
}

int text_parse_size(const char *text, uint64_t *ret_bytes)
{
	uint64_t value;
	if (!text)
		return -EINVAL;
	int r = parse_prefix_u64(&text, &value);
	if (r < 0)
		return r;
	unsigned shift = 0;
	switch (*text) {
	case 'K':
	case 'k':
		shift = 10;
		break;
	case 'M':
	case 'm':
		shift = 20;
		break;
	case 'G':
	case 'g':
		shift = 30;
		break;
	case 'T':
	case 't':
		shift = 40;
		break;
	default:
		break;
	}
	if (shift) {
		text++;
		if (text[0] == 'i' && text[1] == 'B')
			text += 2;
	}
	if (*text == 'B')
		text++;
	if (*text)
		return -EINVAL;
	if (value > UINT64_MAX >> shift)
		return -ERANGE;
	*ret_bytes = value << shift;
	return 0;
}

int text_parse_duration(const char *text, uint64_t *ret_s)
{
	uint64_t value;
	uint64_t factor = 1;
	if (!text)
		return -EINVAL;
	int r = parse_prefix_u64(&text, &value);
	if (r < 0)
		return r;
	switch (*text) {
	case 's':
		text++;
		break;
	case 'm':
		factor = 60;
		text++;
		break;
	case 'h':
		factor = 3600;
		text++;
		break;
	case 'd':
		factor = 86400;
		text++;
		break;
	default:
		break;
	}
	if (*text)
		return -EINVAL;
	if (value > UINT64_MAX / factor)
		return -ERANGE;
	*ret_s = value * factor;
	return 0;
}

void text_format_size(char *to, size_t size, uint64_t bytes)
{
	static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
	double value = (double)bytes;
	size_t unit = 0;
	while (value >= 1024 && unit + 1 < ARRAY_SIZE(units)) {
		value /= 1024;
		unit++;
	}
	snprintf(to, size, unit ? "%.1f %s" : "%.0f %s", value, units[unit]);
}

int text_starts_with(const char *text, const char *prefix)
{
	return strncmp(text, prefix, strlen(prefix)) == 0;
}

int text_ends_with(const char *text, const char *suffix)
{
	size_t length = strlen(text);
	size_t tail = strlen(suffix);
	return length >= tail && strcmp(text + length - tail, suffix) == 0;
}

/* RFC 3629 section 4: no overlong forms, no surrogates, nothing above U+10FFFF. */
int text_is_utf8(const char *data, size_t size)
{
	const unsigned char *p = (const unsigned char *)data;
	const unsigned char *end = p + size;
	while (p < end) {
		size_t tail;
		unsigned char low = 0x80;
		unsigned char high = 0xbf;
		unsigned char c = *p++;
		if (c < 0x80)
			continue;
		if (c >= 0xc2 && c <= 0xdf) {
			tail = 1;
		} else if (c >= 0xe0 && c <= 0xef) {
			tail = 2;
			if (c == 0xe0)
				low = 0xa0;
			if (c == 0xed)
				high = 0x9f;
		} else if (c >= 0xf0 && c <= 0xf4) {
			tail = 3;
			if (c == 0xf0)
				low = 0x90;
			if (c == 0xf4)
				high = 0x8f;
		} else {
			return 0;
		}
		if ((size_t)(end - p) < tail)
			return 0;
		for (; tail; tail--, p++) {
			if (*p < low || *p > high)
				return 0;
			low = 0x80;
			high = 0xbf;
		}
	}
	return 1;
}

void text_hex(char *to, const void *data, size_t size)
{
	static const char digits[] = "0123456789abcdef";
	const unsigned char *p = data;
	for (size_t i = 0; i < size; i++) {
		*to++ = digits[p[i] >> 4];
		*to++ = digits[p[i] & 15];
	}
	*to = '\0';
}

/* Filled before main() runs: pairs of characters for 12 bits each way out, and one table for each position of a group
 * of four on the way in, so that three bytes cost two stores or four loads. Guests run translated, where that counts.
 */
#define BASE64_INVALID UINT32_C(0x01000000)
static char base64_pairs[4096][2];
static uint32_t base64_digits[4][256];

static void __attribute__((constructor)) base64_fill(void)
{
	static const char alphabet[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
	for (unsigned i = 0; i < 4096; i++) {
		base64_pairs[i][0] = alphabet[i >> 6];
		base64_pairs[i][1] = alphabet[i & 63];
	}
	for (unsigned position = 0; position < 4; position++) {
		for (unsigned c = 0; c < 256; c++)
			base64_digits[position][c] = BASE64_INVALID;
		for (uint32_t digit = 0; digit < 64; digit++)
			base64_digits[position][(unsigned char)alphabet[digit]] = digit << (18 - 6 * position);
		/* RFC 4648 section 5: the form for URLs and file names. */
		base64_digits[position]['-'] = base64_digits[position]['+'];
		base64_digits[position]['_'] = base64_digits[position]['/'];
	}
}

size_t text_base64_size(size_t size)
{
	return (size + 2) / 3 * 4 + 1;
}

size_t text_base64(char *to, const void *data, size_t size)
{
	const unsigned char *p = data;
	char *start = to;
	for (; size >= 3; size -= 3, p += 3, to += 4) {
		uint32_t v = (uint32_t)p[0] << 16 | (uint32_t)p[1] << 8 | p[2];
		memcpy(to, base64_pairs[v >> 12], 2);
		memcpy(to + 2, base64_pairs[v & 4095], 2);
	}
	if (size) {
		uint32_t v = (uint32_t)p[0] << 16 | (size == 2 ? (uint32_t)p[1] << 8 : 0);
		memcpy(to, base64_pairs[v >> 12], 2);
		to[2] = size == 2 ? base64_pairs[v & 4095][0] : '=';
		to[3] = '=';
		to += 4;
	}
	*to = '\0';
	return (size_t)(to - start);
}

long text_base64_decode(void *to, const char *text, size_t size)
{
	unsigned char *out = to;
	const unsigned char *in = (const unsigned char *)text;
	if (size >= 4 && size % 4 == 0) {
		if (in[size - 1] == '=')
			size--;
		if (in[size - 1] == '=')
			size--;
	}
	uint32_t seen = 0;
	for (; size >= 4; size -= 4, in += 4, out += 3) {
		uint32_t v =
		    base64_digits[0][in[0]] | base64_digits[1][in[1]] | base64_digits[2][in[2]] | base64_digits[3][in[3]];
		seen |= v;
		out[0] = (unsigned char)(v >> 16);
		out[1] = (unsigned char)(v >> 8);
		out[2] = (unsigned char)v;
	}
	if (size == 1)
		return -EINVAL;
	if (size) {
		uint32_t v = base64_digits[0][in[0]] | base64_digits[1][in[1]];
		if (size == 3)
			v |= base64_digits[2][in[2]];
		seen |= v;
		*out++ = (unsigned char)(v >> 16);
		if (size == 3)
			*out++ = (unsigned char)(v >> 8);
	}
	return seen & BASE64_INVALID ? -EINVAL : (long)(out - (unsigned char *)to);
}

int text_equal_secret(const char *a, const char *b)
{
	size_t length_a = strlen(a);
	size_t length_b = strlen(b);
	unsigned char difference = length_a != length_b;
	for (size_t i = 0; i < length_a; i++)
		difference |= (unsigned char)(a[i] ^ b[length_b ? i % length_b : 0]);
	return difference == 0;
}

void random_bytes(void *data, size_t size)
{
	char *p = data;
	while (size) {
		ssize_t n = getrandom(p, size, 0);
		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			abort();
		p += n;
		size -= (size_t)n;
	}
}

void id_make(char to[ID_BYTES], char prefix)
{
	static const char alphabet[] = "abcdefghijklmnopqrstuvwxyz0123456789";
	to[0] = prefix;
	for (size_t i = 1; i <= ID_RANDOM_CHARS;) {
		unsigned char bytes[32];
		random_bytes(bytes, sizeof(bytes));
		for (size_t j = 0; j < sizeof(bytes) && i <= ID_RANDOM_CHARS; j++)
			if (bytes[j] < 252) /* 7 * 36: keeps the remainder unbiased */
				to[i++] = alphabet[bytes[j] % 36];
	}
	to[ID_RANDOM_CHARS + 1] = '\0';
}

int id_is_valid(const char *id, char prefix)
{
	if (!id || id[0] != prefix)
		return 0;
	for (size_t i = 1; i <= ID_RANDOM_CHARS; i++)
		if (!((id[i] >= 'a' && id[i] <= 'z') || (id[i] >= '0' && id[i] <= '9')))
			return 0;
	return id[ID_RANDOM_CHARS + 1] == '\0';
}

void token_make(char to[TOKEN_BYTES])
{
	unsigned char bytes[32];
	random_bytes(bytes, sizeof(bytes));
	text_hex(to, bytes, sizeof(bytes));
	explicit_bzero(bytes, sizeof(bytes));
}

static uint64_t clock_ns(clockid_t clock)
{
	struct timespec ts;
	clock_gettime(clock, &ts);
	return (uint64_t)ts.tv_sec * UINT64_C(1000000000) + (uint64_t)ts.tv_nsec;
}

uint64_t time_realtime_ns(void)
{
	return clock_ns(CLOCK_REALTIME);
}

uint64_t time_realtime_ms(void)
{
	return clock_ns(CLOCK_REALTIME) / 1000000;
}

uint64_t time_monotonic_ms(void)
{
	return clock_ns(CLOCK_MONOTONIC) / 1000000;
}

uint64_t time_monotonic_us(void)
{
	return clock_ns(CLOCK_MONOTONIC) / 1000;
}

void time_format_rfc3339(char *to, size_t size, uint64_t realtime_ms)
{
	time_t seconds = (time_t)(realtime_ms / 1000);
	struct tm tm;
	char day[24];
	gmtime_r(&seconds, &tm);
	strftime(day, sizeof(day), "%Y-%m-%dT%H:%M:%S", &tm);
	snprintf(to, size, "%s.%03uZ", day, (unsigned)(realtime_ms % 1000));
}
