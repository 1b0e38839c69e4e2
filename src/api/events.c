#include "api/events.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "api/call.h"
#include "api/proxy.h"

struct event {
	struct event *next; /* while on its way to the loop */
	uint64_t id;
	char type[48];
	char session_id[ID_BYTES];
	char tenant[64];
	char state[32];
	size_t size;
	char text[]; /* as it is sent */
};

struct follower {
	struct follower *next, *previous;
	struct events *events;
	struct http_stream *stream;
	struct session_caller caller;
	char session_id[PREVIEW_ID_BYTES]; /* "" = all */
	char type[48];                     /* "" = all; a prefix that ends with '.' matches all below */
};

struct events {
	struct api *api;
	uv_async_t wake;
	uv_mutex_t mutex;
	struct event *first_new, *last_new; /* under the mutex */
	struct event *ring[EVENTS_KEPT_MAX];
	size_t ring_first;
	size_t ring_count;
	size_t ring_bytes;
	uint64_t total;
	uint64_t dropped_id; /* newest event that the ring has lost; 0 = none */
	struct follower *followers;
	unsigned follower_count;
	uv_timer_t heartbeat;
	int stopped;
};

/* -- from any thread -- */

static struct event *new_event(const json_t *object)
{
	const char *type = json_string_value(json_object_get(object, "type"));
	const char *session = json_string_value(json_object_get(object, "session_id"));
	const char *tenant = json_string_value(json_object_get(object, "tenant"));
	const char *state = json_string_value(json_object_get(object, "state"));
	uint64_t id = (uint64_t)json_integer_value(json_object_get(object, "id"));
	char *json = json_dumps(object, JSON_COMPACT);
	CLEANUP_BUF struct buf text = {0};
	struct event *event = NULL;
	if (json && buf_printf(&text, "id: %" PRIu64 "\nevent: %s\ndata: %s\n\n", id, type ? type : "message", json) == 0)
		event = malloc(sizeof(*event) + text.size);
	free(json);
	if (!event)
		return NULL;
	*event = (struct event){.id = id, .size = text.size};
	memcpy(event->text, text.data, text.size);
	(void)text_copy(event->type, sizeof(event->type), type ? type : "");
	(void)text_copy(event->session_id, sizeof(event->session_id), session ? session : "");
	(void)text_copy(event->tenant, sizeof(event->tenant), tenant ? tenant : "");
	(void)text_copy(event->state, sizeof(event->state), state ? state : "");
	return event;
}

void events_sink(void *context, const json_t *object)
{
	struct events *events = context;
	struct event *event = events ? new_event(object) : NULL;
	if (!event)
		return; /* without memory: followers see the gap in the numbers */
	uv_mutex_lock(&events->mutex);
	if (events->last_new)
		events->last_new->next = event;
	else
		events->first_new = event;
	events->last_new = event;
	uv_mutex_unlock(&events->mutex);
	uv_async_send(&events->wake);
}

/* -- on the loop -- */

static int wants(const struct follower *f, const struct event *event)
{
	if (!f->caller.is_admin && strcmp(f->caller.tenant, event->tenant) != 0)
		return 0;
	if (f->session_id[0] && strcmp(f->session_id, event->session_id) != 0)
		return 0;
	size_t size = strlen(f->type);
	if (!size)
		return 1;
	return f->type[size - 1] == '.' ? !strncmp(f->type, event->type, size) : !strcmp(f->type, event->type);
}

static void send_text(struct follower *f, const char *text, size_t size)
{
	if (http_stream_queued(f->stream) > EVENTS_BEHIND_BYTES_MAX) {
		http_stream_abort(f->stream);
		return;
	}
	http_stream_write(f->stream, text, size);
}

static void keep(struct events *events, struct event *event)
{
	while (events->ring_count == EVENTS_KEPT_MAX ||
	       (events->ring_count && events->ring_bytes + event->size > EVENTS_KEPT_BYTES_MAX)) {
		struct event *oldest = events->ring[events->ring_first];
		events->dropped_id = oldest->id;
		events->ring_bytes -= oldest->size;
		free(oldest);
		events->ring_first = (events->ring_first + 1) % EVENTS_KEPT_MAX;
		events->ring_count--;
	}
	events->ring[(events->ring_first + events->ring_count) % EVENTS_KEPT_MAX] = event;
	events->ring_count++;
	events->ring_bytes += event->size;
}

/* A connection into a sandbox that has ended gives no sign of it: its namespace is gone, nothing answers any more. */
static void tell_proxy(struct events *events, const struct event *event)
{
	static const char *const ended[] = {"suspended", "waking", "deleting", "deleted"};
	static const char *const replaced[] = {"session.lost", "session.deleted", "session.rewound", "session.suspended"};
	if (!event->session_id[0])
		return;
	int cut = 0;
	for (size_t i = 0; i < ARRAY_SIZE(ended); i++)
		cut |= !strcmp(event->state, ended[i]);
	for (size_t i = 0; i < ARRAY_SIZE(replaced); i++)
		cut |= !strcmp(event->type, replaced[i]);
	/* A paused guest keeps its connections, but a request on a kept one would wait instead of waking it. */
	if (cut || strcmp(event->state, "running") != 0)
		proxy_session_changed(events->api->proxy, event->session_id, cut);
}

void events_drain(struct events *events)
{
	uv_mutex_lock(&events->mutex);
	struct event *event = events->first_new;
	events->first_new = events->last_new = NULL;
	uv_mutex_unlock(&events->mutex);
	while (event) {
		struct event *next = event->next;
		event->next = NULL;
		/* What came before was told to a former process of ours. */
		if (events->total++ == 0)
			events->dropped_id = event->id - 1;
		keep(events, event);
		tell_proxy(events, event);
		for (struct follower *f = events->followers; f; f = f->next) {
			if (wants(f, event))
				send_text(f, event->text, event->size);
		}
		event = next;
	}
}

static void on_wake(uv_async_t *wake)
{
	events_drain(wake->data);
}

static void on_heartbeat(uv_timer_t *timer)
{
	struct events *events = timer->data;
	static const char comment[] = ": still here\n\n";
	for (struct follower *f = events->followers; f; f = f->next)
		send_text(f, comment, sizeof(comment) - 1);
}

static void on_closed(struct http_stream *s, void *context, int complete)
{
	struct follower *f = context;
	struct events *events = f->events;
	if (f->next)
		f->next->previous = f->previous;
	if (f->previous)
		f->previous->next = f->next;
	else
		events->followers = f->next;
	if (--events->follower_count == 0)
		uv_timer_stop(&events->heartbeat);
	free(f);
}

static const struct http_stream_handler follower_handler = {.closed = on_closed};

/* What happened since `last_id`, as far as it is kept; a gap is told before the rest. */
static void replay(struct follower *f, uint64_t last_id)
{
	struct events *events = f->events;
	uint64_t newest = events->ring_count
	                      ? events->ring[(events->ring_first + events->ring_count - 1) % EVENTS_KEPT_MAX]->id
	                      : events->dropped_id;
	char text[160];
	if (last_id < events->dropped_id || last_id > newest) {
		int n = snprintf(text, sizeof(text),
		                 "event: gap\ndata: {\"type\":\"gap\",\"after\":%" PRIu64 ",\"kept_after\":%" PRIu64 "}\n\n",
		                 last_id, events->dropped_id);
		send_text(f, text, (size_t)n);
		if (last_id > newest)
			last_id = 0; /* numbers from before a restart of the daemon */
	}
	for (size_t i = 0; i < events->ring_count; i++) {
		const struct event *event = events->ring[(events->ring_first + i) % EVENTS_KEPT_MAX];
		if (event->id > last_id && wants(f, event))
			http_stream_write(f->stream, event->text, event->size);
	}
}

static int read_last_id(const struct api_call *call, uint64_t *ret, struct error *e)
{
	const char *text = http_request_header(&call->stream->request, "last-event-id");
	if (!text || !*text)
		text = call_query(call, "last_event_id");
	if (!text || !*text)
		return 0;
	if (text_parse_u64(text, INT64_MAX, ret) < 0)
		return error_set(e, ERROR_INVALID, "Last-Event-ID \"%.32s\" is not the number of an event", text);
	return 1;
}

static int check_follow(const struct api_call *call, const struct events *events, struct error *e)
{
	const char *session = call_query(call, "session"), *type = call_query(call, "type");
	if (events->follower_count >= EVENTS_FOLLOWERS_MAX || events->stopped)
		return error_set(e, ERROR_EXHAUSTED, "more than %d clients follow the events already", EVENTS_FOLLOWERS_MAX);
	if (session && strlen(session) >= PREVIEW_ID_BYTES)
		return error_set(e, ERROR_INVALID, "query parameter \"session\" is too long");
	if (type && strlen(type) >= sizeof(((struct follower *)NULL)->type))
		return error_set(e, ERROR_INVALID, "query parameter \"type\" is too long");
	return 0;
}

void events_follow(struct api_call *call)
{
	struct events *events = call->api->events;
	struct http_stream *s = call->stream;
	struct error e;
	uint64_t last_id = 0;
	int has_last = read_last_id(call, &last_id, &e);
	struct follower *f = has_last < 0 || check_follow(call, events, &e) < 0 ? NULL : calloc(1, sizeof(*f));
	if (!f) {
		call_answer_error(call->api, s, call->request_id, call->caller.is_admin, &e, NULL, 0);
		return;
	}
	f->events = events;
	f->stream = s;
	f->caller = call->caller;
	const char *session = call_query(call, "session"), *type = call_query(call, "type");
	(void)text_copy(f->session_id, sizeof(f->session_id), session ? session : "");
	(void)text_copy(f->type, sizeof(f->type), type ? type : "");
	f->next = events->followers;
	if (f->next)
		f->next->previous = f;
	events->followers = f;
	if (events->follower_count++ == 0)
		uv_timer_start(&events->heartbeat, on_heartbeat, EVENTS_HEARTBEAT_MS, EVENTS_HEARTBEAT_MS);
	http_stream_handle(s, &follower_handler, f);
	call->stream = NULL;
	struct http_header headers[] = {
	    {"content-type", "text/event-stream"}, {"cache-control", "no-store"}, {"x-request-id", call->request_id}};
	call->api->answers_by_class[2]++;
	if (http_stream_respond(s, 200, headers, ARRAY_SIZE(headers), -1) < 0) {
		http_stream_abort(s);
	} else {
		/* Something at once, so that clients know they are connected. */
		http_stream_write(s, "retry: 1000\n\n", 13);
		if (has_last)
			replay(f, last_id);
	}
	call_free(call);
}

unsigned events_followers(const struct events *events)
{
	return events->follower_count;
}

uint64_t events_total(const struct events *events)
{
	return events->total;
}

int events_new(struct api *api, struct events **ret, struct error *e)
{
	struct events *events = calloc(1, sizeof(*events));
	if (!events)
		return error_set_errno(e, ENOMEM, "events");
	events->api = api;
	uv_mutex_init(&events->mutex);
	uv_async_init(api->loop, &events->wake, on_wake);
	uv_unref((uv_handle_t *)&events->wake);
	events->wake.data = events;
	uv_timer_init(api->loop, &events->heartbeat);
	uv_unref((uv_handle_t *)&events->heartbeat);
	events->heartbeat.data = events;
	*ret = events;
	return 0;
}

void events_stop(struct events *events)
{
	events->stopped = 1;
	for (struct follower *f = events->followers; f; f = f->next)
		http_stream_end(f->stream);
}

void events_free(struct events *events)
{
	if (!events)
		return;
	uv_close((uv_handle_t *)&events->wake, NULL);
	uv_close((uv_handle_t *)&events->heartbeat, NULL);
	uv_run(events->api->loop, UV_RUN_DEFAULT);
	events_drain(events);
	for (size_t i = 0; i < events->ring_count; i++)
		free(events->ring[(events->ring_first + i) % EVENTS_KEPT_MAX]);
	uv_mutex_destroy(&events->mutex);
	free(events);
}
