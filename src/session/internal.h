/*
 * Inside the session room: what its files share.
 *
 * Threads: verbs run on the caller's thread. A session's entry (struct session) is shared; `turn` serialises verbs on
 * it in order of arrival, `mutex` guards its fields for the short moments of reading and changing them. Only the
 * holder of the turn changes row, state and sandbox, and does so under the mutex; so the holder may read them without.
 * Order of locks: turn of a session, then manager->mutex, then session->mutex; the store's mutex comes last. Nobody
 * waits for the turn of a second session while holding one, except a branch for the sessions it has just made, which
 * nobody else can be waiting for.
 */
#ifndef SPACE_SESSION_INTERNAL_H
#define SPACE_SESSION_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

#include "session/guest_client.h"
#include "session/metrics.h"
#include "session/pool.h"
#include "session/session.h"
#include "session/state.h"
#include "store/store.h"
#include "vmm/vmm.h"

#define SESSION_TEMPLATE_DEFAULT "default"
#define SESSION_BUCKETS 256
#define SESSION_LABELS_MAX 64
#define SESSION_ENVIRONMENT_MAX 256
#define SESSION_ENVIRONMENT_BYTES_MAX 262144
#define SESSION_TIMEOUT_S_MAX (UINT64_C(10) * 365 * 86400)
#define SESSION_BRANCH_MAX 64
#define SESSION_STREAMS_MAX 4096 /* open ways into one session */
#define SESSION_WARM_MAX 64

/* Times given to a guest, generous for a host that is short of CPU. */
#define GUEST_START_TIMEOUT_MS 20000
#define GUEST_CALL_TIMEOUT_MS 10000
#define GUEST_QUIESCE_TIMEOUT_MS 5000

/* What a sandbox is restored from: a snapshot or a template. */
struct base {
	char id[ID_BYTES];
	int is_template;
	char template_id[ID_BYTES]; /* what it stems from, "" if unknown */
	int folder_fd;              /* owned */
	char control_token[TOKEN_BYTES];
	char engine[16];
	char engine_version[32];
	char accel[8];
	char manifest_sum[STORE_SUM_BYTES];
	uint64_t vcpus;
	uint64_t memory_bytes;
	uint64_t disk_bytes;
	uint64_t created_at_ms;
};

struct sandbox {
	struct sandbox *next; /* in the warm pool */
	struct store_sandbox row;
	struct vmm *vmm;
	struct guest guest;
	int folder_fd; /* pool/sandboxes/ID: memory (link to the base's), disk (own), checksums (link) */
	int memory_fd;
	int disk_fd;
	uint64_t vcpus;
	uint64_t memory_bytes;
	uint64_t disk_bytes;
	char template_id[ID_BYTES]; /* of a pooled one */
	int is_measured;            /* only the pages it touches are read from its memory file (hot_pages.h) */
	/* The guest's counters at its last snapshot: unchanged ones mean that there is nothing to take. */
	int seen_valid;
	uint64_t seen_cpu_us;
	uint64_t seen_writes;
	/* Sums of the pages it has changed, as of the snapshot `sums_of`; NULL = none yet. */
	uint64_t *page_sums;
	char sums_of[ID_BYTES];
};

struct session {
	struct session *next;
	unsigned refs; /* guarded by the manager's mutex */
	char id[ID_BYTES];

	pthread_mutex_t mutex;
	pthread_cond_t changed;
	uint64_t next_ticket;
	uint64_t serving;

	enum session_state state;
	struct store_session row;
	struct sandbox *sandbox;
	int gone;             /* deleted; whoever still holds the entry gets "not found" */
	atomic_int canceled;  /* a delete waits: a start in progress gives up at its next step */
	uint64_t snapshot_at; /* monotonic ms of the last attempt at a rolling snapshot */
	uint64_t retry_at;    /* monotonic ms before which a failed timeout is not tried again */
	int job_pending;      /* the scheduler has work for it under way */
	struct {
		int fd;
		ino_t inode;
	} * streams;
	size_t stream_count;
	size_t stream_capacity;
	uint64_t open_count;
};

struct session_manager {
	struct session_config config; /* strings owned */
	struct store *store;
	struct host_client *helper;
	struct pool pool;
	struct vmm_host host;
	char host_why[256];
	char boot_id[STORE_BOOT_ID_BYTES];
	int runtime_fd; /* RUNTIME_DIR/sandboxes */
	char runtime_path[512];

	pthread_mutex_t mutex;
	pthread_cond_t idle; /* a start slot or an entry was freed */
	struct session *buckets[SESSION_BUCKETS];
	unsigned starts; /* sandboxes being started now */
	unsigned starts_max;
	unsigned sandboxes; /* alive, pooled ones included */
	int stopping;

	struct jobs *jobs;
	struct scheduler *scheduler;
	struct warm_pool *warm;
	struct spares *spares;
	struct metrics metrics;

	void (*sink)(void *context, const json_t *event);
	void *sink_context;
	_Atomic uint64_t event_id;
	pthread_mutex_t build_mutex; /* one template build at a time */
	int building;
};

/* entries.c: the table of sessions in use. */
/* Finds or loads the entry; ERROR_NOT_FOUND. session_release() must follow. */
int session_acquire(struct session_manager *m, const char *id, struct session **ret, struct error *e);
/* By id or name, for a caller; what is not his is "not found". */
int session_acquire_for(struct session_manager *m, const struct session_caller *who, const char *id,
                        struct session **ret, struct error *e);
/* Puts a new entry into the table; takes over the row. */
int session_enter(struct session_manager *m, struct store_session *row, enum session_state state, struct session **ret,
                  struct error *e);
void session_release(struct session_manager *m, struct session *s);
/* All entries that have a sandbox, referenced; free() the array. */
int session_acquire_live(struct session_manager *m, struct session ***ret, size_t *ret_count);

uint64_t session_take_ticket(struct session *s);
/* Waits for the turn of a ticket. -ENOENT (and the turn passed on) if the session is gone by then. */
int session_turn_wait(struct session *s, uint64_t ticket, struct error *e);
int session_turn_begin(struct session *s, struct error *e);
/* -EBUSY if others hold it or wait. */
int session_turn_try(struct session *s);
void session_turn_end(struct session *s);

void session_set_state(struct session *s, enum session_state state);
/* Stores a changed copy of the row, then makes it the session's. Takes over `row` (cleared on failure). */
int session_commit_row(struct session_manager *m, struct session *s, struct store_session *row,
                       enum store_durability durability, struct error *e);
/* A copy of the row with the state and its time set and reasons cleared; for session_commit_row(). */
int session_row_for(struct session *s, enum session_state state, struct store_session *ret, struct error *e);
/* Makes `row` the session's without storing it (it has been stored within a transaction). */
void session_adopt_row(struct session *s, struct store_session *row);
int session_check_canceled(struct session *s, struct error *e);
/* Ends all connections that were handed out: their peer is gone. */
void session_cut_streams(struct session *s);
/* Sets end_at_ms for a session that starts to run now. */
void session_start_timer(struct store_session *row);

/* describe.c */
json_t *session_json(struct session_manager *m, const struct store_session *row, enum session_state state,
                     int with_token);
json_t *session_json_of(struct session_manager *m, struct session *s, int with_token);
json_t *snapshot_json(struct session_manager *m, const struct store_snapshot *row);

/* Verbs; called with the turn held, in a state that allows them (session_do() has checked the table). */
int wake_session(struct session_manager *m, struct session *s, struct error *e);
int pause_session(struct session_manager *m, struct session *s, struct error *e);
int resume_session(struct session_manager *m, struct session *s, struct error *e);
int suspend_session(struct session_manager *m, struct session *s, struct error *e);
/* `kind` as in store_snapshot; ret may be NULL. A rolling one that finds nothing changed returns 0 and ret->id "". */
int snapshot_session(struct session_manager *m, struct session *s, const char *kind, const char *name,
                     struct store_snapshot *ret, struct error *e);
int branch_session(struct session_manager *m, struct session *s, const json_t *params, json_t **ret, struct error *e);
int rewind_session(struct session_manager *m, struct session *s, const json_t *params, struct error *e);
int remove_session(struct session_manager *m, struct session *s, struct error *e);
int update_session(struct session_manager *m, struct session *s, const json_t *params, struct error *e);
/* The VMM is gone or the guest no longer answers: takes the sandbox away and makes the session `suspended`. */
void session_lost(struct session_manager *m, struct session *s, const char *code, const char *text);
/* With the turn held: if the VMM has ended and nobody has looked at that yet, does so now. True if it was lost. A
 * killed process closes its sockets before its pidfd tells its end, so what failed with ERROR_UNAVAILABLE gives it a
 * moment (SESSION_END_WAIT_MS). */
#define SESSION_END_WAIT_MS 500
int session_notice_end(struct session_manager *m, struct session *s, int wait_ms);

/* sandbox.c */
/* Opens what a session would wake from and makes sure that its files are what they were. */
int base_open_head(struct session_manager *m, const struct store_session *row, struct base *ret, struct error *e);
int base_open_snapshot(struct session_manager *m, const char *snapshot_id, struct base *ret, struct error *e);
int base_open_template(struct session_manager *m, const struct store_template *row, struct base *ret, struct error *e);
void base_close(struct base *base);
/* An empty object with a fresh id; the place it takes is reserved by the caller. */
struct sandbox *sandbox_alloc(struct session_manager *m);
/* Registers nothing in the store: the caller inserts ret->row first (sandbox_new), then starts it. */
int sandbox_new(struct session_manager *m, const struct base *base, struct sandbox **ret, struct error *e);
/* Files, VMM, device state, vCPUs run; users' processes are still frozen. On failure it is as after sandbox_new(). */
int sandbox_start(struct session_manager *m, const struct base *base, struct sandbox *sandbox, struct error *e);
int sandbox_adopt(struct session_manager *m, const struct store_sandbox *row, const struct store_session *session,
                  struct sandbox **ret, struct error *e);
/* Ends the VMM, removes files, row and the object. The object is gone in any case; what could not be removed now is
 * removed at the next start. */
void sandbox_destroy(struct session_manager *m, struct sandbox *sandbox);
/* Folders and row of a sandbox whose VMM is known to be gone. */
void sandbox_remove_traces(struct session_manager *m, const char *id);
/* Tells the guest who it is from now on and thaws it. The row's tokens are stored already. */
int sandbox_identify(struct session_manager *m, struct sandbox *sandbox, const struct store_session *row,
                     struct error *e);
/* A number of sandboxes are started at once; the others wait. */
int start_slot_take(struct session_manager *m, struct session *s, struct error *e);
void start_slot_give(struct session_manager *m);
int sandbox_reserve(struct session_manager *m, struct error *e);
void sandbox_unreserve(struct session_manager *m);

/* open.c: with the turn held, resumes or wakes it, whichever it takes; nothing to do for one that runs. */
int session_make_run(struct session_manager *m, struct session *s, struct error *e);

/* rewind.c: a snapshot of this session by id, or the newest with that name. */
int session_find_snapshot(struct session_manager *m, struct session *s, const char *wanted, struct store_snapshot *ret,
                          struct error *e);

/* create.c */
/* A new id, tokens and times. */
void session_row_identity(struct store_session *row);
int session_count_check(struct session_manager *m, uint64_t more, struct error *e);

/* wake.c */
void session_set_sandbox(struct session_manager *m, struct session *s, struct sandbox *sandbox);
/* Cuts the streams and ends the sandbox. */
void session_drop_sandbox(struct session_manager *m, struct session *s);
/* Keeps the state, but tells why the last verb failed. */
void session_note_failure(struct session_manager *m, struct session *s, const char *code, const struct error *e);
/* A new sandbox from the head, leased, identified, watched; the session's state and row are the caller's to change. */
int session_restore(struct session_manager *m, struct session *s, struct sandbox **ret, struct error *e);

/* recovery.c */
int recovery_run(struct session_manager *m, struct error *e);

/* events.c */
void event_session(struct session_manager *m, const char *type, const struct store_session *row, json_t *extra);

/* retention.c */
void retention_run(struct session_manager *m, uint64_t now_ms);
/* Called when a write met a full disk: thins what may be thinned now. `held` is the session whose turn the caller has.
 * Returns true if something was freed. */
int retention_make_room(struct session_manager *m, struct session *held);
int snapshot_remove(struct session_manager *m, const struct store_snapshot *row, struct error *e);

/* templates.c */
int template_json(const struct store_template *row, json_t **ret);
void template_collect(struct session_manager *m);

#endif
