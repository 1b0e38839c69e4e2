/* API keys: shown once, kept as a hash. */
#include <errno.h>
#include <openssl/evp.h>
#include <string.h>

#include "http/json.h"
#include "session/internal.h"
#include "session/params.h"

#define KEY_PREFIX "e2b_"
#define KEY_RANDOM_BYTES 20
#define KEY_BYTES (sizeof(KEY_PREFIX) + KEY_RANDOM_BYTES * 2)
#define KEY_TENANT_DEFAULT "default"

/* Keys have 160 random bits, so a plain hash of them cannot be turned back by trying. */
static int key_hash(const char *key, char ret[STORE_KEY_HASH_BYTES])
{
	unsigned char digest[EVP_MAX_MD_SIZE];
	unsigned size = 0;
	if (EVP_Digest(key, strlen(key), digest, &size, EVP_sha256(), NULL) != 1 || size != 32)
		return -EIO;
	text_hex(ret, digest, size);
	return 0;
}

static json_t *key_json(const struct store_key *row)
{
	char when[32];
	time_format_rfc3339(when, sizeof(when), row->created_at_ms);
	return json_pack("{s:s, s:s, s:s, s:b, s:s, s:s}", "id", row->id, "name", row->name, "tenant", row->tenant, "admin",
	                 row->admin, "hint", row->hint, "created_at", when);
}

int key_create(struct session_manager *m, const struct session_caller *who, const json_t *params, json_t **ret,
               struct error *e)
{
	static const char *const fields[] = {"name", "tenant", "admin", NULL};
	struct store_key row = {0};
	const char *tenant = who->is_admin ? KEY_TENANT_DEFAULT : who->tenant;
	int r = json_check_fields(params, fields, e);
	if (r >= 0)
		r = params_read_name(params, row.name, 1, e);
	if (r >= 0)
		r = json_read_string(params, "tenant", STORE_TENANT_BYTES - 1, &tenant, e);
	if (r >= 0)
		r = json_read_bool(params, "admin", &row.admin, e);
	if (r >= 0)
		r = params_check_name(tenant, "tenant", e);
	if (r < 0)
		return r;
	if (!who->is_admin && (row.admin || strcmp(tenant, who->tenant) != 0))
		return error_set(e, ERROR_FORBIDDEN, "only an admin may make keys for other tenants or admins");
	unsigned char secret[KEY_RANDOM_BYTES];
	char key[KEY_BYTES] = KEY_PREFIX;
	random_bytes(secret, sizeof(secret));
	text_hex(key + strlen(KEY_PREFIX), secret, sizeof(secret));
	explicit_bzero(secret, sizeof(secret));
	id_make(row.id, 'k');
	text_copy(row.tenant, sizeof(row.tenant), tenant);
	text_copy(row.hint, sizeof(row.hint), key + strlen(key) - 4);
	row.created_at_ms = time_realtime_ms();
	if (key_hash(key, row.hash) < 0)
		return error_set(e, ERROR_INTERNAL, "no SHA-256 here");
	r = store_key_insert(m->store, &row, e);
	if (r == 0) {
		*ret = key_json(&row);
		if (*ret)
			json_object_set_new(*ret, "key", json_string(key));
		else
			r = error_set_errno(e, ENOMEM, "key");
	}
	explicit_bzero(key, sizeof(key));
	return r;
}

static int add_key(void *context, const struct store_key *row)
{
	return json_array_append_new(context, key_json(row)) < 0 ? -ENOMEM : 0;
}

int key_list(struct session_manager *m, const struct session_caller *who, json_t **ret, struct error *e)
{
	json_t *list = json_array();
	int r = store_key_each(m->store, who->is_admin ? NULL : who->tenant, add_key, list, e);
	if (r < 0) {
		json_decref(list);
		return r;
	}
	*ret = json_pack("{s:o}", "keys", list);
	return *ret ? 0 : error_set_errno(e, ENOMEM, "keys");
}

int key_delete(struct session_manager *m, const struct session_caller *who, const char *id, struct error *e)
{
	return store_key_delete(m->store, id, who->is_admin ? NULL : who->tenant, e);
}

int key_authenticate(struct session_manager *m, const char *key, struct session_caller *ret, struct error *e)
{
	/* The look-up is by the hash, so its time tells nothing about any key. */
	char hash[STORE_KEY_HASH_BYTES];
	struct store_key row;
	struct error local;
	if (key_hash(key, hash) < 0)
		return error_set(e, ERROR_INTERNAL, "no SHA-256 here");
	int r = store_key_find(m->store, hash, &row, &local);
	if (r < 0 && local.code != ERROR_NOT_FOUND) {
		if (e)
			*e = local;
		return r;
	}
	if (r < 0)
		return error_set(e, ERROR_UNAUTHENTICATED, "unknown API key");
	*ret = (struct session_caller){.is_admin = row.admin};
	memcpy(ret->tenant, row.tenant, sizeof(ret->tenant));
	return 0;
}
