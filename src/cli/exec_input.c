/*
 * Input goes out in unary SendInput calls on one kept connection: each answer says that the guest has taken the bytes,
 * so a slow reader there slows the reader here, and memory stays at one chunk.
 *
 * A chunk whose answer never came may or may not have been delivered. For a pipe that is an error (a byte lost or
 * doubled in the middle would be worse); at a terminal the user sees what happened and just types on.
 */
#include "cli/exec_input.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/text.h"

#define INPUT_CHUNK_BYTES (192 * 1024) /* a multiple of 3; well below the agent's limit for a message */
#define INPUT_CONNECT_ATTEMPTS 15
#define INPUT_CONNECT_PAUSE_MS 1000

struct exec_input {
	struct api *api;
	const struct exec_stream_request *request;
	const struct exec_stream_handlers *handlers;
	void (*on_failure)(void *context);
	void *context;
	uint64_t pid;
	int stop_fd;
	pthread_t thread;
	int started;
	struct error error;
	uint64_t delivered; /* bytes that the guest has said it took */
	char *target_input;
	char *target_close;
	_Atomic int stopping;
};

int exec_input_new(const struct api *api, const struct exec_stream_request *request,
                   const struct exec_stream_handlers *handlers, void (*on_failure)(void *context), void *context,
                   struct exec_input **ret, struct error *e)
{
	struct exec_input *in = calloc(1, sizeof(*in));
	if (!in)
		return error_set_errno(e, ENOMEM, "preparing input");
	in->request = request;
	in->handlers = handlers;
	in->on_failure = on_failure;
	in->context = context;
	in->api = api_clone(api);
	in->stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	in->target_input = api_session_path(request->session, "/agent/process.Process/SendInput");
	in->target_close = api_session_path(request->session, "/agent/process.Process/CloseStdin");
	if (!in->api || in->stop_fd < 0) {
		exec_input_free(in);
		return error_set_errno(e, ENOMEM, "preparing input");
	}
	*ret = in;
	return 0;
}

static int pause_for(struct exec_input *in, int ms)
{
	struct pollfd p = {.fd = in->stop_fd, .events = POLLIN};
	return poll(&p, 1, ms) > 0;
}

/* One call. The process may have ended, or closed its end: that is not a failure of ours, *ret_over tells. */
static int call(struct exec_input *in, const char *target, const char *body, size_t size, int *ret_over,
                struct error *e)
{
	struct api_stream_call request = {
	    .method = "POST",
	    .target = target,
	    .user = in->request->user,
	    .content_type = "application/json",
	    .body = body,
	    .body_size = size,
	};
	int r = 0;
	for (unsigned attempt = 0;; attempt++) {
		r = api_call_text(in->api, &request, NULL, e);
		/* Only a connection that could not even be made is certain not to have carried the bytes. */
		if (r >= 0 || !api_is_refused(e) || attempt == INPUT_CONNECT_ATTEMPTS || pause_for(in, INPUT_CONNECT_PAUSE_MS))
			break;
	}
	if (r < 0 && !api_is_connection_error(e) &&
	    (e->code == ERROR_NOT_FOUND || e->code == ERROR_CONFLICT || e->code == ERROR_CANCELED)) {
		*ret_over = 1;
		return 0;
	}
	return r;
}

static int send_chunk(struct exec_input *in, char *message, const unsigned char *data, size_t size, int *ret_over)
{
	int used = snprintf(message, 128, "{\"process\":{\"pid\":%llu},\"input\":{\"%s\":\"", (unsigned long long)in->pid,
	                    in->request->tty ? "pty" : "stdin");
	size_t length = (size_t)used;
	length += text_base64(message + length, data, size);
	memcpy(message + length, "\"}}", 4);
	return call(in, in->target_input, message, length + 3, ret_over, &in->error);
}

static int close_stdin(struct exec_input *in)
{
	char body[128];
	int over = 0;
	int size = snprintf(body, sizeof(body), "{\"process\":{\"pid\":%llu}}", (unsigned long long)in->pid);
	return call(in, in->target_close, body, (size_t)size, &over, &in->error);
}

static int pump(struct exec_input *in, unsigned char *data, char *message)
{
	static const unsigned char end_of_file[] = {4}; /* what a terminal sends for the end of input */
	for (;;) {
		int over = 0;
		ssize_t n = in->handlers->input(in->handlers->context, data, INPUT_CHUNK_BYTES, in->stop_fd);
		if (in->stopping)
			return 0;
		if (n < 0)
			return error_set_errno(&in->error, (int)n, "reading input");
		if (n == 0)
			return in->request->tty ? send_chunk(in, message, end_of_file, 1, &over) : close_stdin(in);
		int r = send_chunk(in, message, data, (size_t)n, &over);
		if (over || in->stopping)
			return 0;
		if (r < 0 && !(in->request->tty && api_is_connection_error(&in->error)))
			return error_prefix(&in->error, "input broke off after %" PRIu64 " bytes, up to %zd more may have arrived",
			                    in->delivered, n);
		in->delivered += (uint64_t)n;
	}
}

static void *run(void *context)
{
	struct exec_input *in = context;
	unsigned char *data = malloc(INPUT_CHUNK_BYTES);
	char *message = malloc(text_base64_size(INPUT_CHUNK_BYTES) + 256);
	int r = data && message ? pump(in, data, message) : error_set_errno(&in->error, ENOMEM, "sending input");
	free(data);
	free(message);
	if (r < 0 && !in->stopping)
		in->on_failure(in->context);
	return NULL;
}

int exec_input_start(struct exec_input *in, uint64_t pid, struct error *e)
{
	in->pid = pid;
	int r = pthread_create(&in->thread, NULL, run, in);
	if (r)
		return error_set_errno(e, r, "starting the input thread");
	in->started = 1;
	return 0;
}

int exec_input_error(struct exec_input *in, struct error *e)
{
	/* on_failure() was called after the error was written, and the thread writes no more. */
	*e = in->error;
	return error_code_errno(e->code);
}

void exec_input_free(struct exec_input *in)
{
	if (!in)
		return;
	if (in->started) {
		uint64_t one = 1;
		in->stopping = 1;
		api_cut(in->api);
		if (write(in->stop_fd, &one, sizeof(one)) < 0)
			one = 0; /* full means readable, which is all that matters */
		pthread_join(in->thread, NULL);
	}
	if (in->stop_fd >= 0)
		close(in->stop_fd);
	free(in->target_input);
	free(in->target_close);
	api_free(in->api);
	free(in);
}
