#include "api/call.h"

#include <errno.h>
#include <string.h>

#include "api/router.h"
#include "base/log.h"
#include "base/text.h"
#include "http/json.h"

#define CALL_HEADERS_MAX 6

static void account(struct api_call *call, size_t size)
{
	call->api->bodies_bytes += size - call->accounted;
	call->accounted = size;
}

void call_free(struct api_call *call)
{
	account(call, 0);
	call->api->calls_in_progress--;
	json_decref(call->query);
	json_decref(call->body);
	json_decref(call->answer);
	buf_free(&call->text);
	buf_free(&call->plain);
	free(call);
}

const char *call_query(const struct api_call *call, const char *name)
{
	return json_string_value(json_object_get(call->query, name));
}

/* What a client may read: causes of trouble inside the daemon name paths and addresses that are no tenant's business.
 */
static const char *public_message(const struct error *e, int is_admin, const char *request_id, char *to, size_t size)
{
	if (is_admin || (e->code != ERROR_INTERNAL && e->code != ERROR_DAMAGED && e->code != ERROR_UNAVAILABLE))
		return e->message;
	const char *what = e->code == ERROR_INTERNAL  ? "internal error"
	                   : e->code == ERROR_DAMAGED ? "stored data of this session is damaged"
	                                              : "the service is not available at the moment";
	(void)text_format(to, size, "%s (request %s)", what, request_id);
	return to;
}

void call_answer_error(struct api *api, struct http_stream *s, const char *request_id, int is_admin,
                       const struct error *e, const struct http_header *headers, size_t count)
{
	int status = error_code_http_status(e->code);
	char text[128];
	const char *message = public_message(e, is_admin, request_id, text, sizeof(text));
	if (status >= 500)
		log_warning("api", "%s %s: %s: %s", request_id, s->request.method, error_code_name(e->code), e->message);
	struct http_header all[CALL_HEADERS_MAX + 3];
	size_t n = 0;
	all[n++] = (struct http_header){"x-request-id", request_id};
	if (status == 401)
		all[n++] = (struct http_header){"www-authenticate", "Bearer realm=\"space\""};
	if (status == 429 || status == 503)
		all[n++] = (struct http_header){"retry-after", "1"};
	for (size_t i = 0; i < count && i < CALL_HEADERS_MAX; i++)
		all[n++] = headers[i];
	CLEANUP_BUF struct buf body = {0};
	if (http_error_body(&body, error_code_name(e->code), message) < 0) {
		http_stream_abort(s);
		return;
	}
	api->answers_by_class[MIN(status / 100, 5)]++;
	http_stream_answer(s, status, "application/json", body.data, body.size, all, n);
}

static void fail(struct api_call *call, const struct error *e)
{
	if (call->stream)
		call_answer_error(call->api, call->stream, call->request_id, call->caller.is_admin, e, NULL, 0);
}

static void answer(struct api_call *call)
{
	struct http_header id = {"x-request-id", call->request_id};
	int status = call->status ? call->status : 200;
	call->api->answers_by_class[MIN(status / 100, 5)]++;
	if (call->content_type) {
		http_stream_answer(call->stream, status, call->content_type, call->plain.data, call->plain.size, &id, 1);
		return;
	}
	if (!call->answer) {
		http_stream_answer(call->stream, status == 200 ? 204 : status, NULL, NULL, 0, &id, 1);
		return;
	}
	char *text = json_dumps(call->answer, JSON_COMPACT);
	if (!text) {
		struct error e;
		error_set_errno(&e, ENOMEM, "answer");
		fail(call, &e);
		return;
	}
	http_stream_answer(call->stream, status, "application/json", text, strlen(text), &id, 1);
	free(text);
}

/* -- worker -- */

static int run(struct api_call *call, struct error *e)
{
	const struct api_route *route = call->route;
	if (!(route->flags & ROUTE_OPEN)) {
		int r = auth_check(call->api->manager, &call->auth, &call->caller, e);
		if (r < 0)
			return r;
		if ((route->flags & ROUTE_ADMIN) && !call->caller.is_admin)
			return error_set(e, ERROR_FORBIDDEN, "only an operator may do this");
	}
	if (route->flags & ROUTE_BODY) {
		int r = json_read_object(call->text.data ? call->text.data : "", call->text.size, API_BODY_BYTES_MAX,
		                         &call->body, e);
		if (r < 0)
			return r;
	}
	return route->run ? route->run(call, e) : 0;
}

static void on_run(struct work *work)
{
	struct api_call *call = (struct api_call *)work;
	call->error = (struct error){0};
	call->result = run(call, &call->error);
	if (call->result < 0 && call->error.code == ERROR_NONE)
		error_set(&call->error, ERROR_INTERNAL, "%s %s failed without a reason", call->route->method,
		          call->route->path);
}

static void on_done(struct work *work)
{
	struct api_call *call = (struct api_call *)work;
	call->submitted = 0;
	if (!call->stream) {
		call_free(call);
		return;
	}
	if (call->result < 0)
		fail(call, &call->error);
	else if (call->route->finish)
		call->route->finish(call); /* may have taken the stream and freed the call */
	else
		answer(call);
}

static void submit(struct api_call *call)
{
	struct error e;
	call->submitted = 1;
	if (work_submit(&call->api->work, &call->work, call->route->class, on_run, on_done) == 0)
		return;
	call->submitted = 0;
	error_set(&e, ERROR_EXHAUSTED, "too many calls wait already");
	fail(call, &e);
}

/* -- loop -- */

static void on_body(struct http_stream *s, void *context, const char *data, size_t size)
{
	struct api_call *call = context;
	struct error e;
	if (s->answered)
		return;
	if (call->text.size + size > API_BODY_BYTES_MAX) {
		error_set(&e, ERROR_TOO_LARGE, "the body is larger than %d bytes", API_BODY_BYTES_MAX);
	} else if (call->api->bodies_bytes + size > API_BODIES_BYTES_MAX) {
		error_set(&e, ERROR_EXHAUSTED, "too many large bodies are being received");
	} else if (buf_append(&call->text, data, size) < 0) {
		error_set_errno(&e, ENOMEM, "body");
	} else {
		account(call, call->text.size);
		return;
	}
	http_stream_read(s, 0);
	fail(call, &e);
}

static void on_body_end(struct http_stream *s, void *context)
{
	struct api_call *call = context;
	if (!s->answered && !call->submitted)
		submit(call);
}

static void on_closed(struct http_stream *s, void *context, int complete)
{
	struct api_call *call = context;
	call->stream = NULL;
	if (!call->submitted)
		call_free(call);
}

static const struct http_stream_handler handler = {
    .body = on_body,
    .body_end = on_body_end,
    .closed = on_closed,
};

static const struct http_stream_handler no_handler = {0};

/* Refuses what the head alone shows to be wrong, before a byte of the body is taken. */
static int check_head(const struct api_call *call, struct error *e)
{
	const struct http_request *q = &call->stream->request;
	if (!(call->route->flags & ROUTE_OPEN) && !call->auth.has_key && !call->auth.is_local) {
		struct session_caller nobody;
		return auth_check(NULL, &call->auth, &nobody, e);
	}
	if (q->content_length > API_BODY_BYTES_MAX)
		return error_set(e, ERROR_TOO_LARGE, "the body of %lld bytes is larger than the limit of %d",
		                 (long long)q->content_length, API_BODY_BYTES_MAX);
	return 0;
}

void call_begin(struct api *api, struct http_stream *s, const struct api_route *route,
                const char parameters[CALL_PARAMETERS_MAX][CALL_PARAMETER_BYTES], json_t *query)
{
	struct error e;
	struct api_call *call = calloc(1, sizeof(*call));
	if (!call) {
		json_decref(query);
		http_stream_handle(s, &no_handler, NULL);
		http_stream_abort(s);
		return;
	}
	call->api = api;
	call->stream = s;
	call->route = route;
	call->query = query;
	memcpy(call->parameters, parameters, sizeof(call->parameters));
	id_make(call->request_id, 'q');
	auth_read(&call->auth, s);
	api->calls_in_progress++;
	http_stream_handle(s, &handler, call);
	if (check_head(call, &e) < 0) {
		fail(call, &e);
		return;
	}
	if (s->request.has_body) {
		s->body_deadline_ms = time_monotonic_ms() + API_BODY_TIMEOUT_MS;
		if (s->request.expects_continue)
			http_stream_interim(s, 100, NULL, 0);
		http_stream_read(s, 1);
	}
}
