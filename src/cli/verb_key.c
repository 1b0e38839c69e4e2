#include "cli/table.h"
#include "cli/verbs.h"

static const char *name;
static const char *tenant;
static int admin;

static const struct options_entry create_entries[] = {
    {'n', "name", OPTIONS_STRING, &name, "NAME", "what it is for", NULL},
    {0, "tenant", OPTIONS_STRING, &tenant, "TENANT", "whose sessions it sees", NULL},
    {0, "admin", OPTIONS_FLAG, &admin, NULL, "sees everything, may manage templates and keys", NULL},
    {0},
};

static int run_create(struct verb_call *call)
{
	struct error e;
	json_t *key;
	json_t *body = json_pack("{s:s*, s:s*}", "name", name, "tenant", tenant);
	if (admin)
		json_object_set_new(body, "admin", json_true());
	int r = api_call(call->api, "POST", "/v1/keys", body, &key, &e);
	json_decref(body);
	if (r < 0)
		return verb_fail(call, &e, NULL, "cannot create a key");
	if (output.json) {
		output_json(key);
	} else {
		puts(output_text(key, "key", "?"));
		if (output.terminal_out)
			output_note("this is the only time the key is shown; its id is %s", output_text(key, "id", "?"));
	}
	json_decref(key);
	return output_finish(0);
}

const struct verb verb_key_create = {
    .name = "key create",
    .group = VERB_SUPPLIES,
    .summary = "make an API key and print it (once)",
    .arguments = "",
    .examples = "export SPACE_API_KEY=$(space key create --name laptop --admin)",
    .options = create_entries,
    .run = run_create,
};

static int run_list(struct verb_call *call)
{
	struct error e;
	json_t *answer;
	if (api_call(call->api, "GET", "/v1/keys", NULL, &answer, &e) < 0)
		return verb_fail(call, &e, NULL, "cannot list the keys");
	if (output.json) {
		output_json(answer);
		json_decref(answer);
		return output_finish(0);
	}
	struct table *table = table_new("ID", "NAME", "TENANT", "ADMIN", "KEY", "CREATED", NULL);
	size_t index;
	json_t *key;
	json_array_foreach(json_object_get(answer, "keys"), index, key)
	{
		char age[64];
		output_age(age, sizeof(age), output_text(key, "created_at", NULL));
		table_row(table);
		table_cell(table, OUTPUT_PLAIN, output_text(key, "id", "?"));
		table_cell(table, OUTPUT_PLAIN, output_text(key, "name", "-"));
		table_cell(table, OUTPUT_PLAIN, output_text(key, "tenant", "-"));
		table_cell(table, OUTPUT_PLAIN, json_is_true(json_object_get(key, "admin")) ? "yes" : "no");
		table_cell(table, OUTPUT_DIM, output_text(key, "hint", "-"));
		table_cell(table, OUTPUT_PLAIN, age);
	}
	table_print(table, stdout, 0);
	table_free(table);
	json_decref(answer);
	return output_finish(0);
}

const struct verb verb_key_ls = {
    .name = "key ls",
    .group = VERB_SUPPLIES,
    .summary = "list API keys (not their values)",
    .arguments = "",
    .examples = "space key ls",
    .run = run_list,
};

static int run_remove(struct verb_call *call)
{
	return verb_remove(call, 0, "/v1/keys/", "key", 0);
}

const struct verb verb_key_rm = {
    .name = "key rm",
    .group = VERB_SUPPLIES,
    .summary = "revoke API keys",
    .arguments = "KEY_ID…",
    .examples = "space key rm k3f…",
    .args_min = 1,
    .args_max = VERB_UNLIMITED,
    .run = run_remove,
};
