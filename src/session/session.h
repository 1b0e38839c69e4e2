/*
 * The session manager: every state and verb of a session, for the API and nobody else.
 *
 * All calls block (they do database, helper, VMM and agent work) and are thread-safe: call them on worker threads.
 * Verbs on one session are serialised; a failed verb leaves the former state and a reason. Parameters and answers are
 * JSON objects of the REST interface (docs/openapi.yaml): this room checks every field and refuses unknown ones with
 * ERROR_INVALID and the field's name. Returned json_t references are the caller's.
 */
#ifndef SPACE_SESSION_SESSION_H
#define SPACE_SESSION_SESSION_H

#include <jansson.h>

#include "base/error.h"
#include "base/text.h"
#include "host/client.h"

struct session_manager;

struct session_config {
	const char *data_dir;    /* holds space.db and pool/ */
	const char *runtime_dir; /* holds sandboxes/ID/ */
	const char *helper_socket;
	unsigned pool_size;             /* warm sandboxes kept for the default template; 0 = none */
	unsigned spares;                /* VMMs kept started up for restores; 0 = none */
	unsigned snapshot_interval_s;   /* default of new sessions; 0 = no rolling snapshots */
	uint64_t snapshot_budget_bytes; /* host budget for snapshots, kept by thinning; 0 = 80 % of the file system */
	uint64_t default_timeout_s;     /* 0 = none */
	unsigned sessions_max;          /* all states together */
	unsigned sandboxes_max;         /* running at once */
	const char *agent_path;         /* guest agent binary for template builds */
};

/* Opens store and pool, removes half-written files, adopts running sandboxes, starts scheduler and pool. */
int session_manager_new(const struct session_config *config, struct session_manager **ret, struct error *e);
/* Waits for verbs in progress; leaves sandboxes running so that the next start adopts them. */
void session_manager_free(struct session_manager *manager);

/* Who asks. An operator (local socket, admin key) sees everything; a tenant only its own, all else is "not found". */
struct session_caller {
	char tenant[64];
	int is_admin;
};

enum session_verb {
	SESSION_PAUSE,
	SESSION_RESUME,
	SESSION_SUSPEND,
	SESSION_WAKE,
	SESSION_CONNECT, /* whatever gets it running; may extend the timeout, never shorten it */
	SESSION_SNAPSHOT,
	SESSION_BRANCH,
	SESSION_REWIND,
	SESSION_DELETE,
	SESSION_UPDATE, /* name, labels, timeout, on_timeout, snapshot settings */
	SESSION_VERB_COUNT
};
const char *session_verb_name(enum session_verb verb);
int session_verb_from_name(const char *name); /* or -EINVAL */

int session_create(struct session_manager *m, const struct session_caller *who, const json_t *params, json_t **ret,
                   struct error *e);
/* `id` may be a unique name of the caller's as well. */
int session_do(struct session_manager *m, const struct session_caller *who, const char *id, enum session_verb verb,
               const json_t *params, json_t **ret, struct error *e);
int session_get(struct session_manager *m, const struct session_caller *who, const char *id, json_t **ret,
                struct error *e);
/* filter: {"state": ["running",…], "labels": {k:v}, "name", "limit": 1…1000, "cursor"} → {"sessions": […],
 * "next_cursor"} */
int session_list(struct session_manager *m, const struct session_caller *who, const json_t *filter, json_t **ret,
                 struct error *e);
/* {"head", "snapshots": [{"id","parent","created_at","kind","name","bytes_stored","state",…}]} oldest first. */
int session_history(struct session_manager *m, const struct session_caller *who, const char *id, json_t **ret,
                    struct error *e);
int session_snapshot_delete(struct session_manager *m, const struct session_caller *who, const char *id,
                            const char *snapshot_id, struct error *e);

/*
 * A way in for proxied traffic (agent calls, guest ports). Counts as use: wakes a suspended or paused session unless
 * the session has wake_on_use off or `wake` is 0 (then ERROR_CONFLICT). The connection is a fresh TCP connection to the
 * guest's agent port. Ends with session_close(), which must be called once for each success; while any is open the
 * session's idle time does not count.
 */
struct session_endpoint {
	int fd; /* connected, blocking; the caller's */
	char session_id[ID_BYTES];
	char access_token[TOKEN_BYTES]; /* for X-Access-Token; what E2B clients know as envdAccessToken */
};
int session_open(struct session_manager *m, const struct session_caller *who, const char *id, int wake,
                 struct session_endpoint *ret, struct error *e);
void session_close(struct session_manager *m, const char *session_id);

/* Templates. Build takes long: `progress` gets lines of text on the calling thread. params: {"name","packages":[],
 * "run":[],"size_bytes","memory_bytes","vcpus"} */
int template_build(struct session_manager *m, const struct session_caller *who, const json_t *params,
                   void (*progress)(void *context, const char *line), void *context, json_t **ret, struct error *e);
int template_list(struct session_manager *m, const struct session_caller *who, json_t **ret, struct error *e);
int template_get(struct session_manager *m, const struct session_caller *who, const char *name, json_t **ret,
                 struct error *e);
int template_delete(struct session_manager *m, const struct session_caller *who, const char *name, struct error *e);

/* API keys: "e2b_" and 40 hex characters; only a hash is stored. params: {"name","tenant","admin"} → {"id","key",…} */
int key_create(struct session_manager *m, const struct session_caller *who, const json_t *params, json_t **ret,
               struct error *e);
int key_list(struct session_manager *m, const struct session_caller *who, json_t **ret, struct error *e);
int key_delete(struct session_manager *m, const struct session_caller *who, const char *id, struct error *e);
/* ERROR_UNAUTHENTICATED for an unknown key. Constant work whether or not it exists. */
int key_authenticate(struct session_manager *m, const char *key, struct session_caller *ret, struct error *e);

/* Called for every event {"id": monotonic number, "type": "session.running", "time", "session_id", "tenant", …} from
 * any thread; must be quick. Set before traffic starts. */
void session_set_event_sink(struct session_manager *m, void (*sink)(void *context, const json_t *event), void *context);
/* Appends Prometheus text exposition of counters and gauges. */
struct buf;
int session_metrics(struct session_manager *m, struct buf *ret);
/* {"checks":[{"name","status","text"}…]} : engine, acceleration, storage, limits, helper. */
int session_doctor(struct session_manager *m, json_t **ret, struct error *e);

#endif
