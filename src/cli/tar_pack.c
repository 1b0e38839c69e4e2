#include "cli/tar_pack.h"

#include <errno.h>
#include <fcntl.h>
#include <fts.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/text.h"
#include "cli/tar.h"

struct tar_pack {
	char root[PATH_MAX];
	const char *name;
	FTS *walk;
	struct buf header; /* waiting to be given out */
	int fd;            /* of the file whose content comes next, or -1 */
	uint64_t left;     /* of its announced size */
	size_t padding;
	int is_directory;
	int ended;
	uint64_t total;
	_Atomic uint64_t done; /* read by the progress bar */
	size_t entries;
	size_t problems;
	char problem[512];
};

static int by_name(const FTSENT **a, const FTSENT **b)
{
	return strcmp((*a)->fts_name, (*b)->fts_name);
}

static FTS *open_walk(char *root)
{
	char *const roots[] = {root, NULL};
	return fts_open(roots, FTS_PHYSICAL | FTS_COMFOLLOW | FTS_NOCHDIR, by_name);
}

static void note_problem(struct tar_pack *p, const char *path, int errnum, const char *what)
{
	if (p->problems++ == 0)
		snprintf(p->problem, sizeof(p->problem), "%.300s: %s", path, errnum ? strerrordesc_np(errnum) : what);
}

static int measure(struct tar_pack *p, struct error *e)
{
	FTS *walk = open_walk(p->root);
	FTSENT *entry;
	if (!walk)
		return error_set_errno(e, errno, "%s", p->root);
	int first = 1;
	int r = 0;
	while ((entry = fts_read(walk))) {
		if (first && (entry->fts_info == FTS_NS || entry->fts_info == FTS_ERR || entry->fts_info == FTS_DNR))
			r = error_set_errno(e, entry->fts_errno, "%s", p->root);
		else if (first && entry->fts_info == FTS_SLNONE)
			r = error_set(e, ERROR_NOT_FOUND, "%s: the link leads nowhere", p->root);
		else if (first && entry->fts_info != FTS_D && entry->fts_info != FTS_F)
			r = error_set(e, ERROR_INVALID, "%s is neither a file nor a directory", p->root);
		if (r < 0)
			break;
		if (first)
			p->is_directory = entry->fts_info == FTS_D;
		first = 0;
		if (entry->fts_info == FTS_F)
			p->total += (uint64_t)entry->fts_statp->st_size;
	}
	fts_close(walk);
	return r;
}

int tar_pack_new(const char *path, const char *name, struct tar_pack **ret, struct error *e)
{
	struct tar_pack *p = calloc(1, sizeof(*p));
	if (!p)
		return error_set_errno(e, ENOMEM, "packing");
	p->fd = -1;
	p->name = name;
	int r = text_copy(p->root, sizeof(p->root), path);
	if (r < 0)
		error_set_errno(e, r, "%.200s", path);
	for (size_t size = strlen(p->root); size > 1 && p->root[size - 1] == '/';)
		p->root[--size] = '\0';
	if (r == 0)
		r = measure(p, e);
	if (r == 0 && !(p->walk = open_walk(p->root)))
		r = error_set_errno(e, errno, "%s", p->root);
	if (r < 0) {
		tar_pack_free(p);
		return r;
	}
	*ret = p;
	return 0;
}

void tar_pack_free(struct tar_pack *p)
{
	if (!p)
		return;
	if (p->walk)
		fts_close(p->walk);
	if (p->fd >= 0)
		close(p->fd);
	buf_free(&p->header);
	free(p);
}

uint64_t tar_pack_total(const struct tar_pack *p)
{
	return p->total;
}

int tar_pack_is_directory(const struct tar_pack *p)
{
	return p->is_directory;
}

uint64_t tar_pack_done(const struct tar_pack *p)
{
	return p->done;
}

size_t tar_pack_entries(const struct tar_pack *p)
{
	return p->entries;
}

size_t tar_pack_problems(const struct tar_pack *p, const char **ret)
{
	if (ret)
		*ret = p->problem;
	return p->problems;
}

/* Opens a regular file; -1 (and a note) if it is to be left out. */
static int open_file(struct tar_pack *p, const FTSENT *at, struct stat *st)
{
	/* The walk has seen a regular file; what is there now may be a link or a FIFO. */
	int flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY | (at->fts_level ? O_NOFOLLOW : 0);
	int fd = open(at->fts_accpath, flags);
	if (fd < 0 || fstat(fd, st) < 0 || !S_ISREG(st->st_mode)) {
		note_problem(p, at->fts_path, fd < 0 ? errno : 0, "not a regular file any more");
		if (fd >= 0)
			close(fd);
		return -1;
	}
	return fd;
}

/* The type of entry for what the walk found; 0 = nothing to pack. */
static char type_of(struct tar_pack *p, const FTSENT *at)
{
	switch (at->fts_info) {
	case FTS_D:
		return '5';
	case FTS_F:
		return '0';
	case FTS_SL:
	case FTS_SLNONE:
		return '2';
	case FTS_DP:
		return 0;
	case FTS_DEFAULT:
		note_problem(p, at->fts_path, 0, "a socket, FIFO or device cannot be copied");
		return 0;
	default:
		note_problem(p, at->fts_path, at->fts_errno, "cannot be read");
		return 0;
	}
}

static int pack_entry(struct tar_pack *p, const FTSENT *at, char type)
{
	char path[TAR_NAME_BYTES_MAX];
	char link[TAR_NAME_BYTES_MAX] = "";
	struct stat st = *at->fts_statp;
	struct tar_entry entry = {.path = path, .link = link, .type = type};
	struct error e;
	if (text_format(path, sizeof(path), "%s%s%s", p->name, at->fts_path + strlen(p->root), type == '5' ? "/" : "") <
	    0) {
		note_problem(p, at->fts_path, ENAMETOOLONG, "");
		return 0;
	}
	if (type == '2') {
		ssize_t n = readlink(at->fts_accpath, link, sizeof(link) - 1);
		if (n < 0) {
			note_problem(p, at->fts_path, errno, "");
			return 0;
		}
		link[n] = '\0';
	}
	if (type == '0') {
		p->fd = open_file(p, at, &st);
		if (p->fd < 0)
			return 0;
		entry.size = p->left = (uint64_t)st.st_size;
		p->padding = tar_padding(p->left);
	}
	entry.mode = st.st_mode & 07777;
	entry.mtime_s = st.st_mtim.tv_sec;
	entry.mtime_ns = (uint32_t)st.st_mtim.tv_nsec;
	p->entries++;
	return tar_write_header(&p->header, &entry, &e);
}

/* Puts the next entry's header into the buffer, or the archive's end. */
static int advance(struct tar_pack *p)
{
	errno = 0;
	FTSENT *at = fts_read(p->walk);
	if (!at) {
		if (errno)
			note_problem(p, p->root, errno, "");
		p->ended = 1;
		return tar_write_end(&p->header);
	}
	char type = type_of(p, at);
	return type ? pack_entry(p, at, type) : 0;
}

/* Content of the open file. What is missing of its announced size is filled with zeros and told. */
static size_t read_content(struct tar_pack *p, char *data, size_t size)
{
	size_t wanted = (size_t)MIN((uint64_t)size, p->left);
	ssize_t n;
	do
		n = read(p->fd, data, wanted);
	while (n < 0 && errno == EINTR);
	if (n <= 0) {
		note_problem(p, p->root, n < 0 ? errno : 0, "a file became shorter while it was read");
		memset(data, 0, wanted);
		n = (ssize_t)wanted;
	}
	p->left -= (uint64_t)n;
	p->done += (uint64_t)n;
	return (size_t)n;
}

ssize_t tar_pack_read(struct tar_pack *p, void *data, size_t size)
{
	char *to = data;
	size_t used = 0;
	while (used < size) {
		size_t n = 0;
		if (p->header.size) {
			n = MIN(size - used, p->header.size);
			memcpy(to + used, p->header.data, n);
			buf_consume(&p->header, n);
		} else if (p->fd >= 0 && p->left) {
			n = read_content(p, to + used, size - used);
		} else if (p->fd >= 0 && p->padding) {
			n = MIN(size - used, p->padding);
			memset(to + used, 0, n);
			p->padding -= n;
		} else if (p->fd >= 0) {
			close(TAKE_FD(p->fd));
		} else if (p->ended) {
			break;
		} else {
			int r = advance(p);
			if (r < 0)
				return r;
		}
		used += n;
	}
	return (ssize_t)used;
}
