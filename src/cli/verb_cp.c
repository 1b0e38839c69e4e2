#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/text.h"
#include "cli/remote_file.h"
#include "cli/verbs.h"

static const char *user;
static int quiet;
static int recursive;

static const struct options_entry entries[] = {
    {'u', "user", OPTIONS_STRING, &user, "NAME", "as this user of the guest", NULL},
    {'q', "quiet", OPTIONS_FLAG, &quiet, NULL, "no progress bar", NULL},
    {'r', "recursive", OPTIONS_FLAG, &recursive, NULL, "accepted for habit's sake; folders are always copied whole",
     NULL},
    {0},
};

/* ID:/path, where no slash stands before the colon. Returns the colon or NULL for a local name. */
static const char *remote_colon(const char *word)
{
	const char *colon = strchr(word, ':');
	const char *slash = strchr(word, '/');
	return colon && colon != word && (!slash || slash > colon) ? colon : NULL;
}

/* The last component ("a/b/" gives "b") into `to`. */
static int last_component(const char *path, char *to, size_t size)
{
	size_t end = strlen(path);
	while (end && path[end - 1] == '/')
		end--;
	size_t start = end;
	while (start && path[start - 1] != '/')
		start--;
	if (start == end || end - start >= size)
		return -EINVAL;
	memcpy(to, path + start, end - start);
	to[end - start] = '\0';
	return 0;
}

/* Everything before the last component; "." if there is nothing. */
static int parent_of(const char *path, char *to, size_t size)
{
	size_t end = strlen(path);
	while (end > 1 && path[end - 1] == '/')
		end--;
	while (end && path[end - 1] != '/')
		end--;
	while (end > 1 && path[end - 1] == '/')
		end--;
	if (end >= size)
		return -ENAMETOOLONG;
	memcpy(to, end ? path : ".", end ? end : 1);
	to[end ? end : 1] = '\0';
	return 0;
}

/* "." and ".." have no name of their own: the folder's real one is what cp(1) users mean. */
static int local_name(const char *path, char *to, size_t size, struct error *e)
{
	char real[PATH_MAX];
	const char *named = path;
	int r = last_component(path, to, size);
	if (r == 0 && strcmp(to, ".") != 0 && strcmp(to, "..") != 0)
		return 0;
	if (realpath(path, real))
		named = real;
	if (last_component(named, to, size) < 0)
		return error_set(e, ERROR_INVALID, "\"%s\" has no name to copy it under", path);
	return 0;
}

/* Where in the guest the copy goes: an existing directory takes it under its own name, else the last component is the
 * new name. */
static int upload_target(struct api *api, const struct remote_place *place, const char *own_name, int is_directory,
                         char *parent, char *name, size_t size, struct error *e)
{
	struct remote_stat st;
	char path[PATH_MAX];
	int r = remote_file_stat(api, place, &st, e);
	if (r < 0)
		return r;
	int wants_directory = text_ends_with(place->path, "/");
	if (st.exists && !st.is_directory && (is_directory || wants_directory))
		return error_set(e, ERROR_INVALID, "%s is not a directory", st.path);
	if (st.is_directory)
		return text_copy(parent, size, st.path) < 0 || text_copy(name, size, own_name) < 0
		           ? error_set_errno(e, ENAMETOOLONG, "%s", st.path)
		           : 0;
	struct remote_place above = {.session = place->session, .user = place->user, .path = path};
	if (wants_directory && !is_directory)
		r = text_copy(path, sizeof(path), place->path);
	else
		r = parent_of(st.exists ? st.path : place->path, path, sizeof(path));
	if (r < 0 || (wants_directory && !is_directory ? text_copy(name, size, own_name)
	                                               : last_component(place->path, name, size)) < 0)
		return error_set(e, ERROR_INVALID, "\"%s\" is no name to copy to", place->path);
	r = remote_file_stat(api, &above, &st, e);
	if (r == 0 && !st.exists) {
		r = remote_file_make_directory(api, &above, e);
		if (r == 0)
			r = remote_file_stat(api, &above, &st, e);
	}
	if (r == 0 && !st.is_directory)
		r = error_set(e, ERROR_NOT_FOUND, "%s is not a directory", path);
	if (r == 0 && text_copy(parent, size, st.path) < 0)
		r = error_set_errno(e, ENAMETOOLONG, "%s", st.path);
	return r;
}

static int upload(struct api *api, const char *local, const struct remote_place *place, struct remote_summary *ret,
                  struct error *e)
{
	char own_name[PATH_MAX];
	char parent[PATH_MAX];
	char name[PATH_MAX];
	struct stat st;
	if (strcmp(local, "-") == 0)
		return remote_file_put_stdin(api, place, ret, e);
	if (stat(local, &st) < 0)
		return error_set_errno(e, errno, "%s", local);
	int r = local_name(local, own_name, sizeof(own_name), e);
	if (r == 0)
		r = upload_target(api, place, own_name, S_ISDIR(st.st_mode), parent, name, sizeof(parent), e);
	if (r < 0)
		return r;
	return remote_file_upload(api, place, parent, local, name, !quiet, ret, e);
}

/* The same rule on this side. Returns a descriptor of the directory to write into. */
static int open_target(const char *local, const char *own_name, int is_directory, char *name, size_t size,
                       struct error *e)
{
	struct stat st;
	char parent[PATH_MAX];
	int exists = stat(local, &st) == 0;
	int wants_directory = text_ends_with(local, "/");
	if (exists && !S_ISDIR(st.st_mode) && (is_directory || wants_directory))
		return error_set(e, ERROR_INVALID, "%s is not a directory", local);
	if (!exists && wants_directory && !is_directory)
		return error_set(e, ERROR_NOT_FOUND, "there is no directory %s", local);
	int into = exists && S_ISDIR(st.st_mode);
	int r = into ? text_copy(parent, sizeof(parent), local) : parent_of(local, parent, sizeof(parent));
	if (r == 0)
		r = into ? text_copy(name, size, own_name) : last_component(local, name, size);
	if (r < 0)
		return error_set(e, ERROR_INVALID, "\"%s\" is no name to copy to", local);
	int fd = open(parent, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	return fd < 0 ? error_set_errno(e, errno, "%s", parent) : fd;
}

static int download(struct api *api, const struct remote_place *place, const char *local, struct remote_summary *ret,
                    struct error *e)
{
	struct remote_stat st;
	char parent[PATH_MAX];
	char base[PATH_MAX];
	char own_name[PATH_MAX];
	char name[PATH_MAX];
	int r = remote_file_stat(api, place, &st, e);
	if (r < 0)
		return r;
	if (!st.exists)
		return error_set(e, ERROR_NOT_FOUND, "there is no \"%s\" in %s", place->path, place->session);
	if (strcmp(local, "-") == 0) {
		if (st.is_directory)
			return error_set(e, ERROR_INVALID, "%s is a directory; only a file can go to standard output", st.path);
		return remote_file_get_stdout(api, place, ret, e);
	}
	if (!st.is_directory && !st.is_file)
		return error_set(e, ERROR_INVALID, "%s is neither a file nor a directory", st.path);
	if (last_component(st.path, base, sizeof(base)) < 0)
		return error_set(e, ERROR_INVALID, "\"%s\" cannot be copied as a whole; name a directory in it", st.path);
	/* Under the name that was typed, even where a link led elsewhere. */
	if (last_component(place->path, own_name, sizeof(own_name)) < 0 || strcmp(own_name, ".") == 0 ||
	    strcmp(own_name, "..") == 0 || strcmp(own_name, "~") == 0)
		memcpy(own_name, base, sizeof(own_name));
	CLEANUP_CLOSE int directory = open_target(local, own_name, st.is_directory, name, sizeof(name), e);
	if (directory < 0)
		return directory;
	parent_of(st.path, parent, sizeof(parent));
	return remote_file_download(api, place, parent, base, directory, name, st.is_file ? st.size : 0, !quiet, ret, e);
}

static int report(const struct remote_summary *summary, const char *source, const char *target)
{
	if (output.json) {
		json_t *answer = json_pack("{s:s, s:s, s:I, s:I, s:I}", "source", source, "target", target, "bytes",
		                           (json_int_t)summary->bytes, "entries", (json_int_t)summary->entries, "skipped",
		                           (json_int_t)summary->skipped);
		/* With "-" as target stdout is the file. */
		if (strcmp(target, "-") != 0)
			output_json(answer);
		json_decref(answer);
	}
	if (summary->skipped)
		output_note("%zu of the files were not copied as they are; the first: %s", summary->skipped, summary->problem);
	return output_finish(summary->skipped ? OUTPUT_EXIT_FAILURE : 0);
}

static int run(struct verb_call *call)
{
	struct error e;
	const char *source = call->args[0];
	const char *target = call->args[1];
	const char *from_colon = remote_colon(source);
	const char *to_colon = remote_colon(target);
	if (!from_colon == !to_colon) {
		error_set(&e, ERROR_INVALID,
		          from_colon ? "both sides are in sessions; copy through a local file or a pipe of two cp with -"
		                     : "one side must be in a session: ID:/path");
		return output_error(&e, "space help cp", "cp");
	}
	const char *colon = from_colon ? from_colon : to_colon;
	const char *remote = from_colon ? source : target;
	CLEANUP_FREE char *session = strndup(remote, (size_t)(colon - remote));
	struct remote_place place = {.session = session, .user = user, .path = colon[1] ? colon + 1 : "."};
	struct remote_summary summary = {0};
	if (!session)
		abort();
	int r = from_colon ? download(call->api, &place, target, &summary, &e)
	                   : upload(call->api, source, &place, &summary, &e);
	if (r < 0) {
		int status = verb_fail(call, &e, "file", "cannot copy %s to %s", source, target);
		return summary.interrupted ? 128 + summary.interrupted : status;
	}
	return report(&summary, source, target);
}

const struct verb verb_cp = {
    .name = "cp",
    .group = VERB_COMMANDS,
    .summary = "copy files and folders into or out of a session",
    .arguments = "SRC DST",
    .description = "One side is ID:PATH; relative paths there start in the user's home. An existing\n"
                   "directory takes the copy under its own name, as with cp(1); missing parents in the\n"
                   "session are made. Modes, times, symbolic links and empty directories are kept;\n"
                   "owners are not, nor set-user-id bits on the way out. - is stdin or stdout.",
    .examples = "space cp src web:/srv/app\nspace cp web:/var/log/app.log .\n"
                "pg_dump shop | space cp - db:/tmp/shop.sql\nspace cp web:report.pdf - >report.pdf",
    .options = entries,
    .args_min = 2,
    .args_max = 2,
    .run = run,
};
