/*
 * Only two descriptors are open at any depth: the directory that is being emptied and the one `at`. On the way down
 * each level's name and identity are kept; the way up is "..", checked against that identity, so that a directory that
 * was moved meanwhile is noticed instead of something else being emptied.
 */
#include "guest/remove.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "guest/path.h"

struct level {
	dev_t dev; /* of the directory that contains `name` */
	ino_t ino;
	char *name; /* of the directory that is being emptied below it */
	int passes;
};

struct removal {
	int fd; /* directory that is being emptied, or `at` */
	struct level *levels;
	size_t depth, capacity;
	int vanished;
};

/* Goes into `name` below the present directory. */
static int descend(struct removal *r, const char *name)
{
	if (r->depth >= REMOVE_DEPTH_MAX)
		return -ENAMETOOLONG;
	if (r->depth == r->capacity) {
		size_t capacity = r->capacity ? r->capacity * 2 : 16;
		struct level *levels = realloc(r->levels, capacity * sizeof(*levels));
		if (!levels)
			return -ENOMEM;
		r->levels = levels;
		r->capacity = capacity;
	}
	struct stat st;
	if (fstat(r->fd, &st) < 0)
		return -errno;
	int fd = openat(r->fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	if (fd < 0)
		return -errno;
	char *copy = strdup(name);
	if (!copy) {
		close(fd);
		return -ENOMEM;
	}
	r->levels[r->depth++] = (struct level){.dev = st.st_dev, .ino = st.st_ino, .name = copy};
	close(r->fd);
	r->fd = fd;
	return 0;
}

/* Removes entries of the present directory until it is empty (0) or a directory that is not empty turns up, whose name
 * is copied out (1). */
static int empty_directory(int fd, char name[PATH_NAME_BYTES])
{
	int copy = openat(fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *dir = copy < 0 ? NULL : fdopendir(copy);
	if (!dir) {
		int failure = -errno;
		if (copy >= 0)
			close(copy);
		return failure;
	}
	int r = 0;
	struct dirent *entry;
	while (r == 0 && (errno = 0, entry = readdir(dir))) {
		if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
			continue;
		int is_directory = entry->d_type == DT_DIR;
		if (unlinkat(fd, entry->d_name, is_directory ? AT_REMOVEDIR : 0) == 0 || errno == ENOENT)
			continue;
		if (errno == EISDIR || errno == ENOTEMPTY || errno == EEXIST) {
			memcpy(name, entry->d_name, strlen(entry->d_name) + 1);
			r = 1;
		} else {
			r = -errno;
		}
	}
	if (r == 0 && errno)
		r = -errno;
	closedir(dir);
	return r;
}

/* Goes back up and removes the directory that was emptied. */
static int ascend(struct removal *r)
{
	struct level *level = &r->levels[r->depth - 1];
	int fd = openat(r->fd, "..", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	/* A parent that may be searched but not read is good enough to remove something in it. */
	if (fd < 0 && errno == EACCES)
		fd = openat(r->fd, "..", O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (fd < 0)
		return -errno;
	struct stat st;
	if (fstat(fd, &st) < 0 || st.st_dev != level->dev || st.st_ino != level->ino) {
		close(fd);
		return -ESTALE;
	}
	if (unlinkat(fd, level->name, AT_REMOVEDIR) < 0 && errno != ENOENT) {
		int failure = -errno;
		close(fd);
		/* Something appeared in the meantime: stay and empty it again. */
		return failure == -ENOTEMPTY && ++level->passes < REMOVE_PASSES_MAX ? 0 : failure;
	}
	close(r->fd);
	r->fd = fd;
	free(level->name);
	r->depth--;
	return 0;
}

static int run(struct removal *r)
{
	char name[PATH_NAME_BYTES];
	while (r->depth > 0) {
		int q = empty_directory(r->fd, name);
		if (q == 1) {
			q = descend(r, name);
			/* It went by itself, or so it seems; a file system that says so for ever is given up on. */
			if (q == -ENOENT && ++r->vanished < REMOVE_PASSES_MAX)
				q = 0;
		} else if (q == 0 || q == -ENOENT) {
			q = ascend(r);
		}
		if (q < 0)
			return q;
	}
	return 0;
}

int remove_tree(int at, const char *name, const char *shown, struct error *e)
{
	struct stat st;
	if (unlinkat(at, name, 0) == 0 || errno == ENOENT)
		return 0;
	int failure = errno;
	/* Directories give EISDIR on Linux, EPERM by POSIX. */
	if (fstatat(at, name, &st, AT_SYMLINK_NOFOLLOW) < 0 || !S_ISDIR(st.st_mode))
		return path_fail(e, failure, "remove", shown);
	if (unlinkat(at, name, AT_REMOVEDIR) == 0 || errno == ENOENT)
		return 0;
	if (errno != ENOTEMPTY && errno != EEXIST)
		return path_fail(e, errno, "remove", shown);
	struct removal r = {.fd = openat(at, ".", O_PATH | O_DIRECTORY | O_CLOEXEC)};
	int q = r.fd < 0 ? -errno : descend(&r, name);
	if (q == 0)
		q = run(&r);
	if (q < 0) {
		path_fail(e, q, "remove", shown);
		if (r.depth > 0) {
			char inner[PATH_DISPLAY_BYTES];
			path_display(inner, r.levels[r.depth - 1].name);
			q = error_prefix(e, "in directory '%s'", inner);
		}
	}
	while (r.depth > 0)
		free(r.levels[--r.depth].name);
	free(r.levels);
	if (r.fd >= 0)
		close(r.fd);
	return q;
}
