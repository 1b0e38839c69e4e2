#include <string.h>

#include "base/text.h"
#include "cli/details.h"
#include "cli/lines.h"
#include "cli/table.h"
#include "cli/verbs.h"

static struct options_list packages;
static struct options_list commands;
static struct options_number disk_size;
static struct options_number memory;
static struct options_number vcpus;
static int quiet;

static const struct options_entry build_entries[] = {
    {'p', "packages", OPTIONS_LIST, &packages, "A,B,…", "Debian packages on top of the default ones", NULL},
    {'r', "run", OPTIONS_LIST, &commands, "CMD", "a shell command run in the root file system; may be repeated", NULL},
    {0, "size", OPTIONS_SIZE, &disk_size, "SIZE", "size of the disk (4G unless given; sparse)", NULL},
    {0, "memory", OPTIONS_SIZE, &memory, "SIZE", "guest memory (512M unless given)", NULL},
    {0, "vcpus", OPTIONS_COUNT, &vcpus, "N", "virtual CPUs (1 unless given)", NULL},
    {'q', "quiet", OPTIONS_FLAG, &quiet, NULL, "no progress", NULL},
    {0},
};

/* "--packages a,b --packages c" to ["a","b","c"]. */
static json_t *split_packages(void)
{
	json_t *list = json_array();
	for (size_t i = 0; i < packages.count; i++) {
		for (const char *p = packages.items[i]; *p;) {
			size_t size = strcspn(p, ", ");
			if (size)
				json_array_append_new(list, json_stringn(p, size));
			p += size + (p[size] != '\0');
		}
	}
	return list;
}

static json_t *build_body(const char *name)
{
	json_t *run = json_array();
	for (size_t i = 0; i < commands.count; i++)
		json_array_append_new(run, json_string(commands.items[i]));
	json_t *body = json_pack("{s:s, s:o, s:o}", "name", name, "packages", split_packages(), "run", run);
	if (disk_size.is_set)
		json_object_set_new(body, "size_bytes", json_integer((json_int_t)disk_size.value));
	if (memory.is_set)
		json_object_set_new(body, "memory_bytes", json_integer((json_int_t)memory.value));
	if (vcpus.is_set)
		json_object_set_new(body, "vcpus", json_integer((json_int_t)vcpus.value));
	return body;
}

static enum error_code code_of(const char *name)
{
	return name ? error_code_from_name(name) : ERROR_INTERNAL;
}

/* One line of the build's answer. 1 when it was the last one (and *ret or *e is filled), else 0. */
static int take_line(const char *line, json_t **ret, int *failed, struct error *e)
{
	char safe[1024];
	json_t *json = json_loads(line, 0, NULL);
	const char *progress = output_text(json, "progress", output_text(json, "line", NULL));
	json_t *template = json_object_get(json, "template");
	json_t *error = json_object_get(json, "error");
	if (progress && output.json)
		output_json_line(json);
	else if (progress && !quiet)
		fprintf(stderr, "%s\n", output_safe(safe, sizeof(safe), progress));
	if (template)
		*ret = json_incref(template);
	if (error) {
		*failed = 1;
		error_set(e, code_of(json_string_value(json_object_get(error, "code"))), "%s",
		          output_text(error, "message", "no reason given"));
	}
	int done = template || error;
	if (done && output.json && template)
		output_json_line(json);
	json_decref(json);
	return done;
}

static int follow_build(struct http_client *client, json_t **ret, struct error *e)
{
	struct lines lines = {.client = client};
	int failed = 0;
	int r;
	for (;;) {
		const char *line;
		r = lines_next(&lines, &line, e);
		if (r == 0)
			r = error_set(e, ERROR_UNAVAILABLE, "the connection closed before the build was done");
		if (r < 0)
			break;
		if (*line && take_line(line, ret, &failed, e)) {
			r = failed ? error_code_errno(e->code) : 0;
			break;
		}
	}
	lines_free(&lines);
	return r;
}

static int run_build(struct verb_call *call)
{
	struct error e;
	json_t *body = build_body(call->args[0]);
	CLEANUP_FREE char *text = json_dumps(body, JSON_COMPACT);
	json_decref(body);
	if (!text) {
		error_set(&e, ERROR_INVALID, "the arguments are not UTF-8");
		return output_error(&e, NULL, "template build");
	}
	struct api_stream_call stream = {
	    .method = "POST",
	    .target = "/v1/templates",
	    .content_type = "application/json",
	    .accept = "application/x-ndjson",
	    .body = text,
	    .body_size = strlen(text),
	};
	struct http_client *client = NULL;
	json_t *template = NULL;
	int r = api_stream(call->api, &stream, &client, &e);
	if (r == 0)
		r = follow_build(client, &template, &e);
	http_client_free(client);
	if (r < 0)
		return verb_fail(call, &e, NULL, "cannot build template %s", call->args[0]);
	if (!output.json)
		printf("%s %s\n", output_text(template, "name", call->args[0]), output_text(template, "digest", ""));
	json_decref(template);
	return output_finish(0);
}

const struct verb verb_template_build = {
    .name = "template build",
    .group = VERB_SUPPLIES,
    .summary = "build a template: root file system, first boot, memory snapshot",
    .arguments = "NAME[:TAG]",
    .description = "Progress goes to stderr (with --json to stdout, one line each). A failed build\n"
                   "leaves nothing behind and shows the last lines of the guest's console.",
    .examples = "space template build default\n"
                "space template build data:1 --packages python3-numpy,r-base --memory 2G --size 16G\n"
                "space template build web --run 'pip install flask' --run 'mkdir /srv/app'",
    .options = build_entries,
    .args_min = 1,
    .args_max = 1,
    .run = run_build,
};

static int run_list(struct verb_call *call)
{
	struct error e;
	json_t *answer;
	if (api_call(call->api, "GET", "/v1/templates", NULL, &answer, &e) < 0)
		return verb_fail(call, &e, NULL, "cannot list the templates");
	if (output.json) {
		output_json(answer);
		json_decref(answer);
		return output_finish(0);
	}
	struct table *table = table_new("NAME", "DIGEST", ">VCPUS", ">MEMORY", ">DISK", "CREATED", NULL);
	size_t index;
	json_t *template;
	json_array_foreach(json_object_get(answer, "templates"), index, template)
	{
		char text[64];
		table_row(table);
		table_cell(table, OUTPUT_PLAIN, output_text(template, "name", "?"));
		snprintf(text, sizeof(text), "%.19s", output_text(template, "digest", "-"));
		table_cell(table, OUTPUT_DIM, text);
		table_cellf(table, "%lld", (long long)json_integer_value(json_object_get(template, "vcpus")));
		text_format_size(text, sizeof(text), (uint64_t)json_integer_value(json_object_get(template, "memory_bytes")));
		table_cell(table, OUTPUT_PLAIN, text);
		text_format_size(text, sizeof(text), (uint64_t)json_integer_value(json_object_get(template, "size_bytes")));
		table_cell(table, OUTPUT_PLAIN, text);
		output_age(text, sizeof(text), output_text(template, "created_at", NULL));
		table_cell(table, OUTPUT_PLAIN, text);
	}
	table_print(table, stdout, 0);
	table_free(table);
	json_decref(answer);
	return output_finish(0);
}

const struct verb verb_template_ls = {
    .name = "template ls",
    .group = VERB_SUPPLIES,
    .summary = "list templates",
    .arguments = "",
    .examples = "space template ls",
    .run = run_list,
};

static int run_inspect(struct verb_call *call)
{
	struct error e;
	json_t *template;
	CLEANUP_FREE char *target = api_path("/v1/templates/", call->args[0], "");
	if (api_call(call->api, "GET", target, NULL, &template, &e) < 0)
		return verb_fail(call, &e, "template", "cannot show template %s", call->args[0]);
	if (output.json)
		output_json(template);
	else
		details_print(template);
	json_decref(template);
	return output_finish(0);
}

const struct verb verb_template_inspect = {
    .name = "template inspect",
    .group = VERB_SUPPLIES,
    .summary = "show everything about a template",
    .arguments = "NAME[:TAG]",
    .examples = "space template inspect default",
    .args_min = 1,
    .args_max = 1,
    .run = run_inspect,
};

static int run_remove(struct verb_call *call)
{
	return verb_remove(call, 0, "/v1/templates/", "template", 0);
}

const struct verb verb_template_rm = {
    .name = "template rm",
    .group = VERB_SUPPLIES,
    .summary = "remove templates",
    .arguments = "NAME[:TAG]…",
    .examples = "space template rm data:1",
    .args_min = 1,
    .args_max = VERB_UNLIMITED,
    .run = run_remove,
};
