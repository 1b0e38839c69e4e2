#include "cli/verbs.h"

static int client_only;

static const struct options_entry entries[] = {
    {'c', "client", OPTIONS_FLAG, &client_only, NULL, "do not ask the daemon", NULL},
    {0},
};

static int run(struct verb_call *call)
{
	struct error e;
	json_t *server = NULL;
	if (!client_only)
		api_set_timeout(call->api, 3000);
	int reached = !client_only && api_call(call->api, "GET", "/v1/version", NULL, &server, &e) == 0;
	if (output.json) {
		json_t *answer = json_pack("{s:s, s:o*}", "client", SPACE_VERSION, "server", server);
		output_json(answer);
		json_decref(answer);
		return output_finish(0);
	}
	printf("space %s\n", SPACE_VERSION);
	if (reached)
		printf("spaced %s\n", output_text(server, "version", "?"));
	else if (!client_only)
		printf("spaced not reached at %s\n", api_url(call->api));
	json_decref(server);
	return output_finish(0);
}

const struct verb verb_version = {
    .name = "version",
    .group = VERB_HOST,
    .summary = "show the versions of client and daemon",
    .arguments = "",
    .examples = "space version",
    .options = entries,
    .run = run,
};
