#include "cli/session_table.h"

#include <string.h>

#include "base/text.h"

#define PAGES_MAX 1000

int session_table_fetch(struct api *api, const char *query, json_t **ret, struct error *e)
{
	json_t *all = json_array();
	CLEANUP_FREE char *cursor = NULL;
	for (unsigned page = 0; page < PAGES_MAX; page++) {
		CLEANUP_BUF struct buf target = {0};
		if (buf_printf(&target, "/v1/sessions?limit=1000%s%s%s", *query ? "&" : "", query, cursor ? "&cursor=" : "") <
		        0 ||
		    (cursor && api_escape(&target, cursor) < 0))
			abort();
		json_t *answer;
		int r = api_call(api, "GET", target.data, NULL, &answer, e);
		if (r < 0) {
			json_decref(all);
			return r;
		}
		json_array_extend(all, json_object_get(answer, "sessions"));
		const char *next = output_text(answer, "next_cursor", NULL);
		free(cursor);
		cursor = next ? strdup(next) : NULL;
		json_decref(answer);
		if (!cursor)
			break;
	}
	*ret = all;
	return 0;
}

static void labels_cell(struct table *table, const json_t *labels)
{
	char text[TABLE_CELL_BYTES] = "";
	size_t used = 0;
	const char *key;
	json_t *value;
	json_object_foreach((json_t *)(uintptr_t)labels, key, value)
	{
		int n = snprintf(text + used, sizeof(text) - used, "%s%s=%s", used ? "," : "", key, json_string_value(value));
		if (n < 0 || (size_t)n >= sizeof(text) - used)
			break;
		used += (size_t)n;
	}
	table_cell(table, OUTPUT_DIM, text);
}

static void timeout_cell(struct table *table, const json_t *session)
{
	json_int_t seconds = json_integer_value(json_object_get(session, "timeout_s"));
	const char *action = output_text(session, "on_timeout", "suspend");
	char end[64];
	const json_t *end_at = json_object_get(session, "end_at");
	if (!seconds)
		table_cell(table, OUTPUT_DIM, "-");
	else if (json_is_string(end_at)) {
		output_age(end, sizeof(end), json_string_value(end_at));
		table_cellf(table, "%s %s", action, end);
	} else
		table_cellf(table, "%s after %lld s", action, (long long)seconds);
}

struct table *session_table_make(const json_t *sessions)
{
	struct table *table = table_new("ID", "NAME", "STATE", "TEMPLATE", "CREATED", "TIMEOUT", "LABELS", NULL);
	size_t index;
	json_t *session;
	json_array_foreach(sessions, index, session)
	{
		char age[64];
		const char *state = output_text(session, "state", "?");
		output_age(age, sizeof(age), output_text(session, "created_at", NULL));
		table_row(table);
		table_cell(table, OUTPUT_PLAIN, output_text(session, "id", "?"));
		table_cell(table, OUTPUT_PLAIN, output_text(session, "name", "-"));
		table_cell(table, output_state_color(state), state);
		table_cell(table, OUTPUT_PLAIN, output_text(session, "template", "-"));
		table_cell(table, OUTPUT_PLAIN, age);
		timeout_cell(table, session);
		labels_cell(table, json_object_get(session, "labels"));
	}
	return table;
}
