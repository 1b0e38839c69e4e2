#include "guest/watch.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <stdio.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/text.h"
#include "guest/upload.h"

#define WATCH_BUCKETS 4096
#define WATCH_MASK                                                                                                     \
	(IN_CREATE | IN_MODIFY | IN_DELETE | IN_MOVED_FROM | IN_MOVED_TO | IN_ATTRIB | IN_DELETE_SELF | IN_MOVE_SELF |     \
	 IN_ONLYDIR | IN_EXCL_UNLINK)

/* A watched directory. */
struct directory {
	struct directory *next;
	int wd;
	char *name; /* relative to the root, "" for the root itself */
};

/* A name that a reading reported as created. */
struct synthetic {
	struct synthetic *next;
	char name[];
};

/* Directories that still have to be read. */
struct pending {
	struct pending *next;
	char name[];
};

/* SCAN_REPORT reports what is in directories that were not watched yet; the others tell by their events. */
enum scan { SCAN_SILENT, SCAN_REPORT };

struct watch {
	int inotify;
	/* Open only while events are processed: a descriptor would keep the kernel from telling that the root is removed.
	 */
	int root;
	int root_failure; /* why it could not be opened, during one watch_process() */
	dev_t root_dev;
	ino_t root_ino;
	int root_wd;
	int is_recursive;
	int is_ended;
	size_t directory_count;
	struct directory *directories[WATCH_BUCKETS]; /* by wd */
	size_t synthetic_count;
	struct synthetic *synthetics[WATCH_BUCKETS]; /* by hash of the name */
	/* Bytes of events consumed so far, and the position up to which events may repeat what a reading reported. */
	uint64_t consumed, repeats_until;
	uint32_t hidden_cookie; /* of an upload's rename that is under way */
	int hidden_is_new;
	watch_emit emit;
	void *context;
	char path[PATH_BYTES_MAX]; /* of the root */
	char buffer[WATCH_READ_BYTES] __attribute__((aligned(__alignof__(struct inotify_event))));
};

static unsigned hash_name(const char *name)
{
	unsigned h = 2166136261u;
	for (; *name; name++)
		h = (h ^ (unsigned char)*name) * 16777619u;
	return h % WATCH_BUCKETS;
}

static int is_hidden(const char *name)
{
	return text_starts_with(name, UPLOAD_NAME_NEW) || text_starts_with(name, UPLOAD_NAME_REPLACE);
}

static char *join(const char *directory, const char *name)
{
	char *path;
	if (directory[0] == 0)
		return strdup(name);
	return asprintf(&path, "%s/%s", directory, name) < 0 ? NULL : path;
}

/* ---- names reported by reading ---- */

static void remember(struct watch *w, const char *name)
{
	size_t size = strlen(name) + 1;
	if (w->synthetic_count >= WATCH_SYNTHETIC_MAX)
		return;
	struct synthetic *s = malloc(sizeof(*s) + size);
	if (!s)
		return; /* then it may be reported twice */
	memcpy(s->name, name, size);
	unsigned h = hash_name(name);
	s->next = w->synthetics[h];
	w->synthetics[h] = s;
	w->synthetic_count++;
}

/* True if it was there. */
static int forget(struct watch *w, const char *name)
{
	if (w->synthetic_count == 0)
		return 0;
	for (struct synthetic **p = &w->synthetics[hash_name(name)]; *p; p = &(*p)->next) {
		struct synthetic *s = *p;
		if (strcmp(s->name, name) == 0) {
			*p = s->next;
			free(s);
			w->synthetic_count--;
			return 1;
		}
	}
	return 0;
}

static void forget_all(struct watch *w)
{
	for (size_t i = 0; w->synthetic_count > 0 && i < WATCH_BUCKETS; i++)
		while (w->synthetics[i]) {
			struct synthetic *s = w->synthetics[i];
			w->synthetics[i] = s->next;
			free(s);
			w->synthetic_count--;
		}
}

/* Everything that is queued now may repeat what was just read. `left` bytes of it are in our buffer already. */
static void mark_repeats(struct watch *w, size_t left)
{
	int queued = 0;
	if (ioctl(w->inotify, FIONREAD, &queued) < 0 || queued < 0)
		queued = 0;
	w->repeats_until = MAX(w->repeats_until, w->consumed + left + (uint64_t)queued);
}

/* ---- watched directories ---- */

static struct directory *find_directory(struct watch *w, int wd)
{
	struct directory *d = w->directories[(unsigned)wd % WATCH_BUCKETS];
	while (d && d->wd != wd)
		d = d->next;
	return d;
}

static void drop_directory(struct watch *w, struct directory **p)
{
	struct directory *d = *p;
	*p = d->next;
	free(d->name);
	free(d);
	w->directory_count--;
}

static void drop_wd(struct watch *w, int wd)
{
	for (struct directory **p = &w->directories[(unsigned)wd % WATCH_BUCKETS]; *p; p = &(*p)->next)
		if ((*p)->wd == wd) {
			drop_directory(w, p);
			return;
		}
}

/* Takes the watches off `name` and everything below it. */
static void drop_tree(struct watch *w, const char *name)
{
	size_t size = strlen(name);
	for (size_t i = 0; i < WATCH_BUCKETS; i++)
		for (struct directory **p = &w->directories[i]; *p;) {
			struct directory *d = *p;
			if (strncmp(d->name, name, size) == 0 && (d->name[size] == 0 || d->name[size] == '/')) {
				inotify_rm_watch(w->inotify, d->wd);
				drop_directory(w, p);
			} else {
				p = &d->next;
			}
		}
}

int watch_root(struct watch *w)
{
	struct stat st;
	if (w->root >= 0 || w->root_failure)
		return w->root_failure ? w->root_failure : w->root;
	int fd = path_open_at(AT_FDCWD, w->path, O_PATH | O_DIRECTORY);
	if (fd >= 0 && (fstat(fd, &st) < 0 || st.st_dev != w->root_dev || st.st_ino != w->root_ino)) {
		close(fd);
		fd = -ENOENT;
	}
	if (fd < 0)
		return w->root_failure = fd;
	return w->root = fd;
}

static void close_root(struct watch *w)
{
	if (w->root >= 0)
		close(w->root);
	w->root = -1;
	w->root_failure = 0;
}

/* Opens a directory of the tree; no link on the way is followed, so that the tree cannot be led outside. */
static int open_directory(struct watch *w, const char *name)
{
	int root = watch_root(w);
	if (root < 0)
		return root;
	struct open_how how = {.flags = O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC,
	                       .resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS};
	long fd = syscall(SYS_openat2, root, name[0] ? name : ".", &how, sizeof(how));
	return fd < 0 ? -errno : (int)fd;
}

/* Puts a watch on an open directory. 1 if it is new, 0 if it had one (whose name is brought up to date). */
static int add_directory(struct watch *w, int fd, const char *name)
{
	char link[64];
	if (w->directory_count >= WATCH_DIRECTORIES_MAX)
		return -ENOSPC;
	snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
	int wd = inotify_add_watch(w->inotify, link, WATCH_MASK);
	if (wd < 0)
		return -errno;
	char *copy = strdup(name);
	if (!copy)
		return -ENOMEM;
	struct directory *d = find_directory(w, wd);
	if (d) {
		free(d->name);
		d->name = copy;
		return 0;
	}
	d = calloc(1, sizeof(*d));
	if (!d) {
		free(copy);
		return -ENOMEM;
	}
	*d = (struct directory){.next = w->directories[(unsigned)wd % WATCH_BUCKETS], .wd = wd, .name = copy};
	w->directories[(unsigned)wd % WATCH_BUCKETS] = d;
	w->directory_count++;
	if (name[0] == 0)
		w->root_wd = wd;
	return 1;
}

static int push_pending(struct pending **list, const char *name)
{
	size_t size = strlen(name) + 1;
	struct pending *p = malloc(sizeof(*p) + size);
	if (!p)
		return -ENOMEM;
	memcpy(p->name, name, size);
	p->next = *list;
	*list = p;
	return 0;
}

static int read_entry(struct watch *w, int fd, const struct dirent *entry, const char *directory, int is_reporting,
                      struct pending **pending)
{
	if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0 || is_hidden(entry->d_name))
		return 0;
	struct stat st;
	int is_directory = entry->d_type == DT_DIR;
	if (entry->d_type == DT_UNKNOWN)
		is_directory = fstatat(fd, entry->d_name, &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISDIR(st.st_mode);
	if (!is_directory && !is_reporting)
		return 0;
	CLEANUP_FREE char *name = join(directory, entry->d_name);
	if (!name)
		return -ENOMEM;
	int r = 0;
	if (is_reporting) {
		remember(w, name);
		r = w->emit(w->context, WATCH_CREATE, name);
	}
	return r == 0 && is_directory ? push_pending(pending, name) : r;
}

/* Watches and reads one directory. */
static int scan_directory(struct watch *w, const char *name, enum scan mode, struct pending **pending)
{
	CLEANUP_CLOSE int fd = open_directory(w, name);
	if (fd < 0)
		return 0; /* gone, or not ours to see */
	int r = add_directory(w, fd, name);
	if (r == -ENOSPC || r == -ENOMEM)
		return r;
	if (r < 0 || !w->is_recursive)
		return name[0] == 0 && r < 0 ? r : 0;
	int is_reporting = mode == SCAN_REPORT && r == 1;
	int copy = openat(fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *dir = copy < 0 ? NULL : fdopendir(copy);
	if (!dir) {
		if (copy >= 0)
			close(copy);
		return 0;
	}
	const struct dirent *entry;
	r = 0;
	while (r == 0 && (entry = readdir(dir)))
		r = read_entry(w, fd, entry, name, is_reporting, pending);
	closedir(dir);
	return r;
}

/* Watches `name` and, in a recursive watch, all directories below it. */
static int scan_tree(struct watch *w, const char *name, enum scan mode, size_t left)
{
	struct pending *pending = NULL;
	/* Somebody renamed a folder above the root: what is new below it cannot be found any more. */
	int r = watch_root(w) < 0 ? -ESTALE : push_pending(&pending, name);
	while (pending) {
		struct pending *p = pending;
		pending = p->next;
		if (r == 0)
			r = scan_directory(w, p->name, mode, &pending);
		free(p);
	}
	if (mode != SCAN_SILENT)
		mark_repeats(w, left);
	/* Running out of watches later on, too, means that changes will be missed from here on. */
	if (mode != SCAN_SILENT && (r == -ENOSPC || r == -ENOMEM || r == -ESTALE))
		r = w->emit(w->context, WATCH_OVERFLOW, ".");
	return r;
}

/* ---- events ---- */

/* Uploads write to a hidden name and rename it: for who watches, the file was created and written, or just written. */
static int process_hidden(struct watch *w, const struct inotify_event *event)
{
	if (event->mask & IN_MOVED_FROM) {
		w->hidden_cookie = event->cookie;
		w->hidden_is_new = text_starts_with(event->name, UPLOAD_NAME_NEW);
	}
	return 0;
}

static int process_arrival(struct watch *w, const struct inotify_event *event, const char *name, size_t left)
{
	int is_upload = (event->mask & IN_MOVED_TO) && event->cookie && event->cookie == w->hidden_cookie;
	int is_repeated = forget(w, name);
	int r = 0;
	if (!is_repeated && (!is_upload || w->hidden_is_new))
		r = w->emit(w->context, WATCH_CREATE, name);
	if (r == 0 && is_upload)
		r = w->emit(w->context, WATCH_WRITE, name);
	/* What a reading reported it also went into. */
	if (r == 0 && w->is_recursive && (event->mask & IN_ISDIR) && !is_repeated)
		r = scan_tree(w, name, SCAN_REPORT, left);
	return r;
}

/* Unnamed files (O_TMPFILE) of uploads and other programs show up as "#INODE" when their mode or link count changes. */
static int is_unnamed(struct watch *w, const char *name)
{
	const char *last = path_name(name);
	struct stat st;
	return last[0] == '#' && last[1] && last[1 + strspn(last + 1, "0123456789")] == 0 && watch_root(w) >= 0 &&
	       fstatat(w->root, name, &st, AT_SYMLINK_NOFOLLOW) < 0 && errno == ENOENT;
}

static int process_named(struct watch *w, const struct inotify_event *event, const char *name, size_t left)
{
	if (event->mask & (IN_CREATE | IN_MOVED_TO))
		return process_arrival(w, event, name, left);
	if (event->mask & (IN_DELETE | IN_MOVED_FROM)) {
		forget(w, name);
		if ((event->mask & IN_MOVED_FROM) && (event->mask & IN_ISDIR))
			drop_tree(w, name);
		return w->emit(w->context, event->mask & IN_DELETE ? WATCH_REMOVE : WATCH_RENAME, name);
	}
	if (is_unnamed(w, name))
		return 0;
	if (event->mask & IN_ATTRIB)
		return w->emit(w->context, WATCH_CHMOD, name);
	return event->mask & IN_MODIFY ? w->emit(w->context, WATCH_WRITE, name) : 0;
}

static int process_event(struct watch *w, const struct inotify_event *event, size_t left)
{
	if (event->mask & IN_Q_OVERFLOW) {
		forget_all(w);
		int r = w->emit(w->context, WATCH_OVERFLOW, ".");
		return r == 0 && w->is_recursive ? scan_tree(w, "", SCAN_REPORT, left) : r;
	}
	if (event->wd == w->root_wd && (event->mask & (IN_DELETE_SELF | IN_MOVE_SELF | IN_UNMOUNT | IN_IGNORED))) {
		if (w->is_ended)
			return 0;
		w->is_ended = 1;
		return w->emit(w->context, event->mask & IN_MOVE_SELF ? WATCH_RENAME : WATCH_REMOVE, ".");
	}
	struct directory *d = find_directory(w, event->wd);
	if (!d)
		return 0; /* of a directory that was moved away */
	if (event->mask & IN_IGNORED) {
		drop_wd(w, event->wd);
		return 0;
	}
	if (event->len == 0) /* a directory about itself; its parent tells the same, but for the root */
		return d->name[0] == 0 && (event->mask & IN_ATTRIB) ? w->emit(w->context, WATCH_CHMOD, ".") : 0;
	if (is_hidden(event->name))
		return process_hidden(w, event);
	CLEANUP_FREE char *name = join(d->name, event->name);
	return name ? process_named(w, event, name, left) : -ENOMEM;
}

static int process_events(struct watch *w, size_t size)
{
	for (size_t at = 0; at < size && !w->is_ended;) {
		const struct inotify_event *event = (const void *)(w->buffer + at);
		size_t event_size = sizeof(*event) + event->len;
		at += event_size;
		w->consumed += event_size;
		int r = process_event(w, event, size - at);
		if (r != 0)
			return r;
		if (w->synthetic_count > 0 && w->consumed >= w->repeats_until)
			forget_all(w);
	}
	return w->is_ended;
}

int watch_process(struct watch *w, watch_emit emit, void *context)
{
	w->emit = emit;
	w->context = context;
	if (w->is_ended)
		return 1;
	ssize_t size = read(w->inotify, w->buffer, sizeof(w->buffer));
	if (size < 0)
		return errno == EAGAIN || errno == EINTR ? 0 : -errno;
	int r = process_events(w, (size_t)size);
	close_root(w);
	return r;
}

int watch_open(int root, const char *path, int is_recursive, struct watch **ret, struct error *e)
{
	struct watch *w = calloc(1, sizeof(*w));
	if (!w)
		return error_set(e, ERROR_EXHAUSTED, "out of memory");
	w->is_recursive = is_recursive;
	w->root_wd = w->root = -1;
	struct stat st;
	w->inotify = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
	int r = w->inotify < 0 || fstat(root, &st) < 0 ? -errno : text_copy(w->path, sizeof(w->path), path);
	if (r == 0) {
		w->root_dev = st.st_dev;
		w->root_ino = st.st_ino;
		r = scan_tree(w, "", SCAN_SILENT, 0);
		close_root(w);
	}
	if (r < 0 || w->root_wd < 0) {
		watch_close(w);
		if (r == -ENOSPC)
			return error_set(e, ERROR_EXHAUSTED,
			                 "too many directories to watch (at most %d, and fs.inotify.max_user_watches)",
			                 WATCH_DIRECTORIES_MAX);
		if (r == -EMFILE)
			return error_set(e, ERROR_EXHAUSTED, "too many watches (fs.inotify.max_user_instances)");
		return error_set_errno(e, r < 0 ? r : EACCES, "cannot watch the directory");
	}
	*ret = w;
	return 0;
}

int watch_fd(const struct watch *w)
{
	return w->inotify;
}

void watch_close(struct watch *w)
{
	if (!w)
		return;
	if (w->inotify >= 0)
		close(w->inotify);
	close_root(w);
	for (size_t i = 0; i < WATCH_BUCKETS; i++)
		while (w->directories[i])
			drop_directory(w, &w->directories[i]);
	forget_all(w);
	free(w);
}
