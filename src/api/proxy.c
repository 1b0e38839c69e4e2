#include "api/proxy.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "api/call.h"
#include "api/events.h"
#include "api/exchange.h"

#define PROXY_SWEEP_MS 200

static void on_sweep(uv_timer_t *timer);

static void start_sweep(struct proxy *proxy)
{
	if (!uv_is_active((uv_handle_t *)&proxy->sweep))
		uv_timer_start(&proxy->sweep, on_sweep, PROXY_SWEEP_MS, PROXY_SWEEP_MS);
	uv_unref((uv_handle_t *)&proxy->sweep);
}

int proxy_new(struct api *api, struct proxy **ret, struct error *e)
{
	struct proxy *proxy = calloc(1, sizeof(*proxy));
	if (!proxy)
		return error_set_errno(e, ENOMEM, "proxy");
	proxy->api = api;
	uv_timer_init(api->loop, &proxy->sweep);
	proxy->sweep.data = proxy;
	*ret = proxy;
	return 0;
}

const struct proxy_stats *proxy_stats(const struct proxy *proxy)
{
	return &proxy->stats;
}

/* -- kept connections -- */

static void unlink_idle(struct idle_upstream *entry)
{
	struct proxy *proxy = entry->proxy;
	for (struct idle_upstream **at = &proxy->idle; *at; at = &(*at)->next) {
		if (*at == entry) {
			*at = entry->next;
			proxy->stats.idle--;
			break;
		}
	}
	free(entry);
}

static void on_idle_failed(void *context, const struct error *e)
{
	unlink_idle(context);
}

static const struct upstream_handler idle_handler = {.failed = on_idle_failed};

static void drop_idle(struct idle_upstream *entry)
{
	upstream_close(entry->upstream);
	unlink_idle(entry);
}

void proxy_keep(struct proxy *proxy, struct upstream *u, uint64_t generation)
{
	unsigned same = 0;
	for (struct idle_upstream *i = proxy->idle; i; i = i->next)
		same += !strcmp(upstream_session(i->upstream), upstream_session(u));
	struct idle_upstream *entry = NULL;
	if (same < PROXY_IDLE_SESSION_MAX && proxy->stats.idle < PROXY_IDLE_MAX && upstream_is_reusable(u))
		entry = calloc(1, sizeof(*entry));
	if (!entry) {
		upstream_close(u);
		return;
	}
	*entry = (struct idle_upstream){.proxy = proxy, .upstream = u, .generation = generation, .next = proxy->idle};
	entry->since_ms = time_monotonic_ms();
	proxy->idle = entry;
	proxy->stats.idle++;
	upstream_attach(u, &idle_handler, entry);
	upstream_read(u, 1); /* to notice when it ends */
	start_sweep(proxy);
}

static struct upstream *take_idle(struct proxy *proxy, const char *session_id, uint64_t generation)
{
	struct idle_upstream *next;
	for (struct idle_upstream *i = proxy->idle; i; i = next) {
		next = i->next;
		if (strcmp(upstream_session(i->upstream), session_id) != 0)
			continue;
		if (i->generation != generation || !upstream_is_reusable(i->upstream)) {
			drop_idle(i);
			continue;
		}
		struct upstream *u = i->upstream;
		unlink_idle(i);
		proxy->stats.reused++;
		return u;
	}
	return NULL;
}

static void on_sweep(uv_timer_t *timer)
{
	struct proxy *proxy = timer->data;
	uint64_t now = time_monotonic_ms();
	struct idle_upstream *next;
	for (struct idle_upstream *i = proxy->idle; i; i = next) {
		next = i->next;
		if (now - i->since_ms >= PROXY_IDLE_MS || !upstream_is_reusable(i->upstream))
			drop_idle(i);
	}
	struct exchange *following;
	for (struct exchange *x = proxy->exchanges; x; x = following) {
		following = x->next;
		exchange_sweep(x, now);
	}
	if (!proxy->idle && !proxy->exchanges)
		uv_timer_stop(timer);
}

void proxy_session_changed(struct proxy *proxy, const char *session_id, int cut)
{
	struct idle_upstream *next;
	for (struct idle_upstream *i = proxy->idle; i; i = next) {
		next = i->next;
		if (!strcmp(upstream_session(i->upstream), session_id))
			drop_idle(i);
	}
	struct exchange *following;
	for (struct exchange *x = proxy->exchanges; cut && x; x = following) {
		following = x->next;
		if (x->upstream && !strcmp(x->session_id, session_id))
			exchange_cut(x);
	}
}

/* -- finding the guest -- */

static int check_preview_access(struct exchange *x, const json_t *session, struct error *e)
{
	const char *token = json_string_value(json_object_get(session, "access_token"));
	if (x->has_token && token && *token && text_equal_secret(token, x->token))
		return 0;
	if (json_is_false(json_object_get(session, "private_ports")))
		return 0;
	return error_set(
	    e, ERROR_UNAUTHENTICATED,
	    "the ports of this session are private: present its access token in X-Access-Token, cookie or query "
	    "%s, or an API key in X-API-Key",
	    PREVIEW_TOKEN_NAME);
}

/* The agent checks its token and its signed links itself. But a guest that does not run is not started for somebody who
 * has neither to show. */
static int check_agent_access(struct exchange *x, const json_t *session, struct error *e)
{
	const char *token = json_string_value(json_object_get(session, "access_token"));
	if (x->is_running || x->has_signature || (x->has_token && token && *token && text_equal_secret(token, x->token)))
		return 0;
	return error_set(
	    e, ERROR_UNAUTHENTICATED,
	    "the session does not run, and only a client with its access token in X-Access-Token, a signed link "
	    "or an API key in X-API-Key can wake it");
}

/* Looks the session up without waking it. */
static int lookup(struct exchange *x, struct error *e)
{
	struct session_manager *manager = x->proxy->api->manager;
	int known = x->preview.kind == PREVIEW_AGENT || x->auth.has_key || x->auth.is_local;
	if (known) {
		int r = auth_check(manager, &x->auth, &x->caller, e);
		if (r < 0)
			return r;
		x->may_see_inside = x->caller.is_admin;
	} else {
		/* Ports without a credential: the id is looked up on behalf of the operator, then the session's own rule holds.
		 */
		x->caller.is_admin = 1;
	}
	json_t *session = NULL;
	int r = session_get(manager, &x->caller, x->preview.id, &session, e);
	if (r < 0)
		return r;
	const char *id = json_string_value(json_object_get(session, "id"));
	const char *state = json_string_value(json_object_get(session, "state"));
	x->generation = (uint64_t)json_integer_value(json_object_get(session, "starts"));
	x->is_running = state && !strcmp(state, "running");
	const char *token = json_string_value(json_object_get(session, "access_token"));
	r = id ? text_copy(x->session_id, sizeof(x->session_id), id) : -EINVAL;
	if (r == 0)
		r = text_copy(x->access_token, sizeof(x->access_token), token ? token : "");
	if (r < 0)
		error_set(e, ERROR_INTERNAL, "session %.64s has no proper id or token", x->preview.id);
	else if (!known && x->preview.kind == PREVIEW_PORT)
		r = check_preview_access(x, session, e);
	else if (!known && x->preview.kind == PREVIEW_AGENT_PORT)
		r = check_agent_access(x, session, e);
	json_decref(session);
	return r;
}

static void lookup_run(struct work *work)
{
	struct exchange *x = (struct exchange *)work;
	x->result = lookup(x, &x->error);
}

static void open_run(struct work *work)
{
	struct exchange *x = (struct exchange *)work;
	x->result = session_open(x->proxy->api->manager, &x->caller, x->session_id, 1, &x->endpoint, &x->error);
}

static int take_endpoint(struct exchange *x)
{
	struct session_endpoint *endpoint = &x->endpoint;
	(void)text_copy(x->session_id, sizeof(x->session_id), endpoint->session_id);
	(void)text_copy(x->access_token, sizeof(x->access_token), endpoint->access_token);
	return upstream_new(x->proxy->api, TAKE_FD(endpoint->fd), endpoint->session_id, &x->upstream, &x->error);
}

static void open_done(struct work *work)
{
	struct exchange *x = (struct exchange *)work;
	x->working = 0;
	/* Events from before the sandbox that was opened must not cut this exchange. */
	events_drain(x->proxy->api->events);
	if (x->result == 0)
		x->result = take_endpoint(x);
	if (!x->stream) {
		proxy_release(x);
	} else if (x->result < 0) {
		exchange_fail(x, &x->error);
	} else {
		exchange_start(x);
	}
}

static void lookup_done(struct work *work)
{
	struct exchange *x = (struct exchange *)work;
	struct error e;
	x->working = 0;
	if (!x->stream) {
		proxy_release(x);
		return;
	}
	if (x->result < 0) {
		exchange_fail(x, &x->error);
		return;
	}
	events_drain(x->proxy->api->events);
	if (x->is_running)
		x->upstream = take_idle(x->proxy, x->session_id, x->generation);
	if (x->upstream) {
		exchange_start(x);
		return;
	}
	x->state = EXCHANGE_OPEN;
	x->working = 1;
	if (work_submit(&x->proxy->api->work, &x->work, WORK_OPEN, open_run, open_done) < 0) {
		x->working = 0;
		error_set(&e, ERROR_EXHAUSTED, "too many requests wait for sessions already");
		exchange_fail(x, &e);
	}
}

static const struct http_stream_handler no_handler = {0};

static void refuse(struct proxy *proxy, struct http_stream *s, enum error_code code, const char *message)
{
	struct error e;
	char id[ID_BYTES];
	error_set(&e, code, "%s", message);
	id_make(id, 'q');
	http_stream_handle(s, &no_handler, NULL);
	call_answer_error(proxy->api, s, id, 0, &e, NULL, 0);
}

static void read_credentials(struct exchange *x, const struct http_stream *s)
{
	if (x->preview.kind == PREVIEW_AGENT) {
		auth_read(&x->auth, s);
		return;
	}
	auth_read_key_header(&x->auth, s);
	/* An app behind a port may have keys of its own in that header. */
	if (x->auth.has_key && !auth_looks_like_key(x->auth.key))
		x->auth.has_key = 0;
	x->has_token = preview_token(&s->request, x->preview.target, x->token, &x->token_from_query);
	x->has_signature = !strncmp(x->preview.target, "/files?", 7) && strstr(x->preview.target, "signature=") != NULL;
}

void proxy_begin(struct proxy *proxy, struct http_stream *s, const struct preview *preview)
{
	if (preview->target[0] && preview->target[0] != '/' && !(preview->prefix[0] && preview->target[0] == '?')) {
		refuse(proxy, s, ERROR_INVALID, "the request target must begin with a slash");
		return;
	}
	if (!strcmp(s->request.method, "CONNECT")) {
		refuse(proxy, s, ERROR_INVALID, "CONNECT is not served here");
		return;
	}
	struct exchange *x = proxy->stats.in_progress < PROXY_EXCHANGES_MAX ? calloc(1, sizeof(*x)) : NULL;
	if (!x) {
		refuse(proxy, s, ERROR_EXHAUSTED, "too many requests to guests are in progress");
		return;
	}
	x->proxy = proxy;
	x->stream = s;
	x->preview = *preview;
	x->is_upgrade = s->request.is_upgrade && !s->request.has_body;
	x->endpoint.fd = -1;
	id_make(x->request_id, 'q');
	x->next = proxy->exchanges;
	if (x->next)
		x->next->previous = x;
	proxy->exchanges = x;
	proxy->stats.exchanges++;
	proxy->stats.in_progress++;
	http_stream_handle(s, &exchange_stream_handler, x);
	read_credentials(x, s);
	start_sweep(proxy);
	struct error e;
	if (preview->kind == PREVIEW_AGENT && !x->auth.has_key && !x->auth.is_local) {
		auth_check(NULL, &x->auth, &x->caller, &e);
		exchange_fail(x, &e);
		return;
	}
	x->working = 1;
	if (work_submit(&proxy->api->work, &x->work, WORK_QUICK, lookup_run, lookup_done) < 0) {
		x->working = 0;
		error_set(&e, ERROR_EXHAUSTED, "too many requests wait already");
		exchange_fail(x, &e);
	}
}

void proxy_release(struct exchange *x)
{
	if (x->working || x->stream)
		return;
	struct proxy *proxy = x->proxy;
	upstream_close(TAKE_PTR(x->upstream));
	if (x->next)
		x->next->previous = x->previous;
	if (x->previous)
		x->previous->next = x->next;
	else
		proxy->exchanges = x->next;
	proxy->stats.in_progress--;
	free(x);
}

void proxy_stop(struct proxy *proxy)
{
	while (proxy->idle)
		drop_idle(proxy->idle);
}

void proxy_free(struct proxy *proxy)
{
	if (!proxy)
		return;
	proxy_stop(proxy);
	uv_close((uv_handle_t *)&proxy->sweep, NULL);
	uv_run(proxy->api->loop, UV_RUN_DEFAULT);
	free(proxy);
}
