#include "session/capture.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/log.h"
#include "session/disk_file.h"
#include "session/memory_file.h"
#include "session/seal.h"

#define COPY_ATTEMPTS 10
#define COPY_PAUSE_MS 50

void capture_close(struct session_manager *m, struct capture *capture)
{
	int *fds[] = {&capture->folder_fd, &capture->pages_fd, &capture->bitmap_fd, &capture->state_fd};
	for (size_t i = 0; i < ARRAY_SIZE(fds); i++) {
		if (*fds[i] >= 0)
			close(*fds[i]);
		*fds[i] = -1;
	}
	free(TAKE_PTR(capture->page_sums));
	pool_remove(&m->pool, POOL_TMP, capture->id);
}

int capture_open(struct session_manager *m, const struct sandbox *sandbox, char id_prefix, struct capture *capture,
                 struct error *e)
{
	*capture = (struct capture){.folder_fd = -1, .pages_fd = -1, .bitmap_fd = -1, .state_fd = -1};
	id_make(capture->id, id_prefix);
	uint64_t pages = sandbox->memory_bytes / MEMORY_PAGE_BYTES;
	capture->pages_fd = fd_memfd("space-pages", (size_t)sandbox->memory_bytes);
	capture->bitmap_fd = fd_memfd("space-bitmap", (size_t)((pages + 63) / 64 * 8));
	capture->state_fd = fd_memfd("space-state", 0);
	if (capture->pages_fd < 0 || capture->bitmap_fd < 0 || capture->state_fd < 0) {
		capture_close(m, capture);
		return error_set(e, ERROR_EXHAUSTED, "no memory on the host for a snapshot");
	}
	capture->folder_fd = pool_make(&m->pool, POOL_TMP, capture->id, e);
	if (capture->folder_fd < 0) {
		int r = capture->folder_fd;
		capture_close(m, capture);
		return r;
	}
	return 0;
}

struct copy {
	struct session_manager *m;
	struct sandbox *sandbox;
	struct capture *capture;
	int result;
	struct error error;
};

static int copy_state_and_disk(struct session_manager *m, struct sandbox *sandbox, struct capture *capture,
                               struct error *e)
{
	uint64_t start = time_monotonic_us();
	int r = vmm_save_state(sandbox->vmm, capture->state_fd, e);
	if (r < 0)
		return r;
	uint64_t saved = time_monotonic_us();
	CLEANUP_CLOSE int disk = pool_create_file(capture->folder_fd, "disk", e);
	if (disk < 0)
		return disk;
	r = pool_clone(&m->pool, sandbox->disk_fd, disk, e);
	log_debug("session", "snapshot %s: device state %llu, disk %llu us", capture->id,
	          (unsigned long long)(saved - start), (unsigned long long)(time_monotonic_us() - saved));
	return r;
}

/* With patience for a helper that is starting again just now: the copy is idempotent. */
static int copy_pages(struct session_manager *m, const struct sandbox *sandbox, const struct capture *capture,
                      uint64_t *ret_pages, struct error *e)
{
	for (int i = 0;; i++) {
		struct error why;
		int r = host_memory_copy(m->helper, sandbox->row.id, sandbox->memory_fd, sandbox->memory_bytes,
		                         capture->pages_fd, capture->bitmap_fd, ret_pages, &why);
		if (r == 0)
			return 0;
		if (why.code != ERROR_UNAVAILABLE || i == COPY_ATTEMPTS) {
			if (e)
				*e = why;
			return r;
		}
		usleep(COPY_PAUSE_MS * 1000);
	}
}

static void *copy_memory(void *context)
{
	struct copy *copy = context;
	uint64_t pages = 0;
	uint64_t start = time_monotonic_us();
	copy->result = copy_pages(copy->m, copy->sandbox, copy->capture, &pages, &copy->error);
	log_debug("session", "snapshot %s: %llu pages copied in %llu us", copy->capture->id, (unsigned long long)pages,
	          (unsigned long long)(time_monotonic_us() - start));
	return NULL;
}

/* Memory is copied by the helper while this process sees to device state and disk. */
static int copy_all(struct session_manager *m, struct sandbox *sandbox, struct capture *capture, struct error *e)
{
	struct copy copy = {.m = m, .sandbox = sandbox, .capture = capture};
	pthread_t thread;
	int threaded = pthread_create(&thread, NULL, copy_memory, &copy) == 0;
	int r = copy_state_and_disk(m, sandbox, capture, e);
	if (threaded)
		pthread_join(thread, NULL);
	else
		copy_memory(&copy);
	if (r == 0 && copy.result < 0) {
		r = copy.result;
		if (e)
			*e = copy.error;
	}
	return r;
}

static int go_on(struct sandbox *sandbox, struct error *e)
{
	int r = vmm_run(sandbox->vmm, e);
	if (r == 0)
		r = guest_thaw(&sandbox->guest, sandbox->row.control_token, GUEST_CALL_TIMEOUT_MS, e);
	return r;
}

int capture_undo_final(struct sandbox *sandbox, struct error *e)
{
	return go_on(sandbox, e);
}

static int take_running(struct session_manager *m, struct sandbox *sandbox, enum capture_mode mode,
                        struct capture *capture, struct error *e)
{
	if (mode == CAPTURE_LIVE) {
		/* Work that would otherwise be done within the stall: dirty blocks of the disk image, and the memory that the
		 * copy goes into. */
		uint64_t pages;
		fdatasync(sandbox->disk_fd);
		int r = copy_pages(m, sandbox, capture, &pages, e);
		if (r < 0)
			return r;
	}
	uint64_t start = time_monotonic_us();
	int r = guest_quiesce(&sandbox->guest, sandbox->row.control_token, GUEST_QUIESCE_TIMEOUT_MS, &capture->status, e);
	if (r < 0) {
		struct error ignored; /* it may have frozen after all */
		guest_thaw(&sandbox->guest, sandbox->row.control_token, GUEST_QUIESCE_TIMEOUT_MS, &ignored);
		return r;
	}
	r = vmm_stop(sandbox->vmm, e);
	capture->created_at_ms = time_realtime_ms();
	if (r == 0)
		r = copy_all(m, sandbox, capture, e);
	if (r < 0 || mode == CAPTURE_LIVE) {
		struct error after;
		int back = go_on(sandbox, &after);
		capture->stall_us = time_monotonic_us() - start;
		if (back < 0) {
			log_error("session", "sandbox %s does not go on after a snapshot: %s", sandbox->row.id, after.message);
			if (r == 0) {
				r = back;
				if (e)
					*e = after;
			}
		}
	}
	return r;
}

int capture_take(struct session_manager *m, struct sandbox *sandbox, enum capture_mode mode, struct capture *capture,
                 struct error *e)
{
	if (mode == CAPTURE_STOPPED) {
		capture->created_at_ms = time_realtime_ms();
		return copy_all(m, sandbox, capture, e);
	}
	int r = take_running(m, sandbox, mode, capture, e);
	if (r == 0 && mode == CAPTURE_LIVE)
		metrics_stall(&m->metrics, capture->stall_us);
	return r;
}

/* ---- clones ---- */

void capture_clones_close(struct capture_clones *clones)
{
	if (clones->memory_fd >= 0)
		close(clones->memory_fd);
	if (clones->table_fd >= 0)
		close(clones->table_fd);
	clones->memory_fd = clones->table_fd = -1;
}

static int clone_into(struct session_manager *m, int from_folder, int folder, const char *name, int *ret,
                      struct error *e)
{
	CLEANUP_CLOSE int from = pool_open_file(from_folder, name, O_RDONLY, e);
	if (from < 0)
		return from;
	*ret = pool_create_file(folder, name, e);
	return *ret < 0 ? *ret : pool_clone(&m->pool, from, *ret, e);
}

int capture_clone(struct session_manager *m, const char *id, const struct sandbox *sandbox,
                  const struct capture_source *source, struct capture_clones *ret, struct error *e)
{
	uint64_t start = time_monotonic_us();
	*ret = (struct capture_clones){.memory_fd = -1, .table_fd = -1};
	CLEANUP_CLOSE int folder = pool_folder(&m->pool, POOL_TMP, id, e);
	if (folder < 0)
		return folder;
	int r = 0;
	if (source->folder_fd >= 0) {
		r = clone_into(m, source->folder_fd, folder, "memory", &ret->memory_fd, e);
		if (r == 0)
			r = clone_into(m, source->folder_fd, folder, "checksums", &ret->table_fd, e);
	} else {
		ret->memory_fd = pool_create_file(folder, "memory", e);
		if (ret->memory_fd >= 0)
			ret->table_fd = pool_create_file(folder, "checksums", e);
		if (ret->table_fd < 0)
			r = error_code_errno(e ? e->code : ERROR_INTERNAL);
		else if (ftruncate(ret->memory_fd, (off_t)sandbox->memory_bytes) < 0)
			r = error_set_errno(e, errno, "memory file");
	}
	if (r < 0)
		capture_clones_close(ret);
	log_debug("session", "snapshot %s: clones %llu us", id, (unsigned long long)(time_monotonic_us() - start));
	return r;
}

/* ---- writing ---- */

struct write {
	struct session_manager *m;
	struct capture *capture;
	const struct sandbox *sandbox;
	const struct capture_source *source;
	const struct capture_clones *clones;
	struct seal_table table;
	int previous_memory; /* owned */
	int previous_disk;
	int disk;
	struct memory_counts counts;
	uint64_t disk_changed;
	uint64_t state_bytes;
	char state_sum[STORE_SUM_BYTES];
	char table_sum[STORE_SUM_BYTES];
};

static int write_open(struct write *w, struct error *e)
{
	int from = w->source->folder_fd;
	w->disk = pool_open_file(w->capture->folder_fd, "disk", O_RDONLY, e);
	if (w->disk < 0)
		return w->disk;
	w->previous_memory =
	    from >= 0 ? pool_open_file(from, "memory", O_RDONLY, e) : fcntl(w->sandbox->memory_fd, F_DUPFD_CLOEXEC, 3);
	if (w->previous_memory < 0)
		return from >= 0 ? w->previous_memory : error_set_errno(e, errno, "memory file");
	if (w->source->use_disk) {
		w->previous_disk = pool_open_file(from, "disk", O_RDONLY, e);
		if (w->previous_disk < 0)
			return w->previous_disk;
	}
	return seal_table_open(w->clones->table_fd, w->sandbox->memory_bytes, w->sandbox->disk_bytes, 1, &w->table, e);
}

static int memory_changed(void *context, uint64_t piece, const void *data, size_t size)
{
	struct write *w = context;
	_Static_assert(MEMORY_PIECE_BYTES == SEAL_BLOCK_BYTES, "a piece is what one checksum covers");
	seal_table_set_memory(&w->table, piece, data, size);
	return 0;
}

static int write_memory(struct write *w, struct error *e)
{
	uint64_t size = w->sandbox->memory_bytes;
	size_t bitmap_size = (size_t)((size / MEMORY_PAGE_BYTES + 63) / 64 * 8);
	/* Large and mostly untouched: what the delta does not reach costs nothing. Without it all still works. */
	w->capture->page_sums = calloc((size_t)(size / MEMORY_PAGE_BYTES), sizeof(uint64_t));
	void *pages = mmap(NULL, (size_t)size, PROT_READ, MAP_SHARED, w->capture->pages_fd, 0);
	void *bitmap = mmap(NULL, bitmap_size, PROT_READ, MAP_SHARED, w->capture->bitmap_fd, 0);
	int r;
	if (pages == MAP_FAILED || bitmap == MAP_FAILED) {
		r = error_set_errno(e, errno, "mapping copied guest memory");
	} else {
		struct memory_delta delta = {.pages = pages,
		                             .bits = bitmap,
		                             .size = size,
		                             .base_fd = w->sandbox->memory_fd,
		                             .previous_fd = w->previous_memory,
		                             .known = w->source->page_sums,
		                             .fresh = w->capture->page_sums};
		r = memory_file_write(&delta, w->clones->memory_fd, memory_changed, w, &w->counts, e);
	}
	if (pages != MAP_FAILED)
		munmap(pages, (size_t)size);
	if (bitmap != MAP_FAILED)
		munmap(bitmap, bitmap_size);
	if (r == 0)
		sync_file_range(w->clones->memory_fd, 0, 0, SYNC_FILE_RANGE_WRITE); /* starts what fsync() will wait for */
	return r;
}

struct disk_scan {
	struct write *w;
	struct error *e;
};

static int disk_changed(void *context, uint64_t start, uint64_t end)
{
	struct disk_scan *scan = context;
	return seal_table_scan(&scan->w->table, 1, scan->w->disk, start, end, &scan->w->disk_changed, scan->e);
}

static int write_disk(struct write *w, struct error *e)
{
	struct disk_scan scan = {.w = w, .e = e};
	/* A table without a disk to compare with may hold sums of something older. */
	if (!w->source->use_disk && w->source->folder_fd >= 0)
		return disk_changed(&scan, 0, w->sandbox->disk_bytes);
	return disk_file_changes(w->previous_disk, w->disk, w->m->pool.reflink, disk_changed, &scan, e);
}

static int write_state(struct write *w, struct error *e)
{
	struct stat st;
	if (fstat(w->capture->state_fd, &st) < 0)
		return error_set_errno(e, errno, "device state");
	if (st.st_size <= 0 || (uint64_t)st.st_size > 64 * MIB)
		return error_set(e, ERROR_INTERNAL, "device state of %lld bytes", (long long)st.st_size);
	CLEANUP_FREE char *data = malloc((size_t)st.st_size);
	if (!data)
		return error_set_errno(e, ENOMEM, "device state");
	if (fd_pread_full(w->capture->state_fd, data, (size_t)st.st_size, 0) != st.st_size)
		return error_set(e, ERROR_INTERNAL, "device state cannot be read back");
	w->state_bytes = (uint64_t)st.st_size;
	seal_sum(data, (size_t)st.st_size, w->state_sum);
	CLEANUP_CLOSE int fd = pool_create_file(w->capture->folder_fd, "state", e);
	if (fd < 0)
		return fd;
	int r = fd_write_full(fd, data, (size_t)st.st_size);
	if (r == 0 && fsync(fd) < 0)
		r = -errno;
	return r < 0 ? error_set_errno(e, r, "writing device state") : 0;
}

static int write_manifest(struct write *w, const char *kind, const char *parent, struct capture_result *ret,
                          struct error *e)
{
	char when[32];
	time_format_rfc3339(when, sizeof(when), w->capture->created_at_ms);
	json_t *manifest = json_pack(
	    "{s:i, s:s, s:s, s:s, s:s, s:{s:s, s:s, s:s}, s:I, s:{s:I}, s:{s:I}, s:{s:I, s:s}, s:{s:I, s:i, s:s}}",
	    "version", 1, "id", w->capture->id, "kind", kind, "parent", parent, "created_at", when, "engine", "name",
	    w->m->host.engine, "version", w->m->host.version, "accel", w->m->host.accel == VMM_ACCEL_KVM ? "kvm" : "tcg",
	    "vcpus", (json_int_t)w->sandbox->vcpus, "memory", "bytes", (json_int_t)w->sandbox->memory_bytes, "disk",
	    "bytes", (json_int_t)w->sandbox->disk_bytes, "state", "bytes", (json_int_t)w->state_bytes, "xxh3_128",
	    w->state_sum, "checksums", "bytes", (json_int_t)w->table.map_size, "block", SEAL_BLOCK_BYTES, "xxh3_128",
	    w->table_sum);
	CLEANUP_FREE char *text = manifest ? json_dumps(manifest, JSON_INDENT(1)) : NULL;
	json_decref(manifest);
	if (!text)
		return error_set_errno(e, ENOMEM, "manifest");
	seal_sum(text, strlen(text), ret->manifest_sum);
	CLEANUP_CLOSE int fd = pool_create_file(w->capture->folder_fd, "manifest.json", e);
	if (fd < 0)
		return fd;
	int r = fd_write_full(fd, text, strlen(text));
	if (r == 0 && fsync(fd) < 0)
		r = -errno;
	return r < 0 ? error_set_errno(e, r, "writing the manifest") : 0;
}

static int write_sync(struct write *w, struct error *e)
{
	int fds[] = {w->clones->memory_fd, w->disk, w->clones->table_fd};
	for (size_t i = 0; i < ARRAY_SIZE(fds); i++)
		if (fsync(fds[i]) < 0)
			return error_set_errno(e, errno, "syncing a snapshot");
	return 0;
}

static int write_all(struct write *w, const char *kind, const char *parent, struct capture_result *ret, struct error *e)
{
	uint64_t times[5] = {time_monotonic_us()};
	int r = write_open(w, e);
	times[1] = time_monotonic_us();
	if (r == 0)
		r = write_memory(w, e);
	times[2] = time_monotonic_us();
	if (r == 0)
		r = write_disk(w, e);
	times[3] = time_monotonic_us();
	if (r == 0)
		r = write_state(w, e);
	if (r == 0) {
		seal_table_sum(&w->table, w->table_sum);
		r = write_manifest(w, kind, parent, ret, e);
	}
	seal_table_close(&w->table);
	if (r == 0)
		r = write_sync(w, e);
	times[4] = time_monotonic_us();
	if (r == 0)
		r = seal_fingerprint(w->capture->folder_fd, ret->fingerprint, e);
	log_debug("session", "snapshot %s: open %llu, memory %llu, disk %llu, sync %llu us", w->capture->id,
	          (unsigned long long)(times[1] - times[0]), (unsigned long long)(times[2] - times[1]),
	          (unsigned long long)(times[3] - times[2]), (unsigned long long)(times[4] - times[3]));
	return r;
}

int capture_write(struct session_manager *m, struct capture *capture, const struct sandbox *sandbox,
                  const struct capture_source *source, const struct capture_clones *clones, enum pool_area area,
                  const char *kind, const char *parent, struct capture_result *ret, struct error *e)
{
	struct write w = {.m = m,
	                  .capture = capture,
	                  .sandbox = sandbox,
	                  .source = source,
	                  .clones = clones,
	                  .previous_memory = -1,
	                  .previous_disk = -1,
	                  .disk = -1};
	*ret = (struct capture_result){0};
	int r = write_all(&w, kind, parent, ret, e);
	int fds[] = {w.previous_memory, w.previous_disk, w.disk};
	for (size_t i = 0; i < ARRAY_SIZE(fds); i++)
		if (fds[i] >= 0)
			close(fds[i]);
	if (r == 0)
		r = pool_install(&m->pool, capture->id, area, e);
	if (r < 0)
		return r;
	ret->changed_bytes = w.counts.changed_pages * MEMORY_PAGE_BYTES + w.disk_changed + w.state_bytes;
	ret->bytes_stored = w.counts.written_bytes + w.disk_changed + w.state_bytes;
	atomic_fetch_add(&m->metrics.snapshot_written_bytes, ret->bytes_stored);
	atomic_fetch_add(&m->metrics.snapshot_changed_bytes, ret->changed_bytes);
	return 0;
}
