/* Snapshots of a session with a sandbox: taking, committing, and what it means for suspend. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "session/capture.h"
#include "session/internal.h"
#include "session/seal.h"

/*
 * What the new memory file is made from. The guest's changed pages are all those since it was restored, so any file
 * from its base on will do; the head is the nearest. It is only used if it is still what was written: a copy of damage
 * with fresh checksums would never be found again. The base itself is checked in full when it comes to that.
 */
static int choose_source(struct session_manager *m, struct session *s, struct capture_source *ret, int *ret_folder,
                         struct error *e)
{
	struct error ignored;
	char fingerprint[STORE_FINGERPRINT_BYTES] = "";
	*ret_folder = -1;
	if (s->row.head[0]) {
		struct store_snapshot row;
		if (store_snapshot_get(m->store, s->row.head, &row, &ignored) == 0) {
			memcpy(fingerprint, row.fingerprint, sizeof(fingerprint));
			*ret_folder = pool_folder(&m->pool, POOL_SNAPSHOTS, row.id, &ignored);
		}
	} else {
		struct store_template row;
		if (store_template_find(m->store, s->row.template_id, &row, &ignored) == 0) {
			memcpy(fingerprint, row.fingerprint, sizeof(fingerprint));
			*ret_folder = pool_folder(&m->pool, POOL_TEMPLATES, row.id, &ignored);
			store_template_clear(&row);
		}
	}
	if (*ret_folder >= 0 && seal_is_intact(*ret_folder, fingerprint)) {
		int have_sums = s->sandbox->page_sums && strcmp(s->sandbox->sums_of, s->row.head) == 0;
		*ret = (struct capture_source){
		    .folder_fd = *ret_folder, .use_disk = 1, .page_sums = have_sums ? s->sandbox->page_sums : NULL};
		return 0;
	}
	if (*ret_folder >= 0)
		close(*ret_folder);
	*ret_folder = -1;
	log_warning("session", "%s: the head snapshot's files have changed; its base is used instead", s->id);
	int r = seal_verify_memory(s->sandbox->folder_fd, s->sandbox->memory_bytes, s->sandbox->disk_bytes,
	                           "what the sandbox runs on", e);
	*ret = (struct capture_source){.folder_fd = s->sandbox->folder_fd};
	return r;
}

static void fill_row(struct session_manager *m, struct session *s, const struct capture *capture,
                     const struct capture_result *result, const char *kind, const char *name,
                     struct store_snapshot *ret)
{
	*ret = (struct store_snapshot){.vcpus = s->sandbox->vcpus,
	                               .memory_bytes = s->sandbox->memory_bytes,
	                               .disk_bytes = s->sandbox->disk_bytes,
	                               .bytes_stored = result->bytes_stored,
	                               .changed_bytes = result->changed_bytes,
	                               .stall_us = capture->stall_us,
	                               .created_at_ms = capture->created_at_ms};
	memcpy(ret->id, capture->id, sizeof(ret->id));
	memcpy(ret->session_id, s->id, sizeof(ret->session_id));
	memcpy(ret->parent, s->row.head, sizeof(ret->parent));
	text_copy(ret->kind, sizeof(ret->kind), kind);
	text_copy(ret->name, sizeof(ret->name), name);
	memcpy(ret->control_token, s->sandbox->row.control_token, sizeof(ret->control_token));
	text_copy(ret->engine, sizeof(ret->engine), m->host.engine);
	text_copy(ret->engine_version, sizeof(ret->engine_version), m->host.version);
	text_copy(ret->accel, sizeof(ret->accel), m->host.accel == VMM_ACCEL_KVM ? "kvm" : "tcg");
	memcpy(ret->manifest_sum, result->manifest_sum, sizeof(ret->manifest_sum));
	memcpy(ret->fingerprint, result->fingerprint, sizeof(ret->fingerprint));
	memcpy(ret->boot_id, m->boot_id, sizeof(ret->boot_id));
}

/* Clones are made while the guest is being copied: neither needs anything of the other. */
struct cloning {
	struct session_manager *m;
	const struct sandbox *sandbox;
	const struct capture_source *source;
	const char *id;
	struct capture_clones clones;
	int result;
	struct error error;
};

static void *clone_thread(void *context)
{
	struct cloning *c = context;
	c->result = capture_clone(c->m, c->id, c->sandbox, c->source, &c->clones, &c->error);
	return NULL;
}

static int take_and_clone(struct session_manager *m, struct session *s, enum capture_mode mode, struct capture *capture,
                          struct cloning *cloning, struct error *e)
{
	pthread_t thread;
	int threaded = pthread_create(&thread, NULL, clone_thread, cloning) == 0;
	int r = capture_take(m, s->sandbox, mode, capture, e);
	if (threaded)
		pthread_join(thread, NULL);
	else
		clone_thread(cloning);
	if (r < 0)
		return error_prefix(e, "taking a snapshot");
	return 0;
}

/* Folder in place, row not committed. After CAPTURE_FINAL the guest stands still on success only. */
static int snapshot_make(struct session_manager *m, struct session *s, enum capture_mode mode, const char *kind,
                         const char *name, struct store_snapshot *ret, struct guest_status *ret_status, struct error *e)
{
	struct capture capture;
	struct capture_source source;
	struct capture_result result;
	CLEANUP_CLOSE int folder = -1;
	int r = choose_source(m, s, &source, &folder, e);
	if (r == 0)
		r = capture_open(m, s->sandbox, 'n', &capture, e);
	if (r < 0)
		return r;
	struct cloning cloning = {.m = m,
	                          .sandbox = s->sandbox,
	                          .source = &source,
	                          .id = capture.id,
	                          .clones = {.memory_fd = -1, .table_fd = -1}};
	r = take_and_clone(m, s, mode, &capture, &cloning, e);
	if (r == 0) {
		/* A delete that waits for its turn makes the rest pointless. */
		if (session_check_canceled(s, e) < 0) {
			r = -ECANCELED;
		} else if (cloning.result < 0) {
			r = cloning.result;
			if (e)
				*e = cloning.error;
		} else {
			r = capture_write(m, &capture, s->sandbox, &source, &cloning.clones, POOL_SNAPSHOTS, kind, s->row.head,
			                  &result, e);
		}
		if (r < 0) {
			error_prefix(e, "writing a snapshot");
			struct error after;
			if (mode == CAPTURE_FINAL && capture_undo_final(s->sandbox, &after) < 0)
				log_error("session", "%s does not go on after a failed suspend: %s", s->id, after.message);
		}
	}
	if (r == 0) {
		fill_row(m, s, &capture, &result, kind, name, ret);
		*ret_status = capture.status;
		/* Good for the next one only once this is the head; sums_of tells. */
		free(s->sandbox->page_sums);
		s->sandbox->page_sums = TAKE_PTR(capture.page_sums);
		memcpy(s->sandbox->sums_of, capture.id, sizeof(s->sandbox->sums_of));
	}
	capture_clones_close(&cloning.clones);
	capture_close(m, &capture);
	return r;
}

static int make_with_room(struct session_manager *m, struct session *s, enum capture_mode mode, const char *kind,
                          const char *name, struct store_snapshot *ret, struct guest_status *ret_status,
                          struct error *e)
{
	int r = snapshot_make(m, s, mode, kind, name, ret, ret_status, e);
	if (r == -ENOSPC && retention_make_room(m, s)) {
		log_warning("session", "%s: disk full, trying again after old snapshots were thinned", s->id);
		r = snapshot_make(m, s, mode, kind, name, ret, ret_status, e);
	}
	if (r < 0)
		atomic_fetch_add(&m->metrics.snapshots_failed, 1);
	return r;
}

/* One transaction: the snapshot exists, and it is the head. */
static int snapshot_commit(struct session_manager *m, struct session *s, const struct store_snapshot *snapshot,
                           struct store_session *row, struct error *e)
{
	memcpy(row->head, snapshot->id, sizeof(row->head));
	int r = store_begin(m->store, STORE_DURABLE, e);
	if (r == 0) {
		r = store_snapshot_insert(m->store, snapshot, e);
		if (r == 0)
			r = store_session_update(m->store, row, e);
		if (r == 0)
			r = store_commit(m->store, e);
		else
			store_rollback(m->store);
	}
	if (r < 0) {
		store_session_clear(row);
		pool_remove(&m->pool, POOL_SNAPSHOTS, snapshot->id);
		return error_prefix(e, "committing a snapshot");
	}
	session_adopt_row(s, row);
	atomic_fetch_add(&m->metrics.snapshots_taken, 1);
	return 0;
}

static int has_changed(struct session *s)
{
	struct guest_status now;
	struct error ignored;
	struct sandbox *sandbox = s->sandbox;
	if (!sandbox->seen_valid ||
	    guest_status_get(&sandbox->guest, sandbox->row.control_token, GUEST_CALL_TIMEOUT_MS, &now, &ignored) < 0)
		return 1;
	return now.user_cpu_us != sandbox->seen_cpu_us || now.writes != sandbox->seen_writes;
}

int snapshot_session(struct session_manager *m, struct session *s, const char *kind, const char *name,
                     struct store_snapshot *ret, struct error *e)
{
	struct store_snapshot row = {0};
	struct guest_status status = {0};
	if (strcmp(kind, "rolling") == 0 && !has_changed(s)) {
		atomic_fetch_add(&m->metrics.snapshots_unchanged, 1);
		if (ret)
			*ret = row;
		return 0;
	}
	enum capture_mode mode = s->state == STATE_PAUSED ? CAPTURE_STOPPED : CAPTURE_LIVE;
	int r = make_with_room(m, s, mode, kind, name, &row, &status, e);
	if (r < 0)
		return r;
	struct store_session session_row;
	if (store_session_copy(&s->row, &session_row) < 0) {
		pool_remove(&m->pool, POOL_SNAPSHOTS, row.id);
		return error_set_errno(e, ENOMEM, "snapshot");
	}
	r = snapshot_commit(m, s, &row, &session_row, e);
	if (r < 0)
		return r;
	s->snapshot_at = time_monotonic_ms();
	if (mode == CAPTURE_LIVE) {
		s->sandbox->seen_valid = 1;
		s->sandbox->seen_cpu_us = status.user_cpu_us;
		s->sandbox->seen_writes = status.writes;
	}
	event_session(m, "session.snapshot", &s->row, json_pack("{s:s, s:s}", "snapshot", row.id, "kind", row.kind));
	if (ret)
		*ret = row;
	return 0;
}

int suspend_session(struct session_manager *m, struct session *s, struct error *e)
{
	enum session_state before = s->state;
	struct store_snapshot snapshot;
	struct guest_status status;
	session_set_state(s, STATE_SUSPENDING);
	enum capture_mode mode = before == STATE_PAUSED ? CAPTURE_STOPPED : CAPTURE_FINAL;
	int r = make_with_room(m, s, mode, "suspend", "", &snapshot, &status, e);
	if (r == 0) {
		struct store_session row;
		r = session_row_for(s, STATE_SUSPENDED, &row, e);
		if (r == 0) {
			row.end_at_ms = 0;
			row.left_ms = 0;
			row.lost_since_ms = 0;
			r = snapshot_commit(m, s, &snapshot, &row, e);
		} else {
			pool_remove(&m->pool, POOL_SNAPSHOTS, snapshot.id);
		}
		struct error after;
		if (r < 0 && mode == CAPTURE_FINAL && capture_undo_final(s->sandbox, &after) < 0)
			log_error("session", "%s does not go on after a failed suspend: %s", s->id, after.message);
	}
	if (r < 0) {
		/* The row was never touched; what failed is told to who asked and kept as the reason. */
		session_set_state(s, before);
		session_note_failure(m, s, "suspend_failed", e);
		return r;
	}
	/* Only now, with the snapshot committed, may the sandbox go. */
	session_drop_sandbox(m, s);
	event_session(m, "session.suspended", &s->row, NULL);
	return 0;
}
