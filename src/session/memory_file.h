/*
 * Memory files: guest RAM page for page, sparse, and what is written of it for a snapshot.
 *
 * A snapshot's file starts as a clone of the previous one; of the pages that the guest has changed since it was
 * restored (a cumulative set) only those that really differ from the previous file are written, in runs: a clone costs
 * time by the number of its extents, so runs that lie close together within a piece become one.
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
};

struct memory_counts {
	uint64_t delta_pages;   /* in the delta */
	uint64_t changed_pages; /* differ from the previous file */
	uint64_t written_bytes;
	uint64_t punched_bytes;
};

/* `out_fd` holds a clone of `previous_fd`. `changed` is called for every piece (number) whose content has changed,
 * with its new content; its failure ends the write. */
int memory_file_write(const struct memory_delta *delta, int previous_fd, int out_fd,
                      int (*changed)(void *context, uint64_t piece, const void *data, size_t size), void *context,
                      struct memory_counts *ret, struct error *e);

#endif
