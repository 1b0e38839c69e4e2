/*
 * What a start makes of what an earlier process left, however that one ended:
 *
 *   pool/tmp                                  removed: never committed
 *   folders without a row                     removed: their row was never committed, or is gone
 *   rows without a folder                     kept; told as damaged when they are used
 *   VMM with a row of a session that runs     adopted; then settled (below) in the session's first turn
 *   any other VMM, pooled ones included       killed, with its row
 *   session "running" or "paused" without VMM suspended, with the reason and the time it goes back to
 *   session "creating"                        removed: nobody was ever told of it
 *   session "deleting"                        deletion is finished
 *
 * Settling an adopted guest: it may have been left stopped or frozen in the middle of a snapshot, or not have got its
 * identity yet. The control tokens tell the latter: the store has the new one before the guest does.
 */
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "session/internal.h"
#include "session/jobs.h"
#include "session/scheduler.h"

struct names {
	char (*list)[ID_BYTES];
	size_t count;
	size_t capacity;
	int failed;
};

static void names_add(struct names *names, const char *id)
{
	if (names->count == names->capacity) {
		size_t capacity = names->capacity ? names->capacity * 2 : 64;
		void *more = realloc(names->list, capacity * ID_BYTES);
		if (!more) {
			names->failed = 1;
			return;
		}
		names->list = more;
		names->capacity = capacity;
	}
	text_copy(names->list[names->count++], ID_BYTES, id);
}

static int compare_ids(const void *a, const void *b)
{
	return strcmp(a, b);
}

static int names_have(void *context, const char *id)
{
	struct names *names = context;
	if (!names->count || strlen(id) >= ID_BYTES)
		return 0;
	char key[ID_BYTES] = "";
	text_copy(key, sizeof(key), id);
	return bsearch(key, names->list, names->count, ID_BYTES, compare_ids) != NULL;
}

static void names_sort(struct names *names)
{
	if (names->count)
		qsort(names->list, names->count, ID_BYTES, compare_ids);
}

static int add_snapshot(void *context, const struct store_snapshot *row)
{
	names_add(context, row->id);
	return 0;
}

static int add_template(void *context, const struct store_template *row)
{
	names_add(context, row->id);
	return 0;
}

/* ---- sandboxes ---- */

struct settle {
	struct session_manager *m;
	struct session *s; /* referenced */
	uint64_t ticket;
};

static int settle_guest(struct session_manager *m, struct session *s, struct error *e)
{
	struct sandbox *sandbox = s->sandbox;
	struct guest_status status;
	int running = 0;
	int r = vmm_is_running(sandbox->vmm, &running, e);
	if (r < 0 || s->state == STATE_PAUSED)
		return r < 0 || !running ? r : vmm_stop(sandbox->vmm, e);
	if (!running)
		r = vmm_run(sandbox->vmm, e);
	if (r == 0)
		r = guest_status_get(&sandbox->guest, sandbox->row.control_token, GUEST_CALL_TIMEOUT_MS, &status, e);
	if (r == -EACCES && sandbox->row.previous_control_token[0])
		return sandbox_identify(m, sandbox, &s->row, e);
	if (r == 0)
		sandbox->row.previous_control_token[0] = '\0';
	if (r == 0 && (status.frozen || !running))
		r = guest_thaw(&sandbox->guest, sandbox->row.control_token, GUEST_CALL_TIMEOUT_MS, e);
	return r;
}

static void settle_done(struct settle *settle)
{
	session_release(settle->m, settle->s);
	free(settle);
}

static void settle_drop(void *context)
{
	struct settle *settle = context;
	if (session_turn_wait(settle->s, settle->ticket, NULL) == 0)
		session_turn_end(settle->s);
	settle_done(settle);
}

static void settle_work(void *context)
{
	struct settle *settle = context;
	struct session *s = settle->s;
	struct error e;
	if (session_turn_wait(s, settle->ticket, NULL) == 0) {
		int r = s->sandbox ? settle_guest(settle->m, s, &e) : 0;
		if (r < 0) {
			log_warning("session", "%s: %s", s->id, e.message);
			session_lost(settle->m, s, "guest_lost", "its guest did not answer after a restart");
		}
		session_turn_end(s);
	}
	settle_done(settle);
}

static void settle_start(struct session_manager *m, struct session *s)
{
	struct settle *settle = calloc(1, sizeof(*settle));
	if (!settle) {
		session_release(m, s);
		return;
	}
	*settle = (struct settle){.m = m, .s = s, .ticket = session_take_ticket(s)};
	if (jobs_add(m->jobs, settle_work, settle_drop, settle) < 0)
		settle_drop(settle);
}

struct census {
	struct session_manager *m;
	struct host_sandbox_info *list;
	size_t count;
	struct names kept;
	size_t adopted;
	size_t killed;
};

static int is_alive(const struct census *census, const char *id)
{
	for (size_t i = 0; i < census->count; i++)
		if (strcmp(census->list[i].id, id) == 0)
			return census->list[i].alive;
	return 0;
}

/* 1 = it goes on, 0 = it must go. */
static int try_adopt(struct census *census, const struct store_sandbox *row)
{
	struct session_manager *m = census->m;
	struct session *s;
	struct sandbox *sandbox;
	struct error e;
	if (!row->session_id[0] || !is_alive(census, row->id) || session_acquire(m, row->session_id, &s, &e) < 0)
		return 0;
	int fits = (s->state == STATE_RUNNING || s->state == STATE_PAUSED) && s->row.fence == row->fence;
	if (!fits || sandbox_adopt(m, row, &s->row, &sandbox, &e) < 0) {
		if (fits)
			log_warning("session", "sandbox %s of %s: %s", row->id, row->session_id, e.message);
		session_release(m, s);
		return 0;
	}
	session_set_sandbox(m, s, sandbox);
	if (scheduler_watch(m, sandbox, s->id, &e) < 0)
		log_error("session", "%s: %s", s->id, e.message);
	settle_start(m, s);
	return 1;
}

static int visit_sandbox(void *context, const struct store_sandbox *row)
{
	struct census *census = context;
	struct error e;
	if (try_adopt(census, row)) {
		names_add(&census->kept, row->id);
		census->adopted++;
		return 0;
	}
	if (host_sandbox_kill(census->m->helper, row->id, &e) < 0)
		log_warning("session", "sandbox %s: %s", row->id, e.message);
	sandbox_remove_traces(census->m, row->id);
	census->killed++;
	return 0;
}

static int recover_sandboxes(struct session_manager *m, struct error *e)
{
	struct census census = {.m = m};
	int r = host_sandbox_list(m->helper, &census.list, &census.count, e);
	if (r < 0)
		return r;
	r = store_sandbox_each(m->store, visit_sandbox, &census, e);
	names_sort(&census.kept);
	for (size_t i = 0; i < census.count; i++) {
		struct error local;
		if (census.list[i].pidfd >= 0)
			close(census.list[i].pidfd);
		if (r < 0 || census.kept.failed || names_have(&census.kept, census.list[i].id))
			continue;
		if (host_sandbox_kill(m->helper, census.list[i].id, &local) < 0)
			log_warning("session", "sandbox %s: %s", census.list[i].id, local.message);
		else
			census.killed++;
	}
	if (r == 0 && !census.kept.failed) {
		pool_sweep(&m->pool, POOL_SANDBOXES, names_have, &census.kept);
		pool_sweep_dir(m->runtime_fd, names_have, &census.kept);
	}
	if (census.adopted || census.killed)
		log_info("session", "%zu sandboxes adopted, %zu removed", census.adopted, census.killed);
	free(census.list);
	free(census.kept.list);
	return r;
}

/* ---- sessions ---- */

struct unfinished {
	struct names lost;     /* "running" or "paused" */
	struct names removing; /* "creating" or "deleting" */
};

static int visit_session(void *context, const struct store_session *row)
{
	struct unfinished *unfinished = context;
	int state = state_from_name(row->state);
	if (state == STATE_RUNNING || state == STATE_PAUSED)
		names_add(&unfinished->lost, row->id);
	else if (state == STATE_CREATING || state == STATE_DELETING)
		names_add(&unfinished->removing, row->id);
	return 0;
}

static void recover_session(struct session_manager *m, const char *id, int removing)
{
	struct session *s;
	struct error e;
	if (session_acquire(m, id, &s, &e) < 0)
		return;
	if (removing) {
		if (session_turn_begin(s, NULL) == 0) {
			if (remove_session(m, s, &e) < 0)
				log_error("session", "%s", e.message);
			session_turn_end(s);
		}
	} else if (!s->sandbox && session_turn_begin(s, NULL) == 0) {
		/* (An adopted one has a sandbox, and its turn may be taken by the settling.) */
		session_lost(m, s, "vmm_gone", "its VMM was gone after a restart");
		session_turn_end(s);
	}
	session_release(m, s);
}

static int recover_sessions(struct session_manager *m, struct error *e)
{
	struct unfinished unfinished = {0};
	int r = store_session_each(m->store, NULL, 0, "", visit_session, &unfinished, e);
	for (size_t i = 0; r == 0 && i < unfinished.removing.count; i++)
		recover_session(m, unfinished.removing.list[i], 1);
	for (size_t i = 0; r == 0 && i < unfinished.lost.count; i++)
		recover_session(m, unfinished.lost.list[i], 0);
	free(unfinished.lost.list);
	free(unfinished.removing.list);
	return r;
}

static int recover_folders(struct session_manager *m, struct error *e)
{
	struct names snapshots = {0};
	struct names templates = {0};
	pool_sweep(&m->pool, POOL_TMP, NULL, NULL);
	int r = store_snapshot_each(m->store, NULL, add_snapshot, &snapshots, e);
	if (r == 0)
		r = store_template_each(m->store, add_template, &templates, e);
	names_sort(&snapshots);
	names_sort(&templates);
	if (r == 0 && !snapshots.failed && !templates.failed) {
		pool_sweep(&m->pool, POOL_SNAPSHOTS, names_have, &snapshots);
		pool_sweep(&m->pool, POOL_TEMPLATES, names_have, &templates);
	}
	free(snapshots.list);
	free(templates.list);
	return r;
}

int recovery_run(struct session_manager *m, struct error *e)
{
	int r = recover_folders(m, e);
	if (r == 0)
		r = recover_sandboxes(m, e);
	if (r == 0)
		r = recover_sessions(m, e);
	return r < 0 ? error_prefix(e, "taking up what was left") : 0;
}
