/* pause, resume, suspend, wake: one POST each, for any number of sessions. */
#include <string.h>

#include "cli/verbs.h"

static int run(struct verb_call *call)
{
	int status = 0;
	json_t *results = json_array();
	for (size_t i = 0; i < call->arg_count; i++) {
		struct error e;
		json_t *session;
		if (verb_session_post(call, call->args[i], call->verb->name, NULL, &session, &e) < 0) {
			status = verb_fail(call, &e, "session", "cannot %s %s", call->verb->name, call->args[i]);
			continue;
		}
		if (!output.json)
			printf("%s %s\n", call->args[i], output_text(session, "state", "done"));
		json_array_append_new(results, session ? session : json_null());
	}
	if (output.json && json_array_size(results))
		output_json(call->arg_count == 1 ? json_array_get(results, 0) : results);
	json_decref(results);
	return output_finish(status);
}

#define STATE_VERB(word, text, example)                                                                                \
	const struct verb verb_##word = {                                                                                  \
	    .name = #word,                                                                                                 \
	    .group = VERB_SESSIONS,                                                                                        \
	    .summary = text,                                                                                               \
	    .arguments = "ID…",                                                                                            \
	    .examples = example,                                                                                           \
	    .args_min = 1,                                                                                                 \
	    .args_max = VERB_UNLIMITED,                                                                                    \
	    .run = run,                                                                                                    \
	}

STATE_VERB(pause, "stop the vCPUs; memory stays resident", "space pause web");
STATE_VERB(resume, "let a paused session go on", "space resume web");
STATE_VERB(suspend, "snapshot a session and free everything it uses", "space suspend web db");
STATE_VERB(wake, "get a session running again, whatever its state", "space wake web");
