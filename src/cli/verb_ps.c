#include <string.h>

#include "base/text.h"
#include "cli/signals.h"
#include "cli/table.h"
#include "cli/verbs.h"

static int all;
static const char *user;

static const struct options_entry entries[] = {
    {'a', "all", OPTIONS_FLAG, &all, NULL, "also those that have ended", NULL},
    {'u', "user", OPTIONS_STRING, &user, "NAME", "as this user of the guest", NULL},
    {0},
};

static int64_t number(const json_t *object, const char *key)
{
	const json_t *value = json_object_get(object, key);
	uint64_t parsed;
	if (json_is_string(value) && text_parse_u64(json_string_value(value), INT64_MAX, &parsed) == 0)
		return (int64_t)parsed;
	return json_integer_value(value);
}

static void status_cell(struct table *table, const json_t *process)
{
	const json_t *running = json_object_get(process, "running");
	int64_t signal = number(process, "signal");
	char text[64];
	if (!running || json_is_true(running)) {
		table_cell(table, OUTPUT_GREEN, "running");
		return;
	}
	const char *name = signals_name((int)signal);
	if (signal)
		snprintf(text, sizeof(text), "%s", name ? name : "signal");
	else
		snprintf(text, sizeof(text), "exit %lld", (long long)number(process, "exitCode"));
	table_cell(table, signal || number(process, "exitCode") ? OUTPUT_RED : OUTPUT_DIM, text);
}

static void command_cell(struct table *table, const json_t *config)
{
	CLEANUP_BUF struct buf line = {.limit = TABLE_CELL_BYTES};
	size_t index;
	json_t *word;
	int r = buf_append_string(&line, output_text(config, "cmd", "?"));
	json_array_foreach(json_object_get(config, "args"), index, word)
	{
		if (r < 0)
			break;
		r = buf_printf(&line, " %s", json_string_value(word));
	}
	table_cell(table, OUTPUT_PLAIN, line.data);
}

static void print_table(const json_t *processes)
{
	struct table *table = table_new(">PID", "STATUS", "STARTED", "COMMAND", NULL);
	size_t index;
	json_t *process;
	json_array_foreach(processes, index, process)
	{
		char age[64];
		table_row(table);
		table_cellf(table, "%lld", (long long)number(process, "pid"));
		status_cell(table, process);
		output_age(age, sizeof(age), output_text(process, "startedAt", NULL));
		table_cell(table, OUTPUT_PLAIN, age);
		command_cell(table, json_object_get(process, "config"));
	}
	table_print(table, stdout, 0);
	table_free(table);
}

static int run(struct verb_call *call)
{
	struct error e;
	json_t *answer;
	json_t *body = all ? json_pack("{s:b}", "all", 1) : json_object();
	int r = api_agent_call(call->api, call->args[0], "process.Process/List", user, body, &answer, &e);
	json_decref(body);
	if (r < 0)
		return verb_fail(call, &e, "session", "cannot list the processes of %s", call->args[0]);
	json_t *processes = json_object_get(answer, "processes");
	if (!processes)
		json_object_set_new(answer, "processes", processes = json_array());
	if (output.json)
		output_json(answer);
	else
		print_table(processes);
	json_decref(answer);
	return output_finish(0);
}

const struct verb verb_ps = {
    .name = "ps",
    .group = VERB_COMMANDS,
    .summary = "list the processes started in a session",
    .arguments = "ID",
    .description = "These are the commands that exec, run, shell and the SDKs have started; what they\n"
                   "started themselves is shown by: space exec ID -- ps aux",
    .examples = "space ps web\nspace ps -a --json web",
    .options = entries,
    .args_min = 1,
    .args_max = 1,
    .run = run,
};
