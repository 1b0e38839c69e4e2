#include "cli/verbs.h"

static int run(struct verb_call *call)
{
	struct error e;
	json_t *session;
	if (verb_session_post(call, call->args[0], "rewind", json_pack("{s:s}", "snapshot", call->args[1]), &session, &e) <
	    0)
		return verb_fail(call, &e, "snapshot", "cannot rewind %s to %s", call->args[0], call->args[1]);
	if (output.json)
		output_json(session);
	else
		printf("%s %s\n", call->args[0], output_text(session, "state", "rewound"));
	json_decref(session);
	return output_finish(0);
}

const struct verb verb_rewind = {
    .name = "rewind",
    .group = VERB_TIMELINE,
    .summary = "go back to an earlier snapshot of the same session",
    .arguments = "ID SNAPSHOT",
    .description = "The present is kept as a snapshot first, so a rewind can be rewound.",
    .examples = "space history web\nspace rewind web before-upgrade",
    .args_min = 2,
    .args_max = 2,
    .run = run,
};
