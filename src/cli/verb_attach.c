#include "base/text.h"
#include "cli/command.h"
#include "cli/signals.h"
#include "cli/verbs.h"

static struct command_options options;
static struct options_number offset;

static const struct options_entry entries[] = {
    {0, "offset", OPTIONS_COUNT, &offset, "N", "begin at output byte N; 0 is all that is still kept", NULL},
    {'i', "interactive", OPTIONS_FLAG, &options.interactive, NULL, "forward stdin even if it is a terminal", NULL},
    {'t', "tty", OPTIONS_FLAG, &options.tty, NULL, "the process has a terminal (it was started with -t)", NULL},
    {'u', "user", OPTIONS_STRING, &options.user, "NAME", "as this user of the guest", NULL},
    {0},
};

static int run(struct verb_call *call)
{
	struct error e;
	uint64_t pid;
	if (text_parse_u64(call->args[1], INT32_MAX, &pid) < 0 || pid == 0) {
		error_set(&e, ERROR_INVALID, "\"%s\" is no process id", call->args[1]);
		return output_error(&e, "see the processes with: space ps ID", "attach");
	}
	options.no_stdin = !options.interactive && !options.tty;
	signals_start();
	return command_run(call, call->args[0], NULL, &options, pid, offset.is_set ? &offset.value : NULL);
}

const struct verb verb_attach = {
    .name = "attach",
    .group = VERB_COMMANDS,
    .summary = "follow a process that runs in a session",
    .arguments = "ID PID",
    .description = "Output from now on, or from --offset N as far back as the guest keeps it; ends\n"
                   "with the process and with its exit status, also if it has ended already.",
    .examples = "pid=$(space exec -d web -- make all)\nspace attach web $pid --offset 0",
    .options = entries,
    .args_min = 2,
    .args_max = 2,
    .run = run,
};
