/*
 * The VMM maps its base memory file privately; what the guest has changed since are the anonymous pages of that
 * mapping. pagemap (Linux: Documentation/admin-guide/mm/pagemap.rst) tells them from pages of the file: present or
 * swapped, and bit 61 clear. Runs of them go through process_vm_readv() straight to the same offsets of the pages
 * memfd; a few threads share the work, since this is most of the time that a guest stands still for a snapshot.
 *
 * The memfd belongs to the caller, who might shrink it meanwhile: this process never touches the mapping itself, only
 * the kernel does, and then the copy fails with EFAULT instead of a signal.
 */
#include "host/memory.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/text.h"

#define PAGE_BYTES UINT64_C(4096)
#define PAGE_PRESENT (UINT64_C(1) << 63)
#define PAGE_SWAPPED (UINT64_C(1) << 62)
#define PAGE_OF_FILE (UINT64_C(1) << 61) /* or of shared anonymous memory */
#define PAGEMAP_CHUNK_ENTRIES 65536      /* 512 KiB, 256 MiB of guest memory */
#define MAPS_BYTES_MAX (8 * MIB)
#define MEMORY_BYTES_MAX (1024 * GIB)
/* Threads take the runs in portions of about this size; longer runs are cut. */
#define PORTION_BYTES (1 * MIB)
#define PORTION_RUNS_MAX 512 /* IOV_MAX is 1024 */
#define COPY_THREADS_MAX 4
/* Below this, starting a thread costs more than it saves. */
#define COPY_THREAD_BYTES (8 * MIB)

struct run {
	uint64_t address; /* in the VMM */
	uint64_t offset;  /* in guest memory */
	uint64_t bytes;
};

struct copier {
	pid_t pid;
	uint64_t size;
	char *target;          /* mapping of the pages memfd */
	unsigned char *bitmap; /* size / PAGE_BYTES bits */
	uint64_t *entries;     /* PAGEMAP_CHUNK_ENTRIES */
	uint64_t pages;
	struct run *runs;
	size_t run_count;
	size_t run_capacity;
	/* While threads copy. */
	pthread_mutex_t lock;
	size_t next_run;
	struct error error; /* the first one */
};

static int add_run(struct copier *c, uint64_t address, uint64_t offset, uint64_t bytes)
{
	while (bytes) {
		if (c->run_count == c->run_capacity) {
			size_t capacity = c->run_capacity ? c->run_capacity * 2 : 1024;
			struct run *larger = realloc(c->runs, capacity * sizeof(*larger));
			if (!larger)
				return -ENOMEM;
			c->runs = larger;
			c->run_capacity = capacity;
		}
		uint64_t part = MIN(bytes, PORTION_BYTES);
		c->runs[c->run_count++] = (struct run){.address = address, .offset = offset, .bytes = part};
		address += part;
		offset += part;
		bytes -= part;
	}
	return 0;
}

/* The next portion of the runs as vectors for process_vm_readv(); returns their number, 0 at the end. */
static size_t take_portion(struct copier *c, struct iovec *local, struct iovec *remote, uint64_t *ret_bytes)
{
	size_t count = 0;
	*ret_bytes = 0;
	pthread_mutex_lock(&c->lock);
	while (!c->error.code && c->next_run < c->run_count && count < PORTION_RUNS_MAX && *ret_bytes < PORTION_BYTES) {
		const struct run *run = &c->runs[c->next_run++];
		local[count] = (struct iovec){.iov_base = c->target + run->offset, .iov_len = run->bytes};
		remote[count] = (struct iovec){.iov_base = (void *)(uintptr_t)run->address, .iov_len = run->bytes};
		*ret_bytes += run->bytes;
		count++;
	}
	pthread_mutex_unlock(&c->lock);
	return count;
}

static void *copy_thread(void *context)
{
	struct copier *c = context;
	struct iovec local[PORTION_RUNS_MAX];
	struct iovec remote[PORTION_RUNS_MAX];
	uint64_t bytes;
	size_t count;
	while ((count = take_portion(c, local, remote, &bytes))) {
		ssize_t n = process_vm_readv(c->pid, local, count, remote, count, 0);
		if (n >= 0 && (uint64_t)n == bytes)
			continue;
		int errnum = errno;
		pthread_mutex_lock(&c->lock);
		if (n < 0)
			error_set_errno(&c->error, errnum, "copy of guest memory");
		else
			error_set(&c->error, ERROR_INTERNAL, "copy of guest memory stopped after %zd of %" PRIu64 " bytes", n,
			          bytes);
		pthread_mutex_unlock(&c->lock);
	}
	return NULL;
}

static int copy_runs(struct copier *c, struct error *e)
{
	pthread_t threads[COPY_THREADS_MAX];
	size_t started = 0;
	long cpus = sysconf(_SC_NPROCESSORS_ONLN);
	uint64_t wanted = MIN(c->pages * PAGE_BYTES / COPY_THREAD_BYTES, (uint64_t)MAX(MIN(cpus, COPY_THREADS_MAX), 1));
	pthread_mutex_init(&c->lock, NULL);
	while (started + 1 < wanted && pthread_create(&threads[started], NULL, copy_thread, c) == 0)
		started++;
	copy_thread(c);
	while (started)
		pthread_join(threads[--started], NULL);
	pthread_mutex_destroy(&c->lock);
	if (!c->error.code)
		return 0;
	return error_set(e, c->error.code, "%s", c->error.message);
}

static int is_changed(uint64_t entry)
{
	return (entry & (PAGE_PRESENT | PAGE_SWAPPED)) && !(entry & PAGE_OF_FILE);
}

/* `count` pagemap entries for the pages from `address` on, which hold the guest memory from `offset` on. */
static int find_changed(struct copier *c, size_t count, uint64_t address, uint64_t offset, struct error *e)
{
	size_t i = 0;
	while (i < count) {
		if (!is_changed(c->entries[i])) {
			i++;
			continue;
		}
		size_t first = i;
		for (; i < count && is_changed(c->entries[i]); i++) {
			uint64_t page = offset / PAGE_BYTES + i;
			c->bitmap[page / 8] |= (unsigned char)(1u << (page % 8));
		}
		c->pages += i - first;
		if (add_run(c, address + first * PAGE_BYTES, offset + first * PAGE_BYTES, (i - first) * PAGE_BYTES) < 0)
			return error_set_errno(e, ENOMEM, "copy of guest memory");
	}
	return 0;
}

static int find_in_range(struct copier *c, int pagemap_fd, uint64_t start, uint64_t end, uint64_t offset,
                         struct error *e)
{
	while (start < end) {
		size_t count = MIN((end - start) / PAGE_BYTES, PAGEMAP_CHUNK_ENTRIES);
		size_t bytes = count * sizeof(uint64_t);
		ssize_t n = fd_pread_full(pagemap_fd, c->entries, bytes, (off_t)(start / PAGE_BYTES * sizeof(uint64_t)));
		if (n != (ssize_t)bytes)
			return n < 0 ? error_set_errno(e, (int)n, "pagemap of the VMM")
			             : error_set(e, ERROR_UNAVAILABLE, "the VMM ended during the copy");
		int r = find_changed(c, count, start, offset, e);
		if (r < 0)
			return r;
		start += count * PAGE_BYTES;
		offset += count * PAGE_BYTES;
	}
	return 0;
}

/* maps(proc(5)) shows a device number that on btrfs differs from that of stat(); the link in map_files leads to the
 * file itself. */
static int is_mapping_of(int proc_fd, uint64_t start, uint64_t end, const struct stat *base)
{
	char path[64];
	struct stat st;
	text_format(path, sizeof(path), "map_files/%" PRIx64 "-%" PRIx64, start, end);
	return fstatat(proc_fd, path, &st, 0) == 0 && st.st_dev == base->st_dev && st.st_ino == base->st_ino;
}

static int find_runs(struct copier *c, int proc_fd, int pagemap_fd, char *maps, const struct stat *base,
                     struct error *e)
{
	uint64_t covered = 0;
	char *cursor = maps;
	for (char *line = strsep(&cursor, "\n"); line; line = strsep(&cursor, "\n")) {
		uint64_t start, end, offset, inode;
		char flags[8];
		if (sscanf(line, "%" SCNx64 "-%" SCNx64 " %7s %" SCNx64 " %*s %" SCNu64, &start, &end, flags, &offset,
		           &inode) != 5)
			continue;
		if (inode != base->st_ino || flags[3] != 'p' || !is_mapping_of(proc_fd, start, end, base))
			continue;
		if (end < start || offset > c->size || end - start > c->size - offset || offset % PAGE_BYTES)
			return error_set(e, ERROR_INTERNAL, "the VMM maps its memory file beyond its end");
		int r = find_in_range(c, pagemap_fd, start, end, offset, e);
		if (r < 0)
			return r;
		covered += end - start;
	}
	if (covered != c->size)
		return error_set(e, ERROR_INTERNAL, "the VMM maps %" PRIu64 " of the %" PRIu64 " bytes of its memory file",
		                 covered, c->size);
	return 0;
}

void memory_window_drop(struct memory_window *window)
{
	if (window->address)
		munmap(window->address, window->size);
	*window = (struct memory_window){0};
}

static int open_window(struct memory_window *window, int pages_fd, uint64_t size, struct error *e)
{
	struct stat st;
	if (fstat(pages_fd, &st) < 0)
		return error_set_errno(e, errno, "pages memfd");
	if (fcntl(pages_fd, F_GET_SEALS) < 0)
		return error_set(e, ERROR_INVALID, "pages descriptor is not a memfd");
	if ((uint64_t)st.st_size != size)
		return error_set(e, ERROR_INVALID, "pages memfd has %lld bytes instead of %" PRIu64, (long long)st.st_size,
		                 size);
	if (window->address && (window->device != st.st_dev || window->inode != st.st_ino || window->size != size))
		memory_window_drop(window);
	if (!window->address) {
		void *address = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, pages_fd, 0);
		if (address == MAP_FAILED)
			return error_set_errno(e, errno, "pages memfd");
		/* A sandbox that is started meanwhile must not inherit it. */
		madvise(address, size, MADV_DONTFORK);
		*window = (struct memory_window){.address = address, .size = size, .device = st.st_dev, .inode = st.st_ino};
	}
	return 0;
}

static int check_inputs(int base_fd, uint64_t size, int bitmap_fd, struct stat *ret_base, struct error *e)
{
	struct stat st;
	if (size == 0 || size % PAGE_BYTES || size > MEMORY_BYTES_MAX)
		return error_set(e, ERROR_INVALID, "memory size %" PRIu64 " is not a sane number of whole pages", size);
	if (fstat(base_fd, ret_base) < 0)
		return error_set_errno(e, errno, "base memory file");
	if (fstat(bitmap_fd, &st) < 0 || fcntl(bitmap_fd, F_GET_SEALS) < 0)
		return error_set(e, ERROR_INVALID, "bitmap descriptor is not a memfd");
	uint64_t need = (size / PAGE_BYTES + 7) / 8;
	if ((uint64_t)st.st_size != need)
		return error_set(e, ERROR_INVALID, "bitmap memfd has %lld bytes instead of %" PRIu64, (long long)st.st_size,
		                 need);
	return 0;
}

static int copy_process(struct copier *c, const struct stat *base, struct error *e)
{
	char path[32];
	CLEANUP_FREE char *maps = NULL;
	text_format(path, sizeof(path), "/proc/%d", (int)c->pid);
	CLEANUP_CLOSE int proc_fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (proc_fd < 0)
		return error_set(e, ERROR_UNAVAILABLE, "the VMM has ended");
	CLEANUP_CLOSE int pagemap_fd = openat(proc_fd, "pagemap", O_RDONLY | O_CLOEXEC);
	if (pagemap_fd < 0)
		return error_set_errno(e, errno, "pagemap of the VMM");
	int r = fd_read_file(proc_fd, "maps", MAPS_BYTES_MAX, &maps, NULL);
	if (r < 0)
		return error_set_errno(e, r, "memory map of the VMM");
	r = find_runs(c, proc_fd, pagemap_fd, maps, base, e);
	return r < 0 ? r : copy_runs(c, e);
}

int memory_copy(pid_t pid, int base_fd, uint64_t size, int pages_fd, int bitmap_fd, struct memory_window *window,
                uint64_t *ret_pages, struct error *e)
{
	struct stat base;
	int r = check_inputs(base_fd, size, bitmap_fd, &base, e);
	if (r == 0)
		r = open_window(window, pages_fd, size, e);
	if (r < 0)
		return r;
	size_t bitmap_bytes = (size / PAGE_BYTES + 7) / 8;
	CLEANUP_FREE unsigned char *bitmap = calloc(1, bitmap_bytes);
	CLEANUP_FREE uint64_t *entries = malloc(PAGEMAP_CHUNK_ENTRIES * sizeof(*entries));
	CLEANUP_FREE struct copier *c = calloc(1, sizeof(*c));
	if (!bitmap || !entries || !c)
		return error_set_errno(e, ENOMEM, "copy of guest memory");
	c->pid = pid;
	c->size = size;
	c->target = window->address;
	c->bitmap = bitmap;
	c->entries = entries;
	r = copy_process(c, &base, e);
	free(c->runs);
	if (r == 0) {
		r = fd_pwrite_full(bitmap_fd, bitmap, bitmap_bytes, 0);
		if (r < 0)
			error_set_errno(e, r, "bitmap memfd");
	}
	window->used_ms = time_monotonic_ms();
	window->use_count++;
	if (r == 0)
		*ret_pages = c->pages;
	return r;
}
