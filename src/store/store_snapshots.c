#include <errno.h>
#include <string.h>

#include "store/statement.h"

#define SNAPSHOT_COLUMNS                                                                                               \
	"id, session_id, parent, kind, name, control_token, engine, engine_version, accel, vcpus, memory_bytes,"           \
	" disk_bytes, bytes_stored, changed_bytes, stall_us, created_at_ms, manifest_sum, fingerprint, boot_id"

static void snapshot_read(sqlite3_stmt *s, struct store_snapshot *ret)
{
	int i = 0;
	*ret = (struct store_snapshot){0};
	column_text(s, i++, ret->id, sizeof(ret->id));
	column_text(s, i++, ret->session_id, sizeof(ret->session_id));
	column_text(s, i++, ret->parent, sizeof(ret->parent));
	column_text(s, i++, ret->kind, sizeof(ret->kind));
	column_text(s, i++, ret->name, sizeof(ret->name));
	column_text(s, i++, ret->control_token, sizeof(ret->control_token));
	column_text(s, i++, ret->engine, sizeof(ret->engine));
	column_text(s, i++, ret->engine_version, sizeof(ret->engine_version));
	column_text(s, i++, ret->accel, sizeof(ret->accel));
	ret->vcpus = column_u64(s, i++);
	ret->memory_bytes = column_u64(s, i++);
	ret->disk_bytes = column_u64(s, i++);
	ret->bytes_stored = column_u64(s, i++);
	ret->changed_bytes = column_u64(s, i++);
	ret->stall_us = column_u64(s, i++);
	ret->created_at_ms = column_u64(s, i++);
	column_text(s, i++, ret->manifest_sum, sizeof(ret->manifest_sum));
	column_text(s, i++, ret->fingerprint, sizeof(ret->fingerprint));
	column_text(s, i++, ret->boot_id, sizeof(ret->boot_id));
}

int store_snapshot_insert(struct store *store, const struct store_snapshot *row, struct error *e)
{
	int r = statement_run(
	    store, e, "INSERT INTO snapshots(" SNAPSHOT_COLUMNS ") VALUES(?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
	    "TTtTtTTTTiiiiiiiTTT", row->id, row->session_id, row->parent, row->kind, row->name, row->control_token,
	    row->engine, row->engine_version, row->accel, row->vcpus, row->memory_bytes, row->disk_bytes, row->bytes_stored,
	    row->changed_bytes, row->stall_us, row->created_at_ms, row->manifest_sum, row->fingerprint, row->boot_id);
	return r < 0 ? r : 0;
}

int store_snapshot_get(struct store *store, const char *id, struct store_snapshot *ret, struct error *e)
{
	sqlite3_stmt *s = statement_begin(store, e, "SELECT " SNAPSHOT_COLUMNS " FROM snapshots WHERE id = ?", "T", id);
	if (!s)
		return -EIO;
	int r = statement_step(store, s, e);
	if (r == 1) {
		snapshot_read(s, ret);
		r = 0;
	} else if (r == 0) {
		r = error_set(e, ERROR_NOT_FOUND, "no such snapshot");
	}
	statement_end(store, s);
	return r;
}

static int expect_one(int changed, struct error *e)
{
	if (changed == 0)
		return error_set(e, ERROR_NOT_FOUND, "no such snapshot");
	return changed < 0 ? changed : 0;
}

int store_snapshot_rename(struct store *store, const char *id, const char *kind, const char *name, struct error *e)
{
	return expect_one(
	    statement_run(store, e, "UPDATE snapshots SET kind = ?2, name = ?3 WHERE id = ?1", "TTt", id, kind, name), e);
}

int store_snapshot_set_fingerprint(struct store *store, const char *id, const char *fingerprint, const char *boot_id,
                                   struct error *e)
{
	return expect_one(statement_run(store, e, "UPDATE snapshots SET fingerprint = ?2, boot_id = ?3 WHERE id = ?1",
	                                "TTT", id, fingerprint, boot_id),
	                  e);
}

int store_snapshot_delete(struct store *store, const char *id, uint64_t inherited, struct error *e)
{
	int r = statement_run(store, e,
	                      "UPDATE snapshots SET bytes_stored = bytes_stored + ?2 WHERE id ="
	                      " (SELECT id FROM snapshots WHERE parent = ?1 ORDER BY created_at_ms LIMIT 1)",
	                      "Ti", id, inherited);
	if (r >= 0)
		r = statement_run(
		    store, e, "UPDATE snapshots SET parent = (SELECT parent FROM snapshots WHERE id = ?1) WHERE parent = ?1",
		    "T", id);
	if (r >= 0)
		r = statement_run(store, e, "DELETE FROM snapshots WHERE id = ?", "T", id);
	return r < 0 ? r : 0;
}

int store_snapshot_each(struct store *store, const char *session_id,
                        int (*visit)(void *context, const struct store_snapshot *row), void *context, struct error *e)
{
	/* Copied first: statements are shared, and a visitor may want to use this very one. */
	struct store_snapshot *rows = NULL;
	size_t count = 0;
	size_t capacity = 0;
	sqlite3_stmt *s = statement_begin(
	    store, e,
	    "SELECT " SNAPSHOT_COLUMNS " FROM snapshots WHERE (?1 IS NULL OR session_id = ?1) ORDER BY created_at_ms, id",
	    "t", session_id);
	if (!s)
		return -EIO;
	int r;
	while ((r = statement_step(store, s, e)) == 1) {
		if (count == capacity) {
			capacity = capacity ? capacity * 2 : 64;
			struct store_snapshot *more = realloc(rows, capacity * sizeof(*rows));
			if (!more) {
				r = error_set_errno(e, ENOMEM, "snapshots");
				break;
			}
			rows = more;
		}
		snapshot_read(s, &rows[count++]);
	}
	statement_end(store, s);
	for (size_t i = 0; r == 0 && i < count; i++)
		r = visit(context, &rows[i]);
	free(rows);
	return r;
}

int store_snapshot_totals(struct store *store, uint64_t *ret_count, uint64_t *ret_bytes, struct error *e)
{
	sqlite3_stmt *s = statement_begin(store, e, "SELECT count(*), coalesce(sum(bytes_stored), 0) FROM snapshots", "");
	if (!s)
		return -EIO;
	int r = statement_step(store, s, e);
	if (r == 1) {
		*ret_count = column_u64(s, 0);
		*ret_bytes = column_u64(s, 1);
		r = 0;
	}
	statement_end(store, s);
	return r;
}
