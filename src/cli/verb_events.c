/* Follows /v1/events (server-sent events). When the daemon restarts, it goes on after the last event it has seen. */
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/text.h"
#include "cli/lines.h"
#include "cli/verbs.h"

#define RECONNECT_ATTEMPTS 30
#define RECONNECT_PAUSE_S 1

static const char *session_filter;
static const char *type_filter;
static struct options_number limit;

static const struct options_entry entries[] = {
    {0, "session", OPTIONS_STRING, &session_filter, "ID", "only events of this session (by id)", NULL},
    {0, "type", OPTIONS_STRING, &type_filter, "TYPE", "only events of this type; \"session.\" for all that begin so",
     NULL},
    {'n', "limit", OPTIONS_COUNT, &limit, "N", "end after N events", NULL},
    {0},
};

static uint64_t shown;

static void print_event(const json_t *event)
{
	char time[64];
	char text[512];
	char line[1024];
	size_t used = 0;
	const char *key;
	json_t *value;
	const char *when = output_text(event, "time", "");
	snprintf(time, sizeof(time), "%.12s", strchr(when, 'T') ? strchr(when, 'T') + 1 : when);
	text[0] = '\0';
	json_object_foreach((json_t *)(uintptr_t)event, key, value)
	{
		static const char *const known[] = {"id", "type", "time", "session_id", "tenant"};
		int is_known = json_is_null(value);
		for (size_t i = 0; i < ARRAY_SIZE(known); i++)
			is_known |= strcmp(key, known[i]) == 0;
		if (is_known || used >= sizeof(text) - 1)
			continue;
		char *dump = json_is_string(value) ? strdup(json_string_value(value)) : json_dumps(value, JSON_ENCODE_ANY);
		int n = snprintf(text + used, sizeof(text) - used, " %s=%s", key, dump ? dump : "");
		used += n > 0 ? MIN((size_t)n, sizeof(text) - used) : 0;
		free(dump);
	}
	printf("%s%s%s  %-24s %s%s\n", output_color(stdout, OUTPUT_DIM), time, output_color_end(stdout),
	       output_text(event, "type", "?"), output_text(event, "session_id", ""),
	       output_safe(line, sizeof(line), text));
	fflush(stdout);
}

static int show(const char *data)
{
	json_t *event = json_loads(data, 0, NULL);
	if (!event)
		return 0;
	if (output.json)
		output_json_line(event);
	else
		print_event(event);
	shown++;
	json_decref(event);
	return ferror(stdout) ? -1 : 0;
}

static int is_done(void)
{
	return limit.is_set && shown >= limit.value;
}

/* Until the stream ends (0) or is done with (1). */
static int follow(struct http_client *client, char *last_id, size_t last_id_size, struct error *e)
{
	struct lines lines = {.client = client};
	struct buf data = {.limit = LINES_BYTES_MAX};
	const char *line;
	int done = is_done();
	while (!done && lines_next(&lines, &line, e) > 0) {
		if (text_starts_with(line, "id:")) {
			line += 3 + (line[3] == ' ');
			if (text_copy(last_id, last_id_size, line) < 0)
				continue;
		} else if (text_starts_with(line, "data:")) {
			line += 5 + (line[5] == ' ');
			buf_printf(&data, "%s%s", data.size ? "\n" : "", line);
		} else if (*line == '\0' && data.size) {
			done = show(data.data) < 0 || is_done();
			buf_consume(&data, data.size);
		}
	}
	buf_free(&data);
	lines_free(&lines);
	return done;
}

static int add_query(struct buf *target, const char *name, const char *value)
{
	if (!value)
		return 0;
	int r = buf_printf(target, "%s%s=", strchr(target->data, '?') ? "&" : "?", name);
	return r < 0 ? r : api_escape(target, value);
}

static int run(struct verb_call *call)
{
	struct error e;
	char last_id[64] = "";
	CLEANUP_BUF struct buf target = {0};
	if (buf_append_string(&target, "/v1/events") < 0 || add_query(&target, "session", session_filter) < 0 ||
	    add_query(&target, "type", type_filter) < 0)
		abort();
	for (unsigned attempt = 0;; attempt++) {
		struct api_stream_call stream = {
		    .method = "GET",
		    .target = target.data,
		    .accept = "text/event-stream",
		    .last_event_id = *last_id ? last_id : NULL,
		};
		struct http_client *client;
		int r = api_stream(call->api, &stream, &client, &e);
		if (r < 0 && (!api_is_connection_error(&e) || !attempt || attempt > RECONNECT_ATTEMPTS))
			return verb_fail(call, &e, NULL, "cannot follow the events");
		if (r == 0) {
			int done = follow(client, last_id, sizeof(last_id), &e);
			http_client_free(client);
			if (done)
				return output_finish(0);
			attempt = 0;
		}
		sleep(RECONNECT_PAUSE_S);
	}
}

const struct verb verb_events = {
    .name = "events",
    .group = VERB_HOST,
    .summary = "follow what happens to sessions",
    .arguments = "",
    .examples = "space events\nspace events --json | jq -r 'select(.type==\"session.suspended\") | .session_id'",
    .options = entries,
    .run = run,
};
