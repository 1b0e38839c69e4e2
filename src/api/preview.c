#include "api/preview.h"

#include <ctype.h>
#include <errno.h>
#include <string.h>
#include <strings.h>

#include "api/uri.h"

#define SESSIONS_PREFIX "/v1/sessions/"

static int set_port(struct preview *p, const char *text, struct error *e)
{
	uint64_t port;
	if (text_parse_u64(text, 65535, &port) < 0 || port == 0)
		return error_set(e, ERROR_INVALID, "port \"%.16s\" is not a number from 1 to 65535", text);
	p->port = (unsigned)port;
	p->kind = port == HOST_AGENT_PORT ? PREVIEW_AGENT_PORT : PREVIEW_PORT;
	return 1;
}

/* PORT-ID.DOMAIN, with or without a port of ours behind it. */
static int match_host(const char *domain, const char *host, struct preview *p, struct error *e)
{
	size_t digits = strspn(host, "0123456789");
	if (digits == 0 || digits > 10 || host[digits] != '-')
		return 0;
	const char *id = host + digits + 1;
	size_t id_size = strcspn(id, ".:");
	size_t domain_size = strlen(domain);
	if (id[id_size] != '.' || strncasecmp(id + id_size + 1, domain, domain_size) != 0)
		return 0;
	const char *rest = id + id_size + 1 + domain_size;
	if (*rest && *rest != ':')
		return 0;
	if (id_size >= sizeof(p->id))
		return error_set(e, ERROR_NOT_FOUND, "no such session");
	for (size_t i = 0; i < id_size; i++)
		p->id[i] = (char)tolower((unsigned char)id[i]);
	p->id[id_size] = '\0';
	if (!id_is_valid(p->id, 's'))
		return error_set(e, ERROR_NOT_FOUND, "no such session");
	char port[12];
	memcpy(port, host, digits);
	port[digits] = '\0';
	return set_port(p, port, e);
}

static int match_headers(const struct http_request *q, struct preview *p, struct error *e)
{
	const char *id = http_request_header(q, "e2b-sandbox-id");
	if (!id)
		return 0;
	const char *port = http_request_header(q, "e2b-sandbox-port");
	if (!port)
		return error_set(e, ERROR_INVALID, "header E2b-Sandbox-Id needs E2b-Sandbox-Port beside it");
	if (!id_is_valid(id, 's') || text_copy(p->id, sizeof(p->id), id) < 0)
		return error_set(e, ERROR_NOT_FOUND, "no such session");
	return set_port(p, port, e);
}

static int match_path(const struct http_request *q, struct preview *p, struct error *e)
{
	if (!text_starts_with(q->target, SESSIONS_PREFIX))
		return 0;
	const char *id = q->target + strlen(SESSIONS_PREFIX);
	size_t id_size = strcspn(id, "/?");
	const char *word = id + id_size;
	size_t cut;
	char port[12] = "";
	if (text_starts_with(word, "/agent/")) {
		p->kind = PREVIEW_AGENT;
		p->port = HOST_AGENT_PORT;
		cut = strlen("/agent");
	} else if (text_starts_with(word, "/ports/")) {
		const char *number = word + strlen("/ports/");
		size_t size = strcspn(number, "/?");
		if (size >= sizeof(port))
			return error_set(e, ERROR_INVALID, "the port in the path is not a number from 1 to 65535");
		memcpy(port, number, size);
		port[size] = '\0';
		cut = strlen("/ports/") + size;
	} else {
		return 0;
	}
	if (uri_decode(p->id, sizeof(p->id), id, id_size) < 0 || id_size == 0)
		return error_set(e, ERROR_NOT_FOUND, "no such session");
	if (p->kind != PREVIEW_AGENT) {
		int r = set_port(p, port, e);
		if (r < 0)
			return r;
	}
	p->target = word + cut;
	size_t prefix = (size_t)(p->target - q->target);
	if (prefix >= sizeof(p->prefix))
		return error_set(e, ERROR_NOT_FOUND, "no such session");
	memcpy(p->prefix, q->target, prefix);
	p->prefix[prefix] = '\0';
	return 1;
}

int preview_match(const char *domain, const struct http_request *request, struct preview *ret, struct error *e)
{
	*ret = (struct preview){.kind = PREVIEW_PORT, .target = request->target};
	int r = match_headers(request, ret, e);
	if (r != 0)
		return r;
	const char *host = http_request_header(request, "host");
	r = host ? match_host(domain, host, ret, e) : 0;
	if (r != 0)
		return r;
	return match_path(request, ret, e);
}

static int is_token_pair(const char *pair, size_t size)
{
	size_t name = strlen(PREVIEW_TOKEN_NAME);
	return size > name && !strncmp(pair, PREVIEW_TOKEN_NAME, name) && pair[name] == '=';
}

/* Finds space_token=VALUE among pairs that `separators` part. */
static int find_pair(const char *text, const char *separators, char to[TOKEN_BYTES])
{
	for (const char *c = text; *c;) {
		c += strspn(c, separators);
		size_t size = strcspn(c, separators);
		if (is_token_pair(c, size)) {
			size_t name = strlen(PREVIEW_TOKEN_NAME) + 1;
			if (uri_decode(to, TOKEN_BYTES, c + name, size - name) < 0)
				to[0] = '\0';
			return 1;
		}
		c += size;
	}
	return 0;
}

int preview_token(const struct http_request *request, const char *target, char to[TOKEN_BYTES], int *ret_from_query)
{
	*ret_from_query = 0;
	const char *header = http_request_header(request, "x-access-token");
	if (header) {
		if (text_copy(to, TOKEN_BYTES, header) < 0)
			to[0] = '\0';
		return 1;
	}
	const char *query = strchr(target, '?');
	/* The query first: it is how a browser with an outdated cookie gets a new one. */
	if (query && find_pair(query + 1, "&", to)) {
		*ret_from_query = 1;
		return 1;
	}
	for (size_t i = 0; i < request->header_count; i++) {
		if (!strcasecmp(request->headers[i].name, "cookie") && find_pair(request->headers[i].value, "; ", to))
			return 1;
	}
	return 0;
}

int preview_strip_query(struct buf *to, const char *target)
{
	size_t path = strcspn(target, "?");
	int r = buf_append(to, target, path);
	char separator = '?';
	for (const char *c = target + path; r == 0 && *c;) {
		c++;
		size_t size = strcspn(c, "&");
		if (!is_token_pair(c, size)) {
			r = buf_append(to, &separator, 1);
			if (r == 0)
				r = buf_append(to, c, size);
			separator = '&';
		}
		c += size;
	}
	return r;
}

int preview_strip_cookie(struct buf *to, const char *value)
{
	int r = 0;
	size_t before = to->size;
	for (const char *c = value; r == 0 && *c;) {
		c += strspn(c, "; ");
		size_t size = strcspn(c, ";");
		if (size && !is_token_pair(c, size)) {
			if (to->size > before)
				r = buf_append_string(to, "; ");
			if (r == 0)
				r = buf_append(to, c, size);
		}
		c += size;
	}
	return r;
}
