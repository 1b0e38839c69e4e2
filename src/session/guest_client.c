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
