/*
 * Heads as they are passed on. Hop-by-hop headers go (RFC 9110, 7.6.1), credentials of ours go, framing is written
 * anew; everything else passes unchanged.
 *
 * Host rule, the same for plain requests and upgrades: the app in the guest sees `localhost:PORT`, which every
 * development server accepts; what the client asked for is in X-Forwarded-Host.
 */
#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "api/exchange.h"

static int is_hop_by_hop(const char *name)
{
	static const char *const names[] = {
	    "connection",          "keep-alive", "proxy-connection", "proxy-authenticate",
	    "proxy-authorization", "te",         "trailer",          "transfer-encoding",
	    "content-length",      "upgrade",    "http2-settings",
	};
	for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
		if (!strcasecmp(name, names[i]))
			return 1;
	}
	return 0;
}

/* True if a Connection header of the message names it. */
static int is_nominated(const struct http_header *headers, size_t count, const char *name)
{
	for (size_t i = 0; i < count; i++) {
		if (!strcasecmp(headers[i].name, "connection") && http_list_has(headers[i].value, name))
			return 1;
	}
	return 0;
}

static int is_ours(const char *name)
{
	static const char *const names[] = {"host",
	                                    "expect",
	                                    "x-space-control",
	                                    "x-space-user",
	                                    "e2b-sandbox-id",
	                                    "e2b-sandbox-port",
	                                    "x-forwarded-host",
	                                    "x-forwarded-proto",
	                                    "x-forwarded-for",
	                                    "forwarded",
	                                    "x-forwarded-prefix"};
	for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
		if (!strcasecmp(name, names[i]))
			return 1;
	}
	return 0;
}

/* Credentials that were meant for us, or that only we may set. */
static int is_credential(const struct exchange *x, const struct http_header *h)
{
	if (!strcasecmp(h->name, "x-api-key"))
		return x->preview.kind == PREVIEW_AGENT || auth_looks_like_key(h->value);
	if (!strcasecmp(h->name, "x-access-token"))
		return x->preview.kind == PREVIEW_AGENT ||
		       (x->preview.kind == PREVIEW_PORT && *x->access_token && text_equal_secret(h->value, x->access_token));
	if (!strcasecmp(h->name, "authorization") && x->preview.kind == PREVIEW_AGENT)
		return strncasecmp(h->value, "basic ", 6) != 0 ||
		       http_request_header(&x->stream->request, "x-space-user") != NULL;
	return 0;
}

static int append_header(struct buf *to, const char *name, const char *value)
{
	return buf_printf(to, "%s: %s\r\n", name, value);
}

/* E2B's clients name the user of an agent call by Basic authentication without a password. */
static int append_user(const struct exchange *x, struct buf *to)
{
	const char *user = http_request_header(&x->stream->request, "x-space-user");
	char plain[80], encoded[128];
	if (x->preview.kind != PREVIEW_AGENT || !user)
		return 0;
	if (text_format(plain, sizeof(plain), "%s:", user) < 0)
		return -EINVAL;
	text_base64(encoded, plain, strlen(plain));
	return buf_printf(to, "authorization: Basic %s\r\n", encoded);
}

static int append_forwarded(const struct exchange *x, struct buf *to)
{
	const struct http_request *q = &x->stream->request;
	const char *host = http_request_header(q, "host");
	const char *before = http_request_header(q, "x-forwarded-for");
	const char *peer = x->stream->peer->address;
	int r = 0;
	if (host)
		r = append_header(to, "x-forwarded-host", host);
	if (r == 0)
		r = append_header(to, "x-forwarded-proto", "http");
	if (r == 0 && x->preview.prefix[0])
		r = append_header(to, "x-forwarded-prefix", x->preview.prefix);
	if (r == 0 && (before || *peer))
		r = buf_printf(to, "x-forwarded-for: %s%s%s\r\n", before ? before : "", before && *peer ? ", " : "", peer);
	return r;
}

static int append_framing(const struct exchange *x, struct buf *to)
{
	const struct http_request *q = &x->stream->request;
	if (x->is_upgrade) {
		const char *protocol = http_request_header(q, "upgrade");
		return buf_printf(to, "connection: Upgrade\r\nupgrade: %s\r\n", protocol);
	}
	if (!q->has_body)
		return 0;
	int r = q->content_length < 0 ? buf_append_string(to, "transfer-encoding: chunked\r\n")
	                              : buf_printf(to, "content-length: %lld\r\n", (long long)q->content_length);
	if (r == 0 && q->expects_continue)
		r = append_header(to, "expect", "100-continue");
	return r;
}

static int append_request_headers(const struct exchange *x, struct buf *to)
{
	const struct http_request *q = &x->stream->request;
	int r = 0;
	for (size_t i = 0; i < q->header_count && r == 0; i++) {
		const struct http_header *h = &q->headers[i];
		if (is_hop_by_hop(h->name) || is_ours(h->name) || is_credential(x, h) ||
		    is_nominated(q->headers, q->header_count, h->name))
			continue;
		if (strcasecmp(h->name, "cookie") != 0 || x->preview.kind != PREVIEW_PORT ||
		    !strstr(h->value, PREVIEW_TOKEN_NAME)) {
			r = append_header(to, h->name, h->value);
			continue;
		}
		CLEANUP_BUF struct buf cookie = {0};
		r = preview_strip_cookie(&cookie, h->value);
		if (r == 0 && cookie.size)
			r = append_header(to, "cookie", cookie.data);
	}
	return r;
}

static int append_target(const struct exchange *x, struct buf *to)
{
	const char *target = x->preview.target;
	int r = *target == '/' ? 0 : buf_append_string(to, "/");
	if (r < 0)
		return r;
	return x->preview.kind == PREVIEW_PORT ? preview_strip_query(to, target) : buf_append_string(to, target);
}

int forward_request_head(const struct exchange *x, struct buf *ret)
{
	int r = buf_printf(ret, "%s ", x->stream->request.method);
	if (r == 0)
		r = append_target(x, ret);
	if (r == 0)
		r = buf_printf(ret, " HTTP/1.1\r\nhost: localhost:%u\r\n", x->preview.port);
	if (r == 0)
		r = append_request_headers(x, ret);
	if (r == 0 && x->preview.kind == PREVIEW_AGENT)
		r = append_header(ret, "x-access-token", x->access_token);
	if (r == 0)
		r = append_user(x, ret);
	if (r == 0 && x->preview.kind == PREVIEW_PORT)
		r = append_forwarded(x, ret);
	if (r == 0)
		r = append_framing(x, ret);
	return r < 0 ? r : buf_append_string(ret, "\r\n");
}

int forward_tunnel_head(const struct exchange *x, struct buf *ret)
{
	return buf_printf(ret,
	                  "GET /space/v1/tunnel?port=%u HTTP/1.1\r\nhost: localhost:%u\r\nconnection: Upgrade\r\n"
	                  "upgrade: space-tunnel\r\nx-access-token: %s\r\n\r\n",
	                  x->preview.port, HOST_AGENT_PORT, x->access_token);
}

/* Adds a header whose value is made of texts of ours. Its position is kept as an offset until all text is there: the
 * buffer moves while it grows. */
static int add_text(struct forward_answer *ret, const char *name, const char *a, const char *b, const char *c)
{
	if (ret->count == FORWARD_HEADERS_MAX)
		return -E2BIG;
	size_t at = ret->text.size;
	int r = buf_printf(&ret->text, "%s%s%s", a, b, c);
	if (r == 0)
		r = buf_append(&ret->text, "", 1);
	if (r == 0)
		ret->headers[ret->count++] = (struct http_header){name, (const char *)at};
	return r;
}

int forward_answer_head(const struct exchange *x, const struct http_parser *answer, struct forward_answer *ret)
{
	size_t text_headers[FORWARD_HEADERS_MAX];
	size_t texts = 0;
	int r = 0;
	for (size_t i = 0; i < answer->header_count && r == 0; i++) {
		const struct http_header *h = &answer->headers[i];
		int protocol = answer->status == 101 && !strcasecmp(h->name, "upgrade");
		if ((is_hop_by_hop(h->name) && !protocol) ||
		    (!protocol && is_nominated(answer->headers, answer->header_count, h->name)))
			continue;
		int in_path = x->preview.kind == PREVIEW_PORT && x->preview.prefix[0];
		if (in_path && !strcasecmp(h->name, "location") && h->value[0] == '/' && h->value[1] != '/') {
			text_headers[texts++] = ret->count;
			r = add_text(ret, "location", x->preview.prefix, h->value, "");
		} else {
			ret->headers[ret->count++] = *h;
		}
	}
	/* A browser that came with the token in the address keeps it as a cookie, for everything the page loads. */
	if (r == 0 && x->token_from_query && *x->access_token && text_equal_secret(x->token, x->access_token)) {
		text_headers[texts++] = ret->count;
		CLEANUP_BUF struct buf cookie = {0};
		r = buf_printf(&cookie, "%s=%s", PREVIEW_TOKEN_NAME, x->access_token);
		if (r == 0)
			r = add_text(ret, "set-cookie", cookie.data,
			             "; HttpOnly; SameSite=Lax; Path=", x->preview.prefix[0] ? x->preview.prefix : "/");
	}
	for (size_t i = 0; i < texts && r == 0; i++) {
		struct http_header *h = &ret->headers[text_headers[i]];
		h->value = ret->text.data + (size_t)h->value;
	}
	return r;
}

int forward_error_body(const struct exchange *x, const char *code, const char *message, struct buf *ret,
                       const char **ret_type)
{
	const char *accept = http_request_header(&x->stream->request, "accept");
	if (x->preview.kind == PREVIEW_AGENT || !accept || !strstr(accept, "text/html")) {
		*ret_type = "application/json";
		return http_error_body(ret, code, message);
	}
	/* `message` is our own text: numbers and fixed words, but the escape costs nothing. */
	*ret_type = "text/html; charset=utf-8";
	int r = buf_append_string(ret, "<!doctype html><meta charset=utf-8><title>No answer</title>"
	                               "<style>body{font:16px/1.5 sans-serif;margin:4em auto;max-width:40em}</style><h1>");
	if (r == 0)
		r = buf_append_string(ret, !strcmp(code, "port_closed")       ? "Nothing listens there"
		                           : !strcmp(code, "unauthenticated") ? "This session is private"
		                                                              : "The session does not answer");
	if (r == 0)
		r = buf_append_string(ret, "</h1><p>");
	for (const char *c = message; *c && r == 0; c++)
		r = *c == '<'   ? buf_append_string(ret, "&lt;")
		    : *c == '&' ? buf_append_string(ret, "&amp;")
		                : buf_append(ret, c, 1);
	return r < 0 ? r : buf_printf(ret, "</p><p><code>%s</code></p>\n", code);
}
