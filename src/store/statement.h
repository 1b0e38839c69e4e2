/* Inside the store only: prepared statements with their parameters, and columns into fixed fields. */
#ifndef SPACE_STORE_STATEMENT_H
#define SPACE_STORE_STATEMENT_H

#include <sqlite3.h>

#include "store/store.h"

/*
 * Takes the mutex and returns a bound statement ready to be stepped, or NULL with *e set and the mutex released.
 * `sql` must be a literal: statements are kept by its address. One letter of `types` a parameter: t = text (NULL or ""
 * become NULL), T = text that is never NULL, i = uint64_t. statement_end() must follow.
 */
sqlite3_stmt *statement_begin(struct store *store, struct error *e, const char *sql, const char *types, ...);
/* Resets the statement and releases the mutex. */
void statement_end(struct store *store, sqlite3_stmt *statement);
/* Steps: 1 = a row, 0 = done, -errno. */
int statement_step(struct store *store, sqlite3_stmt *statement, struct error *e);
/* Runs one statement without rows; returns the number of rows it changed or -errno. */
int statement_run(struct store *store, struct error *e, const char *sql, const char *types, ...);

void column_text(sqlite3_stmt *statement, int column, char *to, size_t size);
/* New string ("" for NULL), or NULL without memory. */
char *column_text_new(sqlite3_stmt *statement, int column);
uint64_t column_u64(sqlite3_stmt *statement, int column);

#endif
