#include <string.h>

#include "cli/verbs.h"

static void print_check(const json_t *check)
{
	char name[128];
	char text[1024];
	const char *status = output_text(check, "status", "?");
	printf("%s%-8s%s %-14s %s\n", output_color(stdout, output_state_color(status)), status, output_color_end(stdout),
	       output_safe(name, sizeof(name), output_text(check, "name", "?")),
	       output_safe(text, sizeof(text), output_text(check, "text", "")));
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
	json_array_foreach(json_object_get(answer, "checks"), index, check)
	{
		if (output_state_color(output_text(check, "status", "?")) == OUTPUT_RED)
			status = OUTPUT_EXIT_FAILURE;
		if (!output.json)
			print_check(check);
	}
	if (output.json)
		output_json(answer);
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
