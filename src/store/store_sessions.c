#include <errno.h>
#include <string.h>

#include "store/statement.h"

#define SESSION_COLUMNS                                                                                                \
	"id, tenant, name, template_id, template_name, template_digest, state, reason_code, reason, lost_since_ms,"        \
	" labels, environment, timeout_s, on_timeout, end_at_ms, left_ms, snapshot_interval_s, keep_all_s, keep_hourly_s," \
	" keep_daily_s, wake_on_use, access_token, machine_id, head, origin_session, origin_snapshot, fence, vcpus,"       \
	" memory_bytes, disk_bytes, created_at_ms, state_at_ms, started_at_ms"

void store_session_clear(struct store_session *row)
{
	free(row->labels);
	free(row->environment);
	explicit_bzero(row, sizeof(*row));
}

int store_session_copy(const struct store_session *row, struct store_session *ret)
{
	*ret = *row;
	ret->labels = row->labels ? strdup(row->labels) : NULL;
	ret->environment = row->environment ? strdup(row->environment) : NULL;
	if ((row->labels && !ret->labels) || (row->environment && !ret->environment)) {
		store_session_clear(ret);
		return -ENOMEM;
	}
	return 0;
}

static int session_read(sqlite3_stmt *s, struct store_session *ret, struct error *e)
{
	int i = 0;
	*ret = (struct store_session){0};
	column_text(s, i++, ret->id, sizeof(ret->id));
	column_text(s, i++, ret->tenant, sizeof(ret->tenant));
	column_text(s, i++, ret->name, sizeof(ret->name));
	column_text(s, i++, ret->template_id, sizeof(ret->template_id));
	column_text(s, i++, ret->template_name, sizeof(ret->template_name));
	column_text(s, i++, ret->template_digest, sizeof(ret->template_digest));
	column_text(s, i++, ret->state, sizeof(ret->state));
	column_text(s, i++, ret->reason_code, sizeof(ret->reason_code));
	column_text(s, i++, ret->reason, sizeof(ret->reason));
	ret->lost_since_ms = column_u64(s, i++);
	ret->labels = column_text_new(s, i++);
	ret->environment = column_text_new(s, i++);
	ret->timeout_s = column_u64(s, i++);
	column_text(s, i++, ret->on_timeout, sizeof(ret->on_timeout));
	ret->end_at_ms = column_u64(s, i++);
	ret->left_ms = column_u64(s, i++);
	ret->snapshot_interval_s = column_u64(s, i++);
	ret->keep_all_s = column_u64(s, i++);
	ret->keep_hourly_s = column_u64(s, i++);
	ret->keep_daily_s = column_u64(s, i++);
	ret->wake_on_use = (int)column_u64(s, i++);
	column_text(s, i++, ret->access_token, sizeof(ret->access_token));
	column_text(s, i++, ret->machine_id, sizeof(ret->machine_id));
	column_text(s, i++, ret->head, sizeof(ret->head));
	column_text(s, i++, ret->origin_session, sizeof(ret->origin_session));
	column_text(s, i++, ret->origin_snapshot, sizeof(ret->origin_snapshot));
	ret->fence = column_u64(s, i++);
	ret->vcpus = column_u64(s, i++);
	ret->memory_bytes = column_u64(s, i++);
	ret->disk_bytes = column_u64(s, i++);
	ret->created_at_ms = column_u64(s, i++);
	ret->state_at_ms = column_u64(s, i++);
	ret->started_at_ms = column_u64(s, i++);
	if (!ret->labels || !ret->environment) {
		store_session_clear(ret);
		return error_set_errno(e, ENOMEM, "session");
	}
	return 0;
}

int store_session_insert(struct store *store, const struct store_session *row, struct error *e)
{
	int r = statement_run(store, e,
	                      "INSERT INTO sessions(" SESSION_COLUMNS
	                      ") VALUES(?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
	                      "TTtTTTTttiTTiTiiiiiiiTTtttiiiiiii", row->id, row->tenant, row->name, row->template_id,
	                      row->template_name, row->template_digest, row->state, row->reason_code, row->reason,
	                      row->lost_since_ms, row->labels, row->environment, row->timeout_s, row->on_timeout,
	                      row->end_at_ms, row->left_ms, row->snapshot_interval_s, row->keep_all_s, row->keep_hourly_s,
	                      row->keep_daily_s, (uint64_t)(row->wake_on_use != 0), row->access_token, row->machine_id,
	                      row->head, row->origin_session, row->origin_snapshot, row->fence, row->vcpus,
	                      row->memory_bytes, row->disk_bytes, row->created_at_ms, row->state_at_ms, row->started_at_ms);
	if (r == -EBUSY && row->name[0])
		return error_set(e, ERROR_CONFLICT, "a session named \"%s\" exists already", row->name);
	return r < 0 ? r : 0;
}

int store_session_update(struct store *store, const struct store_session *row, struct error *e)
{
	int r = statement_run(
	    store, e,
	    "UPDATE sessions SET name = ?2, state = ?3, reason_code = ?4, reason = ?5, lost_since_ms = ?6, labels = ?7,"
	    " environment = ?8, timeout_s = ?9, on_timeout = ?10, end_at_ms = ?11, left_ms = ?12,"
	    " snapshot_interval_s = ?13, keep_all_s = ?14, keep_hourly_s = ?15, keep_daily_s = ?16, wake_on_use = ?17,"
	    " access_token = ?18, machine_id = ?19, head = ?20, fence = ?21, state_at_ms = ?22, started_at_ms = ?23"
	    " WHERE id = ?1 AND fence <= ?21",
	    "TtTttiTTiTiiiiiiiTTtiii", row->id, row->name, row->state, row->reason_code, row->reason, row->lost_since_ms,
	    row->labels, row->environment, row->timeout_s, row->on_timeout, row->end_at_ms, row->left_ms,
	    row->snapshot_interval_s, row->keep_all_s, row->keep_hourly_s, row->keep_daily_s,
	    (uint64_t)(row->wake_on_use != 0), row->access_token, row->machine_id, row->head, row->fence, row->state_at_ms,
	    row->started_at_ms);
	if (r == -EBUSY && row->name[0])
		return error_set(e, ERROR_CONFLICT, "a session named \"%s\" exists already", row->name);
	if (r == 0)
		return error_set(e, ERROR_CONFLICT, "session %s is gone or was taken over", row->id);
	return r < 0 ? r : 0;
}

static int session_fetch(struct store *store, sqlite3_stmt *s, struct store_session *ret, struct error *e)
{
	int r = statement_step(store, s, e);
	if (r == 1)
		r = session_read(s, ret, e);
	else if (r == 0)
		r = error_set(e, ERROR_NOT_FOUND, "no such session");
	statement_end(store, s);
	return r;
}

int store_session_get(struct store *store, const char *id, struct store_session *ret, struct error *e)
{
	sqlite3_stmt *s = statement_begin(store, e, "SELECT " SESSION_COLUMNS " FROM sessions WHERE id = ?", "T", id);
	return s ? session_fetch(store, s, ret, e) : -EIO;
}

int store_session_find(struct store *store, const char *tenant, const char *name, struct store_session *ret,
                       struct error *e)
{
	sqlite3_stmt *s = statement_begin(
	    store, e, "SELECT " SESSION_COLUMNS " FROM sessions WHERE tenant = ? AND name = ?", "TT", tenant, name);
	return s ? session_fetch(store, s, ret, e) : -EIO;
}

int store_session_delete(struct store *store, const char *id, struct error *e)
{
	int r = statement_run(store, e, "DELETE FROM sessions WHERE id = ?", "T", id);
	return r < 0 ? r : 0;
}

static int count_rows(struct store *store, sqlite3_stmt *s, uint64_t *ret, struct error *e)
{
	int r = statement_step(store, s, e);
	if (r == 1)
		*ret = column_u64(s, 0);
	statement_end(store, s);
	return r < 0 ? r : 0;
}

int store_session_count(struct store *store, uint64_t *ret, struct error *e)
{
	sqlite3_stmt *s = statement_begin(store, e, "SELECT count(*) FROM sessions", "");
	return s ? count_rows(store, s, ret, e) : -EIO;
}

int store_session_count_on_template(struct store *store, const char *template_id, uint64_t *ret, struct error *e)
{
	sqlite3_stmt *s = statement_begin(store, e, "SELECT count(*) FROM sessions WHERE template_id = ? AND head IS NULL",
	                                  "T", template_id);
	return s ? count_rows(store, s, ret, e) : -EIO;
}

int store_session_each(struct store *store, const char *tenant, uint64_t after_ms, const char *after_id,
                       int (*visit)(void *context, const struct store_session *row), void *context, struct error *e)
{
	sqlite3_stmt *s = statement_begin(store, e,
	                                  "SELECT " SESSION_COLUMNS " FROM sessions WHERE (?1 IS NULL OR tenant = ?1)"
	                                  " AND (created_at_ms, id) > (?2, ?3) ORDER BY created_at_ms, id",
	                                  "tiT", tenant, after_ms, after_id ? after_id : "");
	if (!s)
		return -EIO;
	int r;
	while ((r = statement_step(store, s, e)) == 1) {
		struct store_session row;
		r = session_read(s, &row, e);
		if (r == 0) {
			r = visit(context, &row);
			store_session_clear(&row);
		}
		if (r != 0)
			break;
	}
	statement_end(store, s);
	return r;
}
