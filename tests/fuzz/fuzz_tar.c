/* Archives from guests: the reader whole and in pieces, and that extraction never leaves its folder. */
#include <dirent.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli/tar_extract.h"
#include "fuzz.h"

#define ARCHIVE_BYTES_MAX 65536

struct outcome {
	uint64_t sum;
	unsigned entries;
};

static int on_entry(void *context, const struct tar_entry *entry, struct error *e)
{
	struct outcome *o = context;
	o->entries++;
	FUZZ_CHECK(entry->path && entry->link && strlen(entry->path) <= TAR_HEADER_BYTES_MAX);
	o->sum = fuzz_sum(o->sum, entry->path, strlen(entry->path) + 1);
	return 0;
}

static int on_data(void *context, const void *data, size_t size, struct error *e)
{
	struct outcome *o = context;
	o->sum = fuzz_sum(o->sum, data, size);
	return 0;
}

static int on_end(void *context, struct error *e)
{
	struct outcome *o = context;
	o->sum = fuzz_sum(o->sum, "|", 1);
	return 0;
}

static int read_archive(const uint8_t *data, size_t size, size_t piece, struct outcome *o)
{
	struct tar_reader_handlers handlers = {on_entry, on_data, on_end, o};
	struct tar_reader *reader;
	struct error e = {0};
	FUZZ_CHECK(tar_reader_new(&handlers, &reader, &e) == 0);
	int r = 0;
	for (size_t at = 0; r == 0 && at < size; at += piece) {
		size_t n = size - at < piece ? size - at : piece;
		void *copy = fuzz_copy(data + at, n);
		r = tar_reader_feed(reader, copy, n, &e);
		free(copy);
	}
	if (r == 0)
		r = tar_reader_finish(reader, &e);
	FUZZ_CHECK(r == 0 || (e.code != ERROR_NONE && e.message[0]));
	tar_reader_free(reader);
	return r;
}

static void remove_below(int dir)
{
	int copy = openat(dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *folder = copy < 0 ? NULL : fdopendir(copy);
	for (struct dirent *entry; folder && (entry = readdir(folder));) {
		if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
			continue;
		if (unlinkat(dir, entry->d_name, 0) == 0)
			continue;
		if (fchmodat(dir, entry->d_name, 0700, 0) < 0)
			continue;
		int inner = openat(dir, entry->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
		if (inner >= 0) {
			remove_below(inner);
			close(inner);
		}
		unlinkat(dir, entry->d_name, AT_REMOVEDIR);
	}
	if (folder)
		closedir(folder);
}

static void extract(const uint8_t *data, size_t size)
{
	char outer[] = "/tmp/space-fuzz-XXXXXX";
	FUZZ_CHECK(mkdtemp(outer));
	int outside = open(outer, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	FUZZ_CHECK(outside >= 0 && mkdirat(outside, "in", 0700) == 0);
	int inside = openat(outside, "in", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	struct tar_extract *extract;
	struct error e = {0};
	FUZZ_CHECK(inside >= 0);
	if (tar_extract_new(inside, "tree", "copy", &extract, &e) == 0) {
		if (tar_extract_feed(extract, data, size, &e) == 0)
			(void)tar_extract_finish(extract, &e);
		tar_extract_free(extract);
	}
	/* Whatever the archive said, beside the folder there is nothing else. */
	remove_below(inside);
	close(inside);
	FUZZ_CHECK(unlinkat(outside, "in", AT_REMOVEDIR) == 0);
	close(outside);
	FUZZ_CHECK(rmdir(outer) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	if (size > ARCHIVE_BYTES_MAX)
		return 0;
	struct outcome whole = {0};
	struct outcome pieces = {0};
	int a = read_archive(data, size, size ? size : 1, &whole);
	int b = read_archive(data, size, 100, &pieces);
	FUZZ_CHECK((a < 0) == (b < 0) && (a < 0 || (whole.sum == pieces.sum && whole.entries == pieces.entries)));
	/* Making folders is slow: an eighth of the inputs has to do. */
	if (fuzz_sum(0, data, size) % 8 == 0)
		extract(data, size);
	return 0;
}
