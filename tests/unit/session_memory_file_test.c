/* Memory files: what is written equals a plain copy, nothing is written twice, and zeros become holes. */
#include "session/memory_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/text.h"
#include "check.h"

#define PAGES 256
#define SIZE ((size_t)PAGES * MEMORY_PAGE_BYTES)

static unsigned char previous[SIZE];
static unsigned char pages[SIZE];
static unsigned char expected[SIZE];
static unsigned char got[SIZE];
static uint64_t bits[PAGES / 64];
static uint64_t sums[PAGES];

struct told {
	unsigned count;
	unsigned char piece[PAGES / MEMORY_PIECE_PAGES];
};

static int tell(void *context, uint64_t piece, const void *data, size_t size)
{
	struct told *told = context;
	told->count++;
	told->piece[piece] = 1;
	CHECK_INT(size, MEMORY_PIECE_BYTES);
	CHECK(memcmp(data, expected + piece * MEMORY_PIECE_BYTES, size) == 0);
	return 0;
}

static int file_of(const void *data)
{
	char path[] = "/tmp/memory-file-test-XXXXXX";
	int fd = mkostemp(path, O_CLOEXEC);
	CHECK(fd >= 0);
	unlink(path);
	CHECK_INT(fd_pwrite_full(fd, data, SIZE, 0), 0);
	return fd;
}

static void set(size_t page, unsigned char value, int in_delta)
{
	memset(pages + page * MEMORY_PAGE_BYTES, value, MEMORY_PAGE_BYTES);
	if (in_delta)
		bits[page / 64] |= UINT64_C(1) << page % 64;
}

static struct memory_counts run(struct told *told)
{
	struct memory_counts counts;
	struct memory_counts again;
	struct error e;
	memcpy(expected, previous, SIZE);
	for (size_t i = 0; i < PAGES; i++)
		if (bits[i / 64] & UINT64_C(1) << i % 64)
			memcpy(expected + i * MEMORY_PAGE_BYTES, pages + i * MEMORY_PAGE_BYTES, MEMORY_PAGE_BYTES);
	int from = file_of(previous);
	int to = file_of(previous);
	struct memory_delta delta = {
	    .pages = pages, .bits = bits, .size = SIZE, .base_fd = from, .previous_fd = from, .fresh = sums};
	memset(sums, 0, sizeof(sums));
	*told = (struct told){0};
	CHECK_INT(memory_file_write(&delta, to, tell, told, &counts, &e), 0);
	CHECK_INT(fd_pread_full(to, got, SIZE, 0), SIZE);
	CHECK(memcmp(got, expected, SIZE) == 0);
	/* The next snapshot, with the sums of this one and nothing new: it must not even look at the previous file. */
	struct told nothing = {0};
	delta.previous_fd = -1;
	delta.known = sums;
	delta.fresh = NULL;
	CHECK_INT(memory_file_write(&delta, to, tell, &nothing, &again, &e), 0);
	CHECK_INT(again.changed_pages, 0);
	CHECK_INT(nothing.count, 0);
	close(from);
	close(to);
	return counts;
}

static void reset(void)
{
	memset(bits, 0, sizeof(bits));
	for (size_t i = 0; i < SIZE; i++)
		previous[i] = (unsigned char)(i / MEMORY_PAGE_BYTES * 7 + 1);
	memset(pages, 0xee, SIZE); /* what is not in the bitmap must never be used */
}

static void nothing_changed(void)
{
	struct told told;
	reset();
	struct memory_counts counts = run(&told);
	CHECK_INT(counts.delta_pages, 0);
	CHECK_INT(counts.written_bytes, 0);
	/* In the delta, but the same as before: cumulative sets are full of those. */
	for (size_t i = 0; i < PAGES; i++) {
		memcpy(pages + i * MEMORY_PAGE_BYTES, previous + i * MEMORY_PAGE_BYTES, MEMORY_PAGE_BYTES);
		bits[i / 64] |= UINT64_C(1) << i % 64;
	}
	counts = run(&told);
	CHECK_INT(counts.delta_pages, PAGES);
	CHECK_INT(counts.changed_pages, 0);
	CHECK_INT(counts.written_bytes, 0);
	CHECK_INT(told.count, 0);
}

static void single_pages(void)
{
	struct told told;
	reset();
	set(0, 0x55, 1);
	set(100, 0x56, 1);
	set(PAGES - 1, 0x57, 1);
	struct memory_counts counts = run(&told);
	CHECK_INT(counts.changed_pages, 3);
	CHECK_INT(counts.written_bytes, 3 * MEMORY_PAGE_BYTES);
	CHECK_INT(told.count, 3);
	CHECK(told.piece[0] && told.piece[100 / MEMORY_PIECE_PAGES] && told.piece[(PAGES - 1) / MEMORY_PIECE_PAGES]);
}

static void near_pages_become_one_run(void)
{
	struct told told;
	reset();
	set(16, 0x61, 1);
	set(16 + MEMORY_GAP_PAGES + 1, 0x62, 1); /* MEMORY_GAP_PAGES unchanged ones in between are written along */
	struct memory_counts counts = run(&told);
	CHECK_INT(counts.written_bytes, (MEMORY_GAP_PAGES + 2) * MEMORY_PAGE_BYTES);
	reset();
	set(16, 0x61, 1);
	set(16 + MEMORY_GAP_PAGES + 2, 0x62, 1); /* one more, and they are not */
	counts = run(&told);
	CHECK_INT(counts.written_bytes, 2 * MEMORY_PAGE_BYTES);
}

static void zeros_become_holes(void)
{
	struct told told;
	reset();
	for (size_t i = 32; i < 48; i++)
		set(i, 0, 1);
	struct memory_counts counts = run(&told);
	CHECK_INT(counts.changed_pages, 16);
	/* On file systems without holes it is written instead; the content is checked either way. */
	CHECK_INT(counts.written_bytes + counts.punched_bytes, MEMORY_PIECE_BYTES);
}

static void any_pattern(void)
{
	struct told told;
	for (int round = 0; round < 200; round++) {
		reset();
		unsigned char choice[PAGES];
		random_bytes(choice, sizeof(choice));
		for (size_t i = 0; i < PAGES; i++)
			if (choice[i] % 4 == round % 4)
				set(i, choice[i] & 8 ? choice[i] : 0, 1);
		run(&told);
	}
}

static void bad_sizes(void)
{
	struct memory_delta delta = {.pages = pages, .bits = bits, .size = SIZE - MEMORY_PAGE_BYTES};
	struct memory_counts counts;
	struct error e;
	CHECK_INT(memory_file_write(&delta, -1, NULL, NULL, &counts, &e), error_code_errno(ERROR_INVALID));
	/* A previous file that is too short is damage, not zeros. */
	reset();
	set(PAGES - 1, 1, 1);
	delta.size = SIZE;
	int from = file_of(previous);
	int to = file_of(previous);
	CHECK_INT(ftruncate(from, (off_t)SIZE - 1), 0);
	delta.base_fd = delta.previous_fd = from;
	CHECK(memory_file_write(&delta, to, NULL, NULL, &counts, &e) < 0);
	CHECK_INT(e.code, ERROR_DAMAGED);
	close(from);
	close(to);
}

/* A second snapshot: some pages change again, some go back to what they were at first, all told apart by sums. */
static void with_sums(void)
{
	struct memory_counts counts;
	struct error e;
	reset();
	set(3, 0x11, 1);
	set(5, 0x22, 1);
	set(200, 0x33, 1);
	int base = file_of(previous);
	int first = file_of(previous);
	struct memory_delta delta = {
	    .pages = pages, .bits = bits, .size = SIZE, .base_fd = base, .previous_fd = base, .fresh = sums};
	memset(sums, 0, sizeof(sums));
	CHECK_INT(memory_file_write(&delta, first, NULL, NULL, &counts, &e), 0);
	CHECK_INT(fd_pread_full(first, got, SIZE, 0), SIZE);
	int second = file_of(got);
	uint64_t newer[PAGES] = {0};
	set(5, 0x44, 1);
	memcpy(pages + (size_t)200 * MEMORY_PAGE_BYTES, previous + (size_t)200 * MEMORY_PAGE_BYTES, MEMORY_PAGE_BYTES);
	set(201, 0x55, 1); /* new in the set: no sum, so the previous file is asked */
	memcpy(expected, previous, SIZE);
	static const size_t changed[] = {3, 5, 200, 201};
	for (size_t i = 0; i < ARRAY_SIZE(changed); i++)
		memcpy(expected + changed[i] * MEMORY_PAGE_BYTES, pages + changed[i] * MEMORY_PAGE_BYTES, MEMORY_PAGE_BYTES);
	delta.previous_fd = first;
	delta.known = sums;
	delta.fresh = newer;
	CHECK_INT(memory_file_write(&delta, second, NULL, NULL, &counts, &e), 0);
	CHECK_INT(counts.delta_pages, 4);
	CHECK_INT(counts.changed_pages, 3);
	CHECK_INT(fd_pread_full(second, got, SIZE, 0), SIZE);
	CHECK(memcmp(got, expected, SIZE) == 0);
	CHECK(newer[3] == sums[3] && newer[5] != sums[5] && newer[201] != 0);
	close(base);
	close(first);
	close(second);
}

int main(void)
{
	nothing_changed();
	with_sums();
	single_pages();
	near_pages_become_one_run();
	zeros_become_holes();
	any_pattern();
	bad_sizes();
	return 0;
}
