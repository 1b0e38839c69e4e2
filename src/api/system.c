/* Routes about the daemon itself: health, version, doctor, metrics, events, its own description. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "api/events.h"
#include "api/openapi.h"
#include "api/proxy.h"
#include "api/router.h"
#include "base/fd.h"
#include "base/text.h"

/* Answered by the loop and one worker: says that both live. */
static int health(struct api_call *call, struct error *e)
{
	call->answer = json_pack("{s:s}", "status", "ok");
	return call->answer ? 0 : error_set_errno(e, ENOMEM, "health");
}

static int version(struct api_call *call, struct error *e)
{
	call->answer = json_pack("{s:s,s:s,s:s,s:s}", "version", SPACE_VERSION, "api", "v1", "listen", call->api->listen,
	                         "domain", call->api->domain);
	return call->answer ? 0 : error_set_errno(e, ENOMEM, "version");
}

static int openapi(struct api_call *call, struct error *e)
{
	call->content_type = "application/yaml";
	int r = buf_append(&call->plain, openapi_text, openapi_text_size);
	return r < 0 ? error_set_errno(e, r, "openapi") : 0;
}

static int doctor(struct api_call *call, struct error *e)
{
	return session_doctor(call->api->manager, &call->answer, e);
}

static uint64_t resident_bytes(void)
{
	CLEANUP_FREE char *text = NULL;
	size_t size;
	unsigned long long total, resident;
	if (fd_read_file(-100 /* AT_FDCWD */, "/proc/self/statm", 4096, &text, &size) < 0 ||
	    sscanf(text, "%llu %llu", &total, &resident) != 2)
		return 0;
	return resident * (uint64_t)sysconf(_SC_PAGESIZE);
}

static int metric(struct buf *to, const char *name, const char *type, const char *help, uint64_t value)
{
	return buf_printf(to, "# HELP %s %s\n# TYPE %s %s\n%s %" PRIu64 "\n", name, help, name, type, name, value);
}

/* Counters of the loop are read from a worker: a torn or late value is of no harm in a metric. */
static int http_metrics(const struct api *api, struct buf *to)
{
	const struct http_server_stats *h = http_server_stats(api->server);
	int r = metric(to, "space_http_connections", "gauge", "Open client connections.", h->connections);
	r |= metric(to, "space_http_connections_total", "counter", "Client connections accepted.", h->accepted);
	r |= metric(to, "space_http_connections_refused_total", "counter", "Connections refused at the limit.", h->refused);
	r |= metric(to, "space_http_requests_total", "counter", "Requests received.", h->requests);
	r |= metric(to, "space_http_malformed_total", "counter", "Requests refused as malformed.", h->malformed);
	r |= metric(to, "space_http_timeouts_total", "counter", "Connections ended for keeping us waiting.", h->timed_out);
	r |= metric(to, "space_http_sent_bytes_total", "counter", "Bytes sent on ended connections.", h->bytes_out);
	r |= buf_printf(to, "# HELP space_http_answers_total Answers by class of status.\n"
	                    "# TYPE space_http_answers_total counter\n");
	for (size_t i = 1; i < ARRAY_SIZE(api->answers_by_class); i++)
		r |= buf_printf(to, "space_http_answers_total{class=\"%zuxx\"} %" PRIu64 "\n", i, api->answers_by_class[i]);
	r |= metric(to, "space_api_calls", "gauge", "API calls in progress.", api->calls_in_progress);
	r |= metric(to, "space_api_body_bytes", "gauge", "Request bodies in memory.", api->bodies_bytes);
	r |= metric(to, "space_events_total", "counter", "Events published.", events_total(api->events));
	r |=
	    metric(to, "space_events_followers", "gauge", "Clients that follow the events.", events_followers(api->events));
	return r;
}

static int proxy_metrics(const struct api *api, struct buf *to)
{
	const struct proxy_stats *p = proxy_stats(api->proxy);
	int r = metric(to, "space_proxy_requests", "gauge", "Requests to guests in progress.", p->in_progress);
	r |= metric(to, "space_proxy_requests_total", "counter", "Requests passed to guests.", p->exchanges);
	r |= metric(to, "space_proxy_upgrades_total", "counter", "Protocol changes, WebSocket and others.", p->upgrades);
	r |= metric(to, "space_proxy_failures_total", "counter", "Answered 502, or streams cut.", p->failures);
	r |= metric(to, "space_proxy_reused_total", "counter", "Kept guest connections used again.", p->reused);
	r |= metric(to, "space_proxy_idle", "gauge", "Kept guest connections.", p->idle);
	r |= metric(to, "space_proxy_to_guest_bytes_total", "counter", "Body bytes passed to guests.", p->bytes_to_guests);
	r |= metric(to, "space_proxy_from_guest_bytes_total", "counter", "Body bytes from guests.", p->bytes_from_guests);
	return r;
}

static int metrics(struct api_call *call, struct error *e)
{
	struct api *api = call->api;
	struct buf *to = &call->plain;
	call->content_type = "text/plain; version=0.0.4; charset=utf-8";
	int r = metric(to, "space_uptime_seconds", "gauge", "Time since the daemon started.",
	               (time_monotonic_ms() - api->started_ms) / 1000);
	r |= metric(to, "space_resident_bytes", "gauge", "Resident memory of the daemon.", resident_bytes());
	r |= http_metrics(api, to);
	r |= proxy_metrics(api, to);
	if (r < 0)
		return error_set_errno(e, ENOMEM, "metrics");
	r = session_metrics(api->manager, to);
	return r < 0 ? error_set_errno(e, r, "metrics of sessions") : 0;
}

const struct api_route system_routes[] = {
    {"GET", "/healthz", ROUTE_OPEN, WORK_QUICK, health, NULL},
    {"GET", "/metrics", ROUTE_ADMIN, WORK_QUICK, metrics, NULL},
    {"GET", "/v1/version", 0, WORK_QUICK, version, NULL},
    {"GET", "/v1/openapi", ROUTE_OPEN, WORK_QUICK, openapi, NULL},
    {"GET", "/v1/doctor", ROUTE_ADMIN, WORK_VERB, doctor, NULL},
    {"GET", "/v1/events", 0, WORK_QUICK, NULL, events_follow},
    {0},
};
