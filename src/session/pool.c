#include "session/pool.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/fiemap.h>
#include <linux/fs.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/text.h"

#define COPY_CHUNK_BYTES (1024 * 1024)
#define FIEMAP_BATCH 128

static const char *const area_names[POOL_AREA_COUNT] = {"templates", "snapshots", "sandboxes", "tmp"};

static int probe_reflink(struct pool *pool)
{
	CLEANUP_CLOSE int from = openat(pool->fds[POOL_TMP], ".", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
	CLEANUP_CLOSE int to = openat(pool->fds[POOL_TMP], ".", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
	char block[4096] = {1};
	if (from < 0 || to < 0 || fd_pwrite_full(from, block, sizeof(block), 0) < 0)
		return 0;
	return ioctl(to, FICLONE, from) == 0;
}

int pool_open(const char *data_dir, struct pool *ret, struct error *e)
{
	struct pool pool = {.fds = {-1, -1, -1, -1}};
	if (text_format(pool.path, sizeof(pool.path), "%s/pool", data_dir) < 0)
		return error_set(e, ERROR_INVALID, "the path of the data folder is too long");
	if (mkdir(pool.path, 0700) < 0 && errno != EEXIST)
		return error_set_errno(e, errno, "making %s", pool.path);
	CLEANUP_CLOSE int top = open(pool.path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (top < 0)
		return error_set_errno(e, errno, "opening %s", pool.path);
	for (int i = 0; i < POOL_AREA_COUNT; i++) {
		if (mkdirat(top, area_names[i], 0700) < 0 && errno != EEXIST) {
			error_set_errno(e, errno, "making %s/%s", pool.path, area_names[i]);
			pool_close(&pool);
			return error_code_errno(e ? e->code : ERROR_INTERNAL);
		}
		pool.fds[i] = openat(top, area_names[i], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
		if (pool.fds[i] < 0) {
			int r = error_set_errno(e, errno, "opening %s/%s", pool.path, area_names[i]);
			pool_close(&pool);
			return r;
		}
	}
	if (fsync(top) < 0) {
		int r = error_set_errno(e, errno, "syncing %s", pool.path);
		pool_close(&pool);
		return r;
	}
	pool.reflink = probe_reflink(&pool);
	*ret = pool;
	return 0;
}

void pool_close(struct pool *pool)
{
	for (int i = 0; i < POOL_AREA_COUNT; i++) {
		if (pool->fds[i] >= 0)
			close(pool->fds[i]);
		pool->fds[i] = -1;
	}
}

int pool_folder(struct pool *pool, enum pool_area area, const char *id, struct error *e)
{
	int fd = openat(pool->fds[area], id, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
	if (fd < 0)
		return error_set_errno(e, errno, "opening the folder %s/%s", area_names[area], id);
	return fd;
}

int pool_make(struct pool *pool, enum pool_area area, const char *id, struct error *e)
{
	if (mkdirat(pool->fds[area], id, 0700) < 0)
		return error_set_errno(e, errno, "making the folder %s/%s", area_names[area], id);
	int fd = pool_folder(pool, area, id, e);
	if (fd < 0)
		unlinkat(pool->fds[area], id, AT_REMOVEDIR);
	return fd;
}

int pool_install(struct pool *pool, const char *id, enum pool_area area, struct error *e)
{
	CLEANUP_CLOSE int folder = pool_folder(pool, POOL_TMP, id, e);
	if (folder < 0)
		return folder;
	if (fsync(folder) < 0)
		return error_set_errno(e, errno, "syncing the folder tmp/%s", id);
	if (renameat(pool->fds[POOL_TMP], id, pool->fds[area], id) < 0)
		return error_set_errno(e, errno, "moving %s into %s", id, area_names[area]);
	if (fsync(pool->fds[area]) < 0) {
		int r = error_set_errno(e, errno, "syncing the folder %s", area_names[area]);
		pool_remove(pool, area, id);
		return r;
	}
	return 0;
}

/* Folders are flat; a deeper one is not ours and stays. */
int pool_remove_flat(int parent_fd, const char *name)
{
	int fd = openat(parent_fd, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
	if (fd < 0)
		return errno == ENOENT ? 0 : (errno == ENOTDIR && unlinkat(parent_fd, name, 0) == 0) ? 0 : -errno;
	DIR *dir = fdopendir(fd);
	if (!dir) {
		close(fd);
		return -ENOMEM;
	}
	struct dirent *entry;
	while ((entry = readdir(dir)))
		if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
			unlinkat(dirfd(dir), entry->d_name, 0);
	closedir(dir);
	return unlinkat(parent_fd, name, AT_REMOVEDIR) < 0 && errno != ENOENT ? -errno : 0;
}

int pool_remove(struct pool *pool, enum pool_area area, const char *id)
{
	return pool_remove_flat(pool->fds[area], id);
}

int pool_sweep_dir(int dir_fd, int (*keep)(void *context, const char *id), void *context)
{
	int fd = openat(dir_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *dir = fd < 0 ? NULL : fdopendir(fd);
	if (!dir) {
		int r = -errno;
		if (fd >= 0)
			close(fd);
		return r;
	}
	int result = 0;
	struct dirent *entry;
	while ((entry = readdir(dir))) {
		if (entry->d_name[0] == '.')
			continue;
		if (keep && keep(context, entry->d_name))
			continue;
		int r = pool_remove_flat(dir_fd, entry->d_name);
		if (r < 0)
			result = r;
	}
	closedir(dir);
	return result;
}

int pool_sweep(struct pool *pool, enum pool_area area, int (*keep)(void *context, const char *id), void *context)
{
	return pool_sweep_dir(pool->fds[area], keep, context);
}

static int copy_range(int from, int to, off_t start, off_t end, char *chunk)
{
	while (start < end) {
		size_t want = (size_t)MIN(end - start, (off_t)COPY_CHUNK_BYTES);
		ssize_t n = fd_pread_full(from, chunk, want, start);
		if (n < 0)
			return (int)n;
		if (n == 0)
			break;
		int r = fd_pwrite_full(to, chunk, (size_t)n, start);
		if (r < 0)
			return r;
		start += n;
	}
	return 0;
}

static int copy_sparse(int from, int to, struct error *e)
{
	struct stat st;
	if (fstat(from, &st) < 0 || ftruncate(to, st.st_size) < 0)
		return error_set_errno(e, errno, "copying a file of the pool");
	CLEANUP_FREE char *chunk = malloc(COPY_CHUNK_BYTES);
	if (!chunk)
		return error_set_errno(e, ENOMEM, "copying a file of the pool");
	off_t at = 0;
	while (at < st.st_size) {
		off_t data = lseek(from, at, SEEK_DATA);
		if (data < 0 && errno == ENXIO)
			break;
		off_t hole = data < 0 ? -1 : lseek(from, data, SEEK_HOLE);
		if (hole < 0)
			return error_set_errno(e, errno, "copying a file of the pool");
		int r = copy_range(from, to, data, hole, chunk);
		if (r < 0)
			return error_set_errno(e, r, "copying a file of the pool");
		at = hole;
	}
	return 0;
}

int pool_clone(const struct pool *pool, int from, int to, struct error *e)
{
	if (!pool->reflink)
		return copy_sparse(from, to, e);
	if (ioctl(to, FICLONE, from) < 0)
		return error_set_errno(e, errno, "cloning a file of the pool");
	return 0;
}

int pool_create_file(int folder_fd, const char *name, struct error *e)
{
	int fd = openat(folder_fd, name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
	if (fd < 0)
		return error_set_errno(e, errno, "making the file %s", name);
	return fd;
}

int pool_open_file(int folder_fd, const char *name, int flags, struct error *e)
{
	int fd = openat(folder_fd, name, flags | O_CLOEXEC | O_NOFOLLOW);
	if (fd < 0)
		return error_set_errno(e, errno, "opening the file %s", name);
	return fd;
}

static uint64_t exclusive_bytes_of(int fd)
{
	struct stat st;
	if (fstat(fd, &st) < 0 || st.st_nlink > 1)
		return 0;
	size_t size = sizeof(struct fiemap) + FIEMAP_BATCH * sizeof(struct fiemap_extent);
	CLEANUP_FREE struct fiemap *map = malloc(size);
	if (!map)
		return 0;
	uint64_t bytes = 0;
	uint64_t at = 0;
	for (;;) {
		memset(map, 0, sizeof(*map));
		map->fm_start = at;
		map->fm_length = FIEMAP_MAX_OFFSET - at;
		map->fm_extent_count = FIEMAP_BATCH;
		if (ioctl(fd, FS_IOC_FIEMAP, map) < 0)
			return (uint64_t)st.st_blocks * 512; /* no such call here: then nothing is shared either */
		for (unsigned i = 0; i < map->fm_mapped_extents; i++) {
			const struct fiemap_extent *extent = &map->fm_extents[i];
			if (!(extent->fe_flags & FIEMAP_EXTENT_SHARED))
				bytes += extent->fe_length;
			if (extent->fe_flags & FIEMAP_EXTENT_LAST)
				return bytes;
			at = extent->fe_logical + extent->fe_length;
		}
		if (map->fm_mapped_extents == 0)
			return bytes;
	}
}

uint64_t pool_exclusive_bytes(int folder_fd)
{
	static const char *const names[] = {"memory", "disk", "state", "checksums", "manifest.json"};
	uint64_t bytes = 0;
	for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
		CLEANUP_CLOSE int fd = openat(folder_fd, names[i], O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
		if (fd >= 0)
			bytes += exclusive_bytes_of(fd);
	}
	return bytes;
}

int pool_space(const struct pool *pool, uint64_t *ret_total, uint64_t *ret_free)
{
	struct statvfs fs;
	if (fstatvfs(pool->fds[POOL_TMP], &fs) < 0)
		return -errno;
	*ret_total = (uint64_t)fs.f_blocks * fs.f_frsize;
	*ret_free = (uint64_t)fs.f_bavail * fs.f_frsize;
	return 0;
}
