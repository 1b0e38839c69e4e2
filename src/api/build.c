/*
 * A build runs on a worker of its own class and outlives a client that leaves (a second request for the same name finds
 * the finished template). Lines come from that worker through a bounded buffer under a mutex; the loop passes them on.
 *
 * The answer is newline-delimited JSON, or server-sent events if the client accepts text/event-stream:
 *   {"line":TEXT}…  then  {"template":{…}}  or  {"error":{"code","message","details"}}
 * A build that is refused before its first step is an ordinary error answer.
 */
#include "api/build.h"

#include <errno.h>
#include <string.h>

#include "http/json.h"

struct build {
	struct work work; /* first */
	struct api *api;
	struct http_stream *stream; /* NULL once closed */
	uv_async_t wake;
	uv_mutex_t mutex;
	struct buf pending; /* under the mutex */
	uint64_t dropped;
	int is_sse;
	int running;
	struct session_caller caller;
	char request_id[ID_BYTES];
	json_t *parameters;
	json_t *answer;
	int result;
	struct error error;
};

static int append_message(const struct build *b, struct buf *to, const char *event, json_t *message)
{
	char *text = message ? json_dumps(message, JSON_COMPACT) : NULL;
	json_decref(message);
	int r = !text       ? -ENOMEM
	        : b->is_sse ? buf_printf(to, "event: %s\ndata: %s\n\n", event, text)
	                    : buf_printf(to, "%s\n", text);
	free(text);
	return r;
}

/* -- worker -- */

static void on_progress(void *context, const char *line)
{
	struct build *b = context;
	json_t *text = json_string(line);
	if (!text)
		text = json_string("(a line that is not UTF-8)");
	CLEANUP_BUF struct buf message = {0};
	int r = append_message(b, &message, "progress", json_pack("{s:o}", "line", text));
	uv_mutex_lock(&b->mutex);
	if (r < 0 || b->pending.size + message.size > BUILD_PENDING_BYTES_MAX ||
	    buf_append(&b->pending, message.data, message.size) < 0)
		b->dropped++;
	uv_mutex_unlock(&b->mutex);
	uv_async_send(&b->wake);
}

static void on_run(struct work *work)
{
	struct build *b = (struct build *)work;
	b->result = template_build(b->api->manager, &b->caller, b->parameters, on_progress, b, &b->answer, &b->error);
}

/* -- loop -- */

static void on_async_closed(uv_handle_t *handle)
{
	struct build *b = handle->data;
	uv_mutex_destroy(&b->mutex);
	buf_free(&b->pending);
	json_decref(b->parameters);
	json_decref(b->answer);
	free(b);
}

static void release(struct build *b)
{
	if (!b->running && !b->stream && !uv_is_closing((uv_handle_t *)&b->wake))
		uv_close((uv_handle_t *)&b->wake, on_async_closed);
}

static int begin_answer(struct build *b)
{
	if (b->stream->answered)
		return 0;
	struct http_header headers[] = {{"content-type", b->is_sse ? "text/event-stream" : "application/x-ndjson"},
	                                {"cache-control", "no-store"},
	                                {"x-request-id", b->request_id}};
	b->api->answers_by_class[2]++;
	return http_stream_respond(b->stream, 200, headers, ARRAY_SIZE(headers), -1);
}

static void pass_on(struct build *b)
{
	if (!b->stream || b->stream->ended || http_stream_queued(b->stream) > HTTP_STREAM_HIGH_BYTES)
		return;
	uv_mutex_lock(&b->mutex);
	struct buf lines = b->pending;
	b->pending = (struct buf){0};
	uint64_t dropped = b->dropped;
	b->dropped = 0;
	uv_mutex_unlock(&b->mutex);
	char note[64];
	if (dropped && text_format(note, sizeof(note), "(%llu lines left out)", (unsigned long long)dropped) == 0)
		append_message(b, &lines, "progress", json_pack("{s:s}", "line", note));
	if (lines.size && begin_answer(b) == 0)
		http_stream_write(b->stream, lines.data, lines.size);
	buf_free(&lines);
}

static void on_wake(uv_async_t *wake)
{
	pass_on(wake->data);
}

static void on_done(struct work *work)
{
	struct build *b = (struct build *)work;
	b->running = 0;
	pass_on(b);
	if (!b->stream) {
		release(b);
		return;
	}
	if (b->result < 0 && !b->stream->answered) {
		call_answer_error(b->api, b->stream, b->request_id, b->caller.is_admin, &b->error, NULL, 0);
		return;
	}
	CLEANUP_BUF struct buf last = {0};
	json_t *outcome;
	if (b->result < 0)
		outcome = json_pack("{s:{s:s,s:s,s:{}}}", "error", "code", error_code_name(b->error.code), "message",
		                    b->error.message, "details");
	else
		outcome = json_pack("{s:O}", "template", b->answer);
	if (append_message(b, &last, b->result < 0 ? "error" : "done", outcome) < 0 || begin_answer(b) < 0) {
		http_stream_abort(b->stream);
		return;
	}
	http_stream_write(b->stream, last.data, last.size);
	http_stream_end(b->stream);
}

static void on_drained(struct http_stream *s, void *context)
{
	pass_on(context);
}

static void on_closed(struct http_stream *s, void *context, int complete)
{
	struct build *b = context;
	b->stream = NULL;
	release(b);
}

static const struct http_stream_handler handler = {.drained = on_drained, .closed = on_closed};

void build_begin(struct api_call *call)
{
	struct http_stream *s = call->stream;
	struct error e;
	struct build *b = calloc(1, sizeof(*b));
	if (!b) {
		error_set_errno(&e, ENOMEM, "template build");
		call_answer_error(call->api, s, call->request_id, 0, &e, NULL, 0);
		return;
	}
	b->api = call->api;
	b->stream = s;
	b->caller = call->caller;
	memcpy(b->request_id, call->request_id, sizeof(b->request_id));
	b->parameters = json_incref(call->body);
	const char *accept = http_request_header(&s->request, "accept");
	b->is_sse = accept && strstr(accept, "text/event-stream");
	uv_mutex_init(&b->mutex);
	uv_async_init(b->api->loop, &b->wake, on_wake);
	b->wake.data = b;
	http_stream_handle(s, &handler, b);
	call->stream = NULL;
	call_free(call);
	b->running = 1;
	if (work_submit(&b->api->work, &b->work, WORK_BUILD, on_run, on_done) < 0) {
		b->running = 0;
		error_set(&e, ERROR_EXHAUSTED, "too many template builds wait already");
		call_answer_error(b->api, s, b->request_id, 0, &e, NULL, 0);
	}
}
