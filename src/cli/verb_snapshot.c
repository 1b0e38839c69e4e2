#include "base/text.h"
#include "cli/table.h"
#include "cli/verbs.h"

static const char *name;

static const struct options_entry entries[] = {
    {'n', "name", OPTIONS_STRING, &name, "NAME", "a name for it", NULL},
    {0},
};

static int run_take(struct verb_call *call)
{
	struct error e;
	json_t *snapshot;
	if (verb_session_post(call, call->args[0], "snapshot", json_pack("{s:s*}", "name", name), &snapshot, &e) < 0)
		return verb_fail(call, &e, "session", "cannot snapshot %s", call->args[0]);
	/* The answer is the snapshot, or the session with it as member. */
	const json_t *inner = json_object_get(snapshot, "snapshot");
	if (output.json)
		output_json(snapshot);
	else
		puts(json_is_string(inner) ? json_string_value(inner) : output_text(inner ? inner : snapshot, "id", "?"));
	json_decref(snapshot);
	return output_finish(0);
}

const struct verb verb_snapshot = {
    .name = "snapshot",
    .group = VERB_TIMELINE,
    .summary = "take a snapshot of a session and print its id",
    .arguments = "ID",
    .description = "The session goes on. Snapshots taken so are kept until removed.",
    .examples = "space snapshot web --name before-upgrade",
    .options = entries,
    .args_min = 1,
    .args_max = 1,
    .run = run_take,
};

static int run_list(struct verb_call *call)
{
	struct error e;
	json_t *history;
	CLEANUP_FREE char *target = api_session_path(call->args[0], "/snapshots");
	if (api_call(call->api, "GET", target, NULL, &history, &e) < 0)
		return verb_fail(call, &e, "session", "cannot list the snapshots of %s", call->args[0]);
	if (output.json) {
		output_json(history);
		json_decref(history);
		return output_finish(0);
	}
	struct table *table = table_new("ID", "NAME", "KIND", "CREATED", ">STORED", "PARENT", NULL);
	size_t index;
	json_t *snapshot;
	json_array_foreach(json_object_get(history, "snapshots"), index, snapshot)
	{
		char age[64];
		char size[32];
		output_age(age, sizeof(age), output_text(snapshot, "created_at", NULL));
		text_format_size(size, sizeof(size), (uint64_t)json_integer_value(json_object_get(snapshot, "bytes_stored")));
		table_row(table);
		table_cell(table, OUTPUT_PLAIN, output_text(snapshot, "id", "?"));
		table_cell(table, OUTPUT_BOLD, output_text(snapshot, "name", "-"));
		table_cell(table, OUTPUT_PLAIN, output_text(snapshot, "kind", "-"));
		table_cell(table, OUTPUT_PLAIN, age);
		table_cell(table, OUTPUT_PLAIN, size);
		table_cell(table, OUTPUT_DIM, output_text(snapshot, "parent", "-"));
	}
	table_print(table, stdout, 0);
	table_free(table);
	json_decref(history);
	return output_finish(0);
}

const struct verb verb_snapshot_ls = {
    .name = "snapshot ls",
    .group = VERB_TIMELINE,
    .summary = "list the snapshots of a session",
    .arguments = "ID",
    .examples = "space snapshot ls web",
    .args_min = 1,
    .args_max = 1,
    .run = run_list,
};

static int run_remove(struct verb_call *call)
{
	CLEANUP_FREE char *prefix = api_session_path(call->args[0], "/snapshots/");
	return verb_remove(call, 1, prefix, "snapshot", 0);
}

const struct verb verb_snapshot_rm = {
    .name = "snapshot rm",
    .group = VERB_TIMELINE,
    .summary = "remove snapshots of a session",
    .arguments = "ID SNAPSHOT…",
    .examples = "space snapshot rm web n4k2…",
    .args_min = 2,
    .args_max = VERB_UNLIMITED,
    .run = run_remove,
};
