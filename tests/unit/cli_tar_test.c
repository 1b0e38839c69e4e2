/* tar: what the writer makes, the reader understands in pieces of any size; damaged archives are refused. */
#include "base/text.h"
#include "check.h"
#include "cli/tar.h"

struct seen {
	struct buf text; /* one line an entry */
	struct buf data;
	int ends;
};

static int on_entry(void *context, const struct tar_entry *entry, struct error *e)
{
	struct seen *s = context;
	return buf_printf(&s->text, "%c %zu %s|%s %o %" PRIu64 " %" PRId64 ".%u\n", entry->type, strlen(entry->path),
	                  entry->path, entry->link, entry->mode, entry->size, entry->mtime_s, entry->mtime_ns);
}

static int on_data(void *context, const void *data, size_t size, struct error *e)
{
	struct seen *s = context;
	return buf_append(&s->data, data, size);
}

static int on_end(void *context, struct error *e)
{
	struct seen *s = context;
	s->ends++;
	return 0;
}

static void seen_free(struct seen *s)
{
	buf_free(&s->text);
	buf_free(&s->data);
}

/* 0 if the archive was read to its end. */
static int read_archive(const struct buf *archive, size_t step, struct seen *s)
{
	struct tar_reader_handlers handlers = {on_entry, on_data, on_end, s};
	struct tar_reader *reader;
	struct error e;
	CHECK_INT(tar_reader_new(&handlers, &reader, &e), 0);
	int r = 0;
	for (size_t at = 0; r == 0 && at < archive->size; at += step)
		r = tar_reader_feed(reader, archive->data + at, MIN(step, archive->size - at), &e);
	if (r == 0)
		r = tar_reader_finish(reader, &e);
	tar_reader_free(reader);
	return r;
}

static void add(struct buf *archive, const struct tar_entry *entry, const char *data)
{
	static const char zeros[TAR_BLOCK_BYTES];
	struct error e;
	CHECK_INT(tar_write_header(archive, entry, &e), 0);
	CHECK_INT(buf_append(archive, data, entry->size), 0);
	CHECK_INT(buf_append(archive, zeros, tar_padding(entry->size)), 0);
}

static char *repeated(char c, size_t size)
{
	char *text = malloc(size + 1);
	CHECK(text);
	memset(text, c, size);
	text[size] = '\0';
	return text;
}

static void test_round_trip(void)
{
	CLEANUP_FREE char *hundred = repeated('h', 100);
	CLEANUP_FREE char *more = repeated('m', 101);
	CLEANUP_FREE char *most = repeated('x', TAR_NAME_BYTES_MAX - 1);
	CLEANUP_BUF struct buf archive = {0};
	CLEANUP_BUF struct buf wanted = {0};
	struct tar_entry entries[] = {
	    {.path = "d/", .link = "", .type = '5', .mode = 0755, .mtime_s = 1600000000},
	    {.path = "d/empty", .link = "", .type = '0', .mode = 04711},
	    {.path = "d/f", .link = "", .type = '0', .mode = 0644, .size = 5, .mtime_s = 1, .mtime_ns = 123456789},
	    {.path = hundred, .link = "", .type = '0', .mode = 0600, .size = 3, .mtime_s = -5},
	    {.path = more, .link = hundred, .type = '2', .mode = 0777},
	    {.path = most, .link = most, .type = '2', .mode = 0777},
	    {.path = "s\xc3\xa4\n \xff", .link = more, .type = '1', .mode = 0644},
	};
	for (size_t i = 0; i < ARRAY_SIZE(entries); i++) {
		add(&archive, &entries[i], "data!");
		struct seen once = {.text = wanted};
		struct error e;
		CHECK_INT(on_entry(&once, &entries[i], &e), 0);
		wanted = once.text;
	}
	CHECK_INT(tar_write_end(&archive), 0);
	static const size_t steps[] = {1, 7, 511, 512, 513, 1 << 20};
	for (size_t i = 0; i < ARRAY_SIZE(steps); i++) {
		struct seen s = {0};
		CHECK_INT(read_archive(&archive, steps[i], &s), 0);
		CHECK_STR(s.text.data, wanted.data);
		CHECK_STR(s.data.data, "data!dat");
		CHECK_INT(s.ends, ARRAY_SIZE(entries));
		seen_free(&s);
	}
}

static void test_limits(void)
{
	CLEANUP_FREE char *too_long = repeated('x', TAR_NAME_BYTES_MAX);
	CLEANUP_BUF struct buf archive = {0};
	struct tar_entry entry = {.path = too_long, .link = "", .type = '0'};
	struct error e;
	CHECK(tar_write_header(&archive, &entry, &e) < 0);
	/* A size beyond eleven octal digits goes into an extended header. */
	entry.path = "big";
	entry.size = UINT64_C(1) << 40;
	CHECK_INT(tar_write_header(&archive, &entry, &e), 0);
	struct seen s = {0};
	CHECK(read_archive(&archive, archive.size, &s) < 0); /* its data is missing */
	CHECK(strstr(s.text.data, " 1099511627776 "));
	seen_free(&s);
}

/* Every cut and every flipped bit ends in an error or in a shorter list, never in a crash or a wrong success. */
static void test_damage(void)
{
	CLEANUP_BUF struct buf archive = {0};
	struct tar_entry entry = {.path = "d/f", .link = "", .type = '0', .mode = 0644, .size = 600, .mtime_ns = 1};
	CLEANUP_FREE char *data = repeated('d', 600);
	add(&archive, &entry, data);
	CHECK_INT(tar_write_end(&archive), 0);
	for (size_t size = 0; size + TAR_BLOCK_BYTES < archive.size; size++) {
		struct buf cut = {.data = archive.data, .size = size};
		struct seen s = {0};
		if (size + 2 * TAR_BLOCK_BYTES < archive.size)
			CHECK(read_archive(&cut, 512, &s) < 0);
		seen_free(&s);
	}
	for (size_t at = 0; at < 3 * TAR_BLOCK_BYTES; at++) {
		for (int bit = 0; bit < 8; bit += 3) {
			struct seen s = {0};
			archive.data[at] ^= (char)(1 << bit);
			read_archive(&archive, 512, &s);
			archive.data[at] ^= (char)(1 << bit);
			seen_free(&s);
		}
	}
}

static void test_not_tar(void)
{
	CLEANUP_FREE char *text = repeated('a', 2048);
	struct buf archive = {.data = text, .size = 2048};
	struct seen s = {0};
	CHECK(read_archive(&archive, 512, &s) < 0);
	archive.size = 0;
	CHECK(read_archive(&archive, 512, &s) < 0);
	seen_free(&s);
}

int main(void)
{
	test_round_trip();
	test_limits();
	test_damage();
	test_not_tar();
	return 0;
}
