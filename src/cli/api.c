#include "cli/api.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#include "base/text.h"

#define HEADERS_MAX 8
#define URL_BYTES 512
/* A kept connection that was idle for longer may have been closed by the server at this very moment. */
#define REUSE_IDLE_MS 2000

struct api {
	char url[URL_BYTES];
	char host[URL_BYTES];
	char *key;
	unsigned timeout_ms;
	uint64_t used_at_ms;
	pthread_mutex_t lock; /* for api_cut() */
	struct http_client *client;
	int cut;
};

/* What went wrong with the connection itself, for hints; the error object has no room for it. */
static __thread int connection_errno;
static __thread int answered_by_guest;

static int set_url(struct api *api, const char *url, struct error *e)
{
	if (text_copy(api->url, sizeof(api->url), url) < 0)
		return error_set(e, ERROR_INVALID, "the address is longer than %d bytes", URL_BYTES - 1);
	size_t size = strlen(api->url);
	while (size && api->url[size - 1] == '/')
		api->url[--size] = '\0';
	if (text_starts_with(url, "unix:/"))
		return text_copy(api->host, sizeof(api->host), "localhost");
	if (text_starts_with(url, "http://") && api->url[7] && !strchr(api->url + 7, '/'))
		return text_copy(api->host, sizeof(api->host), api->url + 7);
	return error_set(e, ERROR_INVALID, "\"%s\" is not http://HOST:PORT or unix:/PATH", url);
}

static struct api *allocate(void)
{
	struct api *api = calloc(1, sizeof(*api));
	if (!api)
		return NULL;
	pthread_mutex_init(&api->lock, NULL);
	api->timeout_ms = API_CALL_TIMEOUT_MS;
	return api;
}

int api_new(const char *socket_path, const char *url, const char *key, struct api **ret, struct error *e)
{
	char from_socket[URL_BYTES];
	if (!socket_path && !url) {
		socket_path = getenv("SPACE_SOCKET");
		if (!socket_path || !*socket_path) {
			socket_path = NULL;
			url = getenv("SPACE_URL");
		}
		if (!socket_path && (!url || !*url)) {
			url = NULL;
			socket_path = API_SOCKET_DEFAULT;
		}
	}
	if (!key)
		key = getenv("SPACE_API_KEY");
	if (socket_path) {
		if (text_format(from_socket, sizeof(from_socket), "unix:%s", socket_path) < 0)
			return error_set(e, ERROR_INVALID, "the socket's path is too long");
		if (socket_path[0] != '/')
			return error_set(e, ERROR_INVALID, "the socket's path \"%s\" must start with /", socket_path);
		url = from_socket;
	}
	struct api *api = allocate();
	if (!api)
		return error_set_errno(e, ENOMEM, "preparing the connection");
	int r = set_url(api, url, e);
	if (r == 0 && key && *key && !(api->key = strdup(key)))
		r = error_set_errno(e, ENOMEM, "preparing the connection");
	if (r < 0) {
		api_free(api);
		return r;
	}
	*ret = api;
	return 0;
}

struct api *api_clone(const struct api *api)
{
	struct api *copy = allocate();
	if (!copy)
		return NULL;
	copy->timeout_ms = api->timeout_ms;
	memcpy(copy->url, api->url, sizeof(copy->url));
	memcpy(copy->host, api->host, sizeof(copy->host));
	if (api->key && !(copy->key = strdup(api->key))) {
		api_free(copy);
		return NULL;
	}
	return copy;
}

void api_free(struct api *api)
{
	if (!api)
		return;
	http_client_free(api->client);
	pthread_mutex_destroy(&api->lock);
	free(api->key);
	free(api);
}

void api_set_timeout(struct api *api, unsigned timeout_ms)
{
	api->timeout_ms = timeout_ms;
}

void api_cut(struct api *api)
{
	pthread_mutex_lock(&api->lock);
	api->cut = 1;
	if (api->client)
		shutdown(http_client_fd(api->client), SHUT_RDWR);
	pthread_mutex_unlock(&api->lock);
}

static void drop_client(struct api *api)
{
	pthread_mutex_lock(&api->lock);
	struct http_client *client = TAKE_PTR(api->client);
	pthread_mutex_unlock(&api->lock);
	http_client_free(client);
}

const char *api_url(const struct api *api)
{
	return api->url;
}

int api_is_local(const struct api *api)
{
	return text_starts_with(api->url, "unix:");
}

static int connection_failed(struct error *e)
{
	connection_errno = connection_errno ? connection_errno : ECONNRESET;
	return error_code_errno(e->code);
}

int api_is_refused(const struct error *e)
{
	return e->code != ERROR_NONE && connection_errno == ECONNREFUSED;
}

int api_is_from_guest(void)
{
	return answered_by_guest;
}

int api_is_connection_error(const struct error *e)
{
	return e->code != ERROR_NONE && connection_errno != 0;
}

static int connect_server(const struct api *api, struct http_client **ret, struct error *e)
{
	*ret = NULL;
	connection_errno = answered_by_guest = 0;
	int r = text_starts_with(api->url, "unix:") ? http_client_connect_unix(api->url + 5, api->host, ret, e)
	                                            : http_client_connect_url(api->url, API_CONNECT_TIMEOUT_MS, ret, e);
	if (r < 0) {
		connection_errno = r == -EACCES || r == -EPERM ? EACCES : ECONNREFUSED;
		return r;
	}
	int on = 1;
	setsockopt(http_client_fd(*ret), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
	return 0;
}

static size_t fill_headers(const struct api *api, const struct api_stream_call *call, struct http_header *headers)
{
	size_t n = 0;
	if (api->key)
		headers[n++] = (struct http_header){"X-API-Key", api->key};
	if (call->content_type)
		headers[n++] = (struct http_header){"Content-Type", call->content_type};
	if (call->content_type && strstr(call->content_type, "connect"))
		headers[n++] = (struct http_header){"Connect-Protocol-Version", "1"};
	headers[n++] = (struct http_header){"Accept", call->accept ? call->accept : "application/json"};
	if (call->user)
		headers[n++] = (struct http_header){"X-Space-User", call->user};
	if (call->last_event_id)
		headers[n++] = (struct http_header){"Last-Event-ID", call->last_event_id};
	headers[n++] = (struct http_header){"User-Agent", "space/" SPACE_VERSION};
	return n;
}

static enum error_code code_from_status(int status)
{
	for (enum error_code code = ERROR_INVALID; code < ERROR_CODE_COUNT; code++)
		if (error_code_http_status(code) == status && code != ERROR_DAMAGED)
			return code;
	return status >= 500 ? ERROR_UNAVAILABLE : ERROR_INVALID;
}

static enum error_code code_from_name(const char *name, int status)
{
	for (enum error_code code = ERROR_INVALID; code < ERROR_CODE_COUNT; code++)
		if (strcmp(error_code_name(code), name) == 0 || strcmp(error_code_connect(code), name) == 0)
			return code;
	return code_from_status(status);
}

/* {"code","message","details"} of ours, {"code": number, "message"} of the agent's plain HTTP calls, or no JSON. */
static int error_from_answer(int status, const char *body, size_t size, struct error *e)
{
	json_t *json = json_loadb(body, size, 0, NULL);
	const json_t *code = json_object_get(json, "code");
	const char *message = json_string_value(json_object_get(json, "message"));
	enum error_code number =
	    json_is_string(code) ? code_from_name(json_string_value(code), status) : code_from_status(status);
	/* spaced's own errors always have details, if only an empty object; neither of the agent's forms has. */
	answered_by_guest = message && !json_object_get(json, "details");
	if (message && *message)
		error_set(e, number, "%s", message);
	else
		error_set(e, number, "the server answered with status %d and no explanation", status);
	json_decref(json);
	return error_code_errno(number);
}

static int usable(struct api *api)
{
	if (!api->client)
		return 0;
	struct pollfd p = {.fd = http_client_fd(api->client), .events = POLLIN};
	/* Anything to read between two answers means that the peer has closed. */
	if (http_client_reusable(api->client) && time_monotonic_ms() - api->used_at_ms < REUSE_IDLE_MS &&
	    poll(&p, 1, 0) == 0)
		return 1;
	drop_client(api);
	return 0;
}

static int ensure_client(struct api *api, struct error *e)
{
	if (usable(api))
		return 0;
	struct http_client *client;
	int r = connect_server(api, &client, e);
	if (r < 0)
		return r;
	pthread_mutex_lock(&api->lock);
	api->client = client;
	if (api->cut)
		shutdown(http_client_fd(client), SHUT_RDWR);
	pthread_mutex_unlock(&api->lock);
	return 0;
}

int api_call_text(struct api *api, const struct api_stream_call *call, json_t **ret, struct error *e)
{
	struct http_header headers[HEADERS_MAX];
	struct http_answer answer = {0};
	struct http_call http = {
	    .method = call->method,
	    .target = call->target,
	    .headers = headers,
	    .header_count = fill_headers(api, call, headers),
	    .body = call->body,
	    .body_size = call->body_size,
	    .timeout_ms = api->timeout_ms,
	    .answer_limit = 64 * MIB,
	};
	if (ret)
		*ret = NULL;
	int r = ensure_client(api, e);
	if (r < 0)
		return r;
	connection_errno = answered_by_guest = 0;
	if (http_client_call(api->client, &http, &answer, e) < 0) {
		drop_client(api);
		http_answer_free(&answer);
		return connection_failed(e);
	}
	api->used_at_ms = time_monotonic_ms();
	if (answer.status >= 400) {
		r = error_from_answer(answer.status, answer.body.data, answer.body.size, e);
	} else if (answer.body.size) {
		json_error_t json_error;
		json_t *json = json_loadb(answer.body.data, answer.body.size, 0, &json_error);
		if (!json)
			r = error_set(e, ERROR_INTERNAL, "the server's answer is not JSON: %s", json_error.text);
		else if (ret)
			*ret = json;
		else
			json_decref(json);
	}
	http_answer_free(&answer);
	return r;
}

static int call_json(struct api *api, struct api_stream_call *call, const json_t *body, json_t **ret, struct error *e)
{
	CLEANUP_FREE char *text = NULL;
	if (ret)
		*ret = NULL;
	if (body) {
		text = json_dumps(body, JSON_COMPACT);
		if (!text)
			return error_set(e, ERROR_INVALID, "the request holds text that is not UTF-8");
		call->body = text;
		call->body_size = strlen(text);
		call->content_type = "application/json";
	}
	int r = api_call_text(api, call, ret, e);
	/* Reading again is harmless, so an unlucky restart of the server need not be the user's business. */
	if (r < 0 && api_is_connection_error(e) && connection_errno == ECONNRESET && strcmp(call->method, "GET") == 0)
		r = api_call_text(api, call, ret, e);
	return r;
}

int api_call(struct api *api, const char *method, const char *target, const json_t *body, json_t **ret, struct error *e)
{
	struct api_stream_call call = {.method = method, .target = target};
	return call_json(api, &call, body, ret, e);
}

int api_agent_call(struct api *api, const char *session, const char *method, const char *user, const json_t *body,
                   json_t **ret, struct error *e)
{
	char tail[256];
	if (text_format(tail, sizeof(tail), "/agent/%s", method) < 0)
		return error_set(e, ERROR_INVALID, "the method's name is too long");
	CLEANUP_FREE char *target = api_session_path(session, tail);
	struct api_stream_call call = {.method = "POST", .target = target, .user = user};
	return call_json(api, &call, body, ret, e);
}

int api_stream_head(struct http_client *client, struct error *e)
{
	struct http_answer answer = {0};
	connection_errno = answered_by_guest = 0;
	if (http_client_read_head(client, &answer, e) < 0) {
		http_answer_free(&answer);
		return connection_failed(e);
	}
	int r = 0;
	if (answer.status >= 400) {
		char body[16384];
		size_t size = 0;
		ssize_t n;
		struct error ignored;
		while (size < sizeof(body) && (n = http_client_read(client, body + size, sizeof(body) - size, &ignored)) > 0)
			size += (size_t)n;
		r = error_from_answer(answer.status, body, size, e);
	}
	http_answer_free(&answer);
	return r;
}

int api_stream(const struct api *api, const struct api_stream_call *call, struct http_client **ret, struct error *e)
{
	struct http_header headers[HEADERS_MAX];
	struct http_call http = {
	    .method = call->method,
	    .target = call->target,
	    .headers = headers,
	    .header_count = fill_headers(api, call, headers),
	    .body = call->body,
	    .body_size = call->body_size,
	    .stream_body = call->stream_body,
	    .timeout_ms = call->read_timeout_ms,
	};
	struct http_client *client;
	int r = connect_server(api, &client, e);
	if (r < 0)
		return r;
	if (call->publish)
		call->publish(call->context, client);
	if (http_client_start(client, &http, e) < 0)
		r = connection_failed(e);
	if (r == 0 && !call->stream_body)
		r = api_stream_head(client, e);
	if (r < 0) {
		if (call->publish)
			call->publish(call->context, NULL);
		http_client_free(client);
		return r;
	}
	*ret = client;
	return 0;
}

int api_escape(struct buf *to, const char *text)
{
	static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._~";
	for (; *text; text++) {
		int r = strchr(plain, *text) ? buf_append(to, text, 1) : buf_printf(to, "%%%02X", (unsigned char)*text);
		if (r < 0)
			return r;
	}
	return 0;
}

char *api_path(const char *prefix, const char *word, const char *suffix)
{
	struct buf path = {0};
	/* "." and ".." would be taken for steps in the path */
	const char *safe = strcmp(word, ".") == 0 ? "%2E" : strcmp(word, "..") == 0 ? "%2E%2E" : NULL;
	if (buf_append_string(&path, prefix) < 0 || (safe ? buf_append_string(&path, safe) : api_escape(&path, word)) < 0 ||
	    buf_append_string(&path, suffix) < 0)
		abort();
	return path.data;
}

char *api_session_path(const char *session, const char *suffix)
{
	return api_path("/v1/sessions/", session, suffix);
}

const char *api_hint(const struct api *api, const struct error *e, const char *kind)
{
	if (api_is_connection_error(e)) {
		if (connection_errno == EACCES)
			return "the socket belongs to root and group space: use sudo, join the group, or set SPACE_URL and "
			       "SPACE_API_KEY";
		if (api_is_local(api))
			return connection_errno == ECONNREFUSED ? "is the daemon running? start it with: space serve (or: make up)"
			                                        : "the daemon may have been restarted; look with: space doctor";
		return "check SPACE_URL, and that spaced runs there";
	}
	/* No key is needed on the socket: there it is the guest that does not know a user. */
	if (e->code == ERROR_UNAUTHENTICATED)
		return api_is_local(api) ? NULL : "set SPACE_API_KEY to a key made with: space key create";
	if (e->code == ERROR_FORBIDDEN)
		return answered_by_guest || (kind && strcmp(kind, "file") == 0)
		           ? NULL
		           : "the key may not do this; an admin key or the local socket may";
	if (e->code == ERROR_NO_SPACE)
		return "free some space: space history ID shows snapshots that can go, space doctor shows the disk";
	if (e->code != ERROR_NOT_FOUND || !kind)
		return NULL;
	if (answered_by_guest)
		return strcmp(kind, "process") == 0 ? "see the processes with: space ps -a ID" : NULL;
	if (strcmp(kind, "session") == 0 || strcmp(kind, "process") == 0 || strcmp(kind, "file") == 0)
		return "see the sessions with: space ls";
	if (strcmp(kind, "template") == 0)
		return "see the templates with: space template ls";
	if (strcmp(kind, "snapshot") == 0)
		return "see the snapshots with: space history ID";
	if (strcmp(kind, "key") == 0)
		return "see the keys with: space key ls";
	return NULL;
}
