/*
 * Creating a session: from the warm pool, which costs one durable transaction and one call to a guest that runs
 * already; or by restoring the template, which is the same as a wake.
 *
 * The row is committed, with its lease, before anybody hears of the session. Whoever comes after a crash finds a
 * session whose sandbox may expect the former control token still, and finishes the work (recovery.c); or, without a
 * sandbox, a session that nobody was ever told of (state "creating"), and removes it; or a pooled sandbox that took an
 * identity which was never committed: it answers to no token that is known, and is thrown away.
 */
#include <errno.h>
#include <string.h>

#include "base/log.h"
#include "http/json.h"
#include "session/internal.h"
#include "session/params.h"
#include "session/scheduler.h"
#include "session/warm_pool.h"

#define KEEP_ALL_S 3600
#define KEEP_HOURLY_S 86400
#define KEEP_DAILY_S (7 * 86400)

void session_row_identity(struct store_session *row)
{
	unsigned char id[16];
	id_make(row->id, 's');
	token_make(row->access_token);
	random_bytes(id, sizeof(id));
	text_hex(row->machine_id, id, sizeof(id));
	row->created_at_ms = time_realtime_ms();
	row->state_at_ms = row->created_at_ms;
}

int session_count_check(struct session_manager *m, uint64_t more, struct error *e)
{
	uint64_t count;
	int r = store_session_count(m->store, &count, e);
	if (r == 0 && count + more > m->config.sessions_max)
		r = error_set(e, ERROR_EXHAUSTED, "there are %llu sessions already; this host's limit is %u",
		              (unsigned long long)count, m->config.sessions_max);
	return r;
}

static int read_params(struct session_manager *m, const struct session_caller *who, const json_t *params,
                       struct store_session *row, struct store_template *template, struct error *e)
{
	static const char *const fields[] = {"template",    "name",       "environment",         "labels",
	                                     "timeout_s",   "on_timeout", "snapshot_interval_s", "retention",
	                                     "wake_on_use", NULL};
	const char *template_name = SESSION_TEMPLATE_DEFAULT;
	int r = json_check_fields(params, fields, e);
	if (r >= 0)
		r = json_read_string(params, "template", STORE_TEMPLATE_NAME_BYTES - 1, &template_name, e);
	if (r >= 0)
		r = params_read_name(params, row->name, 1, e);
	row->timeout_s = m->config.default_timeout_s;
	text_copy(row->on_timeout, sizeof(row->on_timeout), "suspend");
	row->snapshot_interval_s = m->config.snapshot_interval_s;
	row->keep_all_s = KEEP_ALL_S;
	row->keep_hourly_s = KEEP_HOURLY_S;
	row->keep_daily_s = KEEP_DAILY_S;
	row->wake_on_use = 1;
	row->labels = strdup("{}");
	row->environment = strdup("{}");
	if (!row->labels || !row->environment)
		return error_set_errno(e, ENOMEM, "session");
	if (r >= 0)
		r = params_read_policy(params, row, e);
	if (r >= 0)
		r = params_read_environment(params, row, 0, e);
	if (r >= 0)
		r = store_template_find(m->store, template_name, template, e);
	if (r < 0)
		return r;
	text_copy(row->tenant, sizeof(row->tenant), who->tenant);
	memcpy(row->template_id, template->id, sizeof(row->template_id));
	text_format(row->template_name, sizeof(row->template_name), "%s:%s", template->name, template->tag);
	memcpy(row->template_digest, template->digest, sizeof(row->template_digest));
	row->vcpus = template->vcpus;
	row->memory_bytes = template->memory_bytes;
	row->disk_bytes = template->disk_bytes;
	return 0;
}

static void set_row_state(struct store_session *row, enum session_state state)
{
	text_copy(row->state, sizeof(row->state), state_name(state));
}

static int insert(struct session_manager *m, const struct store_session *row, const struct store_sandbox *sandbox,
                  struct error *e)
{
	int r = store_begin(m->store, STORE_DURABLE, e);
	if (r < 0)
		return r;
	r = store_session_insert(m->store, row, e);
	if (r == 0 && sandbox)
		r = store_sandbox_update(m->store, sandbox, e);
	if (r == 0)
		return store_commit(m->store, e);
	store_rollback(m->store);
	return r;
}

/* Ends an attempt: nobody was told of the session, so it just was not. */
static void forget(struct session_manager *m, struct session *s)
{
	struct error ignored;
	store_session_delete(m->store, s->id, &ignored);
	pthread_mutex_lock(&s->mutex);
	s->gone = 1;
	s->state = STATE_DELETING;
	pthread_mutex_unlock(&s->mutex);
	session_turn_end(s);
	session_release(m, s);
}

/* The entry comes before the row, so that whoever finds the row meets the entry and waits for its turn. */
static int enter(struct session_manager *m, struct store_session *row, const struct store_sandbox *sandbox,
                 struct session **ret, struct error *e)
{
	struct session *s;
	int r = session_enter(m, row, STATE_CREATING, &s, e);
	if (r < 0)
		return r;
	session_turn_begin(s, NULL);
	r = insert(m, &s->row, sandbox, e);
	if (r < 0)
		forget(m, s);
	else
		*ret = s;
	return r;
}

/* The guest takes its identity while the session's row is written to disk: each waits for something else. */
struct identification {
	struct session_manager *m;
	struct sandbox *sandbox;
	struct store_session row; /* owned */
	pthread_t thread;
	int threaded;
	int result;
	struct error error;
};

static void *identify(void *context)
{
	struct identification *i = context;
	i->result = sandbox_identify(i->m, i->sandbox, &i->row, &i->error);
	return NULL;
}

static int identification_begin(struct identification *i, struct session_manager *m, struct sandbox *sandbox,
                                const struct store_session *row, struct error *e)
{
	*i = (struct identification){.m = m, .sandbox = sandbox};
	if (store_session_copy(row, &i->row) < 0)
		return error_set_errno(e, ENOMEM, "session");
	i->threaded = pthread_create(&i->thread, NULL, identify, i) == 0;
	return 0;
}

static int identification_end(struct identification *i)
{
	if (i->threaded)
		pthread_join(i->thread, NULL);
	else
		identify(i);
	store_session_clear(&i->row);
	return i->result;
}

/* 1 = the session runs in a pooled sandbox, 0 = there was none of use (the row has come back), or -errno. */
static int create_warm(struct session_manager *m, struct store_session *row, struct session **ret, struct error *e)
{
	struct sandbox *sandbox = warm_pool_take(m, row->template_id);
	if (!sandbox)
		return 0;
	memcpy(sandbox->row.session_id, row->id, sizeof(row->id));
	memcpy(sandbox->row.previous_control_token, sandbox->row.control_token, sizeof(sandbox->row.control_token));
	token_make(sandbox->row.control_token);
	row->fence = 1;
	sandbox->row.fence = 1;
	set_row_state(row, STATE_RUNNING);
	session_start_timer(row);
	row->started_at_ms = row->created_at_ms;
	struct session *s = NULL;
	struct identification identification;
	const struct store_sandbox inserted = sandbox->row; /* the identification changes the other one */
	int identified = -1;
	int r = identification_begin(&identification, m, sandbox, row, e);
	if (r == 0) {
		r = enter(m, row, &inserted, &s, e);
		identified = identification_end(&identification);
	}
	if (r < 0) {
		sandbox_destroy(m, sandbox);
		return r;
	}
	if (identified == 0 && scheduler_watch(m, sandbox, s->id, &identification.error) == 0) {
		session_set_sandbox(m, s, sandbox);
		session_set_state(s, STATE_RUNNING);
		*ret = s;
		return 1;
	}
	log_warning("session", "a pooled sandbox was of no use: %s", identification.error.message);
	sandbox_destroy(m, sandbox);
	r = store_session_copy(&s->row, row) < 0 ? error_set_errno(e, ENOMEM, "session") : 0;
	forget(m, s);
	return r;
}

static int create_cold(struct session_manager *m, struct store_session *row, struct session **ret, struct error *e)
{
	struct session *s;
	struct sandbox *sandbox;
	struct store_session running;
	set_row_state(row, STATE_CREATING);
	row->fence = 0;
	row->end_at_ms = 0;
	row->started_at_ms = 0;
	int r = enter(m, row, NULL, &s, e);
	if (r < 0)
		return r;
	r = session_restore(m, s, &sandbox, e);
	if (r == 0) {
		r = session_row_for(s, STATE_RUNNING, &running, e);
		if (r < 0)
			sandbox_destroy(m, sandbox);
	}
	if (r == 0) {
		session_start_timer(&running);
		running.started_at_ms = running.state_at_ms;
		session_set_sandbox(m, s, sandbox);
		r = session_commit_row(m, s, &running, STORE_RELAXED, e);
		if (r < 0)
			session_drop_sandbox(m, s);
	}
	if (r < 0) {
		forget(m, s);
		return error_prefix(e, "creating a session");
	}
	*ret = s;
	return 0;
}

int session_create(struct session_manager *m, const struct session_caller *who, const json_t *params, json_t **ret,
                   struct error *e)
{
	uint64_t start = time_monotonic_us();
	struct store_session row = {0};
	struct store_template template = {0};
	struct session *s = NULL;
	session_row_identity(&row);
	int r = read_params(m, who, params, &row, &template, e);
	store_template_clear(&template);
	if (r == 0)
		r = session_count_check(m, 1, e);
	if (r == 0) {
		r = create_warm(m, &row, &s, e);
		atomic_fetch_add(r == 1 ? &m->metrics.warm_hits : &m->metrics.warm_misses, 1);
		if (r == 0)
			r = create_cold(m, &row, &s, e);
	}
	store_session_clear(&row);
	metrics_verb(&m->metrics, METRICS_CREATE, r < 0, time_monotonic_us() - start);
	if (r < 0)
		return r;
	s->snapshot_at = time_monotonic_ms();
	event_session(m, "session.created", &s->row, NULL);
	event_session(m, "session.running", &s->row, NULL);
	*ret = session_json_of(m, s, 1);
	session_turn_end(s);
	session_release(m, s);
	scheduler_wake(m);
	return *ret ? 0 : error_set_errno(e, ENOMEM, "session");
}
