#include "session/disk_file.h"

#include <errno.h>
#include <linux/fiemap.h>
#include <linux/fs.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#define EXTENT_BATCH 512

/* Reads a file's extents one after the other; gaps between them are holes. */
struct cursor {
	int fd; /* -1: an empty file */
	struct fiemap *map;
	unsigned at;
	uint64_t next; /* where the next batch starts */
	int ended;
	/* The present extent, [start, end); `physical` 0 = its place does not matter or is not known. */
	int valid;
	uint64_t start;
	uint64_t end;
	uint64_t physical;
};

static int cursor_fill(struct cursor *c)
{
	memset(c->map, 0, sizeof(*c->map));
	c->map->fm_start = c->next;
	c->map->fm_length = FIEMAP_MAX_OFFSET - c->next;
	c->map->fm_extent_count = EXTENT_BATCH;
	c->map->fm_flags = FIEMAP_FLAG_SYNC;
	if (ioctl(c->fd, FS_IOC_FIEMAP, c->map) < 0)
		return -errno;
	c->at = 0;
	if (c->map->fm_mapped_extents == 0)
		c->ended = 1;
	return 0;
}

static int cursor_next(struct cursor *c)
{
	c->valid = 0;
	if (c->fd < 0 || c->ended)
		return 0;
	if (!c->map->fm_mapped_extents || c->at == c->map->fm_mapped_extents) {
		int r = cursor_fill(c);
		if (r < 0 || c->ended)
			return r;
	}
	const struct fiemap_extent *extent = &c->map->fm_extents[c->at++];
	const unsigned vague = FIEMAP_EXTENT_UNKNOWN | FIEMAP_EXTENT_DELALLOC | FIEMAP_EXTENT_ENCODED |
	                       FIEMAP_EXTENT_NOT_ALIGNED | FIEMAP_EXTENT_DATA_INLINE | FIEMAP_EXTENT_DATA_TAIL;
	c->start = extent->fe_logical;
	c->end = extent->fe_logical + extent->fe_length;
	/* The state "unwritten" belongs to the file, not to the block: such a range reads as zeros only here. */
	c->physical = extent->fe_flags & (vague | FIEMAP_EXTENT_UNWRITTEN) ? 0 : extent->fe_physical;
	c->next = c->end;
	if (extent->fe_flags & FIEMAP_EXTENT_LAST)
		c->ended = 1;
	c->valid = 1;
	return 0;
}

/* How far from `at` the cursor's file goes on in one way: in a hole (*physical UINT64_MAX) or in one extent. */
static uint64_t cursor_look(const struct cursor *c, uint64_t at, uint64_t size, uint64_t *physical)
{
	if (!c->valid || c->start >= size) {
		*physical = UINT64_MAX;
		return size;
	}
	if (at < c->start) {
		*physical = UINT64_MAX;
		return MIN(c->start, size);
	}
	*physical = c->physical ? c->physical + (at - c->start) : 0;
	return MIN(c->end, size);
}

static int compare(struct cursor *old, struct cursor *new, uint64_t size,
                   int (*changed)(void *context, uint64_t start, uint64_t end), void *context)
{
	uint64_t at = 0;
	int r = cursor_next(old);
	if (r == 0)
		r = cursor_next(new);
	while (r == 0 && at < size) {
		while (r == 0 && old->valid && old->end <= at)
			r = cursor_next(old);
		while (r == 0 && new->valid &&new->end <= at)
			r = cursor_next(new);
		if (r < 0)
			break;
		uint64_t old_place;
		uint64_t new_place;
		uint64_t end = MIN(cursor_look(old, at, size, &old_place), cursor_look(new, at, size, &new_place));
		if (old_place != new_place || new_place == 0)
			r = changed(context, at, end);
		at = end;
	}
	return r;
}

static int all_data(int fd, uint64_t size, int (*changed)(void *context, uint64_t start, uint64_t end), void *context)
{
	off_t at = 0;
	while ((uint64_t)at < size) {
		off_t data = lseek(fd, at, SEEK_DATA);
		if (data < 0)
			return errno == ENXIO ? 0 : -errno;
		off_t hole = lseek(fd, data, SEEK_HOLE);
		if (hole < 0)
			return -errno;
		int r = changed(context, (uint64_t)data, MIN((uint64_t)hole, size));
		if (r != 0)
			return r;
		at = hole;
	}
	return 0;
}

int disk_file_changes(int previous_fd, int fd, int reflink, int (*changed)(void *context, uint64_t start, uint64_t end),
                      void *context, struct error *e)
{
	struct stat st;
	if (fstat(fd, &st) < 0)
		return error_set_errno(e, errno, "disk image");
	uint64_t size = (uint64_t)st.st_size;
	int r;
	if (previous_fd < 0) {
		r = all_data(fd, size, changed, context);
	} else if (!reflink) {
		/* Holes of the new file may have been data before, so nothing short of everything is safe. */
		r = changed(context, 0, size);
	} else {
		size_t bytes = sizeof(struct fiemap) + EXTENT_BATCH * sizeof(struct fiemap_extent);
		CLEANUP_FREE struct fiemap *old_map = calloc(1, bytes);
		CLEANUP_FREE struct fiemap *new_map = calloc(1, bytes);
		if (!old_map || !new_map)
			return error_set_errno(e, ENOMEM, "disk image");
		struct cursor old = {.fd = previous_fd, .map = old_map};
		struct cursor new = {.fd = fd, .map = new_map};
		r = compare(&old, &new, size, changed, context);
		if (r == -EOPNOTSUPP || r == -ENOTTY)
			r = changed(context, 0, size);
	}
	return r < 0 ? error_set_errno(e, r, "comparing disk images") : 0;
}
