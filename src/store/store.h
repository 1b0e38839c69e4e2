/*
 * The store: what is known about sessions, snapshots, templates, sandboxes and keys, in one SQLite file.
 *
 * One connection serves all threads, one call at a time: every statement here touches a handful of rows through an
 * index, so a queue at a mutex costs less than a pool of readers and its page caches would. A thread that has begun a
 * transaction keeps the mutex until it commits or rolls back.
 *
 * Durability: the file is in WAL mode. A durable transaction is synced before its commit returns (synchronous=FULL):
 * everything a caller is told to have succeeded. A relaxed one (synchronous=NORMAL) survives the death of this process
 * but may be missing after a power failure: it is for facts that a power failure makes void anyway (which sandbox
 * runs which session). The next durable commit makes earlier relaxed ones durable too, since they share the log.
 *
 * Errors: ERROR_NOT_FOUND, ERROR_CONFLICT (a uniqueness rule), ERROR_NO_SPACE, ERROR_DAMAGED, ERROR_INTERNAL. Text
 * fields are NUL-terminated; an empty string stands for "none" and is stored as NULL where the column allows it.
 */
#ifndef SPACE_STORE_STORE_H
#define SPACE_STORE_STORE_H

#include "base/error.h"
#include "base/text.h"

struct store;

#define STORE_TENANT_BYTES 64
#define STORE_NAME_BYTES 64
#define STORE_TEMPLATE_NAME_BYTES 136 /* name:tag */
#define STORE_DIGEST_BYTES 72         /* "sha256:" and 64 hex digits */
#define STORE_REASON_BYTES 512
#define STORE_SUM_BYTES 40 /* 32 hex digits */
#define STORE_BOOT_ID_BYTES 40
#define STORE_FINGERPRINT_BYTES 512

int store_open(const char *path, struct store **ret, struct error *e);
void store_close(struct store *store);

enum store_durability { STORE_DURABLE, STORE_RELAXED };
int store_begin(struct store *store, enum store_durability durability, struct error *e);
/* Ends the transaction in any case; on failure nothing of it remains. */
int store_commit(struct store *store, struct error *e);
void store_rollback(struct store *store);
/* Checks the whole file; ERROR_DAMAGED with SQLite's finding. */
int store_check(struct store *store, struct error *e);

struct store_session {
	char id[ID_BYTES];
	char tenant[STORE_TENANT_BYTES];
	char name[STORE_NAME_BYTES];
	char template_id[ID_BYTES];
	char template_name[STORE_TEMPLATE_NAME_BYTES];
	char template_digest[STORE_DIGEST_BYTES];
	char state[16];
	char reason_code[32]; /* why it is in this state if it was not asked for; "" = it was */
	char reason[STORE_REASON_BYTES];
	uint64_t lost_since_ms; /* what happened after this time was lost with a sandbox; 0 = nothing */
	char *labels;           /* JSON objects, owned */
	char *environment;
	uint64_t timeout_s; /* 0 = none */
	char on_timeout[8];
	uint64_t end_at_ms; /* while running with a timeout, else 0 */
	uint64_t left_ms;   /* while paused with a timeout: what was left of it */
	uint64_t snapshot_interval_s;
	uint64_t keep_all_s; /* retention, see retention.c */
	uint64_t keep_hourly_s;
	uint64_t keep_daily_s;
	int wake_on_use;
	char access_token[TOKEN_BYTES];
	char machine_id[33];
	char head[ID_BYTES]; /* snapshot it would wake from; "" = from its template */
	char origin_session[ID_BYTES];
	char origin_snapshot[ID_BYTES];
	uint64_t fence; /* counts the sandboxes it has had; a sandbox with an older number has no say */
	uint64_t vcpus;
	uint64_t memory_bytes;
	uint64_t disk_bytes;
	uint64_t created_at_ms;
	uint64_t state_at_ms;
	uint64_t started_at_ms; /* last time it began to run in a new sandbox */
};
void store_session_clear(struct store_session *row);
/* Copies; ret is overwritten, not freed. -ENOMEM leaves it cleared. */
int store_session_copy(const struct store_session *row, struct store_session *ret);

int store_session_insert(struct store *store, const struct store_session *row, struct error *e);
/* Writes every column that may change. ERROR_CONFLICT if the stored fence is greater than the row's. */
int store_session_update(struct store *store, const struct store_session *row, struct error *e);
int store_session_get(struct store *store, const char *id, struct store_session *ret, struct error *e);
int store_session_find(struct store *store, const char *tenant, const char *name, struct store_session *ret,
                       struct error *e);
/* Its snapshot and sandbox rows go with it. Succeeds if there is none. */
int store_session_delete(struct store *store, const char *id, struct error *e);
int store_session_count(struct store *store, uint64_t *ret, struct error *e);
/* Rows in order of creation, after `after_ms`/`after_id` (0/"" = from the start); each row is valid during the call
 * only. A visitor that returns other than 0 ends the walk, which then returns that value. tenant NULL = all. */
int store_session_each(struct store *store, const char *tenant, uint64_t after_ms, const char *after_id,
                       int (*visit)(void *context, const struct store_session *row), void *context, struct error *e);
/* How many sessions would wake from this template because they have no snapshot yet. */
int store_session_count_on_template(struct store *store, const char *template_id, uint64_t *ret, struct error *e);

struct store_snapshot {
	char id[ID_BYTES];
	char session_id[ID_BYTES];
	char parent[ID_BYTES];
	char kind[16]; /* rolling, manual, suspend, branch, rewind */
	char name[STORE_NAME_BYTES];
	char control_token[TOKEN_BYTES]; /* what the guest's agent in it expects */
	char engine[16];
	char engine_version[32];
	char accel[8];
	uint64_t vcpus;
	uint64_t memory_bytes;
	uint64_t disk_bytes;
	uint64_t bytes_stored; /* what keeping it costs beyond its parent */
	uint64_t changed_bytes;
	uint64_t stall_us;
	uint64_t created_at_ms; /* the instant it shows */
	char manifest_sum[STORE_SUM_BYTES];
	char fingerprint[STORE_FINGERPRINT_BYTES]; /* of files known to match their checksums; see seal.c */
	char boot_id[STORE_BOOT_ID_BYTES];         /* host boot during which that was found */
};
int store_snapshot_insert(struct store *store, const struct store_snapshot *row, struct error *e);
int store_snapshot_get(struct store *store, const char *id, struct store_snapshot *ret, struct error *e);
int store_snapshot_rename(struct store *store, const char *id, const char *kind, const char *name, struct error *e);
int store_snapshot_set_fingerprint(struct store *store, const char *id, const char *fingerprint, const char *boot_id,
                                   struct error *e);
/* Children become children of its parent; `inherited` bytes of what it stored are added to one of them. */
int store_snapshot_delete(struct store *store, const char *id, uint64_t inherited, struct error *e);
/* Oldest first. The rows are copied before the first visit, so a visitor may call the store. session_id NULL = all. */
int store_snapshot_each(struct store *store, const char *session_id,
                        int (*visit)(void *context, const struct store_snapshot *row), void *context, struct error *e);
int store_snapshot_totals(struct store *store, uint64_t *ret_count, uint64_t *ret_bytes, struct error *e);

struct store_template {
	char id[ID_BYTES];
	char name[STORE_NAME_BYTES];
	char tag[STORE_NAME_BYTES];
	char digest[STORE_DIGEST_BYTES];
	int retired;    /* another one has taken its name; still reachable by id and digest */
	char *packages; /* JSON arrays, owned */
	char *run;
	char control_token[TOKEN_BYTES];
	char engine[16];
	char engine_version[32];
	char accel[8];
	uint64_t vcpus;
	uint64_t memory_bytes;
	uint64_t disk_bytes;
	uint64_t bytes_stored;
	uint64_t created_at_ms;
	char manifest_sum[STORE_SUM_BYTES];
	char fingerprint[STORE_FINGERPRINT_BYTES];
	char boot_id[STORE_BOOT_ID_BYTES];
};
void store_template_clear(struct store_template *row);
/* Retires the one that had the name before. */
int store_template_insert(struct store *store, const struct store_template *row, struct error *e);
/* `name` is NAME:TAG, NAME (then tag "latest"), an id or a digest. */
int store_template_find(struct store *store, const char *name, struct store_template *ret, struct error *e);
int store_template_set_fingerprint(struct store *store, const char *id, const char *fingerprint, const char *boot_id,
                                   struct error *e);
int store_template_delete(struct store *store, const char *id, struct error *e);
/* Newest first; rows are valid during the visit. A visitor must not call the store. */
int store_template_each(struct store *store, int (*visit)(void *context, const struct store_template *row),
                        void *context, struct error *e);

struct store_sandbox {
	char id[ID_BYTES];
	char session_id[ID_BYTES]; /* "" = waits in the warm pool */
	uint64_t fence;
	char base[ID_BYTES];            /* snapshot or template it was restored from */
	char base_sum[STORE_SUM_BYTES]; /* its manifest's checksum */
	char control_token[TOKEN_BYTES];
	char previous_control_token[TOKEN_BYTES]; /* until the guest has confirmed the present one */
	uint64_t created_at_ms;
};
/* The lease. ERROR_CONFLICT if the session has a sandbox already. */
int store_sandbox_insert(struct store *store, const struct store_sandbox *row, struct error *e);
int store_sandbox_update(struct store *store, const struct store_sandbox *row, struct error *e);
int store_sandbox_delete(struct store *store, const char *id, struct error *e);
/* Rows are copied first; a visitor may call the store. */
int store_sandbox_each(struct store *store, int (*visit)(void *context, const struct store_sandbox *row), void *context,
                       struct error *e);

#define STORE_KEY_HASH_BYTES 65
struct store_key {
	char id[ID_BYTES];
	char name[STORE_NAME_BYTES];
	char tenant[STORE_TENANT_BYTES];
	int admin;
	char hash[STORE_KEY_HASH_BYTES]; /* SHA-256 of the key, hex */
	char hint[16];                   /* last characters, for people */
	uint64_t created_at_ms;
};
int store_key_insert(struct store *store, const struct store_key *row, struct error *e);
int store_key_find(struct store *store, const char *hash, struct store_key *ret, struct error *e);
int store_key_delete(struct store *store, const char *id, const char *tenant, struct error *e); /* tenant NULL = any */
int store_key_each(struct store *store, const char *tenant, int (*visit)(void *context, const struct store_key *row),
                   void *context, struct error *e);

#endif
