#include "session/spare.h"

#include <errno.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fd.h"
#include "session/internal.h"

struct spares {
	pthread_mutex_t mutex;
	struct sandbox *first;
	unsigned ready;
};

static int is_alive(const struct sandbox *sandbox)
{
	struct pollfd p = {.fd = vmm_pidfd(sandbox->vmm), .events = POLLIN};
	return poll(&p, 1, 0) == 0;
}

static int fits(const struct sandbox *sandbox, uint64_t memory_bytes, uint64_t disk_bytes, uint64_t vcpus)
{
	return sandbox->memory_bytes == memory_bytes && sandbox->disk_bytes == disk_bytes && sandbox->vcpus == vcpus &&
	       is_alive(sandbox);
}

int spare_init(struct session_manager *m, struct error *e)
{
	m->spares = calloc(1, sizeof(*m->spares));
	if (!m->spares)
		return error_set_errno(e, ENOMEM, "spare VMMs");
	pthread_mutex_init(&m->spares->mutex, NULL);
	return 0;
}

void spare_end(struct session_manager *m)
{
	if (!m->spares)
		return;
	while (spare_evict(m))
		;
	pthread_mutex_destroy(&m->spares->mutex);
	free(m->spares);
	m->spares = NULL;
}

struct sandbox *spare_take(struct session_manager *m, uint64_t memory_bytes, uint64_t disk_bytes, uint64_t vcpus)
{
	if (!m->spares)
		return NULL;
	struct sandbox *found = NULL;
	pthread_mutex_lock(&m->spares->mutex);
	for (struct sandbox **at = &m->spares->first; *at && !found; at = found ? at : &(*at)->next) {
		if (!fits(*at, memory_bytes, disk_bytes, vcpus))
			continue;
		found = *at;
		*at = found->next;
		found->next = NULL;
		m->spares->ready--;
	}
	pthread_mutex_unlock(&m->spares->mutex);
	return found;
}

int spare_evict(struct session_manager *m)
{
	if (!m->spares)
		return 0;
	pthread_mutex_lock(&m->spares->mutex);
	struct sandbox *sandbox = m->spares->first;
	if (sandbox) {
		m->spares->first = sandbox->next;
		m->spares->ready--;
	}
	pthread_mutex_unlock(&m->spares->mutex);
	sandbox_destroy(m, sandbox);
	return sandbox != NULL;
}

unsigned spare_ready(struct session_manager *m)
{
	if (!m->spares)
		return 0;
	pthread_mutex_lock(&m->spares->mutex);
	unsigned ready = m->spares->ready;
	pthread_mutex_unlock(&m->spares->mutex);
	return ready;
}

/* Those that have ended or that no restore of the present default template could use. */
static void drop_misfits(struct session_manager *m, uint64_t memory_bytes, uint64_t disk_bytes, uint64_t vcpus)
{
	struct sandbox *misfits = NULL;
	pthread_mutex_lock(&m->spares->mutex);
	for (struct sandbox **at = &m->spares->first; *at;) {
		struct sandbox *sandbox = *at;
		if (fits(sandbox, memory_bytes, disk_bytes, vcpus)) {
			at = &sandbox->next;
			continue;
		}
		*at = sandbox->next;
		m->spares->ready--;
		sandbox->next = misfits;
		misfits = sandbox;
	}
	pthread_mutex_unlock(&m->spares->mutex);
	while (misfits) {
		struct sandbox *sandbox = misfits;
		misfits = misfits->next;
		sandbox_destroy(m, sandbox);
	}
}

int spare_start(struct session_manager *m, struct sandbox *sandbox, struct error *e)
{
	CLEANUP_CLOSE int placeholder = fd_memfd("space-spare", sandbox->memory_bytes);
	if (placeholder < 0)
		return error_set_errno(e, placeholder, "a spare's memory file");
	sandbox->folder_fd = pool_make(&m->pool, POOL_SANDBOXES, sandbox->row.id, e);
	if (sandbox->folder_fd < 0)
		return sandbox->folder_fd;
	sandbox->disk_fd = pool_create_file(sandbox->folder_fd, "disk", e);
	if (sandbox->disk_fd < 0)
		return sandbox->disk_fd;
	if (ftruncate(sandbox->disk_fd, (off_t)sandbox->disk_bytes) < 0)
		return error_set_errno(e, errno, "a spare's disk");
	if (mkdirat(m->runtime_fd, sandbox->row.id, 0700) < 0)
		return error_set_errno(e, errno, "making %s/%s", m->runtime_path, sandbox->row.id);
	char runtime[640];
	text_format(runtime, sizeof(runtime), "%s/%s", m->runtime_path, sandbox->row.id);
	struct vmm_config config = {.sandbox_id = sandbox->row.id,
	                            .runtime_dir = runtime,
	                            .memory_bytes = sandbox->memory_bytes,
	                            .vcpus = (unsigned)sandbox->vcpus,
	                            .memory_fd = placeholder,
	                            .disk_fd = sandbox->disk_fd,
	                            .kernel_fd = -1,
	                            .initrd_fd = -1,
	                            .console_fd = -1};
	return vmm_prepare_spare(&m->host, &config, &sandbox->vmm, e);
}

int spare_fill_one(struct session_manager *m, uint64_t memory_bytes, uint64_t disk_bytes, uint64_t vcpus,
                   struct error *e)
{
	if (!m->spares)
		return 0;
	drop_misfits(m, memory_bytes, disk_bytes, vcpus);
	if (spare_ready(m) >= m->config.spares)
		return 0;
	pthread_mutex_lock(&m->mutex);
	int full = m->sandboxes >= m->config.sandboxes_max;
	m->sandboxes += !full;
	pthread_mutex_unlock(&m->mutex);
	if (full)
		return error_set(e, ERROR_EXHAUSTED, "no place for spare VMMs");
	struct sandbox *sandbox = sandbox_alloc(m);
	if (!sandbox) {
		sandbox_unreserve(m);
		return error_set_errno(e, ENOMEM, "spare VMM");
	}
	sandbox->memory_bytes = memory_bytes;
	sandbox->disk_bytes = disk_bytes;
	sandbox->vcpus = vcpus;
	int r = spare_start(m, sandbox, e);
	if (r < 0) {
		sandbox_destroy(m, sandbox);
		return error_prefix(e, "starting a spare VMM");
	}
	pthread_mutex_lock(&m->spares->mutex);
	sandbox->next = m->spares->first;
	m->spares->first = sandbox;
	m->spares->ready++;
	pthread_mutex_unlock(&m->spares->mutex);
	return 0;
}
