/*
 * Arguments, environment and working directory of a new process.
 *
 * Order of the environment: PATH, HOME, USER, LOGNAME, SHELL (and TERM on a terminal), then what the host or /init set,
 * then what the call brings; the last one wins and no name occurs twice.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/text.h"
#include "guest/identity.h"
#include "guest/process.h"

#define ENVIRONMENT_PATH "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

static int set_text(json_t *all, const char *name, const char *value)
{
	/* A home directory or shell that is not UTF-8 cannot be told in JSON; such users get none. */
	json_t *text = json_string(value);
	return text ? json_object_set_new(all, name, text) : 0;
}

static json_t *merge(const struct process_request *request)
{
	json_t *all = json_object();
	json_t *own = identity_environment();
	int r = all ? 0 : -1;
	r |= set_text(all, "PATH", ENVIRONMENT_PATH);
	r |= set_text(all, "HOME", request->user->home);
	r |= set_text(all, "USER", request->user->name);
	r |= set_text(all, "LOGNAME", request->user->name);
	r |= set_text(all, "SHELL", request->user->shell);
	if (request->is_terminal)
		r |= set_text(all, "TERM", "xterm-256color");
	if (own)
		r |= json_object_update(all, own);
	if (request->environment)
		r |= json_object_update(all, request->environment);
	json_decref(own);
	if (r) {
		json_decref(all);
		return NULL;
	}
	return all;
}

static int append_argument(struct buf *b, const char *text, size_t size)
{
	return buf_append(b, text, size + 1);
}

static int build_storage(const struct process_request *request, json_t *all, struct buf *b)
{
	size_t i;
	const char *name;
	json_t *value;
	int r = append_argument(b, request->program, strlen(request->program));
	json_array_foreach(request->arguments, i, value)
	{
		if (r == 0)
			r = append_argument(b, json_string_value(value), json_string_length(value));
	}
	json_object_foreach(all, name, value)
	{
		if (r == 0)
			r = buf_append_string(b, name);
		if (r == 0)
			r = buf_append(b, "=", 1);
		if (r == 0)
			r = append_argument(b, json_string_value(value), json_string_length(value));
	}
	return r;
}

int environment_build(const struct process_request *request, struct process_vectors *ret, struct error *e)
{
	struct buf storage = {0};
	json_t *all = merge(request);
	size_t argc = 1 + json_array_size(request->arguments);
	size_t envc = json_object_size(all);
	char **vector = calloc(2 + argc + 1 + envc + 1, sizeof(*vector));
	if (!all || !vector || build_storage(request, all, &storage) < 0) {
		json_decref(all);
		free(vector);
		buf_free(&storage);
		return error_set(e, ERROR_EXHAUSTED, "out of memory");
	}
	json_decref(all);
	memset(ret, 0, sizeof(*ret));
	ret->storage = storage.data;
	ret->argv = vector + 2;
	ret->envp = ret->argv + argc + 1;
	char *p = storage.data;
	for (size_t i = 0; i < argc; i++, p += strlen(p) + 1)
		ret->argv[i] = p;
	for (size_t i = 0; i < envc; i++, p += strlen(p) + 1) {
		ret->envp[i] = p;
		if (strncmp(p, "PATH=", 5) == 0)
			ret->search = p + 5;
	}
	return 0;
}

void environment_free(struct process_vectors *v)
{
	if (v->argv)
		free(v->argv - 2);
	free(v->storage);
	memset(v, 0, sizeof(*v));
}

int environment_workdir(const struct process_request *request, char *to, size_t size, int *ret_optional,
                        struct error *e)
{
	CLEANUP_FREE char *fallback = NULL;
	const char *path = request->workdir;
	const char *home = request->user->home;
	*ret_optional = 0;
	if (!path || !*path) {
		fallback = identity_default_workdir();
		path = fallback ? fallback : "";
		*ret_optional = 1;
	}
	int r;
	if (path[0] == '/')
		r = text_copy(to, size, path);
	else if (path[0] == '\0' || strcmp(path, "~") == 0)
		r = text_copy(to, size, home);
	else if (strncmp(path, "~/", 2) == 0)
		r = text_format(to, size, "%s/%s", home, path + 2);
	else if (path[0] == '~')
		return error_set(e, ERROR_INVALID, "cwd '%.200s': only one's own home directory can be written as ~", path);
	else
		r = text_format(to, size, "%s/%s", home, path);
	return r < 0 ? error_set(e, ERROR_INVALID, "cwd '%.200s…' is too long", path) : 0;
}
