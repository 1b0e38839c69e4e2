/* Commands in a guest by way of the agent's process service (docs/AGENT.md, section 1). */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "http/client.h"
#include "http/json.h"
#include "session/guest_client.h"

#define CONNECT_TIMEOUT_MS 10000
#define LINE_BYTES_MAX 4096
/* Users by the name in HTTP's basic scheme, without a password. */
#define ROOT "Basic cm9vdDo="
#define USER "Basic dXNlcjo="

struct run {
	struct buf line; /* the unfinished line */
	char last[256];  /* last whole line that was not empty */
	void (*tell)(void *context, const char *text);
	void *context;
	int ended;
	long long exit_code;
	char status[128];
};

static void run_line(struct run *run)
{
	if (!run->line.size)
		return;
	for (size_t i = 0; i < run->line.size; i++)
		if ((unsigned char)run->line.data[i] < 32)
			run->line.data[i] = ' ';
	if (!text_is_utf8(run->line.data, run->line.size))
		for (size_t i = 0; i < run->line.size; i++)
			if ((unsigned char)run->line.data[i] > 126)
				run->line.data[i] = '?';
	snprintf(run->last, sizeof(run->last), "%s", run->line.data);
	if (run->tell)
		run->tell(run->context, run->line.data);
	run->line.size = 0;
}

static void run_output(struct run *run, const char *data, size_t size)
{
	for (size_t i = 0; i < size; i++) {
		if (data[i] == '\n' || run->line.size == LINE_BYTES_MAX)
			run_line(run);
		if (data[i] != '\n' && data[i] != '\r')
			buf_append(&run->line, &data[i], 1);
	}
}

static void run_event(struct run *run, json_t *event)
{
	json_t *data = json_object_get(event, "data");
	static const char *const streams[] = {"stdout", "stderr"};
	for (size_t i = 0; i < ARRAY_SIZE(streams); i++) {
		json_t *text = json_object_get(data, streams[i]);
		size_t size = json_string_length(text);
		CLEANUP_FREE char *bytes = text ? malloc(size / 4 * 3 + 4) : NULL;
		long n = bytes ? text_base64_decode(bytes, json_string_value(text), size) : 0;
		if (n > 0)
			run_output(run, bytes, (size_t)n);
	}
	json_t *end = json_object_get(event, "end");
	if (end) {
		run->ended = 1;
		run->exit_code = json_integer_value(json_object_get(end, "exitCode"));
		const char *status = json_string_value(json_object_get(end, "status"));
		snprintf(run->status, sizeof(run->status), "%s", status ? status : "");
		if (json_integer_value(json_object_get(end, "signal")) && !run->exit_code)
			run->exit_code = 128 + json_integer_value(json_object_get(end, "signal"));
	}
}

/* One enveloped message of the stream: 1 = got one, 0 = the stream is over. */
static int run_message(struct http_client *client, struct run *run, struct error *e)
{
	unsigned char head[5];
	size_t have = 0;
	while (have < sizeof(head)) {
		ssize_t n = http_client_read(client, head + have, sizeof(head) - have, e);
		if (n <= 0)
			return n < 0 ? (int)n : error_set(e, ERROR_UNAVAILABLE, "the agent ended the stream early");
		have += (size_t)n;
	}
	size_t size = (size_t)head[1] << 24 | (size_t)head[2] << 16 | (size_t)head[3] << 8 | head[4];
	if (size > 4 * MIB)
		return error_set(e, ERROR_TOO_LARGE, "a message of %zu bytes from the agent", size);
	CLEANUP_FREE char *data = malloc(size + 1);
	if (!data)
		return error_set_errno(e, ENOMEM, "running a command in the guest");
	for (have = 0; have < size;) {
		ssize_t n = http_client_read(client, data + have, size - have, e);
		if (n <= 0)
			return n < 0 ? (int)n : error_set(e, ERROR_UNAVAILABLE, "the agent ended the stream early");
		have += (size_t)n;
	}
	json_t *message = NULL;
	int r = json_read_object(data, size, 4 * MIB, &message, e);
	if (r < 0)
		return r;
	if (head[0] & 2) {
		const char *text = json_string_value(json_object_get(json_object_get(message, "error"), "message"));
		r = text ? error_set(e, ERROR_INVALID, "%.300s", text) : 0;
	} else {
		run_event(run, json_object_get(message, "event"));
		r = 1;
	}
	json_decref(message);
	return r;
}

/* `message` is stolen. */
static int run_stream(struct http_client *client, json_t *message, const char *authorization, const char *access_token,
                      unsigned timeout_ms, struct run *run, struct error *e)
{
	CLEANUP_FREE char *text = message ? json_dumps(message, JSON_COMPACT) : NULL;
	json_decref(message);
	size_t size = text ? strlen(text) : 0;
	CLEANUP_FREE char *body = text ? malloc(size + 5) : NULL;
	if (!body)
		return error_set_errno(e, ENOMEM, "running a command in the guest");
	body[0] = 0;
	for (int i = 0; i < 4; i++)
		body[1 + i] = (char)(size >> (24 - 8 * i));
	memcpy(body + 5, text, size);
	const struct http_header headers[] = {{"Content-Type", "application/connect+json"},
	                                      {"Connect-Protocol-Version", "1"},
	                                      {"Authorization", authorization},
	                                      {"X-Access-Token", access_token}};
	struct http_call call = {.method = "POST",
	                         .target = "/process.Process/Start",
	                         .headers = headers,
	                         .header_count = ARRAY_SIZE(headers) - (access_token ? 0 : 1),
	                         .body = body,
	                         .body_size = size + 5,
	                         .timeout_ms = timeout_ms + 5000};
	int r = http_client_start(client, &call, e);
	struct http_answer head = {0};
	if (r == 0)
		r = http_client_read_head(client, &head, e);
	if (r == 0 && head.status != 200)
		r = error_set(e, ERROR_UNAVAILABLE, "the agent answers %d to the start of a command", head.status);
	http_answer_free(&head);
	if (r == 0)
		while ((r = run_message(client, run, e)) == 1)
			;
	return r;
}

/* `message` is stolen. */
static int run_message_to_end(struct guest *guest, json_t *message, const char *authorization, const char *access_token,
                              unsigned timeout_ms, struct run *run, struct error *e)
{
	int fd;
	struct http_client *client;
	int r = guest_connect(guest->helper, guest->sandbox_id, CONNECT_TIMEOUT_MS, &fd, e);
	if (r == 0)
		r = http_client_from_fd(fd, HOST_GUEST_ADDRESS, &client, e);
	if (r < 0) {
		json_decref(message);
		return r;
	}
	r = run_stream(client, message, authorization, access_token, timeout_ms, run, e);
	run_line(run);
	if (r == 0 && !run->ended)
		r = error_set(e, ERROR_UNAVAILABLE, "the agent did not tell how the command ended");
	if (r == 0 && run->exit_code != 0)
		r = error_set(e, ERROR_INVALID, "the command ended with %lld%s%s", run->exit_code, run->last[0] ? ": " : "",
		              run->last);
	buf_free(&run->line);
	http_client_free(client);
	return r;
}

int guest_run(struct guest *guest, const char *command, unsigned timeout_ms,
              void (*line)(void *context, const char *text), void *context, struct error *e)
{
	struct run run = {.tell = line, .context = context};
	json_t *message =
	    json_pack("{s:{s:s, s:[s, s, s], s:{s:s, s:s}, s:s}, s:b, s:I, s:b}", "process", "cmd", "/bin/bash", "args",
	              "-e", "-c", command, "envs", "HOME", "/root", "DEBIAN_FRONTEND", "noninteractive", "cwd", "/",
	              "stdin", 0, "timeoutMs", (json_int_t)timeout_ms, "group", 1);
	return run_message_to_end(guest, message, ROOT, NULL, timeout_ms, &run, e);
}

int guest_run_true(struct guest *guest, const char *access_token, unsigned timeout_ms, struct error *e)
{
	struct run run = {0};
	json_t *message = json_pack("{s:{s:s, s:[], s:{}}, s:b}", "process", "cmd", "true", "args", "envs", "stdin", 0);
	return run_message_to_end(guest, message, USER, access_token, timeout_ms, &run, e);
}
