/*
 * Runs the engine on a real helper, without sessions: for tests and for measuring.
 *
 *   vmm-tool SOCKET RUNTIME probe
 *   vmm-tool SOCKET RUNTIME boot DIR                  boots DIR/{disk,kernel,initrd}, cuts
 * DIR/snapshot.{memory,disk,state} vmm-tool SOCKET RUNTIME restore DIR ROUNDS        starts a sandbox from the snapshot
 * again and again vmm-tool SOCKET RUNTIME chain DIR ROUNDS          each round snapshots what the last one restored;
 * the disk of every snapshot is checked with e2fsck vmm-tool SOCKET RUNTIME adopt DIR                 lets go of a
 * running VMM and takes hold of it again vmm-tool SOCKET RUNTIME exits DIR                 poweroff, reboot, panic and
 * kill are told apart
 *
 * RUNTIME is a folder for control sockets. Figures are lines "NAME p50 N max N" in microseconds.
 * Exit status 1 with "CODE: message" on stderr if a call fails.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/fs.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/text.h"
#include "vmm/vmm.h"

#define MEMORY_BYTES (512 * MIB)
#define PAGE_BYTES ((size_t)4096)
#define ROUNDS_MAX 1000
#define BOOT_TIMEOUT_MS 120000
#define ANSWER_TIMEOUT_MS 20000

static struct error e;
static struct vmm_host host;
static const char *runtime;
static const char *dir;

static int fail(void)
{
	fprintf(stderr, "%s: %s\n", error_code_name(e.code), e.message);
	return 1;
}

static int compare(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a;
	uint64_t y = *(const uint64_t *)b;

	return x < y ? -1 : x > y;
}

static void print_times(const char *name, uint64_t *times, size_t count)
{
	qsort(times, count, sizeof(*times), compare);
	printf("%s p50 %" PRIu64 " max %" PRIu64 "\n", name, times[count / 2], times[count - 1]);
	fflush(stdout);
}

static int file_at(const char *name, int flags, int *ret)
{
	char path[512];

	if (text_format(path, sizeof(path), "%s/%s", dir, name) < 0)
		return error_set(&e, ERROR_INVALID, "path of %s is too long", name);
	/* ext4 writes a file that was cut and filled again to the disk when it is closed. */
	if ((flags & O_TRUNC) && unlink(path) < 0 && errno != ENOENT)
		return error_set_errno(&e, errno, "replace %s", path);
	*ret = open(path, flags | O_CLOEXEC, 0644);
	return *ret < 0 ? error_set_errno(&e, errno, "open %s", path) : 0;
}

/* A reflink where possible. */
static int copy_file(int from, int to)
{
	static char block[1 << 20];
	struct stat st;
	off_t offset = 0;

	if (ioctl(to, FICLONE, from) == 0)
		return 0;
	if (fstat(from, &st) < 0 || ftruncate(to, 0) < 0 || ftruncate(to, st.st_size) < 0)
		return error_set_errno(&e, errno, "copy");
	while ((offset = lseek(from, offset, SEEK_DATA)) >= 0) {
		off_t end = lseek(from, offset, SEEK_HOLE);

		while (offset < end) {
			ssize_t n = pread(from, block, MIN(sizeof(block), (size_t)(end - offset)), offset);

			if (n <= 0 || fd_pwrite_full(to, block, (size_t)n, offset) < 0)
				return error_set_errno(&e, errno, "copy");
			offset += n;
		}
	}
	return 0;
}

/* One GET on a new connection into the sandbox. 0 if it was answered with 2xx. */
static int get(const char *id, const char *path, char *answer, size_t answer_size)
{
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(HOST_AGENT_PORT)};
	struct timeval wait = {.tv_sec = 2};
	CLEANUP_CLOSE int sock = -1;
	char request[256];
	size_t size = 0;

	inet_pton(AF_INET, HOST_GUEST_ADDRESS, &address.sin_addr);
	if (host_sandbox_sockets(host.helper, id, &sock, 1, &e) < 0)
		return -1;
	setsockopt(sock, SOL_SOCKET, SO_SNDTIMEO, &wait, sizeof(wait));
	setsockopt(sock, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof(wait));
	(void)text_format(request, sizeof(request), "GET %s HTTP/1.1\r\nHost: guest\r\nConnection: close\r\n\r\n", path);
	if (connect(sock, (struct sockaddr *)&address, sizeof(address)) < 0 ||
	    send(sock, request, strlen(request), MSG_NOSIGNAL) < 0)
		return -1;
	while (size + 1 < answer_size) {
		ssize_t n = recv(sock, answer + size, answer_size - 1 - size, 0);

		if (n <= 0)
			break;
		size += (size_t)n;
	}
	answer[size] = '\0';
	return size >= 12 && strncmp(answer, "HTTP/1.1 2", 10) == 0 ? 0 : -1;
}

static int wait_healthy(struct vmm *vmm, const char *id, int timeout_ms)
{
	uint64_t deadline_ms = time_monotonic_ms() + (uint64_t)timeout_ms;
	struct pollfd ended = {.fd = vmm_pidfd(vmm), .events = POLLIN};
	char answer[1024];

	while (get(id, "/health", answer, sizeof(answer)) < 0) {
		if (poll(&ended, 1, 1) == 1)
			return error_set(&e, ERROR_UNAVAILABLE, "the VMM ended: %s", vmm_exit_name(vmm_exit_reason(vmm)));
		if (time_monotonic_ms() > deadline_ms)
			return error_set(&e, ERROR_TIMEOUT, "the guest does not answer");
	}
	return 0;
}

/* One run of a VMM with its files. */
struct run {
	char id[ID_BYTES];
	struct vmm *vmm;
	int memory_fd, disk_fd, kernel_fd, initrd_fd, console_fd;
};

static void run_end(struct run *run)
{
	int *fds[] = {&run->memory_fd, &run->disk_fd, &run->kernel_fd, &run->initrd_fd, &run->console_fd};

	vmm_free(run->vmm);
	run->vmm = NULL;
	if (*run->id)
		host_sandbox_kill(host.helper, run->id, NULL);
	for (size_t i = 0; i < ARRAY_SIZE(fds); i++) {
		if (*fds[i] >= 0)
			close(*fds[i]);
		*fds[i] = -1;
	}
}

static struct vmm_config config_of(const struct run *run)
{
	return (struct vmm_config){.sandbox_id = run->id,
	                           .runtime_dir = runtime,
	                           .memory_bytes = MEMORY_BYTES,
	                           .vcpus = 1,
	                           .memory_fd = run->memory_fd,
	                           .disk_fd = run->disk_fd,
	                           .kernel_fd = run->kernel_fd,
	                           .initrd_fd = run->initrd_fd,
	                           .kernel_command_line = "space.control=0123456789abcdef0123456789abcdef",
	                           .console_fd = run->console_fd};
}

static const struct run run_none = {.memory_fd = -1, .disk_fd = -1, .kernel_fd = -1, .initrd_fd = -1, .console_fd = -1};

static int boot(struct run *run)
{
	struct vmm_config config;
	int empty = -1, image = -1, r;

	*run = run_none;
	id_make(run->id, 'b');
	r = file_at("empty.memory", O_RDWR | O_CREAT | O_TRUNC, &empty);
	if (r == 0 && ftruncate(empty, MEMORY_BYTES) < 0)
		r = error_set_errno(&e, errno, "empty.memory");
	if (empty >= 0)
		close(empty);
	if (r == 0)
		r = file_at("empty.memory", O_RDONLY, &run->memory_fd);
	if (r == 0)
		r = file_at("disk", O_RDONLY, &image);
	if (r == 0)
		r = file_at("run.disk", O_RDWR | O_CREAT | O_TRUNC, &run->disk_fd);
	if (r == 0)
		r = copy_file(image, run->disk_fd);
	if (image >= 0)
		close(image);
	if (r == 0)
		r = file_at("kernel", O_RDONLY, &run->kernel_fd);
	if (r == 0)
		r = file_at("initrd", O_RDONLY, &run->initrd_fd);
	if (r == 0)
		r = file_at("console.log", O_WRONLY | O_CREAT | O_TRUNC | O_APPEND, &run->console_fd);
	config = config_of(run);
	if (r == 0)
		r = vmm_boot(&host, &config, &run->vmm, &e);
	return r < 0 ? r : wait_healthy(run->vmm, run->id, BOOT_TIMEOUT_MS);
}

/* Writes the pages that differ from the base over a copy of it, as snapshot.memory. */
static int write_memory(struct run *run, int pages_fd, int bitmap_fd)
{
	size_t bitmap_bytes = (size_t)(MEMORY_BYTES / PAGE_BYTES / 8);
	CLEANUP_CLOSE int to = -1;
	char *pages = mmap(NULL, MEMORY_BYTES, PROT_READ, MAP_SHARED, pages_fd, 0);
	unsigned char *bitmap = mmap(NULL, bitmap_bytes, PROT_READ, MAP_SHARED, bitmap_fd, 0);
	int r = pages == MAP_FAILED || bitmap == MAP_FAILED ? error_set_errno(&e, errno, "mmap") : 0;

	if (r == 0)
		r = file_at("next.memory", O_RDWR | O_CREAT | O_TRUNC, &to);
	if (r == 0)
		r = copy_file(run->memory_fd, to);
	for (size_t i = 0; r == 0 && i < MEMORY_BYTES / PAGE_BYTES; i++)
		if (bitmap[i / 8] & 1 << i % 8)
			r = fd_pwrite_full(to, pages + i * PAGE_BYTES, PAGE_BYTES, (off_t)(i * PAGE_BYTES));
	if (pages != MAP_FAILED)
		munmap(pages, MEMORY_BYTES);
	if (bitmap != MAP_FAILED)
		munmap(bitmap, bitmap_bytes);
	return r;
}

static int rename_in_dir(const char *from, const char *to)
{
	char a[512], b[512];

	if (text_format(a, sizeof(a), "%s/%s", dir, from) < 0 || text_format(b, sizeof(b), "%s/%s", dir, to) < 0 ||
	    rename(a, b) < 0)
		return error_set_errno(&e, errno, "rename %s", from);
	return 0;
}

/* Stops the guest, takes memory, disk and state, and lets it go on. */
static int snapshot(struct run *run, uint64_t *ret_stall_us)
{
	CLEANUP_CLOSE int pages = fd_memfd("pages", MEMORY_BYTES);
	CLEANUP_CLOSE int bitmap = fd_memfd("bitmap", MEMORY_BYTES / PAGE_BYTES / 8);
	CLEANUP_CLOSE int state = fd_memfd("state", 0);
	CLEANUP_CLOSE int disk = -1;
	CLEANUP_CLOSE int state_file = -1;
	uint64_t count = 0, begin;
	int r = file_at("next.disk", O_RDWR | O_CREAT | O_TRUNC, &disk);

	if (r == 0)
		r = file_at("next.state", O_RDWR | O_CREAT | O_TRUNC, &state_file);
	if (r == 0)
		r = host_memory_copy(host.helper, run->id, run->memory_fd, MEMORY_BYTES, pages, bitmap, &count, &e);
	if (r == 0 && fdatasync(run->disk_fd) < 0)
		r = error_set_errno(&e, errno, "sync the disk");
	begin = time_monotonic_us();
	if (r == 0)
		r = vmm_stop(run->vmm, &e);
	if (r == 0)
		r = vmm_save_state(run->vmm, state, &e);
	if (r == 0)
		r = host_memory_copy(host.helper, run->id, run->memory_fd, MEMORY_BYTES, pages, bitmap, &count, &e);
	if (r == 0)
		r = copy_file(run->disk_fd, disk);
	if (r == 0)
		r = vmm_run(run->vmm, &e);
	*ret_stall_us = time_monotonic_us() - begin;
	if (r == 0)
		r = write_memory(run, pages, bitmap);
	if (r == 0)
		r = copy_file(state, state_file);
	if (r == 0)
		r = rename_in_dir("next.memory", "snapshot.memory");
	if (r == 0)
		r = rename_in_dir("next.disk", "snapshot.disk");
	return r < 0 ? r : rename_in_dir("next.state", "snapshot.state");
}

static uint64_t rss_kib(pid_t pid, const char *key)
{
	CLEANUP_FREE char *text = NULL;
	char path[64];
	size_t size;
	const char *at;

	(void)text_format(path, sizeof(path), "/proc/%d/status", (int)pid);
	if (fd_read_file(AT_FDCWD, path, 65536, &text, &size) < 0 || !(at = strstr(text, key)))
		return 0;
	return strtoull(at + strlen(key), NULL, 10);
}

static void print_memory(const struct run *run)
{
	printf("rss_anonymous_kib %" PRIu64 "\nrss_file_kib %" PRIu64 "\n", rss_kib(vmm_pid(run->vmm), "RssAnon:"),
	       rss_kib(vmm_pid(run->vmm), "RssFile:"));
}

static int command_boot(void)
{
	uint64_t begin = time_monotonic_us(), stall = 0;
	struct run run;
	int r = boot(&run);

	if (r == 0) {
		printf("boot_us %" PRIu64 "\n", time_monotonic_us() - begin);
		print_memory(&run);
		r = snapshot(&run, &stall);
	}
	if (r == 0)
		printf("stall_us %" PRIu64 "\n", stall);
	run_end(&run);
	return r;
}

struct times {
	uint64_t prepare[ROUNDS_MAX], load[ROUNDS_MAX], run[ROUNDS_MAX], answer[ROUNDS_MAX], total[ROUNDS_MAX];
};

static int restore(struct run *run, struct times *times, size_t i)
{
	struct vmm_config config;
	CLEANUP_CLOSE int state = -1;
	CLEANUP_CLOSE int image = -1;
	uint64_t begin, at[5];
	int r;

	*run = run_none;
	id_make(run->id, 'b');
	r = file_at("snapshot.memory", O_RDONLY, &run->memory_fd);
	if (r == 0)
		r = file_at("snapshot.state", O_RDONLY, &state);
	if (r == 0)
		r = file_at("snapshot.disk", O_RDONLY, &image);
	if (r == 0)
		r = file_at("run.disk", O_RDWR | O_CREAT | O_TRUNC, &run->disk_fd);
	if (r == 0)
		r = copy_file(image, run->disk_fd);
	begin = at[0] = time_monotonic_us();
	config = config_of(run);
	if (r == 0)
		r = vmm_prepare(&host, &config, &run->vmm, &e);
	at[1] = time_monotonic_us();
	if (r == 0)
		r = vmm_load(run->vmm, state, &e);
	at[2] = time_monotonic_us();
	if (r == 0)
		r = vmm_run(run->vmm, &e);
	at[3] = time_monotonic_us();
	if (r == 0)
		r = wait_healthy(run->vmm, run->id, ANSWER_TIMEOUT_MS);
	at[4] = time_monotonic_us();
	times->prepare[i] = at[1] - at[0];
	times->load[i] = at[2] - at[1];
	times->run[i] = at[3] - at[2];
	times->answer[i] = at[4] - at[3];
	times->total[i] = at[4] - begin;
	return r;
}

static void print_restores(struct times *times, size_t count)
{
	print_times("prepare", times->prepare, count);
	print_times("load", times->load, count);
	print_times("run", times->run, count);
	print_times("answer", times->answer, count);
	print_times("total", times->total, count);
}

static int check_disk(void)
{
	char path[512];
	int status = 0;
	pid_t pid;

	(void)text_format(path, sizeof(path), "%s/check.disk", dir);
	pid = fork();
	if (pid == 0) {
		execl("/sbin/e2fsck", "e2fsck", "-fn", path, (char *)NULL);
		_exit(127);
	}
	if (pid < 0 || waitpid(pid, &status, 0) != pid)
		return error_set_errno(&e, errno, "e2fsck");
	return status ? error_set(&e, ERROR_DAMAGED, "e2fsck found the disk of a snapshot damaged") : 0;
}

/* Replays the journal of a copy first, as any mount of it would, then asks for a clean bill. */
static int check_snapshot_disk(void)
{
	CLEANUP_CLOSE int from = -1;
	CLEANUP_CLOSE int to = -1;
	char path[512];
	int status = 0, r = file_at("snapshot.disk", O_RDONLY, &from);
	pid_t pid;

	if (r == 0)
		r = file_at("check.disk", O_RDWR | O_CREAT | O_TRUNC, &to);
	if (r == 0)
		r = copy_file(from, to);
	if (r < 0)
		return r;
	(void)text_format(path, sizeof(path), "%s/check.disk", dir);
	pid = fork();
	if (pid == 0) {
		execl("/sbin/e2fsck", "e2fsck", "-E", "journal_only", "-y", path, (char *)NULL);
		_exit(127);
	}
	if (pid < 0 || waitpid(pid, &status, 0) != pid)
		return error_set_errno(&e, errno, "e2fsck");
	return check_disk();
}

static int command_restore(size_t rounds, int chain)
{
	static struct times times;
	static uint64_t stalls[ROUNDS_MAX];
	int r = 0;

	for (size_t i = 0; r == 0 && i < rounds; i++) {
		struct run run;

		r = restore(&run, &times, i);
		if (r == 0 && i + 1 == rounds)
			print_memory(&run);
		if (r == 0 && chain)
			r = snapshot(&run, &stalls[i]);
		/* It must go on after its snapshot. */
		if (r == 0 && chain)
			r = wait_healthy(run.vmm, run.id, ANSWER_TIMEOUT_MS);
		run_end(&run);
		if (r == 0 && chain)
			r = check_snapshot_disk();
		if (r < 0)
			error_prefix(&e, "round %zu", i);
	}
	if (r < 0)
		return r;
	print_restores(&times, rounds);
	if (chain)
		print_times("stall", stalls, rounds);
	return 0;
}

static int command_adopt(void)
{
	static struct times times;
	struct buf console = {0};
	struct run run;
	int running = -1, again = -1;
	int r = restore(&run, &times, 0);

	for (int i = 0; r == 0 && i < 3; i++) {
		vmm_free(run.vmm);
		run.vmm = NULL;
		r = vmm_adopt(&host, run.id, runtime, &run.vmm, &e);
		if (r == 0)
			r = vmm_is_running(run.vmm, &running, &e);
		if (r == 0)
			r = vmm_stop(run.vmm, &e);
		if (r == 0)
			r = vmm_stop(run.vmm, &e);
		if (r == 0)
			r = vmm_is_running(run.vmm, &again, &e);
		if (r == 0)
			r = vmm_run(run.vmm, &e);
		if (r == 0)
			r = wait_healthy(run.vmm, run.id, ANSWER_TIMEOUT_MS);
		if (r == 0 && (running != 1 || again != 0))
			r = error_set(&e, ERROR_INTERNAL, "running is %d, after stop %d", running, again);
	}
	if (r == 0)
		r = vmm_console_tail(run.vmm, &console, &e);
	if (r == 0)
		printf("adopted 3 times; console has %zu bytes\n", console.size);
	buf_free(&console);
	run_end(&run);
	return r;
}

/* `how`: a path of a guest that ends itself when asked for it, or NULL to kill the VMM. */
static int one_exit(const char *how, enum vmm_exit expected)
{
	static struct times times;
	struct pollfd ended = {.events = POLLIN};
	struct run run;
	char answer[1024];
	int r = restore(&run, &times, 0);

	if (r == 0 && vmm_exit_reason(run.vmm) != VMM_EXIT_NONE)
		r = error_set(&e, ERROR_INTERNAL, "a running VMM has an exit reason");
	if (r == 0) {
		ended.fd = vmm_pidfd(run.vmm);
		if (how)
			(void)get(run.id, how, answer, sizeof(answer));
		else
			kill(vmm_pid(run.vmm), SIGKILL);
		if (poll(&ended, 1, ANSWER_TIMEOUT_MS) != 1)
			r = error_set(&e, ERROR_TIMEOUT, "the VMM lives on");
		else if (vmm_exit_reason(run.vmm) != expected)
			r = error_set(&e, ERROR_INTERNAL, "exit reason is %s, not %s", vmm_exit_name(vmm_exit_reason(run.vmm)),
			              vmm_exit_name(expected));
		else
			printf("%s ok\n", vmm_exit_name(expected));
	}
	run_end(&run);
	return r;
}

static int command_exits(int guest_helps)
{
	int r = one_exit(NULL, VMM_EXIT_CRASH);

	if (r == 0 && guest_helps)
		r = one_exit("/off", VMM_EXIT_GUEST_POWEROFF);
	if (r == 0 && guest_helps)
		r = one_exit("/boot", VMM_EXIT_GUEST_REBOOT);
	return r == 0 && guest_helps ? one_exit("/panic", VMM_EXIT_GUEST_PANIC) : r;
}

int main(int argc, char **argv)
{
	const char *command = argc > 3 ? argv[3] : "";
	uint64_t rounds = 1;
	struct host_client *helper;
	char why[256];
	int r;

	if (argc < 4 || (argc < 5 && strcmp(command, "probe") != 0) ||
	    (argc > 5 && (text_parse_u64(argv[5], ROUNDS_MAX, &rounds) < 0 || !rounds))) {
		fprintf(stderr, "usage: vmm-tool SOCKET RUNTIME COMMAND …; see the head of tests/tools/vmm-tool.c\n");
		return 2;
	}
	runtime = argv[2];
	dir = argc > 4 ? argv[4] : ".";
	if (host_client_new(argv[1], &helper, &e) < 0 || vmm_probe(helper, &host, why, sizeof(why), &e) < 0)
		return fail();
	if (strcmp(command, "probe") == 0)
		r = puts(why) < 0;
	else if (strcmp(command, "boot") == 0)
		r = command_boot();
	else if (strcmp(command, "restore") == 0 || strcmp(command, "chain") == 0)
		r = command_restore((size_t)rounds, *command == 'c');
	else if (strcmp(command, "adopt") == 0)
		r = command_adopt();
	else if (strcmp(command, "exits") == 0)
		r = command_exits(argc > 5);
	else
		r = error_set(&e, ERROR_INVALID, "there is no command %s", command);
	host_client_free(helper);
	return r < 0 ? fail() : 0;
}
