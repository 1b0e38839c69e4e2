#include "session/warm_pool.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/log.h"
#include "session/internal.h"
#include "session/scheduler.h"
#include "session/spare.h"

#define NICE 10
#define RETRY_S 10
#define IDLE_LOOK_S 30
#define QUIET_POLL_MS 50
#define QUIET_WAIT_MS 3000
#define WARM_ROUNDS 2

struct warm_pool {
	pthread_t thread;
	int started;
	pthread_mutex_t mutex;
	pthread_cond_t changed;
	struct sandbox *first;
	unsigned ready;
	int refresh; /* look at those that are there */
	int stopping;
};

static int is_alive(struct sandbox *sandbox)
{
	struct pollfd p = {.fd = vmm_pidfd(sandbox->vmm), .events = POLLIN};
	return poll(&p, 1, 0) == 0;
}

struct sandbox *warm_pool_take(struct session_manager *m, const char *template_id)
{
	struct warm_pool *pool = m->warm;
	if (!pool)
		return NULL;
	struct sandbox *dead = NULL;
	struct sandbox *found = NULL;
	pthread_mutex_lock(&pool->mutex);
	for (struct sandbox **at = &pool->first; *at && !found;) {
		struct sandbox *sandbox = *at;
		if (strcmp(sandbox->template_id, template_id) != 0) {
			at = &sandbox->next;
			continue;
		}
		*at = sandbox->next;
		pool->ready--;
		if (is_alive(sandbox)) {
			found = sandbox;
		} else {
			sandbox->next = dead;
			dead = sandbox;
		}
	}
	pthread_cond_signal(&pool->changed);
	pthread_mutex_unlock(&pool->mutex);
	while (dead) {
		struct sandbox *sandbox = dead;
		dead = dead->next;
		sandbox_destroy(m, sandbox);
	}
	if (found) {
		struct error e;
		found->next = NULL;
		/* Pooled guests stand still and cost no CPU. */
		if (vmm_run(found->vmm, &e) < 0) {
			log_warning("session", "a pooled sandbox does not run: %s", e.message);
			sandbox_destroy(m, found);
			found = NULL;
		}
	}
	return found;
}

int warm_pool_evict(struct session_manager *m)
{
	struct warm_pool *pool = m->warm;
	if (!pool)
		return 0;
	pthread_mutex_lock(&pool->mutex);
	struct sandbox *sandbox = pool->first;
	if (sandbox) {
		pool->first = sandbox->next;
		pool->ready--;
	}
	pthread_mutex_unlock(&pool->mutex);
	if (!sandbox)
		return 0;
	sandbox_destroy(m, sandbox);
	return 1;
}

void warm_pool_poke(struct session_manager *m)
{
	if (!m->warm)
		return;
	pthread_mutex_lock(&m->warm->mutex);
	pthread_cond_signal(&m->warm->changed);
	pthread_mutex_unlock(&m->warm->mutex);
}

void warm_pool_refresh(struct session_manager *m)
{
	struct warm_pool *pool = m->warm;
	if (!pool)
		return;
	pthread_mutex_lock(&pool->mutex);
	pool->refresh = 1;
	pthread_cond_signal(&pool->changed);
	pthread_mutex_unlock(&pool->mutex);
}

unsigned warm_pool_ready(struct session_manager *m)
{
	if (!m->warm)
		return 0;
	pthread_mutex_lock(&m->warm->mutex);
	unsigned ready = m->warm->ready;
	pthread_mutex_unlock(&m->warm->mutex);
	return ready;
}

/* Sandboxes that ended, or whose template is no longer the default one. */
static void drop_stale(struct session_manager *m, const char *template_id)
{
	struct warm_pool *pool = m->warm;
	struct sandbox *stale = NULL;
	pthread_mutex_lock(&pool->mutex);
	for (struct sandbox **at = &pool->first; *at;) {
		struct sandbox *sandbox = *at;
		if (strcmp(sandbox->template_id, template_id) == 0 && is_alive(sandbox)) {
			at = &sandbox->next;
			continue;
		}
		*at = sandbox->next;
		pool->ready--;
		sandbox->next = stale;
		stale = sandbox;
	}
	pthread_mutex_unlock(&pool->mutex);
	while (stale) {
		struct sandbox *sandbox = stale;
		stale = stale->next;
		sandbox_destroy(m, sandbox);
	}
}

/* Work that somebody waits for goes first. */
static void wait_for_quiet(struct session_manager *m)
{
	for (int waited = 0; waited < QUIET_WAIT_MS; waited += QUIET_POLL_MS) {
		pthread_mutex_lock(&m->mutex);
		unsigned starts = m->starts;
		pthread_mutex_unlock(&m->mutex);
		if (!starts)
			return;
		usleep(QUIET_POLL_MS * 1000);
	}
}

int warm_pool_warm_up(struct sandbox *sandbox, struct error *e)
{
	struct guest_identity identity = {.session_id = "",
	                                  .sandbox_id = sandbox->row.id,
	                                  .template_id = "",
	                                  .hostname = "warm",
	                                  .machine_id = "00000000000000000000000000000001",
	                                  .environment = "{}",
	                                  .access_token = sandbox->row.control_token,
	                                  .control_token = sandbox->row.control_token,
	                                  .thaw = 1};
	struct guest_status status;
	int r = guest_resume_as(&sandbox->guest, sandbox->row.previous_control_token, &identity, GUEST_START_TIMEOUT_MS, e);
	if (r < 0)
		return r;
	sandbox->row.previous_control_token[0] = '\0';
	/* The second time is for what is done only when a connection or process has gone before. */
	for (int i = 0; r == 0 && i < WARM_ROUNDS; i++)
		r = guest_run_true(&sandbox->guest, sandbox->row.control_token, GUEST_START_TIMEOUT_MS, e);
	if (r == 0)
		r = guest_quiesce(&sandbox->guest, sandbox->row.control_token, GUEST_QUIESCE_TIMEOUT_MS, &status, e);
	if (r == 0)
		r = vmm_stop(sandbox->vmm, e);
	return r;
}

static int store_row(struct session_manager *m, const struct store_sandbox *row, struct error *e)
{
	int r = store_begin(m->store, STORE_RELAXED, e);
	if (r < 0)
		return r;
	r = store_sandbox_insert(m->store, row, e);
	if (r == 0)
		return store_commit(m->store, e);
	store_rollback(m->store);
	return r;
}

static int fill_one(struct session_manager *m, const struct store_template *template, struct error *e)
{
	struct base base = {.folder_fd = -1};
	struct sandbox *sandbox = NULL;
	pthread_mutex_lock(&m->mutex);
	int full = m->sandboxes >= m->config.sandboxes_max;
	pthread_mutex_unlock(&m->mutex);
	if (full)
		return error_set(e, ERROR_EXHAUSTED, "no place for pooled sandboxes");
	int r = base_open_template(m, template, &base, e);
	if (r == 0)
		r = sandbox_new(m, &base, &sandbox, e);
	if (r == 0)
		r = store_row(m, &sandbox->row, e);
	if (r == 0)
		r = sandbox_start(m, &base, sandbox, e);
	if (r == 0)
		r = warm_pool_warm_up(sandbox, e);
	if (r == 0)
		r = scheduler_watch(m, sandbox, "", e);
	base_close(&base);
	if (r < 0) {
		sandbox_destroy(m, sandbox);
		return r;
	}
	pthread_mutex_lock(&m->warm->mutex);
	sandbox->next = m->warm->first;
	m->warm->first = sandbox;
	m->warm->ready++;
	pthread_mutex_unlock(&m->warm->mutex);
	return 0;
}

static void wait_until(struct warm_pool *pool, unsigned seconds)
{
	struct timespec until;
	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec += seconds;
	pthread_cond_timedwait(&pool->changed, &pool->mutex, &until);
}

/* With the pool's mutex held. */
static int is_full(struct session_manager *m)
{
	return m->warm->ready >= m->config.pool_size && spare_ready(m) >= m->config.spares;
}

static void *warm_thread(void *context)
{
	struct session_manager *m = context;
	struct warm_pool *pool = m->warm;
	setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), NICE);
	pthread_mutex_lock(&pool->mutex);
	while (!pool->stopping) {
		if (is_full(m) && !pool->refresh) {
			wait_until(pool, IDLE_LOOK_S);
			if (!pool->stopping && is_full(m) && !pool->refresh)
				continue;
		}
		pool->refresh = 0;
		pthread_mutex_unlock(&pool->mutex);
		struct store_template template;
		struct error e;
		int r = store_template_find(m->store, SESSION_TEMPLATE_DEFAULT, &template, &e);
		drop_stale(m, r == 0 ? template.id : "");
		if (r == 0) {
			wait_for_quiet(m);
			if (warm_pool_ready(m) < m->config.pool_size) {
				r = fill_one(m, &template, &e);
				if (r < 0 && e.code != ERROR_EXHAUSTED)
					log_warning("session", "warm pool: %s", e.message);
			} else {
				r = spare_fill_one(m, template.memory_bytes, template.disk_bytes, template.vcpus, &e);
				if (r < 0 && e.code != ERROR_EXHAUSTED)
					log_warning("session", "%s", e.message);
			}
			store_template_clear(&template);
		}
		pthread_mutex_lock(&pool->mutex);
		if (r < 0 && !pool->stopping && !pool->refresh)
			wait_until(pool, RETRY_S);
	}
	pthread_mutex_unlock(&pool->mutex);
	return NULL;
}

int warm_pool_start(struct session_manager *m, struct error *e)
{
	if (!m->config.pool_size && !m->config.spares)
		return 0;
	int ready = m->config.spares ? spare_init(m, e) : 0;
	if (ready < 0)
		return ready;
	struct warm_pool *pool = calloc(1, sizeof(*pool));
	if (!pool)
		return error_set_errno(e, ENOMEM, "warm pool");
	pthread_mutex_init(&pool->mutex, NULL);
	pthread_cond_init(&pool->changed, NULL);
	m->warm = pool;
	int r = pthread_create(&pool->thread, NULL, warm_thread, m);
	if (r)
		return error_set_errno(e, r, "warm pool");
	pool->started = 1;
	return 0;
}

void warm_pool_stop(struct session_manager *m)
{
	struct warm_pool *pool = m->warm;
	if (!pool)
		return;
	pthread_mutex_lock(&pool->mutex);
	pool->stopping = 1;
	pthread_cond_broadcast(&pool->changed);
	pthread_mutex_unlock(&pool->mutex);
	if (pool->started)
		pthread_join(pool->thread, NULL);
	while (warm_pool_evict(m))
		;
	spare_end(m);
	m->warm = NULL;
	pthread_cond_destroy(&pool->changed);
	pthread_mutex_destroy(&pool->mutex);
	free(pool);
}
