#include "session/memory_file.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

#include "base/fd.h"

static int is_zero(const void *data, size_t size)
{
	const char *p = data;
	return p[0] == 0 && memcmp(p, p + 1, size - 1) == 0;
}

static unsigned piece_bits(const struct memory_delta *delta, uint64_t page)
{
	_Static_assert(MEMORY_PIECE_PAGES == 16 && 64 % MEMORY_PIECE_PAGES == 0, "a piece's bits lie within one word");
	return (unsigned)(delta->bits[page / 64] >> (page % 64)) & 0xffff;
}

static const char *page_of(const struct memory_delta *delta, uint64_t page)
{
	return (const char *)delta->pages + page * MEMORY_PAGE_BYTES;
}

static uint64_t sum_page(const char *data)
{
	uint64_t sum = XXH3_64bits(data, MEMORY_PAGE_BYTES);
	return sum ? sum : 1;
}

/* Bits of the piece's delta pages that differ from the previous file. */
static int find_changed(const struct memory_delta *delta, uint64_t first_page, unsigned bits, unsigned *ret)
{
	char old[MEMORY_PAGE_BYTES];
	unsigned differ = 0;
	for (unsigned i = 0; i < MEMORY_PIECE_PAGES; i++) {
		uint64_t page = first_page + i;
		if (!(bits & 1u << i))
			continue;
		uint64_t sum = delta->known || delta->fresh ? sum_page(page_of(delta, page)) : 0;
		if (delta->known && delta->known[page]) {
			if (delta->known[page] != sum)
				differ |= 1u << i;
		} else {
			ssize_t n = fd_pread_full(delta->previous_fd, old, sizeof(old), (off_t)(page * MEMORY_PAGE_BYTES));
			if (n != sizeof(old))
				return n < 0 ? (int)n : -EBADMSG;
			if (memcmp(old, page_of(delta, page), sizeof(old)) != 0)
				differ |= 1u << i;
		}
		if (delta->fresh)
			delta->fresh[page] = sum;
	}
	*ret = differ;
	return 0;
}

/* The whole present content of a piece. */
static int assemble(const struct memory_delta *delta, uint64_t first_page, unsigned bits, char *piece)
{
	if (bits != (1u << MEMORY_PIECE_PAGES) - 1) {
		ssize_t n = fd_pread_full(delta->base_fd, piece, MEMORY_PIECE_BYTES, (off_t)(first_page * MEMORY_PAGE_BYTES));
		if (n != MEMORY_PIECE_BYTES)
			return n < 0 ? (int)n : -EBADMSG;
	}
	for (unsigned i = 0; i < MEMORY_PIECE_PAGES; i++)
		if (bits & 1u << i)
			memcpy(piece + (size_t)i * MEMORY_PAGE_BYTES, page_of(delta, first_page + i), MEMORY_PAGE_BYTES);
	return 0;
}

static int write_runs(int out_fd, uint64_t offset, const char *piece, size_t size, unsigned differ,
                      struct memory_counts *counts)
{
	unsigned pages = (unsigned)(size / MEMORY_PAGE_BYTES);
	for (unsigned i = 0; i < pages; i++) {
		if (!(differ & 1u << i))
			continue;
		unsigned last = i;
		for (unsigned j = i + 1; j < pages && j - last <= MEMORY_GAP_PAGES + 1; j++)
			if (differ & 1u << j)
				last = j;
		size_t at = (size_t)i * MEMORY_PAGE_BYTES;
		size_t length = (size_t)(last - i + 1) * MEMORY_PAGE_BYTES;
		int r = fd_pwrite_full(out_fd, piece + at, length, (off_t)(offset + at));
		if (r < 0)
			return r;
		counts->written_bytes += length;
		i = last;
	}
	return 0;
}

static int write_piece(int out_fd, uint64_t offset, const char *piece, size_t size, unsigned differ,
                       struct memory_counts *counts)
{
	if (is_zero(piece, size) &&
	    fallocate(out_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset, (off_t)size) == 0) {
		counts->punched_bytes += size;
		return 0;
	}
	return write_runs(out_fd, offset, piece, size, differ, counts);
}

int memory_file_write(const struct memory_delta *delta, int out_fd,
                      int (*changed)(void *context, uint64_t piece, const void *data, size_t size), void *context,
                      struct memory_counts *ret, struct error *e)
{
	if (delta->size == 0 || delta->size % MEMORY_PIECE_BYTES)
		return error_set(e, ERROR_INVALID, "guest memory of %llu bytes is not a multiple of %d",
		                 (unsigned long long)delta->size, MEMORY_PIECE_BYTES);
	struct memory_counts counts = {0};
	CLEANUP_FREE char *piece = malloc(MEMORY_PIECE_BYTES);
	if (!piece)
		return error_set_errno(e, ENOMEM, "writing guest memory");
	for (uint64_t offset = 0; offset < delta->size; offset += MEMORY_PIECE_BYTES) {
		uint64_t page = offset / MEMORY_PAGE_BYTES;
		unsigned bits = piece_bits(delta, page);
		if (!bits)
			continue;
		unsigned differ = 0;
		counts.delta_pages += (unsigned)__builtin_popcount(bits);
		int r = find_changed(delta, page, bits, &differ);
		if (r == 0 && differ)
			r = assemble(delta, page, bits, piece);
		if (r < 0)
			return error_set_errno(e, r, "reading the memory file that a snapshot builds on");
		if (!differ)
			continue;
		counts.changed_pages += (unsigned)__builtin_popcount(differ);
		r = write_piece(out_fd, offset, piece, MEMORY_PIECE_BYTES, differ, &counts);
		if (r < 0)
			return error_set_errno(e, r, "writing guest memory");
		r = changed ? changed(context, offset / MEMORY_PIECE_BYTES, piece, MEMORY_PIECE_BYTES) : 0;
		if (r < 0)
			return r;
	}
	*ret = counts;
	return 0;
}
