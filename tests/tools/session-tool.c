/*
 * Drives the session manager without the API, for development: one command a line on stdin, one JSON line an answer.
 *
 *   session-tool --data DIR --runtime DIR --helper SOCKET [--agent FILE] [--pool N] [--interval S]
 *
 *   build JSON | create [JSON] | do VERB ID [JSON] | get ID | list [JSON] | history ID | forget ID SNAPSHOT
 *   exec ID COMMAND…      runs it with sh -c as the default user and prints output, status and time
 *   repeat N COMMAND…     runs a line N times and prints the percentiles of its time
 *   par N COMMAND…        runs a line in N threads at once
 *   templates | untemplate NAME | metrics | doctor | sleep MS | die | quit
 *
 * $1 … $9 in a line stand for the ids that the latest creates and branches gave, the newest first.
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/fd.h"
#include "base/log.h"
#include "http/client.h"
#include "session/session.h"

#define IDS 9
#define LINE_BYTES 65536

static struct session_manager *manager;
static const struct session_caller admin = {.tenant = "default", .is_admin = 1};
static char ids[IDS][ID_BYTES];
static int print_width = 200; /* SESSION_TOOL_WIDTH */
static pthread_mutex_t print_mutex = PTHREAD_MUTEX_INITIALIZER;

static void push_id(const char *id)
{
	memmove(ids[1], ids[0], sizeof(ids) - sizeof(ids[0]));
	(void)text_copy(ids[0], ID_BYTES, id);
}

static void print_json(const char *what, json_t *value, uint64_t us)
{
	char *text = value ? json_dumps(value, JSON_COMPACT) : NULL;
	pthread_mutex_lock(&print_mutex);
	printf("%s %.1f ms %.*s\n", what, (double)us / 1000, print_width, text ? text : "");
	fflush(stdout);
	pthread_mutex_unlock(&print_mutex);
	free(text);
}

static void print_error(const char *what, const struct error *e)
{
	pthread_mutex_lock(&print_mutex);
	printf("%s FAILED %s: %s\n", what, error_code_name(e->code), e->message);
	fflush(stdout);
	pthread_mutex_unlock(&print_mutex);
}

static void progress(void *context, const char *line)
{
	(void)context;
	printf("  %s\n", line);
	fflush(stdout);
}

struct output {
	struct buf text;
	long long code;
	int ended;
};

static void take_event(struct output *output, json_t *event)
{
	static const char *const names[] = {"stdout", "stderr"};
	json_t *data = json_object_get(event, "data");
	for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
		json_t *text = json_object_get(data, names[i]);
		size_t size = json_string_length(text);
		char *to = text ? buf_reserve(&output->text, size / 4 * 3 + 3) : NULL;
		long n = to ? text_base64_decode(to, json_string_value(text), size) : 0;
		if (n > 0) {
			output->text.size += (size_t)n;
			output->text.data[output->text.size] = '\0';
		}
	}
	json_t *end = json_object_get(event, "end");
	if (end) {
		output->ended = 1;
		output->code = json_integer_value(json_object_get(end, "exitCode"));
	}
}

static int read_stream(struct http_client *client, struct output *output, struct error *e)
{
	struct buf in = {0};
	char chunk[16384];
	ssize_t n;
	int r = 0;
	while ((n = http_client_read(client, chunk, sizeof(chunk), e)) > 0) {
		buf_append(&in, chunk, (size_t)n);
		for (;;) {
			const unsigned char *head = (const unsigned char *)in.data;
			size_t size =
			    in.size < 5 ? 0 : (size_t)head[1] << 24 | (size_t)head[2] << 16 | (size_t)head[3] << 8 | head[4];
			if (in.size < 5 || in.size < size + 5)
				break;
			json_t *message = json_loadb(in.data + 5, size, 0, NULL);
			take_event(output, json_object_get(message, "event"));
			const char *text = json_string_value(json_object_get(json_object_get(message, "error"), "message"));
			if (text)
				r = error_set(e, ERROR_INVALID, "%s", text);
			json_decref(message);
			buf_consume(&in, size + 5);
		}
	}
	buf_free(&in);
	return n < 0 ? (int)n : r;
}

static int exec_in(const char *id, const char *command, struct output *output, struct error *e)
{
	struct session_endpoint way;
	int r = session_open(manager, &admin, id, 1, &way, e);
	if (r < 0)
		return r;
	struct http_client *client;
	r = http_client_from_fd(way.fd, HOST_GUEST_ADDRESS, &client, e);
	if (r < 0) {
		session_close(manager, way.session_id);
		return r;
	}
	json_t *message =
	    json_pack("{s:{s:s, s:[s, s]}, s:b}", "process", "cmd", "/bin/sh", "args", "-c", command, "stdin", 0);
	char *text = json_dumps(message, JSON_COMPACT);
	size_t size = strlen(text);
	struct buf body = {0};
	char head[5] = {0, (char)(size >> 24), (char)(size >> 16), (char)(size >> 8), (char)size};
	buf_append(&body, head, 5);
	buf_append(&body, text, size);
	free(text);
	json_decref(message);
	const struct http_header headers[] = {{"Content-Type", "application/connect+json"},
	                                      {"Connect-Protocol-Version", "1"},
	                                      {"X-Access-Token", way.access_token}};
	struct http_call call = {.method = "POST",
	                         .target = "/process.Process/Start",
	                         .headers = headers,
	                         .header_count = ARRAY_SIZE(headers),
	                         .body = body.data,
	                         .body_size = body.size,
	                         .timeout_ms = 60000};
	struct http_answer answer = {0};
	r = http_client_start(client, &call, e);
	if (r == 0)
		r = http_client_read_head(client, &answer, e);
	if (r == 0 && answer.status != 200)
		r = error_set(e, ERROR_UNAVAILABLE, "status %d", answer.status);
	if (r == 0)
		r = read_stream(client, output, e);
	if (r == 0 && !output->ended)
		r = error_set(e, ERROR_UNAVAILABLE, "the stream was cut");
	http_answer_free(&answer);
	buf_free(&body);
	http_client_free(client);
	session_close(manager, way.session_id);
	return r;
}

static char *word(char **line)
{
	while (**line == ' ')
		(*line)++;
	char *start = *line;
	while (**line && **line != ' ')
		(*line)++;
	if (**line)
		*(*line)++ = '\0';
	return start;
}

static json_t *rest_json(char *line)
{
	while (*line == ' ')
		line++;
	return *line ? json_loads(line, 0, NULL) : json_object();
}

static void note_ids(json_t *answer)
{
	const char *id = json_string_value(json_object_get(answer, "id"));
	if (id && id_is_valid(id, 's'))
		push_id(id);
	size_t i;
	json_t *item;
	json_array_foreach(json_object_get(answer, "sessions"), i, item)
	    push_id(json_string_value(json_object_get(item, "id")));
}

static int run_line(char *line, int quiet);

static int do_exec(char *line, int quiet)
{
	struct error e;
	struct output output = {0};
	uint64_t start = time_monotonic_us();
	const char *id = word(&line);
	int r = exec_in(id, line, &output, &e);
	uint64_t us = time_monotonic_us() - start;
	pthread_mutex_lock(&print_mutex);
	if (r < 0)
		printf("exec FAILED %s: %s\n", error_code_name(e.code), e.message);
	else if (!quiet)
		printf("exec %.1f ms status %lld: %s%s", (double)us / 1000, output.code,
		       output.text.data ? output.text.data : "",
		       output.text.size && output.text.data[output.text.size - 1] == '\n' ? "" : "\n");
	fflush(stdout);
	pthread_mutex_unlock(&print_mutex);
	buf_free(&output.text);
	return r;
}

static int do_call(const char *name, char *line, int quiet)
{
	struct error e = {0};
	json_t *answer = NULL;
	json_t *params = NULL;
	uint64_t start = time_monotonic_us();
	int r;
	if (strcmp(name, "build") == 0) {
		params = rest_json(line);
		r = template_build(manager, &admin, params, progress, NULL, &answer, &e);
	} else if (strcmp(name, "create") == 0) {
		params = rest_json(line);
		r = session_create(manager, &admin, params, &answer, &e);
		if (r == 0)
			note_ids(answer);
	} else if (strcmp(name, "do") == 0) {
		const char *verb = word(&line);
		const char *id = word(&line);
		int v = session_verb_from_name(verb);
		params = rest_json(line);
		r = v < 0 ? error_set(&e, ERROR_INVALID, "no verb %s", verb)
		          : session_do(manager, &admin, id, (enum session_verb)v, params, &answer, &e);
		if (r == 0 && v == SESSION_BRANCH)
			note_ids(answer);
	} else if (strcmp(name, "get") == 0) {
		r = session_get(manager, &admin, word(&line), &answer, &e);
	} else if (strcmp(name, "list") == 0) {
		params = rest_json(line);
		r = session_list(manager, &admin, params, &answer, &e);
	} else if (strcmp(name, "history") == 0) {
		r = session_history(manager, &admin, word(&line), &answer, &e);
	} else if (strcmp(name, "forget") == 0) {
		const char *id = word(&line);
		r = session_snapshot_delete(manager, &admin, id, word(&line), &e);
	} else if (strcmp(name, "templates") == 0) {
		r = template_list(manager, &admin, &answer, &e);
	} else if (strcmp(name, "untemplate") == 0) {
		r = template_delete(manager, &admin, word(&line), &e);
	} else if (strcmp(name, "doctor") == 0) {
		r = session_doctor(manager, &answer, &e);
	} else {
		r = error_set(&e, ERROR_INVALID, "unknown command");
	}
	uint64_t us = time_monotonic_us() - start;
	if (r < 0)
		print_error(name, &e);
	else if (!quiet)
		print_json(name, answer, us);
	json_decref(answer);
	json_decref(params);
	return r;
}

static int compare_u64(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a;
	uint64_t y = *(const uint64_t *)b;
	return x < y ? -1 : x > y;
}

static int do_repeat(char *line)
{
	uint64_t count = 0;
	if (text_parse_u64(word(&line), 100000, &count) < 0 || !count)
		return -EINVAL;
	uint64_t *times = calloc(count, sizeof(*times));
	int failed = 0;
	for (uint64_t i = 0; times && i < count; i++) {
		char copy[LINE_BYTES];
		if (text_copy(copy, sizeof(copy), line) < 0)
			break;
		uint64_t start = time_monotonic_us();
		failed += run_line(copy, 1) < 0;
		times[i] = time_monotonic_us() - start;
	}
	if (times) {
		qsort(times, count, sizeof(*times), compare_u64);
		printf("repeat %s: n %llu failed %d p50 %.1f p90 %.1f p99 %.1f max %.1f ms\n", line, (unsigned long long)count,
		       failed, (double)times[count / 2] / 1000, (double)times[count * 9 / 10] / 1000,
		       (double)times[count * 99 / 100] / 1000, (double)times[count - 1] / 1000);
	}
	free(times);
	return 0;
}

static void *par_thread(void *context)
{
	char copy[LINE_BYTES];
	if (text_copy(copy, sizeof(copy), context) == 0)
		run_line(copy, 0);
	return NULL;
}

static int do_par(char *line)
{
	uint64_t count = 0;
	pthread_t threads[64];
	if (text_parse_u64(word(&line), ARRAY_SIZE(threads), &count) < 0)
		return -EINVAL;
	for (uint64_t i = 0; i < count; i++)
		pthread_create(&threads[i], NULL, par_thread, line);
	for (uint64_t i = 0; i < count; i++)
		pthread_join(threads[i], NULL);
	return 0;
}

static void expand(const char *line, char *to, size_t size)
{
	size_t used = 0;
	for (const char *p = line; *p && used + ID_BYTES < size; p++) {
		if (p[0] == '$' && p[1] >= '1' && p[1] <= '9') {
			(void)text_copy(to + used, size - used, ids[p[1] - '1']);
			used += strlen(to + used);
			p++;
		} else {
			to[used++] = *p;
		}
	}
	to[used] = '\0';
}

static int run_line(char *raw, int quiet)
{
	char line[LINE_BYTES];
	expand(raw, line, sizeof(line));
	char *rest = line;
	const char *name = word(&rest);
	if (!*name || *name == '#')
		return 0;
	if (strcmp(name, "exec") == 0)
		return do_exec(rest, quiet);
	if (strcmp(name, "repeat") == 0)
		return do_repeat(raw + 7);
	if (strcmp(name, "par") == 0)
		return do_par(rest);
	if (strcmp(name, "die") == 0)
		kill(getpid(), SIGKILL);
	if (strcmp(name, "sleep") == 0) {
		uint64_t ms = 0;
		if (text_parse_u64(word(&rest), 600000, &ms) == 0)
			usleep((useconds_t)ms * 1000);
		return 0;
	}
	if (strcmp(name, "metrics") == 0) {
		struct buf text = {0};
		session_metrics(manager, &text);
		printf("%s", text.data ? text.data : "");
		buf_free(&text);
		return 0;
	}
	return do_call(name, rest, quiet);
}

static void sink(void *context, const json_t *event)
{
	(void)context;
	if (getenv("SESSION_TOOL_EVENTS")) {
		char *text = json_dumps(event, JSON_COMPACT);
		fprintf(stderr, "event %s\n", text ? text : "");
		free(text);
	}
}

static int read_options(int argc, char **argv, struct session_config *config)
{
	for (int i = 1; i + 1 < argc; i += 2) {
		const char *name = argv[i];
		char *value = argv[i + 1];
		uint64_t number = 0;
		if (strcmp(name, "--data") == 0)
			config->data_dir = value;
		else if (strcmp(name, "--runtime") == 0)
			config->runtime_dir = value;
		else if (strcmp(name, "--helper") == 0)
			config->helper_socket = value;
		else if (strcmp(name, "--agent") == 0)
			config->agent_path = value;
		else if (text_parse_u64(value, UINT32_MAX, &number) < 0)
			return -EINVAL;
		else if (strcmp(name, "--pool") == 0)
			config->pool_size = (unsigned)number;
		else if (strcmp(name, "--interval") == 0)
			config->snapshot_interval_s = (unsigned)number;
		else if (strcmp(name, "--sandboxes") == 0)
			config->sandboxes_max = (unsigned)number;
		else
			return -EINVAL;
	}
	return config->data_dir && config->runtime_dir && config->helper_socket ? 0 : -EINVAL;
}

int main(int argc, char **argv)
{
	struct session_config config = {0};
	struct error e;
	if (read_options(argc, argv, &config) < 0) {
		fprintf(stderr, "usage: session-tool --data DIR --runtime DIR --helper SOCKET [--agent FILE] [--pool N]"
		                " [--interval S] [--sandboxes N]\n");
		return 2;
	}
	signal(SIGPIPE, SIG_IGN);
	if (getenv("SESSION_TOOL_LOG"))
		log_set_level(getenv("SESSION_TOOL_LOG"));
	uint64_t width;
	if (text_parse_u64(getenv("SESSION_TOOL_WIDTH"), 1 << 30, &width) == 0)
		print_width = (int)width;
	if (session_manager_new(&config, &manager, &e) < 0) {
		fprintf(stderr, "session-tool: %s\n", e.message);
		return 1;
	}
	session_set_event_sink(manager, sink, NULL);
	char line[LINE_BYTES];
	while (fgets(line, sizeof(line), stdin)) {
		line[strcspn(line, "\n")] = '\0';
		if (strcmp(line, "quit") == 0)
			break;
		run_line(line, 0);
	}
	session_manager_free(manager);
	return 0;
}
