/*
 * Seals: what makes sure that a guest never runs on bytes other than those that were stored.
 *
 * Each folder of a snapshot or template has a table file `checksums`: a header block, then one XXH3-128 value for each
 * 64 KiB block of memory and of the disk (all zeros for a block of zeros). The manifest holds the checksums of the
 * table and of the device state; the row in the store holds the manifest's. XXH3 finds accidents, not attacks: who can
 * write the pool can write the store as well.
 *
 * Reading gigabytes before each wake would cost more than the wake. So the row also keeps a fingerprint (size, inode
 * number, modification time of each file) taken when the files were known to match, and the boot of the host it was
 * taken in. As long as both still hold the files are taken for unchanged; if not, every block is read and compared, and
 * a new fingerprint is kept.
 */
#ifndef SPACE_SESSION_SEAL_H
#define SPACE_SESSION_SEAL_H

#include <jansson.h>

#include "base/error.h"
#include "store/store.h"

#define SEAL_BLOCK_BYTES 65536
#define SEAL_SUM_BYTES 16
#define SEAL_HEADER_BYTES 4096

/* The table, mapped from its file. */
struct seal_table {
	unsigned char *map;
	size_t map_size;
	uint64_t memory_bytes;
	uint64_t disk_bytes;
};
/* `fd` is an empty file (all blocks zero) or a clone of another table for the same sizes. */
int seal_table_open(int fd, uint64_t memory_bytes, uint64_t disk_bytes, int writable, struct seal_table *ret,
                    struct error *e);
void seal_table_close(struct seal_table *table);
void seal_table_set_memory(struct seal_table *table, uint64_t block, const void *data, size_t size);
/* Reads and sums again the blocks of [start, end) of a file; *ret_changed counts the bytes of blocks that differ. */
int seal_table_scan(struct seal_table *table, int is_disk, int fd, uint64_t start, uint64_t end, uint64_t *ret_changed,
                    struct error *e);
void seal_table_sum(const struct seal_table *table, char ret[STORE_SUM_BYTES]);

void seal_sum(const void *data, size_t size, char ret[STORE_SUM_BYTES]);

/* Takes the fingerprint of a folder's files. */
int seal_fingerprint(int folder_fd, char ret[STORE_FINGERPRINT_BYTES], struct error *e);

/* What the manifest must say. */
struct seal_expectation {
	const char *what; /* "snapshot n… of TIME", for errors */
	const char *manifest_sum;
	const char *fingerprint;
	const char *boot_id; /* of the fingerprint */
	uint64_t memory_bytes;
	uint64_t disk_bytes;
};
/* ERROR_DAMAGED names the snapshot and the file. If the whole had to be read, *ret_checked is 1 and ret_fingerprint has
 * the new one. */
int seal_verify(int folder_fd, const struct seal_expectation *expect, const char *host_boot_id, int *ret_checked,
                char ret_fingerprint[STORE_FINGERPRINT_BYTES], struct error *e);
/* Whether memory alone (of a sandbox's folder, with its table) is what the table says. */
int seal_verify_memory(int folder_fd, uint64_t memory_bytes, uint64_t disk_bytes, const char *what, struct error *e);
/* 1 = files are as the fingerprint says, 0 = something differs. Costs a stat a file. */
int seal_is_intact(int folder_fd, const char *fingerprint);

#endif
