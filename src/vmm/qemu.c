/*
 * The QEMU engine: the `microvm` machine with virtio-mmio devices, run by KVM or, without hardware virtualisation, by
 * translation (TCG).
 *
 * Guest RAM is a private mapping of the memory file. Device state (without RAM) is what xen-save-devices-state writes,
 * a command that has nothing of Xen in it; it loads as an incoming migration, through a pipe that holds all of it
 * before QEMU starts to read, so the two never wait for each other. The control socket is made by us and listens on
 * past our own end: the next daemon connects to it.
 *
 * State loads on the QEMU version and acceleration that wrote it only; the caller keeps both with it.
 */
#include "vmm/vmm.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/text.h"
#include "vmm/qemu_arguments.h"
#include "vmm/qmp.h"

#define CONTROL_SOCKET "qmp.sock"
#define START_TIMEOUT_MS 20000
#define COMMAND_TIMEOUT_MS 10000
#define LOAD_TIMEOUT_MS 10000
#define LOAD_POLL_US 300
/* Device state has 5 to 60 KiB; a pipe of an unprivileged process holds 1 MiB by default. */
#define STATE_BYTES_MAX MIB
#define CPU_PERCENT_PER_VCPU 100
#define CPU_PERCENT_OWN 50 /* disk, network and control threads */
#define PIDS_OWN 96        /* 64 disk workers, main, RCU, signal and migration threads */

struct vmm {
	struct host_client *helper;
	char id[ID_BYTES];
	pid_t pid;
	int pidfd;
	struct qmp qmp;
	int memory_channel; /* of a spare that has no memory yet, else -1 */
	struct buf console; /* what was taken out of QEMU's ring so far */
};

enum start { START_BOOT, START_INCOMING, START_SPARE };

static struct vmm *vmm_new(const struct vmm_host *host, const char *sandbox_id, struct error *e)
{
	struct vmm *vmm = calloc(1, sizeof(*vmm));

	if (!vmm) {
		error_set(e, ERROR_EXHAUSTED, "out of memory");
		return NULL;
	}
	vmm->helper = host->helper;
	vmm->pidfd = -1;
	vmm->memory_channel = -1;
	qmp_init(&vmm->qmp);
	if (text_copy(vmm->id, sizeof(vmm->id), sandbox_id) < 0) {
		error_set(e, ERROR_INVALID, "sandbox id %.32s… is too long", sandbox_id);
		vmm_free(vmm);
		return NULL;
	}
	return vmm;
}

void vmm_free(struct vmm *vmm)
{
	if (!vmm)
		return;
	qmp_close(&vmm->qmp);
	buf_free(&vmm->console);
	if (vmm->pidfd >= 0)
		close(vmm->pidfd);
	if (vmm->memory_channel >= 0)
		close(vmm->memory_channel);
	free(vmm);
}

/* Puts QEMU's own last words behind the error, which without them would only say that it ended. */
static int with_output(struct vmm *vmm, int r, struct error *e)
{
	CLEANUP_FREE char *output = NULL;
	struct error why = {0};
	size_t used, size;
	char *line;

	if (r >= 0 || !e || host_sandbox_output(vmm->helper, vmm->id, &output, &why) < 0 || !output)
		return r;
	for (size = strlen(output); size && output[size - 1] == '\n'; size--)
		output[size - 1] = '\0';
	line = strrchr(output, '\n');
	line = line ? line + 1 : output;
	used = strlen(e->message);
	if (*line)
		(void)snprintf(e->message + used, sizeof(e->message) - used, "; it says: %s", line);
	return r;
}

/* A descriptor of the same file that is open for writing only, which QEMU insists on. */
static int write_only(int fd, int *ret, struct error *e)
{
	char path[32];
	int flags = fcntl(fd, F_GETFL);

	(void)text_format(path, sizeof(path), "/proc/self/fd/%d", fd);
	if (flags < 0)
		return error_set_errno(e, errno, "descriptor %d", fd);
	*ret = (flags & O_ACCMODE) == O_WRONLY ? fcntl(fd, F_DUPFD_CLOEXEC, 0)
	                                       : open(path, O_WRONLY | O_CLOEXEC | (flags & O_APPEND));
	return *ret < 0 ? error_set_errno(e, errno, "open a file for writing") : 0;
}

static int start_process(struct vmm *vmm, const struct vmm_host *host, const struct vmm_config *config, enum start kind,
                         struct error *e)
{
	CLEANUP_CLOSE int control = -1;
	CLEANUP_CLOSE int console = -1;
	CLEANUP_CLOSE int channel = -1;
	struct qemu_arguments a;
	struct host_sandbox_spec spec;
	int r = 0;

	if (config->console_fd >= 0 && (r = write_only(config->console_fd, &console, e)) < 0)
		return error_prefix(e, "serial console");
	control = qmp_listen(config->runtime_dir, CONTROL_SOCKET, e);
	if (control < 0)
		return control;
	if (kind == START_SPARE) {
		int ends[2];
		if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) < 0)
			return error_set_errno(e, errno, "channel to a spare");
		vmm->memory_channel = ends[0];
		channel = ends[1];
	}
	r = qemu_arguments_make(&a, host, config, control, console, channel, kind != START_BOOT, e);
	if (r < 0)
		return r;
	spec = (struct host_sandbox_spec){
	    .id = vmm->id,
	    .program = "qemu",
	    .arguments = a.list,
	    .fds = a.fds,
	    .fd_count = a.fd_count,
	    .memory_max_bytes = config->memory_bytes + QEMU_OVERHEAD_BYTES,
	    .cpu_percent = config->vcpus * CPU_PERCENT_PER_VCPU + CPU_PERCENT_OWN,
	    .pids_max = config->vcpus + PIDS_OWN,
	    .preload_environment = "vmm-shim",
	};
	r = host_sandbox_start(host->helper, &spec, &vmm->pid, &vmm->pidfd, e);
	qemu_arguments_free(&a);
	return r;
}

static int start(const struct vmm_host *host, const struct vmm_config *config, enum start kind, struct vmm **ret,
                 struct error *e)
{
	struct vmm *vmm = vmm_new(host, config->sandbox_id, e);
	int r;

	*ret = NULL;
	if (!vmm)
		return e ? error_code_errno(e->code) : -ENOMEM;
	r = start_process(vmm, host, config, kind, e);
	if (r == 0) {
		r = qmp_connect(&vmm->qmp, config->runtime_dir, CONTROL_SOCKET, vmm->pidfd, START_TIMEOUT_MS, e);
		if (r == 0 && strcmp(vmm->qmp.version, host->program_version) != 0)
			r = error_set(e, ERROR_UNAVAILABLE, "QEMU is version %s now, was %s when this process started; restart it",
			              vmm->qmp.version, host->program_version);
		if (r == 0 && kind == START_BOOT)
			r = vmm_run(vmm, e);
		if (r < 0) {
			with_output(vmm, r, e);
			(void)host_sandbox_kill(host->helper, vmm->id, NULL);
		}
	}
	if (r < 0) {
		vmm_free(vmm);
		return error_prefix(e, "start QEMU");
	}
	*ret = vmm;
	return 0;
}

int vmm_boot(const struct vmm_host *host, const struct vmm_config *config, struct vmm **ret, struct error *e)
{
	return start(host, config, START_BOOT, ret, e);
}

int vmm_prepare(const struct vmm_host *host, const struct vmm_config *config, struct vmm **ret, struct error *e)
{
	return start(host, config, START_INCOMING, ret, e);
}

int vmm_prepare_spare(const struct vmm_host *host, const struct vmm_config *config, struct vmm **ret, struct error *e)
{
	return start(host, config, START_SPARE, ret, e);
}

int vmm_give_memory(struct vmm *vmm, int memory_fd, int is_random, struct error *e)
{
	CLEANUP_CLOSE int channel = TAKE_FD(vmm->memory_channel);
	int32_t answer = 0;
	int r;

	if (channel < 0)
		return error_set(e, ERROR_CONFLICT, "this VMM waits for no memory");
	r = fd_send_message(channel, is_random ? "r" : "m", 1, &memory_fd, 1);
	if (r == 0) {
		struct pollfd p = {.fd = channel, .events = POLLIN};
		do
			r = poll(&p, 1, COMMAND_TIMEOUT_MS);
		while (r < 0 && errno == EINTR);
		r = r > 0 ? 0 : r < 0 ? -errno : -ETIMEDOUT;
	}
	if (r == 0) {
		ssize_t n = recv(channel, &answer, sizeof(answer), 0);
		r = n == (ssize_t)sizeof(answer) ? -answer : n < 0 ? -errno : -EPIPE;
	}
	return r < 0 ? error_set_errno(e, r, "give memory to a spare VMM") : 0;
}

static int status(struct vmm *vmm, char *to, size_t size, struct error *e)
{
	json_t *value = NULL;
	const char *name;
	int r = qmp_command(&vmm->qmp, "query-status", NULL, -1, COMMAND_TIMEOUT_MS, &value, e);

	if (r < 0)
		return r;
	name = json_string_value(json_object_get(value, "status"));
	if (!name || text_copy(to, size, name) < 0)
		r = error_set(e, ERROR_UNAVAILABLE, "QEMU tells no status");
	json_decref(value);
	return r;
}

int vmm_is_running(struct vmm *vmm, int *ret_running, struct error *e)
{
	char name[32];
	int r = status(vmm, name, sizeof(name), e);

	if (r == 0)
		*ret_running = strcmp(name, "running") == 0;
	return r;
}

/* A pipe that holds all of the state, its writing end closed. */
static int pipe_of_state(int state_fd, int *ret, struct error *e)
{
	CLEANUP_FREE char *data = NULL;
	CLEANUP_CLOSE int from = -1;
	CLEANUP_CLOSE int to = -1;
	struct stat st;
	int ends[2], r;
	ssize_t n;

	if (fstat(state_fd, &st) < 0)
		return error_set_errno(e, errno, "device state");
	if (!S_ISREG(st.st_mode) || st.st_size < 16 || (uint64_t)st.st_size > STATE_BYTES_MAX)
		return error_set(e, ERROR_DAMAGED, "device state of %lld bytes cannot be one", (long long)st.st_size);
	data = malloc((size_t)st.st_size);
	if (!data)
		return error_set(e, ERROR_EXHAUSTED, "out of memory");
	n = fd_pread_full(state_fd, data, (size_t)st.st_size, 0);
	if (n < 0)
		return error_set_errno(e, (int)n, "read device state");
	if (n != st.st_size)
		return error_set(e, ERROR_DAMAGED, "device state was cut to %zd bytes", n);
	if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) < 0)
		return error_set_errno(e, errno, "pipe");
	from = ends[0];
	to = ends[1];
	if (fcntl(to, F_SETPIPE_SZ, (int)st.st_size) < 0)
		return error_set_errno(e, errno, "a pipe of %lld bytes", (long long)st.st_size);
	r = fd_write_full(to, data, (size_t)st.st_size);
	if (r < 0)
		return error_set_errno(e, r, "write device state to the pipe");
	*ret = TAKE_FD(from);
	return 0;
}

/* The load runs in QEMU's main loop; there is no event for its end unless migration is set up to send some. */
static int wait_loaded(struct vmm *vmm, struct error *e)
{
	uint64_t deadline_ms = time_monotonic_ms() + LOAD_TIMEOUT_MS;
	char name[32];

	for (;;) {
		int r = status(vmm, name, sizeof(name), e);

		if (r < 0)
			return r;
		if (strcmp(name, "paused") == 0)
			return 0;
		if (strcmp(name, "inmigrate") != 0)
			return error_set(e, ERROR_DAMAGED, "QEMU is \"%s\" after device state was loaded", name);
		if (time_monotonic_ms() > deadline_ms)
			return error_set(e, ERROR_TIMEOUT, "QEMU did not load device state within %d ms", LOAD_TIMEOUT_MS);
		usleep(LOAD_POLL_US);
	}
}

int vmm_load(struct vmm *vmm, int state_fd, struct error *e)
{
	CLEANUP_CLOSE int from = -1;
	int r = pipe_of_state(state_fd, &from, e);

	if (r == 0)
		r = qmp_command(&vmm->qmp, "getfd", json_pack("{s:s}", "fdname", "state"), from, COMMAND_TIMEOUT_MS, NULL, e);
	if (r == 0)
		r = qmp_command(&vmm->qmp, "migrate-incoming", json_pack("{s:s}", "uri", "fd:state"), -1, COMMAND_TIMEOUT_MS,
		                NULL, e);
	if (r == 0)
		r = wait_loaded(vmm, e);
	if (r == 0)
		return 0;
	with_output(vmm, r, e);
	return error_prefix(e, "load device state");
}

int vmm_adopt(const struct vmm_host *host, const char *sandbox_id, const char *runtime_dir, struct vmm **ret,
              struct error *e)
{
	CLEANUP_FREE struct host_sandbox_info *all = NULL;
	struct vmm *vmm;
	size_t count = 0;
	int r;

	*ret = NULL;
	r = host_sandbox_list(host->helper, &all, &count, e);
	if (r < 0)
		return error_prefix(e, "adopt sandbox %s", sandbox_id);
	vmm = vmm_new(host, sandbox_id, e);
	for (size_t i = 0; i < count; i++) {
		if (vmm && all[i].alive && all[i].pidfd >= 0 && strcmp(all[i].id, sandbox_id) == 0) {
			vmm->pid = all[i].pid;
			vmm->pidfd = TAKE_FD(all[i].pidfd);
		}
		if (all[i].pidfd >= 0)
			close(all[i].pidfd);
	}
	if (!vmm)
		return e ? error_code_errno(e->code) : -ENOMEM;
	if (vmm->pidfd < 0)
		r = error_set(e, ERROR_NOT_FOUND, "no VMM of this sandbox is alive");
	else
		r = qmp_connect(&vmm->qmp, runtime_dir, CONTROL_SOCKET, vmm->pidfd, COMMAND_TIMEOUT_MS, e);
	if (r < 0) {
		with_output(vmm, r, e);
		vmm_free(vmm);
		return error_prefix(e, "adopt sandbox %s", sandbox_id);
	}
	*ret = vmm;
	return 0;
}

/* `stop` drains all block I/O before it answers, so the disk image is whole as of that instant. */
int vmm_stop(struct vmm *vmm, struct error *e)
{
	return qmp_command(&vmm->qmp, "stop", NULL, -1, COMMAND_TIMEOUT_MS, NULL, e);
}

int vmm_run(struct vmm *vmm, struct error *e)
{
	return qmp_command(&vmm->qmp, "cont", NULL, -1, COMMAND_TIMEOUT_MS, NULL, e);
}

/*
 * `live` false: with true QEMU would give up its disk image, as if another process took over from here.
 */
static int save_to_set(struct vmm *vmm, json_int_t set, struct error *e)
{
	json_t *arguments = NULL;
	char path[64];

	(void)text_format(path, sizeof(path), "/dev/fdset/%lld", (long long)set);
	arguments = json_pack("{s:s, s:b}", "filename", path, "live", 0);
	return qmp_command(&vmm->qmp, "xen-save-devices-state", arguments, -1, COMMAND_TIMEOUT_MS, NULL, e);
}

int vmm_save_state(struct vmm *vmm, int state_fd, struct error *e)
{
	CLEANUP_CLOSE int to = -1;
	json_t *value = NULL;
	struct stat st;
	json_int_t set;
	int running = 1;
	int r = vmm_is_running(vmm, &running, e);

	if (r == 0 && running)
		r = error_set(e, ERROR_CONFLICT, "the guest runs");
	if (r == 0 && ftruncate(state_fd, 0) < 0)
		r = error_set_errno(e, errno, "empty the state file");
	if (r == 0)
		r = write_only(state_fd, &to, e);
	if (r == 0)
		r = qmp_command(&vmm->qmp, "add-fd", NULL, to, COMMAND_TIMEOUT_MS, &value, e);
	if (r < 0)
		return error_prefix(e, "save device state");
	set = json_integer_value(json_object_get(value, "fdset-id"));
	json_decref(value);
	r = save_to_set(vmm, set, e);
	(void)qmp_command(&vmm->qmp, "remove-fd", json_pack("{s:I}", "fdset-id", set), -1, COMMAND_TIMEOUT_MS, NULL, NULL);
	if (r == 0 && fstat(state_fd, &st) < 0)
		r = error_set_errno(e, errno, "state file");
	if (r == 0 && (st.st_size < 16 || (uint64_t)st.st_size > STATE_BYTES_MAX))
		r = error_set(e, ERROR_UNAVAILABLE, "QEMU wrote %lld bytes", (long long)st.st_size);
	return r < 0 ? error_prefix(e, "save device state") : 0;
}

/* QEMU's ring is emptied by reading it, so what it gave before is kept here. */
int vmm_console_tail(struct vmm *vmm, struct buf *ret, struct error *e)
{
	json_t *value = NULL;
	json_t *arguments =
	    json_pack("{s:s, s:I, s:s}", "device", "console", "size", (json_int_t)QEMU_CONSOLE_BYTES, "format", "base64");
	int r = qmp_command(&vmm->qmp, "ringbuf-read", arguments, -1, COMMAND_TIMEOUT_MS, &value, e);

	if (r == 0) {
		const char *text = json_string_value(value);
		size_t size = json_string_length(value);
		char *to = text ? buf_reserve(&vmm->console, size / 4 * 3 + 3) : NULL;
		long n = to ? text_base64_decode(to, text, size) : -1;

		if (n > 0)
			vmm->console.size += (size_t)n;
		if (vmm->console.size > QEMU_CONSOLE_BYTES)
			buf_consume(&vmm->console, vmm->console.size - QEMU_CONSOLE_BYTES);
		json_decref(value);
	}
	/* The last words of a VMM that is gone are worth having as well. */
	if (r < 0 && !vmm->console.size)
		return r;
	if (vmm->console.size && buf_append(ret, vmm->console.data, vmm->console.size) < 0)
		return error_set(e, ERROR_EXHAUSTED, "out of memory");
	return 0;
}

enum vmm_exit vmm_exit_reason(struct vmm *vmm)
{
	struct pollfd poll_fd = {.fd = vmm->pidfd, .events = POLLIN};
	int ended = poll(&poll_fd, 1, 0) == 1;
	enum vmm_exit exit;

	qmp_drain(&vmm->qmp);
	exit = (enum vmm_exit)atomic_load(&vmm->qmp.exit);
	return exit == VMM_EXIT_NONE && ended ? VMM_EXIT_CRASH : exit;
}

const char *vmm_exit_name(enum vmm_exit exit)
{
	switch (exit) {
	case VMM_EXIT_NONE:
		return "none";
	case VMM_EXIT_GUEST_POWEROFF:
		return "guest_poweroff";
	case VMM_EXIT_GUEST_REBOOT:
		return "guest_reboot";
	case VMM_EXIT_GUEST_PANIC:
		return "guest_panic";
	case VMM_EXIT_CRASH:
		break;
	}
	return "crash";
}

pid_t vmm_pid(const struct vmm *vmm)
{
	return vmm->pid;
}

int vmm_pidfd(const struct vmm *vmm)
{
	return vmm->pidfd;
}
