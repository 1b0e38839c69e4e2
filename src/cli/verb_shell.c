#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/command.h"
#include "cli/signals.h"
#include "cli/verbs.h"

static struct command_options options;
static int no_escape;

static const struct options_entry entries[] = {
    COMMAND_OPTIONS(options),
    {0, "no-escape", OPTIONS_FLAG, &no_escape, NULL, "do not look for ~. at the start of a line", NULL},
    {0},
};

/* The account's own shell as the agent has it in SHELL, else the best one that is there. */
static const char *const login_shell[] = {
    "/bin/sh", "-c",
    "for s in \"$SHELL\" /bin/bash /bin/sh; do [ -n \"$s\" ] && [ -x \"$s\" ] && exec \"$s\" -l; done; exit 127", NULL};

static int run(struct verb_call *call)
{
	static const char *const passed[] = {"TERM", "COLORTERM", "LANG"};
	struct error e;
	if (output.json) {
		error_set(&e, ERROR_INVALID, "a terminal session has no machine-readable form");
		return output_error(&e, "use: space exec --json ID -- CMD", "shell");
	}
	/* The terminal is here, so its type counts there as well; -e wins because it stands later. */
	const char *items[OPTIONS_LIST_MAX + ARRAY_SIZE(passed)];
	struct options_list environment = {.items = items};
	for (size_t i = 0; i < ARRAY_SIZE(passed); i++)
		if (getenv(passed[i]))
			items[environment.count++] = passed[i];
	for (size_t i = 0; i < options.environment.count; i++)
		items[environment.count++] = options.environment.items[i];
	free(options.environment.items);
	options.environment = environment;
	options.tty = 1;
	options.escape = !no_escape && isatty(STDIN_FILENO) == 1;
	signals_start();
	return command_run(call, call->args[0], call->rest_count ? call->rest : login_shell, &options, 0, NULL);
}

const struct verb verb_shell = {
    .name = "shell",
    .group = VERB_COMMANDS,
    .summary = "open a terminal in a session",
    .arguments = "ID [-- CMD [ARG…]]",
    .description = "A login shell (or CMD) on a terminal of its own in the guest; the size follows\n"
                   "yours. Type ~. at the start of a line to hang up.",
    .examples = "space shell web\nspace shell -u root web\nspace shell web -- python3",
    .options = entries,
    .args_min = 1,
    .args_max = 1,
    .takes_command = 1,
    .run = run,
};
