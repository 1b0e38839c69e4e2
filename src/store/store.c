#include "store/store.h"

#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <string.h>
#include <sys/stat.h>

#include "store/statement.h"

#define STATEMENTS_MAX 96
#define BUSY_TIMEOUT_MS 5000

struct store {
	sqlite3 *db;
	pthread_mutex_t mutex; /* recursive: held by a transaction, and again by each of its statements */
	int relaxed;           /* the present transaction is a relaxed one */
	struct {
		const char *sql;
		sqlite3_stmt *statement;
	} statements[STATEMENTS_MAX];
	size_t statement_count;
};

/* Entry n leads from user_version n to n + 1. Entries are never edited once released. */
static const char *const migrations[] = {
    "CREATE TABLE templates("
    " id TEXT PRIMARY KEY, name TEXT NOT NULL, tag TEXT NOT NULL, digest TEXT NOT NULL,"
    " retired INTEGER NOT NULL DEFAULT 0, packages TEXT NOT NULL, run TEXT NOT NULL, control_token TEXT NOT NULL,"
    " engine TEXT NOT NULL, engine_version TEXT NOT NULL, accel TEXT NOT NULL, vcpus INTEGER NOT NULL,"
    " memory_bytes INTEGER NOT NULL, disk_bytes INTEGER NOT NULL, bytes_stored INTEGER NOT NULL,"
    " created_at_ms INTEGER NOT NULL, manifest_sum TEXT NOT NULL, fingerprint TEXT NOT NULL, boot_id TEXT NOT NULL"
    ") STRICT;"
    "CREATE UNIQUE INDEX templates_name ON templates(name, tag) WHERE retired = 0;"
    "CREATE TABLE sessions("
    " id TEXT PRIMARY KEY, tenant TEXT NOT NULL, name TEXT, template_id TEXT NOT NULL, template_name TEXT NOT NULL,"
    " template_digest TEXT NOT NULL, state TEXT NOT NULL, reason_code TEXT, reason TEXT,"
    " lost_since_ms INTEGER NOT NULL, labels TEXT NOT NULL, environment TEXT NOT NULL, timeout_s INTEGER NOT NULL,"
    " on_timeout TEXT NOT NULL, end_at_ms INTEGER NOT NULL, left_ms INTEGER NOT NULL,"
    " snapshot_interval_s INTEGER NOT NULL, keep_all_s INTEGER NOT NULL, keep_hourly_s INTEGER NOT NULL,"
    " keep_daily_s INTEGER NOT NULL, wake_on_use INTEGER NOT NULL, access_token TEXT NOT NULL,"
    " machine_id TEXT NOT NULL, head TEXT, origin_session TEXT, origin_snapshot TEXT, fence INTEGER NOT NULL,"
    " vcpus INTEGER NOT NULL, memory_bytes INTEGER NOT NULL, disk_bytes INTEGER NOT NULL,"
    " created_at_ms INTEGER NOT NULL, state_at_ms INTEGER NOT NULL, started_at_ms INTEGER NOT NULL"
    ") STRICT;"
    "CREATE UNIQUE INDEX sessions_name ON sessions(tenant, name) WHERE name IS NOT NULL;"
    "CREATE INDEX sessions_created ON sessions(created_at_ms, id);"
    "CREATE INDEX sessions_template ON sessions(template_id) WHERE head IS NULL;"
    "CREATE TABLE snapshots("
    " id TEXT PRIMARY KEY, session_id TEXT NOT NULL REFERENCES sessions(id) ON DELETE CASCADE, parent TEXT,"
    " kind TEXT NOT NULL, name TEXT, control_token TEXT NOT NULL, engine TEXT NOT NULL, engine_version TEXT NOT NULL,"
    " accel TEXT NOT NULL, vcpus INTEGER NOT NULL, memory_bytes INTEGER NOT NULL, disk_bytes INTEGER NOT NULL,"
    " bytes_stored INTEGER NOT NULL, changed_bytes INTEGER NOT NULL, stall_us INTEGER NOT NULL,"
    " created_at_ms INTEGER NOT NULL, manifest_sum TEXT NOT NULL, fingerprint TEXT NOT NULL, boot_id TEXT NOT NULL"
    ") STRICT;"
    "CREATE INDEX snapshots_session ON snapshots(session_id, created_at_ms);"
    "CREATE INDEX snapshots_parent ON snapshots(parent) WHERE parent IS NOT NULL;"
    "CREATE TABLE sandboxes("
    " id TEXT PRIMARY KEY, session_id TEXT REFERENCES sessions(id) ON DELETE CASCADE, fence INTEGER NOT NULL,"
    " base TEXT NOT NULL, base_sum TEXT NOT NULL, control_token TEXT NOT NULL, previous_control_token TEXT,"
    " created_at_ms INTEGER NOT NULL"
    ") STRICT;"
    /* At most one live sandbox a session. */
    "CREATE UNIQUE INDEX sandboxes_session ON sandboxes(session_id) WHERE session_id IS NOT NULL;"
    "CREATE TABLE keys("
    " id TEXT PRIMARY KEY, name TEXT NOT NULL, tenant TEXT NOT NULL, admin INTEGER NOT NULL, hash TEXT NOT NULL UNIQUE,"
    " hint TEXT NOT NULL, created_at_ms INTEGER NOT NULL"
    ") STRICT;",
};

static int store_fail(struct store *store, struct error *e, int rc, const char *what)
{
	const char *text = store->db ? sqlite3_errmsg(store->db) : sqlite3_errstr(rc);
	switch (rc & 0xff) {
	case SQLITE_FULL:
		return error_set(e, ERROR_NO_SPACE, "%s: the disk that holds the database is full", what);
	case SQLITE_CONSTRAINT:
		return error_set(e, ERROR_CONFLICT, "%s: %s", what, text);
	case SQLITE_CORRUPT:
	case SQLITE_NOTADB:
		return error_set(e, ERROR_DAMAGED, "%s: the database is damaged: %s", what, text);
	case SQLITE_NOMEM:
		return error_set_errno(e, ENOMEM, "%s", what);
	case SQLITE_BUSY:
	case SQLITE_LOCKED:
		return error_set(e, ERROR_UNAVAILABLE, "%s: the database is in use by another process", what);
	default:
		return error_set(e, ERROR_INTERNAL, "%s: %s", what, text);
	}
}

static int run_sql(struct store *store, const char *sql, struct error *e)
{
	int rc = sqlite3_exec(store->db, sql, NULL, NULL, NULL);
	return rc == SQLITE_OK ? 0 : store_fail(store, e, rc, "database");
}

static int migrate(struct store *store, struct error *e)
{
	sqlite3_stmt *statement;
	int rc = sqlite3_prepare_v2(store->db, "PRAGMA user_version", -1, &statement, NULL);
	if (rc != SQLITE_OK)
		return store_fail(store, e, rc, "database");
	rc = sqlite3_step(statement);
	int version = rc == SQLITE_ROW ? sqlite3_column_int(statement, 0) : -1;
	sqlite3_finalize(statement);
	if (version < 0)
		return store_fail(store, e, rc, "database");
	if ((size_t)version > ARRAY_SIZE(migrations))
		return error_set(e, ERROR_UNSUPPORTED, "the database has format %d, this program knows up to %zu", version,
		                 ARRAY_SIZE(migrations));
	for (size_t i = (size_t)version; i < ARRAY_SIZE(migrations); i++) {
		char bump[64];
		text_format(bump, sizeof(bump), "PRAGMA user_version = %zu", i + 1);
		int r = run_sql(store, "BEGIN IMMEDIATE", e);
		if (r == 0)
			r = run_sql(store, migrations[i], e);
		if (r == 0)
			r = run_sql(store, bump, e);
		if (r == 0)
			r = run_sql(store, "COMMIT", e);
		if (r < 0) {
			sqlite3_exec(store->db, "ROLLBACK", NULL, NULL, NULL);
			return error_prefix(e, "bringing the database to format %zu", i + 1);
		}
	}
	return 0;
}

int store_open(const char *path, struct store **ret, struct error *e)
{
	struct store *store = calloc(1, sizeof(*store));
	if (!store)
		return error_set_errno(e, ENOMEM, "store");
	pthread_mutexattr_t attributes;
	pthread_mutexattr_init(&attributes);
	pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_RECURSIVE);
	pthread_mutex_init(&store->mutex, &attributes);
	pthread_mutexattr_destroy(&attributes);
	/* Tokens are in it: nobody else may read it, whatever the umask. */
	mode_t mask = umask(077);
	int rc =
	    sqlite3_open_v2(path, &store->db,
	                    SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_NOMUTEX | SQLITE_OPEN_EXRESCODE, NULL);
	int r = rc == SQLITE_OK ? 0 : store_fail(store, e, rc, path);
	if (r == 0) {
		sqlite3_busy_timeout(store->db, BUSY_TIMEOUT_MS);
		sqlite3_db_config(store->db, SQLITE_DBCONFIG_DEFENSIVE, 1, NULL);
		r = run_sql(store,
		            "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA foreign_keys = ON;"
		            "PRAGMA cache_size = -1024; PRAGMA temp_store = MEMORY; PRAGMA journal_size_limit = 4194304;",
		            e);
	}
	if (r == 0)
		r = migrate(store, e);
	umask(mask);
	if (r < 0) {
		error_prefix(e, "opening %s", path);
		store_close(store);
		return r;
	}
	*ret = store;
	return 0;
}

void store_close(struct store *store)
{
	if (!store)
		return;
	for (size_t i = 0; i < store->statement_count; i++)
		sqlite3_finalize(store->statements[i].statement);
	sqlite3_close(store->db);
	pthread_mutex_destroy(&store->mutex);
	free(store);
}

int store_begin(struct store *store, enum store_durability durability, struct error *e)
{
	pthread_mutex_lock(&store->mutex);
	int r = 0;
	if (durability == STORE_RELAXED)
		r = run_sql(store, "PRAGMA synchronous = NORMAL", e);
	store->relaxed = durability == STORE_RELAXED;
	if (r == 0)
		r = run_sql(store, "BEGIN IMMEDIATE", e);
	if (r < 0) {
		if (store->relaxed)
			sqlite3_exec(store->db, "PRAGMA synchronous = FULL", NULL, NULL, NULL);
		pthread_mutex_unlock(&store->mutex);
	}
	return r;
}

static void transaction_end(struct store *store)
{
	if (store->relaxed)
		sqlite3_exec(store->db, "PRAGMA synchronous = FULL", NULL, NULL, NULL);
	store->relaxed = 0;
	pthread_mutex_unlock(&store->mutex);
}

int store_commit(struct store *store, struct error *e)
{
	int r = run_sql(store, "COMMIT", e);
	if (r < 0)
		sqlite3_exec(store->db, "ROLLBACK", NULL, NULL, NULL);
	transaction_end(store);
	return r;
}

void store_rollback(struct store *store)
{
	sqlite3_exec(store->db, "ROLLBACK", NULL, NULL, NULL);
	transaction_end(store);
}

int store_check(struct store *store, struct error *e)
{
	sqlite3_stmt *s = statement_begin(store, e, "PRAGMA quick_check(1)", "");
	if (!s)
		return e ? error_code_errno(e->code) : -EIO;
	int r = statement_step(store, s, e);
	if (r == 1) {
		char text[256];
		column_text(s, 0, text, sizeof(text));
		r = strcmp(text, "ok") == 0 ? 0 : error_set(e, ERROR_DAMAGED, "database: %s", text);
	}
	statement_end(store, s);
	return r;
}

static sqlite3_stmt *statement_find(struct store *store, const char *sql, struct error *e)
{
	for (size_t i = 0; i < store->statement_count; i++)
		if (store->statements[i].sql == sql)
			return store->statements[i].statement;
	if (store->statement_count == STATEMENTS_MAX) {
		error_set(e, ERROR_INTERNAL, "more than %d kinds of statement", STATEMENTS_MAX);
		return NULL;
	}
	sqlite3_stmt *statement;
	int rc = sqlite3_prepare_v3(store->db, sql, -1, SQLITE_PREPARE_PERSISTENT, &statement, NULL);
	if (rc != SQLITE_OK) {
		store_fail(store, e, rc, "database");
		return NULL;
	}
	store->statements[store->statement_count].sql = sql;
	store->statements[store->statement_count++].statement = statement;
	return statement;
}

static int bind_all(struct store *store, sqlite3_stmt *statement, const char *types, va_list args, struct error *e)
{
	for (int i = 0; types[i]; i++) {
		int rc;
		if (types[i] == 'i') {
			rc = sqlite3_bind_int64(statement, i + 1, (sqlite3_int64)va_arg(args, uint64_t));
		} else {
			const char *text = va_arg(args, const char *);
			if (types[i] == 't' && text && !*text)
				text = NULL;
			rc = text ? sqlite3_bind_text(statement, i + 1, text, -1, SQLITE_TRANSIENT)
			          : sqlite3_bind_null(statement, i + 1);
		}
		if (rc != SQLITE_OK)
			return store_fail(store, e, rc, "database");
	}
	return 0;
}

static sqlite3_stmt *statement_begin_args(struct store *store, struct error *e, const char *sql, const char *types,
                                          va_list args)
{
	pthread_mutex_lock(&store->mutex);
	sqlite3_stmt *statement = statement_find(store, sql, e);
	if (statement && bind_all(store, statement, types, args, e) < 0) {
		sqlite3_clear_bindings(statement);
		statement = NULL;
	}
	if (!statement)
		pthread_mutex_unlock(&store->mutex);
	return statement;
}

sqlite3_stmt *statement_begin(struct store *store, struct error *e, const char *sql, const char *types, ...)
{
	va_list args;
	va_start(args, types);
	sqlite3_stmt *statement = statement_begin_args(store, e, sql, types, args);
	va_end(args);
	return statement;
}

void statement_end(struct store *store, sqlite3_stmt *statement)
{
	sqlite3_reset(statement);
	sqlite3_clear_bindings(statement);
	pthread_mutex_unlock(&store->mutex);
}

int statement_step(struct store *store, sqlite3_stmt *statement, struct error *e)
{
	int rc = sqlite3_step(statement);
	if (rc == SQLITE_ROW)
		return 1;
	if (rc == SQLITE_DONE)
		return 0;
	return store_fail(store, e, rc, "database");
}

int statement_run(struct store *store, struct error *e, const char *sql, const char *types, ...)
{
	struct error local;
	va_list args;
	va_start(args, types);
	sqlite3_stmt *statement = statement_begin_args(store, e ? e : &local, sql, types, args);
	va_end(args);
	if (!statement)
		return error_code_errno((e ? e : &local)->code);
	int r = statement_step(store, statement, e);
	if (r == 0)
		r = sqlite3_changes(store->db);
	statement_end(store, statement);
	return r;
}

void column_text(sqlite3_stmt *statement, int column, char *to, size_t size)
{
	const char *text = (const char *)sqlite3_column_text(statement, column);
	if (text_copy(to, size, text ? text : "") < 0)
		to[0] = '\0'; /* cannot happen: every field was checked against the same size before it was stored */
}

char *column_text_new(sqlite3_stmt *statement, int column)
{
	const char *text = (const char *)sqlite3_column_text(statement, column);
	return strdup(text ? text : "");
}

uint64_t column_u64(sqlite3_stmt *statement, int column)
{
	return (uint64_t)sqlite3_column_int64(statement, column);
}
