#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "base/text.h"
#include "cli/verbs.h"

#define PATH_BYTES 4096

/* spaced beside this program, as build and installation put it, before one found in PATH. */
static void own_path(char *to, size_t size)
{
	ssize_t n = readlink("/proc/self/exe", to, size - sizeof("spaced"));
	char *slash = n > 0 ? (to[n] = '\0', strrchr(to, '/')) : NULL;
	if (slash)
		memcpy(slash + 1, "spaced", sizeof("spaced"));
	else
		*to = '\0';
}

static int run(struct verb_call *call)
{
	char path[PATH_BYTES];
	struct error e;
	char **argv = calloc(call->rest_count + 2, sizeof(*argv));
	if (!argv)
		abort();
	own_path(path, sizeof(path));
	argv[0] = *path && access(path, X_OK) == 0 ? path : strdup("spaced");
	for (size_t i = 0; i < call->rest_count; i++)
		argv[i + 1] = (char *)(uintptr_t)call->rest[i];
	if (argv[0] == path)
		execv(path, argv);
	else
		execvp("spaced", argv);
	error_set_errno(&e, errno, "%s", argv[0]);
	return output_error(&e, "build it with: make build", "cannot start spaced");
}

const struct verb verb_serve = {
    .name = "serve",
    .group = VERB_HOST,
    .summary = "run the daemon in the foreground",
    .arguments = "[OPTION OF spaced…]",
    .description = "All words go to spaced(8). make up runs it as a service.",
    .examples = "space serve\nspace serve --data-dir /srv/space --listen none",
    .is_raw = 1,
    .run = run,
};
