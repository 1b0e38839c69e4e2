#include "cli/verbs.h"

static struct options_number count;
static const char *at;
static const char *name;
static struct options_list environment;
static int no_wake;

static const struct options_entry entries[] = {
    {'n', "count", OPTIONS_COUNT, &count, "N", "how many new sessions; 1 unless given", NULL},
    {0, "at", OPTIONS_STRING, &at, "SNAPSHOT", "from this snapshot instead of this instant", NULL},
    {0, "name", OPTIONS_STRING, &name, "NAME", "a name for the new session", NULL},
    {'e', "env", OPTIONS_LIST, &environment, "K=V", "a variable for all its processes, over what it inherits", NULL},
    {0, "no-wake", OPTIONS_FLAG, &no_wake, NULL, "leave them suspended", NULL},
    {0},
};

/* A session that was made and could not be woken is there, suspended; that is told beside its id. */
static int print_sessions(const struct verb_call *call, const json_t *sessions)
{
	int status = 0;
	size_t index;
	json_t *session;
	json_array_foreach(sessions, index, session)
	{
		const json_t *error = json_object_get(session, "error");
		const char *id = output_text(session, "id", "?");
		if (!output.json)
			puts(id);
		if (error) {
			struct error e;
			error_set(&e, error_code_from_name(output_text(error, "code", "internal")), "%s",
			          output_text(error, "message", "no reason given"));
			status = verb_fail(call, &e, NULL, "%s was made but cannot be woken", id);
		}
	}
	return status;
}

static int run(struct verb_call *call)
{
	struct error e;
	json_t *body = json_pack("{s:s*, s:s*}", "snapshot", at, "name", name);
	if (count.is_set)
		json_object_set_new(body, "count", json_integer((json_int_t)count.value));
	if (environment.count) {
		json_t *map;
		if (verb_pairs(&environment, "env", &map, &e) < 0) {
			json_decref(body);
			return output_error(&e, "space help branch", "branch");
		}
		json_object_set_new(body, "environment", map);
	}
	if (no_wake)
		json_object_set_new(body, "wake", json_false());
	json_t *answer;
	if (verb_session_post(call, call->args[0], "branch", body, &answer, &e) < 0)
		return verb_fail(call, &e, at ? "snapshot" : "session", "cannot branch %s", call->args[0]);
	int status = print_sessions(call, json_object_get(answer, "sessions"));
	if (output.json)
		output_json(answer);
	json_decref(answer);
	return output_finish(status);
}

const struct verb verb_branch = {
    .name = "branch",
    .group = VERB_TIMELINE,
    .summary = "make new sessions from this instant or a snapshot; print their ids",
    .arguments = "ID",
    .description = "The session itself goes on undisturbed. The new ones have its memory, processes\n"
                   "and files, and their own id, tokens, host name, random state and clock.",
    .examples = "space branch web\nspace branch web -n 8\nspace branch web --at before-upgrade",
    .options = entries,
    .args_min = 1,
    .args_max = 1,
    .run = run,
};
