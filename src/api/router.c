#include "api/router.h"

#include <ctype.h>
#include <errno.h>
#include <string.h>

#include "api/preview.h"
#include "api/proxy.h"
#include "api/uri.h"
#include "base/text.h"

static const struct api_route *const tables[] = {sessions_routes, templates_routes, keys_routes, system_routes};

#define ALLOW_BYTES 128

/* Compares path segments; {} takes any non-empty one. Still encoded: a "%2f" inside a segment is not a separator. */
static int match(const char *pattern, const char *path, char parameters[CALL_PARAMETERS_MAX][CALL_PARAMETER_BYTES])
{
	size_t found = 0;
	while (*pattern && *path) {
		if (pattern[0] == '{' && pattern[1] == '}') {
			size_t size = strcspn(path, "/");
			if (size == 0 || found == CALL_PARAMETERS_MAX ||
			    uri_decode(parameters[found], CALL_PARAMETER_BYTES, path, size) < 0)
				return 0;
			found++;
			path += size;
			pattern += 2;
		} else if (*pattern++ != *path++) {
			return 0;
		}
	}
	return !*pattern && !*path;
}

static void refuse(struct api *api, struct http_stream *s, const struct error *e, const struct http_header *headers,
                   size_t count)
{
	static const struct http_stream_handler none = {0};
	char request_id[ID_BYTES];
	id_make(request_id, 'q');
	http_stream_handle(s, &none, NULL);
	call_answer_error(api, s, request_id, 0, e, headers, count);
}

static void add_allowed(char allow[ALLOW_BYTES], const char *method)
{
	size_t used = strlen(allow);
	if (used + strlen(method) + 3 > ALLOW_BYTES)
		return;
	if (used) {
		memcpy(allow + used, ", ", 3);
		used += 2;
	}
	memcpy(allow + used, method, strlen(method) + 1);
}

static void refuse_method(struct api *api, struct http_stream *s, const char *allow)
{
	struct error e;
	error_set(&e, ERROR_INVALID, "method %.16s is not allowed here; allowed: %s", s->request.method, allow);
	struct http_header header = {"allow", allow};
	static const struct http_stream_handler none = {0};
	CLEANUP_BUF struct buf body = {0};
	http_stream_handle(s, &none, NULL);
	http_error_body(&body, "method_not_allowed", e.message);
	api->answers_by_class[4]++;
	http_stream_answer(s, 405, "application/json", body.data, body.size, &header, 1);
}

static void route(struct api *api, struct http_stream *s, const char *path, const char *query_text)
{
	char parameters[CALL_PARAMETERS_MAX][CALL_PARAMETER_BYTES];
	char allow[ALLOW_BYTES] = "";
	struct error e;
	for (size_t t = 0; t < ARRAY_SIZE(tables); t++) {
		for (const struct api_route *r = tables[t]; r->method; r++) {
			memset(parameters, 0, sizeof(parameters));
			if (!match(r->path, path, parameters))
				continue;
			int head = s->request.is_head && !strcmp(r->method, "GET");
			if (!head && strcmp(r->method, s->request.method) != 0) {
				add_allowed(allow, r->method);
				continue;
			}
			json_t *query = uri_query(query_text, &e);
			if (!query)
				refuse(api, s, &e, NULL, 0);
			else
				call_begin(api, s, r, parameters, query);
			return;
		}
	}
	if (*allow) {
		refuse_method(api, s, allow);
		return;
	}
	error_set(&e, ERROR_NOT_FOUND, "there is nothing at %.200s", path);
	refuse(api, s, &e, NULL, 0);
}

void router_request(void *context, struct http_stream *s)
{
	struct api *api = context;
	struct preview preview;
	struct error e;
	int r = preview_match(api->domain, &s->request, &preview, &e);
	if (r < 0) {
		refuse(api, s, &e, NULL, 0);
		return;
	}
	if (r > 0) {
		proxy_begin(api->proxy, s, &preview);
		return;
	}
	/* Origin form only: absolute form is for forward proxies, which this is not. */
	if (s->request.target[0] != '/') {
		error_set(&e, ERROR_INVALID, "the request target must begin with a slash");
		refuse(api, s, &e, NULL, 0);
		return;
	}
	size_t size = strcspn(s->request.target, "?");
	CLEANUP_FREE char *path = strndup(s->request.target, size);
	if (!path) {
		error_set_errno(&e, ENOMEM, "request");
		refuse(api, s, &e, NULL, 0);
		return;
	}
	route(api, s, path, s->request.target[size] ? s->request.target + size + 1 : "");
}
