#include "guest/list.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <string.h>
#include <unistd.h>

#include "base/text.h"
#include "guest/entry.h"

#define LIST_FLUSH_BYTES 65536
#define LIST_READ_BYTES 32768

/* One directory on the way from the root of the listing to where it is. */
struct frame {
	int fd;
	int is_read;        /* all of its names have been read */
	struct buf names;   /* type byte, name, NUL; one after the other */
	uint32_t *order;    /* offsets into names, sorted */
	size_t count, next; /* of order */
	size_t path_size;   /* length of the path of this directory */
};

struct list {
	struct request *request;
	struct buf out;
	struct buf path; /* of the entry at hand, as it is reported */
	int is_started;
	size_t entry_count;
	size_t names_bytes; /* of all frames */
	unsigned depth_max;
	struct frame frames[LIST_DEPTH_MAX];
	size_t depth;
	struct entry_names names;
	char read_buffer[LIST_READ_BYTES];
};

static int flush(struct list *l)
{
	static char name[] = "content-type", value[] = "application/json";
	static const struct request_header header = {name, value};
	int r = l->is_started ? 0 : response_start(l->request, 200, &header, 1, -1);
	l->is_started = 1;
	if (r == 0)
		r = response_write(l->request, l->out.data, l->out.size);
	buf_consume(&l->out, l->out.size);
	return r;
}

static int compare_names(const void *a, const void *b, void *names)
{
	const uint32_t *x = a, *y = b;
	const char *text = names;
	return strcmp(text + *x + 1, text + *y + 1);
}

static int sort_names(struct frame *f)
{
	free(f->order);
	f->order = malloc(MAX(f->count, 1u) * sizeof(*f->order));
	if (!f->order)
		return -ENOMEM;
	size_t at = 0;
	for (size_t i = 0; i < f->count; i++) {
		f->order[i] = (uint32_t)at;
		at += 2 + strlen(f->names.data + at + 1);
	}
	qsort_r(f->order, f->count, sizeof(*f->order), compare_names, f->names.data);
	return 0;
}

/* Reads the next batch of names. */
static int read_names(struct list *l, struct frame *f)
{
	l->names_bytes -= f->names.size;
	f->names.size = f->count = f->next = 0;
	while (!f->is_read && f->names.size < LIST_BATCH_BYTES) {
		ssize_t n = getdents64(f->fd, l->read_buffer, sizeof(l->read_buffer));
		if (n < 0 && errno != ENOENT)
			return -errno;
		f->is_read = n <= 0;
		for (ssize_t at = 0; at < n;) {
			const struct dirent64 *entry = (const void *)(l->read_buffer + at);
			at += entry->d_reclen;
			if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
				continue;
			char type = (char)entry->d_type;
			if (buf_append(&f->names, &type, 1) < 0 ||
			    buf_append(&f->names, entry->d_name, strlen(entry->d_name) + 1) < 0)
				return -ENOMEM;
			f->count++;
		}
	}
	l->names_bytes += f->names.size;
	if (l->names_bytes > LIST_NAMES_BYTES_MAX)
		return -EMSGSIZE;
	return sort_names(f);
}

static int push(struct list *l, int fd)
{
	struct frame *f = &l->frames[l->depth++];
	memset(f, 0, sizeof(*f));
	f->fd = fd;
	f->path_size = l->path.size;
	return read_names(l, f);
}

static void pop(struct list *l)
{
	struct frame *f = &l->frames[--l->depth];
	l->names_bytes -= f->names.size;
	close(f->fd);
	buf_free(&f->names);
	free(f->order);
}

static int emit(struct list *l, struct frame *f, const char *name)
{
	l->path.size = f->path_size;
	/* The root's path ends with a slash already. */
	int r = f->path_size == 1 ? 0 : buf_append_string(&l->path, "/");
	if (r == 0)
		r = buf_append_string(&l->path, name);
	size_t before = l->out.size;
	if (r == 0 && l->entry_count > 0)
		r = buf_append_string(&l->out, ",");
	if (r == 0)
		r = entry_append(&l->out, f->fd, name, l->path.data, &l->names);
	if (r == -ENOENT || r == -EACCES) {
		l->out.size = before;
		return 1;
	}
	if (r == 0)
		l->entry_count++;
	return r == 0 && l->out.size >= LIST_FLUSH_BYTES ? flush(l) : r;
}

/* One entry of the innermost directory, and the way into it if it is one. */
static int step(struct list *l)
{
	struct frame *f = &l->frames[l->depth - 1];
	if (f->next == f->count) {
		if (f->is_read) {
			pop(l);
			return 0;
		}
		return read_names(l, f);
	}
	const char *record = f->names.data + f->order[f->next++];
	int r = emit(l, f, record + 1);
	if (r != 0)
		return r < 0 ? r : 0;
	if ((record[0] != DT_DIR && record[0] != DT_UNKNOWN) || l->depth >= l->depth_max)
		return 0;
	int fd = openat(f->fd, record + 1, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
	if (fd >= 0)
		return push(l, fd);
	/* A listing that stopped at its first unreadable directory would be of no use; what cannot be a matter of that one
	 * directory ends it. */
	return errno == EMFILE || errno == ENFILE || errno == ENOMEM ? -errno : 0;
}

static int run(struct list *l, int directory, const struct path *path)
{
	int r = buf_append_string(&l->out, "{\"entries\":[");
	if (r == 0)
		r = buf_append_string(&l->path, path->text);
	if (r == 0)
		r = push(l, directory);
	while (r == 0 && l->depth > 0)
		r = step(l);
	if (r == 0)
		r = buf_append_string(&l->out, "]}");
	return r;
}

int list_reply(struct request *r, int directory, const struct path *path, unsigned depth)
{
	struct list *l = calloc(1, sizeof(*l));
	int fd = fcntl(directory, F_DUPFD_CLOEXEC, 0), q = l && fd >= 0 ? 0 : -ENOMEM;
	if (q == 0) {
		l->request = r;
		l->depth_max = depth;
		q = run(l, fd, path);
		while (l->depth > 0)
			pop(l);
	} else if (fd >= 0) {
		close(fd);
	}
	if (q < 0 && !(l && l->is_started)) {
		struct error e;
		path_fail(&e, q, "list", path->text);
		q = connect_fail(r, &e);
	} else if (q == 0) {
		q = flush(l);
		if (q == 0)
			q = response_end(r);
	}
	/* After the client has seen a part, only a cut connection tells it that something failed. */
	size_t entry_count = l ? l->entry_count : 0;
	if (l) {
		buf_free(&l->out);
		buf_free(&l->path);
		free(l);
	}
	if (entry_count > 1000)
		malloc_trim(0);
	return q;
}
