#include "session/memory_file.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

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

/* Takes the delta's pages into `piece` (which holds the previous content); bits of the pages that differ. */
static unsigned merge_piece(const struct memory_delta *delta, uint64_t first_page, unsigned bits, char *piece)
{
	unsigned differ = 0;
	for (unsigned i = 0; i < MEMORY_PIECE_PAGES; i++) {
		if (!(bits & 1u << i))
			continue;
		const char *from = (const char *)delta->pages + (first_page + i) * MEMORY_PAGE_BYTES;
		char *to = piece + (size_t)i * MEMORY_PAGE_BYTES;
		if (memcmp(from, to, MEMORY_PAGE_BYTES) == 0)
			continue;
		memcpy(to, from, MEMORY_PAGE_BYTES);
		differ |= 1u << i;
	}
	return differ;
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

int memory_file_write(const struct memory_delta *delta, int previous_fd, int out_fd,
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
		counts.delta_pages += (unsigned)__builtin_popcount(bits);
		ssize_t n = fd_pread_full(previous_fd, piece, MEMORY_PIECE_BYTES, (off_t)offset);
		if (n != MEMORY_PIECE_BYTES)
			return error_set_errno(e, n < 0 ? (int)n : EBADMSG, "reading the previous memory file");
		unsigned differ = merge_piece(delta, page, bits, piece);
		if (!differ)
			continue;
		counts.changed_pages += (unsigned)__builtin_popcount(differ);
		int r = write_piece(out_fd, offset, piece, MEMORY_PIECE_BYTES, differ, &counts);
		if (r < 0)
			return error_set_errno(e, r, "writing guest memory");
		r = changed ? changed(context, offset / MEMORY_PIECE_BYTES, piece, MEMORY_PIECE_BYTES) : 0;
		if (r < 0)
			return r;
	}
	*ret = counts;
	return 0;
}
