#include <errno.h>
#include <string.h>

#include "store/statement.h"

#define KEY_COLUMNS "id, name, tenant, admin, hash, hint, created_at_ms"

static void key_read(sqlite3_stmt *s, struct store_key *ret)
{
	*ret = (struct store_key){0};
	column_text(s, 0, ret->id, sizeof(ret->id));
	column_text(s, 1, ret->name, sizeof(ret->name));
	column_text(s, 2, ret->tenant, sizeof(ret->tenant));
	ret->admin = (int)column_u64(s, 3);
	column_text(s, 4, ret->hash, sizeof(ret->hash));
	column_text(s, 5, ret->hint, sizeof(ret->hint));
	ret->created_at_ms = column_u64(s, 6);
}

int store_key_insert(struct store *store, const struct store_key *row, struct error *e)
{
	int r =
	    statement_run(store, e, "INSERT INTO keys(" KEY_COLUMNS ") VALUES(?,?,?,?,?,?,?)", "TTTiTTi", row->id,
	                  row->name, row->tenant, (uint64_t)(row->admin != 0), row->hash, row->hint, row->created_at_ms);
	return r < 0 ? r : 0;
}

int store_key_find(struct store *store, const char *hash, struct store_key *ret, struct error *e)
{
	sqlite3_stmt *s = statement_begin(store, e, "SELECT " KEY_COLUMNS " FROM keys WHERE hash = ?", "T", hash);
	if (!s)
		return -EIO;
	int r = statement_step(store, s, e);
	if (r == 1) {
		key_read(s, ret);
		r = 0;
	} else if (r == 0) {
		r = error_set(e, ERROR_NOT_FOUND, "no such key");
	}
	statement_end(store, s);
	return r;
}

int store_key_delete(struct store *store, const char *id, const char *tenant, struct error *e)
{
	int r = statement_run(store, e, "DELETE FROM keys WHERE id = ?1 AND (?2 IS NULL OR tenant = ?2)", "Tt", id, tenant);
	if (r == 0)
		return error_set(e, ERROR_NOT_FOUND, "no such key");
	return r < 0 ? r : 0;
}

int store_key_each(struct store *store, const char *tenant, int (*visit)(void *context, const struct store_key *row),
                   void *context, struct error *e)
{
	sqlite3_stmt *s = statement_begin(
	    store, e, "SELECT " KEY_COLUMNS " FROM keys WHERE (?1 IS NULL OR tenant = ?1) ORDER BY created_at_ms, id", "t",
	    tenant);
	if (!s)
		return -EIO;
	int r;
	while ((r = statement_step(store, s, e)) == 1) {
		struct store_key row;
		key_read(s, &row);
		r = visit(context, &row);
		if (r != 0)
			break;
	}
	statement_end(store, s);
	return r;
}
