/* A live table. Figures of a session come from the guest agent's /metrics, asked only of running ones (asking would
 * wake the others). */
#include <inttypes.h>
#include <poll.h>
#include <string.h>
#include <unistd.h>

#include "base/text.h"
#include "cli/session_table.h"
#include "cli/terminal.h"
#include "cli/verbs.h"

#define METRICS_TIMEOUT_MS 2000
#define METRICS_SESSIONS_MAX 64 /* asked one after the other; more would make the table older than its period */
#define FAILURES_MAX 15

static struct options_number interval;
static struct options_number rounds;

static const struct options_entry entries[] = {
    {'d', "interval", OPTIONS_DURATION, &interval, "S", "time between two looks; 1 unless given", NULL},
    {'n', "rounds", OPTIONS_COUNT, &rounds, "N", "end after N looks", NULL},
    {0},
};

static json_t *fetch_metrics(struct api *api, const char *session)
{
	struct error e;
	json_t *metrics = NULL;
	CLEANUP_FREE char *target = api_session_path(session, "/agent/metrics");
	if (api_call(api, "GET", target, NULL, &metrics, &e) < 0)
		return NULL;
	return metrics;
}

static void add_metrics(struct api *api, json_t *sessions)
{
	size_t index;
	json_t *session;
	size_t asked = 0;
	json_array_foreach(sessions, index, session)
	{
		if (strcmp(output_text(session, "state", ""), "running") != 0 || asked++ >= METRICS_SESSIONS_MAX)
			continue;
		json_t *metrics = fetch_metrics(api, output_text(session, "id", ""));
		if (metrics)
			json_object_set_new(session, "metrics", metrics);
	}
}

static void size_cell(struct table *table, const json_t *used, const json_t *total)
{
	char a[32];
	char b[32];
	if (!json_is_number(used)) {
		table_cell(table, OUTPUT_DIM, "-");
		return;
	}
	text_format_size(a, sizeof(a), (uint64_t)json_number_value(used));
	text_format_size(b, sizeof(b), (uint64_t)json_number_value(total));
	table_cellf(table, "%s / %s", a, b);
}

static struct table *make_table(const json_t *sessions)
{
	struct table *table = table_new("ID", "NAME", "STATE", ">CPU", ">MEMORY", ">DISK", "CREATED", NULL);
	size_t index;
	json_t *session;
	json_array_foreach(sessions, index, session)
	{
		char age[64];
		const json_t *metrics = json_object_get(session, "metrics");
		const json_t *cpu = json_object_get(metrics, "cpu_used_pct");
		const char *state = output_text(session, "state", "?");
		output_age(age, sizeof(age), output_text(session, "created_at", NULL));
		table_row(table);
		table_cell(table, OUTPUT_PLAIN, output_text(session, "id", "?"));
		table_cell(table, OUTPUT_PLAIN, output_text(session, "name", "-"));
		table_cell(table, output_state_color(state), state);
		if (json_is_number(cpu))
			table_cellf(table, "%.0f %%", json_number_value(cpu));
		else
			table_cell(table, OUTPUT_DIM, "-");
		size_cell(table, json_object_get(metrics, "mem_used"), json_object_get(metrics, "mem_total"));
		size_cell(table, json_object_get(metrics, "disk_used"), json_object_get(metrics, "disk_total"));
		table_cell(table, OUTPUT_PLAIN, age);
	}
	return table;
}

static void print_screen(const json_t *sessions, const struct api *api)
{
	unsigned columns;
	unsigned rows;
	size_t running = 0;
	size_t index;
	json_t *session;
	terminal_size(&columns, &rows);
	json_array_foreach(sessions, index, session)
	{
		running += strcmp(output_text(session, "state", ""), "running") == 0;
	}
	if (output.terminal_out)
		printf("\033[H\033[J");
	printf("%zu sessions, %zu running   %s\n\n", json_array_size(sessions), running, api_url(api));
	struct table *table = make_table(sessions);
	table_print(table, stdout, output.terminal_out ? columns : 0);
	table_free(table);
	fflush(stdout);
}

static int run(struct verb_call *call)
{
	uint64_t period_ms = interval.is_set && interval.value ? interval.value * 1000 : 1000;
	struct api *metrics_api = api_clone(call->api);
	if (!metrics_api)
		abort();
	api_set_timeout(metrics_api, METRICS_TIMEOUT_MS);
	int status = 0;
	unsigned failures = 0;
	for (uint64_t round = 0; !rounds.is_set || round < rounds.value; round++) {
		struct error e;
		json_t *sessions;
		if (round)
			poll(NULL, 0, (int)MIN(period_ms, UINT64_C(3600000)));
		if (session_table_fetch(call->api, "", &sessions, &e) < 0) {
			/* A few failed looks may be a restart of the daemon; the first and a lasting one are told. */
			if (round && api_is_connection_error(&e) && ++failures < FAILURES_MAX)
				continue;
			status = verb_fail(call, &e, NULL, "cannot list the sessions");
			break;
		}
		failures = 0;
		add_metrics(metrics_api, sessions);
		if (output.json)
			output_json_line(sessions);
		else
			print_screen(sessions, call->api);
		json_decref(sessions);
		if (ferror(stdout))
			break;
	}
	api_free(metrics_api);
	return output_finish(status);
}

const struct verb verb_top = {
    .name = "top",
    .group = VERB_HOST,
    .summary = "a live table of sessions and what they use",
    .arguments = "",
    .examples = "space top\nspace top --json -n 1",
    .options = entries,
    .run = run,
};
