/*
 * Branches: new sessions from an instant of another one.
 *
 * Each branch owns a snapshot folder of its own whose files are hard links of the origin's: immutable files may have
 * many names, and so either side can delete what it has without asking the other. All branches of one call are
 * committed together, as suspended sessions; then they wake as any session does, several at once.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/log.h"
#include "http/json.h"
#include "session/internal.h"
#include "session/jobs.h"
#include "session/params.h"

static const char *const linked_files[] = {"memory", "disk", "state", "checksums", "manifest.json"};

struct branch {
	struct store_session row;
	struct store_snapshot snapshot;
	struct session *s;
	struct error error;
	int failed;
};

struct branches {
	struct session_manager *m;
	struct branch *list;
	size_t count;
	int wake;
};

static int link_folder(struct session_manager *m, int from, const char *id, struct error *e)
{
	CLEANUP_CLOSE int folder = pool_make(&m->pool, POOL_TMP, id, e);
	if (folder < 0)
		return folder;
	for (size_t i = 0; i < ARRAY_SIZE(linked_files); i++)
		if (linkat(from, linked_files[i], folder, linked_files[i], 0) < 0)
			return error_set_errno(e, errno, "linking %s for a branch", linked_files[i]);
	if (fsync(folder) < 0 || renameat(m->pool.fds[POOL_TMP], id, m->pool.fds[POOL_SNAPSHOTS], id) < 0)
		return error_set_errno(e, errno, "placing the snapshot of a branch");
	return 0;
}

/* The origin's row with its own id, tokens and snapshot, then what the call overrides. */
static int make_row(struct session *s, const struct store_snapshot *from, const json_t *params, size_t index,
                    size_t count, struct branch *b, struct error *e)
{
	char name[STORE_NAME_BYTES] = "";
	if (store_session_copy(&s->row, &b->row) < 0)
		return error_set_errno(e, ENOMEM, "branch");
	struct store_session *row = &b->row;
	session_row_identity(row);
	row->reason_code[0] = '\0';
	row->reason[0] = '\0';
	row->lost_since_ms = 0;
	row->end_at_ms = 0;
	row->left_ms = 0;
	row->fence = 0;
	row->started_at_ms = 0;
	text_copy(row->state, sizeof(row->state), state_name(STATE_SUSPENDED));
	int r = params_read_name(params, name, 1, e);
	if (r == 0)
		r = params_read_policy(params, row, e);
	if (r == 0)
		r = params_read_environment(params, row, 1, e);
	if (r < 0)
		return r;
	row->name[0] = '\0';
	if (name[0] && text_format(row->name, sizeof(row->name), count > 1 ? "%s-%zu" : "%s", name, index + 1) < 0)
		return error_set(e, ERROR_INVALID, "name \"%s\" is too long to be numbered", name);
	memcpy(row->origin_session, s->id, sizeof(row->origin_session));
	memcpy(row->origin_snapshot, from->id, sizeof(row->origin_snapshot));
	b->snapshot = *from;
	id_make(b->snapshot.id, 'n');
	memcpy(b->snapshot.session_id, row->id, sizeof(b->snapshot.session_id));
	b->snapshot.parent[0] = '\0';
	b->snapshot.name[0] = '\0';
	text_copy(b->snapshot.kind, sizeof(b->snapshot.kind), "branch");
	b->snapshot.bytes_stored = 0;
	b->snapshot.changed_bytes = 0;
	b->snapshot.stall_us = 0;
	memcpy(row->head, b->snapshot.id, sizeof(row->head));
	return 0;
}

static int commit(struct session_manager *m, struct branches *all, struct error *e)
{
	int r = store_begin(m->store, STORE_DURABLE, e);
	if (r < 0)
		return r;
	for (size_t i = 0; r == 0 && i < all->count; i++) {
		r = store_session_insert(m->store, &all->list[i].s->row, e);
		if (r == 0)
			r = store_snapshot_insert(m->store, &all->list[i].snapshot, e);
	}
	if (r == 0)
		return store_commit(m->store, e);
	store_rollback(m->store);
	return r;
}

static void wake_one(void *context, size_t index)
{
	struct branches *all = context;
	struct branch *b = &all->list[index];
	if (all->wake)
		b->failed = wake_session(all->m, b->s, &b->error) < 0;
}

static json_t *answer(struct session_manager *m, struct branches *all, const struct store_snapshot *from)
{
	json_t *sessions = json_array();
	for (size_t i = 0; i < all->count; i++) {
		struct branch *b = &all->list[i];
		json_t *item = session_json_of(m, b->s, 1);
		if (b->failed)
			json_object_set_new(
			    item, "error",
			    json_pack("{s:s, s:s}", "code", error_code_name(b->error.code), "message", b->error.message));
		json_array_append_new(sessions, item);
	}
	return json_pack("{s:s, s:o}", "snapshot", from->id, "sessions", sessions);
}

/* Entries are made (and their turns taken) before the rows can be found by anybody. */
static int enter_all(struct session_manager *m, struct branches *all, struct error *e)
{
	for (size_t i = 0; i < all->count; i++) {
		struct branch *b = &all->list[i];
		int r = session_enter(m, &b->row, all->wake ? STATE_WAKING : STATE_SUSPENDED, &b->s, e);
		if (r < 0)
			return r;
		session_turn_begin(b->s, NULL);
	}
	return commit(m, all, e);
}

static void release_all(struct session_manager *m, struct branches *all, int failed)
{
	for (size_t i = 0; i < all->count; i++) {
		struct branch *b = &all->list[i];
		store_session_clear(&b->row);
		if (!b->s)
			continue;
		if (failed) {
			pthread_mutex_lock(&b->s->mutex);
			b->s->gone = 1;
			pthread_mutex_unlock(&b->s->mutex);
		}
		session_turn_end(b->s);
		session_release(m, b->s);
	}
}

static int branch_from(struct session_manager *m, struct session *s, const struct store_snapshot *from,
                       const json_t *params, size_t count, int wake, json_t **ret, struct error *e)
{
	CLEANUP_FREE struct branch *list = calloc(count, sizeof(*list));
	struct branches all = {.m = m, .list = list, .count = count, .wake = wake};
	if (!list)
		return error_set_errno(e, ENOMEM, "branch");
	CLEANUP_CLOSE int folder = pool_folder(&m->pool, POOL_SNAPSHOTS, from->id, e);
	int r = folder < 0 ? error_set(e, ERROR_DAMAGED, "snapshot %s is damaged: its folder is missing", from->id) : 0;
	size_t linked = 0;
	for (; r == 0 && linked < count; linked++) {
		r = make_row(s, from, params, linked, count, &list[linked], e);
		if (r == 0)
			r = link_folder(m, folder, list[linked].snapshot.id, e);
	}
	if (r == 0 && fsync(m->pool.fds[POOL_SNAPSHOTS]) < 0)
		r = error_set_errno(e, errno, "syncing the snapshots of branches");
	if (r == 0)
		r = enter_all(m, &all, e);
	if (r < 0) {
		release_all(m, &all, 1);
		for (size_t i = 0; i < count && list[i].snapshot.id[0]; i++) {
			pool_remove(&m->pool, POOL_TMP, list[i].snapshot.id);
			pool_remove(&m->pool, POOL_SNAPSHOTS, list[i].snapshot.id);
		}
		return r;
	}
	for (size_t i = 0; i < count; i++)
		event_session(m, "session.created", &list[i].s->row,
		              json_pack("{s:s, s:s}", "origin", s->id, "snapshot", from->id));
	jobs_parallel(count, m->starts_max, wake_one, &all);
	*ret = answer(m, &all, from);
	release_all(m, &all, 0);
	return *ret ? 0 : error_set_errno(e, ENOMEM, "branch");
}

/* The snapshot to branch from: the named one, or the present instant. */
static int choose_snapshot(struct session_manager *m, struct session *s, const char *wanted, struct store_snapshot *ret,
                           struct error *e)
{
	if (wanted)
		return session_find_snapshot(m, s, wanted, ret, e);
	if (s->sandbox)
		return snapshot_session(m, s, "branch", "", ret, e);
	if (s->row.head[0])
		return store_snapshot_get(m->store, s->row.head, ret, e);
	return error_set(e, ERROR_CONFLICT, "session %s has no snapshot yet: wake it first", s->id);
}

int branch_session(struct session_manager *m, struct session *s, const json_t *params, json_t **ret, struct error *e)
{
	static const char *const fields[] = {"count",     "snapshot",    "name",       "environment",
	                                     "labels",    "timeout_s",   "on_timeout", "snapshot_interval_s",
	                                     "retention", "wake_on_use", "wake",       NULL};
	uint64_t count = 1;
	const char *wanted = NULL;
	int wake = 1;
	int r = json_check_fields(params, fields, e);
	if (r >= 0)
		r = json_read_u64(params, "count", 1, SESSION_BRANCH_MAX, &count, e);
	if (r >= 0)
		r = json_read_string(params, "snapshot", STORE_NAME_BYTES - 1, &wanted, e);
	if (r >= 0)
		r = json_read_bool(params, "wake", &wake, e);
	if (r >= 0)
		r = session_count_check(m, count, e);
	/* What the call overrides is checked before the guest is bothered. */
	struct branch trial = {0};
	struct store_snapshot from = {0};
	if (r >= 0)
		r = make_row(s, &from, params, (size_t)count - 1, (size_t)count, &trial, e);
	store_session_clear(&trial.row);
	if (r >= 0)
		r = choose_snapshot(m, s, wanted, &from, e);
	if (r < 0)
		return r;
	return branch_from(m, s, &from, params, (size_t)count, wake, ret, e);
}
