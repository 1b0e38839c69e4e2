#include <string.h>

#include "cli/table.h"
#include "cli/verbs.h"

static void add_row(struct table *table, const json_t *check)
{
	const char *status = output_text(check, "status", "?");
	table_row(table);
	table_cell(table, output_state_color(status), status);
	table_cell(table, OUTPUT_PLAIN, output_text(check, "name", "?"));
	table_cell(table, OUTPUT_PLAIN, output_text(check, "text", ""));
}

static int run(struct verb_call *call)
{
	struct error e;
	json_t *answer;
	if (api_call(call->api, "GET", "/v1/doctor", NULL, &answer, &e) < 0)
		return verb_fail(call, &e, NULL, "cannot ask spaced");
	int status = 0;
	size_t index;
	json_t *check;
	struct table *table = table_new("STATUS", "CHECK", "FINDING", NULL);
	json_array_foreach(json_object_get(answer, "checks"), index, check)
	{
		if (output_state_color(output_text(check, "status", "?")) == OUTPUT_RED)
			status = OUTPUT_EXIT_FAILURE;
		add_row(table, check);
	}
	if (output.json)
		output_json(answer);
	else
		table_print(table, stdout, 0);
	table_free(table);
	json_decref(answer);
	return output_finish(status);
}

const struct verb verb_doctor = {
    .name = "doctor",
    .group = VERB_HOST,
    .summary = "say what this host can do, and what is wrong",
    .arguments = "",
    .description = "The exit status is 125 if a check has failed.",
    .examples = "space doctor",
    .run = run,
};
