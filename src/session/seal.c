#include "session/seal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "base/fd.h"

#define MANIFEST_BYTES_MAX 65536
#define STATE_BYTES_MAX (64 * 1024 * 1024)

static const char table_magic[8] = {'S', 'P', 'A', 'C', 'E', 'S', 'U', 'M'};
static const char *const file_names[] = {"memory", "disk", "state", "checksums", "manifest.json"};

struct table_header {
	char magic[8];
	uint32_t version;
	uint32_t block_bytes;
	uint64_t memory_bytes;
	uint64_t disk_bytes;
};

static uint64_t blocks_of(uint64_t bytes)
{
	return (bytes + SEAL_BLOCK_BYTES - 1) / SEAL_BLOCK_BYTES;
}

static size_t table_size(uint64_t memory_bytes, uint64_t disk_bytes)
{
	return SEAL_HEADER_BYTES + (size_t)(blocks_of(memory_bytes) + blocks_of(disk_bytes)) * SEAL_SUM_BYTES;
}

int seal_table_open(int fd, uint64_t memory_bytes, uint64_t disk_bytes, int writable, struct seal_table *ret,
                    struct error *e)
{
	struct table_header want = {
	    .version = 1, .block_bytes = SEAL_BLOCK_BYTES, .memory_bytes = memory_bytes, .disk_bytes = disk_bytes};
	memcpy(want.magic, table_magic, sizeof(want.magic));
	size_t size = table_size(memory_bytes, disk_bytes);
	struct stat st;
	if (fstat(fd, &st) < 0)
		return error_set_errno(e, errno, "table of checksums");
	if (writable && st.st_size == 0) {
		if (ftruncate(fd, (off_t)size) < 0)
			return error_set_errno(e, errno, "table of checksums");
		int r = fd_pwrite_full(fd, &want, sizeof(want), 0);
		if (r < 0)
			return error_set_errno(e, r, "table of checksums");
	} else if ((uint64_t)st.st_size != size) {
		return error_set(e, ERROR_DAMAGED, "the table of checksums has %lld bytes instead of %zu",
		                 (long long)st.st_size, size);
	}
	void *map = mmap(NULL, size, PROT_READ | (writable ? PROT_WRITE : 0), MAP_SHARED, fd, 0);
	if (map == MAP_FAILED)
		return error_set_errno(e, errno, "table of checksums");
	if (memcmp(map, &want, sizeof(want)) != 0) {
		munmap(map, size);
		return error_set(e, ERROR_DAMAGED, "the table of checksums belongs to something else");
	}
	*ret = (struct seal_table){.map = map, .map_size = size, .memory_bytes = memory_bytes, .disk_bytes = disk_bytes};
	return 0;
}

void seal_table_close(struct seal_table *table)
{
	if (table->map)
		munmap(table->map, table->map_size);
	*table = (struct seal_table){0};
}

static unsigned char *entry_of(const struct seal_table *table, int is_disk, uint64_t block)
{
	uint64_t index = (is_disk ? blocks_of(table->memory_bytes) : 0) + block;
	return table->map + SEAL_HEADER_BYTES + index * SEAL_SUM_BYTES;
}

static void sum_block(const void *data, size_t size, unsigned char ret[SEAL_SUM_BYTES])
{
	const char *p = data;
	if (p[0] == 0 && memcmp(p, p + 1, size - 1) == 0) {
		memset(ret, 0, SEAL_SUM_BYTES);
		return;
	}
	XXH128_canonical_t canonical;
	XXH128_canonicalFromHash(&canonical, XXH3_128bits(data, size));
	memcpy(ret, canonical.digest, SEAL_SUM_BYTES);
}

void seal_table_set_memory(struct seal_table *table, uint64_t block, const void *data, size_t size)
{
	sum_block(data, size, entry_of(table, 0, block));
}

/* Calls `visit` for each block of [start, end); data NULL for blocks that lie in a hole. */
static int each_block(int fd, uint64_t start, uint64_t end,
                      int (*visit)(void *context, uint64_t block, const void *data, size_t size), void *context)
{
	CLEANUP_FREE char *data = malloc(SEAL_BLOCK_BYTES);
	if (!data)
		return -ENOMEM;
	uint64_t data_at = 0; /* nothing but holes lies between the present block and this */
	for (uint64_t at = start / SEAL_BLOCK_BYTES * SEAL_BLOCK_BYTES; at < end; at += SEAL_BLOCK_BYTES) {
		size_t size = SEAL_BLOCK_BYTES;
		if (at >= data_at) {
			off_t next = lseek(fd, (off_t)at, SEEK_DATA);
			if (next < 0 && errno != ENXIO)
				return -errno;
			data_at = next < 0 ? UINT64_MAX : (uint64_t)next;
		}
		int r;
		if (data_at >= at + SEAL_BLOCK_BYTES) {
			r = visit(context, at / SEAL_BLOCK_BYTES, NULL, size);
		} else {
			ssize_t n = fd_pread_full(fd, data, size, (off_t)at);
			if (n <= 0)
				return n < 0 ? (int)n : -EBADMSG;
			r = visit(context, at / SEAL_BLOCK_BYTES, data, (size_t)n);
			data_at = at + SEAL_BLOCK_BYTES;
		}
		if (r != 0)
			return r;
	}
	return 0;
}

struct scan {
	struct seal_table *table;
	int is_disk;
	uint64_t changed;
};

static int scan_block(void *context, uint64_t block, const void *data, size_t size)
{
	struct scan *scan = context;
	unsigned char sum[SEAL_SUM_BYTES] = {0};
	unsigned char *entry = entry_of(scan->table, scan->is_disk, block);
	if (data)
		sum_block(data, size, sum);
	if (memcmp(entry, sum, sizeof(sum)) != 0) {
		memcpy(entry, sum, sizeof(sum));
		scan->changed += size;
	}
	return 0;
}

int seal_table_scan(struct seal_table *table, int is_disk, int fd, uint64_t start, uint64_t end, uint64_t *ret_changed,
                    struct error *e)
{
	struct scan scan = {.table = table, .is_disk = is_disk};
	int r = each_block(fd, start, end, scan_block, &scan);
	if (r < 0)
		return error_set_errno(e, r, "reading %s", is_disk ? "a disk image" : "a memory file");
	*ret_changed += scan.changed;
	return 0;
}

void seal_sum(const void *data, size_t size, char ret[STORE_SUM_BYTES])
{
	XXH128_canonical_t canonical;
	XXH128_canonicalFromHash(&canonical, XXH3_128bits(data, size));
	text_hex(ret, canonical.digest, sizeof(canonical.digest));
}

void seal_table_sum(const struct seal_table *table, char ret[STORE_SUM_BYTES])
{
	seal_sum(table->map, table->map_size, ret);
}

static int fingerprint_file(int folder_fd, const char *name, char *to, size_t size)
{
	struct stat st;
	if (fstatat(folder_fd, name, &st, AT_SYMLINK_NOFOLLOW) < 0)
		return -errno;
	if (!S_ISREG(st.st_mode))
		return -EBADMSG;
	return text_format(to, size, "%s:%lld:%llu:%lld.%09ld;", name, (long long)st.st_size, (unsigned long long)st.st_ino,
	                   (long long)st.st_mtim.tv_sec, (long)st.st_mtim.tv_nsec);
}

int seal_fingerprint(int folder_fd, char ret[STORE_FINGERPRINT_BYTES], struct error *e)
{
	size_t used = 0;
	for (size_t i = 0; i < ARRAY_SIZE(file_names); i++) {
		int r = fingerprint_file(folder_fd, file_names[i], ret + used, STORE_FINGERPRINT_BYTES - used);
		if (r < 0)
			return error_set_errno(e, r, "file %s", file_names[i]);
		used += strlen(ret + used);
	}
	return 0;
}

/* The name of the first file that is not as the fingerprint says, or NULL. Reading must be possible, too. */
static const char *find_difference(int folder_fd, const char *fingerprint)
{
	for (size_t i = 0; i < ARRAY_SIZE(file_names); i++) {
		char now[160];
		if (fingerprint_file(folder_fd, file_names[i], now, sizeof(now)) < 0 ||
		    faccessat(folder_fd, file_names[i], R_OK, AT_EACCESS) < 0)
			return file_names[i];
		size_t length = strlen(now);
		if (strncmp(fingerprint, now, length) != 0)
			return file_names[i];
		fingerprint += length;
	}
	return NULL;
}

int seal_is_intact(int folder_fd, const char *fingerprint)
{
	return find_difference(folder_fd, fingerprint) == NULL;
}

static int damaged(struct error *e, const char *what, const char *file, const char *how)
{
	return error_set(e, ERROR_DAMAGED, "%s is damaged: file %s %s", what, file, how);
}

static int check_sum_of_file(int folder_fd, const char *name, size_t limit, const char *want, const char *what,
                             char **ret_data, size_t *ret_size, struct error *e)
{
	CLEANUP_FREE char *data = NULL;
	size_t size = 0;
	int r = fd_read_file(folder_fd, name, limit, &data, &size);
	if (r < 0)
		return damaged(e, what, name, r == -ENOENT ? "is missing" : r == -EACCES ? "cannot be read" : strerror(-r));
	char sum[STORE_SUM_BYTES];
	seal_sum(data, size, sum);
	if (strcmp(sum, want) != 0)
		return damaged(e, what, name, "does not match its checksum");
	if (ret_data) {
		*ret_data = TAKE_PTR(data);
		*ret_size = size;
	}
	return 0;
}

static int compare_block(void *context, uint64_t block, const void *data, size_t size)
{
	const struct scan *scan = context;
	unsigned char sum[SEAL_SUM_BYTES] = {0};
	if (data)
		sum_block(data, size, sum);
	return memcmp(entry_of(scan->table, scan->is_disk, block), sum, sizeof(sum)) == 0 ? 0 : -EBADMSG;
}

static int check_blocks(int folder_fd, const char *name, struct seal_table *table, int is_disk, const char *what,
                        struct error *e)
{
	CLEANUP_CLOSE int fd = openat(folder_fd, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
	if (fd < 0)
		return damaged(e, what, name,
		               errno == ENOENT   ? "is missing"
		               : errno == EACCES ? "cannot be read"
		                                 : strerror(errno));
	uint64_t want = is_disk ? table->disk_bytes : table->memory_bytes;
	struct stat st;
	if (fstat(fd, &st) < 0)
		return error_set_errno(e, errno, "file %s", name);
	if ((uint64_t)st.st_size != want)
		return damaged(e, what, name, (uint64_t)st.st_size < want ? "is too short" : "is too long");
	struct scan scan = {.table = table, .is_disk = is_disk};
	int r = each_block(fd, 0, want, compare_block, &scan);
	if (r == -EBADMSG)
		return damaged(e, what, name, "does not match its checksums");
	return r < 0 ? damaged(e, what, name, strerror(-r)) : 0;
}

static int open_table(int folder_fd, uint64_t memory_bytes, uint64_t disk_bytes, const char *what,
                      struct seal_table *ret, struct error *e)
{
	CLEANUP_CLOSE int fd = openat(folder_fd, "checksums", O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
	if (fd < 0)
		return damaged(e, what, "checksums", errno == ENOENT ? "is missing" : "cannot be read");
	int r = seal_table_open(fd, memory_bytes, disk_bytes, 0, ret, e);
	return r < 0 ? error_prefix(e, "%s", what) : 0;
}

int seal_verify_memory(int folder_fd, uint64_t memory_bytes, uint64_t disk_bytes, const char *what, struct error *e)
{
	struct seal_table table = {0};
	int r = open_table(folder_fd, memory_bytes, disk_bytes, what, &table, e);
	if (r == 0)
		r = check_blocks(folder_fd, "memory", &table, 0, what, e);
	seal_table_close(&table);
	return r;
}

/* Sums that the manifest holds. */
static int read_manifest(int folder_fd, const struct seal_expectation *expect, char state_sum[STORE_SUM_BYTES],
                         char table_sum[STORE_SUM_BYTES], struct error *e)
{
	CLEANUP_FREE char *data = NULL;
	size_t size = 0;
	int r = check_sum_of_file(folder_fd, "manifest.json", MANIFEST_BYTES_MAX, expect->manifest_sum, expect->what, &data,
	                          &size, e);
	if (r < 0)
		return r;
	json_t *manifest = json_loadb(data, size, 0, NULL);
	const char *state = json_string_value(json_object_get(json_object_get(manifest, "state"), "xxh3_128"));
	const char *table = json_string_value(json_object_get(json_object_get(manifest, "checksums"), "xxh3_128"));
	if (!state || !table || text_copy(state_sum, STORE_SUM_BYTES, state) < 0 ||
	    text_copy(table_sum, STORE_SUM_BYTES, table) < 0)
		r = damaged(e, expect->what, "manifest.json", "is not understood");
	json_decref(manifest);
	return r;
}

static int verify_all(int folder_fd, const struct seal_expectation *expect, struct error *e)
{
	char state_sum[STORE_SUM_BYTES];
	char table_sum[STORE_SUM_BYTES];
	int r = read_manifest(folder_fd, expect, state_sum, table_sum, e);
	if (r == 0)
		r = check_sum_of_file(folder_fd, "state", STATE_BYTES_MAX, state_sum, expect->what, NULL, NULL, e);
	struct seal_table table = {0};
	if (r == 0)
		r = open_table(folder_fd, expect->memory_bytes, expect->disk_bytes, expect->what, &table, e);
	if (r == 0) {
		char sum[STORE_SUM_BYTES];
		seal_table_sum(&table, sum);
		if (strcmp(sum, table_sum) != 0)
			r = damaged(e, expect->what, "checksums", "does not match its checksum");
	}
	if (r == 0)
		r = check_blocks(folder_fd, "memory", &table, 0, expect->what, e);
	if (r == 0)
		r = check_blocks(folder_fd, "disk", &table, 1, expect->what, e);
	seal_table_close(&table);
	return r;
}

int seal_verify(int folder_fd, const struct seal_expectation *expect, const char *host_boot_id, int *ret_checked,
                char ret_fingerprint[STORE_FINGERPRINT_BYTES], struct error *e)
{
	*ret_checked = 0;
	if (strcmp(host_boot_id, expect->boot_id) == 0 && !find_difference(folder_fd, expect->fingerprint))
		return 0;
	/* Taken first: a change during the check then shows as a difference next time. */
	char fingerprint[STORE_FINGERPRINT_BYTES];
	struct error missing;
	int taken = seal_fingerprint(folder_fd, fingerprint, &missing);
	int r = verify_all(folder_fd, expect, e);
	if (r < 0)
		return r;
	if (taken < 0)
		return error_set(e, ERROR_DAMAGED, "%s is damaged: %s", expect->what, missing.message);
	memcpy(ret_fingerprint, fingerprint, sizeof(fingerprint));
	*ret_checked = 1;
	return 0;
}
