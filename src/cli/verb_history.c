#include "cli/tree.h"
#include "cli/verbs.h"

static int ascii;

static const struct options_entry entries[] = {
    {0, "ascii", OPTIONS_FLAG, &ascii, NULL, "draw with ASCII also on a UTF-8 terminal", NULL},
    {0},
};

static int run(struct verb_call *call)
{
	struct error e;
	json_t *history;
	CLEANUP_FREE char *target = api_session_path(call->args[0], "/snapshots");
	if (api_call(call->api, "GET", target, NULL, &history, &e) < 0)
		return verb_fail(call, &e, "session", "cannot show the timeline of %s", call->args[0]);
	if (output.json)
		output_json(history);
	else if (!json_array_size(json_object_get(history, "snapshots")))
		output_note("%s has no snapshots yet; it would wake from its template", call->args[0]);
	else
		tree_print(history, output.utf8 && !ascii, stdout);
	json_decref(history);
	return output_finish(0);
}

const struct verb verb_history = {
    .name = "history",
    .group = VERB_TIMELINE,
    .summary = "draw a session's timeline of snapshots as a tree",
    .arguments = "ID",
    .examples = "space history web",
    .options = entries,
    .args_min = 1,
    .args_max = 1,
    .run = run,
};
