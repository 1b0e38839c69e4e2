/*
 * Folders travel as one tar stream through the guest's own tar, run as the user asked for: rights, quotas and owners
 * are the guest's business. The other end of the archive is ours: tar_pack.c writes it, tar_extract.c takes it apart
 * with the distrust that a guest deserves.
 */
#include "cli/remote_file.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/text.h"
#include "cli/exec_stream.h"
#include "cli/progress.h"
#include "cli/signals.h"
#include "cli/tar_extract.h"
#include "cli/tar_pack.h"

#define MESSAGE_BYTES 600
#define COPY_BYTES (128 * 1024)

struct copy {
	struct tar_pack *pack;
	struct tar_extract *extract;
	struct progress progress;
	char message[MESSAGE_BYTES]; /* what tar said on stderr */
	size_t message_size;
	struct error error; /* of our side of the archive */
};

int remote_file_stat(struct api *api, const struct remote_place *place, struct remote_stat *ret, struct error *e)
{
	memset(ret, 0, sizeof(*ret));
	json_t *answer;
	json_t *body = json_pack("{s:s}", "path", place->path);
	if (!body)
		return error_set(e, ERROR_INVALID, "the path is not UTF-8");
	int r = api_agent_call(api, place->session, "filesystem.Filesystem/Stat", place->user, body, &answer, e);
	json_decref(body);
	if (r < 0) {
		/* A session that does not exist is "not found" as well, but that is not the agent who says so. */
		if (e->code == ERROR_NOT_FOUND && api_is_from_guest())
			return 0;
		return r;
	}
	const json_t *entry = json_object_get(answer, "entry");
	const char *type = json_string_value(json_object_get(entry, "type"));
	const char *path = json_string_value(json_object_get(entry, "path"));
	const char *target = json_string_value(json_object_get(entry, "symlinkTarget"));
	const json_t *size = json_object_get(entry, "size");
	ret->exists = 1;
	ret->is_directory = type && strcmp(type, "FILE_TYPE_DIRECTORY") == 0;
	ret->is_file = type && strcmp(type, "FILE_TYPE_FILE") == 0;
	if (json_is_string(size))
		text_parse_u64(json_string_value(size), INT64_MAX, &ret->size);
	else
		ret->size = (uint64_t)json_integer_value(size);
	if (target && target[0] == '/' && (ret->is_directory || ret->is_file))
		path = target;
	if (!path || text_copy(ret->path, sizeof(ret->path), path) < 0)
		r = error_set(e, ERROR_INTERNAL, "the guest did not say where \"%s\" is", place->path);
	json_decref(answer);
	return r;
}

int remote_file_make_directory(struct api *api, const struct remote_place *place, struct error *e)
{
	json_t *body = json_pack("{s:s}", "path", place->path);
	if (!body)
		return error_set(e, ERROR_INVALID, "the path is not UTF-8");
	int r = api_agent_call(api, place->session, "filesystem.Filesystem/MakeDir", place->user, body, NULL, e);
	json_decref(body);
	/* Somebody else may have made it in between. */
	return r < 0 && e->code == ERROR_EXISTS ? 0 : r;
}

static ssize_t give_archive(void *context, void *data, size_t size, int stop_fd)
{
	struct copy *copy = context;
	ssize_t n = tar_pack_read(copy->pack, data, size);
	progress_update(&copy->progress, tar_pack_done(copy->pack));
	return n;
}

static void keep_message(struct copy *copy, const char *data, size_t size)
{
	size_t n = MIN(size, sizeof(copy->message) - 1 - copy->message_size);
	memcpy(copy->message + copy->message_size, data, n);
	copy->message_size += n;
	copy->message[copy->message_size] = '\0';
}

static int take_archive(void *context, enum event_scan_channel channel, const void *data, size_t size,
                        const struct event_scan_event *raw)
{
	struct copy *copy = context;
	if (channel == EVENT_SCAN_STDERR) {
		keep_message(copy, data, size);
		return 0;
	}
	if (!copy->extract)
		return 0;
	if (tar_extract_feed(copy->extract, data, size, &copy->error) < 0)
		return -ECANCELED;
	progress_update(&copy->progress, tar_extract_done(copy->extract));
	return 0;
}

/* One line of what tar said, for the error message. */
static void tidy_message(char *message)
{
	size_t size = strcspn(message, "\n");
	message[size] = '\0';
}

static int run_tar(struct api *api, const struct remote_place *place, const char *const *argv, struct copy *copy,
                   struct remote_summary *ret, struct error *e)
{
	struct exec_stream_request request = {.session = place->session, .user = place->user, .argv = argv};
	struct exec_stream_handlers handlers = {
	    .output = take_archive, .input = copy->pack ? give_archive : NULL, .context = copy};
	struct exec_stream_result result;
	signals_start();
	int r = exec_stream_run(api, &request, &handlers, &result, e);
	ret->interrupted = result.interrupted ? result.interrupted : result.forwarded;
	if (copy->error.code) {
		*e = copy->error;
		return error_code_errno(e->code);
	}
	if (r < 0)
		return result.exit_status == 127 ? error_set(e, ERROR_UNSUPPORTED, "there is no tar in the guest") : r;
	if (ret->interrupted)
		return error_set(e, ERROR_CANCELED, "interrupted");
	tidy_message(copy->message);
	if (result.signal)
		return error_set(e, ERROR_CANCELED, "tar in the guest was ended by signal %d", result.signal);
	if (result.exit_status)
		return error_set(e, strstr(copy->message, "No space left") ? ERROR_NO_SPACE : ERROR_INVALID,
		                 "tar in the guest ended with %d: %s", result.exit_status, copy->message);
	return 0;
}

int remote_file_upload(struct api *api, const struct remote_place *place, const char *parent, const char *local,
                       const char *name, int progress, struct remote_summary *ret, struct error *e)
{
	struct copy copy = {0};
	memset(ret, 0, sizeof(*ret));
	int r = tar_pack_new(local, name, &copy.pack, e);
	if (r < 0)
		return r;
	/* -o: the files belong to whom the copy runs as, not to the numbers in the archive. */
	const char *const argv[] = {"tar", "-x", "-p", "-o", "-f", "-", "-C", parent, NULL};
	progress_start(&copy.progress, name, tar_pack_total(copy.pack), progress);
	r = run_tar(api, place, argv, &copy, ret, e);
	progress_end(&copy.progress, tar_pack_done(copy.pack), r < 0);
	const char *problem;
	ret->bytes = tar_pack_done(copy.pack);
	ret->entries = tar_pack_entries(copy.pack);
	ret->skipped = tar_pack_problems(copy.pack, &problem);
	snprintf(ret->problem, sizeof(ret->problem), "%s", problem);
	tar_pack_free(copy.pack);
	return r;
}

int remote_file_download(struct api *api, const struct remote_place *place, const char *parent, const char *base,
                         int directory, const char *name, uint64_t total, int progress, struct remote_summary *ret,
                         struct error *e)
{
	struct copy copy = {0};
	char member[PATH_MAX + 3];
	memset(ret, 0, sizeof(*ret));
	snprintf(member, sizeof(member), "./%s", base);
	int r = tar_extract_new(directory, base, name, &copy.extract, e);
	if (r < 0)
		return r;
	const char *const argv[] = {"tar",  "-c", "--format=posix", "--hard-dereference", "-f", "-", "-C", parent, "--",
	                            member, NULL};
	progress_start(&copy.progress, base, total, progress);
	r = run_tar(api, place, argv, &copy, ret, e);
	if (r == 0)
		r = tar_extract_finish(copy.extract, e);
	progress_end(&copy.progress, tar_extract_done(copy.extract), r < 0);
	ret->bytes = tar_extract_done(copy.extract);
	ret->entries = tar_extract_entries(copy.extract);
	ret->skipped = tar_extract_skipped(copy.extract);
	if (ret->skipped)
		snprintf(ret->problem, sizeof(ret->problem), "devices and FIFOs are not copied");
	tar_extract_free(copy.extract);
	return r;
}

static char *files_target(const struct remote_place *place)
{
	CLEANUP_BUF struct buf query = {0};
	if (buf_append_string(&query, "/agent/files?path=") < 0 || api_escape(&query, place->path) < 0)
		abort();
	return api_session_path(place->session, query.data);
}

static int send_stdin(struct http_client *client, char *buffer, struct remote_summary *ret, struct error *e)
{
	for (;;) {
		ssize_t n = read(STDIN_FILENO, buffer, COPY_BYTES);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return error_set_errno(e, errno, "standard input");
		if (n == 0)
			return http_client_finish_body(client, e);
		int r = http_client_write(client, buffer, (size_t)n, e);
		if (r < 0)
			return r;
		ret->bytes += (uint64_t)n;
	}
}

int remote_file_put_stdin(struct api *api, const struct remote_place *place, struct remote_summary *ret,
                          struct error *e)
{
	memset(ret, 0, sizeof(*ret));
	CLEANUP_FREE char *target = files_target(place);
	CLEANUP_FREE char *buffer = malloc(COPY_BYTES);
	struct api_stream_call call = {
	    .method = "POST",
	    .target = target,
	    .user = place->user,
	    .content_type = "application/octet-stream",
	    .stream_body = 1,
	};
	struct http_client *client;
	if (!buffer)
		return error_set_errno(e, ENOMEM, "copying");
	int r = api_stream(api, &call, &client, e);
	if (r < 0)
		return r;
	struct error answer;
	int sent = send_stdin(client, buffer, ret, e);
	/* A server that refuses says why, also when it no longer takes the body; that is the better message. Only a failure
	 * of our own input keeps its own: the body must then not be ended, or half a file would count as a whole one. */
	if (sent == 0 || sent == -EPIPE || sent == -ECONNRESET || sent == -ECONNREFUSED) {
		r = api_stream_head(client, &answer);
		if (r < 0 && (sent == 0 || !api_is_connection_error(&answer)))
			*e = answer;
		else if (sent < 0)
			r = sent;
	} else {
		r = sent;
	}
	ret->entries = r == 0;
	http_client_free(client);
	return r;
}

int remote_file_get_stdout(struct api *api, const struct remote_place *place, struct remote_summary *ret,
                           struct error *e)
{
	memset(ret, 0, sizeof(*ret));
	CLEANUP_FREE char *target = files_target(place);
	CLEANUP_FREE char *buffer = malloc(COPY_BYTES);
	struct api_stream_call call = {.method = "GET", .target = target, .user = place->user, .accept = "*/*"};
	struct http_client *client;
	if (!buffer)
		return error_set_errno(e, ENOMEM, "copying");
	int r = api_stream(api, &call, &client, e);
	if (r < 0)
		return r;
	for (;;) {
		ssize_t n = http_client_read(client, buffer, COPY_BYTES, e);
		if (n <= 0) {
			r = (int)n;
			break;
		}
		r = fd_write_full(STDOUT_FILENO, buffer, (size_t)n);
		if (r < 0) {
			error_set_errno(e, r, "standard output");
			break;
		}
		ret->bytes += (uint64_t)n;
	}
	ret->entries = r == 0;
	http_client_free(client);
	return r;
}
