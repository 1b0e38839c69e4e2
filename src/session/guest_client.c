#include "session/guest_client.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/log.h"
#include "http/client.h"
#include "http/json.h"

/* A SYN that meets a guest which has not come up yet is lost, and TCP would send the next one a second later: better
 * to give up and take a new socket. The time allowed grows, so that a slow guest gets its chance. */
#define CONNECT_FIRST_MS 150
#define CONNECT_MOST_MS 2000
#define CONNECT_PAUSE_US 3000
#define HELPER_PAUSE_US 20000
#define ANSWER_BYTES_MAX 65536
#define ENTROPY_BYTES 128
#define LINE_BYTES_MAX 4096

static int connect_once(int fd, unsigned timeout_ms)
{
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(HOST_AGENT_PORT)};
	inet_pton(AF_INET, HOST_GUEST_ADDRESS, &address.sin_addr);
	fd_set_nonblocking(fd, 1);
	if (connect(fd, (const struct sockaddr *)&address, sizeof(address)) < 0) {
		if (errno != EINPROGRESS)
			return -errno;
		struct pollfd wait = {.fd = fd, .events = POLLOUT};
		int n = poll(&wait, 1, (int)timeout_ms);
		if (n <= 0)
			return n < 0 ? -errno : -ETIMEDOUT;
		int problem = 0;
		socklen_t size = sizeof(problem);
		if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &problem, &size) < 0)
			return -errno;
		if (problem)
			return -problem;
	}
	int on = 1;
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
	return fd_set_nonblocking(fd, 0);
}

int guest_connect(struct host_client *helper, const char *sandbox_id, unsigned timeout_ms, int *ret_fd, struct error *e)
{
	uint64_t end = time_monotonic_ms() + timeout_ms;
	unsigned attempt_ms = CONNECT_FIRST_MS;
	for (;;) {
		CLEANUP_CLOSE int fd = -1;
		struct error why;
		int r = host_sandbox_sockets(helper, sandbox_id, &fd, 1, &why);
		uint64_t now = time_monotonic_ms();
		/* The helper may be starting again just now. */
		if (r < 0 && why.code == ERROR_UNAVAILABLE && now < end) {
			usleep(HELPER_PAUSE_US);
			continue;
		}
		if (r < 0) {
			if (e)
				*e = why;
			return r;
		}
		unsigned left = now < end ? (unsigned)(end - now) : 1;
		r = connect_once(fd, MIN(attempt_ms, left));
		if (r == 0) {
			*ret_fd = TAKE_FD(fd);
			return 0;
		}
		if (time_monotonic_ms() >= end)
			return error_set(e, ERROR_TIMEOUT, "the guest did not accept a connection within %u ms (%s)", timeout_ms,
			                 strerror(-r));
		if (r != -ETIMEDOUT)
			usleep(CONNECT_PAUSE_US);
		attempt_ms = MIN(attempt_ms * 2, (unsigned)CONNECT_MOST_MS);
	}
}

void guest_close(struct guest *guest)
{
	http_client_free(guest->http);
	guest->http = NULL;
}

static int guest_open(struct guest *guest, unsigned timeout_ms, struct error *e)
{
	int fd;
	uint64_t start = time_monotonic_us();
	int r = guest_connect(guest->helper, guest->sandbox_id, timeout_ms, &fd, e);
	log_debug("session", "sandbox %s: connected in %llu us", guest->sandbox_id,
	          (unsigned long long)(time_monotonic_us() - start));
	return r < 0 ? r : http_client_from_fd(fd, HOST_GUEST_ADDRESS, &guest->http, e);
}

/* One exchange. A kept connection may have been closed by the guest meanwhile (it was restored, say); all calls are
 * idempotent, so it is then done again on a new one. */
static int exchange(struct guest *guest, const struct http_call *call, struct http_answer *ret, struct error *e)
{
	uint64_t start = time_monotonic_ms();
	if (guest->http && http_client_reusable(guest->http)) {
		struct error ignored;
		if (http_client_call(guest->http, call, ret, &ignored) == 0)
			return 0;
		if (ignored.code == ERROR_TIMEOUT) {
			guest_close(guest);
			if (e)
				*e = ignored;
			return error_code_errno(ignored.code);
		}
	}
	guest_close(guest);
	uint64_t spent = time_monotonic_ms() - start;
	unsigned left = spent + 1 < call->timeout_ms ? call->timeout_ms - (unsigned)spent : 1;
	int r = guest_open(guest, left, e);
	if (r == 0) {
		r = http_client_call(guest->http, call, ret, e);
		if (r < 0)
			guest_close(guest);
	}
	return r;
}

static int read_answer(const struct http_answer *answer, const char *path, json_t **ret, struct error *e)
{
	json_t *body = NULL;
	int r = json_read_object(answer->body.data ? answer->body.data : "", answer->body.size, ANSWER_BYTES_MAX, &body, e);
	if (answer->status >= 400) {
		const char *text = r == 0 ? json_string_value(json_object_get(body, "message")) : NULL;
		enum error_code code = answer->status == 401 || answer->status == 403 ? ERROR_UNAUTHENTICATED
		                       : answer->status == 409                        ? ERROR_CONFLICT
		                       : answer->status == 507                        ? ERROR_NO_SPACE
		                                                                      : ERROR_UNAVAILABLE;
		r = error_set(e, code, "the agent answers %d to %s%s%.200s", answer->status, path, text ? ": " : "",
		              text ? text : "");
	} else if (r < 0) {
		r = error_prefix(e, "the agent's answer to %s", path);
	}
	if (r == 0 && ret)
		*ret = json_incref(body);
	json_decref(body);
	return r;
}

int guest_call(struct guest *guest, const char *control_token, const char *method, const char *path, json_t *body,
               unsigned timeout_ms, json_t **ret, struct error *e)
{
	CLEANUP_FREE char *text = body ? json_dumps(body, JSON_COMPACT) : strdup("{}");
	json_decref(body);
	if (!text)
		return error_set_errno(e, ENOMEM, "calling the agent");
	const struct http_header headers[] = {{"X-Space-Control", control_token}, {"Content-Type", "application/json"}};
	int is_get = strcmp(method, "GET") == 0;
	struct http_call call = {.method = method,
	                         .target = path,
	                         .headers = headers,
	                         .header_count = is_get ? 1 : 2,
	                         .body = is_get ? NULL : text,
	                         .body_size = is_get ? 0 : strlen(text),
	                         .timeout_ms = timeout_ms,
	                         .answer_limit = ANSWER_BYTES_MAX};
	struct http_answer answer = {0};
	int r = exchange(guest, &call, &answer, e);
	explicit_bzero(text, strlen(text));
	if (r == 0)
		r = read_answer(&answer, path, ret, e);
	http_answer_free(&answer);
	return r;
}

static int status_call(struct guest *guest, const char *control_token, const char *method, const char *path,
                       unsigned timeout_ms, struct guest_status *ret, struct error *e)
{
	json_t *answer = NULL;
	int r = guest_call(guest, control_token, method, path, NULL, timeout_ms, &answer, e);
	if (r < 0)
		return r;
	const char *state = json_string_value(json_object_get(answer, "state"));
	json_int_t cpu = json_integer_value(json_object_get(answer, "user_cpu_us"));
	json_int_t writes = json_integer_value(json_object_get(answer, "writes"));
	*ret = (struct guest_status){.frozen = state && strcmp(state, "frozen") == 0,
	                             .user_cpu_us = cpu > 0 ? (uint64_t)cpu : 0,
	                             .writes = writes > 0 ? (uint64_t)writes : 0};
	json_decref(answer);
	return 0;
}

int guest_status_get(struct guest *guest, const char *control_token, unsigned timeout_ms, struct guest_status *ret,
                     struct error *e)
{
	return status_call(guest, control_token, "GET", "/space/v1/status", timeout_ms, ret, e);
}

int guest_quiesce(struct guest *guest, const char *control_token, unsigned timeout_ms, struct guest_status *ret,
                  struct error *e)
{
	int r = status_call(guest, control_token, "POST", "/space/v1/quiesce", timeout_ms, ret, e);
	return r < 0 ? error_prefix(e, "freezing the guest's processes") : 0;
}

static json_t *time_json(void)
{
	char text[32];
	text_format(text, sizeof(text), "%llu", (unsigned long long)time_realtime_ns());
	return json_string(text);
}

int guest_thaw(struct guest *guest, const char *control_token, unsigned timeout_ms, struct error *e)
{
	int r = guest_call(guest, control_token, "POST", "/space/v1/thaw", json_pack("{s:o}", "time_ns", time_json()),
	                   timeout_ms, NULL, e);
	return r < 0 ? error_prefix(e, "thawing the guest's processes") : 0;
}

int guest_resume_as(struct guest *guest, const char *present_token, const struct guest_identity *identity,
                    unsigned timeout_ms, struct error *e)
{
	unsigned char seed[ENTROPY_BYTES];
	char entropy[ENTROPY_BYTES * 2];
	/* Connected first, so that the time sent is not older than the handshake. */
	if (!guest->http || !http_client_reusable(guest->http)) {
		guest_close(guest);
		int r = guest_open(guest, timeout_ms, e);
		if (r < 0)
			return error_prefix(e, "giving the guest its identity");
	}
	random_bytes(seed, sizeof(seed));
	text_base64(entropy, seed, sizeof(seed));
	json_t *environment = json_loads(identity->environment ? identity->environment : "{}", 0, NULL);
	json_t *body =
	    json_pack("{s:s, s:s, s:s, s:s, s:s, s:o, s:s, s:o, s:s, s:s, s:s, s:b}", "session_id", identity->session_id,
	              "sandbox_id", identity->sandbox_id, "template_id", identity->template_id, "hostname",
	              identity->hostname, "machine_id", identity->machine_id, "time_ns", time_json(), "entropy", entropy,
	              "environment", environment ? environment : json_object(), "default_user", "user", "access_token",
	              identity->access_token, "control_token", identity->control_token, "thaw", identity->thaw);
	explicit_bzero(seed, sizeof(seed));
	explicit_bzero(entropy, sizeof(entropy));
	if (!body)
		return error_set_errno(e, ENOMEM, "giving the guest its identity");
	int r = guest_call(guest, present_token, "POST", "/space/v1/resume-as", body, timeout_ms, NULL, e);
	return r < 0 ? error_prefix(e, "giving the guest its identity") : 0;
}

/* ---- one command, as the template build needs it ---- */

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

static int run_stream(struct http_client *client, const char *command, unsigned timeout_ms, struct run *run,
                      struct error *e)
{
	json_t *message =
	    json_pack("{s:{s:s, s:[s, s, s], s:{s:s, s:s}, s:s}, s:b, s:I, s:b}", "process", "cmd", "/bin/bash", "args",
	              "-e", "-c", command, "envs", "HOME", "/root", "DEBIAN_FRONTEND", "noninteractive", "cwd", "/",
	              "stdin", 0, "timeoutMs", (json_int_t)timeout_ms, "group", 1);
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
	                                      {"Authorization", "Basic cm9vdDo="}};
	struct http_call call = {.method = "POST",
	                         .target = "/process.Process/Start",
	                         .headers = headers,
	                         .header_count = ARRAY_SIZE(headers),
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

int guest_run(struct guest *guest, const char *command, unsigned timeout_ms,
              void (*line)(void *context, const char *text), void *context, struct error *e)
{
	int fd;
	struct http_client *client;
	int r = guest_connect(guest->helper, guest->sandbox_id, 10000, &fd, e);
	if (r < 0)
		return r;
	r = http_client_from_fd(fd, HOST_GUEST_ADDRESS, &client, e);
	if (r < 0)
		return r;
	struct run run = {.tell = line, .context = context};
	r = run_stream(client, command, timeout_ms, &run, e);
	run_line(&run);
	if (r == 0 && !run.ended)
		r = error_set(e, ERROR_UNAVAILABLE, "the agent did not tell how the command ended");
	if (r == 0 && run.exit_code != 0)
		r = error_set(e, ERROR_INVALID, "the command ended with %lld%s%s", run.exit_code, run.last[0] ? ": " : "",
		              run.last);
	buf_free(&run.line);
	http_client_free(client);
	return r;
}
