/* Text and number helpers: strict parsing, encoding, ids, time. */
#ifndef SPACE_BASE_TEXT_H
#define SPACE_BASE_TEXT_H

#include "base/macros.h"

/* Copies with truncation check: 0 or -ENAMETOOLONG (then *to is the empty string). */
int text_copy(char *to, size_t size, const char *from);
/* snprintf that tells truncation: 0 or -ENAMETOOLONG. */
int text_format(char *to, size_t size, const char *format, ...) PRINTF_LIKE(3, 4);
/* Whole-string decimal; no sign, no space. 0, -EINVAL, or -ERANGE if above max. */
int text_parse_u64(const char *text, uint64_t max, uint64_t *ret);
/* "512", "512M", "4G", "64K", "1T" (binary multiples, optional trailing "iB" or "B") to bytes. */
int text_parse_size(const char *text, uint64_t *ret_bytes);
/* "90", "90s", "5m", "2h", "7d" to seconds. */
int text_parse_duration(const char *text, uint64_t *ret_s);
/* Human size such as "1.5 GiB" into `to` (at least 16 bytes). */
void text_format_size(char *to, size_t size, uint64_t bytes);
int text_starts_with(const char *text, const char *prefix);
int text_ends_with(const char *text, const char *suffix);
int text_is_utf8(const char *data, size_t size);
/* Lower-case hex of `size` bytes; `to` has room for 2*size+1. */
void text_hex(char *to, const void *data, size_t size);
/* Standard base64 with padding; returns the length, `to` needs text_base64_size(size) bytes (with the NUL). */
size_t text_base64_size(size_t size);
size_t text_base64(char *to, const void *data, size_t size);
/* Strict decoder (padding optional). `to` needs size/4*3+3 bytes. Returns the length or -EINVAL. */
long text_base64_decode(void *to, const char *text, size_t size);
/* Constant-time comparison of two strings; true if equal. */
int text_equal_secret(const char *a, const char *b);

/* Random bytes from the kernel; never fails once the kernel's generator is up (aborts otherwise). */
void random_bytes(void *data, size_t size);
/* A prefix letter and ID_RANDOM_CHARS characters of [a-z0-9] (about 98 bits). `to` has ID_BYTES bytes. */
#define ID_RANDOM_CHARS 19
#define ID_BYTES 24
void id_make(char to[ID_BYTES], char prefix);
int id_is_valid(const char *id, char prefix);
/* 32 random bytes as 64 hex characters. */
#define TOKEN_BYTES 72
void token_make(char to[TOKEN_BYTES]);

uint64_t time_realtime_ms(void);
uint64_t time_realtime_ns(void);
uint64_t time_monotonic_ms(void);
uint64_t time_monotonic_us(void);
/* RFC 3339 in UTC with milliseconds, "2026-01-31T12:00:00.000Z"; `to` has at least 32 bytes. */
void time_format_rfc3339(char *to, size_t size, uint64_t realtime_ms);

#endif
