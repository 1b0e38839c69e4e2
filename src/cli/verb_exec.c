#include "cli/command.h"
#include "cli/signals.h"
#include "cli/verbs.h"

static struct command_options options;

static const struct options_entry entries[] = {
    COMMAND_OPTIONS(options),
    {0, "timeout", OPTIONS_DURATION, &options.timeout, "S", "end the command's process group after S (exit status 124)",
     NULL},
    {'i', "interactive", OPTIONS_FLAG, &options.interactive, NULL, "forward stdin even if it is a terminal", NULL},
    {'n', "no-stdin", OPTIONS_FLAG, &options.no_stdin, NULL, "do not read stdin at all", NULL},
    {'t', "tty", OPTIONS_FLAG, &options.tty, NULL, "run it on a terminal of its own", NULL},
    {'d', "detach", OPTIONS_FLAG, &options.detach, NULL, "print its process id and leave it running", NULL},
    {0},
};

static int run(struct verb_call *call)
{
	struct error e;
	if (!call->rest_count) {
		error_set(&e, ERROR_INVALID, "no command given");
		return output_error(&e, "space exec ID -- CMD…, or space shell ID", "exec");
	}
	if (options.detach && (options.tty || options.interactive)) {
		error_set(&e, ERROR_INVALID, "--detach cannot be combined with --tty or --interactive");
		return output_error(&e, "space help exec", "exec");
	}
	signals_start();
	return command_run(call, call->args[0], call->rest, &options, 0, NULL);
}

const struct verb verb_exec = {
    .name = "exec",
    .group = VERB_COMMANDS,
    .summary = "run a command in a session",
    .arguments = "ID [--] CMD [ARG…]",
    .description = "Stdin is forwarded unless it is a terminal (then with -i or -t); stdout and\n"
                   "stderr come back byte by byte. INT, TERM, HUP and QUIT go to the command's\n"
                   "process group. The exit status is the command's own, 128+N if signal N ended it,\n"
                   "124 after --timeout, 125 if SPACE itself failed, 126 or 127 if CMD could not be\n"
                   "run or found. A suspended session is woken; if the connection breaks, it is\n"
                   "taken up again where it broke.",
    .examples = "space exec web -- ls -l /srv\n"
                "tar c src | space exec web -- tar x -C /srv\n"
                "space exec -u root -w /etc web -- cat shadow\n"
                "space exec -d web -- python3 -m http.server 8000",
    .options = entries,
    .args_min = 1,
    .args_max = 1,
    .takes_command = 1,
    .run = run,
};
