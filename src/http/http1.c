/*
 * HTTP/1.x on one connection.
 *
 * Requests of a connection are served one after the other: bytes that arrive before the present answer is complete stay
 * in `leftover` and reading stops, so a pipelining client is served in order and costs one buffer. States are those of
 * enum connection_state. Everything that ends a stream or a connection happens in http1_advance(), which the server
 * runs from the loop: a handler may call any stream function from any of its callbacks without being re-entered.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "base/text.h"
#include "server_internal.h"

static void start_or_stop_reading(struct connection *c);
static void process_input(struct connection *c, const char *data, size_t size);

static struct connection *connection_of(const struct http_stream *s)
{
	return (struct connection *)((uintptr_t)s - offsetof(struct connection, stream));
}

/* -- output -- */

static size_t queued_bytes(const struct connection *c)
{
	return http_output_queued(&c->output);
}

static void on_moved(void *context, int drained)
{
	struct connection *c = context;
	if (c->output.failed)
		c->dead = 1;
	if (c->state == CONNECTION_CLOSING)
		return;
	if (drained && c->has_stream && c->stream.handler->drained && !c->stream.ended)
		c->stream.handler->drained(&c->stream, c->stream.context);
	server_defer(c);
}

/* What a write to the output returned, for the handler; a failed one ends the connection. */
static int output_result(struct connection *c, int r)
{
	if (r < 0) {
		c->dead = 1;
		server_defer(c);
	}
	return r;
}

static int output_buf(struct connection *c, const struct buf *b)
{
	if (c->dead || c->output_shut)
		return -EPIPE;
	int r = output_result(c, http_output_bytes(&c->output, b->data, b->size));
	return r < 0 ? r : 0;
}

static int append_headers(struct buf *head, const struct http_header *headers, size_t count)
{
	int r = 0;
	for (size_t i = 0; i < count && r == 0; i++) {
		if (!http_name_is_valid(headers[i].name) || !http_value_is_valid(headers[i].value))
			return -EINVAL;
		r = buf_printf(head, "%s: %s\r\n", headers[i].name, headers[i].value);
	}
	return r;
}

/* -- stream operations -- */

static int http1_interim(struct http_stream *s, int status, const struct http_header *headers, size_t count)
{
	CLEANUP_BUF struct buf head = {0};
	int r = buf_printf(&head, "HTTP/1.1 %d %s\r\n", status, http_status_text(status));
	if (r == 0)
		r = append_headers(&head, headers, count);
	if (r == 0)
		r = buf_append_string(&head, "\r\n");
	return r < 0 ? r : output_buf(connection_of(s), &head);
}

static int has_header(const struct http_header *headers, size_t count, const char *name)
{
	for (size_t i = 0; i < count; i++) {
		if (!strcasecmp(headers[i].name, name))
			return 1;
	}
	return 0;
}

/* Chooses the framing of the answer and whether the connection can live on. */
static const char *frame_answer(struct connection *c, int status, int64_t length, char *line, size_t size)
{
	struct http1_answer *a = &c->answer;
	const struct http_request *q = &c->stream.request;
	int bodiless = status == 204 || status == 304;
	*a = (struct http1_answer){.remaining = -1, .has_no_body = q->is_head || bodiless};
	line[0] = '\0';
	if (!c->parser.keep_alive || c->server->stopping || (!c->parser.done && !c->reading_body))
		c->close_after = 1;
	if (length >= 0) {
		a->remaining = a->has_no_body ? 0 : length;
		if (!bodiless)
			snprintf(line, size, "content-length: %lld\r\n", (long long)length);
	} else if (q->minor == 0) {
		c->close_after = 1; /* the end of the connection ends the body */
	} else if (!bodiless) {
		a->is_chunked = !a->has_no_body;
		snprintf(line, size, "transfer-encoding: chunked\r\n");
	}
	if (c->close_after)
		return "connection: close\r\n";
	return q->minor == 0 ? "connection: keep-alive\r\n" : "";
}

static int http1_respond(struct http_stream *s, int status, const struct http_header *headers, size_t count,
                         int64_t length)
{
	struct connection *c = connection_of(s);
	char framing[48];
	const char *connection = frame_answer(c, status, length, framing, sizeof(framing));
	CLEANUP_BUF struct buf head = {0};
	int r = buf_printf(&head, "HTTP/1.1 %d %s\r\n%s%s", status, http_status_text(status), framing, connection);
	if (r == 0 && !has_header(headers, count, "date"))
		r = buf_printf(&head, "date: %s\r\n", server_date(c->server));
	if (r == 0)
		r = append_headers(&head, headers, count);
	if (r == 0)
		r = buf_append_string(&head, "\r\n");
	return r < 0 ? r : output_buf(c, &head);
}

static int http1_upgrade(struct http_stream *s, const struct http_header *headers, size_t count)
{
	struct connection *c = connection_of(s);
	CLEANUP_BUF struct buf head = {0};
	int r = buf_append_string(&head, "HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\n");
	if (r == 0)
		r = append_headers(&head, headers, count);
	if (r == 0)
		r = buf_append_string(&head, "\r\n");
	if (r == 0)
		r = output_buf(c, &head);
	if (r < 0)
		return r;
	c->state = CONNECTION_RAW;
	c->close_after = 1;
	c->reading_body = 0;
	server_defer(c);
	return 0;
}

static int http1_write(struct http_stream *s, const void *data, size_t size)
{
	struct connection *c = connection_of(s);
	struct http1_answer *a = &c->answer;
	if (c->dead || c->output_shut)
		return -EPIPE;
	if (c->state == CONNECTION_RAW)
		return output_result(c, http_output_bytes(&c->output, data, size));
	if (a->has_no_body)
		return 0;
	if (a->is_chunked)
		return output_result(c, http_output_chunk(&c->output, data, size));
	if (a->remaining >= 0) {
		if ((uint64_t)size > (uint64_t)a->remaining) {
			/* More than announced: the excess would be read as the next answer. */
			http_stream_abort(s);
			return -EPIPE;
		}
		a->remaining -= (int64_t)size;
	}
	return output_result(c, http_output_bytes(&c->output, data, size));
}

static void http1_end(struct http_stream *s)
{
	struct connection *c = connection_of(s);
	if (c->state == CONNECTION_EXCHANGE) {
		if (!s->answered || c->answer.remaining > 0) {
			c->dead = 1;
		} else if (c->answer.is_chunked) {
			output_result(c, http_output_bytes(&c->output, "0\r\n\r\n", 5));
		}
	}
	server_defer(c);
}

static void http1_abort(struct http_stream *s)
{
	struct connection *c = connection_of(s);
	c->dead = 1;
	server_defer(c);
}

static void http1_read(struct http_stream *s, int on)
{
	struct connection *c = connection_of(s);
	if (c->reading_body == on)
		return;
	c->reading_body = on;
	if (on && (c->leftover.size || c->parser.done))
		server_defer(c);
	start_or_stop_reading(c);
}

static size_t http1_queued(const struct http_stream *s)
{
	return queued_bytes(connection_of(s));
}

static const struct http_stream_ops http1_ops = {
    .read = http1_read,
    .interim = http1_interim,
    .respond = http1_respond,
    .upgrade = http1_upgrade,
    .write = http1_write,
    .end = http1_end,
    .abort = http1_abort,
    .queued = http1_queued,
};

/* -- input -- */

static void on_alloc(uv_handle_t *handle, size_t suggested, uv_buf_t *buf)
{
	struct connection *c = (struct connection *)handle;
	*buf = uv_buf_init(c->server->input, sizeof(c->server->input));
}

static void on_input_end(struct connection *c)
{
	c->reading = 0;
	uv_read_stop(&c->handle.stream);
	if (c->state == CONNECTION_RAW) {
		c->input_ended = 1;
		if (c->stream.handler->body_end)
			c->stream.handler->body_end(&c->stream, c->stream.context);
	} else {
		/* A client that closes while its answer is awaited has lost interest. */
		c->dead = 1;
	}
	server_defer(c);
}

static void on_read(uv_stream_t *handle, ssize_t n, const uv_buf_t *buf)
{
	struct connection *c = (struct connection *)handle;
	if (n == 0)
		return;
	if (n > 0) {
		process_input(c, buf->base, (size_t)n);
		start_or_stop_reading(c);
		return;
	}
	if (n == UV_EOF) {
		on_input_end(c);
		return;
	}
	c->dead = 1;
	server_defer(c);
}

static void start_or_stop_reading(struct connection *c)
{
	int want = 0;
	if (!c->dead && !c->input_ended && !c->leftover.size) {
		switch (c->state) {
		case CONNECTION_HEAD:
		case CONNECTION_LINGER:
			want = 1;
			break;
		case CONNECTION_EXCHANGE:
			/* After the body it goes on to notice a client that leaves. */
			want = c->reading_body || c->parser.done;
			break;
		case CONNECTION_RAW:
			want = c->reading_body;
			break;
		case CONNECTION_CLOSING:
			break;
		}
	}
	if (want == c->reading)
		return;
	c->reading = want;
	if (!want) {
		uv_read_stop(&c->handle.stream);
	} else if (uv_read_start(&c->handle.stream, on_alloc, on_read) < 0) {
		c->reading = 0;
		c->dead = 1;
		server_defer(c);
	}
}

static void release_stream(struct connection *c, int complete)
{
	if (!c->has_stream)
		return;
	c->has_stream = 0;
	c->server->stats.streams--;
	c->stream.ended = 1;
	if (c->stream.handler && c->stream.handler->closed)
		c->stream.handler->closed(&c->stream, c->stream.context, complete);
}

static void begin_linger(struct connection *c)
{
	c->state = CONNECTION_LINGER;
	c->deadline_ms = time_monotonic_ms() + c->server->limits.linger_timeout_ms;
	buf_free(&c->leftover);
	server_defer(c);
}

/* The client broke the protocol: says so if it still can, and ends the connection. */
static void refuse_input(struct connection *c, int status, const char *message)
{
	int can_answer = !c->has_stream || !c->stream.answered;
	release_stream(c, 0);
	if (!can_answer) {
		c->dead = 1;
		server_defer(c);
		return;
	}
	CLEANUP_BUF struct buf body = {0};
	CLEANUP_BUF struct buf answer = {0};
	const char *code = status == 431 ? "too_large" : status == 408 ? "timeout" : "invalid";
	if (http_error_body(&body, code, message) < 0 ||
	    buf_printf(&answer,
	               "HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n"
	               "connection: close\r\ndate: %s\r\n\r\n%s",
	               status, http_status_text(status), body.size, server_date(c->server), body.data) < 0)
		c->dead = 1;
	else
		output_buf(c, &answer);
	c->close_after = 1;
	begin_linger(c);
}

static void begin_stream(struct connection *c)
{
	struct http_parser *p = &c->parser;
	struct http_stream *s = &c->stream;
	*s = (struct http_stream){.ops = &http1_ops, .loop = c->server->loop, .peer = &c->peer};
	s->request = (struct http_request){
	    .method = p->method,
	    .target = p->target,
	    .headers = p->headers,
	    .header_count = p->header_count,
	    .has_body = p->framing != HTTP_FRAMING_NONE,
	    .content_length = p->framing == HTTP_FRAMING_CHUNKED ? -1 : (int64_t)p->body_length,
	    .minor = p->minor,
	    .is_upgrade = p->upgrade,
	    .is_head = !strcmp(p->method, "HEAD"),
	};
	const char *expect = http_parser_header(p, "expect");
	s->request.expects_continue = expect && p->minor >= 1 && !strcasecmp(expect, "100-continue");
	c->state = CONNECTION_EXCHANGE;
	c->reading_body = 0;
	c->answer = (struct http1_answer){.remaining = -1};
	c->has_stream = 1;
	c->server->stats.requests++;
	c->server->stats.streams++;
	c->server->on_request(c->server->context, s);
	if (p->done && s->handler && s->handler->body_end && !s->ended)
		s->handler->body_end(s, s->context);
}

static int deliver_body(void *context, const char *data, size_t size)
{
	struct connection *c = context;
	if (c->stream.handler->body && !c->stream.ended)
		c->stream.handler->body(&c->stream, c->stream.context, data, size);
	return 0;
}

static size_t process_head(struct connection *c, const char *data, size_t size)
{
	struct error error;
	if (!c->head_begun) {
		c->head_begun = 1;
		c->deadline_ms = time_monotonic_ms() + c->server->limits.header_timeout_ms;
	}
	ssize_t used = http_parser_head(&c->parser, data, size, &error);
	if (used < 0) {
		c->server->stats.malformed++;
		refuse_input(c, c->parser.suggest_status ? c->parser.suggest_status : 400, error.message);
		return size;
	}
	if (c->parser.head_done)
		begin_stream(c);
	return (size_t)used;
}

static size_t process_body(struct connection *c, const char *data, size_t size)
{
	struct error error;
	ssize_t used = http_parser_body(&c->parser, data, size, deliver_body, c, &error);
	if (used < 0) {
		c->server->stats.malformed++;
		refuse_input(c, 400, error.message);
		return size;
	}
	if (c->parser.done && c->stream.handler->body_end && !c->stream.ended)
		c->stream.handler->body_end(&c->stream, c->stream.context);
	return (size_t)used;
}

static void process_input(struct connection *c, const char *data, size_t size)
{
	while (size && !c->dead) {
		size_t used;
		if (c->state == CONNECTION_LINGER || c->state == CONNECTION_CLOSING)
			return;
		if (c->state == CONNECTION_HEAD)
			used = process_head(c, data, size);
		else if (c->state == CONNECTION_RAW && c->reading_body)
			used = size, deliver_body(c, data, size);
		else if (c->state == CONNECTION_EXCHANGE && !c->parser.done && c->reading_body)
			used = process_body(c, data, size);
		else
			break;
		data += used;
		size -= used;
	}
	if (size && !c->dead && buf_append(&c->leftover, data, size) < 0) {
		c->dead = 1;
		server_defer(c);
	}
}

static void process_leftover(struct connection *c)
{
	struct buf taken = c->leftover;
	c->leftover = (struct buf){0};
	process_input(c, taken.data, taken.size);
	buf_free(&taken);
}

/* -- life of a connection -- */

void http1_begin(struct connection *c)
{
	http_parser_init(&c->parser, HTTP_PARSER_REQUEST, c->server->limits.head_bytes);
	c->parser.keep_case = 1;
	c->output = (struct http_output){.stream = &c->handle.stream, .moved = on_moved, .context = c};
	c->state = CONNECTION_HEAD;
	/* A connection that never says anything is half-open, not idle. */
	c->head_begun = 1;
	c->deadline_ms = time_monotonic_ms() + c->server->limits.header_timeout_ms;
	start_or_stop_reading(c);
}

static void next_request(struct connection *c)
{
	http_parser_reset(&c->parser);
	c->state = CONNECTION_HEAD;
	c->reading_body = 0;
	c->head_begun = 0;
	c->deadline_ms = time_monotonic_ms() + c->server->limits.idle_timeout_ms;
	/* An idle connection keeps no buffers. */
	http_output_shrink(&c->output);
}

static void on_closed(uv_handle_t *handle)
{
	struct connection *c = (struct connection *)handle;
	struct http_server *server = c->server;
	if (c->next)
		c->next->previous = c->previous;
	if (c->previous)
		c->previous->next = c->next;
	else
		server->connections = c->next;
	server->stats.connections--;
	http_parser_free(&c->parser);
	buf_free(&c->leftover);
	server->stats.bytes_out += c->output.total;
	http_output_free(&c->output);
	free(c);
}

void http1_close(struct connection *c)
{
	if (c->state == CONNECTION_CLOSING)
		return;
	int cut = c->has_stream && c->stream.answered;
	release_stream(c, 0);
	c->state = CONNECTION_CLOSING;
	/* An answer that ends with the connection must not look complete when it was cut. */
	if (!cut || c->handle.handle.type != UV_TCP || c->output.writing || c->output_shut ||
	    uv_tcp_close_reset(&c->handle.tcp, on_closed) < 0)
		uv_close(&c->handle.handle, on_closed);
}

static void on_shutdown(uv_shutdown_t *request, int status)
{
	struct connection *c = request->data;
	if (status < 0 && c->state != CONNECTION_CLOSING) {
		c->dead = 1;
		server_defer(c);
	}
}

static void shut_output(struct connection *c)
{
	if (c->output_shut)
		return;
	c->output_shut = 1;
	c->shutdown.data = c;
	if (uv_shutdown(&c->shutdown, &c->handle.stream, on_shutdown) < 0)
		c->dead = 1;
}

static void advance_exchange(struct connection *c)
{
	if (!c->stream.ended || queued_bytes(c))
		return;
	int reuse = !c->close_after && c->parser.done;
	release_stream(c, 1);
	if (reuse)
		next_request(c);
	else
		begin_linger(c);
}

void http1_advance(struct connection *c)
{
	if (c->state == CONNECTION_CLOSING || c->is_deferred)
		return;
	if (!c->dead && c->state == CONNECTION_EXCHANGE)
		advance_exchange(c);
	if (!c->dead && c->leftover.size)
		process_leftover(c);
	if (!c->dead && c->state == CONNECTION_RAW && c->stream.ended && !queued_bytes(c)) {
		shut_output(c);
		if (c->input_ended) {
			release_stream(c, 1);
			http1_close(c);
			return;
		}
	}
	if (!c->dead && c->state == CONNECTION_LINGER && !queued_bytes(c))
		shut_output(c);
	if (c->dead || (c->server->stopping && c->state == CONNECTION_HEAD)) {
		http1_close(c);
		return;
	}
	start_or_stop_reading(c);
}

static void time_out(struct connection *c)
{
	c->server->stats.timed_out++;
	if (c->state == CONNECTION_HEAD && c->parser.head.size)
		refuse_input(c, 408, "the request's head took too long");
	else if (c->state == CONNECTION_EXCHANGE && !c->stream.answered)
		refuse_input(c, 408, "the request's body took too long");
	else
		c->dead = 1;
	server_defer(c);
}

void http1_sweep(struct connection *c, uint64_t now)
{
	if (c->state == CONNECTION_CLOSING)
		return;
	int waits = c->state == CONNECTION_HEAD || c->state == CONNECTION_LINGER;
	int body_late = c->state == CONNECTION_EXCHANGE && c->stream.body_deadline_ms && !c->parser.done &&
	                now >= c->stream.body_deadline_ms;
	int stalled = queued_bytes(c) && now - c->output.progress_ms >= c->server->limits.stall_timeout_ms;
	if ((waits && now >= c->deadline_ms) || body_late || stalled)
		time_out(c);
}
