/*
 * Theory of operation
 *
 *   STARTING ──start event──> RUNNING ──end event──> done
 *      │ signal: leave          │ │ ^
 *      v                        │ └─┴── connection breaks / Connect {pid, offset}
 *    interrupted                └── signal: SendSignal to the group; the third one leaves
 *
 * A stream may end in four ways: an end event (the only good one), an error in the last envelope, a last envelope
 * without an end event before it, a broken connection. The last two are followed by re-attaching at the offset of the
 * first byte not seen yet; a session that was suspended meanwhile is waited for. Nothing but an end event ever yields
 * exit status 0.
 */
#include "cli/exec_stream.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/text.h"
#include "cli/exec_input.h"
#include "cli/output.h"
#include "cli/signals.h"
#include "cli/terminal.h"

#define READ_BYTES (128 * 1024)
#define SUSPENDED_POLL_MS 1000

struct exec_stream {
	struct api *api;
	const struct exec_stream_request *request;
	const struct exec_stream_handlers *handlers;
	struct exec_stream_result *result;
	struct event_scan scan;
	unsigned char *decoded;
	size_t decoded_size;
	uint64_t next_offset; /* of the first output byte not delivered yet */
	int ended;            /* an end event was seen */
	struct exec_input *input;

	pthread_mutex_t lock; /* guards what the signal thread shares with us */
	struct http_client *stream;
	uint64_t pid;        /* 0 = not known yet */
	int waiting;         /* no stream at present */
	_Atomic int leaving; /* signal number, or one of LEAVE_* */
	int forwarded;
	int last_forwarded;
	int wake_fd; /* readable once `leaving` is set */
	struct api *signal_api;
	uint64_t deadline_ms; /* monotonic; 0 = none */
	unsigned silence_ms;  /* longest wait for a single read; 0 = none */
};

#define LEAVE_INPUT_FAILED 1000

static void leave(struct exec_stream *x, int why)
{
	if (!x->leaving)
		x->leaving = why;
	uint64_t one = 1;
	if (write(x->wake_fd, &one, sizeof(one)) < 0)
		return; /* it is readable already */
	if (x->stream)
		shutdown(http_client_fd(x->stream), SHUT_RDWR);
}

static json_t *process_selector(uint64_t pid)
{
	return json_pack("{s:{s:I}}", "process", "pid", (json_int_t)pid);
}

static int send_signal(struct exec_stream *x, struct api *api, int number, struct error *e)
{
	char name[32];
	const char *known = signals_name(number);
	json_t *body = process_selector(x->pid);
	if (known)
		snprintf(name, sizeof(name), "SIGNAL_%s", known);
	else
		snprintf(name, sizeof(name), "%d", number);
	json_object_set_new(body, "signal", json_string(name));
	json_object_set_new(body, "group", json_true());
	int r = api_agent_call(api, x->request->session, "process.Process/SendSignal", x->request->user, body, NULL, e);
	json_decref(body);
	return r;
}

static void send_size(struct exec_stream *x)
{
	unsigned columns;
	unsigned rows;
	struct error ignored;
	terminal_size(&columns, &rows);
	json_t *body = process_selector(x->pid);
	json_object_set_new(body, "pty", json_pack("{s:{s:i, s:i}}", "size", "cols", (int)columns, "rows", (int)rows));
	api_agent_call(x->signal_api, x->request->session, "process.Process/Update", x->request->user, body, NULL,
	               &ignored);
	json_decref(body);
}

/* On the signal thread. */
static void on_signal(void *context, int number)
{
	struct exec_stream *x = context;
	pthread_mutex_lock(&x->lock);
	uint64_t pid = x->pid;
	int can_forward = pid && !x->waiting && x->forwarded < EXEC_STREAM_SIGNALS_MAX;
	if (number != SIGWINCH) {
		x->forwarded++;
		if (!can_forward)
			leave(x, number);
		else
			x->last_forwarded = number;
	}
	pthread_mutex_unlock(&x->lock);
	if (number == SIGWINCH) {
		if (pid && x->request->tty)
			send_size(x);
		return;
	}
	struct error e;
	if (can_forward && send_signal(x, x->signal_api, number, &e) < 0 && e.code != ERROR_NOT_FOUND) {
		pthread_mutex_lock(&x->lock);
		leave(x, number);
		pthread_mutex_unlock(&x->lock);
	}
}

static void on_input_failure(void *context)
{
	struct exec_stream *x = context;
	pthread_mutex_lock(&x->lock);
	leave(x, LEAVE_INPUT_FAILED);
	pthread_mutex_unlock(&x->lock);
}

static int put_environment(json_t *process, const struct options_list *list, struct error *e)
{
	json_t *map = json_object();
	json_object_set_new(process, "envs", map);
	for (size_t i = 0; list && i < list->count; i++) {
		const char *item = list->items[i];
		const char *equals = strchr(item, '=');
		CLEANUP_FREE char *name = equals ? strndup(item, (size_t)(equals - item)) : strdup(item);
		const char *value = equals ? equals + 1 : name ? getenv(name) : NULL;
		if (!name || !*name)
			return error_set(e, ERROR_INVALID, "environment \"%s\" has no name", item);
		if (!value)
			continue; /* -e NAME passes on our own value, if there is one */
		if (json_object_set_new(map, name, json_string(value)) < 0)
			return error_set(e, ERROR_INVALID, "environment %s is not UTF-8", name);
	}
	return 0;
}

static int start_message(const struct exec_stream *x, json_t **ret, struct error *e)
{
	const struct exec_stream_request *q = x->request;
	json_t *args = json_array();
	for (size_t i = 1; q->argv[i]; i++)
		if (json_array_append_new(args, json_string(q->argv[i])) < 0) {
			json_decref(args);
			return error_set(e, ERROR_INVALID, "argument %zu is not UTF-8", i);
		}
	json_t *cmd = json_string(q->argv[0]);
	if (!cmd) {
		json_decref(args);
		return error_set(e, ERROR_INVALID, "the command's name is not UTF-8");
	}
	json_t *process = json_pack("{s:o, s:o}", "cmd", cmd, "args", args);
	int r = put_environment(process, q->environment, e);
	if (r == 0 && q->directory && json_object_set_new(process, "cwd", json_string(q->directory)) < 0)
		r = error_set(e, ERROR_INVALID, "the directory's name is not UTF-8");
	if (r < 0) {
		json_decref(process);
		return r;
	}
	json_t *message = json_pack("{s:o, s:b, s:b}", "process", process, "stdin", x->handlers->input != NULL, "group", 1);
	if (q->timeout_ms)
		json_object_set_new(message, "timeoutMs", json_integer((json_int_t)q->timeout_ms));
	if (q->tty) {
		unsigned columns;
		unsigned rows;
		terminal_size(&columns, &rows);
		json_object_set_new(message, "pty",
		                    json_pack("{s:{s:i, s:i}}", "size", "cols", (int)columns, "rows", (int)rows));
	}
	*ret = message;
	return 0;
}

static void publish_stream(void *context, struct http_client *client)
{
	struct exec_stream *x = context;
	pthread_mutex_lock(&x->lock);
	x->stream = client;
	if (client && x->leaving)
		shutdown(http_client_fd(client), SHUT_RDWR);
	pthread_mutex_unlock(&x->lock);
}

static int open_stream(struct exec_stream *x, const char *method, const json_t *message, struct error *e)
{
	CLEANUP_FREE char *text = json_dumps(message, JSON_COMPACT);
	CLEANUP_BUF struct buf body = {0};
	size_t size = text ? strlen(text) : 0;
	const unsigned char head[5] = {0, (unsigned char)(size >> 24), (unsigned char)(size >> 16),
	                               (unsigned char)(size >> 8), (unsigned char)size};
	if (!text || buf_append(&body, head, sizeof(head)) < 0 || buf_append(&body, text, size) < 0)
		return error_set_errno(e, ENOMEM, "preparing the request");
	char tail[64];
	snprintf(tail, sizeof(tail), "/agent/process.Process/%s", method);
	CLEANUP_FREE char *target = api_session_path(x->request->session, tail);
	struct api_stream_call call = {
	    .method = "POST",
	    .target = target,
	    .user = x->request->user,
	    .content_type = "application/connect+json",
	    .accept = "application/connect+json",
	    .body = body.data,
	    .body_size = body.size,
	    .read_timeout_ms = x->silence_ms,
	    .publish = publish_stream,
	    .context = x,
	};
	struct http_client *client;
	event_scan_reset(&x->scan);
	int r = api_stream(x->api, &call, &client, e);
	if (r < 0)
		return r;
	pthread_mutex_lock(&x->lock);
	x->waiting = 0;
	pthread_mutex_unlock(&x->lock);
	return 0;
}

static void close_stream(struct exec_stream *x)
{
	pthread_mutex_lock(&x->lock);
	struct http_client *client = TAKE_PTR(x->stream);
	x->waiting = 1;
	pthread_mutex_unlock(&x->lock);
	http_client_free(client);
}

static int handle_data(struct exec_stream *x, const struct event_scan_event *event, struct error *e)
{
	size_t room = event->base64_size / 4 * 3;
	if (room > x->decoded_size) {
		unsigned char *grown = realloc(x->decoded, room);
		if (!grown)
			return error_set_errno(e, ENOMEM, "output of the command");
		x->decoded = grown;
		x->decoded_size = room;
	}
	long size = event_scan_decode(x->decoded, event->base64, event->base64_size);
	if (size < 0)
		return error_set(e, ERROR_INTERNAL, "the process stream holds bad base64");
	size_t skip = 0;
	if (event->has_offset) {
		/* After re-attaching a chunk may begin before what we have; one that begins later means bytes are gone. */
		if (event->offset < x->next_offset)
			skip = (size_t)MIN(x->next_offset - event->offset, (uint64_t)size);
		else if (x->next_offset || x->request->has_offset || x->request->argv)
			x->result->lost_bytes += event->offset - x->next_offset;
		x->next_offset = MAX(x->next_offset, event->offset + (uint64_t)size);
	} else {
		x->next_offset += (uint64_t)size;
	}
	if (skip == (size_t)size)
		return 0;
	int r = x->handlers->output(x->handlers->context, event->channel, x->decoded + skip, (size_t)size - skip, event);
	return r < 0 ? error_set_errno(e, r, "writing the command's output") : 0;
}

static void handle_end(struct exec_stream *x, const struct event_scan_event *event)
{
	struct exec_stream_result *result = x->result;
	x->ended = 1;
	result->signal = event->signal;
	result->remote_code = event->exit_code;
	result->timed_out = event->timed_out;
	if (event->signal > 0 && event->signal < 128)
		result->exit_status = 128 + event->signal;
	else if (event->exited)
		result->exit_status = event->exit_code & 0xff;
	else
		result->exit_status = OUTPUT_EXIT_FAILURE;
	/* A code whose low byte is 0 without being 0 must not look like success. */
	if (result->exit_status == 0 && event->exit_code != 0)
		result->exit_status = 1;
	if (result->timed_out)
		result->exit_status = OUTPUT_EXIT_TIMEOUT;
	if (result->lost_bytes && result->exit_status == 0)
		result->exit_status = OUTPUT_EXIT_FAILURE;
}

static int handle_finish(struct exec_stream *x, const struct event_scan_event *event, struct error *e)
{
	if (!event->failed || x->ended)
		return 0;
	*e = event->error;
	x->result->from_guest = 1;
	if (x->pid && e->code == ERROR_TIMEOUT) {
		x->ended = 1;
		x->result->timed_out = 1;
		x->result->remote_code = -1;
		x->result->exit_status = OUTPUT_EXIT_TIMEOUT;
		return 0;
	}
	/* A host or guest that goes down on purpose says so, and a reader that was too slow is told to come again. */
	if (x->pid && (e->code == ERROR_UNAVAILABLE || e->code == ERROR_CANCELED || e->code == ERROR_EXHAUSTED))
		return 0;
	x->result->exit_status =
	    event->exit_status == 126 || event->exit_status == 127 ? event->exit_status : error_code_exit_status(e->code);
	return error_code_errno(e->code);
}

static int handle_event(struct exec_stream *x, const struct event_scan_event *event, struct error *e)
{
	switch (event->kind) {
	case EVENT_SCAN_START:
		if (!event->pid)
			return error_set(e, ERROR_INTERNAL, "the guest started the command without a process id");
		x->result->pid = event->pid;
		pthread_mutex_lock(&x->lock);
		int is_first = x->pid == 0;
		x->pid = event->pid;
		pthread_mutex_unlock(&x->lock);
		if (is_first && x->handlers->started)
			x->handlers->started(x->handlers->context, event->pid);
		if (is_first && x->handlers->input && !x->request->detach)
			return exec_input_start(x->input, event->pid, e);
		return 0;
	case EVENT_SCAN_DATA:
		return handle_data(x, event, e);
	case EVENT_SCAN_GAP:
		if (event->to > event->from) {
			x->result->lost_bytes += event->to - event->from;
			x->next_offset = MAX(x->next_offset, event->to);
		}
		return 0;
	case EVENT_SCAN_END:
		handle_end(x, event);
		return 0;
	case EVENT_SCAN_FINISH:
		return handle_finish(x, event, e);
	default:
		return 0;
	}
}

/* Handles what is buffered. 1 when the stream has nothing more for us, 0 to read on, negative for a failure. */
static int drain(struct exec_stream *x, unsigned *progress, struct error *e)
{
	for (;;) {
		struct event_scan_event event;
		int r = event_scan_next(&x->scan, &event, e);
		if (r < 0)
			return r;
		if (event.kind == EVENT_SCAN_NONE)
			return 0;
		r = handle_event(x, &event, e);
		if (r < 0)
			return r;
		if (event.kind == EVENT_SCAN_DATA || event.kind == EVENT_SCAN_START)
			*progress = 1;
		if (event.kind == EVENT_SCAN_FINISH || x->ended || (x->request->detach && x->pid))
			return 1;
	}
}

/* Reads until the stream ends. 0 = ended or broken (x->ended tells), negative = a failure that re-attaching cannot
 * mend. */
static int pump(struct exec_stream *x, unsigned *progress, struct error *e)
{
	for (;;) {
		int r = drain(x, progress, e);
		if (r)
			return r < 0 ? r : 0;
		char *room = event_scan_space(&x->scan, READ_BYTES);
		if (!room)
			return error_set_errno(e, ENOMEM, "output of the command");
		struct error broken;
		ssize_t n = http_client_read(x->stream, room, READ_BYTES, &broken);
		if (n == -ETIMEDOUT || (x->deadline_ms && time_monotonic_ms() > x->deadline_ms)) {
			x->result->timed_out = 1;
			x->result->exit_status = OUTPUT_EXIT_TIMEOUT;
			return error_set(e, ERROR_TIMEOUT, "the guest did not report the end of the command in time");
		}
		if (n <= 0)
			return 0;
		event_scan_filled(&x->scan, (size_t)n);
	}
}

/* Sleeps; returns 1 if the user wants to leave. */
static int pause_for(struct exec_stream *x, unsigned ms)
{
	struct pollfd p = {.fd = x->wake_fd, .events = POLLIN};
	return poll(&p, 1, (int)ms) > 0;
}

/* 1 if the session is suspended or on its way there, 0 if not, negative if that cannot be told. */
static int is_asleep(struct exec_stream *x, struct error *e)
{
	CLEANUP_FREE char *target = api_session_path(x->request->session, "");
	json_t *session;
	int r = api_call(x->api, "GET", target, NULL, &session, e);
	if (r < 0)
		return r;
	const char *state = output_text(session, "state", "");
	int asleep = strcmp(state, "suspended") == 0 || strcmp(state, "suspending") == 0;
	json_decref(session);
	return asleep;
}

/* A suspended session must not be woken by a client that merely lost its stream: wait until somebody wakes it. */
static int wait_while_suspended(struct exec_stream *x, struct error *e)
{
	for (int said = 0;;) {
		int asleep = is_asleep(x, e);
		if (asleep <= 0)
			return asleep;
		if (!said && !x->request->quiet)
			output_note("session %s is suspended; the command goes on after: space wake %s", x->request->session,
			            x->request->session);
		said = 1;
		if (pause_for(x, SUSPENDED_POLL_MS))
			return 0;
	}
}

static int connect_again(struct exec_stream *x, struct error *e)
{
	int r = wait_while_suspended(x, e);
	if (r < 0 || x->leaving)
		return r;
	json_t *message = process_selector(x->pid);
	/* Without a position of our own (attached, nothing seen yet) we go on from now, as at first. */
	if (x->request->argv || x->request->has_offset || x->next_offset)
		json_object_set_new(message, "offset", json_integer((json_int_t)x->next_offset));
	r = open_stream(x, "Connect", message, e);
	json_decref(message);
	return r;
}

static int is_worth_retrying(const struct error *e)
{
	return api_is_connection_error(e) || e->code == ERROR_UNAVAILABLE || e->code == ERROR_TIMEOUT ||
	       e->code == ERROR_EXHAUSTED;
}

/* The stream broke: attach again. `attempts` counts since the last progress. */
static int reattach(struct exec_stream *x, unsigned *attempts, struct error *e)
{
	static const unsigned pauses_ms[] = {50, 100, 200, 400, 800, 1500, 2500};
	close_stream(x);
	for (;;) {
		if (*attempts >= EXEC_STREAM_ATTEMPTS_MAX) {
			x->result->exit_status = OUTPUT_EXIT_FAILURE;
			return error_set(e, ERROR_UNAVAILABLE,
			                 "the connection to process %" PRIu64 " broke and %u attempts to get it "
			                 "back failed; it may still run",
			                 x->pid, *attempts);
		}
		unsigned step = MIN(*attempts, (unsigned)ARRAY_SIZE(pauses_ms) - 1);
		if (++*attempts > 1 || step)
			if (pause_for(x, pauses_ms[step]))
				return 0;
		int r = connect_again(x, e);
		if (r >= 0 || x->leaving)
			return 0;
		if (!is_worth_retrying(e))
			return error_prefix(e, "re-attaching to process %" PRIu64, x->pid);
	}
}

static int begin(struct exec_stream *x, struct error *e)
{
	json_t *message = NULL;
	int r = 0;
	if (x->request->argv) {
		r = start_message(x, &message, e);
	} else {
		message = process_selector(x->request->pid);
		if (x->request->has_offset) {
			json_object_set_new(message, "offset", json_integer((json_int_t)x->request->offset));
			x->next_offset = x->request->offset;
		}
	}
	if (r == 0)
		r = open_stream(x, x->request->argv ? "Start" : "Connect", message, e);
	json_decref(message);
	if (r < 0 && x->result->exit_status == 0)
		x->result->exit_status = error_code_exit_status(e->code);
	return r;
}

/* Kills what nobody can follow any more. */
static void give_up_remote(struct exec_stream *x, int number)
{
	struct error ignored;
	if (x->pid && is_asleep(x, &ignored) == 0)
		send_signal(x, x->api, number, &ignored);
}

static int follow(struct exec_stream *x, struct error *e)
{
	unsigned attempts = 0;
	int r = begin(x, e);
	while (r == 0) {
		unsigned progress = 0;
		r = x->stream ? pump(x, &progress, e) : 0;
		if (progress)
			attempts = 0;
		if (r < 0 || x->ended || x->leaving || (x->request->detach && x->pid))
			break;
		if (!x->pid) {
			x->result->exit_status = OUTPUT_EXIT_FAILURE;
			r = error_set(e, ERROR_UNAVAILABLE, "the connection closed before the command was known to run");
			break;
		}
		r = reattach(x, &attempts, e);
		if (x->leaving)
			break;
	}
	return r;
}

static int conclude(struct exec_stream *x, int r, struct error *e)
{
	if (x->ended || (x->request->detach && x->pid && r == 0))
		return 0;
	if (x->leaving == LEAVE_INPUT_FAILED) {
		give_up_remote(x, SIGTERM);
		x->result->exit_status = OUTPUT_EXIT_FAILURE;
		return exec_input_error(x->input, e);
	}
	if (x->leaving) {
		x->result->interrupted = x->leaving;
		x->result->exit_status = 128 + x->leaving;
		return 0;
	}
	if (r == -EPIPE) {
		/* The reader of our output has gone, as with `space exec … | head`: the command learns it the same way. */
		give_up_remote(x, SIGPIPE);
		x->result->exit_status = 128 + SIGPIPE;
		x->result->interrupted = SIGPIPE;
		return 0;
	}
	if (x->result->timed_out)
		give_up_remote(x, SIGKILL);
	else if (r < 0 && x->request->argv)
		give_up_remote(x, SIGTERM);
	if (x->result->exit_status == 0)
		x->result->exit_status = OUTPUT_EXIT_FAILURE;
	return r;
}

int exec_stream_run(struct api *api, const struct exec_stream_request *request,
                    const struct exec_stream_handlers *handlers, struct exec_stream_result *ret, struct error *e)
{
	memset(ret, 0, sizeof(*ret));
	struct exec_stream x = {
	    .api = api,
	    .request = request,
	    .handlers = handlers,
	    .result = ret,
	    .lock = PTHREAD_MUTEX_INITIALIZER,
	    .wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK),
	    .signal_api = api_clone(api),
	    .pid = request->argv ? 0 : request->pid,
	};
	int r = 0;
	if (x.wake_fd < 0 || !x.signal_api)
		r = error_set_errno(e, errno, "preparing the command");
	if (r == 0 && handlers->input)
		r = exec_input_new(api, request, handlers, on_input_failure, &x, &x.input, e);
	if (r < 0) {
		ret->exit_status = OUTPUT_EXIT_FAILURE;
	} else {
		api_set_timeout(x.signal_api, EXEC_STREAM_SIGNAL_TIMEOUT_MS);
		if (request->timeout_ms) {
			/* The guest enforces the limit; this is for a guest that does not. */
			x.silence_ms = (unsigned)MIN(request->timeout_ms + EXEC_STREAM_GRACE_MS, (uint64_t)INT32_MAX);
			x.deadline_ms = time_monotonic_ms() + x.silence_ms;
		}
		if (!request->argv && handlers->input)
			r = exec_input_start(x.input, request->pid, e);
		signals_set_handler(on_signal, &x);
		if (r == 0)
			r = follow(&x, e);
		signals_set_handler(NULL, NULL);
		ret->forwarded = x.last_forwarded;
		r = conclude(&x, r, e);
	}
	close_stream(&x);
	exec_input_free(x.input);
	event_scan_free(&x.scan);
	free(x.decoded);
	api_free(x.signal_api);
	if (x.wake_fd >= 0)
		close(x.wake_fd);
	return r;
}
