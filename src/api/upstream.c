#include "api/upstream.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"

#define UPSTREAM_HEAD_BYTES_MAX 65536
#define UPSTREAM_INTERIM_MAX 16

struct upstream {
	uv_tcp_t tcp; /* first */
	struct api *api;
	struct http_output output;
	struct http_parser parser;
	const struct upstream_handler *handler;
	void *context;
	char session_id[ID_BYTES];
	int reading;
	int is_raw;
	int restarted;
	int answer_begun;
	int shutting; /* shutdown was asked for */
	int shut;
	int closing;
	int excess; /* bytes came that nobody asked for */
	unsigned interim;
	uv_shutdown_t shutdown;
};

/* One read at a time: the loop has one thread. */
static char input[HTTP_STREAM_READ_BYTES];

/* -- claims -- */

struct give_back {
	struct work work; /* first */
	struct api *api;
	char session_id[ID_BYTES];
};

static void give_back_run(struct work *work)
{
	struct give_back *g = (struct give_back *)work;
	session_close(g->api->manager, g->session_id);
}

static void give_back_done(struct work *work)
{
	free(work);
}

void upstream_give_back(struct api *api, const char *session_id)
{
	struct give_back *g = calloc(1, sizeof(*g));
	if (g) {
		g->api = api;
		(void)text_copy(g->session_id, sizeof(g->session_id), session_id);
		if (work_submit(&api->work, &g->work, WORK_QUICK, give_back_run, give_back_done) == 0)
			return;
		free(g);
	}
	/* A claim that stays would keep a session from ever being idle: rather block for a moment. */
	session_close(api->manager, session_id);
}

/* -- output -- */

static void fail(struct upstream *u, const struct error *e)
{
	const struct upstream_handler *handler = u->handler;
	void *context = u->context;
	upstream_close(u);
	if (handler)
		handler->failed(context, e);
}

static void on_shutdown(uv_shutdown_t *request, int status)
{
}

static void shut_when_empty(struct upstream *u)
{
	if (!u->shutting || u->shut || u->closing || http_output_queued(&u->output))
		return;
	u->shut = 1;
	uv_shutdown(&u->shutdown, (uv_stream_t *)&u->tcp, on_shutdown);
}

static void on_moved(void *context, int drained)
{
	struct upstream *u = context;
	struct error e;
	if (u->closing)
		return;
	if (u->output.failed) {
		/* An answer that was sent before the peer stopped reading may still be in the receive buffer. */
		if (u->reading)
			return;
		error_set(&e, ERROR_UNAVAILABLE, "the guest closed the connection");
		fail(u, &e);
		return;
	}
	shut_when_empty(u);
	if (drained && u->handler && u->handler->drained)
		u->handler->drained(u->context);
}

int upstream_write(struct upstream *u, const void *data, size_t size)
{
	return http_output_bytes(&u->output, data, size);
}

int upstream_write_chunk(struct upstream *u, const void *data, size_t size)
{
	return http_output_chunk(&u->output, data, size);
}

void upstream_shutdown(struct upstream *u)
{
	u->shutting = 1;
	shut_when_empty(u);
}

/* -- input -- */

static void on_alloc(uv_handle_t *handle, size_t suggested, uv_buf_t *buf)
{
	*buf = uv_buf_init(input, sizeof(input));
}

/* Decoded runs of one read are moved together, so that many small chunks become one write to the client. */
struct run {
	char *to;
	size_t size;
};

static int run_add(void *context, const char *data, size_t size)
{
	struct run *run = context;
	if (run->to + run->size != data)
		memmove(run->to + run->size, data, size);
	run->size += size;
	return 0;
}

/* Returns bytes used, or -1 if the upstream is closed. */
static ssize_t take_head(struct upstream *u, char *data, size_t size)
{
	struct error e;
	ssize_t used = http_parser_head(&u->parser, data, size, &e);
	if (used < 0) {
		fail(u, &e);
		return -1;
	}
	u->answer_begun = 1;
	if (!u->parser.head_done)
		return used;
	if (u->parser.status >= 200 || u->parser.status == 101) {
		u->restarted = 0;
		u->handler->head(u->context, &u->parser);
		if (!u->closing && !u->restarted && !u->is_raw && u->parser.done && u->handler)
			u->handler->body_end(u->context);
		return u->closing ? -1 : used;
	}
	if (++u->interim > UPSTREAM_INTERIM_MAX) {
		error_set(&e, ERROR_UNAVAILABLE, "the guest sent more than %d interim answers", UPSTREAM_INTERIM_MAX);
		fail(u, &e);
		return -1;
	}
	if (u->handler && u->handler->interim)
		u->handler->interim(u->context, &u->parser);
	if (u->closing)
		return -1;
	int head_answer = u->parser.head_answer;
	http_parser_reset(&u->parser);
	u->parser.head_answer = head_answer;
	return used;
}

static ssize_t take_body(struct upstream *u, char *data, size_t size)
{
	struct error e;
	struct run run = {.to = data};
	ssize_t used = http_parser_body(&u->parser, data, size, run_add, &run, &e);
	if (run.size && u->handler)
		u->handler->body(u->context, data, run.size);
	if (u->closing)
		return -1;
	if (used < 0) {
		fail(u, &e);
		return -1;
	}
	if (u->parser.done && u->handler)
		u->handler->body_end(u->context);
	return u->closing ? -1 : used;
}

static void process(struct upstream *u, char *data, size_t size)
{
	while (size) {
		ssize_t used;
		if (u->is_raw) {
			if (u->handler)
				u->handler->body(u->context, data, size);
			return;
		}
		if (!u->parser.head_done) {
			used = take_head(u, data, size);
		} else if (!u->parser.done) {
			used = take_body(u, data, size);
		} else {
			u->excess = 1; /* of no further use */
			return;
		}
		if (used < 0)
			return;
		data += used;
		size -= (size_t)used;
	}
}

static void on_end(struct upstream *u)
{
	struct error e;
	u->reading = 0;
	uv_read_stop((uv_stream_t *)&u->tcp);
	if (u->is_raw) {
		if (u->handler)
			u->handler->body_end(u->context);
		return;
	}
	int was_done = u->parser.done;
	if (u->answer_begun && http_parser_eof(&u->parser, &e) == 0) {
		u->excess = 1;
		if (!was_done && u->handler)
			u->handler->body_end(u->context);
		return;
	}
	error_set(&e, ERROR_UNAVAILABLE, "the guest closed the connection %s",
	          u->answer_begun ? "in the middle of its answer" : "without an answer");
	fail(u, &e);
}

static void on_read(uv_stream_t *stream, ssize_t n, const uv_buf_t *buf)
{
	struct upstream *u = (struct upstream *)stream;
	struct error e;
	if (n == 0 || u->closing)
		return;
	if (n > 0) {
		process(u, buf->base, (size_t)n);
		return;
	}
	if (n == UV_EOF) {
		on_end(u);
		return;
	}
	error_set(&e, ERROR_UNAVAILABLE, "the connection to the guest broke: %s", uv_strerror((int)n));
	fail(u, &e);
}

void upstream_read(struct upstream *u, int on)
{
	if (u->reading == on || u->closing)
		return;
	u->reading = on;
	if (on)
		uv_read_start((uv_stream_t *)&u->tcp, on_alloc, on_read);
	else
		uv_read_stop((uv_stream_t *)&u->tcp);
}

void upstream_set_raw(struct upstream *u)
{
	u->is_raw = 1;
}

void upstream_restart(struct upstream *u)
{
	u->restarted = 1;
	upstream_expect(u, 0);
}

void upstream_expect(struct upstream *u, int head_answer)
{
	http_parser_reset(&u->parser);
	u->parser.head_answer = head_answer;
	u->answer_begun = 0;
	u->interim = 0;
}

int upstream_is_reusable(const struct upstream *u)
{
	return !u->closing && !u->is_raw && !u->excess && !u->output.failed && !u->shutting && u->parser.head_done &&
	       u->parser.done && u->parser.keep_alive && !http_output_queued(&u->output);
}

const char *upstream_session(const struct upstream *u)
{
	return u->session_id;
}

/* -- life -- */

static void on_closed(uv_handle_t *handle)
{
	struct upstream *u = (struct upstream *)handle;
	http_output_free(&u->output);
	http_parser_free(&u->parser);
	free(u);
}

void upstream_close(struct upstream *u)
{
	if (!u || u->closing)
		return;
	u->closing = 1;
	u->handler = NULL;
	upstream_give_back(u->api, u->session_id);
	uv_close((uv_handle_t *)&u->tcp, on_closed);
}

int upstream_new(struct api *api, int fd, const char *session_id, struct upstream **ret, struct error *e)
{
	struct upstream *u = calloc(1, sizeof(*u));
	if (!u) {
		close(fd);
		upstream_give_back(api, session_id);
		return error_set_errno(e, ENOMEM, "connection to a guest");
	}
	u->api = api;
	(void)text_copy(u->session_id, sizeof(u->session_id), session_id);
	uv_tcp_init(api->loop, &u->tcp);
	int r = uv_tcp_open(&u->tcp, fd);
	if (r < 0) {
		close(fd);
		upstream_close(u);
		return error_set(e, ERROR_INTERNAL, "connection to a guest: %s", uv_strerror(r));
	}
	uv_tcp_nodelay(&u->tcp, 1);
	u->output = (struct http_output){.stream = (uv_stream_t *)&u->tcp, .moved = on_moved, .context = u};
	http_parser_init(&u->parser, HTTP_PARSER_ANSWER, UPSTREAM_HEAD_BYTES_MAX);
	u->parser.keep_case = 1;
	*ret = u;
	return 0;
}

void upstream_attach(struct upstream *u, const struct upstream_handler *handler, void *context)
{
	u->handler = handler;
	u->context = context;
}
