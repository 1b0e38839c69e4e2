/* Templates: listing, removing, and collecting those that nothing can need any more. */
#include <errno.h>
#include <string.h>

#include "base/log.h"
#include "session/internal.h"
#include "session/warm_pool.h"

static json_t *array_json(const char *text)
{
	json_t *array = text ? json_loads(text, 0, NULL) : NULL;
	return array ? array : json_array();
}

int template_json(const struct store_template *row, json_t **ret)
{
	char when[32];
	char name[STORE_TEMPLATE_NAME_BYTES];
	time_format_rfc3339(when, sizeof(when), row->created_at_ms);
	text_format(name, sizeof(name), "%s:%s", row->name, row->tag);
	*ret = json_pack("{s:s, s:s, s:s, s:b, s:o, s:o, s:I, s:I, s:I, s:I, s:s, s:{s:s, s:s, s:s}}", "id", row->id,
	                 "name", name, "digest", row->digest, "retired", row->retired, "packages",
	                 array_json(row->packages), "run", array_json(row->run), "vcpus", (json_int_t)row->vcpus,
	                 "memory_bytes", (json_int_t)row->memory_bytes, "size_bytes", (json_int_t)row->disk_bytes,
	                 "bytes_stored", (json_int_t)row->bytes_stored, "created_at", when, "engine", "name", row->engine,
	                 "version", row->engine_version, "accel", row->accel);
	return *ret ? 0 : -ENOMEM;
}

static int add_template(void *context, const struct store_template *row)
{
	json_t *item;
	if (row->retired)
		return 0;
	return template_json(row, &item) < 0 || json_array_append_new(context, item) < 0 ? -ENOMEM : 0;
}

int template_list(struct session_manager *m, const struct session_caller *who, json_t **ret, struct error *e)
{
	json_t *list = json_array();
	int r = store_template_each(m->store, add_template, list, e);
	if (r < 0) {
		json_decref(list);
		return r;
	}
	*ret = json_pack("{s:o}", "templates", list);
	return *ret ? 0 : error_set_errno(e, ENOMEM, "templates");
}

int template_get(struct session_manager *m, const struct session_caller *who, const char *name, json_t **ret,
                 struct error *e)
{
	struct store_template row;
	int r = store_template_find(m->store, name, &row, e);
	if (r < 0)
		return r;
	r = template_json(&row, ret);
	store_template_clear(&row);
	return r < 0 ? error_set_errno(e, r, "template") : 0;
}

static int template_remove(struct session_manager *m, const char *id, struct error *e)
{
	uint64_t users = 0;
	int r = store_begin(m->store, STORE_DURABLE, e);
	if (r < 0)
		return r;
	r = store_session_count_on_template(m->store, id, &users, e);
	if (r == 0 && users)
		r = error_set(e, ERROR_CONFLICT, "%llu sessions without a snapshot would have nothing to wake from",
		              (unsigned long long)users);
	if (r == 0)
		r = store_template_delete(m->store, id, e);
	if (r < 0) {
		store_rollback(m->store);
		return r;
	}
	r = store_commit(m->store, e);
	if (r == 0)
		pool_remove(&m->pool, POOL_TEMPLATES, id);
	return r;
}

int template_delete(struct session_manager *m, const struct session_caller *who, const char *name, struct error *e)
{
	struct store_template row;
	if (!who->is_admin)
		return error_set(e, ERROR_FORBIDDEN, "only an admin may delete templates");
	int r = store_template_find(m->store, name, &row, e);
	if (r < 0)
		return r;
	r = template_remove(m, row.id, e);
	if (r < 0)
		error_prefix(e, "template %s:%s", row.name, row.tag);
	store_template_clear(&row);
	warm_pool_refresh(m);
	return r;
}

struct retired {
	char list[16][ID_BYTES];
	size_t count;
};

static int collect_retired(void *context, const struct store_template *row)
{
	struct retired *retired = context;
	if (row->retired && retired->count < ARRAY_SIZE(retired->list))
		memcpy(retired->list[retired->count++], row->id, ID_BYTES);
	return 0;
}

void template_collect(struct session_manager *m)
{
	struct retired retired = {0};
	struct error e;
	if (store_template_each(m->store, collect_retired, &retired, &e) < 0)
		return;
	for (size_t i = 0; i < retired.count; i++)
		if (template_remove(m, retired.list[i], &e) < 0 && e.code != ERROR_CONFLICT)
			log_warning("session", "retired template %s: %s", retired.list[i], e.message);
}
