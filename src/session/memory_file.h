/*
 * Memory files: guest RAM page for page, sparse, and what is written of it for a snapshot.
 *
 * A snapshot's file starts as a clone of the previous one. The guest's changed pages are all those since it was
 * restored (a cumulative set); of these only the ones that differ from the previous file are written, in runs: a clone
 * costs time by the number of its extents, so runs that lie close together within a piece become one.
 *
 * Whether a page differs is told by its sum from the last time, if there is one, else by reading the previous file.
 * Each snapshot has a new file with nothing of it in the page cache, so reading it would be reading from the disk; the
 * base file, from which the unchanged rest of a piece is taken, is the one that the guest itself runs on.
 */
#ifndef SPACE_SESSION_MEMORY_FILE_H
#define SPACE_SESSION_MEMORY_FILE_H

#include "base/error.h"

#define MEMORY_PAGE_BYTES 4096
#define MEMORY_PIECE_BYTES 65536
#define MEMORY_PIECE_PAGES (MEMORY_PIECE_BYTES / MEMORY_PAGE_BYTES)
/* Unchanged pages between two changed ones that are written along to keep the file in fewer extents. */
#define MEMORY_GAP_PAGES 3

struct memory_delta {
	const void *pages;    /* mapping of size bytes; only pages of the bitmap are valid */
	const uint64_t *bits; /* bitmap, bit n = page n */
	uint64_t size;
	int base_fd;     /* file that pages outside the bitmap are taken from */
	int previous_fd; /* file that `out` is a clone of; may be the base */
	/* One sum a page (size/4096 of them), 0 = not known. `known` (may be NULL) are those of the previous file, `fresh`
	 * (may be NULL) receives the present ones; the same array will do for both only if a failure ends its use. */
	const uint64_t *known;
	uint64_t *fresh;
};

struct memory_counts {
	uint64_t delta_pages;   /* in the delta */
	uint64_t changed_pages; /* differ from the previous file */
	uint64_t written_bytes;
	uint64_t punched_bytes;
};

/* `changed` is called for every piece (number) whose content has changed, with its new content; its failure ends the
 * write. */
int memory_file_write(const struct memory_delta *delta, int out_fd,
                      int (*changed)(void *context, uint64_t piece, const void *data, size_t size), void *context,
                      struct memory_counts *ret, struct error *e);

#endif
