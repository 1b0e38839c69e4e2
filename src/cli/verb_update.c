#include "cli/verbs.h"

static const char *name;
static const char *on_timeout;
static struct options_list labels;
static struct options_number timeout;
static struct options_number interval;
static const char *wake_on_use;

static const struct options_entry entries[] = {
    {'n', "name", OPTIONS_STRING, &name, "NAME", "a new name; an empty one takes it away", NULL},
    {'l', "label", OPTIONS_LIST, &labels, "K=V", "replace the labels by these", NULL},
    {0, "timeout", OPTIONS_DURATION, &timeout, "S", "how long it runs before --on-timeout; 0 = unlimited", NULL},
    {0, "on-timeout", OPTIONS_STRING, &on_timeout, "ACTION", "what happens at its end", "suspend kill"},
    {0, "snapshot-interval", OPTIONS_DURATION, &interval, "S", "time between rolling snapshots; 0 = none", NULL},
    {0, "wake-on-use", OPTIONS_STRING, &wake_on_use, "YES", "whether exec, files and ports wake it", "yes no"},
    {0},
};

static int run(struct verb_call *call)
{
	struct error e;
	json_t *body = json_pack("{s:s*, s:s*}", "name", name, "on_timeout", on_timeout);
	if (labels.count) {
		json_t *map;
		if (verb_pairs(&labels, "label", &map, &e) < 0) {
			json_decref(body);
			return output_error(&e, "space help update", "update");
		}
		json_object_set_new(body, "labels", map);
	}
	if (timeout.is_set)
		json_object_set_new(body, "timeout_s", json_integer((json_int_t)timeout.value));
	if (interval.is_set)
		json_object_set_new(body, "snapshot_interval_s", json_integer((json_int_t)interval.value));
	if (wake_on_use)
		json_object_set_new(body, "wake_on_use", json_boolean(wake_on_use[0] == 'y'));
	if (!json_object_size(body)) {
		json_decref(body);
		error_set(&e, ERROR_INVALID, "nothing to change was given");
		return output_error(&e, "space help update", "update");
	}
	CLEANUP_FREE char *target = api_session_path(call->args[0], "");
	json_t *session;
	int r = api_call(call->api, "PATCH", target, body, &session, &e);
	json_decref(body);
	if (r < 0)
		return verb_fail(call, &e, "session", "cannot update %s", call->args[0]);
	if (output.json)
		output_json(session);
	else
		puts(output_text(session, "id", call->args[0]));
	json_decref(session);
	return output_finish(0);
}

const struct verb verb_update = {
    .name = "update",
    .group = VERB_SESSIONS,
    .summary = "change a session's name, labels or lifecycle",
    .arguments = "ID",
    .examples = "space update web --timeout 4h --on-timeout suspend\nspace update web --name shop",
    .options = entries,
    .args_min = 1,
    .args_max = 1,
    .run = run,
};
