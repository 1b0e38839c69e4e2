/* The manager as a whole: start and end. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/log.h"
#include "session/internal.h"
#include "session/jobs.h"
#include "session/scheduler.h"
#include "session/warm_pool.h"

#define HELPER_WAIT_MS 15000
#define HELPER_PAUSE_MS 100
#define SESSIONS_MAX_DEFAULT 10000
#define SANDBOXES_MAX_DEFAULT 256
#define STARTS_EXTRA 1

static int copy_text(const char *from, const char **to)
{
	*to = from ? strdup(from) : NULL;
	return from && !*to ? -ENOMEM : 0;
}

static int copy_config(const struct session_config *from, struct session_config *to)
{
	*to = *from;
	to->data_dir = to->runtime_dir = to->helper_socket = to->agent_path = NULL;
	if (!to->sessions_max)
		to->sessions_max = SESSIONS_MAX_DEFAULT;
	if (!to->sandboxes_max)
		to->sandboxes_max = SANDBOXES_MAX_DEFAULT;
	to->sandboxes_max = MIN(to->sandboxes_max, (unsigned)HOST_SANDBOXES_MAX);
	to->pool_size = MIN(to->pool_size, (unsigned)SESSION_WARM_MAX);
	to->spares = MIN(to->spares, (unsigned)SESSION_WARM_MAX);
	if (copy_text(from->data_dir, &to->data_dir) < 0 || copy_text(from->runtime_dir, &to->runtime_dir) < 0 ||
	    copy_text(from->helper_socket, &to->helper_socket) < 0 || copy_text(from->agent_path, &to->agent_path) < 0)
		return -ENOMEM;
	return to->data_dir && to->runtime_dir && to->helper_socket ? 0 : -EINVAL;
}

static void free_text(const char *text)
{
	free((void *)(uintptr_t)text);
}

static int read_boot_id(char to[STORE_BOOT_ID_BYTES])
{
	CLEANUP_FREE char *text = NULL;
	int r = fd_read_file(AT_FDCWD, "/proc/sys/kernel/random/boot_id", 256, &text, NULL);
	if (r < 0)
		return r;
	text[strcspn(text, "\n")] = '\0';
	return text_copy(to, STORE_BOOT_ID_BYTES, text);
}

/* Helper and worker are started together. */
static int wait_for_helper(struct session_manager *m, struct error *e)
{
	uint64_t end = time_monotonic_ms() + HELPER_WAIT_MS;
	for (;;) {
		struct host_storage_info storage;
		int r = host_storage(m->helper, &storage, e);
		if (r == 0 || (e && e->code != ERROR_UNAVAILABLE && e->code != ERROR_NOT_FOUND) || time_monotonic_ms() > end)
			return r;
		usleep(HELPER_PAUSE_MS * 1000);
	}
}

static int open_runtime(struct session_manager *m, struct error *e)
{
	if (text_format(m->runtime_path, sizeof(m->runtime_path), "%s/sandboxes", m->config.runtime_dir) < 0)
		return error_set(e, ERROR_INVALID, "the path of the runtime folder is too long");
	if (mkdir(m->runtime_path, 0700) < 0 && errno != EEXIST)
		return error_set_errno(e, errno, "making %s", m->runtime_path);
	m->runtime_fd = open(m->runtime_path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	return m->runtime_fd < 0 ? error_set_errno(e, errno, "opening %s", m->runtime_path) : 0;
}

static int open_all(struct session_manager *m, struct error *e)
{
	char path[1024];
	int r = read_boot_id(m->boot_id);
	if (r < 0)
		return error_set_errno(e, r, "boot id of this host");
	if (text_format(path, sizeof(path), "%s/space.db", m->config.data_dir) < 0)
		return error_set(e, ERROR_INVALID, "the path of the data folder is too long");
	r = host_client_new(m->config.helper_socket, &m->helper, e);
	/* The helper first: it mounts the pool. */
	if (r == 0)
		r = wait_for_helper(m, e);
	if (r == 0)
		r = store_open(path, &m->store, e);
	if (r == 0)
		r = pool_open(m->config.data_dir, &m->pool, e);
	if (r == 0)
		r = open_runtime(m, e);
	if (r == 0)
		r = vmm_probe(m->helper, &m->host, m->host_why, sizeof(m->host_why), e);
	if (r == 0)
		r = jobs_new(&m->jobs, e);
	if (r == 0)
		r = scheduler_prepare(m, e);
	return r;
}

int session_manager_new(const struct session_config *config, struct session_manager **ret, struct error *e)
{
	struct session_manager *m = calloc(1, sizeof(*m));
	if (!m)
		return error_set_errno(e, ENOMEM, "session manager");
	pthread_mutex_init(&m->mutex, NULL);
	pthread_mutex_init(&m->build_mutex, NULL);
	pthread_cond_init(&m->idle, NULL);
	m->runtime_fd = -1;
	for (int i = 0; i < POOL_AREA_COUNT; i++)
		m->pool.fds[i] = -1;
	atomic_store(&m->event_id, time_realtime_ms() * 1000);
	long cpus = sysconf(_SC_NPROCESSORS_ONLN);
	m->starts_max = (unsigned)MAX(cpus, 1L) + STARTS_EXTRA;
	int r = copy_config(config, &m->config);
	if (r < 0)
		error_set_errno(e, r, "configuration of the session manager");
	if (r == 0)
		r = open_all(m, e);
	if (r == 0)
		r = recovery_run(m, e);
	if (r == 0)
		r = scheduler_start(m, e);
	if (r == 0)
		r = warm_pool_start(m, e);
	if (r < 0) {
		session_manager_free(m);
		return r;
	}
	log_info("session", "%s %s: %s", m->host.engine, m->host.version, m->host_why);
	*ret = m;
	return 0;
}

/* Lets go of an adopted or running sandbox without ending it. */
static void let_go(struct session *s)
{
	struct sandbox *sandbox = s->sandbox;
	guest_close(&sandbox->guest);
	vmm_free(sandbox->vmm);
	close(sandbox->memory_fd);
	close(sandbox->disk_fd);
	close(sandbox->folder_fd);
	free(sandbox->page_sums);
	free(sandbox);
	s->sandbox = NULL;
}

void session_manager_free(struct session_manager *m)
{
	if (!m)
		return;
	scheduler_stop(m);
	warm_pool_stop(m);
	jobs_free(m->jobs);
	struct session **list = NULL;
	size_t count = 0;
	session_acquire_live(m, &list, &count);
	for (size_t i = 0; i < count; i++) {
		/* Verbs in progress end first. */
		if (session_turn_begin(list[i], NULL) == 0) {
			if (list[i]->sandbox)
				let_go(list[i]);
			session_turn_end(list[i]);
		}
		session_release(m, list[i]);
	}
	free(list);
	scheduler_free(m);
	store_close(m->store);
	host_client_free(m->helper);
	pool_close(&m->pool);
	if (m->runtime_fd >= 0)
		close(m->runtime_fd);
	free_text(m->config.data_dir);
	free_text(m->config.runtime_dir);
	free_text(m->config.helper_socket);
	free_text(m->config.agent_path);
	pthread_cond_destroy(&m->idle);
	pthread_mutex_destroy(&m->build_mutex);
	pthread_mutex_destroy(&m->mutex);
	free(m);
}
