/*
 * The process.Process calls: envd's protocol as E2B's clients speak it, with the extensions of docs/AGENT.md.
 *
 * Start and Connect are readers of a process's log (process_log.h); the thread of the connection copies, encodes and
 * sends, and waits in poll() on its own event descriptor and the client's socket, so that an idle stream costs nothing
 * and a client that leaves is noticed at once.
 */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/text.h"
#include "guest/connect.h"
#include "guest/identity.h"
#include "guest/process.h"
#include "guest/process_event.h"

#define KEEPALIVE_S_DEFAULT 90
#define KEEPALIVE_S_MAX 86400
/* Small events are collected up to this size before they are sent. */
#define STREAM_COLLECT_BYTES 32768
#define STREAM_PROGRAM_BYTES_MAX 4096

struct stream {
	struct request *r;
	struct process *p;
	struct process_log_reader reader;
	uint64_t keepalive_ms;
	uint64_t deadline_ms; /* monotonic; 0 = none */
	uint64_t timeout_ms;  /* as asked for, for messages */
	uint64_t quiet_since;
	char *room; /* PROCESS_EVENT_BYTES once there was output */
};

static int stream_init(struct stream *s, struct request *r, struct error *e)
{
	memset(s, 0, sizeof(*s));
	s->r = r;
	s->reader.socket = request_fd(r);
	const char *interval = request_header(r, "keepalive-ping-interval");
	uint64_t seconds = KEEPALIVE_S_DEFAULT;
	if (interval && (text_parse_u64(interval, KEEPALIVE_S_MAX, &seconds) < 0 || seconds == 0))
		seconds = KEEPALIVE_S_DEFAULT;
	s->keepalive_ms = seconds * 1000;
	s->reader.event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	return s->reader.event_fd < 0 ? error_set_errno(e, errno, "cannot wait for output") : 0;
}

static void stream_close(struct stream *s)
{
	struct process *p = s->p;
	if (p) {
		pthread_mutex_lock(&p->lock);
		process_log_detach(&p->log, &s->reader);
		int blocked = p->is_blocked;
		pthread_mutex_unlock(&p->lock);
		if (blocked)
			process_pump_wake(p);
		process_unref(p);
	}
	close(s->reader.event_fd);
	free(s->room);
}

/* Queues what the log has for this reader, without waiting. Returns 1 if something was queued, 0, or -errno. */
static int stream_take(struct stream *s)
{
	struct process *p = s->p;
	int stream = 0;
	uint64_t offset = 0;
	if (!s->room && !(s->room = malloc(PROCESS_EVENT_BYTES)))
		return -ENOMEM;
	pthread_mutex_lock(&p->lock);
	s->reader.progress_ms = time_monotonic_ms();
	size_t n =
	    process_log_next(&p->log, &s->reader, process_event_raw(s->room), PROCESS_EVENT_RAW_BYTES, &stream, &offset);
	int wake = p->is_blocked && process_log_room(&p->log) >= PROCESS_LOG_READ_BYTES;
	if (wake)
		p->is_blocked = 0;
	pthread_mutex_unlock(&p->lock);
	if (wake)
		process_pump_wake(p);
	if (!n)
		return 0;
	const char *name = p->is_terminal ? "pty" : stream == PROCESS_STREAM_ERR ? "stderr" : "stdout";
	int r = process_event_send_data(s->r, s->room, n, name, offset, STREAM_COLLECT_BYTES);
	return r < 0 ? r : 1;
}

enum stream_state { STREAM_IDLE, STREAM_DATA, STREAM_ENDED, STREAM_DETACHED, STREAM_TIMED_OUT };

/* Process lock held. */
static enum stream_state look(struct stream *s, uint64_t now)
{
	struct process *p = s->p;
	if (s->reader.detached || s->reader.position < p->log.start)
		return STREAM_DETACHED;
	if (s->reader.position < p->log.end)
		return STREAM_DATA;
	if (p->timed_out && p->timeout_done && p->is_ended)
		return STREAM_TIMED_OUT;
	if (s->deadline_ms && now >= s->deadline_ms)
		return STREAM_TIMED_OUT;
	return p->is_ended && !p->timed_out ? STREAM_ENDED : STREAM_IDLE;
}

static int stream_wait(struct stream *s, uint64_t now)
{
	uint64_t ignored;
	uint64_t until = s->quiet_since + s->keepalive_ms;
	if (s->deadline_ms)
		until = MIN(until, s->deadline_ms);
	struct pollfd p[2] = {{.fd = s->reader.event_fd, .events = POLLIN}, {.fd = request_fd(s->r), .events = POLLRDHUP}};
	int n = poll(p, 2, until <= now ? 0 : (int)MIN(until - now, UINT64_C(3600000)));
	if (n > 0 && (p[1].revents & (POLLRDHUP | POLLHUP | POLLERR | POLLNVAL)))
		return -ECONNRESET;
	if (n > 0 && p[0].revents) {
		ssize_t got = read(s->reader.event_fd, &ignored, sizeof(ignored));
		(void)got;
	}
	return 0;
}

static int send_keepalive(struct stream *s, uint64_t now)
{
	static const char text[] = "{\"event\":{\"keepalive\":{}}}";
	if (now < s->quiet_since + s->keepalive_ms)
		return 0;
	s->quiet_since = now;
	return connect_stream_send_text(s->r, text, sizeof(text) - 1);
}

static int stream_finish(struct stream *s, enum stream_state state)
{
	struct error e;
	switch (state) {
	case STREAM_ENDED:
		process_event_queue_end(s->r, s->p);
		return connect_stream_end(s->r, NULL);
	case STREAM_TIMED_OUT:
		error_set(&e, ERROR_TIMEOUT, "process %d timed out after %llu ms", (int)s->p->pid,
		          (unsigned long long)s->timeout_ms);
		return connect_stream_end(s->r, &e);
	default:
		error_set(&e, ERROR_EXHAUSTED,
		          "this reader took no output for %d s and was detached: connect again from offset %llu",
		          PROCESS_LOG_STALL_MS / 1000, (unsigned long long)s->reader.position);
		return connect_stream_end(s->r, &e);
	}
}

/* Sends events until the process has ended or the client has left. */
static int stream_run(struct stream *s)
{
	int r = 0;
	s->quiet_since = time_monotonic_ms();
	while (r >= 0) {
		uint64_t now = time_monotonic_ms();
		pthread_mutex_lock(&s->p->lock);
		enum stream_state state = look(s, now);
		s->reader.waiting = state == STREAM_IDLE;
		pthread_mutex_unlock(&s->p->lock);
		if (state == STREAM_DATA) {
			r = stream_take(s);
			s->quiet_since = now;
			continue;
		}
		if (state != STREAM_IDLE)
			return stream_finish(s, state);
		if (s->r->connection->out.size)
			r = connection_flush(s->r->connection);
		if (r >= 0)
			r = stream_wait(s, now);
		if (r >= 0)
			r = send_keepalive(s, time_monotonic_ms());
	}
	return r;
}

static int fail_stream(struct request *r, const struct error *e)
{
	return connect_stream_end(r, e);
}

static int read_size(json_t *pty, unsigned *ret_columns, unsigned *ret_rows, struct error *e)
{
	json_t *size = json_object_get(pty, "size");
	json_t *columns = json_object_get(size, "cols");
	json_t *rows = json_object_get(size, "rows");
	if ((columns && !json_is_integer(columns)) || (rows && !json_is_integer(rows)))
		return error_set(e, ERROR_INVALID, "pty.size needs integers cols and rows");
	json_int_t c = json_integer_value(columns);
	json_int_t w = json_integer_value(rows);
	if (c < 0 || c > 65535 || w < 0 || w > 65535)
		return error_set(e, ERROR_INVALID, "pty.size is out of range");
	*ret_columns = (unsigned)c;
	*ret_rows = (unsigned)w;
	return 0;
}

static int read_flag(json_t *object, const char *name, int fallback, int *ret, struct error *e)
{
	json_t *value = json_object_get(object, name);
	if (value && !json_is_boolean(value) && !json_is_null(value))
		return error_set(e, ERROR_INVALID, "%s must be true or false", name);
	*ret = value && !json_is_null(value) ? json_is_true(value) : fallback;
	return 0;
}

static int read_text(json_t *object, const char *name, size_t max, const char **ret, struct error *e)
{
	json_t *value = json_object_get(object, name);
	*ret = NULL;
	if (!value || json_is_null(value))
		return 0;
	if (!json_is_string(value))
		return error_set(e, ERROR_INVALID, "%s must be a string", name);
	if (json_string_length(value) > max)
		return error_set(e, ERROR_TOO_LARGE, "%s has more than %zu bytes", name, max);
	*ret = json_string_value(value);
	return 0;
}

/* process.cmd, args, envs, cwd */
static int read_config(json_t *message, struct process_request *q, struct error *e)
{
	json_t *config = json_object_get(message, "process");
	size_t i;
	json_t *value;
	if (!json_is_object(config))
		return error_set(e, ERROR_INVALID, "process is missing");
	int r = read_text(config, "cmd", STREAM_PROGRAM_BYTES_MAX, &q->program, e);
	if (r < 0)
		return r;
	if (!q->program || !*q->program)
		return error_set(e, ERROR_INVALID, "process.cmd is missing");
	q->config = config;
	q->arguments = json_object_get(config, "args");
	if (q->arguments && !json_is_array(q->arguments))
		return error_set(e, ERROR_INVALID, "process.args must be an array of strings");
	if (json_array_size(q->arguments) > PROCESS_ARGUMENTS_MAX)
		return error_set(e, ERROR_TOO_LARGE, "process.args has more than %d entries", PROCESS_ARGUMENTS_MAX);
	json_array_foreach(q->arguments, i, value)
	{
		if (!json_is_string(value))
			return error_set(e, ERROR_INVALID, "process.args[%zu] must be a string", i);
	}
	q->environment = json_object_get(config, "envs");
	if (q->environment && (r = identity_check_environment(q->environment, e)) < 0)
		return error_prefix(e, "process.envs");
	return read_text(config, "cwd", STREAM_PROGRAM_BYTES_MAX, &q->workdir, e);
}

static int read_start(struct request *r, json_t *message, struct process_request *q, struct error *e)
{
	json_t *pty = json_object_get(message, "pty");
	json_t *timeout = json_object_get(message, "timeoutMs");
	int x = read_config(message, q, e);
	if (x == 0)
		x = read_text(message, "tag", PROCESS_TAG_BYTES_MAX, &q->tag, e);
	if (x == 0)
		x = read_flag(message, "stdin", 1, &q->has_stdin, e);
	if (x == 0)
		x = read_flag(message, "group", 0, &q->is_group, e);
	if (x == 0)
		x = connect_timeout_ms(r, &q->timeout_ms, e);
	if (x < 0)
		return x;
	if (pty && !json_is_null(pty)) {
		q->is_terminal = 1;
		x = read_size(pty, &q->columns, &q->rows, e);
	}
	if (x == 0 && timeout && !json_is_null(timeout)) {
		if (!json_is_integer(timeout) || json_integer_value(timeout) < 0)
			return error_set(e, ERROR_INVALID, "timeoutMs must be a number of milliseconds");
		uint64_t own = (uint64_t)json_integer_value(timeout);
		if (own && (!q->timeout_ms || own < q->timeout_ms))
			q->timeout_ms = own;
	}
	return x;
}

static int is_gone(void *context)
{
	return request_is_gone(context);
}

/* What a shell would answer for a program that cannot be run; tells callers who map failures to exit codes. */
static int exit_status_of(int exec_errno)
{
	return exec_errno == ENOENT ? 127 : 126;
}

static int serve_start(struct request *r)
{
	json_t *message = NULL;
	struct error e;
	struct stream s;
	struct guest_user user;
	struct process_request q = {.user = &user, .is_gone = is_gone, .context = r};
	int exec_errno = 0;
	int x = connect_stream_request(r, &message, &e);
	if (x == 0)
		x = read_start(r, message, &q, &e);
	if (x == 0)
		x = request_user(r, NULL, &user, &e);
	if (x == 0)
		x = stream_init(&s, r, &e);
	if (x < 0) {
		json_decref(message);
		return fail_stream(r, &e);
	}
	x = process_start(&q, &s.reader, &s.p, &exec_errno, &e);
	json_decref(message);
	if (x < 0) {
		x = exec_errno ? connect_stream_end_with(r, &e, "exitStatus", exit_status_of(exec_errno)) : fail_stream(r, &e);
	} else {
		s.timeout_ms = q.timeout_ms;
		if (q.timeout_ms)
			s.deadline_ms = time_monotonic_ms() + q.timeout_ms + PROCESS_TIMEOUT_ANSWER_MS;
		x = connect_stream_start(r);
		if (x == 0)
			x = process_event_queue_start(r, s.p);
		if (x == 0)
			x = connection_flush(r->connection);
		if (x == 0)
			x = stream_run(&s);
	}
	stream_close(&s);
	return x;
}

static int find_process(json_t *message, struct process **ret, struct error *e)
{
	json_t *selector = json_object_get(message, "process");
	json_t *pid = json_object_get(selector, "pid");
	json_t *tag = json_object_get(selector, "tag");
	if (json_is_integer(pid)) {
		json_int_t number = json_integer_value(pid);
		*ret = number > 0 && number <= INT32_MAX ? process_find_pid((pid_t)number) : NULL;
		return *ret ? 0 : error_set(e, ERROR_NOT_FOUND, "process with pid %lld not found", (long long)number);
	}
	if (json_is_string(tag)) {
		*ret = process_find_tag(json_string_value(tag));
		return *ret ? 0 : error_set(e, ERROR_NOT_FOUND, "process with tag %.200s not found", json_string_value(tag));
	}
	return error_set(e, ERROR_INVALID, "process must have a pid or a tag");
}

/* Puts the reader where the client wants to go on; *ret_from tells what is lost, if anything. */
static int attach(struct stream *s, json_t *message, int *ret_gap, uint64_t *ret_from, struct error *e)
{
	json_t *offset = json_object_get(message, "offset");
	struct process *p = s->p;
	int x = 0;
	*ret_gap = 0;
	if (offset && !json_is_null(offset) && (!json_is_integer(offset) || json_integer_value(offset) < 0))
		return error_set(e, ERROR_INVALID, "offset must be a number of bytes");
	pthread_mutex_lock(&p->lock);
	uint64_t position = p->log.end;
	if (offset && !json_is_null(offset)) {
		*ret_from = (uint64_t)json_integer_value(offset);
		if (*ret_from > p->log.end) {
			x = error_set(e, ERROR_INVALID, "offset %llu is behind the end of the output at %llu",
			              (unsigned long long)*ret_from, (unsigned long long)p->log.end);
		} else {
			*ret_gap = *ret_from < p->log.start;
			position = MAX(*ret_from, p->log.start);
		}
	}
	if (x == 0)
		process_log_attach(&p->log, &s->reader, position);
	pthread_mutex_unlock(&p->lock);
	return x;
}

static int serve_connect(struct request *r)
{
	json_t *message = NULL;
	struct error e;
	struct stream s;
	int gap = 0;
	uint64_t from = 0;
	uint64_t timeout_ms = 0;
	int x = connect_stream_request(r, &message, &e);
	if (x == 0)
		x = connect_timeout_ms(r, &timeout_ms, &e);
	if (x == 0)
		x = stream_init(&s, r, &e);
	if (x < 0) {
		json_decref(message);
		return fail_stream(r, &e);
	}
	x = find_process(message, &s.p, &e);
	if (x == 0)
		x = attach(&s, message, &gap, &from, &e);
	json_decref(message);
	if (x < 0) {
		x = fail_stream(r, &e);
	} else {
		s.timeout_ms = timeout_ms;
		if (timeout_ms)
			s.deadline_ms = time_monotonic_ms() + timeout_ms;
		x = connect_stream_start(r);
		if (x == 0)
			x = process_event_queue_start(r, s.p);
		if (x == 0 && gap)
			x = process_event_queue_gap(r, from, s.reader.position);
		if (x == 0)
			x = connection_flush(r->connection);
		if (x == 0)
			x = stream_run(&s);
	}
	stream_close(&s);
	return x;
}

static int serve_list(struct request *r)
{
	struct error e;
	json_t *message = NULL;
	int all = 0;
	int x = request_read_json(r, &message, &e);
	if (x == 0)
		x = read_flag(message, "all", 0, &all, &e);
	json_decref(message);
	if (x < 0)
		return connect_fail(r, &e);
	size_t count = 0;
	struct process **list = process_list(&count);
	json_t *entries = json_array();
	for (size_t i = 0; list && i < count; i++) {
		json_t *entry = process_event_describe(list[i], all);
		if (entry)
			json_array_append_new(entries, entry);
		process_unref(list[i]);
	}
	free(list);
	return connect_reply(r, json_pack("{s:o}", "processes", entries));
}

/* Unary calls on one process share their frame. */
static int serve_unary(struct request *r, int (*act)(struct request *, struct process *, json_t *, struct error *))
{
	struct error e;
	json_t *message = NULL;
	struct process *p = NULL;
	int x = request_read_json(r, &message, &e);
	if (x == 0)
		x = find_process(message, &p, &e);
	if (x == 0)
		x = act(r, p, message, &e);
	process_unref(p);
	json_decref(message);
	return x < 0 ? connect_fail(r, &e) : connect_reply(r, json_object());
}

static int act_update(struct request *r, struct process *p, json_t *message, struct error *e)
{
	json_t *pty = json_object_get(message, "pty");
	unsigned columns;
	unsigned rows;
	if (!pty || json_is_null(pty))
		return 0;
	int x = read_size(pty, &columns, &rows, e);
	return x < 0 ? x : process_resize(p, columns, rows, e);
}

static int write_input(struct request *r, struct process *p, json_t *input, struct error *e)
{
	json_t *text = json_object_get(input, "stdin");
	int to_terminal = 0;
	if (!text) {
		text = json_object_get(input, "pty");
		to_terminal = 1;
	}
	if (!json_is_string(text))
		return error_set(e, ERROR_INVALID, "input must have stdin or pty in base64");
	size_t size = json_string_length(text);
	CLEANUP_FREE unsigned char *data = malloc(size / 4 * 3 + 4);
	if (!data)
		return error_set(e, ERROR_EXHAUSTED, "out of memory");
	long n = text_base64_decode(data, json_string_value(text), size);
	if (n < 0)
		return error_set(e, ERROR_INVALID, "input is not valid base64");
	return process_write(p, data, (size_t)n, to_terminal, r, e);
}

static int act_input(struct request *r, struct process *p, json_t *message, struct error *e)
{
	return write_input(r, p, json_object_get(message, "input"), e);
}

static int act_close_stdin(struct request *r, struct process *p, json_t *message, struct error *e)
{
	return process_close_stdin(p, r, e);
}

static int read_signal(json_t *value, struct error *e)
{
	if (json_is_integer(value) && json_integer_value(value) > 0 && json_integer_value(value) <= 64)
		return (int)json_integer_value(value);
	const char *name = json_string_value(value);
	if (name && text_starts_with(name, "SIGNAL_"))
		name += 7;
	if (name && text_starts_with(name, "SIG"))
		name += 3;
	for (int i = 1; name && i < NSIG; i++) {
		const char *known = sigabbrev_np(i);
		if (known && strcmp(known, name) == 0)
			return i;
	}
	return error_set(e, ERROR_INVALID, "signal is not the name or number of a signal");
}

static int act_signal(struct request *r, struct process *p, json_t *message, struct error *e)
{
	int group;
	int number = read_signal(json_object_get(message, "signal"), e);
	if (number < 0)
		return number;
	int x = read_flag(message, "group", p->is_group, &group, e);
	return x < 0 ? x : process_signal(p, number, group, e);
}

static int serve_update(struct request *r)
{
	return serve_unary(r, act_update);
}

static int serve_send_input(struct request *r)
{
	return serve_unary(r, act_input);
}

static int serve_close_stdin(struct request *r)
{
	return serve_unary(r, act_close_stdin);
}

static int serve_send_signal(struct request *r)
{
	return serve_unary(r, act_signal);
}

static int take_input_message(struct request *r, json_t *message, struct process **p, struct error *e)
{
	json_t *start = json_object_get(message, "start");
	json_t *data = json_object_get(message, "data");
	if (json_is_object(start)) {
		process_unref(*p);
		*p = NULL;
		return find_process(start, p, e);
	}
	if (json_is_object(data)) {
		if (!*p)
			return error_set(e, ERROR_INVALID, "input came before the start message");
		return write_input(r, *p, json_object_get(data, "input"), e);
	}
	return json_object_get(message, "keepalive") ? 0 : error_set(e, ERROR_INVALID, "unknown kind of input message");
}

static int serve_stream_input(struct request *r)
{
	struct error e;
	struct process *p = NULL;
	int x;
	for (;;) {
		json_t *message = NULL;
		x = connect_stream_next(r, &message, &e);
		if (x < 0 || !message)
			break;
		x = take_input_message(r, message, &p, &e);
		json_decref(message);
		if (x < 0)
			break;
	}
	process_unref(p);
	if (x < 0)
		return fail_stream(r, &e);
	x = connect_stream_start(r);
	if (x == 0)
		x = connect_stream_queue(r, "{}", 2);
	return x < 0 ? x : connect_stream_end(r, NULL);
}

const struct request_route process_routes[] = {
    {"POST", "/process.Process/Start", serve_start, 1},
    {"POST", "/process.Process/Connect", serve_connect, 0},
    {"POST", "/process.Process/List", serve_list, 0},
    {"POST", "/process.Process/Update", serve_update, 1},
    {"POST", "/process.Process/StreamInput", serve_stream_input, 1},
    {"POST", "/process.Process/SendInput", serve_send_input, 1},
    {"POST", "/process.Process/CloseStdin", serve_close_stdin, 1},
    {"POST", "/process.Process/SendSignal", serve_send_signal, 1},
    {NULL, NULL, NULL, 0},
};
