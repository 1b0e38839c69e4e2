#include "api/api.h"

#include <errno.h>

#include "api/events.h"
#include "api/proxy.h"
#include "api/router.h"
#include "base/text.h"

int api_new(uv_loop_t *loop, struct session_manager *manager, const char *domain, struct api **ret, struct error *e)
{
	static const struct http_server_limits limits = HTTP_SERVER_LIMITS_DEFAULT;
	struct api *api = calloc(1, sizeof(*api));
	if (!api)
		return error_set_errno(e, ENOMEM, "API");
	api->loop = loop;
	api->manager = manager;
	api->started_ms = time_monotonic_ms();
	work_queue_init(&api->work, loop);
	int r = text_copy(api->domain, sizeof(api->domain), domain);
	if (r < 0)
		r = error_set(e, ERROR_INVALID, "domain \"%.64s\" is too long", domain);
	if (r == 0)
		r = http_server_new(loop, &limits, router_request, api, &api->server, e);
	if (r == 0)
		r = events_new(api, &api->events, e);
	if (r == 0)
		r = proxy_new(api, &api->proxy, e);
	if (r < 0) {
		api_free(api);
		return r;
	}
	session_set_event_sink(manager, events_sink, api->events);
	*ret = api;
	return 0;
}

void api_stop(struct api *api)
{
	events_stop(api->events);
	proxy_stop(api->proxy);
	http_server_stop(api->server);
}

void api_abort(struct api *api)
{
	http_server_abort(api->server);
}

void api_free(struct api *api)
{
	if (!api)
		return;
	http_server_free(api->server);
	proxy_free(api->proxy);
	events_free(api->events);
	free(api);
}
