#include "guest/upload.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <stdio.h>
#include <string.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/text.h"

#define UPLOAD_ATTRIBUTE_NAMES_BYTES 16384
#define UPLOAD_ATTRIBUTE_BYTES_MAX 65536
#define UPLOAD_COPY_BYTES ((size_t)16 * MIB)

static int fail_write(struct upload *u, int errnum, struct error *e)
{
	int r = path_fail(e, errnum, "write", u->path.text);
	if (e && e->code == ERROR_NO_SPACE)
		error_prefix(e, "not enough disk space available");
	return r;
}

static void make_hidden_name(struct upload *u, const char *prefix)
{
	char id[ID_BYTES];
	id_make(id, 'u');
	snprintf(u->hidden, sizeof(u->hidden), "%s%s", prefix, id);
}

/* An unnamed file in `directory`, or a hidden one. Descriptor or -errno. */
static int open_collector(struct upload *u)
{
	int fd = openat(u->directory, ".", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
	if (fd >= 0)
		return fd;
	if (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL)
		return -errno;
	make_hidden_name(u, u->existing.st_mode ? UPLOAD_NAME_REPLACE : UPLOAD_NAME_NEW);
	fd = openat(u->directory, u->hidden, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
	if (fd >= 0)
		return fd;
	u->hidden[0] = 0;
	return -errno;
}

/* For a file that can be written in a directory that cannot: collect the bytes elsewhere. */
static int open_collector_elsewhere(void)
{
	static const char *const places[] = {"/tmp", "/var/tmp", "/dev/shm"};
	int r = -ENOENT;
	for (size_t i = 0; i < ARRAY_SIZE(places); i++) {
		r = open(places[i], O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
		if (r >= 0)
			return r;
		r = -errno;
	}
	return r;
}

static int check_existing(struct upload *u, struct error *e)
{
	if (S_ISDIR(u->existing.st_mode)) {
		path_fail(e, EISDIR, "write", u->path.text);
		return error_prefix(e, "the path is a directory");
	}
	if (!S_ISREG(u->existing.st_mode)) {
		path_fail(e, EINVAL, "write", u->path.text);
		return error_prefix(e, "the path is a %s, not a regular file", path_type_name(u->existing.st_mode));
	}
	/* AT_EACCESS makes the kernel look at the thread's fsuid, which is the caller. */
	if (faccessat(u->directory, u->name, W_OK, AT_EACCESS | AT_SYMLINK_NOFOLLOW) < 0)
		return path_fail(e, errno, "write", u->path.text);
	return 0;
}

static int open_collecting(struct upload *u, struct error *e)
{
	int exists = u->existing.st_mode != 0;
	u->is_in_place = exists && u->existing.st_nlink > 1;
	u->fd = open_collector(u);
	if (u->fd < 0 && exists && u->fd != -ENOSPC && u->fd != -EDQUOT) {
		u->is_in_place = u->is_elsewhere = 1;
		u->fd = open_collector_elsewhere();
	}
	if (u->fd < 0)
		return fail_write(u, u->fd, e);
	struct stat st;
	if (exists && !u->is_in_place && fstat(u->fd, &st) == 0 &&
	    (st.st_uid != u->existing.st_uid || st.st_gid != u->existing.st_gid) &&
	    fchown(u->fd, u->existing.st_uid, u->existing.st_gid) < 0)
		u->is_in_place = 1;
	return 0;
}

int upload_begin(struct upload *u, const struct path *path, int mode, int64_t expected, struct error *e)
{
	u->path = *path;
	u->directory = u->fd = -1;
	u->hidden[0] = 0;
	u->is_elsewhere = 0;
	u->mode = mode;
	u->size = u->buffered = 0;
	const char *name = path_name(path->text);
	if (path->wants_directory || name == path->text) {
		path_fail(e, EISDIR, "write", path->text);
		return error_prefix(e, "the path names a directory");
	}
	char parent[PATH_BYTES_MAX];
	memcpy(parent, path->text, sizeof(parent));
	parent[name - path->text] = 0;
	int fd = path_make_directories(parent, e);
	if (fd < 0)
		return fd;
	close(fd);
	int r = path_open_target(path, &u->directory, u->name, &u->existing, e);
	if (r == 0 && u->existing.st_mode)
		r = check_existing(u, e);
	if (r == 0)
		r = open_collecting(u, e);
	if (r == 0 && expected >= UPLOAD_RESERVE_BYTES_MIN && fallocate(u->fd, FALLOC_FL_KEEP_SIZE, 0, expected) < 0 &&
	    (errno == ENOSPC || errno == EDQUOT || errno == EFBIG))
		r = fail_write(u, errno, e);
	if (r < 0)
		upload_abort(u);
	return r;
}

static int flush(struct upload *u, struct error *e)
{
	int r = fd_write_full(u->fd, u->buffer, u->buffered);
	u->buffered = 0;
	return r < 0 ? fail_write(u, r, e) : 0;
}

int upload_write(struct upload *u, const void *data, size_t size, struct error *e)
{
	u->size += size;
	if (u->buffered + size > sizeof(u->buffer)) {
		int r = flush(u, e);
		if (r < 0)
			return r;
	}
	if (size >= sizeof(u->buffer)) {
		int r = fd_write_full(u->fd, data, size);
		return r < 0 ? fail_write(u, r, e) : 0;
	}
	memcpy(u->buffer + u->buffered, data, size);
	u->buffered += size;
	return 0;
}

int upload_append_file(struct upload *u, int fd, struct error *e)
{
	int r = flush(u, e);
	if (r < 0)
		return r;
	for (;;) {
		ssize_t n = copy_file_range(fd, NULL, u->fd, NULL, UPLOAD_COPY_BYTES, 0);
		if (n < 0 && (errno == EXDEV || errno == EINVAL || errno == EOPNOTSUPP || errno == ENOSYS)) {
			n = read(fd, u->buffer, sizeof(u->buffer));
			if (n > 0) {
				r = fd_write_full(u->fd, u->buffer, (size_t)n);
				n = r < 0 ? r : n;
			} else if (n < 0) {
				n = -errno;
			}
		} else if (n < 0) {
			n = -errno;
		}
		if (n == 0)
			return 0;
		if (n < 0 && n != -EINTR)
			return fail_write(u, (int)n, e);
		u->size += n > 0 ? (uint64_t)n : 0;
	}
}

/* ACLs and attributes of the file that is replaced; what cannot be carried over is left out, as with cp -p. File
 * capabilities go, as they do with any write. */
static void copy_attributes(struct upload *u)
{
	CLEANUP_CLOSE int from = path_open_at(u->directory, u->name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
	if (from < 0)
		return;
	char names[UPLOAD_ATTRIBUTE_NAMES_BYTES];
	ssize_t size = flistxattr(from, names, sizeof(names));
	CLEANUP_FREE char *value = size > 0 ? malloc(UPLOAD_ATTRIBUTE_BYTES_MAX) : NULL;
	for (ssize_t at = 0; value && at < size; at += (ssize_t)strlen(names + at) + 1) {
		const char *name = names + at;
		if (text_starts_with(name, "security.") || text_starts_with(name, "trusted."))
			continue;
		ssize_t n = fgetxattr(from, name, value, UPLOAD_ATTRIBUTE_BYTES_MAX);
		if (n >= 0)
			(void)fsetxattr(u->fd, name, value, (size_t)n, 0);
	}
}

/* The mode that the finished file gets. A write by anyone but root takes the set-id bits of a file away. */
static mode_t final_mode(const struct upload *u)
{
	if (u->mode >= 0)
		return (mode_t)u->mode & 07777;
	if (!u->existing.st_mode)
		return UPLOAD_MODE_DEFAULT;
	mode_t mode = u->existing.st_mode & 07777;
	return path_identity_is_root() ? mode : mode & ~(mode_t)(S_ISUID | S_ISGID);
}

/* Puts the collected bytes into the file that is there. */
static int copy_in_place(struct upload *u, const struct metadata *metadata, struct error *e)
{
	CLEANUP_CLOSE int place = path_open_at(u->directory, u->name, O_PATH | O_NOFOLLOW);
	CLEANUP_CLOSE int to = place < 0 ? place : path_reopen(place, O_WRONLY | O_NONBLOCK);
	struct stat st;
	if (to < 0 || fstat(to, &st) < 0)
		return path_fail(e, to < 0 ? to : errno, "write", u->path.text);
	if (!S_ISREG(st.st_mode))
		return error_set(e, ERROR_CONFLICT, "the file was replaced by something else during the upload");
	/* Room first, so that a full disk is found before the old content is touched. */
	if (u->size > 0 && fallocate(to, FALLOC_FL_KEEP_SIZE, 0, (off_t)u->size) < 0 &&
	    (errno == ENOSPC || errno == EDQUOT))
		return fail_write(u, errno, e);
	off_t at = 0;
	for (;;) {
		ssize_t n = fd_pread_full(u->fd, u->buffer, sizeof(u->buffer), at);
		int r = n < 0 ? (int)n : n > 0 ? fd_write_full(to, u->buffer, (size_t)n) : 0;
		if (r < 0) {
			fail_write(u, r, e);
			return at > 0 ? error_prefix(e, "the old content is partly overwritten") : r;
		}
		if (n == 0)
			break;
		at += n;
	}
	/* Files of /proc and /sys have no length to set. */
	if (st.st_size > at && ftruncate(to, at) < 0 && errno != EINVAL && errno != EPERM && errno != EOPNOTSUPP)
		return fail_write(u, errno, e);
	if (u->mode >= 0 && fchmod(to, final_mode(u)) < 0)
		return path_fail(e, errno, "set the mode of", u->path.text);
	int r = metadata_write(to, metadata);
	return r < 0 && metadata && metadata->count ? fail_write(u, r, e) : 0;
}

static int give_hidden_name(struct upload *u)
{
	if (u->hidden[0])
		return 0;
	char link[64];
	snprintf(link, sizeof(link), "/proc/self/fd/%d", u->fd);
	make_hidden_name(u, u->existing.st_mode ? UPLOAD_NAME_REPLACE : UPLOAD_NAME_NEW);
	if (linkat(AT_FDCWD, link, u->directory, u->hidden, AT_SYMLINK_FOLLOW) == 0)
		return 0;
	u->hidden[0] = 0;
	return -errno;
}

static int rename_into_place(struct upload *u)
{
	unsigned flags = u->existing.st_mode ? 0 : RENAME_NOREPLACE;
	if (renameat2(u->directory, u->hidden, u->directory, u->name, flags) < 0) {
		/* EINVAL: no such flag on this file system. EEXIST: another upload was quicker; the last one wins. */
		if (!flags || (errno != EINVAL && errno != EEXIST))
			return -errno;
		struct stat st;
		if (fstatat(u->directory, u->name, &st, AT_SYMLINK_NOFOLLOW) == 0 && !S_ISREG(st.st_mode))
			return -EEXIST;
		if (renameat(u->directory, u->hidden, u->directory, u->name) < 0)
			return -errno;
	}
	u->hidden[0] = 0;
	return 0;
}

static int replace(struct upload *u, const struct metadata *metadata, struct error *e)
{
	if (u->existing.st_mode)
		copy_attributes(u);
	int r = metadata_write(u->fd, metadata);
	if (r < 0 && metadata && metadata->count)
		return fail_write(u, r, e);
	if (fchmod(u->fd, final_mode(u)) < 0)
		return path_fail(e, errno, "set the mode of", u->path.text);
	r = give_hidden_name(u);
	if (r == 0)
		r = rename_into_place(u);
	if (r == -EBUSY && u->existing.st_mode)
		return copy_in_place(u, metadata, e);
	return r < 0 ? fail_write(u, r, e) : 0;
}

int upload_commit(struct upload *u, const struct metadata *metadata, struct error *e)
{
	int r = flush(u, e);
	if (r == 0 && u->is_in_place) {
		r = copy_in_place(u, metadata, e);
		/* A program that runs cannot be written to, but its name can be given to a new file of the same owner. */
		if (r == -ETXTBSY && !u->is_elsewhere && fchown(u->fd, u->existing.st_uid, u->existing.st_gid) == 0)
			r = replace(u, metadata, e);
	} else if (r == 0) {
		r = replace(u, metadata, e);
	}
	upload_abort(u);
	return r;
}

void upload_abort(struct upload *u)
{
	if (u->hidden[0] && u->directory >= 0)
		(void)unlinkat(u->directory, u->hidden, 0);
	u->hidden[0] = 0;
	if (u->fd >= 0)
		close(u->fd);
	if (u->directory >= 0)
		close(u->directory);
	u->fd = u->directory = -1;
}
