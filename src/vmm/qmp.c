#include "vmm/qmp.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/text.h"

#define READ_BYTES ((size_t)(16 * KIB))

void qmp_init(struct qmp *qmp)
{
	memset(qmp, 0, sizeof(*qmp));
	qmp->fd = -1;
	qmp->in.limit = QMP_MESSAGE_BYTES_MAX;
	pthread_mutex_init(&qmp->lock, NULL);
}

void qmp_close(struct qmp *qmp)
{
	if (qmp->fd >= 0)
		close(qmp->fd);
	qmp->fd = -1;
	buf_free(&qmp->in);
	pthread_mutex_destroy(&qmp->lock);
}

/*
 * The address goes through /proc/self/fd, because a path may be longer than a socket address holds.
 */
static int address_of(const char *runtime_dir, const char *name, struct sockaddr_un *ret, int *ret_dir, struct error *e)
{
	int dir = open(runtime_dir, O_PATH | O_DIRECTORY | O_CLOEXEC);

	if (dir < 0)
		return error_set_errno(e, errno, "open %s", runtime_dir);
	memset(ret, 0, sizeof(*ret));
	ret->sun_family = AF_UNIX;
	if (text_format(ret->sun_path, sizeof(ret->sun_path), "/proc/self/fd/%d/%s", dir, name) < 0) {
		close(dir);
		return error_set(e, ERROR_INVALID, "socket name %s is too long", name);
	}
	*ret_dir = dir;
	return 0;
}

int qmp_listen(const char *runtime_dir, const char *name, struct error *e)
{
	CLEANUP_CLOSE int dir = -1;
	CLEANUP_CLOSE int sock = -1;
	struct sockaddr_un address;
	int r = address_of(runtime_dir, name, &address, &dir, e);

	if (r < 0)
		return r;
	sock = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (sock < 0)
		return error_set_errno(e, errno, "control socket of the VMM");
	if (unlinkat(dir, name, 0) < 0 && errno != ENOENT)
		return error_set_errno(e, errno, "remove the old %s/%s", runtime_dir, name);
	if (bind(sock, (struct sockaddr *)&address, sizeof(address)) < 0)
		return error_set_errno(e, errno, "bind %s/%s", runtime_dir, name);
	/* Whoever may write to it commands the VMM. */
	if (fchmodat(dir, name, 0600, 0) < 0 || listen(sock, 4) < 0)
		return error_set_errno(e, errno, "listen on %s/%s", runtime_dir, name);
	return TAKE_FD(sock);
}

static void note_event(struct qmp *qmp, const json_t *message)
{
	static const struct {
		const char *reason;
		enum vmm_exit exit;
	} reasons[] = {
	    {"guest-shutdown", VMM_EXIT_GUEST_POWEROFF},
	    {"guest-reset", VMM_EXIT_GUEST_REBOOT},
	    {"guest-panic", VMM_EXIT_GUEST_PANIC},
	};
	const char *event = json_string_value(json_object_get(message, "event"));
	const char *reason;

	if (event && strcmp(event, "GUEST_PANICKED") == 0)
		atomic_store(&qmp->exit, VMM_EXIT_GUEST_PANIC);
	if (!event || strcmp(event, "SHUTDOWN") != 0)
		return;
	reason = json_string_value(json_object_get(json_object_get(message, "data"), "reason"));
	for (size_t i = 0; reason && i < ARRAY_SIZE(reasons); i++)
		/* A panic ends in a reset; the first word counts. */
		if (strcmp(reason, reasons[i].reason) == 0 && atomic_load(&qmp->exit) == VMM_EXIT_NONE)
			atomic_store(&qmp->exit, (int)reasons[i].exit);
}

/* Takes one whole line out of the input. 1 with *ret (events are noted and give NULL), 0 if there is none yet. */
static int take_message(struct qmp *qmp, json_t **ret, struct error *e)
{
	char *end = qmp->in.size ? memchr(qmp->in.data, '\n', qmp->in.size) : NULL;
	json_error_t parse;
	json_t *message;

	*ret = NULL;
	if (!end)
		return 0;
	message = json_loadb(qmp->in.data, (size_t)(end - qmp->in.data), JSON_REJECT_DUPLICATES, &parse);
	buf_consume(&qmp->in, (size_t)(end - qmp->in.data) + 1);
	if (!message)
		return error_set(e, ERROR_UNAVAILABLE, "the VMM's control socket sent no valid JSON: %s", parse.text);
	if (json_object_get(message, "event")) {
		note_event(qmp, message);
		json_decref(message);
		return 1;
	}
	*ret = message;
	return 1;
}

/* Reads what is there. 1 if something came, 0 if nothing, negative at the end of the connection. */
static int read_some(struct qmp *qmp, struct error *e)
{
	char *to = buf_reserve(&qmp->in, READ_BYTES);
	ssize_t n;

	if (!to)
		return error_set(e, ERROR_UNAVAILABLE, "a message of the VMM's control socket is over %zu bytes",
		                 QMP_MESSAGE_BYTES_MAX);
	n = recv(qmp->fd, to, READ_BYTES, MSG_DONTWAIT);
	if (n > 0) {
		qmp->in.size += (size_t)n;
		qmp->in.data[qmp->in.size] = '\0';
		return 1;
	}
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return 0;
	if (n < 0 && errno != ECONNRESET)
		return error_set_errno(e, errno, "read the VMM's control socket");
	return error_set(e, ERROR_UNAVAILABLE, "the VMM closed its control socket");
}

/* Waits for the next message that is no event. */
static int next_message(struct qmp *qmp, int pidfd, uint64_t deadline_ms, json_t **ret, struct error *e)
{
	for (unsigned events = 0; events < QMP_EVENTS_MAX;) {
		struct pollfd poll_fds[2] = {{.fd = qmp->fd, .events = POLLIN}, {.fd = pidfd, .events = POLLIN}};
		uint64_t now = time_monotonic_ms();
		int r = take_message(qmp, ret, e);

		if (r < 0 || *ret)
			return r;
		if (r > 0) {
			events++;
			continue;
		}
		r = poll(poll_fds, 2, now < deadline_ms ? (int)MIN(deadline_ms - now, 60000) : 0);
		if (r < 0 && errno != EINTR)
			return error_set_errno(e, errno, "poll");
		if (r == 0 && time_monotonic_ms() >= deadline_ms)
			return error_set(e, ERROR_TIMEOUT, "the VMM did not answer in time");
		if (r > 0 && poll_fds[0].revents && (r = read_some(qmp, e)) < 0)
			return r;
		if (r > 0 && poll_fds[1].revents && !poll_fds[0].revents)
			return error_set(e, ERROR_UNAVAILABLE, "the VMM ended");
	}
	return error_set(e, ERROR_UNAVAILABLE, "the VMM sends events without end");
}

static int send_text(struct qmp *qmp, const char *text, size_t size, int pass_fd, uint64_t deadline_ms, struct error *e)
{
	while (size) {
		union {
			struct cmsghdr header;
			char space[CMSG_SPACE(sizeof(int))];
		} control = {.space = {0}};
		struct iovec iov = {.iov_base = (void *)(uintptr_t)text, .iov_len = size};
		struct msghdr message = {.msg_iov = &iov, .msg_iovlen = 1};
		struct pollfd poll_fd = {.fd = qmp->fd, .events = POLLOUT};
		uint64_t now = time_monotonic_ms();
		ssize_t n;

		if (pass_fd >= 0) {
			message.msg_control = control.space;
			message.msg_controllen = sizeof(control.space);
			*CMSG_FIRSTHDR(&message) =
			    (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof(int))};
			memcpy(CMSG_DATA(CMSG_FIRSTHDR(&message)), &pass_fd, sizeof(pass_fd));
		}
		n = sendmsg(qmp->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
		if (n > 0) {
			text += n;
			size -= (size_t)n;
			pass_fd = -1;
			continue;
		}
		if (n < 0 && (errno == EPIPE || errno == ECONNRESET))
			return error_set(e, ERROR_UNAVAILABLE, "the VMM closed its control socket");
		if (n < 0 && errno != EAGAIN && errno != EINTR)
			return error_set_errno(e, errno, "write to the VMM's control socket");
		if (now >= deadline_ms)
			return error_set(e, ERROR_TIMEOUT, "the VMM does not read its control socket");
		if (poll(&poll_fd, 1, (int)MIN(deadline_ms - now, 60000)) < 0 && errno != EINTR)
			return error_set_errno(e, errno, "poll");
	}
	return 0;
}

static enum error_code code_of_class(const char *name)
{
	if (name && strcmp(name, "CommandNotFound") == 0)
		return ERROR_UNSUPPORTED;
	if (name && strcmp(name, "DeviceNotFound") == 0)
		return ERROR_NOT_FOUND;
	return ERROR_INTERNAL;
}

static int command_locked(struct qmp *qmp, const char *name, json_t *request, int pass_fd, int timeout_ms,
                          json_t **ret_value, struct error *e)
{
	uint64_t deadline_ms = time_monotonic_ms() + (uint64_t)timeout_ms;
	json_int_t id = (json_int_t)++qmp->next_id;
	CLEANUP_FREE char *text = NULL;
	json_t *answer = NULL, *value, *failure;
	int r;

	if (qmp->fd < 0)
		return error_set(e, ERROR_UNAVAILABLE, "there is no connection to the VMM");
	if (json_object_set_new(request, "id", json_integer(id)) < 0 || !(text = json_dumps(request, JSON_COMPACT)))
		return error_set(e, ERROR_EXHAUSTED, "out of memory");
	r = send_text(qmp, text, strlen(text), pass_fd, deadline_ms, e);
	/* An answer to a command that ran out of time may still come; it is known by its id. */
	while (r == 0) {
		r = next_message(qmp, -1, deadline_ms, &answer, e);
		if (r < 0)
			break;
		r = 0;
		if (json_integer_value(json_object_get(answer, "id")) == id)
			break;
		json_decref(answer);
		answer = NULL;
	}
	if (r < 0)
		return r;
	failure = json_object_get(answer, "error");
	value = json_object_get(answer, "return");
	if (failure) {
		const char *why = json_string_value(json_object_get(failure, "desc"));
		r = error_set(e, code_of_class(json_string_value(json_object_get(failure, "class"))), "%.*s", 400,
		              why ? why : "unknown failure");
	} else if (!value) {
		r = error_set(e, ERROR_UNAVAILABLE, "the VMM's answer has neither value nor error");
	} else if (ret_value) {
		*ret_value = json_incref(value);
	}
	json_decref(answer);
	return r;
}

int qmp_command(struct qmp *qmp, const char *name, json_t *arguments, int pass_fd, int timeout_ms, json_t **ret_value,
                struct error *e)
{
	json_t *request = json_pack("{s:s}", "execute", name);
	int r;

	if (!request || (arguments && json_object_set(request, "arguments", arguments) < 0)) {
		json_decref(request);
		json_decref(arguments);
		return error_set(e, ERROR_EXHAUSTED, "out of memory");
	}
	pthread_mutex_lock(&qmp->lock);
	r = command_locked(qmp, name, request, pass_fd, timeout_ms, ret_value, e);
	pthread_mutex_unlock(&qmp->lock);
	json_decref(request);
	json_decref(arguments);
	return r < 0 ? error_prefix(e, "%s", name) : 0;
}

void qmp_drain(struct qmp *qmp)
{
	json_t *message;

	if (pthread_mutex_trylock(&qmp->lock) != 0)
		return;
	for (unsigned i = 0; i < QMP_EVENTS_MAX && qmp->fd >= 0; i++) {
		int r = take_message(qmp, &message, NULL);

		json_decref(message);
		if (r < 0 || (r == 0 && read_some(qmp, NULL) <= 0))
			break;
	}
	pthread_mutex_unlock(&qmp->lock);
}

static void take_version(struct qmp *qmp, const json_t *greeting)
{
	const json_t *number = json_object_get(json_object_get(json_object_get(greeting, "QMP"), "version"), "qemu");

	(void)text_format(qmp->version, sizeof(qmp->version), "%d.%d.%d",
	                  (int)json_integer_value(json_object_get(number, "major")),
	                  (int)json_integer_value(json_object_get(number, "minor")),
	                  (int)json_integer_value(json_object_get(number, "micro")));
}

int qmp_attach(struct qmp *qmp, int fd, int pidfd, int timeout_ms, struct error *e)
{
	json_t *greeting = NULL;
	int r;

	qmp->fd = fd;
	r = next_message(qmp, pidfd, time_monotonic_ms() + (uint64_t)timeout_ms, &greeting, e);
	if (r < 0)
		return r;
	if (!json_object_get(greeting, "QMP"))
		r = error_set(e, ERROR_UNAVAILABLE, "the VMM's control socket sent no greeting");
	else
		take_version(qmp, greeting);
	json_decref(greeting);
	return r < 0 ? r : qmp_command(qmp, "qmp_capabilities", NULL, -1, timeout_ms, NULL, e);
}

int qmp_connect(struct qmp *qmp, const char *runtime_dir, const char *name, int pidfd, int timeout_ms, struct error *e)
{
	CLEANUP_CLOSE int dir = -1;
	CLEANUP_CLOSE int sock = -1;
	struct sockaddr_un address;
	int r = address_of(runtime_dir, name, &address, &dir, e);

	if (r < 0)
		return r;
	sock = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (sock < 0)
		return error_set_errno(e, errno, "control socket of the VMM");
	if (connect(sock, (struct sockaddr *)&address, sizeof(address)) < 0)
		return error_set_errno(e, errno, "connect to %s/%s", runtime_dir, name);
	return qmp_attach(qmp, TAKE_FD(sock), pidfd, timeout_ms, e);
}
