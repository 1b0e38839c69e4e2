/*
 * GET, POST /files and POST /files/compose: whole files in and out.
 *
 * Uploads run request body -> [gunzip] -> [multipart] -> upload.c in pieces of 64 KiB; nothing is held back, so memory
 * does not grow with the file. Downloads read regular files only: a FIFO or device is recognised through an O_PATH
 * descriptor, before anything is opened that could block.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/text.h"
#include "guest/download.h"
#include "guest/entry.h"
#include "guest/gzip.h"
#include "guest/metadata.h"
#include "guest/multipart.h"
#include "guest/path.h"
#include "guest/request.h"
#include "guest/upload.h"

#define FILES_CHUNK_BYTES 65536
/* After a failed upload this much of the body is read and thrown away, so that a client that only looks for the answer
 * once it has sent everything gets to see the reason. */
#define FILES_SKIP_BYTES_MAX (INT64_C(256) * 1024 * 1024)
#define FILES_HEADERS_MAX 12
#define FILES_HEADER_BYTES 4096
#define FILES_COMPOSE_SOURCES_MAX 4096

/* Answer headers with the room for their text. */
struct headers {
	struct request_header items[FILES_HEADERS_MAX];
	size_t count;
	char text[FILES_HEADER_BYTES];
	size_t used;
};

PRINTF_LIKE(3, 4) static void headers_add(struct headers *h, const char *name, const char *format, ...)
{
	size_t name_size = strlen(name) + 1;
	if (h->count == FILES_HEADERS_MAX || h->used + name_size >= sizeof(h->text))
		return;
	char *to = h->text + h->used, *value = to + name_size;
	size_t room = sizeof(h->text) - h->used - name_size;
	memcpy(to, name, name_size);
	va_list args;
	va_start(args, format);
	int n = vsnprintf(value, room, format, args);
	va_end(args);
	if (n < 0 || (size_t)n >= room)
		return;
	h->items[h->count].name = to;
	h->items[h->count++].value = value;
	h->used += name_size + (size_t)n + 1;
}

/* What every call on /files starts with. */
struct files_call {
	char *asked; /* path of the query, NULL if none */
	struct guest_user user;
	char *workdir;
};

static void files_call_free(struct files_call *call)
{
	free(call->asked);
	free(call->workdir);
}

static int read_query(struct request *r, const char *name, char **ret, struct error *e)
{
	*ret = NULL;
	int q = request_query(r, name, ret);
	if (q < 0 && q != -ENOENT)
		return error_set(e, ERROR_INVALID, "bad percent-encoding or a NUL in query parameter '%s'", name);
	return 0;
}

/* Authorises the call, finds its user and path. */
static int files_call_start(struct files_call *call, struct request *r, const char *operation, struct error *e)
{
	CLEANUP_FREE char *username = NULL;
	int q = read_query(r, "path", &call->asked, e);
	if (q == 0)
		q = read_query(r, "username", &username, e);
	if (q == 0)
		q = agent_check_signature(r, call->asked ? call->asked : "", operation, username ? username : "", e);
	if (q == 0)
		q = request_user(r, username && username[0] ? username : NULL, &call->user, e);
	if (q == 0)
		call->workdir = agent_default_workdir();
	return q;
}

/* ---- download ---- */

struct source {
	int fd;
	struct stat st;
	struct path path;
};

static int open_source(struct source *s, const struct files_call *call, struct error *e)
{
	int r = path_resolve(&s->path, call->asked ? call->asked : "", call->user.home, call->workdir, e);
	if (r < 0)
		return r;
	CLEANUP_CLOSE int place = path_open_at(AT_FDCWD, s->path.text, O_PATH);
	if (place < 0)
		return path_fail(e, place, "read", s->path.text);
	if (fstat(place, &s->st) < 0)
		return path_fail(e, errno, "read", s->path.text);
	if (S_ISDIR(s->st.st_mode)) {
		path_fail(e, EISDIR, "read", s->path.text);
		return error_prefix(e, "the path is a directory");
	}
	if (!S_ISREG(s->st.st_mode)) {
		path_fail(e, EINVAL, "read", s->path.text);
		return error_prefix(e, "the path is a %s, not a regular file", path_type_name(s->st.st_mode));
	}
	s->fd = path_reopen(place, O_RDONLY | O_NONBLOCK | O_NOCTTY);
	return s->fd < 0 ? path_fail(e, s->fd, "read", s->path.text) : 0;
}

static int send_bytes(struct request *r, int fd, char *buffer, uint64_t from, uint64_t size)
{
	if (strcmp(r->method, "HEAD") == 0)
		return response_end(r);
	while (size > 0) {
		ssize_t n = pread(fd, buffer, MIN(size, (uint64_t)FILES_CHUNK_BYTES), (off_t)from);
		if (n < 0 && errno == EINTR)
			continue;
		/* A file that shrinks on the way cannot fill its announced length: the connection has to be cut. */
		if (n <= 0)
			return n < 0 ? -errno : -ENODATA;
		int w = response_write(r, buffer, (size_t)n);
		if (w < 0)
			return w;
		from += (uint64_t)n;
		size -= (uint64_t)n;
	}
	return response_end(r);
}

/* Files without a size, as in /proc: what is there until the end. `have` bytes are in the buffer already. */
static int send_unsized(struct request *r, int fd, char *buffer, ssize_t have)
{
	while (have > 0) {
		int w = response_write(r, buffer, (size_t)have);
		if (w < 0)
			return w;
		do
			have = read(fd, buffer, FILES_CHUNK_BYTES);
		while (have < 0 && errno == EINTR);
		/* EAGAIN: a file such as /proc/kmsg has no more for now. */
		if (have < 0 && errno != EAGAIN)
			return -errno;
	}
	return response_end(r);
}

static int write_response(void *context, const void *data, size_t size)
{
	return response_write(context, data, size);
}

static int send_gzip(struct request *r, int fd, char *buffer)
{
	CLEANUP_FREE struct gzip *g = malloc(sizeof(*g));
	if (!g || gzip_open_encoder(g) < 0)
		return -ENOMEM;
	ssize_t n;
	int w = 0;
	while (w == 0 && (n = fd_read_full(fd, buffer, FILES_CHUNK_BYTES)) != 0)
		w = n < 0 ? (int)n : gzip_feed(g, buffer, (size_t)n, write_response, r);
	if (w == 0)
		w = gzip_finish(g, write_response, r);
	gzip_close(g);
	return w == 0 ? response_end(r) : w;
}

/* True if the client has this very version: 304. */
static int is_not_modified(const struct request *r, const char *etag, const char *date)
{
	const char *value = request_header(r, "if-none-match");
	if (value)
		return download_etag_matches(value, etag, 0);
	value = request_header(r, "if-modified-since");
	return value && strcmp(value, date) == 0;
}

static int range_applies(const struct request *r, const char *etag, const char *date)
{
	const char *value = request_header(r, "if-range");
	if (!value)
		return 1;
	return value[0] == '"' ? download_etag_matches(value, etag, 1) : strcmp(value, date) == 0;
}

/* Answers with a regular file that has a size. */
static int send_sized(struct request *r, struct source *s, struct headers *h, char *buffer)
{
	const char *accept = request_header(r, "accept-encoding"), *range = request_header(r, "range");
	uint64_t size = (uint64_t)s->st.st_size, from = 0, to = 0;
	char etag[DOWNLOAD_ETAG_BYTES], date[DOWNLOAD_DATE_BYTES];
	download_etag(etag, &s->st);
	download_date(date, s->st.st_mtim.tv_sec);
	headers_add(h, "etag", "%s", etag);
	headers_add(h, "last-modified", "%s", date);
	headers_add(h, "accept-ranges", "bytes");

	int is_conditional =
	    range || request_header(r, "if-none-match") || request_header(r, "if-modified-since") || size == 0;
	enum download_encoding encoding = download_negotiate(accept);
	if (is_conditional)
		encoding = download_identity_is_acceptable(accept) ? DOWNLOAD_IDENTITY : DOWNLOAD_NOT_ACCEPTABLE;
	if (encoding == DOWNLOAD_NOT_ACCEPTABLE)
		return response_error_status(r, 406, "no acceptable encoding found, supported: identity, gzip");
	if (is_not_modified(r, etag, date))
		return response_start(r, 304, h->items, h->count, 0) < 0 ? -EPIPE : response_end(r);
	if (encoding == DOWNLOAD_GZIP) {
		headers_add(h, "content-encoding", "gzip");
		int w = response_start(r, 200, h->items, h->count, -1);
		return w < 0 ? w : send_gzip(r, s->fd, buffer);
	}
	enum download_range kind =
	    range_applies(r, etag, date) ? download_parse_range(range, size, &from, &to) : DOWNLOAD_WHOLE;
	if (kind == DOWNLOAD_UNSATISFIABLE) {
		headers_add(h, "content-range", "bytes */%llu", (unsigned long long)size);
		int w = response_start(r, 416, h->items, h->count, 0);
		return w < 0 ? w : response_end(r);
	}
	if (kind == DOWNLOAD_PART)
		headers_add(h, "content-range", "bytes %llu-%llu/%llu", (unsigned long long)from, (unsigned long long)to,
		            (unsigned long long)size);
	uint64_t length = kind == DOWNLOAD_PART ? to - from + 1 : size;
	int w = response_start(r, kind == DOWNLOAD_PART ? 206 : 200, h->items, h->count, (int64_t)length);
	return w < 0 ? w : send_bytes(r, s->fd, buffer, from, length);
}

static int send_source(struct request *r, struct source *s)
{
	CLEANUP_FREE char *buffer = malloc(FILES_CHUNK_BYTES);
	CLEANUP_FREE struct headers *h = calloc(1, sizeof(*h));
	CLEANUP_BUF struct buf disposition = {0};
	const char *name = path_name(s->path.text);
	if (!buffer || !h || download_disposition(&disposition, name) < 0)
		return response_error_status(r, 500, "out of memory");
	headers_add(h, "content-type", "%s", download_content_type(name));
	headers_add(h, "content-disposition", "%s", disposition.data);
	headers_add(h, "x-content-type-options", "nosniff");
	headers_add(h, "vary", "accept-encoding");
	if (s->st.st_size > 0)
		return send_sized(r, s, h, buffer);
	ssize_t n = read(s->fd, buffer, FILES_CHUNK_BYTES);
	if (n < 0 && errno != EAGAIN) {
		struct error e;
		path_fail(&e, errno, "read", s->path.text);
		return response_error(r, &e);
	}
	if (n <= 0)
		return send_sized(r, s, h, buffer);
	int w = response_start(r, 200, h->items, h->count, -1);
	return w < 0 ? w : send_unsized(r, s->fd, buffer, n);
}

static int files_get(struct request *r)
{
	struct error e = {0};
	CLEANUP_FREE struct source *s = calloc(1, sizeof(*s));
	CLEANUP_FREE struct files_call *call = calloc(1, sizeof(*call));
	if (!s || !call)
		return response_error_status(r, 500, "out of memory");
	s->fd = -1;
	int q = files_call_start(call, r, "read", &e);
	if (q == 0)
		q = guest_user_enter(&call->user, &e);
	if (q == 0) {
		q = open_source(s, call, &e);
		guest_user_leave();
	}
	int w = q < 0 ? response_error(r, &e) : send_source(r, s);
	if (s->fd >= 0)
		close(s->fd);
	files_call_free(call);
	return w;
}

/* ---- upload ---- */

struct receiving {
	struct files_call call;
	struct request *request;
	struct metadata metadata;
	int mode;
	int64_t expected; /* bytes of the file, -1 if not known */
	int is_multipart;
	int is_gzip;
	int is_open;       /* an upload is under way */
	struct buf result; /* JSON array */
	char **done;       /* resolved paths of the files written so far */
	size_t done_count;
	struct error error;
	struct upload upload;
	struct multipart multipart;
	struct gzip gzip;
	char buffer[FILES_CHUNK_BYTES];
};

static void receiving_free(struct receiving *u)
{
	if (u->is_open)
		upload_abort(&u->upload);
	gzip_close(&u->gzip);
	for (size_t i = 0; i < u->done_count; i++)
		free(u->done[i]);
	free(u->done);
	buf_free(&u->result);
	files_call_free(&u->call);
	free(u);
}

static int begin_file(struct receiving *u, const char *asked)
{
	struct path path;
	int r = path_resolve(&path, asked, u->call.user.home, u->call.workdir, &u->error);
	if (r < 0)
		return r;
	for (size_t i = 0; i < u->done_count; i++)
		if (strcmp(u->done[i], path.text) == 0) {
			char shown[PATH_DISPLAY_BYTES];
			path_display(shown, path.text);
			return error_set(&u->error, ERROR_INVALID,
			                 "several files for the one path '%s' in one upload; only the first was written", shown);
		}
	r = upload_begin(&u->upload, &path, u->mode, u->expected, &u->error);
	u->is_open = r == 0;
	return r;
}

/* Puts the file in place and adds it to the answer. */
static int end_file(struct receiving *u)
{
	int r = upload_commit(&u->upload, &u->metadata, &u->error);
	u->is_open = 0;
	if (r < 0)
		return r;
	const char *text = u->upload.path.text;
	char **done = realloc(u->done, (u->done_count + 1) * sizeof(*done));
	if (done)
		u->done = done;
	char *copy = done ? strdup(text) : NULL;
	if (!copy)
		return error_set(&u->error, ERROR_EXHAUSTED, "out of memory");
	u->done[u->done_count++] = copy;
	r = buf_append_string(&u->result, u->result.size ? ",{" : "[{");
	if (r == 0)
		r = entry_append_bytes(&u->result, "name", path_name(text));
	if (r == 0)
		r = buf_append_string(&u->result, ",\"type\":\"file\",");
	if (r == 0)
		r = entry_append_bytes(&u->result, "path", text);
	if (r == 0)
		r = metadata_append_json(&u->result, text);
	if (r == 0)
		r = buf_append_string(&u->result, "}");
	return r < 0 ? error_set(&u->error, ERROR_EXHAUSTED, "out of memory") : 0;
}

static int part_begin(void *context, const struct multipart_part *part)
{
	struct receiving *u = context;
	if (strcmp(part->name, "file") != 0)
		return 0;
	if (u->call.asked)
		return begin_file(u, u->call.asked);
	if (!part->has_filename || !part->filename[0])
		return error_set(&u->error, ERROR_INVALID, "a part has no file name and the query has no path");
	return begin_file(u, part->filename);
}

static int part_data(void *context, const void *data, size_t size)
{
	struct receiving *u = context;
	return u->is_open ? upload_write(&u->upload, data, size, &u->error) : 0;
}

static int part_end(void *context)
{
	struct receiving *u = context;
	return u->is_open ? end_file(u) : 0;
}

static int receive_decoded(void *context, const void *data, size_t size)
{
	struct receiving *u = context;
	static const struct multipart_callbacks template = {part_begin, part_data, part_end, NULL};
	if (!u->is_multipart)
		return upload_write(&u->upload, data, size, &u->error);
	struct multipart_callbacks callbacks = template;
	callbacks.context = u;
	return multipart_feed(&u->multipart, data, size, &callbacks, &u->error);
}

static int receive_body(struct receiving *u)
{
	for (;;) {
		ssize_t n = request_read(u->request, u->buffer, sizeof(u->buffer));
		if (n < 0)
			return error_set(&u->error, ERROR_INVALID, "the upload was cut off; nothing was written");
		if (n == 0)
			break;
		int r = u->is_gzip ? gzip_feed(&u->gzip, u->buffer, (size_t)n, receive_decoded, u)
		                   : receive_decoded(u, u->buffer, (size_t)n);
		if (r < 0 && u->error.code == ERROR_NONE)
			return error_set(&u->error, r == -ENOMEM ? ERROR_EXHAUSTED : ERROR_INVALID, "%s",
			                 r == -ENOMEM ? "out of memory" : "the body is not valid gzip");
		if (r < 0)
			return r;
	}
	if (u->is_gzip && gzip_finish(&u->gzip, receive_decoded, u) < 0)
		return error_set(&u->error, ERROR_INVALID, "the gzip body is cut off; nothing was written");
	return u->is_multipart ? multipart_finish(&u->multipart, &u->error) : 0;
}

/* Mode bits are an extension: octal in query parameter `mode`. A signed link does not cover it. */
static int read_mode(struct receiving *u)
{
	CLEANUP_FREE char *text = NULL, *signature = NULL;
	u->mode = UPLOAD_MODE_KEEP;
	int r = read_query(u->request, "mode", &text, &u->error);
	if (r < 0 || !text)
		return r;
	char *end;
	unsigned long mode = strtoul(text, &end, 8);
	if (text[0] < '0' || text[0] > '7' || *end || mode > 07777)
		return error_set(&u->error, ERROR_INVALID, "mode must be octal, at most 7777");
	if (request_query(u->request, "signature", &signature) != -ENOENT)
		return error_set(&u->error, ERROR_INVALID, "a signed link cannot set the mode");
	u->mode = (int)mode;
	return 0;
}

static int read_body_kind(struct receiving *u)
{
	const char *type = request_header(u->request, "content-type"),
	           *coding = request_header(u->request, "content-encoding");
	size_t size = type ? strcspn(type, "; \t") : 0;
	u->is_multipart = type && strncasecmp(type, "multipart/", 10) == 0;
	if (!u->is_multipart && !(size == 24 && strncasecmp(type, "application/octet-stream", size) == 0))
		return error_set(&u->error, ERROR_INVALID,
		                 "unsupported content type: %.100s; expected multipart/form-data or application/octet-stream",
		                 type ? type : "none");
	if (u->is_multipart) {
		int r = multipart_init(&u->multipart, type, &u->error);
		if (r < 0)
			return r;
	} else if (!u->call.asked) {
		return error_set(&u->error, ERROR_INVALID, "query parameter 'path' is needed for a raw upload");
	}
	if (coding && strcasecmp(coding, "gzip") == 0) {
		u->is_gzip = 1;
		if (gzip_open_decoder(&u->gzip) < 0)
			return error_set(&u->error, ERROR_EXHAUSTED, "out of memory");
	} else if (coding && coding[0] && strcasecmp(coding, "identity") != 0) {
		return error_set(&u->error, ERROR_INVALID, "unsupported Content-Encoding, supported: identity, gzip");
	}
	u->expected = u->is_multipart || u->is_gzip ? -1 : u->request->content_length;
	return 0;
}

static int receive(struct receiving *u)
{
	int r = u->is_multipart ? 0 : begin_file(u, u->call.asked);
	if (r == 0)
		r = receive_body(u);
	if (r == 0 && !u->is_multipart)
		r = end_file(u);
	if (r == 0 && u->done_count == 0)
		r = error_set(&u->error, ERROR_INVALID, "the form has no part named 'file'");
	if (r < 0 && u->is_open) {
		upload_abort(&u->upload);
		u->is_open = 0;
	}
	return r;
}

static void skip_body(struct receiving *u)
{
	/* Who waits for "100 Continue" has not sent anything yet and is best told the error at once. */
	if (request_header(u->request, "expect"))
		return;
	for (int64_t left = FILES_SKIP_BYTES_MAX; left > 0;) {
		ssize_t n = request_read(u->request, u->buffer, sizeof(u->buffer));
		if (n <= 0)
			return;
		left -= n;
	}
}

static int files_post(struct request *r)
{
	struct receiving *u = calloc(1, sizeof(*u));
	if (!u)
		return response_error_status(r, 500, "out of memory");
	u->request = r;
	int q = files_call_start(&u->call, r, "write", &u->error);
	if (q == 0)
		q = metadata_from_request(&u->metadata, r, &u->error);
	if (q == 0)
		q = read_mode(u);
	if (q == 0)
		q = read_body_kind(u);
	if (q == 0)
		q = guest_user_enter(&u->call.user, &u->error);
	if (q == 0) {
		q = receive(u);
		guest_user_leave();
	}
	int w;
	if (q == 0 && buf_append_string(&u->result, "]") < 0)
		q = error_set(&u->error, ERROR_EXHAUSTED, "out of memory");
	if (q < 0) {
		skip_body(u);
		w = response_error(r, &u->error);
	} else {
		struct headers h = {.count = 0};
		headers_add(&h, "content-type", "application/json");
		w = response_start(r, 200, h.items, h.count, (int64_t)u->result.size);
		if (w == 0)
			w = response_write(r, u->result.data, u->result.size);
		if (w == 0)
			w = response_end(r);
	}
	receiving_free(u);
	return w;
}

/* ---- compose ---- */

/* Opens one source. It must not be the destination itself: that would be read while it is replaced. */
static int open_part(const struct receiving *u, const struct path *path, struct error *e)
{
	CLEANUP_CLOSE int place = path_open_at(AT_FDCWD, path->text, O_PATH);
	struct stat st;
	if (place < 0 || fstat(place, &st) < 0)
		return path_fail(e, place < 0 ? place : errno, "read", path->text);
	if (!S_ISREG(st.st_mode))
		return error_set(e, ERROR_INVALID, "a source is a %s, not a regular file", path_type_name(st.st_mode));
	const struct stat *existing = &u->upload.existing;
	if (existing->st_mode && existing->st_dev == st.st_dev && existing->st_ino == st.st_ino)
		return error_set(e, ERROR_INVALID, "a source is the destination itself");
	int fd = path_reopen(place, O_RDONLY | O_NONBLOCK);
	return fd < 0 ? path_fail(e, fd, "read", path->text) : fd;
}

/* Appends every source in order; with `is_removing`, removes them instead. */
static int walk_sources(struct receiving *u, const json_t *sources, int is_removing)
{
	for (size_t i = 0; i < json_array_size(sources); i++) {
		const char *asked = json_string_value(json_array_get(sources, i));
		struct path path;
		if (!asked || !asked[0])
			return error_set(&u->error, ERROR_INVALID, "source_paths must hold paths only");
		int r = path_resolve(&path, asked, u->call.user.home, u->call.workdir, &u->error);
		if (r < 0)
			return r;
		if (is_removing) {
			(void)unlink(path.text);
			continue;
		}
		CLEANUP_CLOSE int fd = open_part(u, &path, &u->error);
		if (fd < 0)
			return fd;
		r = upload_append_file(&u->upload, fd, &u->error);
		if (r < 0)
			return r;
	}
	return 0;
}

static int compose(struct receiving *u, const json_t *body)
{
	const json_t *sources = json_object_get(body, "source_paths");
	const char *destination = json_string_value(json_object_get(body, "destination"));
	if (!json_is_array(sources) || json_array_size(sources) == 0 ||
	    json_array_size(sources) > FILES_COMPOSE_SOURCES_MAX)
		return error_set(&u->error, ERROR_INVALID, "source_paths must be an array of 1 to %d paths",
		                 FILES_COMPOSE_SOURCES_MAX);
	if (!destination || !destination[0])
		return error_set(&u->error, ERROR_INVALID, "destination is required");
	u->mode = UPLOAD_MODE_KEEP;
	u->expected = -1;
	int r = begin_file(u, destination);
	if (r == 0)
		r = walk_sources(u, sources, 0);
	if (r == 0)
		r = end_file(u);
	return r == 0 ? walk_sources(u, sources, 1) : r;
}

static int files_compose(struct request *r)
{
	struct receiving *u = calloc(1, sizeof(*u));
	if (!u)
		return response_error_status(r, 500, "out of memory");
	u->request = r;
	json_t *body = NULL;
	int q = agent_check_signature(r, "", "compose", "", &u->error);
	if (q == 0)
		q = request_read_json(r, &body, &u->error);
	if (q == 0)
		q = request_user(r, json_string_value(json_object_get(body, "username")), &u->call.user, &u->error);
	if (q == 0)
		q = guest_user_enter(&u->call.user, &u->error);
	if (q == 0) {
		u->call.workdir = agent_default_workdir();
		q = compose(u, body);
		guest_user_leave();
	}
	json_decref(body);
	int w;
	if (q < 0) {
		w = response_error(r, &u->error);
	} else {
		struct headers h = {.count = 0};
		headers_add(&h, "content-type", "application/json");
		/* One object, not the array that uploads answer with. */
		w = response_start(r, 200, h.items, h.count, (int64_t)u->result.size - 1);
		if (w == 0)
			w = response_write(r, u->result.data + 1, u->result.size - 1);
		if (w == 0)
			w = response_end(r);
	}
	receiving_free(u);
	return w;
}

const struct request_route files_routes[] = {
    {"GET", "/files", files_get, 0},
    {"POST", "/files", files_post, 1},
    {"POST", "/files/compose", files_compose, 1},
    {NULL, NULL, NULL, 0},
};
