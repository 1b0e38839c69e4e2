/* space __complete sessions|templates|keys|states|verbs, options VERB, snapshots ID: one candidate a line, for the
 * shell's completion. Never an error message: at a prompt it would only be in the way. */
#include <string.h>

#include "cli/session_table.h"
#include "cli/verbs.h"

#define COMPLETE_TIMEOUT_MS 2000

static void print_member(const json_t *object, const char *key)
{
	const char *text = output_text(object, key, NULL);
	if (text && !strpbrk(text, " \t\n\\'\"$`"))
		puts(text);
}

static void print_list(struct api *api, const char *target, const char *member, const char *first, const char *second)
{
	struct error e;
	json_t *answer;
	size_t index;
	json_t *item;
	if (api_call(api, "GET", target, NULL, &answer, &e) < 0)
		return;
	json_array_foreach(json_object_get(answer, member), index, item)
	{
		print_member(item, first);
		if (second)
			print_member(item, second);
	}
	json_decref(answer);
}

static void print_processes(struct api *api, const char *session)
{
	struct error e;
	json_t *answer;
	size_t index;
	json_t *process;
	/* Asking a guest that sleeps would wake it. */
	CLEANUP_FREE char *target = api_session_path(session, "");
	if (api_call(api, "GET", target, NULL, &answer, &e) < 0)
		return;
	int running = strcmp(output_text(answer, "state", ""), "running") == 0;
	json_decref(answer);
	if (!running)
		return;
	json_t *body = json_object();
	int r = api_agent_call(api, session, "process.Process/List", NULL, body, &answer, &e);
	json_decref(body);
	if (r < 0)
		return;
	json_array_foreach(json_object_get(answer, "processes"), index, process)
	{
		printf("%" JSON_INTEGER_FORMAT "\n", json_integer_value(json_object_get(process, "pid")));
	}
	json_decref(answer);
}

static void print_verbs(void)
{
	const char *last = "";
	size_t last_size = 0;
	for (size_t i = 0; verb_table[i]; i++) {
		const char *name = verb_table[i]->name;
		size_t size = strcspn(name, " ");
		if (verb_table[i]->is_hidden || (size == last_size && strncmp(last, name, size) == 0))
			continue;
		printf("%.*s\n", (int)size, name);
		last = name;
		last_size = size;
	}
}

static void print_subverbs(const char *family)
{
	size_t size = strlen(family);
	for (size_t i = 0; verb_table[i]; i++)
		if (strncmp(verb_table[i]->name, family, size) == 0 && verb_table[i]->name[size] == ' ')
			puts(verb_table[i]->name + size + 1);
}

static void print_options(const char *name)
{
	const struct verb *verb = verb_find(name);
	for (const struct options_entry *o = verb && !verb->is_raw ? verb->options : NULL; o && o->name; o++)
		printf("--%s\n", o->name);
	for (const struct options_entry *o = verb_global_options; o->name; o++)
		printf("--%s\n", o->name);
}

/* Whether an option (as typed) of a verb takes a value, and which values there are. */
static void print_values(const char *name, const char *option)
{
	const struct verb *verb = verb_find(name);
	for (const struct options_entry *o = verb ? verb->options : NULL; o && o->name; o++) {
		int same = option[1] == '-' ? strcmp(option + 2, o->name) == 0 : option[1] == o->letter && !option[2];
		if (!same || o->kind == OPTIONS_FLAG)
			continue;
		puts("=value");
		for (const char *p = o->choices; p && *p;) {
			size_t size = strcspn(p, " ");
			printf("%.*s\n", (int)size, p);
			p += size + (p[size] == ' ');
		}
	}
}

static int run(struct verb_call *call)
{
	const char *what = call->args[0];
	const char *of = call->arg_count > 1 ? call->args[1] : "";
	api_set_timeout(call->api, COMPLETE_TIMEOUT_MS);
	CLEANUP_FREE char *history = api_session_path(of, "/snapshots");
	if (strcmp(what, "verbs") == 0)
		print_verbs();
	else if (strcmp(what, "subverbs") == 0)
		print_subverbs(of);
	else if (strcmp(what, "options") == 0)
		print_options(of);
	else if (strcmp(what, "values") == 0 && call->arg_count > 2)
		print_values(of, call->args[2]);
	else if (strcmp(what, "sessions") == 0)
		print_list(call->api, "/v1/sessions?limit=1000", "sessions", "id", "name");
	else if (strcmp(what, "processes") == 0)
		print_processes(call->api, of);
	else if (strcmp(what, "snapshots") == 0)
		print_list(call->api, history, "snapshots", "id", "name");
	else if (strcmp(what, "templates") == 0)
		print_list(call->api, "/v1/templates", "templates", "name", NULL);
	else if (strcmp(what, "keys") == 0)
		print_list(call->api, "/v1/keys", "keys", "id", NULL);
	return output_finish(0);
}

const struct verb verb_complete = {
    .name = "__complete",
    .group = VERB_HOST,
    .summary = "candidates for the shell's completion",
    .arguments = "WHAT [OF]",
    .args_min = 1,
    .args_max = 3,
    .is_hidden = 1,
    .run = run,
};
