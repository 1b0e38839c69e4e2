#include "session/hot_pages.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/log.h"
#include "session/spare.h"
#include "session/warm_pool.h"

#define FILE_NAME "hot"
#define PAGE_BYTES UINT64_C(4096)
/* Pages between two ranges that are read along: cheaper than another request. */
#define GAP_PAGES 8
#define RANGES_MAX 65536
/* The kernel reads at most one window of read-ahead per call (a few MiB at the least), and forgets the rest. */
#define CALL_PAGES 64
#define PREFETCH_BYTES_MAX (256 * MIB)

struct range {
	uint32_t first; /* page */
	uint32_t count;
};

static size_t collect(const unsigned char *resident, size_t pages, struct range *ranges)
{
	size_t count = 0;
	for (size_t i = 0; i < pages && count < RANGES_MAX; i++) {
		if (!(resident[i] & 1))
			continue;
		struct range *last = count ? &ranges[count - 1] : NULL;
		if (last && i - (last->first + last->count) <= GAP_PAGES)
			last->count = (uint32_t)(i + 1 - last->first);
		else
			ranges[count++] = (struct range){.first = (uint32_t)i, .count = 1};
	}
	return count;
}

/* Nobody but the VMM has read from the file: what is in the page cache is what the guest touched. */
static int write_resident(const struct base *base, int template_fd, struct error *e)
{
	size_t pages = (size_t)(base->memory_bytes / PAGE_BYTES);
	CLEANUP_FREE unsigned char *resident = malloc(pages);
	CLEANUP_FREE struct range *ranges = malloc(RANGES_MAX * sizeof(*ranges));
	if (!resident || !ranges)
		return error_set_errno(e, ENOMEM, "hot pages");
	CLEANUP_CLOSE int memory = pool_open_file(base->folder_fd, "memory", O_RDONLY, e);
	if (memory < 0)
		return memory;
	void *at = mmap(NULL, (size_t)base->memory_bytes, PROT_READ, MAP_SHARED, memory, 0);
	if (at == MAP_FAILED)
		return error_set_errno(e, errno, "hot pages");
	int r = mincore(at, (size_t)base->memory_bytes, resident) < 0 ? -errno : 0;
	munmap(at, (size_t)base->memory_bytes);
	if (r < 0)
		return error_set_errno(e, r, "hot pages");
	size_t count = collect(resident, pages, ranges);
	unlinkat(template_fd, FILE_NAME, 0);
	CLEANUP_CLOSE int file = pool_create_file(template_fd, FILE_NAME, e);
	if (file < 0)
		return file;
	r = fd_write_full(file, ranges, count * sizeof(*ranges));
	return r < 0 ? error_set_errno(e, r, "hot pages") : 0;
}

/* A folder as the template's, whose memory is a clone that no page cache knows. */
static int make_cold_base(struct session_manager *m, const struct base *template, const char *id, struct base *ret,
                          struct error *e)
{
	static const char *const linked[] = {"checksums", "disk", "state"};
	*ret = *template;
	ret->folder_fd = pool_make(&m->pool, POOL_TMP, id, e);
	if (ret->folder_fd < 0)
		return ret->folder_fd;
	for (size_t i = 0; i < ARRAY_SIZE(linked); i++)
		if (linkat(template->folder_fd, linked[i], ret->folder_fd, linked[i], 0) < 0)
			return error_set_errno(e, errno, "linking %s of %s", linked[i], template->id);
	CLEANUP_CLOSE int from = pool_open_file(template->folder_fd, "memory", O_RDONLY, e);
	if (from < 0)
		return from;
	CLEANUP_CLOSE int to = pool_create_file(ret->folder_fd, "memory", e);
	return to < 0 ? to : pool_clone(&m->pool, from, to, e);
}

static int start_and_warm(struct session_manager *m, const struct base *base, struct sandbox *sandbox, struct error *e)
{
	sandbox->memory_bytes = base->memory_bytes;
	sandbox->disk_bytes = base->disk_bytes;
	sandbox->vcpus = base->vcpus;
	sandbox->is_measured = 1;
	memcpy(sandbox->row.previous_control_token, base->control_token, sizeof(sandbox->row.previous_control_token));
	token_make(sandbox->row.control_token);
	int r = spare_start(m, sandbox, e);
	if (r == 0)
		r = sandbox_start(m, base, sandbox, e);
	return r < 0 ? r : warm_pool_warm_up(sandbox, e);
}

int hot_pages_record(struct session_manager *m, const struct store_template *template, struct error *e)
{
	char id[ID_BYTES];
	struct base base = {.folder_fd = -1};
	struct base cold = {.folder_fd = -1};
	struct sandbox *sandbox = NULL;
	id_make(id, 'h');
	int r = base_open_template(m, template, &base, e);
	if (r == 0)
		r = make_cold_base(m, &base, id, &cold, e);
	if (r == 0)
		r = sandbox_reserve(m, e);
	if (r == 0) {
		sandbox = sandbox_alloc(m);
		if (sandbox) {
			r = start_and_warm(m, &cold, sandbox, e);
		} else {
			sandbox_unreserve(m);
			r = error_set_errno(e, ENOMEM, "hot pages");
		}
	}
	if (r == 0)
		r = write_resident(&cold, base.folder_fd, e);
	sandbox_destroy(m, sandbox);
	base_close(&cold);
	base_close(&base);
	pool_remove(&m->pool, POOL_TMP, id);
	return r;
}

struct prefetch {
	int memory_fd;
	size_t count;
	struct range ranges[];
};

static void *prefetch_thread(void *context)
{
	struct prefetch *p = context;
	uint64_t pages = PREFETCH_BYTES_MAX / PAGE_BYTES;
	for (size_t i = 0; i < p->count && pages; i++) {
		uint64_t first = p->ranges[i].first;
		uint64_t left = MIN(p->ranges[i].count, pages);
		pages -= left;
		while (left) {
			uint64_t part = MIN(left, CALL_PAGES);
			posix_fadvise(p->memory_fd, (off_t)(first * PAGE_BYTES), (off_t)(part * PAGE_BYTES), POSIX_FADV_WILLNEED);
			first += part;
			left -= part;
		}
	}
	close(p->memory_fd);
	free(p);
	return NULL;
}

static struct prefetch *read_ranges(struct session_manager *m, const char *template_id)
{
	struct error ignored;
	struct stat st;
	CLEANUP_CLOSE int folder = pool_folder(&m->pool, POOL_TEMPLATES, template_id, &ignored);
	if (folder < 0)
		return NULL;
	CLEANUP_CLOSE int file = pool_open_file(folder, FILE_NAME, O_RDONLY, &ignored);
	if (file < 0 || fstat(file, &st) < 0 || st.st_size <= 0 || st.st_size % (off_t)sizeof(struct range) ||
	    st.st_size > (off_t)(RANGES_MAX * sizeof(struct range)))
		return NULL;
	struct prefetch *p = malloc(sizeof(*p) + (size_t)st.st_size);
	if (!p)
		return NULL;
	p->count = (size_t)st.st_size / sizeof(struct range);
	if (fd_pread_full(file, p->ranges, (size_t)st.st_size, 0) == st.st_size)
		return p;
	free(p);
	return NULL;
}

void hot_pages_prefetch(struct session_manager *m, const char *template_id, int memory_fd)
{
	struct prefetch *p = template_id[0] ? read_ranges(m, template_id) : NULL;
	pthread_t thread;
	pthread_attr_t attributes;
	if (!p)
		return;
	p->memory_fd = fcntl(memory_fd, F_DUPFD_CLOEXEC, 3);
	pthread_attr_init(&attributes);
	pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
	if (p->memory_fd < 0 || pthread_create(&thread, &attributes, prefetch_thread, p) != 0) {
		if (p->memory_fd >= 0)
			close(p->memory_fd);
		free(p);
	}
	pthread_attr_destroy(&attributes);
}
