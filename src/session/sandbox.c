/* Sandboxes: what they are restored from, their folders, VMM and guest; see internal.h for who calls what when. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/log.h"
#include "session/hot_pages.h"
#include "session/internal.h"
#include "session/scheduler.h"
#include "session/seal.h"
#include "session/spare.h"
#include "session/warm_pool.h"

#define KILL_ATTEMPTS 20
#define KILL_PAUSE_MS 100
#define START_ATTEMPTS 3
#define START_PAUSE_MS 150

void base_close(struct base *base)
{
	if (base->folder_fd >= 0)
		close(base->folder_fd);
	base->folder_fd = -1;
}

/* Device state loads only into the engine that wrote it. */
static int base_check_engine(struct session_manager *m, const struct base *base, const char *what, struct error *e)
{
	const char *accel = m->host.accel == VMM_ACCEL_KVM ? "kvm" : "tcg";
	if (strcmp(base->engine, m->host.engine) == 0 && strcmp(base->engine_version, m->host.version) == 0 &&
	    strcmp(base->accel, accel) == 0)
		return 0;
	return error_set(e, ERROR_UNSUPPORTED, "%s was made by %s %s with %s and does not load into %s %s with %s", what,
	                 base->engine, base->engine_version, base->accel, m->host.engine, m->host.version, accel);
}

static int base_verify(struct session_manager *m, struct base *base, enum pool_area area, const char *fingerprint,
                       const char *boot_id, const char *what, struct error *e)
{
	struct error missing;
	base->folder_fd = pool_folder(&m->pool, area, base->id, &missing);
	if (base->folder_fd < 0) {
		atomic_fetch_add(&m->metrics.damaged, 1);
		return error_set(e, ERROR_DAMAGED, "%s is damaged: its folder is missing or cannot be read", what);
	}
	struct seal_expectation expect = {.what = what,
	                                  .manifest_sum = base->manifest_sum,
	                                  .fingerprint = fingerprint,
	                                  .boot_id = boot_id,
	                                  .memory_bytes = base->memory_bytes,
	                                  .disk_bytes = base->disk_bytes};
	int checked;
	char fresh[STORE_FINGERPRINT_BYTES];
	int r = seal_verify(base->folder_fd, &expect, m->boot_id, &checked, fresh, e);
	if (r == 0 && checked) {
		struct error ignored;
		if (base->is_template)
			store_template_set_fingerprint(m->store, base->id, fresh, m->boot_id, &ignored);
		else
			store_snapshot_set_fingerprint(m->store, base->id, fresh, m->boot_id, &ignored);
	}
	if (r == 0)
		r = base_check_engine(m, base, what, e);
	else
		atomic_fetch_add(&m->metrics.damaged, 1);
	if (r < 0)
		base_close(base);
	return r;
}

int base_open_snapshot(struct session_manager *m, const char *snapshot_id, struct base *ret, struct error *e)
{
	struct store_snapshot row;
	int r = store_snapshot_get(m->store, snapshot_id, &row, e);
	if (r < 0)
		return r;
	struct base base = {.folder_fd = -1,
	                    .vcpus = row.vcpus,
	                    .memory_bytes = row.memory_bytes,
	                    .disk_bytes = row.disk_bytes,
	                    .created_at_ms = row.created_at_ms};
	memcpy(base.id, row.id, sizeof(base.id));
	memcpy(base.control_token, row.control_token, sizeof(base.control_token));
	memcpy(base.engine, row.engine, sizeof(base.engine));
	memcpy(base.engine_version, row.engine_version, sizeof(base.engine_version));
	memcpy(base.accel, row.accel, sizeof(base.accel));
	memcpy(base.manifest_sum, row.manifest_sum, sizeof(base.manifest_sum));
	char when[32];
	char what[96];
	time_format_rfc3339(when, sizeof(when), row.created_at_ms);
	text_format(what, sizeof(what), "snapshot %s of %s", row.id, when);
	r = base_verify(m, &base, POOL_SNAPSHOTS, row.fingerprint, row.boot_id, what, e);
	if (r == 0)
		*ret = base;
	return r;
}

int base_open_template(struct session_manager *m, const struct store_template *row, struct base *ret, struct error *e)
{
	struct base base = {.is_template = 1,
	                    .folder_fd = -1,
	                    .vcpus = row->vcpus,
	                    .memory_bytes = row->memory_bytes,
	                    .disk_bytes = row->disk_bytes,
	                    .created_at_ms = row->created_at_ms};
	memcpy(base.id, row->id, sizeof(base.id));
	memcpy(base.control_token, row->control_token, sizeof(base.control_token));
	memcpy(base.engine, row->engine, sizeof(base.engine));
	memcpy(base.engine_version, row->engine_version, sizeof(base.engine_version));
	memcpy(base.accel, row->accel, sizeof(base.accel));
	memcpy(base.manifest_sum, row->manifest_sum, sizeof(base.manifest_sum));
	char what[192];
	text_format(what, sizeof(what), "template %s:%s", row->name, row->tag);
	int r = base_verify(m, &base, POOL_TEMPLATES, row->fingerprint, row->boot_id, what, e);
	if (r == 0)
		*ret = base;
	return r;
}

int base_open_head(struct session_manager *m, const struct store_session *row, struct base *ret, struct error *e)
{
	if (row->head[0]) {
		int opened = base_open_snapshot(m, row->head, ret, e);
		if (opened == 0)
			memcpy(ret->template_id, row->template_id, sizeof(ret->template_id));
		return opened;
	}
	struct store_template template;
	int r = store_template_find(m->store, row->template_id, &template, e);
	if (r < 0)
		return error_prefix(e, "the session has no snapshot to wake from, and its template is gone");
	r = base_open_template(m, &template, ret, e);
	store_template_clear(&template);
	return r;
}

int sandbox_reserve(struct session_manager *m, struct error *e)
{
	for (;;) {
		pthread_mutex_lock(&m->mutex);
		int ok = m->sandboxes < m->config.sandboxes_max;
		if (ok)
			m->sandboxes++;
		pthread_mutex_unlock(&m->mutex);
		if (ok)
			return 0;
		/* Pooled ones are only there to be quick; they give way to real work. */
		if (!spare_evict(m) && !warm_pool_evict(m))
			return error_set(e, ERROR_EXHAUSTED, "%u sandboxes run already, which is this host's limit",
			                 m->config.sandboxes_max);
	}
}

void sandbox_unreserve(struct session_manager *m)
{
	pthread_mutex_lock(&m->mutex);
	m->sandboxes--;
	pthread_mutex_unlock(&m->mutex);
}

int start_slot_take(struct session_manager *m, struct session *s, struct error *e)
{
	int r = 0;
	pthread_mutex_lock(&m->mutex);
	while (m->starts >= m->starts_max) {
		struct timespec until;
		clock_gettime(CLOCK_REALTIME, &until);
		until.tv_nsec += 100000000;
		if (until.tv_nsec >= 1000000000) {
			until.tv_sec++;
			until.tv_nsec -= 1000000000;
		}
		pthread_cond_timedwait(&m->idle, &m->mutex, &until);
		if (s && (r = session_check_canceled(s, e)) < 0)
			break;
	}
	if (r == 0)
		m->starts++;
	pthread_mutex_unlock(&m->mutex);
	return r;
}

void start_slot_give(struct session_manager *m)
{
	pthread_mutex_lock(&m->mutex);
	m->starts--;
	pthread_cond_broadcast(&m->idle);
	pthread_mutex_unlock(&m->mutex);
}

struct sandbox *sandbox_alloc(struct session_manager *m)
{
	struct sandbox *sandbox = calloc(1, sizeof(*sandbox));
	if (!sandbox)
		return NULL;
	sandbox->folder_fd = -1;
	sandbox->memory_fd = -1;
	sandbox->disk_fd = -1;
	sandbox->guest.helper = m->helper;
	id_make(sandbox->row.id, 'b');
	memcpy(sandbox->guest.sandbox_id, sandbox->row.id, sizeof(sandbox->guest.sandbox_id));
	return sandbox;
}

int sandbox_new(struct session_manager *m, const struct base *base, struct sandbox **ret, struct error *e)
{
	struct sandbox *sandbox = spare_take(m, base->memory_bytes, base->disk_bytes, base->vcpus);
	if (!sandbox) {
		sandbox = sandbox_alloc(m);
		if (!sandbox)
			return error_set_errno(e, ENOMEM, "sandbox");
		int r = sandbox_reserve(m, e);
		if (r < 0) {
			free(sandbox);
			return r;
		}
	}
	atomic_fetch_add(sandbox->vmm ? &m->metrics.spare_hits : &m->metrics.spare_misses, 1);
	warm_pool_poke(m);
	memcpy(sandbox->row.base, base->id, sizeof(sandbox->row.base));
	memcpy(sandbox->row.base_sum, base->manifest_sum, sizeof(sandbox->row.base_sum));
	memcpy(sandbox->row.previous_control_token, base->control_token, sizeof(sandbox->row.previous_control_token));
	token_make(sandbox->row.control_token);
	sandbox->row.created_at_ms = time_realtime_ms();
	sandbox->memory_bytes = base->memory_bytes;
	sandbox->disk_bytes = base->disk_bytes;
	sandbox->vcpus = base->vcpus;
	if (base->is_template)
		memcpy(sandbox->template_id, base->id, sizeof(sandbox->template_id));
	*ret = sandbox;
	return 0;
}

static int sandbox_files(struct session_manager *m, const struct base *base, struct sandbox *sandbox, struct error *e)
{
	int is_spare = sandbox->vmm != NULL;
	if (!is_spare)
		sandbox->folder_fd = pool_make(&m->pool, POOL_SANDBOXES, sandbox->row.id, e);
	if (sandbox->folder_fd < 0)
		return sandbox->folder_fd;
	static const char *const linked[] = {"memory", "checksums"};
	for (size_t i = 0; i < ARRAY_SIZE(linked); i++)
		if (linkat(base->folder_fd, linked[i], sandbox->folder_fd, linked[i], 0) < 0)
			return error_set_errno(e, errno, "linking %s of %s", linked[i], base->id);
	sandbox->memory_fd = pool_open_file(sandbox->folder_fd, "memory", O_RDONLY, e);
	if (sandbox->memory_fd < 0)
		return sandbox->memory_fd;
	CLEANUP_CLOSE int disk = pool_open_file(base->folder_fd, "disk", O_RDONLY, e);
	if (disk < 0)
		return disk;
	/* A spare has this file open and has not read from it. */
	if (!is_spare)
		sandbox->disk_fd = pool_create_file(sandbox->folder_fd, "disk", e);
	if (sandbox->disk_fd < 0)
		return sandbox->disk_fd;
	int r = pool_clone(&m->pool, disk, sandbox->disk_fd, e);
	if (r < 0)
		return r;
	if (mkdirat(m->runtime_fd, sandbox->row.id, 0700) < 0 && errno != EEXIST)
		return error_set_errno(e, errno, "making %s/%s", m->runtime_path, sandbox->row.id);
	return 0;
}

static int start_vmm(struct session_manager *m, struct sandbox *sandbox, struct error *e)
{
	char runtime[640];
	text_format(runtime, sizeof(runtime), "%s/%s", m->runtime_path, sandbox->row.id);
	struct vmm_config config = {.sandbox_id = sandbox->row.id,
	                            .runtime_dir = runtime,
	                            .memory_bytes = sandbox->memory_bytes,
	                            .vcpus = (unsigned)sandbox->vcpus,
	                            .memory_fd = sandbox->memory_fd,
	                            .disk_fd = sandbox->disk_fd,
	                            .kernel_fd = -1,
	                            .initrd_fd = -1,
	                            .console_fd = -1};
	/* The helper may be starting again just now; a start that failed leaves nothing and may be repeated. */
	int r = -EAGAIN;
	for (int i = 0; i < START_ATTEMPTS && r < 0; i++) {
		struct error why;
		if (i)
			usleep(START_PAUSE_MS * 1000);
		r = vmm_prepare(&m->host, &config, &sandbox->vmm, &why);
		if (r < 0 && e)
			*e = why;
		if (r < 0 && why.code != ERROR_UNAVAILABLE)
			break;
	}
	return r;
}

int sandbox_start(struct session_manager *m, const struct base *base, struct sandbox *sandbox, struct error *e)
{
	uint64_t times[5] = {time_monotonic_us()};
	int r = sandbox_files(m, base, sandbox, e);
	if (r < 0)
		return r;
	if (!base->is_template)
		hot_pages_prefetch(m, base->template_id, sandbox->memory_fd);
	times[1] = time_monotonic_us();
	r = sandbox->vmm ? vmm_give_memory(sandbox->vmm, sandbox->memory_fd, sandbox->is_measured, e)
	                 : start_vmm(m, sandbox, e);
	if (r < 0)
		return error_prefix(e, "starting a sandbox");
	times[2] = time_monotonic_us();
	CLEANUP_CLOSE int state = pool_open_file(base->folder_fd, "state", O_RDONLY, e);
	if (state < 0)
		return state;
	r = vmm_load(sandbox->vmm, state, e);
	times[3] = time_monotonic_us();
	if (r == 0)
		r = vmm_run(sandbox->vmm, e);
	times[4] = time_monotonic_us();
	log_debug("session", "sandbox %s: files %llu, VMM %llu, load %llu, run %llu us", sandbox->row.id,
	          (unsigned long long)(times[1] - times[0]), (unsigned long long)(times[2] - times[1]),
	          (unsigned long long)(times[3] - times[2]), (unsigned long long)(times[4] - times[3]));
	return r < 0 ? error_prefix(e, "starting a sandbox") : 0;
}

int sandbox_identify(struct session_manager *m, struct sandbox *sandbox, const struct store_session *row,
                     struct error *e)
{
	char hostname[STORE_NAME_BYTES];
	text_copy(hostname, sizeof(hostname), row->name[0] ? row->name : row->id);
	for (char *p = hostname; *p; p++)
		if (*p == '_' || *p == '.')
			*p = '-';
	struct guest_identity identity = {.session_id = row->id,
	                                  .sandbox_id = sandbox->row.id,
	                                  .template_id = row->template_name,
	                                  .hostname = hostname,
	                                  .machine_id = row->machine_id,
	                                  .environment = row->environment,
	                                  .access_token = row->access_token,
	                                  .control_token = sandbox->row.control_token,
	                                  .thaw = 1};
	const char *present =
	    sandbox->row.previous_control_token[0] ? sandbox->row.previous_control_token : sandbox->row.control_token;
	uint64_t start = time_monotonic_us();
	int r = guest_resume_as(&sandbox->guest, present, &identity, GUEST_START_TIMEOUT_MS, e);
	log_debug("session", "sandbox %s: identity %llu us", sandbox->row.id,
	          (unsigned long long)(time_monotonic_us() - start));
	if (r == 0)
		sandbox->row.previous_control_token[0] = '\0';
	return r;
}

int sandbox_adopt(struct session_manager *m, const struct store_sandbox *row, const struct store_session *session,
                  struct sandbox **ret, struct error *e)
{
	struct sandbox *sandbox = sandbox_alloc(m);
	if (!sandbox)
		return error_set_errno(e, ENOMEM, "sandbox");
	sandbox->row = *row;
	memcpy(sandbox->guest.sandbox_id, row->id, sizeof(sandbox->guest.sandbox_id));
	sandbox->memory_bytes = session->memory_bytes;
	sandbox->disk_bytes = session->disk_bytes;
	sandbox->vcpus = session->vcpus;
	char runtime[640];
	text_format(runtime, sizeof(runtime), "%s/%s", m->runtime_path, row->id);
	int r = 0;
	sandbox->folder_fd = pool_folder(&m->pool, POOL_SANDBOXES, row->id, e);
	if (sandbox->folder_fd >= 0)
		sandbox->memory_fd = pool_open_file(sandbox->folder_fd, "memory", O_RDONLY, e);
	if (sandbox->memory_fd >= 0)
		sandbox->disk_fd = pool_open_file(sandbox->folder_fd, "disk", O_RDWR, e);
	if (sandbox->disk_fd < 0)
		r = error_code_errno(e ? e->code : ERROR_INTERNAL);
	if (r == 0)
		r = vmm_adopt(&m->host, row->id, runtime, &sandbox->vmm, e);
	pthread_mutex_lock(&m->mutex);
	m->sandboxes++;
	pthread_mutex_unlock(&m->mutex);
	if (r < 0) {
		sandbox_destroy(m, sandbox);
		return r;
	}
	*ret = sandbox;
	return 0;
}

void sandbox_destroy(struct session_manager *m, struct sandbox *sandbox)
{
	if (!sandbox)
		return;
	struct error e;
	scheduler_forget(m, sandbox);
	guest_close(&sandbox->guest);
	int r = -1;
	/* The helper may be starting again just now. */
	for (int i = 0; i < KILL_ATTEMPTS; i++) {
		r = host_sandbox_kill(m->helper, sandbox->row.id, &e);
		if (r == 0 || e.code != ERROR_UNAVAILABLE)
			break;
		usleep(KILL_PAUSE_MS * 1000);
	}
	vmm_free(sandbox->vmm);
	if (sandbox->memory_fd >= 0)
		close(sandbox->memory_fd);
	if (sandbox->disk_fd >= 0)
		close(sandbox->disk_fd);
	if (sandbox->folder_fd >= 0)
		close(sandbox->folder_fd);
	if (r == 0) {
		sandbox_remove_traces(m, sandbox->row.id);
		sandbox_unreserve(m);
	} else {
		/* Its lease stays, so that no second sandbox of the session can start beside it. */
		log_error("session", "sandbox %s could not be ended: %s", sandbox->row.id, e.message);
		scheduler_doom(m, sandbox->row.id);
	}
	free(sandbox->page_sums);
	explicit_bzero(sandbox, sizeof(*sandbox)); /* tokens */
	free(sandbox);
}

void sandbox_remove_traces(struct session_manager *m, const char *id)
{
	struct error e;
	pool_remove(&m->pool, POOL_SANDBOXES, id);
	pool_remove_flat(m->runtime_fd, id);
	if (store_begin(m->store, STORE_RELAXED, &e) == 0) {
		if (store_sandbox_delete(m->store, id, &e) < 0)
			store_rollback(m->store);
		else
			store_commit(m->store, &e);
	}
}
