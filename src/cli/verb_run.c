#include <inttypes.h>
#include <string.h>

#include "base/text.h"
#include "cli/command.h"
#include "cli/signals.h"
#include "cli/verbs.h"

static struct command_options options;
static const char *template_name;
static int keep;

static const struct options_entry entries[] = {
    {'t', "template", OPTIONS_STRING, &template_name, "NAME", "the template to start from", NULL},
    COMMAND_OPTIONS(options),
    {0, "timeout", OPTIONS_DURATION, &options.timeout, "S", "end the command after S (exit status 124)", NULL},
    {'i', "interactive", OPTIONS_FLAG, &options.interactive, NULL, "forward stdin even if it is a terminal", NULL},
    {'n', "no-stdin", OPTIONS_FLAG, &options.no_stdin, NULL, "do not read stdin at all", NULL},
    {0, "tty", OPTIONS_FLAG, &options.tty, NULL, "run it on a terminal of its own", NULL},
    {0, "keep", OPTIONS_FLAG, &keep, NULL, "keep the session and say its id", NULL},
    {0},
};

static int create(const struct verb_call *call, char *id, size_t size, struct error *e)
{
	json_t *session;
	json_t *body = json_pack("{s:s*, s:{s:s}}", "template", template_name, "labels", "space.run", "1");
	int r = api_call(call->api, "POST", "/v1/sessions", body, &session, e);
	json_decref(body);
	if (r < 0)
		return r;
	if (text_copy(id, size, output_text(session, "id", "")) < 0 || !*id)
		r = error_set(e, ERROR_INTERNAL, "the server made a session and did not say its id");
	json_decref(session);
	return r;
}

static int destroy(const struct verb_call *call, const char *id)
{
	struct error e;
	CLEANUP_FREE char *target = api_session_path(id, "");
	int r = api_call(call->api, "DELETE", target, NULL, NULL, &e);
	if (r < 0 && e.code != ERROR_NOT_FOUND)
		return verb_fail(call, &e, NULL, "cannot remove session %s (it is left behind)", id);
	return 0;
}

static int run(struct verb_call *call)
{
	struct error e;
	char id[128];
	if (!call->rest_count) {
		error_set(&e, ERROR_INVALID, "no command given");
		return output_error(&e, "space run -- CMD…", "run");
	}
	signals_start();
	if (create(call, id, sizeof(id), &e) < 0)
		return verb_fail(call, &e, "template", "cannot create a session");
	int status = command_run(call, id, call->rest, &options, 0, NULL);
	if (keep) {
		if (output.json) {
			json_t *line = json_pack("{s:s, s:s}", "event", "kept", "session_id", id);
			output_json_line(line);
			json_decref(line);
		} else {
			output_note("session %s is kept", id);
		}
		return status;
	}
	int removed = destroy(call, id);
	return status ? status : removed;
}

const struct verb verb_run = {
    .name = "run",
    .group = VERB_SESSIONS,
    .summary = "create a session, run a command in it, remove it",
    .arguments = "[--] CMD [ARG…]",
    .description = "Streams, signals and exit status are as in space exec. The session is removed\n"
                   "however the command ends.",
    .examples = "space run -- python3 -c 'print(6*7)'\n"
                "space run -t data:1 -e MODE=fast -- ./job <input >output",
    .options = entries,
    .args_max = 0,
    .takes_command = 1,
    .run = run,
};
