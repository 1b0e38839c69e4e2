/* Rows as the JSON objects of the REST interface. */
#include <string.h>
#include <unistd.h>

#include "session/internal.h"
#include "session/seal.h"

static json_t *time_json(uint64_t ms)
{
	char text[32];
	if (!ms)
		return json_null();
	time_format_rfc3339(text, sizeof(text), ms);
	return json_string(text);
}

static json_t *text_json(const char *text)
{
	return *text ? json_string(text) : json_null();
}

static json_t *object_json(const char *text)
{
	json_t *object = text ? json_loads(text, 0, NULL) : NULL;
	return object ? object : json_object();
}

static json_t *number_json(uint64_t value)
{
	return json_integer((json_int_t)value);
}

json_t *session_json(struct session_manager *m, const struct store_session *row, enum session_state state,
                     int with_token)
{
	json_t *o = json_object();
	json_object_set_new(o, "id", json_string(row->id));
	json_object_set_new(o, "name", text_json(row->name));
	json_object_set_new(o, "tenant", json_string(row->tenant));
	json_object_set_new(o, "state", json_string(state_name(state)));
	json_object_set_new(o, "reason_code", text_json(row->reason_code));
	json_object_set_new(o, "reason", text_json(row->reason));
	json_object_set_new(o, "lost_since", time_json(row->lost_since_ms));
	json_object_set_new(o, "template", json_string(row->template_name));
	json_object_set_new(o, "template_id", json_string(row->template_id));
	json_object_set_new(o, "template_digest", json_string(row->template_digest));
	json_object_set_new(o, "labels", object_json(row->labels));
	json_object_set_new(o, "vcpus", number_json(row->vcpus));
	json_object_set_new(o, "memory_bytes", number_json(row->memory_bytes));
	json_object_set_new(o, "disk_bytes", number_json(row->disk_bytes));
	json_object_set_new(o, "created_at", time_json(row->created_at_ms));
	json_object_set_new(o, "state_at", time_json(row->state_at_ms));
	json_object_set_new(o, "started_at", time_json(row->started_at_ms));
	json_object_set_new(o, "end_at", time_json(row->end_at_ms));
	json_object_set_new(o, "timeout_s", number_json(row->timeout_s));
	json_object_set_new(o, "on_timeout", json_string(row->on_timeout));
	json_object_set_new(o, "snapshot_interval_s", number_json(row->snapshot_interval_s));
	json_object_set_new(o, "retention",
	                    json_pack("{s:I, s:I, s:I}", "all_s", (json_int_t)row->keep_all_s, "hourly_s",
	                              (json_int_t)row->keep_hourly_s, "daily_s", (json_int_t)row->keep_daily_s));
	json_object_set_new(o, "wake_on_use", json_boolean(row->wake_on_use));
	json_object_set_new(o, "head", text_json(row->head));
	json_object_set_new(o, "origin", text_json(row->origin_session));
	json_object_set_new(o, "origin_snapshot", text_json(row->origin_snapshot));
	json_object_set_new(o, "starts", number_json(row->fence));
	if (with_token) {
		json_object_set_new(o, "environment", object_json(row->environment));
		json_object_set_new(o, "access_token", json_string(row->access_token));
	}
	return o;
}

json_t *session_json_of(struct session_manager *m, struct session *s, int with_token)
{
	char head[ID_BYTES];
	pthread_mutex_lock(&s->mutex);
	json_t *o = session_json(m, &s->row, s->state, with_token);
	memcpy(head, s->row.head, sizeof(head));
	pthread_mutex_unlock(&s->mutex);
	/* Which generation it wakes from (or goes back to), by time. */
	struct store_snapshot row;
	struct error ignored;
	if (head[0] && store_snapshot_get(m->store, head, &row, &ignored) == 0)
		json_object_set_new(o, "head_created_at", time_json(row.created_at_ms));
	else
		json_object_set_new(o, "head_created_at", json_null());
	return o;
}

json_t *snapshot_json(struct session_manager *m, const struct store_snapshot *row)
{
	struct error ignored;
	int folder = pool_folder(&m->pool, POOL_SNAPSHOTS, row->id, &ignored);
	const char *state = folder < 0                                  ? "damaged"
	                    : !seal_is_intact(folder, row->fingerprint) ? "changed"
	                    : strcmp(row->boot_id, m->boot_id) == 0     ? "ok"
	                                                                : "unverified";
	if (folder >= 0)
		close(folder);
	json_t *o = json_object();
	json_object_set_new(o, "id", json_string(row->id));
	json_object_set_new(o, "session", json_string(row->session_id));
	json_object_set_new(o, "parent", text_json(row->parent));
	json_object_set_new(o, "kind", json_string(row->kind));
	json_object_set_new(o, "name", text_json(row->name));
	json_object_set_new(o, "created_at", time_json(row->created_at_ms));
	json_object_set_new(o, "state", json_string(state));
	json_object_set_new(o, "bytes_stored", number_json(row->bytes_stored));
	json_object_set_new(o, "changed_bytes", number_json(row->changed_bytes));
	json_object_set_new(o, "stall_us", number_json(row->stall_us));
	json_object_set_new(o, "memory_bytes", number_json(row->memory_bytes));
	json_object_set_new(o, "disk_bytes", number_json(row->disk_bytes));
	json_object_set_new(
	    o, "engine",
	    json_pack("{s:s, s:s, s:s}", "name", row->engine, "version", row->engine_version, "accel", row->accel));
	return o;
}
