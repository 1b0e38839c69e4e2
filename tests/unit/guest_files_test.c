/* The parts of the guest's file service that need no server: parsers by value, the upload, removal and watch engines on
 * real directories. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/fd.h"
#include "base/text.h"
#include "check.h"
#include "guest/download.h"
#include "guest/entry.h"
#include "guest/gzip.h"
#include "guest/multipart.h"
#include "guest/path.h"
#include "guest/remove.h"
#include "guest/upload.h"
#include "guest/watch.h"

static char directory[64];

/* ---- paths ---- */

static void check_resolved(const char *asked, const char *workdir, const char *want)
{
	struct path p;
	struct error e;
	CHECK_INT(path_resolve(&p, asked, "/home/user", workdir, &e), 0);
	CHECK_STR(p.text, want);
}

static void test_paths_resolve(void)
{
	check_resolved("", NULL, "/home/user");
	check_resolved("", "/srv/work", "/srv/work");
	check_resolved("", "work", "/home/user/work");
	check_resolved("~", "/srv", "/home/user");
	check_resolved("~/a b", NULL, "/home/user/a b");
	check_resolved("a/./b//c/", NULL, "/home/user/a/b/c");
	check_resolved("../x", NULL, "/home/x");
	check_resolved("../../../../x", NULL, "/x");
	check_resolved("/", NULL, "/");
	check_resolved("///", NULL, "/");
	check_resolved("/a/../b", NULL, "/a/../b");
	check_resolved("..x", NULL, "/home/user/..x");
	check_resolved("-rf", NULL, "/home/user/-rf");
	check_resolved("/new\nline", NULL, "/new\nline");

	struct path p;
	struct error e;
	CHECK(path_resolve(&p, "~root/x", "/home/user", NULL, &e) < 0);
	CHECK_INT(e.code, ERROR_INVALID);
	CHECK_INT(path_resolve(&p, "/a/", "/", NULL, &e), 0);
	CHECK(p.wants_directory);

	char longest[PATH_BYTES_MAX + 2];
	memset(longest, 'a', sizeof(longest));
	longest[0] = '/';
	longest[PATH_BYTES_MAX - 1] = 0;
	CHECK_INT(path_resolve(&p, longest, "/", NULL, &e), 0);
	longest[PATH_BYTES_MAX - 1] = 'a';
	longest[PATH_BYTES_MAX] = 0;
	CHECK(path_resolve(&p, longest, "/", NULL, &e) < 0);
	CHECK_INT(e.code, ERROR_INVALID);
	CHECK(strstr(e.message, "ENAMETOOLONG") != NULL);
}

static void test_percent_decoding_is_exact(void)
{
	char to[8];
	CHECK_INT(path_percent_decode(to, sizeof(to), "a%2Fb", 5), 3);
	CHECK_STR(to, "a/b");
	CHECK_INT(path_percent_decode(to, sizeof(to), "%252F", 5), 3);
	CHECK_STR(to, "%2F");
	CHECK_INT(path_percent_decode(to, sizeof(to), "a+b", 3), 3);
	CHECK_STR(to, "a+b");
	CHECK_INT(path_percent_decode(to, sizeof(to), "%", 1), -EINVAL);
	CHECK_INT(path_percent_decode(to, sizeof(to), "%2", 2), -EINVAL);
	CHECK_INT(path_percent_decode(to, sizeof(to), "%2G", 3), -EINVAL);
	CHECK_INT(path_percent_decode(to, sizeof(to), "%00", 3), -EINVAL);
	CHECK_INT(path_percent_decode(to, sizeof(to), "12345678", 8), -ENAMETOOLONG);
}

static void test_displayed_paths_fit_and_are_text(void)
{
	char name[5000], shown[PATH_DISPLAY_BYTES];
	for (size_t size = 0; size < sizeof(name); size += 37) {
		for (size_t i = 0; i < size; i++)
			name[i] = "\xc3\xa4"[i % 2];
		name[size] = 0;
		path_display(shown, name);
		CHECK(strlen(shown) < sizeof(shown));
		CHECK(text_is_utf8(shown, strlen(shown)));
	}
	path_display(shown, "a\nb\x7f");
	CHECK_STR(shown, "a?b?");
	path_display(shown, "\xff.txt");
	CHECK_STR(shown, "?.txt");
}

/* ---- multipart ---- */

struct form {
	struct buf log;
	int fail_at;
};

static int form_begin(void *context, const struct multipart_part *part)
{
	struct form *f = context;
	if (f->fail_at == 1)
		return -ECANCELED;
	return buf_printf(&f->log, "<%s|%s|", part->name, part->has_filename ? part->filename : "-");
}

static int form_data(void *context, const void *data, size_t size)
{
	struct form *f = context;
	return buf_append(&f->log, data, size);
}

static int form_end(void *context)
{
	struct form *f = context;
	return buf_append_string(&f->log, ">");
}

/* Parses `body` in pieces of `step` bytes into f; 0 or the failure. */
static int parse_form(struct form *f, const char *type, const char *body, size_t size, size_t step)
{
	struct multipart *m = malloc(sizeof(*m));
	struct error e;
	struct multipart_callbacks callbacks = {form_begin, form_data, form_end, f};
	f->log.size = 0;
	CHECK_INT(multipart_init(m, type, &e), 0);
	int r = 0;
	for (size_t at = 0; at < size && r == 0; at += step)
		r = multipart_feed(m, body + at, MIN(step, size - at), &callbacks, &e);
	if (r == 0)
		r = multipart_finish(m, &e);
	free(m);
	return r;
}

#define TYPE "multipart/form-data; boundary=BOUND"
#define PART(disposition, data) "--BOUND\r\nContent-Disposition: form-data; " disposition "\r\n\r\n" data "\r\n"

static void check_form(const char *body, const char *want)
{
	struct form f = {.fail_at = 0};
	size_t size = strlen(body);
	for (size_t step = 1; step <= size; step++) {
		CHECK_INT(parse_form(&f, TYPE, body, size, step), 0);
		CHECK_STR(f.log.data, want);
	}
	buf_free(&f.log);
}

static void test_forms_parse_in_pieces_of_any_size(void)
{
	check_form(PART("name=\"file\"; filename=\"a.txt\"", "hello") "--BOUND--\r\n", "<file|a.txt|hello>");
	check_form(PART("name=\"file\"; filename=\"a\"", "") "--BOUND--", "<file|a|>");
	check_form("preamble\r\n" PART("name=x", "1")
	               PART("name=\"y\"", "2\r\n--BOUN\r\n-\r\r\n--BOUNd\r\r\n") "--BOUND--\r\n epilogue",
	           "<x|-|1><y|-|2\r\n--BOUN\r\n-\r\r\n--BOUNd\r\r\n>");
	check_form("--BOUND  \r\n\r\nno header\r\n--BOUND--", "<|-|no header>");
	check_form(PART("name=file; filename=\"/tmp/a \\\"b\\\" c\\d\"", "") "--BOUND--", "<file|/tmp/a \"b\" c\\d|>");
	check_form(PART("name=file; filename=\"q%22 cr%0D lf%0A tab%09 %41 %2F %\"", "") "--BOUND--",
	           "<file|q\" cr\r lf\n tab\t %41 %2F %|>");
	check_form(PART("name=file; filename=x; filename*=UTF-8''%E2%82%AC%2Fa", "") "--BOUND--", "<file|\xe2\x82\xac/a|>");
	check_form(PART("name=file; filename=\"\xf0\x9f\x98\x80;=\"", "x") "--BOUND--", "<file|\xf0\x9f\x98\x80;=|x>");
}

static void check_bad_form(const char *body)
{
	struct form f = {.fail_at = 0};
	size_t size = strlen(body);
	CHECK(parse_form(&f, TYPE, body, size, size) < 0);
	CHECK(parse_form(&f, TYPE, body, size, 1) < 0);
	buf_free(&f.log);
}

static void test_bad_forms_are_refused(void)
{
	check_bad_form("no boundary at all");
	check_bad_form(PART("name=file; filename=a", "cut"));
	check_bad_form("--BOUND\r\nContent-Disposition: form-data; name=file");
	check_bad_form("--BOUNDx\r\n\r\n\r\n--BOUND--");
	check_bad_form("--BOUND\r\nno colon\r\n\r\n\r\n--BOUND--");
	check_bad_form(PART("name=file; filename=\"unclosed", "") "--BOUND--");
	check_bad_form(PART("name=file; filename*=latin1''x", "") "--BOUND--");
	check_bad_form(PART("name=file; filename*=UTF-8''%00", "") "--BOUND--");
	check_bad_form("--BOUND\r\nContent-Transfer-Encoding: base64\r\n\r\neA==\r\n--BOUND--");

	struct multipart *m = malloc(sizeof(*m));
	struct error e;
	CHECK(multipart_init(m, "multipart/form-data", &e) < 0);
	CHECK(multipart_init(m, "multipart/form-data; boundary=\"\"", &e) < 0);
	CHECK(multipart_init(m,
	                     "multipart/form-data; boundary="
	                     "0123456789012345678901234567890123456789012345678901234567890123456789x",
	                     &e) < 0);
	CHECK_INT(multipart_init(m, "multipart/mixed; a=\"b;\"; boundary=\"x y\"", &e), 0);
	CHECK_INT(memcmp(m->delimiter, "\r\n--x y", 7), 0);

	/* Limits: header of one part, preamble, a failing callback. */
	struct form f = {.fail_at = 0};
	struct multipart_callbacks callbacks = {form_begin, form_data, form_end, &f};
	static char big[MULTIPART_PREAMBLE_BYTES_MAX + 1];
	memset(big, 'x', sizeof(big));
	CHECK_INT(multipart_init(m, TYPE, &e), 0);
	CHECK_INT(multipart_feed(m, "--BOUND\r\n", 9, &callbacks, &e), 0);
	CHECK(multipart_feed(m, big, MULTIPART_HEADER_BYTES_MAX + 1, &callbacks, &e) < 0);
	CHECK_INT(e.code, ERROR_TOO_LARGE);
	CHECK_INT(multipart_init(m, TYPE, &e), 0);
	CHECK(multipart_feed(m, big, sizeof(big), &callbacks, &e) < 0);
	f.fail_at = 1;
	CHECK_INT(parse_form(&f, TYPE, PART("name=a", "") "--BOUND--", strlen(PART("name=a", "") "--BOUND--"), 1),
	          -ECANCELED);
	buf_free(&f.log);
	free(m);
}

/* ---- gzip ---- */

static int append_to_buf(void *context, const void *data, size_t size)
{
	return buf_append(context, data, size);
}

static int inflate_in_steps(struct buf *out, const char *data, size_t size, size_t step)
{
	struct gzip *g = malloc(sizeof(*g));
	out->size = 0;
	CHECK_INT(gzip_open_decoder(g), 0);
	int r = 0;
	for (size_t at = 0; at < size && r == 0; at += step)
		r = gzip_feed(g, data + at, MIN(step, size - at), append_to_buf, out);
	if (r == 0)
		r = gzip_finish(g, append_to_buf, out);
	gzip_close(g);
	free(g);
	return r;
}

static void test_gzip_goes_both_ways(void)
{
	struct gzip *g = malloc(sizeof(*g));
	struct buf plain = {0}, packed = {0}, out = {0};
	for (int i = 0; i < 60000; i++)
		buf_printf(&plain, "%d zero zero ", i * 7919);
	CHECK_INT(gzip_open_encoder(g), 0);
	CHECK_INT(gzip_feed(g, plain.data, plain.size, append_to_buf, &packed), 0);
	CHECK_INT(gzip_finish(g, append_to_buf, &packed), 0);
	gzip_close(g);
	size_t member = packed.size;
	static const size_t steps[] = {1, 7, 4096, 1 << 20};
	for (size_t i = 0; i < ARRAY_SIZE(steps); i++) {
		CHECK_INT(inflate_in_steps(&out, packed.data, member, steps[i]), 0);
		CHECK(out.size == plain.size && memcmp(out.data, plain.data, out.size) == 0);
	}
	for (size_t cut = 0; cut < member; cut += 997)
		CHECK_INT(inflate_in_steps(&out, packed.data, cut, 512), -EBADMSG);
	/* Two members in a row are one stream; rubbish behind one is not. */
	struct buf twice = {0};
	buf_append(&twice, packed.data, member);
	buf_append(&twice, packed.data, member);
	CHECK_INT(inflate_in_steps(&out, twice.data, twice.size, 1000), 0);
	CHECK_INT(out.size, 2 * plain.size);
	buf_append_string(&twice, "rubbish");
	CHECK_INT(inflate_in_steps(&out, twice.data, twice.size, 1000), -EBADMSG);
	CHECK_INT(inflate_in_steps(&out, "plain text", 10, 3), -EBADMSG);
	packed.data[member / 2] = (char)~packed.data[member / 2];
	CHECK_INT(inflate_in_steps(&out, packed.data, member, 4096), -EBADMSG);
	buf_free(&plain);
	buf_free(&packed);
	buf_free(&twice);
	buf_free(&out);
	free(g);
}

/* ---- header values ---- */

static void check_range(const char *range, uint64_t size, enum download_range want, uint64_t from, uint64_t to)
{
	uint64_t got_from = 0, got_to = 0;
	CHECK_INT(download_parse_range(range, size, &got_from, &got_to), want);
	if (want == DOWNLOAD_PART) {
		CHECK_INT(got_from, from);
		CHECK_INT(got_to, to);
	}
}

static void test_ranges(void)
{
	check_range(NULL, 10, DOWNLOAD_WHOLE, 0, 0);
	check_range("bytes=0-0", 10, DOWNLOAD_PART, 0, 0);
	check_range("bytes=2-5", 10, DOWNLOAD_PART, 2, 5);
	check_range("bytes=2-", 10, DOWNLOAD_PART, 2, 9);
	check_range("bytes=2-99", 10, DOWNLOAD_PART, 2, 9);
	check_range("bytes=-3", 10, DOWNLOAD_PART, 7, 9);
	check_range("bytes=-99", 10, DOWNLOAD_PART, 0, 9);
	check_range("bytes=10-", 10, DOWNLOAD_UNSATISFIABLE, 0, 0);
	check_range("bytes=-0", 10, DOWNLOAD_UNSATISFIABLE, 0, 0);
	check_range("bytes=0-", 0, DOWNLOAD_UNSATISFIABLE, 0, 0);
	check_range("bytes=5-2", 10, DOWNLOAD_WHOLE, 0, 0);
	check_range("bytes=0-1,3-4", 10, DOWNLOAD_WHOLE, 0, 0);
	check_range("bytes=", 10, DOWNLOAD_WHOLE, 0, 0);
	check_range("bytes=a-b", 10, DOWNLOAD_WHOLE, 0, 0);
	check_range("lines=1-2", 10, DOWNLOAD_WHOLE, 0, 0);
	check_range("bytes=99999999999999999999999-", 10, DOWNLOAD_WHOLE, 0, 0);
	check_range("bytes=18446744073709551615-18446744073709551615", UINT64_MAX, DOWNLOAD_UNSATISFIABLE, 0, 0);
}

static void test_encodings(void)
{
	CHECK_INT(download_negotiate(NULL), DOWNLOAD_IDENTITY);
	CHECK_INT(download_negotiate("gzip"), DOWNLOAD_GZIP);
	CHECK_INT(download_negotiate("gzip;q=0"), DOWNLOAD_IDENTITY);
	CHECK_INT(download_negotiate("gzip, deflate, br"), DOWNLOAD_IDENTITY);
	CHECK_INT(download_negotiate("identity"), DOWNLOAD_IDENTITY);
	CHECK_INT(download_negotiate("identity;q=0, gzip;q=0.5"), DOWNLOAD_GZIP);
	CHECK_INT(download_negotiate("gzip;q=1.0, identity;q=0.5"), DOWNLOAD_GZIP);
	CHECK_INT(download_negotiate("gzip;q=0.3, identity;q=0.5"), DOWNLOAD_IDENTITY);
	CHECK_INT(download_negotiate("*;q=0"), DOWNLOAD_NOT_ACCEPTABLE);
	CHECK_INT(download_negotiate("br, identity;q=0"), DOWNLOAD_NOT_ACCEPTABLE);
	CHECK_INT(download_negotiate("*"), DOWNLOAD_IDENTITY);
	CHECK_INT(download_negotiate("identity;q=0, *"), DOWNLOAD_GZIP);
	CHECK(!download_identity_is_acceptable("gzip, *;q=0"));
	CHECK(download_identity_is_acceptable("gzip"));
}

static void check_disposition(const char *name, const char *want)
{
	CLEANUP_BUF struct buf b = {0};
	CHECK_INT(download_disposition(&b, name), 0);
	CHECK_STR(b.data, want);
}

static void test_names_in_headers_cannot_split_them(void)
{
	check_disposition("a.txt", "inline; filename=\"a.txt\"");
	check_disposition("a b;c", "inline; filename=\"a b;c\"");
	check_disposition("a\r\nSet-Cookie: x",
	                  "inline; filename=\"a__Set-Cookie: x\"; filename*=UTF-8''a%0D%0ASet-Cookie%3A%20x");
	check_disposition("\"q\"\\", "inline; filename=\"_q__\"; filename*=UTF-8''%22q%22%5C");
	check_disposition("\xe2\x82\xac", "inline; filename=\"___\"; filename*=UTF-8''%E2%82%AC");
	CHECK(download_etag_matches("\"a\", W/\"b\"", "\"b\"", 0));
	CHECK(!download_etag_matches("\"a\", W/\"b\"", "\"b\"", 1));
	CHECK(download_etag_matches("*", "\"b\"", 1));
	CHECK(!download_etag_matches("\"bb\"", "\"b\"", 1));
	char date[DOWNLOAD_DATE_BYTES];
	download_date(date, 784111777);
	CHECK_STR(date, "Sun, 06 Nov 1994 08:49:37 GMT"); /* RFC 9110's own example */
}

/* ---- entries ---- */

static void test_entries_are_json_whatever_the_name_is(void)
{
	CLEANUP_BUF struct buf b = {0};
	CHECK_INT(entry_append_string(&b, "a\"\\\n\xff\xc3\xa4\xed\xa0\x80", 10), 0);
	CHECK_STR(b.data, "\"a\\\"\\\\\\u000a\xef\xbf\xbd\xc3\xa4\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\"");
	b.size = 0;
	CHECK_INT(entry_append_bytes(&b, "name", "x\xff"), 0);
	CHECK_STR(b.data, "\"name\":\"x\xef\xbf\xbd\",\"nameBytes\":\"eP8=\"");
	char permissions[ENTRY_PERMISSIONS_BYTES];
	static const struct {
		mode_t mode;
		const char *want;
	} modes[] = {
	    {S_IFREG | 0644, "-rw-r--r--"},   {S_IFDIR | 0755, "drwxr-xr-x"},  {S_IFLNK | 0777, "Lrwxrwxrwx"},
	    {S_IFDIR | 01777, "dtrwxrwxrwx"}, {S_IFREG | 04755, "urwxr-xr-x"}, {S_IFCHR | 0666, "Dcrw-rw-rw-"},
	    {S_IFIFO | 0600, "prw-------"},
	};
	for (size_t i = 0; i < ARRAY_SIZE(modes); i++) {
		entry_permissions(permissions, modes[i].mode);
		CHECK_STR(permissions, modes[i].want);
	}
}

/* ---- engines ---- */

static void set_path(struct path *p, const char *name)
{
	struct error e;
	CHECK_INT(path_resolve(p, name, directory, NULL, &e), 0);
}

static void write_file(const char *name, const char *data)
{
	struct path p;
	set_path(&p, name);
	int fd = open(p.text, O_WRONLY | O_CREAT | O_TRUNC, 0644);
	CHECK(fd >= 0);
	CHECK_INT(fd_write_full(fd, data, strlen(data)), 0);
	close(fd);
}

static void check_file(const char *name, const char *want)
{
	struct path p;
	set_path(&p, name);
	char *data;
	size_t size;
	CHECK_INT(fd_read_file(AT_FDCWD, p.text, 1 << 20, &data, &size), 0);
	CHECK_STR(data, want);
	free(data);
}

static int upload(const char *name, int mode, const char *data, struct error *e)
{
	struct upload *u = malloc(sizeof(*u));
	struct path p;
	set_path(&p, name);
	int r = upload_begin(u, &p, mode, -1, e);
	if (r == 0)
		r = upload_write(u, data, strlen(data), e);
	if (r == 0)
		r = upload_commit(u, NULL, e);
	free(u);
	return r;
}

static void check_mode(const char *name, mode_t want)
{
	struct path p;
	struct stat st;
	set_path(&p, name);
	CHECK_INT(stat(p.text, &st), 0);
	CHECK_INT(st.st_mode & 07777, want);
}

static void test_uploads_replace_as_a_whole(void)
{
	struct error e = {0};
	mode_t mask = umask(077);
	CHECK_INT(upload("new/deep/file", UPLOAD_MODE_KEEP, "one", &e), 0);
	umask(mask);
	check_file("new/deep/file", "one");
	check_mode("new/deep/file", 0644);
	check_mode("new/deep", 0755);

	struct path p, link_path, hard;
	set_path(&p, "new/deep/file");
	CHECK_INT(chmod(p.text, 0750), 0);
	CHECK_INT(upload("new/deep/file", UPLOAD_MODE_KEEP, "second", &e), 0);
	check_mode("new/deep/file", 0750);
	CHECK_INT(upload("new/deep/file", 0600, "third", &e), 0);
	check_mode("new/deep/file", 0600);

	/* Through a link, also one that dangles; the link stays. */
	set_path(&link_path, "link");
	CHECK_INT(symlink("new/deep/file", link_path.text), 0);
	CHECK_INT(upload("link", UPLOAD_MODE_KEEP, "linked", &e), 0);
	check_file("new/deep/file", "linked");
	set_path(&link_path, "dangling");
	CHECK_INT(symlink("new/made", link_path.text), 0);
	CHECK_INT(upload("dangling", UPLOAD_MODE_KEEP, "made", &e), 0);
	check_file("new/made", "made");

	/* Hard links stay together. */
	set_path(&hard, "hard");
	CHECK_INT(link(p.text, hard.text), 0);
	CHECK_INT(upload("hard", UPLOAD_MODE_KEEP, "x", &e), 0);
	check_file("new/deep/file", "x");

	CHECK(upload("new/deep", UPLOAD_MODE_KEEP, "", &e) < 0);
	CHECK_INT(e.code, ERROR_INVALID);
	CHECK(upload("new/deep/file/below", UPLOAD_MODE_KEEP, "", &e) < 0);
	CHECK_INT(e.code, ERROR_INVALID);
	set_path(&p, "fifo");
	CHECK_INT(mkfifo(p.text, 0666), 0);
	CHECK(upload("fifo", UPLOAD_MODE_KEEP, "", &e) < 0);
	CHECK(strstr(e.message, "FIFO") != NULL);

	/* A broken-off one leaves nothing. */
	struct upload *u = malloc(sizeof(*u));
	set_path(&p, "hard");
	CHECK_INT(upload_begin(u, &p, UPLOAD_MODE_KEEP, -1, &e), 0);
	CHECK_INT(upload_write(u, "lost", 4, &e), 0);
	upload_abort(u);
	free(u);
	check_file("hard", "x");
}

static void test_removal_goes_below_path_max_and_stops_at_links(void)
{
	struct error e;
	char name[201];
	memset(name, 'd', sizeof(name) - 1);
	name[sizeof(name) - 1] = 0;
	CLEANUP_CLOSE int root = open(directory, O_PATH | O_DIRECTORY | O_CLOEXEC);
	int at = dup(root);
	for (int i = 0; i < 100; i++) {
		CHECK_INT(mkdirat(at, name, 0755), 0);
		int next = openat(at, name, O_PATH | O_DIRECTORY | O_CLOEXEC);
		CHECK(next >= 0);
		close(at);
		at = next;
	}
	write_file("kept", "kept");
	CHECK_INT(symlinkat(directory, at, "up"), 0);
	close(at);
	CHECK_INT(remove_tree(root, name, "deep", &e), 0);
	CHECK(faccessat(root, name, F_OK, 0) < 0);
	check_file("kept", "kept");
	CHECK_INT(remove_tree(root, "missing", "missing", &e), 0);
}

struct events {
	struct buf log;
};

static int log_event(void *context, enum watch_kind kind, const char *name)
{
	struct events *s = context;
	return buf_printf(&s->log, "%c:%s\n", "CWREMO"[kind], name);
}

/* Lets the watch report until nothing has come for a while. */
static int collect(struct watch *w, struct events *s)
{
	struct pollfd p = {.fd = watch_fd(w), .events = POLLIN};
	s->log.size = 0;
	CHECK_INT(buf_append_string(&s->log, "\n"), 0);
	int r = 0;
	while (r == 0 && poll(&p, 1, 100) > 0)
		r = watch_process(w, log_event, s);
	return r;
}

static size_t count_event(const struct events *s, const char *event)
{
	char line[256];
	snprintf(line, sizeof(line), "\n%s\n", event);
	size_t count = 0;
	for (const char *p = s->log.data; (p = strstr(p, line)); p++)
		count++;
	return count;
}

static void make_directory(const char *name)
{
	struct path p;
	set_path(&p, name);
	CHECK_INT(mkdir(p.text, 0755), 0);
}

static void move(const char *from, const char *to)
{
	struct path a, b;
	set_path(&a, from);
	set_path(&b, to);
	CHECK_INT(rename(a.text, b.text), 0);
}

static void test_watches_see_into_new_directories(void)
{
	struct error e;
	struct watch *w;
	struct events s = {{0}};
	struct path p;
	make_directory("w");
	make_directory("out");
	make_directory("out/x");
	write_file("out/x/f", "");
	set_path(&p, "w");
	int fd = open(p.text, O_PATH | O_DIRECTORY | O_CLOEXEC);
	CHECK_INT(watch_open(fd, p.text, 1, &w, &e), 0);
	close(fd);

	/* All of this happens before the first inner watch exists. */
	make_directory("w/a");
	make_directory("w/a/b");
	make_directory("w/a/b/c");
	write_file("w/a/b/c/f", "x");
	CHECK_INT(collect(w, &s), 0);
	CHECK_INT(count_event(&s, "C:a"), 1);
	CHECK_INT(count_event(&s, "C:a/b"), 1);
	CHECK_INT(count_event(&s, "C:a/b/c"), 1);
	CHECK_INT(count_event(&s, "C:a/b/c/f"), 1);

	write_file("w/a/b/c/f", "again");
	CHECK_INT(collect(w, &s), 0);
	CHECK(count_event(&s, "W:a/b/c/f") >= 1);

	/* In, inside, out. */
	move("out/x", "w/x");
	CHECK_INT(collect(w, &s), 0);
	CHECK_INT(count_event(&s, "C:x"), 1);
	CHECK_INT(count_event(&s, "C:x/f"), 1);
	move("w/x", "w/a/y");
	CHECK_INT(collect(w, &s), 0);
	CHECK_INT(count_event(&s, "E:x"), 1);
	CHECK_INT(count_event(&s, "C:a/y"), 1);
	write_file("w/a/y/g", "");
	CHECK_INT(collect(w, &s), 0);
	CHECK_INT(count_event(&s, "C:a/y/g"), 1);
	move("w/a/y", "out/y");
	CHECK_INT(collect(w, &s), 0);
	CHECK_INT(count_event(&s, "E:a/y"), 1);
	write_file("out/y/h", "");
	CHECK_INT(collect(w, &s), 0);
	CHECK_STR(s.log.data, "\n");

	/* Uploads look like what they mean. */
	CHECK_INT(upload("w/up", UPLOAD_MODE_KEEP, "1", &e), 0);
	CHECK_INT(collect(w, &s), 0);
	CHECK_STR(s.log.data, "\nC:up\nW:up\n");
	CHECK_INT(upload("w/up", UPLOAD_MODE_KEEP, "2", &e), 0);
	CHECK_INT(collect(w, &s), 0);
	CHECK_STR(s.log.data, "\nW:up\n");

	CLEANUP_CLOSE int root = open(directory, O_PATH | O_DIRECTORY | O_CLOEXEC);
	CHECK_INT(remove_tree(root, "w", "w", &e), 0);
	CHECK_INT(collect(w, &s), 1);
	CHECK_INT(count_event(&s, "R:a/b/c/f"), 1);
	CHECK_INT(count_event(&s, "R:."), 1);
	watch_close(w);
	buf_free(&s.log);
}

static void test_plain_watches_do_not_look_inside(void)
{
	struct error e;
	struct watch *w;
	struct events s = {{0}};
	make_directory("flat");
	make_directory("flat/sub");
	struct path p;
	set_path(&p, "flat");
	int fd = open(p.text, O_PATH | O_DIRECTORY | O_CLOEXEC);
	CHECK_INT(watch_open(fd, p.text, 0, &w, &e), 0);
	close(fd);
	write_file("flat/sub/f", "x");
	make_directory("flat/new");
	write_file("flat/new/f", "x");
	CHECK_INT(collect(w, &s), 0);
	CHECK_STR(s.log.data, "\nC:new\n");
	move("flat", "flat2");
	CHECK_INT(collect(w, &s), 1);
	CHECK_STR(s.log.data, "\nE:.\n");
	watch_close(w);
	buf_free(&s.log);
}

int main(void)
{
	test_paths_resolve();
	test_percent_decoding_is_exact();
	test_displayed_paths_fit_and_are_text();
	test_forms_parse_in_pieces_of_any_size();
	test_bad_forms_are_refused();
	test_gzip_goes_both_ways();
	test_ranges();
	test_encodings();
	test_names_in_headers_cannot_split_them();
	test_entries_are_json_whatever_the_name_is();

	CHECK_INT(text_copy(directory, sizeof(directory), "/tmp/space-guest-files-XXXXXX"), 0);
	CHECK(mkdtemp(directory) != NULL);
	test_uploads_replace_as_a_whole();
	test_removal_goes_below_path_max_and_stops_at_links();
	test_watches_see_into_new_directories();
	test_plain_watches_do_not_look_inside();
	struct error e;
	CLEANUP_CLOSE int parent = open("/tmp", O_PATH | O_DIRECTORY | O_CLOEXEC);
	CHECK_INT(remove_tree(parent, path_name(directory), directory, &e), 0);
	return 0;
}
