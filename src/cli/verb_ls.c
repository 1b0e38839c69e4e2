#include <string.h>

#include "cli/session_table.h"
#include "cli/verbs.h"

static struct options_list states;
static struct options_list labels;
static int quiet;

static const struct options_entry entries[] = {
    {'s', "state", OPTIONS_LIST, &states, "STATE", "only sessions in this state; may be repeated", NULL},
    {'l', "label", OPTIONS_LIST, &labels, "K=V", "only sessions with this label", NULL},
    {'q', "quiet", OPTIONS_FLAG, &quiet, NULL, "only ids", NULL},
    {0},
};

static int add_query(struct buf *query, const char *name, const struct options_list *list)
{
	int r = 0;
	for (size_t i = 0; r == 0 && i < list->count; i++) {
		r = buf_printf(query, "%s%s=", query->size ? "&" : "", name);
		if (r == 0)
			r = api_escape(query, list->items[i]);
	}
	return r;
}

static int run(struct verb_call *call)
{
	struct error e;
	json_t *sessions;
	CLEANUP_BUF struct buf query = {0};
	if (add_query(&query, "state", &states) < 0 || add_query(&query, "label", &labels) < 0)
		abort();
	if (session_table_fetch(call->api, query.data ? query.data : "", &sessions, &e) < 0)
		return verb_fail(call, &e, NULL, "cannot list the sessions");
	if (output.json) {
		json_t *answer = json_pack("{s:O}", "sessions", sessions);
		output_json(answer);
		json_decref(answer);
	} else if (quiet) {
		size_t index;
		json_t *session;
		json_array_foreach(sessions, index, session)
		{
			puts(output_text(session, "id", "?"));
		}
	} else {
		struct table *table = session_table_make(sessions);
		table_print(table, stdout, 0);
		table_free(table);
	}
	json_decref(sessions);
	return output_finish(0);
}

const struct verb verb_ls = {
    .name = "ls",
    .group = VERB_SESSIONS,
    .summary = "list sessions",
    .arguments = "",
    .examples = "space ls\nspace ls --state running --label team=blue\nspace ls -q | xargs -r space suspend",
    .options = entries,
    .run = run,
};
