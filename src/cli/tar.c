#include "cli/tar.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/text.h"

#define NAME_SIZE 100
#define OCTAL_SIZE_MAX UINT64_C(077777777777)

struct ustar_header {
	char name[NAME_SIZE];
	char mode[8];
	char uid[8];
	char gid[8];
	char size[12];
	char mtime[12];
	char checksum[8];
	char type;
	char link[NAME_SIZE];
	char magic[6];
	char version[2];
	char user[32];
	char group[32];
	char device_major[8];
	char device_minor[8];
	char prefix[155];
	char unused[12];
};
_Static_assert(sizeof(struct ustar_header) == TAR_BLOCK_BYTES, "a header is one block");

static unsigned checksum(const struct ustar_header *h)
{
	const unsigned char *p = (const unsigned char *)h;
	unsigned sum = 0;
	for (size_t i = 0; i < sizeof(*h); i++)
		sum += i >= offsetof(struct ustar_header, checksum) && i < offsetof(struct ustar_header, type) ? ' ' : p[i];
	return sum;
}

/* Digits that fill the field but for its last byte, which stays NUL. */
static void put_octal(char *field, size_t size, uint64_t value)
{
	field[size - 1] = '\0';
	for (size_t i = size - 1; i-- > 0; value >>= 3)
		field[i] = (char)('0' + (value & 7));
}

size_t tar_padding(uint64_t size)
{
	return (size_t)(-size & (TAR_BLOCK_BYTES - 1));
}

static int append_zeros(struct buf *to, size_t size)
{
	char *room = size ? buf_reserve(to, size) : to->data;
	if (size && !room)
		return -ENOMEM;
	if (size) {
		memset(room, 0, size);
		to->size += size;
		to->data[to->size] = '\0';
	}
	return 0;
}

/* "LENGTH key=value\n", where LENGTH counts itself. */
static int add_record(struct buf *records, const char *key, const char *value)
{
	size_t base = strlen(key) + strlen(value) + 3;
	size_t length = base + 1;
	for (;;) {
		char digits[24];
		size_t with = base + (size_t)snprintf(digits, sizeof(digits), "%zu", length);
		if (with == length)
			break;
		length = with;
	}
	return buf_printf(records, "%zu %s=%s\n", length, key, value);
}

static int append_block(struct buf *to, const struct tar_entry *entry, uint64_t size)
{
	struct ustar_header h = {0};
	memcpy(h.name, entry->path, MIN(strlen(entry->path), sizeof(h.name)));
	memcpy(h.link, entry->link, MIN(strlen(entry->link), sizeof(h.link)));
	put_octal(h.mode, sizeof(h.mode), entry->mode & 07777);
	put_octal(h.uid, sizeof(h.uid), 0);
	put_octal(h.gid, sizeof(h.gid), 0);
	put_octal(h.size, sizeof(h.size), MIN(size, OCTAL_SIZE_MAX));
	put_octal(h.mtime, sizeof(h.mtime), entry->mtime_s > 0 ? MIN((uint64_t)entry->mtime_s, OCTAL_SIZE_MAX) : 0);
	h.type = entry->type;
	memcpy(h.magic, "ustar", 6);
	memcpy(h.version, "00", 2);
	put_octal(h.checksum, 7, checksum(&h));
	h.checksum[7] = ' ';
	return buf_append(to, &h, sizeof(h));
}

static int add_records(struct buf *records, const struct tar_entry *entry)
{
	char number[48];
	int r = 0;
	if (strlen(entry->path) > NAME_SIZE)
		r = add_record(records, "path", entry->path);
	if (r == 0 && strlen(entry->link) > NAME_SIZE)
		r = add_record(records, "linkpath", entry->link);
	if (r == 0 && entry->size > OCTAL_SIZE_MAX) {
		snprintf(number, sizeof(number), "%" PRIu64, entry->size);
		r = add_record(records, "size", number);
	}
	if (r == 0 && (entry->mtime_ns || entry->mtime_s < 0)) {
		snprintf(number, sizeof(number), "%" PRId64 ".%09u", entry->mtime_s, entry->mtime_ns);
		r = add_record(records, "mtime", number);
	}
	return r;
}

int tar_write_header(struct buf *to, const struct tar_entry *entry, struct error *e)
{
	CLEANUP_BUF struct buf records = {0};
	if (strlen(entry->path) >= TAR_NAME_BYTES_MAX || strlen(entry->link) >= TAR_NAME_BYTES_MAX)
		return error_set(e, ERROR_INVALID, "\"%.100s…\" is longer than %d bytes", entry->path, TAR_NAME_BYTES_MAX - 1);
	int r = add_records(&records, entry);
	if (r == 0 && records.size) {
		struct tar_entry extended = {.path = "pax-header", .link = "", .type = 'x', .mode = 0644};
		r = append_block(to, &extended, records.size);
		if (r == 0)
			r = buf_append(to, records.data, records.size);
		if (r == 0)
			r = append_zeros(to, tar_padding(records.size));
	}
	if (r == 0)
		r = append_block(to, entry, entry->size);
	return r < 0 ? error_set_errno(e, r, "packing %.200s", entry->path) : 0;
}

int tar_write_end(struct buf *to)
{
	return append_zeros(to, 2 * TAR_BLOCK_BYTES);
}

enum reader_state { READ_HEADER, READ_EXTENSION, READ_DATA, READ_PADDING, READ_DONE };

struct tar_reader {
	struct tar_reader_handlers handlers;
	enum reader_state state;
	unsigned char block[TAR_BLOCK_BYTES];
	size_t block_size;
	unsigned zero_blocks;
	uint64_t left;    /* bytes of data or extension */
	uint64_t padding; /* bytes to pass over after them */
	char extension_type;
	struct buf extension;
	int has_entry; /* the padding belongs to an entry that was announced */
	/* What an extended header said about the next entry. */
	char path[TAR_NAME_BYTES_MAX];
	char link[TAR_NAME_BYTES_MAX];
	int has_path;
	int has_link;
	int has_size;
	uint64_t size;
	int has_mtime;
	int64_t mtime_s;
	uint32_t mtime_ns;
};

int tar_reader_new(const struct tar_reader_handlers *handlers, struct tar_reader **ret, struct error *e)
{
	struct tar_reader *reader = calloc(1, sizeof(*reader));
	if (!reader)
		return error_set_errno(e, ENOMEM, "unpacking");
	reader->handlers = *handlers;
	reader->extension.limit = TAR_HEADER_BYTES_MAX;
	*ret = reader;
	return 0;
}

void tar_reader_free(struct tar_reader *reader)
{
	if (!reader)
		return;
	buf_free(&reader->extension);
	free(reader);
}

/* Octal with blanks or NULs around it, or base-256 when the first bit is set. */
static int read_number(const char *field, size_t size, uint64_t *ret)
{
	uint64_t value = 0;
	const unsigned char *p = (const unsigned char *)field;
	if (p[0] & 0x80) {
		if (p[0] != 0x80)
			return -EINVAL; /* negative or beyond 64 bits */
		for (size_t i = 1; i < size; i++) {
			if (value >> 55)
				return -EINVAL;
			value = value << 8 | p[i];
		}
		*ret = value;
		return 0;
	}
	size_t i = 0;
	while (i < size && p[i] == ' ')
		i++;
	for (; i < size && p[i] >= '0' && p[i] <= '7'; i++)
		value = value << 3 | (uint64_t)(p[i] - '0');
	for (; i < size; i++)
		if (p[i] != ' ' && p[i] != '\0')
			return -EINVAL;
	*ret = value;
	return 0;
}

static int set_name(char *to, int *has, const char *value, size_t size, struct error *e)
{
	if (size >= TAR_NAME_BYTES_MAX || memchr(value, '\0', size))
		return error_set(e, ERROR_INVALID, "the archive holds a name of more than %d bytes", TAR_NAME_BYTES_MAX - 1);
	memcpy(to, value, size);
	to[size] = '\0';
	*has = 1;
	return 0;
}

static int set_mtime(struct tar_reader *r, const char *value)
{
	int negative = value[0] == '-';
	uint64_t seconds = 0;
	size_t digits = strspn(value + negative, "0123456789");
	char whole[24];
	if (digits == 0 || digits > 18)
		return -EINVAL;
	memcpy(whole, value + negative, digits);
	whole[digits] = '\0';
	if (text_parse_u64(whole, INT64_MAX, &seconds) < 0)
		return -EINVAL;
	const char *p = value + negative + digits;
	uint32_t ns = 0;
	if (*p == '.') {
		uint32_t scale = 100000000;
		for (p++; *p >= '0' && *p <= '9'; p++, scale /= 10)
			ns += (uint32_t)(*p - '0') * scale;
	}
	r->has_mtime = *p == '\0';
	r->mtime_s = negative ? -(int64_t)seconds : (int64_t)seconds;
	r->mtime_ns = ns;
	return r->has_mtime ? 0 : -EINVAL;
}

static int take_record(struct tar_reader *r, const char *key, size_t key_size, const char *value, size_t size,
                       struct error *e)
{
	char number[64];
	if (key_size == 4 && memcmp(key, "path", 4) == 0)
		return set_name(r->path, &r->has_path, value, size, e);
	if (key_size == 8 && memcmp(key, "linkpath", 8) == 0)
		return set_name(r->link, &r->has_link, value, size, e);
	int is_size = key_size == 4 && memcmp(key, "size", 4) == 0;
	int is_mtime = key_size == 5 && memcmp(key, "mtime", 5) == 0;
	if (!is_size && !is_mtime)
		return 0;
	snprintf(number, sizeof(number), "%.*s", (int)MIN(size, sizeof(number) - 1), value);
	if (is_size ? text_parse_u64(number, INT64_MAX, &r->size) < 0 : set_mtime(r, number) < 0)
		return error_set(e, ERROR_INVALID, "the archive holds a bad %.*s", (int)key_size, key);
	if (is_size)
		r->has_size = 1;
	return 0;
}

static int take_pax(struct tar_reader *r, struct error *e)
{
	const char *p = r->extension.data;
	const char *end = p + r->extension.size;
	while (p < end && *p) {
		uint64_t length = 0;
		const char *digits = p;
		for (; p < end && *p >= '0' && *p <= '9' && p - digits < 9; p++)
			length = length * 10 + (uint64_t)(*p - '0');
		size_t head = (size_t)(p - digits);
		const char *equals = p < end && *p == ' ' ? memchr(p, '=', (size_t)(end - p)) : NULL;
		if (!head || !equals || length > (uint64_t)(end - digits) || digits + length < equals + 2 ||
		    digits[length - 1] != '\n')
			return error_set(e, ERROR_INVALID, "the archive holds a bad extended header");
		int result = take_record(r, p + 1, (size_t)(equals - p - 1), equals + 1,
		                         (size_t)(digits + length - 1 - (equals + 1)), e);
		if (result < 0)
			return result;
		p = digits + length;
	}
	return 0;
}

static int take_extension(struct tar_reader *r, struct error *e)
{
	int result = 0;
	size_t size = r->extension.size;
	if (r->extension_type == 'x')
		result = take_pax(r, e);
	while (size && r->extension.data[size - 1] == '\0')
		size--;
	if (r->extension_type == 'L')
		result = set_name(r->path, &r->has_path, r->extension.data ? r->extension.data : "", size, e);
	if (r->extension_type == 'K')
		result = set_name(r->link, &r->has_link, r->extension.data ? r->extension.data : "", size, e);
	buf_consume(&r->extension, r->extension.size);
	return result;
}

static int announce(struct tar_reader *r, const struct ustar_header *h, uint64_t size, uint64_t mode, uint64_t mtime,
                    struct error *e)
{
	struct tar_entry entry = {.type = h->type == '\0' || h->type == '7' ? '0' : h->type};
	if (!r->has_path) {
		int is_ustar = memcmp(h->magic, "ustar", 6) == 0;
		int has_prefix = is_ustar && h->prefix[0];
		snprintf(r->path, sizeof(r->path), "%.*s%s%.*s", has_prefix ? (int)sizeof(h->prefix) : 0, h->prefix,
		         has_prefix ? "/" : "", (int)sizeof(h->name), h->name);
	}
	if (!r->has_link)
		snprintf(r->link, sizeof(r->link), "%.*s", (int)sizeof(h->link), h->link);
	/* Archives from before ustar mark directories by a slash at the end. */
	size_t path_size = strlen(r->path);
	if (entry.type == '0' && path_size && r->path[path_size - 1] == '/')
		entry.type = '5';
	entry.path = r->path;
	entry.link = r->link;
	entry.mode = (unsigned)mode & 07777;
	entry.size = entry.type == '0' ? size : 0;
	entry.mtime_s = r->has_mtime ? r->mtime_s : (int64_t)MIN(mtime, (uint64_t)INT64_MAX);
	entry.mtime_ns = r->has_mtime ? r->mtime_ns : 0;
	r->has_path = r->has_link = r->has_size = r->has_mtime = 0;
	return r->handlers.entry(r->handlers.context, &entry, e);
}

static int take_header(struct tar_reader *r, struct error *e)
{
	struct ustar_header h;
	memcpy(&h, r->block, sizeof(h));
	uint64_t sum;
	uint64_t size;
	uint64_t mode;
	uint64_t mtime = 0;
	if (read_number(h.checksum, sizeof(h.checksum), &sum) < 0 || sum != checksum(&h))
		return error_set(e, ERROR_INVALID, "this is no tar archive, or it is damaged (checksum)");
	if (read_number(h.size, sizeof(h.size), &size) < 0 || read_number(h.mode, sizeof(h.mode), &mode) < 0)
		return error_set(e, ERROR_INVALID, "the archive holds a bad number");
	read_number(h.mtime, sizeof(h.mtime), &mtime); /* before 1970 or unreadable: 0 */
	int is_extension = h.type == 'x' || h.type == 'L' || h.type == 'K';
	if (!is_extension && r->has_size)
		size = r->size;
	if (size > (uint64_t)INT64_MAX - TAR_BLOCK_BYTES)
		return error_set(e, ERROR_INVALID, "the archive holds a bad size");
	if (is_extension && size > TAR_HEADER_BYTES_MAX)
		return error_set(e, ERROR_TOO_LARGE, "the archive holds an extended header of %" PRIu64 " bytes", size);
	/* Links, directories and devices have no data, whatever their size field says; global headers are passed over. */
	int has_data = is_extension || h.type == 'g' || h.type == '0' || h.type == '\0' || h.type == '7' ||
	               !(h.type >= '1' && h.type <= '6');
	r->left = has_data ? size : 0;
	r->padding = tar_padding(r->left);
	r->extension_type = h.type;
	r->has_entry = !is_extension && h.type != 'g';
	r->state = is_extension ? READ_EXTENSION : READ_DATA;
	return r->has_entry ? announce(r, &h, size, mode, mtime, e) : 0;
}

static int take_block(struct tar_reader *r, struct error *e)
{
	r->block_size = 0;
	int is_zero = r->block[0] == 0 && memcmp(r->block, r->block + 1, sizeof(r->block) - 1) == 0;
	if (!is_zero) {
		if (r->zero_blocks)
			return error_set(e, ERROR_INVALID, "the archive goes on after an empty block");
		return take_header(r, e);
	}
	if (++r->zero_blocks == 2)
		r->state = READ_DONE;
	return 0;
}

/* Ends the data (or extension) once nothing of it is left. */
static int end_data(struct tar_reader *r, struct error *e)
{
	int result = 0;
	if (r->state == READ_EXTENSION)
		result = take_extension(r, e);
	else if (r->has_entry)
		result = r->handlers.end(r->handlers.context, e);
	r->state = READ_PADDING;
	return result;
}

static int feed_some(struct tar_reader *r, const char **data, size_t *size, struct error *e)
{
	size_t n;
	int result = 0;
	switch (r->state) {
	case READ_HEADER:
		n = MIN(*size, sizeof(r->block) - r->block_size);
		memcpy(r->block + r->block_size, *data, n);
		r->block_size += n;
		if (r->block_size == sizeof(r->block))
			result = take_block(r, e);
		break;
	case READ_EXTENSION:
	case READ_DATA:
		n = (size_t)MIN((uint64_t)*size, r->left);
		if (n && r->state == READ_EXTENSION)
			result = buf_append(&r->extension, *data, n);
		else if (n && r->has_entry)
			result = r->handlers.data(r->handlers.context, *data, n, e);
		r->left -= n;
		break;
	case READ_PADDING:
		n = (size_t)MIN((uint64_t)*size, r->padding);
		r->padding -= n;
		break;
	default:
		n = *size; /* record padding after the end */
		break;
	}
	*data += n;
	*size -= n;
	return result;
}

int tar_reader_feed(struct tar_reader *r, const void *data, size_t size, struct error *e)
{
	const char *p = data;
	for (;;) {
		int result = 0;
		if ((r->state == READ_DATA || r->state == READ_EXTENSION) && r->left == 0)
			result = end_data(r, e);
		if (result == 0 && r->state == READ_PADDING && r->padding == 0)
			r->state = READ_HEADER;
		if (result == 0 && !size)
			return 0;
		if (result == 0)
			result = feed_some(r, &p, &size, e);
		if (result < 0)
			return result;
	}
}

int tar_reader_finish(struct tar_reader *r, struct error *e)
{
	if (r->state == READ_DONE || (r->state == READ_HEADER && r->block_size == 0 && r->zero_blocks))
		return 0;
	return error_set(e, ERROR_UNAVAILABLE, "the archive ends too early; what was copied is not complete");
}
