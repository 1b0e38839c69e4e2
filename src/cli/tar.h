/*
 * The tar format as far as copying needs it: ustar with pax extended headers (what we write and ask the guest for), and
 * on reading also GNU long names and base-256 numbers. Archives come from guests: every length is bounded, nothing is
 * trusted, names are handed over as they are for tar_extract.c to judge.
 */
#ifndef SPACE_CLI_TAR_H
#define SPACE_CLI_TAR_H

#include "base/buf.h"
#include "base/error.h"

#define TAR_BLOCK_BYTES 512
#define TAR_NAME_BYTES_MAX 4096
#define TAR_HEADER_BYTES_MAX (1024 * 1024) /* of one pax header or long name */

struct tar_entry {
	const char *path;
	const char *link; /* "" if none */
	char type;        /* '0' file, '1' hard link, '2' symbolic link, '5' directory, others as in POSIX */
	unsigned mode;
	uint64_t size;
	int64_t mtime_s;
	uint32_t mtime_ns;
};

/* Appends the header blocks of an entry; its data, padded with tar_padding(), follows. */
int tar_write_header(struct buf *to, const struct tar_entry *entry, struct error *e);
/* Appends the two blocks that end an archive. */
int tar_write_end(struct buf *to);
/* Zero bytes needed behind `size` bytes of data. */
size_t tar_padding(uint64_t size);

struct tar_reader_handlers {
	/* Pointers in entry are valid during the call only. Negative = stop. */
	int (*entry)(void *context, const struct tar_entry *entry, struct error *e);
	int (*data)(void *context, const void *data, size_t size, struct error *e);
	/* After all data of the entry. */
	int (*end)(void *context, struct error *e);
	void *context;
};

struct tar_reader;
int tar_reader_new(const struct tar_reader_handlers *handlers, struct tar_reader **ret, struct error *e);
void tar_reader_free(struct tar_reader *reader);
/* Takes any number of bytes. */
int tar_reader_feed(struct tar_reader *reader, const void *data, size_t size, struct error *e);
/* An error if the archive is not complete. */
int tar_reader_finish(struct tar_reader *reader, struct error *e);

#endif
