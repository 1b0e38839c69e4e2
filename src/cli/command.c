#include "cli/command.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "base/text.h"
#include "cli/signals.h"
#include "cli/terminal.h"

struct command {
	const struct command_options *options;
	int line_start; /* the last byte typed ended a line */
	int tilde;      /* and then came "~" */
	int detach;
};

/* Writes to a descriptor that others may have made non-blocking. */
static int write_all(int fd, const char *data, size_t size)
{
	while (size) {
		ssize_t n = write(fd, data, size);
		if (n >= 0) {
			data += n;
			size -= (size_t)n;
			continue;
		}
		if (errno == EAGAIN) {
			struct pollfd p = {.fd = fd, .events = POLLOUT};
			poll(&p, 1, -1);
		} else if (errno != EINTR) {
			return -errno;
		}
	}
	return 0;
}

static int output_bytes(void *context, enum event_scan_channel channel, const void *data, size_t size,
                        const struct event_scan_event *raw)
{
	return write_all(channel == EVENT_SCAN_STDERR ? STDERR_FILENO : STDOUT_FILENO, data, size);
}

/* With --json: one line a chunk; bytes need not be text, so they stay base64. */
static int output_line(void *context, enum event_scan_channel channel, const void *data, size_t size,
                       const struct event_scan_event *raw)
{
	static const char *const names[] = {"", "stdout", "stderr", "pty"};
	printf("{\"event\":\"%s\"", names[channel]);
	if (raw->has_offset)
		printf(",\"offset\":%" PRIu64, raw->offset);
	printf(",\"base64\":\"");
	fwrite(raw->base64, 1, raw->base64_size, stdout);
	printf("\"}\n");
	return fflush(stdout) == 0 ? 0 : errno ? -errno : -EIO;
}

static void on_started(void *context, uint64_t pid)
{
	struct command *command = context;
	if (output.json)
		printf("{\"event\":\"start\",\"pid\":%" PRIu64 "}\n", pid);
	else if (command->detach)
		printf("%" PRIu64 "\n", pid);
	fflush(stdout);
}

/* Takes "~." out of what is typed and turns it into a hang-up. Returns the bytes left. */
static size_t filter_escape(struct command *command, unsigned char *data, size_t size)
{
	size_t kept = 0;
	for (size_t i = 0; i < size; i++) {
		unsigned char c = data[i];
		if (command->tilde && c == '.') {
			kill(getpid(), SIGHUP);
			command->tilde = 0;
			if (kept)
				kept--;
			continue;
		}
		command->tilde = command->line_start && c == '~';
		command->line_start = c == '\r' || c == '\n';
		data[kept++] = c;
	}
	return kept;
}

static ssize_t read_stdin(void *context, void *data, size_t size, int stop_fd)
{
	struct command *command = context;
	for (;;) {
		struct pollfd p[2] = {{.fd = STDIN_FILENO, .events = POLLIN}, {.fd = stop_fd, .events = POLLIN}};
		if (poll(p, 2, -1) < 0 && errno != EINTR)
			return -errno;
		if (p[1].revents)
			return 0;
		if (!p[0].revents)
			continue;
		ssize_t n = read(STDIN_FILENO, data, size);
		if (n < 0 && (errno == EINTR || errno == EAGAIN))
			continue;
		/* EIO is a terminal that has gone, EBADF a stdin that was never there: both are an end. */
		if (n < 0)
			return errno == EIO || errno == EBADF ? 0 : -errno;
		if (n > 0 && command->options->escape)
			n = (ssize_t)filter_escape(command, data, (size_t)n);
		else if (n == 0)
			return 0;
		if (n > 0)
			return n;
	}
}

static void report_end(const struct verb_call *call, const struct exec_stream_result *result, const char *session,
                       const struct command_options *options)
{
	if (output.json) {
		json_t *line = json_pack("{s:s, s:I, s:i, s:i, s:b, s:i, s:s*}", "event", "end", "pid", (json_int_t)result->pid,
		                         "exit_code", result->signal ? -1 : result->remote_code, "signal", result->signal,
		                         "timed_out", result->timed_out, "exit_status", result->exit_status, "signal_name",
		                         result->signal ? signals_name(result->signal) : NULL);
		if (result->lost_bytes)
			json_object_set_new(line, "lost_bytes", json_integer((json_int_t)result->lost_bytes));
		if (result->interrupted)
			json_object_set_new(line, "interrupted", json_integer(result->interrupted));
		output_json_line(line);
		json_decref(line);
	}
	if (result->lost_bytes)
		output_note("%" PRIu64 " bytes of output were not kept while nobody was attached", result->lost_bytes);
	if (result->timed_out)
		output_note("the command was ended after its time limit of %" PRIu64 " s", options->timeout.value);
	if (result->interrupted && result->pid && result->interrupted != SIGPIPE)
		output_note("left process %" PRIu64 " without knowing its end; it may still run (space ps %s)", result->pid,
		            session);
}

static void report_failure(const struct verb_call *call, const struct error *e, const struct exec_stream_result *result,
                           const char *session, const char *const *argv, uint64_t pid)
{
	char what[256];
	const char *hint = api_hint(call->api, e, argv ? "session" : "process");
	if (result->from_guest)
		hint = argv ? NULL : "see the processes with: space ps -a ID";
	if (argv)
		snprintf(what, sizeof(what), "cannot run %.100s in %.100s", argv[0], session);
	else
		snprintf(what, sizeof(what), "cannot attach to process %" PRIu64 " of %.100s", pid, session);
	output_error(e, hint, "%s", what);
}

int command_run(const struct verb_call *call, const char *session, const char *const *argv,
                const struct command_options *options, uint64_t pid, const uint64_t *offset)
{
	struct error e;
	struct exec_stream_result result;
	int terminal_in = isatty(STDIN_FILENO) == 1;
	int with_input = !options->no_stdin && !options->detach && (options->interactive || options->tty || !terminal_in);
	struct command command = {.options = options, .line_start = 1, .detach = options->detach};
	struct exec_stream_request request = {
	    .session = session,
	    .user = options->user,
	    .directory = options->directory,
	    .argv = argv,
	    .environment = &options->environment,
	    .timeout_ms = options->timeout.value * 1000,
	    .tty = options->tty,
	    .pid = pid,
	    .offset = offset ? *offset : 0,
	    .has_offset = offset != NULL,
	    .detach = options->detach,
	};
	struct exec_stream_handlers handlers = {
	    .output = output.json ? output_line : output_bytes,
	    .input = with_input ? read_stdin : NULL,
	    .started = on_started,
	    .context = &command,
	};
	if (options->tty && terminal_in && with_input && terminal_raw(&e) < 0)
		return verb_fail(call, &e, NULL, "cannot use the terminal");
	int r = exec_stream_run(call->api, &request, &handlers, &result, &e);
	terminal_restore();
	if (r < 0) {
		report_failure(call, &e, &result, session, argv, pid);
		return result.exit_status;
	}
	if (!options->detach)
		report_end(call, &result, session, options);
	return output_finish(result.exit_status);
}
