/* The streaming between one client stream and one connection to a guest; see proxy.h for how it works. */
#include "api/exchange.h"

#include <errno.h>
#include <string.h>

#include "api/call.h"
#include "base/log.h"

static void over(struct exchange *x)
{
	x->state = EXCHANGE_OVER;
	upstream_close(TAKE_PTR(x->upstream));
}

static void answer_failure(struct exchange *x, int status, const char *code, const char *message)
{
	CLEANUP_BUF struct buf body = {0};
	const char *type;
	struct http_header headers[] = {{"x-request-id", x->request_id}, {"cache-control", "no-store"}};
	x->proxy->api->answers_by_class[MIN(status / 100, 5)]++;
	if (forward_error_body(x, code, message, &body, &type) < 0)
		http_stream_abort(x->stream);
	else
		http_stream_answer(x->stream, status, type, body.data, body.size, headers, ARRAY_SIZE(headers));
}

/* What the agent's side says when it is the guest that fails: always 502, so that it is told apart from an API error.
 */
static void fail_guest(struct exchange *x, const char *code, const struct error *e)
{
	x->proxy->stats.failures++;
	log_debug("proxy", "%s session %s port %u: %s", x->request_id, x->session_id, x->preview.port, e->message);
	over(x);
	if (x->stream->answered)
		http_stream_abort(x->stream);
	else
		answer_failure(x, 502, code, e->message);
}

void exchange_fail(struct exchange *x, const struct error *e)
{
	over(x);
	if (x->stream->answered)
		http_stream_abort(x->stream);
	else if (x->preview.kind == PREVIEW_PORT && e->code == ERROR_UNAUTHENTICATED)
		answer_failure(x, 401, "unauthenticated", e->message);
	else
		call_answer_error(x->proxy->api, x->stream, x->request_id, x->may_see_inside, e, NULL, 0);
}

void exchange_cut(struct exchange *x)
{
	struct error e;
	if (!x->stream || x->state == EXCHANGE_OVER)
		return;
	error_set(&e, ERROR_UNAVAILABLE, "the session's sandbox has ended");
	fail_guest(x, "guest_unavailable", &e);
}

void exchange_sweep(struct exchange *x, uint64_t now)
{
	struct error e;
	if (!x->deadline_ms || now < x->deadline_ms || !x->stream || x->state == EXCHANGE_OVER)
		return;
	x->deadline_ms = 0;
	if (x->state == EXCHANGE_TUNNEL) {
		error_set(&e, ERROR_TIMEOUT, "the guest's agent does not answer");
		fail_guest(x, "guest_unavailable", &e);
	} else if (x->awaits_continue) {
		x->awaits_continue = 0;
		http_stream_interim(x->stream, 100, NULL, 0);
		http_stream_read(x->stream, 1);
	}
}

/* -- from the guest -- */

/* Both directions are through: the connection may serve another request, the client still gets what is queued. */
static void finish(struct exchange *x)
{
	if (!x->answer_done)
		return;
	struct upstream *u = TAKE_PTR(x->upstream);
	x->state = EXCHANGE_OVER;
	/* Only the agent speaks HTTP on this connection; behind a tunnel it is an app of the guest. */
	if (u && x->request_done && x->preview.kind != PREVIEW_PORT)
		proxy_keep(x->proxy, u, x->generation);
	else
		upstream_close(u);
}

static void begin_http(struct exchange *x);

static void tunnel_answered(struct exchange *x, const struct http_parser *answer)
{
	struct error e;
	if (answer->status == 101) {
		upstream_restart(x->upstream);
		begin_http(x);
		return;
	}
	if (answer->status == 502) {
		error_set(&e, ERROR_UNAVAILABLE, "nothing listens on port %u of the session", x->preview.port);
		fail_guest(x, "port_closed", &e);
		return;
	}
	error_set(&e, ERROR_UNAVAILABLE, "the guest's agent refused a tunnel to port %u (status %d)", x->preview.port,
	          answer->status);
	fail_guest(x, "guest_unavailable", &e);
}

static void switch_protocol(struct exchange *x, const struct forward_answer *head)
{
	struct error e;
	if (!x->is_upgrade) {
		error_set(&e, ERROR_UNAVAILABLE, "the guest changed the protocol without being asked to");
		fail_guest(x, "guest_unavailable", &e);
		return;
	}
	x->state = EXCHANGE_RAW;
	x->proxy->stats.upgrades++;
	upstream_set_raw(x->upstream);
	x->request_done = 0;
	if (http_stream_upgrade(x->stream, head->headers, head->count) < 0)
		http_stream_abort(x->stream);
	else
		http_stream_read(x->stream, 1);
}

static void on_head(void *context, struct http_parser *answer)
{
	struct exchange *x = context;
	struct error e;
	if (x->state == EXCHANGE_TUNNEL) {
		tunnel_answered(x, answer);
		return;
	}
	x->deadline_ms = 0;
	CLEANUP_FREE struct forward_answer *head = calloc(1, sizeof(*head));
	if (!head || forward_answer_head(x, answer, head) < 0) {
		error_set(&e, ERROR_UNAVAILABLE, "the guest's answer cannot be passed on");
		fail_guest(x, "guest_unavailable", &e);
		return;
	}
	if (answer->status == 101) {
		switch_protocol(x, head);
	} else {
		int64_t length = answer->framing == HTTP_FRAMING_LENGTH ? (int64_t)answer->body_length : -1;
		if (answer->framing == HTTP_FRAMING_NONE && !answer->head_answer)
			length = 0;
		else if (answer->head_answer && http_parser_header(answer, "content-length"))
			length = (int64_t)answer->body_length;
		/* A body that the guest did not wait for is not pulled on: the client learns that by the end of the stream. */
		x->awaits_continue = 0;
		x->proxy->api->answers_by_class[MIN(answer->status / 100, 5)]++;
		if (http_stream_respond(x->stream, answer->status, head->headers, head->count, length) < 0)
			http_stream_abort(x->stream);
	}
	buf_free(&head->text);
}

static void on_interim(void *context, struct http_parser *answer)
{
	struct exchange *x = context;
	struct forward_answer head = {0};
	if (x->state != EXCHANGE_HTTP)
		return;
	if (answer->status == 100) {
		if (!x->awaits_continue)
			return; /* was made up already, or nobody asked */
		x->awaits_continue = 0;
		x->deadline_ms = 0;
		http_stream_interim(x->stream, 100, NULL, 0);
		http_stream_read(x->stream, 1);
		return;
	}
	if (forward_answer_head(x, answer, &head) == 0)
		http_stream_interim(x->stream, answer->status, head.headers, head.count);
	buf_free(&head.text);
}

static void on_guest_body(void *context, const char *data, size_t size)
{
	struct exchange *x = context;
	x->proxy->stats.bytes_from_guests += size;
	int r = http_stream_write(x->stream, data, size);
	if (r > 0)
		upstream_read(x->upstream, 0);
	/* An error is followed by `closed` of the stream. */
}

static void on_guest_end(void *context)
{
	struct exchange *x = context;
	x->answer_done = 1;
	http_stream_end(x->stream);
	if (x->state == EXCHANGE_HTTP)
		finish(x);
}

static void on_guest_drained(void *context)
{
	struct exchange *x = context;
	if (x->stream && !x->request_done)
		http_stream_read(x->stream, 1);
}

static void on_guest_failed(void *context, const struct error *e)
{
	struct exchange *x = context;
	x->upstream = NULL;
	if (x->stream && x->state != EXCHANGE_OVER)
		fail_guest(x, "guest_unavailable", e);
}

static const struct upstream_handler upstream_events = {
    .head = on_head,
    .interim = on_interim,
    .body = on_guest_body,
    .body_end = on_guest_end,
    .drained = on_guest_drained,
    .failed = on_guest_failed,
};

/* -- to the guest -- */

static int send_head(struct exchange *x, int (*make)(const struct exchange *, struct buf *))
{
	CLEANUP_BUF struct buf head = {.limit = (size_t)2 * HTTP_HEAD_BYTES_MAX};
	struct error e;
	int r = make(x, &head);
	if (r < 0) {
		error_set(&e, ERROR_TOO_LARGE, "the request's head is too large to be passed on");
		exchange_fail(x, &e);
		return r;
	}
	upstream_write(x->upstream, head.data, head.size);
	return 0;
}

static void begin_http(struct exchange *x)
{
	const struct http_request *q = &x->stream->request;
	x->state = EXCHANGE_HTTP;
	x->deadline_ms = 0;
	upstream_expect(x->upstream, q->is_head);
	if (send_head(x, forward_request_head) < 0)
		return;
	if (!q->has_body || x->is_upgrade) {
		x->request_done = !x->is_upgrade;
	} else if (q->expects_continue && q->content_length != 0) {
		x->awaits_continue = 1;
		x->deadline_ms = time_monotonic_ms() + PROXY_CONTINUE_MS;
	} else {
		http_stream_read(x->stream, 1);
	}
}

void exchange_start(struct exchange *x)
{
	upstream_attach(x->upstream, &upstream_events, x);
	upstream_read(x->upstream, 1);
	if (x->preview.kind == PREVIEW_PORT) {
		x->state = EXCHANGE_TUNNEL;
		x->deadline_ms = time_monotonic_ms() + PROXY_TUNNEL_TIMEOUT_MS;
		upstream_expect(x->upstream, 0);
		send_head(x, forward_tunnel_head);
	} else {
		begin_http(x);
	}
}

static void on_client_body(struct http_stream *s, void *context, const char *data, size_t size)
{
	struct exchange *x = context;
	if (!x->upstream)
		return;
	x->proxy->stats.bytes_to_guests += size;
	int chunked = x->state == EXCHANGE_HTTP && s->request.content_length < 0;
	int r = chunked ? upstream_write_chunk(x->upstream, data, size) : upstream_write(x->upstream, data, size);
	/* After a failed write the guest's answer, if there is one, is still on its way. */
	if (r != 0)
		http_stream_read(s, 0);
}

static void on_client_end(struct http_stream *s, void *context)
{
	struct exchange *x = context;
	if (!x->upstream)
		return;
	x->request_done = 1;
	if (x->state == EXCHANGE_RAW)
		upstream_shutdown(x->upstream);
	else if (x->state == EXCHANGE_HTTP && s->request.has_body && s->request.content_length < 0)
		upstream_write(x->upstream, "0\r\n\r\n", 5);
}

static void on_client_drained(struct http_stream *s, void *context)
{
	struct exchange *x = context;
	if (x->upstream)
		upstream_read(x->upstream, 1);
}

static void on_client_closed(struct http_stream *s, void *context, int complete)
{
	struct exchange *x = context;
	x->stream = NULL;
	x->state = EXCHANGE_OVER;
	proxy_release(x);
}

const struct http_stream_handler exchange_stream_handler = {
    .body = on_client_body,
    .body_end = on_client_end,
    .drained = on_client_drained,
    .closed = on_client_closed,
};
