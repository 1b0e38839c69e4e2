#include "cli/verb.h"

#include <errno.h>
#include <stdarg.h>
#include <string.h>

#include "base/text.h"

#define VERBS_MAX 64

const struct verb *verb_find(const char *name)
{
	for (size_t i = 0; verb_table[i]; i++)
		if (strcmp(verb_table[i]->name, name) == 0)
			return verb_table[i];
	return NULL;
}

const char *verb_nearest(const char *word)
{
	const char *names[VERBS_MAX];
	size_t count = 0;
	for (size_t i = 0; verb_table[i] && count < VERBS_MAX; i++)
		if (!verb_table[i]->is_hidden)
			names[count++] = verb_table[i]->name;
	return options_nearest(word, names, count);
}

int verb_fail(const struct verb_call *call, const struct error *e, const char *kind, const char *what, ...)
{
	char text[1024];
	va_list args;
	va_start(args, what);
	vsnprintf(text, sizeof(text), what, args);
	va_end(args);
	return output_error(e, call->api ? api_hint(call->api, e, kind) : NULL, "%s", text);
}

int verb_session_post(const struct verb_call *call, const char *session, const char *action, json_t *body, json_t **ret,
                      struct error *e)
{
	char suffix[64];
	snprintf(suffix, sizeof(suffix), "/%s", action);
	CLEANUP_FREE char *target = api_session_path(session, suffix);
	json_t *sent = body ? body : json_object();
	int r = api_call(call->api, "POST", target, sent, ret, e);
	json_decref(sent);
	return r;
}

int verb_remove(const struct verb_call *call, size_t first, const char *prefix, const char *kind, int missing_ok)
{
	int status = 0;
	json_t *removed = json_array();
	for (size_t i = first; i < call->arg_count; i++) {
		struct error e;
		CLEANUP_FREE char *target = api_path(prefix, call->args[i], "");
		if (api_call(call->api, "DELETE", target, NULL, NULL, &e) < 0) {
			if (!missing_ok || e.code != ERROR_NOT_FOUND || api_is_connection_error(&e))
				status = verb_fail(call, &e, kind, "cannot remove %s %s", kind, call->args[i]);
			continue;
		}
		json_array_append_new(removed, json_string(call->args[i]));
		if (!output.json)
			puts(call->args[i]);
	}
	if (output.json) {
		json_t *answer = json_pack("{s:O}", "removed", removed);
		output_json(answer);
		json_decref(answer);
	}
	json_decref(removed);
	return output_finish(status);
}

int verb_pairs(const struct options_list *list, const char *option, json_t **ret, struct error *e)
{
	json_t *map = json_object();
	for (size_t i = 0; i < list->count; i++) {
		const char *item = list->items[i];
		const char *equals = strchr(item, '=');
		if (equals == item || (!equals && strcmp(option, "env") != 0)) {
			json_decref(map);
			return error_set(e, ERROR_INVALID, "--%s \"%s\" is not K=V", option, item);
		}
		CLEANUP_FREE char *name = equals ? strndup(item, (size_t)(equals - item)) : strdup(item);
		const char *value = equals ? equals + 1 : name ? getenv(name) : NULL;
		if (!name)
			abort();
		if (value && json_object_set_new(map, name, json_string(value)) < 0) {
			json_decref(map);
			return error_set(e, ERROR_INVALID, "--%s %s is not UTF-8", option, name);
		}
	}
	*ret = map;
	return 0;
}

static void print_options(const struct options_entry *options, FILE *to)
{
	for (const struct options_entry *o = options; o->name; o++) {
		char left[64];
		char letter[8] = "    ";
		if (o->letter)
			snprintf(letter, sizeof(letter), "-%c, ", o->letter);
		snprintf(left, sizeof(left), "%s--%s%s%s", letter, o->name, o->argument ? " " : "",
		         o->argument ? o->argument : "");
		fprintf(to, "  %-26s  %s", left, o->help);
		if (o->choices)
			fprintf(to, " (%s)", o->choices);
		putc('\n', to);
	}
}

/* Text with every line moved two columns to the right. */
static void print_indented(const char *text, FILE *to)
{
	while (*text) {
		size_t size = strcspn(text, "\n");
		fprintf(to, "  %.*s\n", (int)size, text);
		text += size + (text[size] == '\n');
	}
}

void verb_print_help(const struct verb *verb, FILE *to)
{
	const char *bold = output_color(to, OUTPUT_BOLD);
	const char *end = output_color_end(to);
	int has_options = verb->options && verb->options->name;
	fprintf(to, "space %s: %s\n\n%susage:%s space %s%s%s%s\n", verb->name, verb->summary, bold, end, verb->name,
	        has_options ? " [OPTIONS]" : "", *verb->arguments ? " " : "", verb->arguments);
	if (verb->description)
		fprintf(to, "\n%s\n", verb->description);
	if (has_options) {
		fprintf(to, "\n%soptions:%s\n", bold, end);
		print_options(verb->options, to);
	}
	if (!verb->is_raw) {
		fprintf(to, "\n%soptions of every verb:%s\n", bold, end);
		print_options(verb_global_options, to);
	}
	if (verb->examples) {
		fprintf(to, "\n%sexamples:%s\n", bold, end);
		print_indented(verb->examples, to);
	}
}
