#include "cli/details.h"
#include "cli/verbs.h"

static int run(struct verb_call *call)
{
	struct error e;
	json_t *session;
	CLEANUP_FREE char *target = api_session_path(call->args[0], "");
	if (api_call(call->api, "GET", target, NULL, &session, &e) < 0)
		return verb_fail(call, &e, "session", "cannot show %s", call->args[0]);
	if (output.json)
		output_json(session);
	else
		details_print(session);
	json_decref(session);
	return output_finish(0);
}

const struct verb verb_info = {
    .name = "info",
    .group = VERB_SESSIONS,
    .summary = "show everything about a session",
    .arguments = "ID",
    .examples = "space info web\nspace info --json web | jq -r .state",
    .args_min = 1,
    .args_max = 1,
    .run = run,
};
