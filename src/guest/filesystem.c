/* filesystem.Filesystem: Stat, MakeDir, Move, ListDir, Remove, and the table of the whole service. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/text.h"
#include "guest/entry.h"
#include "guest/filesystem.h"
#include "guest/list.h"
#include "guest/path.h"
#include "guest/remove.h"
#include "guest/request.h"

int filesystem_read_path(const json_t *body, const char *field, const struct guest_user *user, struct path *ret,
                         struct error *e)
{
	char bytes_field[64], exact[PATH_BYTES_MAX];
	const char *asked = "";
	json_t *value = json_object_get(body, field);
	if (text_format(bytes_field, sizeof(bytes_field), "%sBytes", field) < 0)
		return error_set(e, ERROR_INTERNAL, "field name too long");
	const json_t *bytes = json_object_get(body, bytes_field);
	if (bytes) {
		size_t size = json_string_length(bytes);
		long n = -1;
		if (json_is_string(bytes) && size / 4 * 3 + 3 < sizeof(exact))
			n = text_base64_decode(exact, json_string_value(bytes), size);
		if (n < 0 || memchr(exact, 0, (size_t)n))
			return error_set(e, ERROR_INVALID, "field '%s' is not the base64 of a path", bytes_field);
		exact[n] = 0;
		asked = exact;
	} else if (json_is_string(value)) {
		asked = json_string_value(value);
	} else if (value) {
		return error_set(e, ERROR_INVALID, "field '%s' is not a string", field);
	}
	CLEANUP_FREE char *workdir = agent_default_workdir();
	return path_resolve(ret, asked, user->home, workdir, e);
}

/* Where an entry is: its directory and name, without following it. The root and paths that end in ".." are "." of
 * themselves. */
static int locate(const struct path *p, int *ret_fd, char name[PATH_NAME_BYTES], struct error *e)
{
	int r = path_open_parent(p, ret_fd, name, NULL);
	if (r == -EISDIR) {
		r = path_open_at(AT_FDCWD, p->text, O_PATH | O_DIRECTORY);
		if (r >= 0) {
			*ret_fd = r;
			memcpy(name, ".", 2);
			return 0;
		}
	}
	return r < 0 ? path_fail(e, r, "find", p->text) : 0;
}

static int reply_entry(struct request *r, int at, const char *name, const struct path *p, struct error *e)
{
	static char type[] = "content-type", json[] = "application/json";
	static const struct request_header header = {type, json};
	CLEANUP_BUF struct buf b = {0};
	CLEANUP_FREE struct entry_names *names = calloc(1, sizeof(*names));
	int q = names ? buf_append_string(&b, "{\"entry\":") : -ENOMEM;
	if (q == 0)
		q = entry_append(&b, at, name, p->text, names);
	if (q == 0)
		q = buf_append_string(&b, "}");
	if (q < 0)
		return path_fail(e, q, "look at", p->text);
	q = response_start(r, 200, &header, 1, (int64_t)b.size);
	if (q == 0)
		q = response_write(r, b.data, b.size);
	if (q == 0)
		q = response_end(r);
	/* Only errors of the call itself are reported by the caller; the client is gone here. */
	return 0;
}

/* A call between its body and its answer; `work` answers itself on success. */
typedef int (*filesystem_work)(struct request *r, const json_t *body, const struct guest_user *user, struct error *e);

static int serve(struct request *r, filesystem_work work)
{
	struct error e = {0};
	CLEANUP_FREE struct guest_user *user = calloc(1, sizeof(*user));
	json_t *body = NULL;
	int q = user ? request_read_json(r, &body, &e) : error_set(&e, ERROR_EXHAUSTED, "out of memory");
	if (q == 0)
		q = request_user(r, NULL, user, &e);
	if (q == 0)
		q = guest_user_enter(user, &e);
	if (q == 0) {
		q = work(r, body, user, &e);
		guest_user_leave();
	}
	json_decref(body);
	return q < 0 ? connect_fail(r, &e) : 0;
}

static int do_stat(struct request *r, const json_t *body, const struct guest_user *user, struct error *e)
{
	struct path p;
	char name[PATH_NAME_BYTES];
	CLEANUP_CLOSE int at = -1;
	int q = filesystem_read_path(body, "path", user, &p, e);
	if (q == 0)
		q = locate(&p, &at, name, e);
	if (q < 0)
		return q;
	struct stat st;
	if (fstatat(at, name, &st, 0) < 0 && errno == ELOOP)
		return path_fail(e, ELOOP, "follow the link", p.text);
	return reply_entry(r, at, name, &p, e);
}

static int filesystem_stat(struct request *r)
{
	return serve(r, do_stat);
}

static int do_make_dir(struct request *r, const json_t *body, const struct guest_user *user, struct error *e)
{
	struct path p;
	int q = filesystem_read_path(body, "path", user, &p, e);
	if (q < 0)
		return q;
	CLEANUP_CLOSE int fd = path_open_at(AT_FDCWD, p.text, O_PATH);
	char shown[PATH_DISPLAY_BYTES];
	path_display(shown, p.text);
	struct stat st;
	if (fd >= 0 && fstat(fd, &st) == 0)
		return S_ISDIR(st.st_mode)
		           ? error_set(e, ERROR_EXISTS, "directory already exists: '%s'", shown)
		           : error_set(e, ERROR_INVALID, "path already exists but it is not a directory: '%s'", shown);
	if (fd != -ENOENT)
		return path_fail(e, fd < 0 ? fd : errno, "create directory", p.text);
	fd = path_make_directories(p.text, e);
	if (fd < 0)
		return fd;
	return reply_entry(r, fd, ".", &p, e);
}

static int filesystem_make_dir(struct request *r)
{
	return serve(r, do_make_dir);
}

static int do_move(struct request *r, const json_t *body, const struct guest_user *user, struct error *e)
{
	struct path source, destination;
	char from_name[PATH_NAME_BYTES];
	CLEANUP_CLOSE int from = -1;
	int q = filesystem_read_path(body, "source", user, &source, e);
	if (q == 0)
		q = filesystem_read_path(body, "destination", user, &destination, e);
	if (q == 0)
		q = path_open_parent(&source, &from, from_name, e);
	if (q < 0)
		return q;
	struct stat st;
	if (fstatat(from, from_name, &st, AT_SYMLINK_NOFOLLOW) < 0)
		return path_fail(e, errno, "move", source.text);

	const char *to_name = path_name(destination.text);
	if (to_name == destination.text || strcmp(to_name, "..") == 0)
		return path_fail(e, EINVAL, "move something to", destination.text);
	char parent[PATH_BYTES_MAX];
	memcpy(parent, destination.text, sizeof(parent));
	parent[to_name - destination.text] = 0;
	CLEANUP_CLOSE int to = path_make_directories(parent, e);
	if (to < 0)
		return to;
	if (renameat(from, from_name, to, to_name) < 0) {
		int failure = errno;
		q = path_fail(e, failure, "move to", destination.text);
		return failure == EXDEV ? error_prefix(e, "source and destination are on different file systems") : q;
	}
	return reply_entry(r, to, to_name, &destination, e);
}

static int filesystem_move(struct request *r)
{
	return serve(r, do_move);
}

static int do_remove(struct request *r, const json_t *body, const struct guest_user *user, struct error *e)
{
	struct path p;
	char name[PATH_NAME_BYTES];
	CLEANUP_CLOSE int at = -1;
	int q = filesystem_read_path(body, "path", user, &p, e);
	if (q < 0)
		return q;
	if (strcmp(p.text, "/") == 0)
		return error_set(e, ERROR_INVALID, "the root directory cannot be removed");
	q = path_open_parent(&p, &at, name, e);
	/* What is not there needs no removing, whichever part of the path is missing. */
	if (q == 0)
		q = remove_tree(at, name, p.text, e);
	else if (q == -ENOENT)
		q = 0;
	if (q < 0)
		return q;
	(void)connect_reply(r, json_object());
	return 0;
}

static int filesystem_remove(struct request *r)
{
	return serve(r, do_remove);
}

/* Numbers may come as JSON strings: that is how Connect's JSON writes some of them. */
static int read_depth(const json_t *body, unsigned *ret, struct error *e)
{
	const json_t *value = json_object_get(body, "depth");
	uint64_t depth = 1;
	if (json_is_integer(value) && json_integer_value(value) >= 0)
		depth = (uint64_t)json_integer_value(value);
	else if (value && !json_is_null(value) &&
	         !(json_is_string(value) && text_parse_u64(json_string_value(value), UINT32_MAX, &depth) == 0))
		return error_set(e, ERROR_INVALID, "field 'depth' is not a number");
	if (depth > LIST_DEPTH_MAX)
		return error_set(e, ERROR_INVALID, "depth is limited to %d", LIST_DEPTH_MAX);
	*ret = depth == 0 ? 1 : (unsigned)depth;
	return 0;
}

static int do_list_dir(struct request *r, const json_t *body, const struct guest_user *user, struct error *e)
{
	struct path p;
	unsigned depth;
	int q = filesystem_read_path(body, "path", user, &p, e);
	if (q == 0)
		q = read_depth(body, &depth, e);
	if (q < 0)
		return q;
	CLEANUP_CLOSE int place = path_open_at(AT_FDCWD, p.text, O_PATH);
	struct stat st;
	if (place < 0 || fstat(place, &st) < 0)
		return path_fail(e, place < 0 ? place : errno, "list", p.text);
	if (!S_ISDIR(st.st_mode))
		return path_fail(e, ENOTDIR, "list", p.text);
	CLEANUP_CLOSE int fd = path_reopen(place, O_RDONLY | O_DIRECTORY | O_NONBLOCK);
	if (fd < 0)
		return path_fail(e, fd, "list", p.text);
	/* Names without their properties are no entries: reading needs the right to search as well. */
	if (faccessat(fd, ".", X_OK, AT_EACCESS) < 0)
		return path_fail(e, errno, "list", p.text);
	(void)list_reply(r, fd, &p, depth);
	return 0;
}

static int filesystem_list_dir(struct request *r)
{
	return serve(r, do_list_dir);
}

#define SERVICE "/filesystem.Filesystem/"

const struct request_route filesystem_routes[] = {
    {"POST", SERVICE "Stat", filesystem_stat, 0},
    {"POST", SERVICE "MakeDir", filesystem_make_dir, 1},
    {"POST", SERVICE "Move", filesystem_move, 1},
    {"POST", SERVICE "ListDir", filesystem_list_dir, 0},
    {"POST", SERVICE "Remove", filesystem_remove, 1},
    {"POST", SERVICE "WatchDir", watch_service_stream, 0},
    {"POST", SERVICE "CreateWatcher", watch_service_create, 0},
    {"POST", SERVICE "GetWatcherEvents", watch_service_events, 0},
    {"POST", SERVICE "RemoveWatcher", watch_service_remove, 0},
    {NULL, NULL, NULL, 0},
};
