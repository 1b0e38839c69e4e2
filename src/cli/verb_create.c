#include "cli/verbs.h"

static const char *template_name;
static const char *name;
static const char *on_timeout;
static struct options_list environment;
static struct options_list labels;
static struct options_number timeout;
static struct options_number interval;
static int no_wake;

static const struct options_entry entries[] = {
    {'t', "template", OPTIONS_STRING, &template_name, "NAME", "the template to start from", NULL},
    {'n', "name", OPTIONS_STRING, &name, "NAME", "a name to use in place of the id", NULL},
    {'e', "env", OPTIONS_LIST, &environment, "K=V",
     "a variable for all its processes; K alone passes on the value here", NULL},
    {'l', "label", OPTIONS_LIST, &labels, "K=V", "a label to find it by", NULL},
    {0, "timeout", OPTIONS_DURATION, &timeout, "S", "how long it runs before --on-timeout; unlimited unless given",
     NULL},
    {0, "on-timeout", OPTIONS_STRING, &on_timeout, "ACTION", "what happens at its end", "suspend kill"},
    {0, "snapshot-interval", OPTIONS_DURATION, &interval, "S", "time between rolling snapshots; 0 = none", NULL},
    {0, "no-wake-on-use", OPTIONS_FLAG, &no_wake, NULL, "only space wake gets it running again", NULL},
    {0},
};

static int run(struct verb_call *call)
{
	struct error e;
	json_t *variables;
	json_t *label_map;
	if (verb_pairs(&environment, "env", &variables, &e) < 0)
		return output_error(&e, "space help create", "create");
	if (verb_pairs(&labels, "label", &label_map, &e) < 0) {
		json_decref(variables);
		return output_error(&e, "space help create", "create");
	}
	json_t *body = json_pack("{s:s*, s:s*, s:s*, s:o, s:o}", "template", template_name, "name", name, "on_timeout",
	                         on_timeout, "environment", variables, "labels", label_map);
	if (timeout.is_set)
		json_object_set_new(body, "timeout_s", json_integer((json_int_t)timeout.value));
	if (interval.is_set)
		json_object_set_new(body, "snapshot_interval_s", json_integer((json_int_t)interval.value));
	if (no_wake)
		json_object_set_new(body, "wake_on_use", json_false());
	json_t *session;
	int r = api_call(call->api, "POST", "/v1/sessions", body, &session, &e);
	json_decref(body);
	if (r < 0)
		return verb_fail(call, &e, "template", "cannot create the session");
	if (output.json)
		output_json(session);
	else
		puts(output_text(session, "id", "?"));
	json_decref(session);
	return output_finish(0);
}

const struct verb verb_create = {
    .name = "create",
    .group = VERB_SESSIONS,
    .summary = "create a session and print its id",
    .arguments = "",
    .examples = "space create --name web --label team=blue\n"
                "id=$(space create -t data:1 --timeout 2h --on-timeout kill)",
    .options = entries,
    .run = run,
};
