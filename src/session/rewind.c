/* Rewind: the head goes back to an earlier snapshot; what is present then is kept as a snapshot first. */
#include <errno.h>
#include <string.h>

#include "http/json.h"
#include "session/internal.h"

struct by_name {
	const char *name;
	struct store_snapshot found;
	int count;
};

static int match_name(void *context, const struct store_snapshot *row)
{
	struct by_name *search = context;
	if (strcmp(row->name, search->name) == 0) {
		search->found = *row; /* the newest of that name */
		search->count++;
	}
	return 0;
}

int session_find_snapshot(struct session_manager *m, struct session *s, const char *wanted, struct store_snapshot *ret,
                          struct error *e)
{
	struct error local;
	if (id_is_valid(wanted, 'n')) {
		int r = store_snapshot_get(m->store, wanted, ret, &local);
		if (r == 0 && strcmp(ret->session_id, s->id) == 0)
			return 0;
		return error_set(e, ERROR_NOT_FOUND, "session %s has no snapshot \"%s\"", s->id, wanted);
	}
	struct by_name search = {.name = wanted};
	int r = *wanted ? store_snapshot_each(m->store, s->id, match_name, &search, e) : 0;
	if (r < 0)
		return r;
	if (!search.count)
		return error_set(e, ERROR_NOT_FOUND, "session %s has no snapshot \"%.63s\"", s->id, wanted);
	*ret = search.found;
	return 0;
}

/* Durably: from now on the session is at the target, whatever becomes of the rest. */
static int move_head(struct session_manager *m, struct session *s, const struct store_snapshot *target, struct error *e)
{
	struct store_session row;
	int r = session_row_for(s, STATE_SUSPENDED, &row, e);
	if (r < 0)
		return r;
	memcpy(row.head, target->id, sizeof(row.head));
	row.end_at_ms = 0;
	row.left_ms = 0;
	row.lost_since_ms = 0;
	return session_commit_row(m, s, &row, STORE_DURABLE, e);
}

int rewind_session(struct session_manager *m, struct session *s, const json_t *params, struct error *e)
{
	static const char *const fields[] = {"snapshot", "wake", NULL};
	const char *wanted = NULL;
	int ran = s->sandbox != NULL;
	int wake = ran;
	struct store_snapshot target;
	int r = json_check_fields(params, fields, e);
	if (r >= 0)
		r = json_read_string(params, "snapshot", STORE_NAME_BYTES - 1, &wanted, e);
	if (r == 0)
		return error_set(e, ERROR_INVALID, "snapshot: say which one to rewind to");
	if (r >= 0)
		r = json_read_bool(params, "wake", &wake, e);
	if (r >= 0)
		r = session_find_snapshot(m, s, wanted, &target, e);
	if (r < 0)
		return r;
	/* Looked at before anything is given up. */
	struct base base;
	r = base_open_snapshot(m, target.id, &base, e);
	if (r < 0)
		return r;
	base_close(&base);
	if (ran) {
		r = snapshot_session(m, s, "rewind", "", NULL, e);
		if (r < 0)
			return error_prefix(e, "keeping the present");
		session_set_state(s, STATE_WAKING);
		struct sandbox *sandbox = s->sandbox;
		r = move_head(m, s, &target, e);
		if (r < 0) {
			session_set_state(s, state_from_name(s->row.state) == STATE_PAUSED ? STATE_PAUSED : STATE_RUNNING);
			return r;
		}
		session_set_sandbox(m, s, NULL);
		session_cut_streams(s);
		sandbox_destroy(m, sandbox);
	} else {
		r = move_head(m, s, &target, e);
		if (r < 0)
			return r;
	}
	event_session(m, "session.rewound", &s->row, json_pack("{s:s}", "snapshot", target.id));
	return wake ? wake_session(m, s, e) : 0;
}
