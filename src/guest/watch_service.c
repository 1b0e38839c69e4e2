/*
 * WatchDir (a stream) and CreateWatcher, GetWatcherEvents, RemoveWatcher (polled).
 *
 * A stream is served by its connection's thread. While the client does not read, events wait in the kernel's queue
 * (fs.inotify.max_queued_events); when that overflows, the client gets an event that says so. A polled watcher has a
 * thread that moves events into a bounded queue, with the same answer to an overflow.
 *
 * An overflow is a write event of "." with "overflow": true: what is below may have changed in any way. When the
 * watched directory itself is removed or renamed there is an event for ".", then the stream ends (and polling fails)
 * with not_found.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "base/text.h"
#include "guest/entry.h"
#include "guest/filesystem.h"
#include "guest/watch.h"

#define WATCH_QUEUE_EVENTS_MAX 16384
#define WATCH_QUEUE_BYTES_MAX (4 * MIB)
#define WATCHERS_MAX 64
#define WATCHER_STACK_BYTES (256 * 1024)
/* When the table is full, a watcher that nobody has asked for so long gives its place to a new one. */
#define WATCHER_ABANDONED_MS (UINT64_C(10) * 60 * 1000)
#define WATCH_KEEPALIVE_S_DEFAULT 90
#define WATCH_KEEPALIVE_S_MAX 3600
/* How often a client is looked for that closed only its sending side. */
#define WATCH_CHECK_MS 1000

/* linux/magic.h has no names for these. */
#define MAGIC_CIFS 0xff534d42u
#define MAGIC_SMB2 0xfe534d42u
#define MAGIC_SMB 0x517bu
#define MAGIC_NFS 0x6969u
#define MAGIC_FUSE 0x65735546u

/* What both kinds start with. */
struct target {
	struct guest_user user;
	struct path path;
	int include_entry;
	struct watch *watch;
};

struct watcher {
	struct watcher *next;
	char id[ID_BYTES];
	struct target target;
	int stop_fd;
	uint64_t asked_ms;
	int references; /* the table's and the thread's; guarded by `lock` */

	pthread_mutex_t queue_lock;
	struct buf queue; /* JSON objects with commas between them */
	size_t event_count;
	int is_overflowed;
	struct error end; /* code NONE while it runs */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct watcher *watchers;
static size_t watcher_count;

/* ---- shared ---- */

static int read_flag(const json_t *body, const char *field, int *ret, struct error *e)
{
	const json_t *value = json_object_get(body, field);
	if (value && !json_is_boolean(value) && !json_is_null(value))
		return error_set(e, ERROR_INVALID, "field '%s' is not a boolean", field);
	*ret = json_is_true(value);
	return 0;
}

static int check_mount(int fd, const struct path *path, struct error *e)
{
	struct statfs fs;
	if (fstatfs(fd, &fs) < 0)
		return path_fail(e, errno, "watch", path->text);
	switch ((unsigned)fs.f_type) {
	case MAGIC_CIFS:
	case MAGIC_SMB2:
	case MAGIC_SMB:
	case MAGIC_NFS:
	case MAGIC_FUSE: {
		char shown[PATH_DISPLAY_BYTES];
		path_display(shown, path->text);
		return error_set(e, ERROR_INVALID, "'%s' is on a network file system, which reports no events", shown);
	}
	default:
		return 0;
	}
}

/* Reads the request and starts the watch; the thread has the caller's identity afterwards. */
static int target_open(struct target *t, struct request *r, const json_t *body, struct error *e)
{
	int is_recursive, is_network_fine;
	int q = request_user(r, NULL, &t->user, e);
	if (q == 0)
		q = read_flag(body, "recursive", &is_recursive, e);
	if (q == 0)
		q = read_flag(body, "includeEntry", &t->include_entry, e);
	if (q == 0)
		q = read_flag(body, "allowNetworkMounts", &is_network_fine, e);
	if (q == 0)
		q = filesystem_read_path(body, "path", &t->user, &t->path, e);
	if (q == 0)
		q = guest_user_enter(&t->user, e);
	if (q < 0)
		return q;
	CLEANUP_CLOSE int fd = path_open_at(AT_FDCWD, t->path.text, O_PATH);
	struct stat st;
	if (fd < 0 || fstat(fd, &st) < 0)
		return path_fail(e, fd < 0 ? fd : errno, "watch", t->path.text);
	if (!S_ISDIR(st.st_mode))
		return path_fail(e, ENOTDIR, "watch", t->path.text);
	if (!is_network_fine && (q = check_mount(fd, &t->path, e)) < 0)
		return q;
	/* Reading is what inotify asks of the watched directory. */
	if (faccessat(fd, ".", R_OK, AT_EACCESS) < 0)
		return path_fail(e, errno, "watch", t->path.text);
	q = watch_open(fd, t->path.text, is_recursive, &t->watch, e);
	return q < 0 ? error_prefix(e, "%.200s", t->path.text) : 0;
}

static int append_entry(const struct target *t, struct buf *b, const char *name)
{
	CLEANUP_BUF struct buf path = {0};
	CLEANUP_FREE struct entry_names *names = calloc(1, sizeof(*names));
	const char *root = strcmp(t->path.text, "/") == 0 ? "" : t->path.text;
	int is_root = strcmp(name, ".") == 0;
	int r = names ? buf_printf(&path, "%s%s%s", is_root ? t->path.text : root, is_root ? "" : "/", is_root ? "" : name)
	              : -ENOMEM;
	size_t before = b->size;
	if (r == 0)
		r = buf_append_string(b, ",\"entry\":");
	int at = r == 0 ? watch_root(t->watch) : r;
	if (r == 0)
		r = at < 0 ? at : entry_append(b, at, name, path.data, names);
	/* It may have vanished since, or not be ours to see: then the event goes without. */
	if (r < 0 && r != -ENOMEM) {
		b->size = before;
		b->data[before] = 0;
		r = 0;
	}
	return r;
}

/* Appends {"name":…,"type":…}. */
static int append_event(const struct target *t, struct buf *b, enum watch_kind kind, const char *name)
{
	static const char *const types[] = {
	    [WATCH_CREATE] = "EVENT_TYPE_CREATE", [WATCH_WRITE] = "EVENT_TYPE_WRITE", [WATCH_REMOVE] = "EVENT_TYPE_REMOVE",
	    [WATCH_RENAME] = "EVENT_TYPE_RENAME", [WATCH_CHMOD] = "EVENT_TYPE_CHMOD", [WATCH_OVERFLOW] = "EVENT_TYPE_WRITE",
	};
	int r = buf_append_string(b, "{");
	if (r == 0)
		r = entry_append_bytes(b, "name", name);
	if (r == 0)
		r = buf_printf(b, ",\"type\":\"%s\"%s", types[kind], kind == WATCH_OVERFLOW ? ",\"overflow\":true" : "");
	if (r == 0 && t->include_entry && (kind == WATCH_CREATE || kind == WATCH_WRITE || kind == WATCH_CHMOD))
		r = append_entry(t, b, name);
	return r == 0 ? buf_append_string(b, "}") : r;
}

static void set_end(struct error *e, const struct target *t, int result)
{
	char shown[PATH_DISPLAY_BYTES];
	path_display(shown, t->path.text);
	if (result == 1)
		error_set(e, ERROR_NOT_FOUND, "the watched directory '%s' was removed or renamed", shown);
	else
		error_set_errno(e, result, "watching '%s' failed", shown);
}

/* ---- stream ---- */

struct stream {
	struct request *request;
	struct target target;
	struct buf message;
	uint64_t sent_ms;
	int is_cut; /* sending failed */
};

static int stream_emit(void *context, enum watch_kind kind, const char *name)
{
	struct stream *s = context;
	s->message.size = 0;
	int r = buf_append_string(&s->message, "{\"filesystem\":");
	if (r == 0)
		r = append_event(&s->target, &s->message, kind, name);
	if (r == 0)
		r = buf_append_string(&s->message, "}");
	if (r < 0)
		return r;
	r = connect_stream_send_text(s->request, s->message.data, s->message.size);
	s->is_cut = r < 0;
	s->sent_ms = time_monotonic_ms();
	return r;
}

static uint64_t keepalive_ms(const struct request *r)
{
	const char *text = request_header(r, "keepalive-ping-interval");
	uint64_t s = WATCH_KEEPALIVE_S_DEFAULT;
	if (!text || text_parse_u64(text, WATCH_KEEPALIVE_S_MAX, &s) < 0 || s == 0)
		s = WATCH_KEEPALIVE_S_DEFAULT;
	return s * 1000;
}

/* Waits until something happens. 0, or 1 when the client is gone. */
static int stream_wait(struct stream *s, uint64_t until_ms, int *is_half_closed)
{
	uint64_t now = time_monotonic_ms(), left = until_ms > now ? until_ms - now : 0;
	if (*is_half_closed)
		left = MIN(left, (uint64_t)WATCH_CHECK_MS);
	struct pollfd fds[2] = {
	    {.fd = watch_fd(s->target.watch), .events = POLLIN},
	    {.fd = *is_half_closed ? -1 : request_fd(s->request), .events = POLLIN | POLLRDHUP},
	};
	if (poll(fds, ARRAY_SIZE(fds), (int)MIN(left, (uint64_t)INT32_MAX)) < 0 && errno != EINTR)
		return 1;
	if (!fds[1].revents && !*is_half_closed)
		return 0;
	*is_half_closed = 1;
	return request_is_gone(s->request);
}

/* Runs until the end. 0 with *e set if the client should be told why. */
static int stream_run(struct stream *s, uint64_t timeout_ms, struct error *e)
{
	static const char start[] = "{\"start\":{}}", keepalive[] = "{\"keepalive\":{}}";
	uint64_t interval = keepalive_ms(s->request), deadline = timeout_ms ? time_monotonic_ms() + timeout_ms : UINT64_MAX;
	int is_half_closed = 0;
	int r = connect_stream_send_text(s->request, start, sizeof(start) - 1);
	s->sent_ms = time_monotonic_ms();
	while (r == 0) {
		if (stream_wait(s, MIN(deadline, s->sent_ms + interval), &is_half_closed))
			return -ECONNRESET;
		r = watch_process(s->target.watch, stream_emit, s);
		if (r != 0)
			break;
		uint64_t now = time_monotonic_ms();
		if (now >= deadline) {
			error_set(e, ERROR_TIMEOUT, "the timeout of %llu ms has passed", (unsigned long long)timeout_ms);
			return 0;
		}
		if (now >= s->sent_ms + interval) {
			r = connect_stream_send_text(s->request, keepalive, sizeof(keepalive) - 1);
			s->is_cut = r < 0;
			s->sent_ms = now;
		}
	}
	if (s->is_cut)
		return r;
	set_end(e, &s->target, r);
	return 0;
}

int watch_service_stream(struct request *r)
{
	struct error e = {0};
	uint64_t timeout_ms = 0;
	json_t *body = NULL;
	struct stream *s = calloc(1, sizeof(*s));
	int q = s ? connect_stream_request(r, &body, &e) : error_set(&e, ERROR_EXHAUSTED, "out of memory");
	if (q == 0)
		q = connect_timeout_ms(r, &timeout_ms, &e);
	if (q == 0) {
		s->request = r;
		q = target_open(&s->target, r, body, &e);
	}
	json_decref(body);
	int w = q < 0 ? 0 : connect_stream_start(r);
	if (q == 0 && w == 0)
		w = stream_run(s, timeout_ms, &e);
	guest_user_leave();
	if (w == 0)
		w = connect_stream_end(r, &e);
	if (s) {
		watch_close(s->target.watch);
		buf_free(&s->message);
	}
	free(s);
	return w;
}

/* ---- polled ---- */

static void watcher_free(struct watcher *w)
{
	watch_close(w->target.watch);
	if (w->stop_fd >= 0)
		close(w->stop_fd);
	buf_free(&w->queue);
	pthread_mutex_destroy(&w->queue_lock);
	free(w);
}

static void watcher_release(struct watcher *w)
{
	pthread_mutex_lock(&lock);
	int is_last = --w->references == 0;
	pthread_mutex_unlock(&lock);
	if (is_last)
		watcher_free(w);
}

static int watcher_emit(void *context, enum watch_kind kind, const char *name)
{
	struct watcher *w = context;
	CLEANUP_BUF struct buf event = {0};
	if (kind != WATCH_OVERFLOW && append_event(&w->target, &event, kind, name) < 0)
		return -ENOMEM;
	pthread_mutex_lock(&w->queue_lock);
	int is_full = w->event_count >= WATCH_QUEUE_EVENTS_MAX || w->queue.size + event.size > WATCH_QUEUE_BYTES_MAX;
	if (kind == WATCH_OVERFLOW || is_full || (w->event_count > 0 && buf_append_string(&w->queue, ",") < 0) ||
	    buf_append(&w->queue, event.data, event.size) < 0)
		w->is_overflowed = 1;
	else
		w->event_count++;
	pthread_mutex_unlock(&w->queue_lock);
	return 0;
}

static void *watcher_run(void *argument)
{
	struct watcher *w = argument;
	struct error e = {0};
	int r = guest_user_enter(&w->target.user, &e);
	struct pollfd fds[2] = {
	    {.fd = watch_fd(w->target.watch), .events = POLLIN},
	    {.fd = w->stop_fd, .events = POLLIN},
	};
	while (r == 0) {
		if (poll(fds, ARRAY_SIZE(fds), -1) < 0 && errno != EINTR)
			r = -errno;
		if (fds[1].revents)
			break;
		if (r == 0)
			r = watch_process(w->target.watch, watcher_emit, w);
	}
	if (r != 0) {
		pthread_mutex_lock(&w->queue_lock);
		set_end(&w->end, &w->target, r);
		pthread_mutex_unlock(&w->queue_lock);
	}
	watcher_release(w);
	return NULL;
}

/* Takes a watcher out of the table; the table's reference passes to the caller. With `id` NULL the one that has been
 * left alone for longest, if that is long enough. */
static struct watcher *table_take(const char *id)
{
	struct watcher **found = NULL;
	uint64_t now = time_monotonic_ms();
	for (struct watcher **p = &watchers; *p; p = &(*p)->next) {
		int is_match =
		    id ? strcmp((*p)->id, id) == 0
		       : now - (*p)->asked_ms > WATCHER_ABANDONED_MS && (!found || (*p)->asked_ms < (*found)->asked_ms);
		if (is_match)
			found = p;
	}
	if (!found)
		return NULL;
	struct watcher *w = *found;
	*found = w->next;
	watcher_count--;
	return w;
}

static void watcher_stop(struct watcher *w)
{
	uint64_t one = 1;
	(void)!write(w->stop_fd, &one, sizeof(one));
	watcher_release(w);
}

static int table_add(struct watcher *w, struct error *e)
{
	struct watcher *abandoned = NULL;
	pthread_mutex_lock(&lock);
	if (watcher_count >= WATCHERS_MAX)
		abandoned = table_take(NULL);
	int is_full = watcher_count >= WATCHERS_MAX;
	if (!is_full) {
		w->next = watchers;
		watchers = w;
		watcher_count++;
		w->references = 2;
	}
	pthread_mutex_unlock(&lock);
	if (abandoned)
		watcher_stop(abandoned);
	return is_full ? error_set(e, ERROR_EXHAUSTED, "there are %d watchers already; remove some", WATCHERS_MAX) : 0;
}

static int watcher_start(struct watcher *w, struct error *e)
{
	pthread_t thread;
	pthread_attr_t attributes;
	pthread_attr_init(&attributes);
	pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
	pthread_attr_setstacksize(&attributes, WATCHER_STACK_BYTES);
	int failure = pthread_create(&thread, &attributes, watcher_run, w);
	pthread_attr_destroy(&attributes);
	return failure ? error_set_errno(e, failure, "cannot start a watcher") : 0;
}

static int create(struct request *r, const json_t *body, char id[ID_BYTES], struct error *e)
{
	struct watcher *w = calloc(1, sizeof(*w));
	if (!w)
		return error_set(e, ERROR_EXHAUSTED, "out of memory");
	pthread_mutex_init(&w->queue_lock, NULL);
	id_make(w->id, 'w');
	memcpy(id, w->id, ID_BYTES);
	w->asked_ms = time_monotonic_ms();
	w->stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	int q = w->stop_fd < 0 ? error_set_errno(e, errno, "cannot start a watcher") : target_open(&w->target, r, body, e);
	if (q == 0)
		q = table_add(w, e);
	if (q < 0) {
		watcher_free(w);
		return q;
	}
	q = watcher_start(w, e);
	if (q < 0) {
		pthread_mutex_lock(&lock);
		struct watcher *taken = table_take(id);
		w->references--; /* the thread's */
		pthread_mutex_unlock(&lock);
		if (taken)
			watcher_release(taken);
	}
	return q;
}

int watch_service_create(struct request *r)
{
	struct error e = {0};
	json_t *body = NULL;
	char id[ID_BYTES];
	int q = request_read_json(r, &body, &e);
	if (q == 0)
		q = create(r, body, id, &e);
	guest_user_leave();
	json_decref(body);
	return q < 0 ? connect_fail(r, &e) : connect_reply(r, json_pack("{s:s}", "watcherId", id));
}

/* Finds a watcher and takes a reference. */
static struct watcher *table_find(const char *id)
{
	pthread_mutex_lock(&lock);
	struct watcher *w = watchers;
	while (w && strcmp(w->id, id) != 0)
		w = w->next;
	if (w) {
		w->references++;
		w->asked_ms = time_monotonic_ms();
	}
	pthread_mutex_unlock(&lock);
	return w;
}

static int read_id(struct request *r, char id[ID_BYTES], struct error *e)
{
	json_t *body = NULL;
	int q = request_read_json(r, &body, e);
	if (q == 0) {
		const char *text = json_string_value(json_object_get(body, "watcherId"));
		if (!text || text_copy(id, ID_BYTES, text) < 0)
			q = error_set(e, text ? ERROR_NOT_FOUND : ERROR_INVALID,
			              text ? "there is no such watcher" : "field 'watcherId' is missing or not a string");
	}
	json_decref(body);
	return q;
}

/* Moves the queued events into an answer. Once they are all delivered, the watch's end is what is left to tell. */
static int take_events(struct watcher *w, struct buf *b, struct error *e)
{
	pthread_mutex_lock(&w->queue_lock);
	struct buf events = w->queue;
	size_t count = w->event_count;
	int is_overflowed = w->is_overflowed;
	int is_ended = count == 0 && !is_overflowed && w->end.code != ERROR_NONE;
	if (is_ended)
		*e = w->end;
	w->queue = (struct buf){0};
	w->event_count = 0;
	w->is_overflowed = 0;
	pthread_mutex_unlock(&w->queue_lock);
	int r = is_ended ? error_code_errno(e->code) : buf_append_string(b, "{\"events\":[");
	if (r == 0 && count > 0)
		r = buf_append(b, events.data, events.size);
	if (r == 0 && is_overflowed && count > 0)
		r = buf_append_string(b, ",");
	if (r == 0 && is_overflowed)
		r = append_event(&w->target, b, WATCH_OVERFLOW, ".");
	if (r == 0)
		r = buf_append_string(b, "]}");
	buf_free(&events);
	return r < 0 && e->code == ERROR_NONE ? error_set(e, ERROR_EXHAUSTED, "out of memory") : r;
}

int watch_service_events(struct request *r)
{
	static char type[] = "content-type", json[] = "application/json";
	static const struct request_header header = {type, json};
	struct error e = {0};
	char id[ID_BYTES];
	int q = read_id(r, id, &e);
	struct watcher *w = q == 0 ? table_find(id) : NULL;
	if (q == 0 && !w)
		q = error_set(&e, ERROR_NOT_FOUND, "there is no watcher '%s'", id);
	CLEANUP_BUF struct buf b = {0};
	if (q == 0)
		q = take_events(w, &b, &e);
	if (w)
		watcher_release(w);
	if (q < 0)
		return connect_fail(r, &e);
	q = response_start(r, 200, &header, 1, (int64_t)b.size);
	if (q == 0)
		q = response_write(r, b.data, b.size);
	return q == 0 ? response_end(r) : q;
}

int watch_service_remove(struct request *r)
{
	struct error e = {0};
	char id[ID_BYTES];
	int q = read_id(r, id, &e);
	if (q < 0)
		return connect_fail(r, &e);
	pthread_mutex_lock(&lock);
	struct watcher *w = table_take(id);
	pthread_mutex_unlock(&lock);
	if (!w) {
		error_set(&e, ERROR_NOT_FOUND, "there is no watcher '%s'", id);
		return connect_fail(r, &e);
	}
	watcher_stop(w);
	return connect_reply(r, json_object());
}
