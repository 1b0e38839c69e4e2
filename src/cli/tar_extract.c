#include "cli/tar_extract.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/text.h"

#define MODE_KEPT 0777u

struct directory {
	char *path;
	unsigned mode;
	struct timespec mtime;
};

struct tar_extract {
	int root; /* borrowed */
	const char *from;
	const char *to;
	struct tar_reader *reader;
	/* The parent of the last entry is most often that of the next one as well. */
	char parent_path[TAR_NAME_BYTES_MAX];
	int parent;
	/* The file being written. */
	int file;
	char temporary[48];
	char name[256];
	unsigned mode;
	struct timespec mtime;
	struct directory *directories;
	size_t directory_count;
	size_t directory_capacity;
	uint64_t done;
	size_t entries;
	size_t skipped;
};

static int open_beneath(int root, const char *path)
{
	struct open_how how = {
	    .flags = O_PATH | O_DIRECTORY | O_CLOEXEC,
	    .resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS,
	};
	long fd = syscall(SYS_openat2, root, *path ? path : ".", &how, sizeof(how));
	return fd < 0 ? -errno : (int)fd;
}

/* NAME/a/b of the archive to the local relative path. Refuses what no honest archive of NAME holds. */
static int local_path(const struct tar_extract *x, const char *path, char *to, size_t size, struct error *e)
{
	const char *p = path;
	while (p[0] == '.' && p[1] == '/')
		p += 2;
	size_t from_size = strlen(x->from);
	if (strncmp(p, x->from, from_size) != 0 || (p[from_size] != '/' && p[from_size] != '\0'))
		return error_set(e, ERROR_INVALID, "the guest sent \"%.200s\", which was not asked for", path);
	if (text_copy(to, size, x->to) < 0)
		return error_set_errno(e, ENAMETOOLONG, "%.200s", path);
	size_t used = strlen(to);
	for (p += from_size; *p;) {
		p += strspn(p, "/");
		size_t length = strcspn(p, "/");
		if (length == 0 || (length == 1 && *p == '.')) {
			p += length;
			continue;
		}
		if (length == 2 && p[0] == '.' && p[1] == '.')
			return error_set(e, ERROR_INVALID, "the guest sent \"%.200s\", a name with \"..\" in it", path);
		if (length > 255 || used + length + 2 > size)
			return error_set_errno(e, ENAMETOOLONG, "%.200s", path);
		to[used++] = '/';
		memcpy(to + used, p, length);
		used += length;
		to[used] = '\0';
		p += length;
	}
	return 0;
}

/* Makes PATH and its parents below the root, one step at a time. */
static int make_parents(int root, const char *path)
{
	char part[TAR_NAME_BYTES_MAX];
	for (const char *p = path; *p;) {
		p += strcspn(p, "/");
		memcpy(part, path, (size_t)(p - path));
		part[p - path] = '\0';
		char *slash = strrchr(part, '/');
		if (slash)
			*slash = '\0';
		CLEANUP_CLOSE int above = slash ? open_beneath(root, part) : open_beneath(root, "");
		if (above < 0)
			return above;
		if (mkdirat(above, slash ? slash + 1 : part, 0700) < 0 && errno != EEXIST)
			return -errno;
		p += *p == '/';
	}
	return 0;
}

/* Splits a local path and makes x->parent the directory that holds it. *ret_name points into `path`. */
static int enter_parent(struct tar_extract *x, char *path, const char **ret_name, struct error *e)
{
	char *slash = strrchr(path, '/');
	const char *parent = "";
	if (slash) {
		*slash = '\0';
		parent = path;
	}
	*ret_name = slash ? slash + 1 : path;
	if (x->parent >= 0 && strcmp(parent, x->parent_path) == 0)
		return 0;
	if (x->parent >= 0)
		close(TAKE_FD(x->parent));
	int fd = open_beneath(x->root, parent);
	if (fd == -ENOENT) {
		int r = make_parents(x->root, parent);
		fd = r < 0 ? r : open_beneath(x->root, parent);
	}
	if (fd == -ELOOP || fd == -EXDEV)
		return error_set(e, ERROR_FORBIDDEN, "%.200s: leads through a symbolic link; nothing is written there", parent);
	if (fd < 0)
		return error_set_errno(e, fd, "%.200s", parent);
	x->parent = fd;
	return text_copy(x->parent_path, sizeof(x->parent_path), parent);
}

static int remember_directory(struct tar_extract *x, const char *path, const struct tar_entry *entry, struct error *e)
{
	if (x->directory_count >= TAR_EXTRACT_DIRECTORIES_MAX)
		return error_set(e, ERROR_TOO_LARGE, "more than %d directories", TAR_EXTRACT_DIRECTORIES_MAX);
	if (x->directory_count == x->directory_capacity) {
		size_t capacity = x->directory_capacity ? x->directory_capacity * 2 : 64;
		struct directory *grown = reallocarray(x->directories, capacity, sizeof(*grown));
		if (!grown)
			return error_set_errno(e, ENOMEM, "unpacking");
		x->directories = grown;
		x->directory_capacity = capacity;
	}
	struct directory *d = &x->directories[x->directory_count];
	d->path = strdup(path);
	d->mode = entry->mode & MODE_KEPT;
	d->mtime = (struct timespec){.tv_sec = entry->mtime_s, .tv_nsec = entry->mtime_ns};
	if (!d->path)
		return error_set_errno(e, ENOMEM, "unpacking");
	x->directory_count++;
	return 0;
}

static int make_directory(struct tar_extract *x, const char *full, const char *name, const struct tar_entry *entry,
                          struct error *e)
{
	struct stat st;
	if (mkdirat(x->parent, name, 0700) < 0) {
		int errnum = errno;
		if (errnum != EEXIST || fstatat(x->parent, name, &st, AT_SYMLINK_NOFOLLOW) < 0 || !S_ISDIR(st.st_mode))
			return error_set_errno(e, errnum, "%.200s", full);
	}
	return remember_directory(x, full, entry, e);
}

static int begin_file(struct tar_extract *x, const char *full, const char *name, const struct tar_entry *entry,
                      struct error *e)
{
	unsigned char random[8];
	char hex[20];
	random_bytes(random, sizeof(random));
	text_hex(hex, random, sizeof(random));
	snprintf(x->temporary, sizeof(x->temporary), ".space-cp-%s", hex);
	if (text_copy(x->name, sizeof(x->name), name) < 0)
		return error_set_errno(e, ENAMETOOLONG, "%.200s", full);
	x->file = openat(x->parent, x->temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
	if (x->file < 0)
		return error_set_errno(e, errno, "%.200s", full);
	x->mode = entry->mode & MODE_KEPT;
	x->mtime = (struct timespec){.tv_sec = entry->mtime_s, .tv_nsec = entry->mtime_ns};
	return 0;
}

/* A link takes the place of a file or link, as a renamed file does; never that of a directory. */
static int make_room(int parent, const char *name)
{
	return unlinkat(parent, name, 0) < 0 && errno != ENOENT ? -errno : 0;
}

static int make_symlink(struct tar_extract *x, const char *full, const char *name, const struct tar_entry *entry,
                        struct error *e)
{
	int r = make_room(x->parent, name);
	if (r == 0 && symlinkat(entry->link, x->parent, name) < 0)
		r = -errno;
	if (r < 0)
		return error_set_errno(e, r, "%.200s", full);
	struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, {.tv_sec = entry->mtime_s, .tv_nsec = entry->mtime_ns}};
	utimensat(x->parent, name, times, AT_SYMLINK_NOFOLLOW);
	return 0;
}

/* To a file that this archive (or an earlier copy) put below the root. */
static int make_hard_link(struct tar_extract *x, const char *full, const char *name, const struct tar_entry *entry,
                          struct error *e)
{
	char target[TAR_NAME_BYTES_MAX];
	int r = local_path(x, entry->link, target, sizeof(target), e);
	if (r < 0)
		return r;
	char *slash = strrchr(target, '/');
	if (slash)
		*slash = '\0';
	CLEANUP_CLOSE int from = open_beneath(x->root, slash ? target : "");
	r = from < 0 ? from : make_room(x->parent, name);
	if (r == 0 && linkat(from, slash ? slash + 1 : target, x->parent, name, 0) < 0)
		r = -errno;
	return r < 0 ? error_set_errno(e, r, "%.200s", full) : 0;
}

static int take_entry(void *context, const struct tar_entry *entry, struct error *e)
{
	struct tar_extract *x = context;
	char path[TAR_NAME_BYTES_MAX];
	char full[TAR_NAME_BYTES_MAX];
	const char *name;
	int r = local_path(x, entry->path, path, sizeof(path), e);
	if (r < 0)
		return r;
	memcpy(full, path, sizeof(full));
	if (entry->type != '0' && entry->type != '1' && entry->type != '2' && entry->type != '5') {
		x->skipped++;
		return 0;
	}
	r = enter_parent(x, path, &name, e);
	if (r < 0)
		return r;
	x->entries++;
	switch (entry->type) {
	case '5':
		return make_directory(x, full, name, entry, e);
	case '2':
		return make_symlink(x, full, name, entry, e);
	case '1':
		return make_hard_link(x, full, name, entry, e);
	default:
		return begin_file(x, full, name, entry, e);
	}
}

static int take_data(void *context, const void *data, size_t size, struct error *e)
{
	struct tar_extract *x = context;
	if (x->file < 0)
		return 0;
	int r = fd_write_full(x->file, data, size);
	if (r < 0)
		return error_set_errno(e, r, "%.200s", x->name);
	x->done += size;
	return 0;
}

static int take_end(void *context, struct error *e)
{
	struct tar_extract *x = context;
	if (x->file < 0)
		return 0;
	struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, x->mtime};
	int r = 0;
	if (fchmod(x->file, x->mode) < 0 || futimens(x->file, times) < 0)
		r = -errno;
	/* Some file systems report a full disk only here. */
	if (close(TAKE_FD(x->file)) < 0 && r == 0)
		r = -errno;
	if (r == 0 && renameat(x->parent, x->temporary, x->parent, x->name) < 0)
		r = -errno;
	if (r < 0) {
		unlinkat(x->parent, x->temporary, 0);
		return error_set_errno(e, r, "%.200s", x->name);
	}
	return 0;
}

int tar_extract_new(int directory, const char *from, const char *to, struct tar_extract **ret, struct error *e)
{
	struct tar_extract *x = calloc(1, sizeof(*x));
	if (!x)
		return error_set_errno(e, ENOMEM, "unpacking");
	x->root = directory;
	x->from = from;
	x->to = to;
	x->parent = x->file = -1;
	struct tar_reader_handlers handlers = {.entry = take_entry, .data = take_data, .end = take_end, .context = x};
	int r = tar_reader_new(&handlers, &x->reader, e);
	if (r < 0) {
		free(x);
		return r;
	}
	*ret = x;
	return 0;
}

void tar_extract_free(struct tar_extract *x)
{
	if (!x)
		return;
	if (x->file >= 0) {
		close(x->file);
		unlinkat(x->parent, x->temporary, 0);
	}
	if (x->parent >= 0)
		close(x->parent);
	for (size_t i = 0; i < x->directory_count; i++)
		free(x->directories[i].path);
	free(x->directories);
	tar_reader_free(x->reader);
	free(x);
}

int tar_extract_feed(struct tar_extract *x, const void *data, size_t size, struct error *e)
{
	return tar_reader_feed(x->reader, data, size, e);
}

int tar_extract_finish(struct tar_extract *x, struct error *e)
{
	int r = tar_reader_finish(x->reader, e);
	/* Deepest last in the archive, so backwards: a mode without write permission must not stand in the way. */
	for (size_t i = x->directory_count; i-- > 0;) {
		const struct directory *d = &x->directories[i];
		struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, d->mtime};
		CLEANUP_CLOSE int fd = open_beneath(x->root, d->path);
		char proc[64];
		snprintf(proc, sizeof(proc), "/proc/self/fd/%d", fd);
		if ((fd < 0 || utimensat(AT_FDCWD, proc, times, 0) < 0 || chmod(proc, d->mode) < 0) && r == 0)
			r = error_set_errno(e, fd < 0 ? fd : errno, "%.200s", d->path);
	}
	return r;
}

uint64_t tar_extract_done(const struct tar_extract *x)
{
	return x->done;
}

size_t tar_extract_entries(const struct tar_extract *x)
{
	return x->entries;
}

size_t tar_extract_skipped(const struct tar_extract *x)
{
	return x->skipped;
}
