/* Copies changed pages out of a real process that maps a file as a VMM does, and compares with what it wrote. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/text.h"
#include "host/memory.h"

#define PAGE 4096
#define MEMORY_BYTES (256 * MIB)
#define PAGES (MEMORY_BYTES / PAGE)

static struct error e;

static void require(int condition, const char *what)
{
	if (condition)
		return;
	fprintf(stderr, "failed: %s (%s)\n", what, e.message);
	exit(1);
}

/* Which pages the process writes: runs of all lengths, single pages, the first and the last; about 100 MiB. */
static int is_written(uint64_t page)
{
	if (page == 0 || page == PAGES - 1)
		return 1;
	uint64_t block = page / 512;
	return block % 5 == 0 || (block % 5 == 2 && page % 2) || (block % 7 == 3 && page % 512 < block);
}

static uint64_t base_word(uint64_t page)
{
	return page * 3 + 1;
}

static uint64_t changed_word(uint64_t page, unsigned round)
{
	return ~(page * 7) + round;
}

static int make_base(const char *folder)
{
	int fd = open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
	require(fd >= 0, "base file");
	static uint64_t block[PAGE / 8 * 256];
	for (uint64_t page = 0; page < PAGES; page += 256) {
		for (uint64_t i = 0; i < 256; i++)
			block[i * (PAGE / 8)] = base_word(page + i);
		require(fd_pwrite_full(fd, block, sizeof(block), (off_t)(page * PAGE)) == 0, "write base file");
	}
	return fd;
}

static void write_pages(char *memory, unsigned round)
{
	for (uint64_t page = 0; page < PAGES; page++) {
		uint64_t word = changed_word(page, round);
		if (is_written(page))
			memcpy(memory + page * PAGE + 64, &word, sizeof(word));
	}
}

/* Maps in two pieces, reads everything (clean pages become present too), writes some; a byte on the pipe is a turn. */
static void victim(int base, int in, int out)
{
	size_t half = MEMORY_BYTES / 2;
	char *memory = mmap(NULL, MEMORY_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE, base, 0);
	require(memory != MAP_FAILED, "map");
	require(mprotect(memory + half, half, PROT_READ | PROT_WRITE | PROT_EXEC) == 0, "mprotect");
	volatile char sum = 0;
	for (uint64_t page = 0; page < PAGES; page++)
		sum = (char)(sum + memory[page * PAGE]);
	char byte = 'r';
	for (unsigned round = 1;; round++) {
		write_pages(memory, round);
		if (write(out, &byte, 1) != 1 || read(in, &byte, 1) != 1)
			_exit(0);
	}
}

static void check(const char *pages, const unsigned char *bitmap, uint64_t count, unsigned round)
{
	uint64_t written = 0;
	for (uint64_t page = 0; page < PAGES; page++) {
		int marked = bitmap[page / 8] >> (page % 8) & 1;
		uint64_t word;
		memcpy(&word, pages + page * PAGE + 64, sizeof(word));
		written += (uint64_t)is_written(page);
		require(marked == is_written(page), "bitmap marks exactly the written pages");
		require(word == (marked ? changed_word(page, round) : 0), "content of the page");
		memcpy(&word, pages + page * PAGE, sizeof(word));
		require(word == (marked ? base_word(page) : 0), "rest of the page");
	}
	require(count == written, "number of pages");
}

static void refuse(pid_t pid, int base, uint64_t size, int pages, int bitmap, const char *what)
{
	struct memory_window window = {0};
	uint64_t count = 0;
	require(memory_copy(pid, base, size, pages, bitmap, &window, &count, &e) < 0, what);
	require(*e.message && e.code != ERROR_NONE, "a refusal says why");
	memory_window_drop(&window);
}

static void check_refusals(pid_t pid, int base, int pages, int bitmap, const char *folder)
{
	int other = make_base(folder);
	int small = fd_memfd("small", PAGE);
	refuse(pid, other, MEMORY_BYTES, pages, bitmap, "a file that the process does not map");
	refuse(pid, base, MEMORY_BYTES, small, bitmap, "a pages memfd of another size");
	refuse(pid, base, MEMORY_BYTES, pages, small, "a bitmap memfd of another size");
	refuse(pid, base, MEMORY_BYTES, other, bitmap, "a file in place of a memfd");
	refuse(pid, base, MEMORY_BYTES + 1, pages, bitmap, "a size that is not whole pages");
	refuse(pid, base, 0, pages, bitmap, "no size");
	/* Half of the mapped file is not all of the memory. */
	int half = fd_memfd("half", MEMORY_BYTES / 2);
	int half_bitmap = fd_memfd("half", PAGES / 16);
	refuse(pid, base, MEMORY_BYTES / 2, half, half_bitmap, "less than what is mapped");
	close(half);
	close(half_bitmap);
	close(small);
	close(other);
}

/* The caller shrinks its memfd while it is mapped here: an error, not a crash. */
static void check_shrunk(pid_t pid, int base, int bitmap)
{
	struct memory_window window = {0};
	uint64_t count;
	int pages = fd_memfd("pages", MEMORY_BYTES);
	require(memory_copy(pid, base, MEMORY_BYTES, pages, bitmap, &window, &count, &e) == 0, "copy");
	require(ftruncate(pages, PAGE) == 0, "shrink");
	require(memory_copy(pid, base, MEMORY_BYTES, pages, bitmap, &window, &count, &e) < 0, "copy into a shrunk memfd");
	memory_window_drop(&window);
	close(pages);
}

int main(int argc, char **argv)
{
	const char *folder = argc > 1 ? argv[1] : "/var/tmp";
	int base = make_base(folder);
	int to[2];
	int from[2];
	require(pipe(to) == 0 && pipe(from) == 0, "pipes");
	pid_t pid = fork();
	if (pid == 0) {
		close(to[1]);
		victim(base, to[0], from[1]);
	}
	int pages = fd_memfd("pages", MEMORY_BYTES);
	int bitmap = fd_memfd("bitmap", PAGES / 8);
	struct memory_window window = {0};
	const char *view = mmap(NULL, MEMORY_BYTES, PROT_READ, MAP_SHARED, pages, 0);
	const unsigned char *bits = mmap(NULL, PAGES / 8, PROT_READ, MAP_SHARED, bitmap, 0);
	for (unsigned round = 1; round <= 3; round++) {
		char byte;
		uint64_t count;
		require(read(from[0], &byte, 1) == 1, "the process writes");
		kill(pid, SIGSTOP);
		uint64_t start = time_monotonic_us();
		require(memory_copy(pid, base, MEMORY_BYTES, pages, bitmap, &window, &count, &e) == 0, "copy");
		uint64_t us = time_monotonic_us() - start;
		printf("copy %u: %.1f MiB in %.1f ms\n", round, (double)count * PAGE / MIB, (double)us / 1000);
		kill(pid, SIGCONT);
		check(view, bits, count, round);
		if (round < 3)
			require(write(to[1], &byte, 1) == 1, "next turn");
	}
	memory_window_drop(&window);
	check_refusals(pid, base, pages, bitmap, folder);
	check_shrunk(pid, base, bitmap);
	kill(pid, SIGKILL);
	waitpid(pid, NULL, 0);
	refuse(pid, base, MEMORY_BYTES, pages, bitmap, "a process that has ended");
	printf("ok\n");
	return 0;
}
