#include <string.h>

#include "cli/verbs.h"

static const char *const group_titles[VERB_GROUP_COUNT] = {
    [VERB_SESSIONS] = "sessions", [VERB_COMMANDS] = "commands and files inside a session",
    [VERB_TIMELINE] = "timeline", [VERB_SUPPLIES] = "templates and API keys",
    [VERB_HOST] = "this host",
};

static void overview(void)
{
	printf("space: every agent session its own computer\n\n"
	       "usage: space [--json] [--socket PATH | --url URL] VERB …\n");
	for (int group = 0; group < VERB_GROUP_COUNT; group++) {
		printf("\n%s%s%s\n", output_color(stdout, OUTPUT_BOLD), group_titles[group], output_color_end(stdout));
		for (size_t i = 0; verb_table[i]; i++)
			if (!verb_table[i]->is_hidden && (int)verb_table[i]->group == group)
				printf("  %-17s %s\n", verb_table[i]->name, verb_table[i]->summary);
	}
	printf("\nspace help VERB explains one of them, with examples; man space has everything.\n"
	       "spaced is asked through SPACE_SOCKET, or SPACE_URL with SPACE_API_KEY, or " API_SOCKET_DEFAULT ".\n");
}

static json_t *describe(const struct verb *verb)
{
	json_t *options = json_array();
	for (const struct options_entry *o = verb->options; o && o->name; o++)
		json_array_append_new(options,
		                      json_pack("{s:s, s:s*, s:s}", "name", o->name, "argument", o->argument, "help", o->help));
	return json_pack("{s:s, s:s, s:s, s:o}", "name", verb->name, "summary", verb->summary, "arguments", verb->arguments,
	                 "options", options);
}

static int print_json(const struct verb *only)
{
	json_t *list = json_array();
	for (size_t i = 0; verb_table[i]; i++)
		if (only ? verb_table[i] == only : !verb_table[i]->is_hidden)
			json_array_append_new(list, describe(verb_table[i]));
	output_json(list);
	json_decref(list);
	return output_finish(0);
}

static int run(struct verb_call *call)
{
	char name[128] = "";
	if (call->arg_count)
		snprintf(name, sizeof(name), "%s%s%s", call->args[0], call->arg_count > 1 ? " " : "",
		         call->arg_count > 1 ? call->args[1] : "");
	const struct verb *verb = *name ? verb_find(name) : NULL;
	if (verb || !*name) {
		if (output.json)
			return print_json(verb);
		if (verb)
			verb_print_help(verb, stdout);
		else
			overview();
		return output_finish(0);
	}
	/* A family such as "template": one after the other. */
	size_t found = 0;
	size_t size = strlen(name);
	for (size_t i = 0; verb_table[i]; i++) {
		if (strncmp(verb_table[i]->name, name, size) != 0 || verb_table[i]->name[size] != ' ')
			continue;
		if (found++)
			putchar('\n');
		verb_print_help(verb_table[i], stdout);
	}
	if (found)
		return output_finish(0);
	struct error e;
	const char *near = verb_nearest(name);
	error_set(&e, ERROR_INVALID, "there is no verb \"%s\"%s%s%s", name, near ? "; did you mean \"" : "",
	          near ? near : "", near ? "\"?" : "");
	return output_error(&e, "space help", "help");
}

const struct verb verb_help = {
    .name = "help",
    .group = VERB_HOST,
    .summary = "show what there is, or explain one verb",
    .arguments = "[VERB]",
    .examples = "space help exec\nspace help template build",
    .args_max = 2,
    .run = run,
};
