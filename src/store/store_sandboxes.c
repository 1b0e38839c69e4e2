#include <errno.h>
#include <string.h>

#include "store/statement.h"

#define SANDBOX_COLUMNS "id, session_id, fence, base, base_sum, control_token, previous_control_token, created_at_ms"

int store_sandbox_insert(struct store *store, const struct store_sandbox *row, struct error *e)
{
	int r = statement_run(store, e, "INSERT INTO sandboxes(" SANDBOX_COLUMNS ") VALUES(?,?,?,?,?,?,?,?)", "TtiTTTti",
	                      row->id, row->session_id, row->fence, row->base, row->base_sum, row->control_token,
	                      row->previous_control_token, row->created_at_ms);
	if (r == -EBUSY && row->session_id[0])
		return error_set(e, ERROR_CONFLICT, "session %s has a live sandbox already, or is gone", row->session_id);
	return r < 0 ? r : 0;
}

int store_sandbox_update(struct store *store, const struct store_sandbox *row, struct error *e)
{
	int r =
	    statement_run(store, e,
	                  "UPDATE sandboxes SET session_id = ?2, fence = ?3, control_token = ?4,"
	                  " previous_control_token = ?5 WHERE id = ?1",
	                  "TtiTt", row->id, row->session_id, row->fence, row->control_token, row->previous_control_token);
	if (r == 0)
		return error_set(e, ERROR_NOT_FOUND, "no such sandbox");
	if (r == -EBUSY)
		return error_set(e, ERROR_CONFLICT, "session %s has a live sandbox already, or is gone", row->session_id);
	return r < 0 ? r : 0;
}

int store_sandbox_delete(struct store *store, const char *id, struct error *e)
{
	int r = statement_run(store, e, "DELETE FROM sandboxes WHERE id = ?", "T", id);
	return r < 0 ? r : 0;
}

int store_sandbox_each(struct store *store, int (*visit)(void *context, const struct store_sandbox *row), void *context,
                       struct error *e)
{
	struct store_sandbox *rows = NULL;
	size_t count = 0;
	size_t capacity = 0;
	sqlite3_stmt *s =
	    statement_begin(store, e, "SELECT " SANDBOX_COLUMNS " FROM sandboxes ORDER BY created_at_ms, id", "");
	if (!s)
		return -EIO;
	int r;
	while ((r = statement_step(store, s, e)) == 1) {
		if (count == capacity) {
			capacity = capacity ? capacity * 2 : 32;
			struct store_sandbox *more = realloc(rows, capacity * sizeof(*rows));
			if (!more) {
				r = error_set_errno(e, ENOMEM, "sandboxes");
				break;
			}
			rows = more;
		}
		struct store_sandbox *row = &rows[count++];
		*row = (struct store_sandbox){0};
		column_text(s, 0, row->id, sizeof(row->id));
		column_text(s, 1, row->session_id, sizeof(row->session_id));
		row->fence = column_u64(s, 2);
		column_text(s, 3, row->base, sizeof(row->base));
		column_text(s, 4, row->base_sum, sizeof(row->base_sum));
		column_text(s, 5, row->control_token, sizeof(row->control_token));
		column_text(s, 6, row->previous_control_token, sizeof(row->previous_control_token));
		row->created_at_ms = column_u64(s, 7);
	}
	statement_end(store, s);
	for (size_t i = 0; r == 0 && i < count; i++)
		r = visit(context, &rows[i]);
	free(rows);
	return r;
}
