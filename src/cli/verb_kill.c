#include <inttypes.h>
#include <signal.h>

#include "base/text.h"
#include "cli/signals.h"
#include "cli/verbs.h"

static const char *signal_name = "TERM";
static int leader_only;
static const char *user;

static const struct options_entry entries[] = {
    {'s', "signal", OPTIONS_STRING, &signal_name, "SIG", "name or number; TERM unless given", NULL},
    {0, "leader-only", OPTIONS_FLAG, &leader_only, NULL, "only the process itself, not its group", NULL},
    {'u', "user", OPTIONS_STRING, &user, "NAME", "as this user of the guest", NULL},
    {0},
};

static int send_one(const struct verb_call *call, uint64_t pid, const char *name, struct error *e)
{
	json_t *body =
	    json_pack("{s:{s:I}, s:s, s:b}", "process", "pid", (json_int_t)pid, "signal", name, "group", !leader_only);
	int r = api_agent_call(call->api, call->args[0], "process.Process/SendSignal", user, body, NULL, e);
	json_decref(body);
	return r;
}

static int run(struct verb_call *call)
{
	struct error e;
	int number = signals_from_name(signal_name);
	if (number < 0) {
		error_set(&e, ERROR_INVALID, "\"%s\" is no signal", signal_name);
		return output_error(&e, "for instance: space kill -s INT ID PID", "kill");
	}
	char name[32];
	if (signals_name(number))
		snprintf(name, sizeof(name), "SIGNAL_%s", signals_name(number));
	else
		snprintf(name, sizeof(name), "%d", number);
	int status = 0;
	json_t *done = json_array();
	for (size_t i = 1; i < call->arg_count; i++) {
		uint64_t pid;
		if (text_parse_u64(call->args[i], INT32_MAX, &pid) < 0 || pid == 0) {
			error_set(&e, ERROR_INVALID, "\"%s\" is no process id", call->args[i]);
			status = output_error(&e, "see the processes with: space ps ID", "kill");
		} else if (send_one(call, pid, name, &e) < 0) {
			status = verb_fail(call, &e, "process", "cannot signal process %" PRIu64 " of %s", pid, call->args[0]);
		} else {
			json_array_append_new(done, json_integer((json_int_t)pid));
		}
	}
	if (output.json) {
		json_t *answer = json_pack("{s:i, s:O}", "signal", number, "signaled", done);
		output_json(answer);
		json_decref(answer);
	}
	json_decref(done);
	return output_finish(status);
}

const struct verb verb_kill = {
    .name = "kill",
    .group = VERB_COMMANDS,
    .summary = "send a signal to processes of a session",
    .arguments = "ID PID…",
    .description = "The signal goes to the whole process group that the command leads.",
    .examples = "space kill web 123\nspace kill -s KILL web 123 124",
    .options = entries,
    .args_min = 2,
    .args_max = VERB_UNLIMITED,
    .run = run,
};
