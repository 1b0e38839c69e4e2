#include "api/auth.h"

#include <string.h>
#include <strings.h>

#include "base/text.h"

#define KEY_PREFIX "e2b_"
#define KEY_HEX_CHARS 40

static void set_key(struct auth *auth, const char *key)
{
	auth->has_key = 1;
	if (text_copy(auth->key, sizeof(auth->key), key) < 0)
		(void)text_copy(auth->key, sizeof(auth->key), "too-long");
}

void auth_read_key_header(struct auth *auth, const struct http_stream *s)
{
	*auth = (struct auth){.is_local = s->peer->is_unix};
	const char *key = http_request_header(&s->request, "x-api-key");
	if (key)
		set_key(auth, key);
}

void auth_read(struct auth *auth, const struct http_stream *s)
{
	auth_read_key_header(auth, s);
	const char *bearer = http_request_header(&s->request, "authorization");
	if (!auth->has_key && bearer && !strncasecmp(bearer, "bearer ", 7))
		set_key(auth, bearer + 7 + strspn(bearer + 7, " "));
}

int auth_check(struct session_manager *manager, const struct auth *auth, struct session_caller *ret, struct error *e)
{
	*ret = (struct session_caller){0};
	if (auth->has_key)
		return key_authenticate(manager, auth->key, ret, e);
	if (auth->is_local) {
		ret->is_admin = 1;
		return text_copy(ret->tenant, sizeof(ret->tenant), "default");
	}
	return error_set(e, ERROR_UNAUTHENTICATED, "an API key is needed, in X-API-Key or as Authorization: Bearer");
}

int auth_looks_like_key(const char *text)
{
	size_t prefix = strlen(KEY_PREFIX);
	return text_starts_with(text, KEY_PREFIX) && strlen(text) == prefix + KEY_HEX_CHARS &&
	       strspn(text + prefix, "0123456789abcdef") == KEY_HEX_CHARS;
}
