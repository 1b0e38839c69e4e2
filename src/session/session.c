/* The verbs as the API sees them: who may, whether the state allows it, in whose turn; and what can be read. */
#include "session/session.h"

#include <errno.h>
#include <string.h>

#include "base/log.h"
#include "http/json.h"
#include "session/internal.h"
#include "session/params.h"
#include "session/scheduler.h"

int update_session(struct session_manager *m, struct session *s, const json_t *params, struct error *e)
{
	static const char *const fields[] = {"name",      "labels",      "timeout_s", "on_timeout", "snapshot_interval_s",
	                                     "retention", "wake_on_use", NULL};
	struct store_session row;
	int r = json_check_fields(params, fields, e);
	if (r < 0)
		return r;
	if (store_session_copy(&s->row, &row) < 0)
		return error_set_errno(e, ENOMEM, "session");
	r = params_read_name(params, row.name, 1, e);
	if (r == 0)
		r = params_read_policy(params, &row, e);
	if (r < 0) {
		store_session_clear(&row);
		return r;
	}
	if (params_has(params, "timeout_s")) {
		if (s->state == STATE_RUNNING)
			session_start_timer(&row);
		else if (s->state == STATE_PAUSED)
			row.left_ms = row.timeout_s * 1000;
	}
	r = session_commit_row(m, s, &row, STORE_DURABLE, e);
	if (r == 0)
		event_session(m, "session.updated", &s->row, NULL);
	scheduler_wake(m);
	return r;
}

/* Wake and connect: gets it running; "timeout_s" sets the end of a run that begins now, and may only put off the end of
 * one that is under way. */
static int connect_session(struct session_manager *m, struct session *s, const json_t *params, int *ret_resumed,
                           struct error *e)
{
	static const char *const fields[] = {"timeout_s", NULL};
	uint64_t timeout_s = 0;
	int r = json_check_fields(params, fields, e);
	if (r < 0)
		return r;
	int given = json_read_u64(params, "timeout_s", 1, SESSION_TIMEOUT_S_MAX, &timeout_s, e);
	if (given < 0)
		return given;
	enum session_state before = s->state;
	r = session_make_run(m, s, e);
	*ret_resumed = before != STATE_RUNNING;
	if (r < 0 || !given)
		return r;
	uint64_t end = time_realtime_ms() + timeout_s * 1000;
	int fresh = before == STATE_SUSPENDED;
	if (!fresh && (!s->row.end_at_ms || s->row.end_at_ms >= end))
		return 0;
	struct store_session row;
	if (store_session_copy(&s->row, &row) < 0)
		return error_set_errno(e, ENOMEM, "session");
	row.end_at_ms = end;
	r = session_commit_row(m, s, &row, STORE_RELAXED, e);
	scheduler_wake(m);
	return r;
}

static int snapshot_verb(struct session_manager *m, struct session *s, const json_t *params, json_t **ret,
                         struct error *e)
{
	static const char *const fields[] = {"name", NULL};
	char name[STORE_NAME_BYTES] = "";
	struct store_snapshot row;
	int r = json_check_fields(params, fields, e);
	if (r >= 0)
		r = params_read_name(params, name, 1, e);
	if (r >= 0)
		r = snapshot_session(m, s, "manual", name, &row, e);
	if (r < 0)
		return r;
	*ret = snapshot_json(m, &row);
	return *ret ? 0 : error_set_errno(e, ENOMEM, "snapshot");
}

static int check_no_params(const json_t *params, struct error *e)
{
	static const char *const none[] = {NULL};
	return json_check_fields(params, none, e);
}

static int perform(struct session_manager *m, struct session *s, enum session_verb verb, const json_t *params,
                   json_t **ret, int *ret_resumed, struct error *e)
{
	int r;
	switch (verb) {
	case SESSION_PAUSE:
		r = check_no_params(params, e);
		return r < 0 ? r : pause_session(m, s, e);
	case SESSION_RESUME:
		r = check_no_params(params, e);
		return r < 0 ? r : resume_session(m, s, e);
	case SESSION_SUSPEND:
		r = check_no_params(params, e);
		return r < 0 ? r : suspend_session(m, s, e);
	case SESSION_WAKE:
	case SESSION_CONNECT:
		return connect_session(m, s, params, ret_resumed, e);
	case SESSION_SNAPSHOT:
		return snapshot_verb(m, s, params, ret, e);
	case SESSION_BRANCH:
		return branch_session(m, s, params, ret, e);
	case SESSION_REWIND:
		return rewind_session(m, s, params, e);
	case SESSION_UPDATE:
		return update_session(m, s, params, e);
	case SESSION_DELETE:
		*ret = json_object();
		r = remove_session(m, s, e);
		if (r < 0) {
			json_decref(*ret);
			*ret = NULL;
		}
		return r;
	case SESSION_VERB_COUNT:
		break;
	}
	return error_set(e, ERROR_INVALID, "unknown verb");
}

/* With the turn held. */
static int do_in_turn(struct session_manager *m, struct session *s, enum session_verb verb, const json_t *params,
                      json_t **ret, struct error *e)
{
	int resumed = 0;
	if (verb != SESSION_DELETE) {
		int r = session_check_canceled(s, e);
		if (r < 0)
			return r;
	}
	/* Nobody may take a sandbox that has ended for one that was suspended. */
	if (session_notice_end(m, s, 0) && (verb == SESSION_SUSPEND || verb == SESSION_PAUSE))
		return error_set(e, ERROR_UNAVAILABLE, "session %s: %s", s->id, s->row.reason);
	enum state_action action = state_rule(s->state, verb)->action;
	int r = 0;
	if (action == STATE_DENY || action == STATE_WAIT)
		return state_refuse(s->state, verb, e);
	if (action == STATE_DO)
		r = perform(m, s, verb, params, ret, &resumed, e);
	if (r < 0)
		session_notice_end(m, s, r == error_code_errno(ERROR_UNAVAILABLE) ? SESSION_END_WAIT_MS : 0);
	if (r == 0 && !*ret) {
		*ret = session_json_of(m, s, 1);
		if (*ret && (verb == SESSION_WAKE || verb == SESSION_CONNECT))
			json_object_set_new(*ret, "resumed", json_boolean(resumed));
		if (!*ret)
			r = error_set_errno(e, ENOMEM, "session");
	}
	return r;
}

int session_do(struct session_manager *m, const struct session_caller *who, const char *id, enum session_verb verb,
               const json_t *params, json_t **ret, struct error *e)
{
	if ((unsigned)verb >= SESSION_VERB_COUNT)
		return error_set(e, ERROR_INVALID, "unknown verb");
	struct session *s;
	uint64_t start = time_monotonic_us();
	json_t *none = params ? NULL : json_object();
	json_t *answer = NULL;
	int r = session_acquire_for(m, who, id, &s, e);
	if (r == 0) {
		/* Whatever is in progress gives up at its next step, so that a delete never waits for a slow start. */
		if (verb == SESSION_DELETE)
			atomic_store(&s->canceled, 1);
		r = session_turn_begin(s, e);
		if (r == 0) {
			r = do_in_turn(m, s, verb, params ? params : none, &answer, e);
			if (r < 0 && verb == SESSION_DELETE)
				atomic_store(&s->canceled, 0);
			session_turn_end(s);
		}
		session_release(m, s);
	}
	json_decref(none);
	metrics_verb(&m->metrics, (int)verb, r < 0, time_monotonic_us() - start);
	if (r == 0)
		*ret = answer;
	else
		json_decref(answer);
	return r;
}

int session_get(struct session_manager *m, const struct session_caller *who, const char *id, json_t **ret,
                struct error *e)
{
	struct session *s;
	int r = session_acquire_for(m, who, id, &s, e);
	if (r < 0)
		return r;
	*ret = session_json_of(m, s, 1);
	session_release(m, s);
	return *ret ? 0 : error_set_errno(e, ENOMEM, "session");
}

struct history {
	struct session_manager *m;
	json_t *list;
};

static int add_snapshot(void *context, const struct store_snapshot *row)
{
	struct history *history = context;
	json_array_append_new(history->list, snapshot_json(history->m, row));
	return 0;
}

int session_history(struct session_manager *m, const struct session_caller *who, const char *id, json_t **ret,
                    struct error *e)
{
	struct session *s;
	int r = session_acquire_for(m, who, id, &s, e);
	if (r < 0)
		return r;
	struct history history = {.m = m, .list = json_array()};
	pthread_mutex_lock(&s->mutex);
	json_t *head = s->row.head[0] ? json_string(s->row.head) : json_null();
	pthread_mutex_unlock(&s->mutex);
	r = store_snapshot_each(m->store, s->id, add_snapshot, &history, e);
	if (r == 0)
		*ret = json_pack("{s:s, s:o, s:o}", "session", s->id, "head", head, "snapshots", history.list);
	session_release(m, s);
	if (r < 0) {
		json_decref(head);
		json_decref(history.list);
		return r;
	}
	return *ret ? 0 : error_set_errno(e, ENOMEM, "history");
}

int session_snapshot_delete(struct session_manager *m, const struct session_caller *who, const char *id,
                            const char *snapshot_id, struct error *e)
{
	struct session *s;
	int r = session_acquire_for(m, who, id, &s, e);
	if (r < 0)
		return r;
	r = session_turn_begin(s, e);
	if (r == 0) {
		struct store_snapshot row;
		r = session_find_snapshot(m, s, snapshot_id, &row, e);
		if (r == 0 && strcmp(row.id, s->row.head) == 0)
			r = error_set(e, ERROR_CONFLICT, "snapshot %s is the head of its session: rewind to another one first",
			              row.id);
		if (r == 0)
			r = snapshot_remove(m, &row, e);
		if (r == 0)
			event_session(m, "snapshot.deleted", &s->row, json_pack("{s:s}", "snapshot", row.id));
		session_turn_end(s);
	}
	session_release(m, s);
	return r;
}
