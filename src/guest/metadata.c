#include "guest/metadata.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/xattr.h>

#include "base/text.h"
#include "guest/entry.h"

#define METADATA_HEADER "x-metadata-"
#define METADATA_PREFIX "user.e2b."
#define METADATA_NAMES_BYTES 16384

static int is_printable(const char *text)
{
	for (; *text; text++)
		if (*text < 0x20 || *text > 0x7e)
			return 0;
	return 1;
}

static int has_key(const struct metadata *m, const char *key)
{
	for (size_t i = 0; i < m->count; i++)
		if (strcmp(m->pairs[i].key, key) == 0)
			return 1;
	return 0;
}

int metadata_from_request(struct metadata *m, const struct request *r, struct error *e)
{
	size_t total = 0;
	m->count = 0;
	for (size_t i = 0; i < r->header_count; i++) {
		const struct request_header *header = &r->headers[i];
		if (!text_starts_with(header->name, METADATA_HEADER) || !header->name[sizeof(METADATA_HEADER) - 1])
			continue;
		const char *key = header->name + sizeof(METADATA_HEADER) - 1;
		if (has_key(m, key))
			continue;
		if (strlen(key) > METADATA_KEY_BYTES_MAX)
			return error_set(e, ERROR_INVALID, "a metadata key is longer than %d bytes", METADATA_KEY_BYTES_MAX);
		if (!is_printable(key) || !is_printable(header->value))
			return error_set(e, ERROR_INVALID, "metadata keys and values must be printable US-ASCII");
		total += sizeof(METADATA_PREFIX) - 1 + strlen(key) + strlen(header->value);
		if (total > METADATA_TOTAL_BYTES_MAX || m->count == METADATA_COUNT_MAX)
			return error_set(e, ERROR_INVALID, "metadata is limited to %d bytes and %d keys", METADATA_TOTAL_BYTES_MAX,
			                 METADATA_COUNT_MAX);
		m->pairs[m->count].key = key;
		m->pairs[m->count++].value = header->value;
	}
	return 0;
}

int metadata_write(int fd, const struct metadata *m)
{
	char names[METADATA_NAMES_BYTES];
	ssize_t size = flistxattr(fd, names, sizeof(names));
	if (size < 0 && errno == EOPNOTSUPP)
		return 0;
	for (ssize_t at = 0; at < size; at += (ssize_t)strlen(names + at) + 1) {
		const char *name = names + at;
		if (text_starts_with(name, METADATA_PREFIX) && !(m && has_key(m, name + sizeof(METADATA_PREFIX) - 1)))
			(void)fremovexattr(fd, name);
	}
	for (size_t i = 0; m && i < m->count; i++) {
		char name[256];
		int r = text_format(name, sizeof(name), METADATA_PREFIX "%s", m->pairs[i].key);
		if (r < 0)
			return r;
		if (fsetxattr(fd, name, m->pairs[i].value, strlen(m->pairs[i].value), 0) < 0)
			return errno == EOPNOTSUPP ? 0 : -errno;
	}
	return 0;
}

/* Most files have none: this is kept apart so that the usual case needs no buffers. */
__attribute__((noinline)) static int append_pairs(struct buf *b, const char *path)
{
	char names[METADATA_NAMES_BYTES], value[METADATA_TOTAL_BYTES_MAX];
	ssize_t size = llistxattr(path, names, sizeof(names));
	int count = 0, r = 0;
	for (ssize_t at = 0; at < size && r == 0; at += (ssize_t)strlen(names + at) + 1) {
		const char *name = names + at, *key = name + sizeof(METADATA_PREFIX) - 1;
		if (!text_starts_with(name, METADATA_PREFIX))
			continue;
		ssize_t n = lgetxattr(path, name, value, sizeof(value));
		/* Attributes set inside the guest can hold anything; those that JSON cannot carry are left out. */
		if (n < 0 || !text_is_utf8(value, (size_t)n) || !text_is_utf8(key, strlen(key)))
			continue;
		r = buf_append_string(b, count++ ? "," : ",\"metadata\":{");
		if (r == 0)
			r = entry_append_string(b, key, strlen(key));
		if (r == 0)
			r = buf_append_string(b, ":");
		if (r == 0)
			r = entry_append_string(b, value, (size_t)n);
	}
	return r < 0 || count == 0 ? r : buf_append_string(b, "}");
}

int metadata_append_json(struct buf *b, const char *path)
{
	return llistxattr(path, NULL, 0) > 0 ? append_pairs(b, path) : 0;
}
