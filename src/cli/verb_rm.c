#include "cli/verbs.h"

static int force;

static const struct options_entry entries[] = {
    {'f', "force", OPTIONS_FLAG, &force, NULL, "a session that does not exist is no error", NULL},
    {0},
};

static int run(struct verb_call *call)
{
	return verb_remove(call, 0, "/v1/sessions/", "session", force);
}

const struct verb verb_rm = {
    .name = "rm",
    .group = VERB_SESSIONS,
    .summary = "remove sessions with all their snapshots",
    .arguments = "ID…",
    .examples = "space rm web\nspace ls --json --label job=7 | jq -r '.sessions[].id' | xargs space rm",
    .options = entries,
    .args_min = 1,
    .args_max = VERB_UNLIMITED,
    .run = run,
};
