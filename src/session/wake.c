/* Everything that gets a guest to run: wake, resume, and pause as their counterpart; and the loss of a sandbox. */
#include <errno.h>
#include <poll.h>
#include <string.h>

#include "base/log.h"
#include "session/internal.h"
#include "session/scheduler.h"
#include "session/warm_pool.h"

void session_set_sandbox(struct session_manager *m, struct session *s, struct sandbox *sandbox)
{
	pthread_mutex_lock(&m->mutex); /* session_release() looks at it with this one held */
	pthread_mutex_lock(&s->mutex);
	s->sandbox = sandbox;
	pthread_mutex_unlock(&s->mutex);
	pthread_mutex_unlock(&m->mutex);
}

void session_drop_sandbox(struct session_manager *m, struct session *s)
{
	struct sandbox *sandbox = s->sandbox;
	session_set_sandbox(m, s, NULL);
	session_cut_streams(s);
	sandbox_destroy(m, sandbox);
}

void session_note_failure(struct session_manager *m, struct session *s, const char *code, const struct error *e)
{
	struct store_session row;
	struct error ignored;
	if (store_session_copy(&s->row, &row) < 0)
		return;
	text_copy(row.reason_code, sizeof(row.reason_code), code);
	text_format(row.reason, sizeof(row.reason), "%.500s", e ? e->message : "");
	if (session_commit_row(m, s, &row, STORE_RELAXED, &ignored) < 0)
		log_warning("session", "%s: %s", s->id, ignored.message);
}

/* The lease: the session's fence goes up, and the sandbox is the one that has the new number. */
static int take_lease(struct session_manager *m, struct session *s, struct sandbox *sandbox, struct error *e)
{
	struct store_session row;
	if (store_session_copy(&s->row, &row) < 0)
		return error_set_errno(e, ENOMEM, "session");
	row.fence++;
	memcpy(sandbox->row.session_id, s->id, sizeof(sandbox->row.session_id));
	sandbox->row.fence = row.fence;
	int r = store_begin(m->store, STORE_RELAXED, e);
	if (r == 0) {
		r = store_session_update(m->store, &row, e);
		if (r == 0)
			r = store_sandbox_insert(m->store, &sandbox->row, e);
		if (r == 0)
			r = store_commit(m->store, e);
		else
			store_rollback(m->store);
	}
	if (r < 0) {
		store_session_clear(&row);
		return r;
	}
	enum session_state state = s->state;
	session_adopt_row(s, &row);
	session_set_state(s, state);
	return 0;
}

int session_restore(struct session_manager *m, struct session *s, struct sandbox **ret, struct error *e)
{
	struct base base = {.folder_fd = -1};
	struct sandbox *sandbox = NULL;
	int r = start_slot_take(m, s, e);
	if (r < 0)
		return r;
	r = base_open_head(m, &s->row, &base, e);
	if (r == 0)
		r = sandbox_new(m, &base, &sandbox, e);
	if (r == 0)
		r = take_lease(m, s, sandbox, e);
	if (r == 0)
		r = session_check_canceled(s, e);
	if (r == 0)
		r = sandbox_start(m, &base, sandbox, e);
	if (r == 0)
		r = session_check_canceled(s, e);
	if (r == 0)
		r = sandbox_identify(m, sandbox, &s->row, e);
	if (r == 0)
		r = scheduler_watch(m, sandbox, s->id, e);
	start_slot_give(m);
	if (r < 0)
		sandbox_destroy(m, sandbox);
	else
		*ret = sandbox;
	base_close(&base);
	return r;
}

int wake_session(struct session_manager *m, struct session *s, struct error *e)
{
	struct sandbox *sandbox;
	struct store_session row;
	session_set_state(s, STATE_WAKING);
	int r = session_restore(m, s, &sandbox, e);
	if (r == 0) {
		r = session_row_for(s, STATE_RUNNING, &row, e);
		if (r == 0) {
			session_start_timer(&row);
			row.started_at_ms = row.state_at_ms;
			session_set_sandbox(m, s, sandbox);
			r = session_commit_row(m, s, &row, STORE_RELAXED, e);
			if (r < 0)
				session_drop_sandbox(m, s);
		} else {
			sandbox_destroy(m, sandbox);
		}
	}
	if (r < 0) {
		session_set_state(s, STATE_SUSPENDED);
		session_note_failure(m, s, "wake_failed", e);
		return r;
	}
	s->snapshot_at = time_monotonic_ms();
	event_session(m, "session.running", &s->row, NULL);
	scheduler_wake(m);
	return 0;
}

int pause_session(struct session_manager *m, struct session *s, struct error *e)
{
	struct sandbox *sandbox = s->sandbox;
	struct guest_status status;
	struct store_session row;
	struct error after;
	int r = session_row_for(s, STATE_PAUSED, &row, e);
	if (r < 0)
		return r;
	r = guest_quiesce(&sandbox->guest, sandbox->row.control_token, GUEST_QUIESCE_TIMEOUT_MS, &status, e);
	if (r == 0)
		r = vmm_stop(sandbox->vmm, e);
	if (r < 0) {
		store_session_clear(&row);
		goto undo;
	}
	uint64_t now = time_realtime_ms();
	row.left_ms = row.end_at_ms > now ? row.end_at_ms - now : row.end_at_ms ? 1 : 0;
	row.end_at_ms = 0;
	r = session_commit_row(m, s, &row, STORE_RELAXED, e);
	if (r < 0)
		goto undo;
	event_session(m, "session.paused", &s->row, NULL);
	return 0;
undo:
	if (vmm_run(sandbox->vmm, &after) < 0 ||
	    guest_thaw(&sandbox->guest, sandbox->row.control_token, GUEST_CALL_TIMEOUT_MS, &after) < 0)
		log_error("session", "%s does not go on after a failed pause: %s", s->id, after.message);
	return r;
}

int resume_session(struct session_manager *m, struct session *s, struct error *e)
{
	struct sandbox *sandbox = s->sandbox;
	struct store_session row;
	struct error after;
	int r = session_row_for(s, STATE_RUNNING, &row, e);
	if (r < 0)
		return r;
	row.end_at_ms = row.left_ms ? time_realtime_ms() + row.left_ms : 0;
	row.left_ms = 0;
	r = vmm_run(sandbox->vmm, e);
	if (r == 0)
		r = guest_thaw(&sandbox->guest, sandbox->row.control_token, GUEST_CALL_TIMEOUT_MS, e);
	if (r < 0) {
		store_session_clear(&row);
		if (vmm_stop(sandbox->vmm, &after) < 0)
			log_error("session", "%s: %s", s->id, after.message);
		return r;
	}
	r = session_commit_row(m, s, &row, STORE_RELAXED, e);
	if (r < 0) {
		if (vmm_stop(sandbox->vmm, &after) < 0)
			log_error("session", "%s: %s", s->id, after.message);
		return r;
	}
	event_session(m, "session.running", &s->row, NULL);
	scheduler_wake(m);
	return 0;
}

void session_lost(struct session_manager *m, struct session *s, const char *code, const char *text)
{
	struct store_session row;
	struct error e;
	if (s->sandbox)
		session_drop_sandbox(m, s);
	if (session_row_for(s, STATE_SUSPENDED, &row, &e) < 0) {
		session_set_state(s, STATE_SUSPENDED);
		return;
	}
	struct store_snapshot head;
	uint64_t since = s->row.created_at_ms;
	if (s->row.head[0] && store_snapshot_get(m->store, s->row.head, &head, &e) == 0)
		since = head.created_at_ms;
	char when[32];
	time_format_rfc3339(when, sizeof(when), since);
	text_copy(row.reason_code, sizeof(row.reason_code), code);
	text_format(row.reason, sizeof(row.reason), "%.200s; %s %s; what came after is lost", text,
	            s->row.head[0] ? "it wakes from the snapshot of" : "it wakes from its template as it was created at",
	            when);
	row.lost_since_ms = since;
	row.end_at_ms = 0;
	row.left_ms = 0;
	log_warning("session", "%s: %s", s->id, row.reason);
	if (session_commit_row(m, s, &row, STORE_RELAXED, &e) < 0) {
		log_error("session", "%s: %s", s->id, e.message);
		session_set_state(s, STATE_SUSPENDED);
	}
	event_session(m, "session.lost", &s->row, json_pack("{s:s}", "cause", code));
}

int session_notice_end(struct session_manager *m, struct session *s, int wait_ms)
{
	static const struct {
		const char *code;
		const char *text;
	} reasons[] = {
	    [VMM_EXIT_NONE] = {"vmm_crash", "the VMM ended by itself"},
	    [VMM_EXIT_GUEST_POWEROFF] = {"guest_poweroff", "the guest powered itself off"},
	    [VMM_EXIT_GUEST_REBOOT] = {"guest_reboot", "the guest rebooted itself"},
	    [VMM_EXIT_GUEST_PANIC] = {"guest_panic", "the guest's kernel panicked"},
	    [VMM_EXIT_CRASH] = {"vmm_crash", "the VMM crashed or was killed"},
	};
	if (!s->sandbox)
		return 0;
	struct pollfd ended = {.fd = vmm_pidfd(s->sandbox->vmm), .events = POLLIN};
	if (poll(&ended, 1, wait_ms) <= 0)
		return 0;
	enum vmm_exit reason = vmm_exit_reason(s->sandbox->vmm);
	session_lost(m, s, reasons[reason].code, reasons[reason].text);
	return 1;
}
