#include <errno.h>
#include <string.h>

#include "store/statement.h"

#define TEMPLATE_COLUMNS                                                                                               \
	"id, name, tag, digest, retired, packages, run, control_token, engine, engine_version, accel, vcpus, "             \
	"memory_bytes,"                                                                                                    \
	" disk_bytes, bytes_stored, created_at_ms, manifest_sum, fingerprint, boot_id"

void store_template_clear(struct store_template *row)
{
	free(row->packages);
	free(row->run);
	explicit_bzero(row, sizeof(*row));
}

static int template_read(sqlite3_stmt *s, struct store_template *ret, struct error *e)
{
	int i = 0;
	*ret = (struct store_template){0};
	column_text(s, i++, ret->id, sizeof(ret->id));
	column_text(s, i++, ret->name, sizeof(ret->name));
	column_text(s, i++, ret->tag, sizeof(ret->tag));
	column_text(s, i++, ret->digest, sizeof(ret->digest));
	ret->retired = (int)column_u64(s, i++);
	ret->packages = column_text_new(s, i++);
	ret->run = column_text_new(s, i++);
	column_text(s, i++, ret->control_token, sizeof(ret->control_token));
	column_text(s, i++, ret->engine, sizeof(ret->engine));
	column_text(s, i++, ret->engine_version, sizeof(ret->engine_version));
	column_text(s, i++, ret->accel, sizeof(ret->accel));
	ret->vcpus = column_u64(s, i++);
	ret->memory_bytes = column_u64(s, i++);
	ret->disk_bytes = column_u64(s, i++);
	ret->bytes_stored = column_u64(s, i++);
	ret->created_at_ms = column_u64(s, i++);
	column_text(s, i++, ret->manifest_sum, sizeof(ret->manifest_sum));
	column_text(s, i++, ret->fingerprint, sizeof(ret->fingerprint));
	column_text(s, i++, ret->boot_id, sizeof(ret->boot_id));
	if (!ret->packages || !ret->run) {
		store_template_clear(ret);
		return error_set_errno(e, ENOMEM, "template");
	}
	return 0;
}

int store_template_insert(struct store *store, const struct store_template *row, struct error *e)
{
	int r = statement_run(store, e, "UPDATE templates SET retired = 1 WHERE name = ? AND tag = ? AND retired = 0", "TT",
	                      row->name, row->tag);
	if (r >= 0)
		r = statement_run(store, e,
		                  "INSERT INTO templates(" TEMPLATE_COLUMNS ") VALUES(?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
		                  "TTTTiTTTTTTiiiiiTTT", row->id, row->name, row->tag, row->digest,
		                  (uint64_t)(row->retired != 0), row->packages, row->run, row->control_token, row->engine,
		                  row->engine_version, row->accel, row->vcpus, row->memory_bytes, row->disk_bytes,
		                  row->bytes_stored, row->created_at_ms, row->manifest_sum, row->fingerprint, row->boot_id);
	return r < 0 ? r : 0;
}

int store_template_find(struct store *store, const char *name, struct store_template *ret, struct error *e)
{
	sqlite3_stmt *s = statement_begin(store, e,
	                                  "SELECT " TEMPLATE_COLUMNS " FROM templates WHERE id = ?1 OR digest = ?1 OR"
	                                  " (retired = 0 AND (name || ':' || tag = ?1 OR (name = ?1 AND tag = 'latest')))"
	                                  " ORDER BY retired, created_at_ms DESC LIMIT 1",
	                                  "T", name);
	if (!s)
		return -EIO;
	int r = statement_step(store, s, e);
	if (r == 1)
		r = template_read(s, ret, e);
	else if (r == 0)
		r = error_set(e, ERROR_NOT_FOUND, "no template \"%.128s\"", name);
	statement_end(store, s);
	return r;
}

int store_template_set_fingerprint(struct store *store, const char *id, const char *fingerprint, const char *boot_id,
                                   struct error *e)
{
	int r = statement_run(store, e, "UPDATE templates SET fingerprint = ?2, boot_id = ?3 WHERE id = ?1", "TTT", id,
	                      fingerprint, boot_id);
	return r < 0 ? r : 0;
}

int store_template_delete(struct store *store, const char *id, struct error *e)
{
	int r = statement_run(store, e, "DELETE FROM templates WHERE id = ?", "T", id);
	return r < 0 ? r : 0;
}

int store_template_each(struct store *store, int (*visit)(void *context, const struct store_template *row),
                        void *context, struct error *e)
{
	sqlite3_stmt *s =
	    statement_begin(store, e, "SELECT " TEMPLATE_COLUMNS " FROM templates ORDER BY created_at_ms DESC, id", "");
	if (!s)
		return -EIO;
	int r;
	while ((r = statement_step(store, s, e)) == 1) {
		struct store_template row;
		r = template_read(s, &row, e);
		if (r == 0) {
			r = visit(context, &row);
			store_template_clear(&row);
		}
		if (r != 0)
			break;
	}
	statement_end(store, s);
	return r;
}
