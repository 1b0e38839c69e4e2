#include "host/sandbox.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/log.h"
#include "host/cgroup.h"
#include "host/jail.h"
#include "host/launch.h"
#include "host/memory.h"
#include "host/netns.h"
#include "host/protocol.h"
#include "host/record.h"
#include "host/spawner.h"

#define KILL_WAIT_MS 10000
#define CGROUP_WAIT_MS 10000
#define TAPS_KEPT_MAX 64
/* Room for a VMM's own work beside the guest: every VMM has at least these. */
#define MEMORY_MAX_BYTES_LOWEST (16 * MIB)
#define CPU_PERCENT_LOWEST 1
#define CPU_PERCENT_HIGHEST 100000

struct sandbox {
	char id[ID_BYTES];
	unsigned index;
	/* Held by start and kill from beginning to end. */
	pthread_mutex_t work;
	/* Serialises copies, guards window. */
	pthread_mutex_t memory;
	struct memory_window window;
	/* The rest is guarded by the table's lock. */
	unsigned references;
	int listed; /* in the table */
	int started;
	uint64_t nonce;
	pid_t pid;
	uint64_t start_time;
	int pidfd;  /* -1: had ended before this helper started */
	int netns;  /* -1 likewise */
	int tap;    /* kept so that the VMM's end need not wait for the device's; -1 after a restart */
	int output; /* memfd that the VMM's stderr goes to, -1 likewise */
	int exit_known;
	int exit_status;
};

struct sandbox_host {
	const struct config *config;
	struct cgroup_host cgroups;
	struct jail jail;
	struct spawner *spawner;
	int home_netns;
	int null_fd;
	int records;
	pthread_mutex_t lock;
	struct sandbox *slots[HOST_SANDBOXES_MAX];
	size_t count;
	/* Taps of sandboxes that are gone. Closing one takes the kernel two RCU grace periods; see sandbox_settle(). */
	int taps[TAPS_KEPT_MAX];
	size_t tap_count;
	pthread_cond_t janitor_wakes;
	int unsettled;
};

/* Programs and libraries that a VMM may be made of; nothing else can be executed. */
static const char *find_program(const struct sandbox_host *host, const char *name)
{
	return strcmp(name, "qemu") == 0 ? host->config->qemu_path : NULL;
}

static const char *find_preload(const struct sandbox_host *host, const char *name)
{
	return strcmp(name, "vmm-shim") == 0 && host->jail.has_shim ? JAIL_SHIM_PATH : NULL;
}

static int pidfd_has_ended(int pidfd)
{
	struct pollfd p = {.fd = pidfd, .events = POLLIN};
	return poll(&p, 1, 0) > 0;
}

static void close_if_open(int *fd)
{
	if (*fd >= 0)
		close(*fd);
	*fd = -1;
}

/* --- table ---------------------------------------------------------------------------------------------------- */

static struct sandbox *sandbox_new(const char *id)
{
	struct sandbox *s = calloc(1, sizeof(*s));
	if (!s)
		return NULL;
	text_copy(s->id, sizeof(s->id), id);
	s->pid = -1;
	s->pidfd = s->netns = s->tap = s->output = -1;
	pthread_mutex_init(&s->work, NULL);
	pthread_mutex_init(&s->memory, NULL);
	return s;
}

static void sandbox_destroy(struct sandbox *s)
{
	close_if_open(&s->pidfd);
	close_if_open(&s->netns);
	close_if_open(&s->tap);
	close_if_open(&s->output);
	memory_window_drop(&s->window);
	pthread_mutex_destroy(&s->work);
	pthread_mutex_destroy(&s->memory);
	free(s);
}

static struct sandbox *find_locked(struct sandbox_host *host, const char *id)
{
	for (size_t i = 0; i < HOST_SANDBOXES_MAX; i++)
		if (host->slots[i] && strcmp(host->slots[i]->id, id) == 0)
			return host->slots[i];
	return NULL;
}

static struct sandbox *sandbox_get(struct sandbox_host *host, const char *id)
{
	pthread_mutex_lock(&host->lock);
	struct sandbox *s = find_locked(host, id);
	if (s)
		s->references++;
	pthread_mutex_unlock(&host->lock);
	return s;
}

static void sandbox_put(struct sandbox_host *host, struct sandbox *s)
{
	pthread_mutex_lock(&host->lock);
	int last = --s->references == 0 && !s->listed;
	pthread_mutex_unlock(&host->lock);
	if (last)
		sandbox_destroy(s);
}

static void table_remove(struct sandbox_host *host, struct sandbox *s)
{
	pthread_mutex_lock(&host->lock);
	if (s->listed) {
		host->slots[s->index] = NULL;
		host->count--;
		s->listed = 0;
	}
	pthread_mutex_unlock(&host->lock);
}

/* Takes the slot `index`, or the first free one if it is HOST_SANDBOXES_MAX. The caller gets a reference. */
static int table_add(struct sandbox_host *host, struct sandbox *s, unsigned index, struct error *e)
{
	int r = 0;
	pthread_mutex_lock(&host->lock);
	if (find_locked(host, s->id)) {
		r = error_set(e, ERROR_CONFLICT, "sandbox %s exists already", s->id);
	} else {
		if (index == HOST_SANDBOXES_MAX)
			for (index = 0; index < HOST_SANDBOXES_MAX && host->slots[index];)
				index++;
		if (index == HOST_SANDBOXES_MAX || host->slots[index])
			r = error_set(e, ERROR_EXHAUSTED, "all %d places for sandboxes are taken", HOST_SANDBOXES_MAX);
	}
	if (r == 0) {
		s->index = index;
		s->references = 1;
		s->listed = 1;
		host->slots[index] = s;
		host->count++;
	}
	pthread_mutex_unlock(&host->lock);
	return r;
}

size_t sandbox_count(struct sandbox_host *host)
{
	pthread_mutex_lock(&host->lock);
	size_t count = host->count;
	pthread_mutex_unlock(&host->lock);
	return count;
}

static struct sandbox *require(struct sandbox_host *host, const char *id, struct error *e)
{
	struct sandbox *s = id_is_valid(id, 'b') ? sandbox_get(host, id) : NULL;
	if (!s)
		error_set(e, ERROR_NOT_FOUND, "no sandbox \"%.*s\"", ID_BYTES, id);
	return s;
}

/* --- start ---------------------------------------------------------------------------------------------------- */

struct command {
	const char *program;
	char **argv; /* array and changed strings are owned */
	char tap[16];
	char preload[128];
	char *environment[4];
};

static int build_command(const struct sandbox_host *host, const struct host_sandbox_spec *spec, struct command *c,
                         struct error *e)
{
	static char path_variable[] = "PATH=/usr/bin:/bin";
	static char locale_variable[] = "LC_ALL=C";
	size_t count = 0;
	size_t variables = 0;
	c->program = find_program(host, spec->program);
	if (!c->program)
		return error_set(e, ERROR_INVALID, "no VMM program \"%s\"", spec->program);
	c->environment[variables++] = path_variable;
	c->environment[variables++] = locale_variable;
	if (spec->preload_environment) {
		const char *library = find_preload(host, spec->preload_environment);
		if (!library)
			return error_set(e, ERROR_UNSUPPORTED, "no preload library \"%s\" beside the host helper",
			                 spec->preload_environment);
		text_format(c->preload, sizeof(c->preload), "LD_PRELOAD=%s", library);
		c->environment[variables++] = c->preload;
	}
	while (spec->arguments[count])
		count++;
	c->argv = calloc(count + 2, sizeof(*c->argv));
	if (!c->argv)
		return error_set_errno(e, ENOMEM, "VMM arguments");
	text_format(c->tap, sizeof(c->tap), "%zu", 3 + spec->fd_count);
	c->argv[0] = strdup(c->program);
	for (size_t i = 0; i < count; i++) {
		const char *from = spec->arguments[i];
		const char *mark = strstr(from, "@TAP@");
		if (!mark)
			c->argv[i + 1] = strdup(from);
		else if (asprintf(&c->argv[i + 1], "%.*s%s%s", (int)(mark - from), from, c->tap, mark + 5) < 0)
			c->argv[i + 1] = NULL;
	}
	for (size_t i = 0; i <= count; i++)
		if (!c->argv[i])
			return error_set_errno(e, ENOMEM, "VMM arguments");
	return 0;
}

static void command_free(struct command *c)
{
	/* After a failed allocation there may be a hole with strings behind it; they are few and the helper lives on. */
	for (size_t i = 0; c->argv && c->argv[i]; i++)
		free(c->argv[i]);
	free(c->argv);
}

/* Where the VMM's stderr goes: can be neither filled beyond its size nor blocked on, and outlives a helper. */
static int make_output(void)
{
	CLEANUP_CLOSE int fd = memfd_create("vmm-output", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (fd < 0 || ftruncate(fd, PROTOCOL_OUTPUT_BYTES_MAX) < 0 ||
	    fcntl(fd, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL) < 0)
		return -errno;
	return TAKE_FD(fd);
}

static int open_netns(pid_t pid)
{
	char path[48];
	text_format(path, sizeof(path), "/proc/%d/ns/net", (int)pid);
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	return fd < 0 ? -errno : fd;
}

static int write_record(struct sandbox_host *host, const struct sandbox *s, struct error *e)
{
	struct record record = {.pid = s->pid, .start_time = s->start_time, .index = s->index, .nonce = s->nonce};
	text_copy(record.id, sizeof(record.id), s->id);
	return record_write(host->records, &record, e);
}

/* Between clone and execution: while the child sets itself up, all that a later helper needs is written down. */
static int launch_and_record(struct sandbox_host *host, struct sandbox *s, const struct launch_spec *spec,
                             struct error *e)
{
	struct launch_child child;
	int r = launch_begin(spec, &child, e);
	if (r < 0)
		return r;
	s->pid = child.pid;
	r = record_start_time(child.pid, &s->start_time);
	if (r < 0)
		error_set_errno(e, r, "start time of the new sandbox");
	if (r == 0)
		r = write_record(host, s, e);
	if (r == 0)
		r = launch_commit(&child, e);
	if (r < 0) {
		launch_abort(&child);
		record_remove(host->records, s->id);
		return r;
	}
	pthread_mutex_lock(&host->lock);
	s->pidfd = child.pidfd;
	pthread_mutex_unlock(&host->lock);
	return 0;
}

struct start {
	struct sandbox_host *host;
	struct sandbox *sandbox;
	const struct host_sandbox_spec *spec;
	const struct command *command;
};

/* On a spawner's thread. */
static int start_in_place(void *context, struct spawner_place *place, struct error *e)
{
	struct start *start = context;
	struct sandbox_host *host = start->host;
	struct sandbox *s = start->sandbox;
	struct cgroup_limits limits = {.memory_max_bytes = start->spec->memory_max_bytes,
	                               .cpu_percent = start->spec->cpu_percent,
	                               .pids_max = start->spec->pids_max};
	struct launch_spec launch = {
	    .program = start->command->program,
	    .argv = start->command->argv,
	    .environment = start->command->environment,
	    .fds = start->spec->fds,
	    .fd_count = start->spec->fd_count,
	    .tap_fd = place->tap,
	    .null_fd = host->null_fd,
	    .output_fd = s->output,
	    .uid = (uid_t)(host->config->vmm_uid_base + s->index),
	    .jail = &host->jail,
	};
	int r = cgroup_create(&host->cgroups, place->group, s->id, &limits, &launch.cgroup_fd, e);
	if (r == 0) {
		r = launch_and_record(host, s, &launch, e);
		close_if_open(&launch.cgroup_fd);
	}
	if (r < 0) {
		cgroup_leave(&host->cgroups);
		cgroup_remove(&host->cgroups, s->id, CGROUP_WAIT_MS, NULL);
		return r;
	}
	pthread_mutex_lock(&host->lock);
	s->netns = TAKE_FD(place->netns);
	s->tap = TAKE_FD(place->tap);
	s->started = 1;
	pthread_mutex_unlock(&host->lock);
	return 0;
}

static int check_spec(const struct host_sandbox_spec *spec, struct error *e)
{
	if (!id_is_valid(spec->id, 'b'))
		return error_set(e, ERROR_INVALID, "not a sandbox id: \"%.*s\"", ID_BYTES, spec->id);
	if (spec->memory_max_bytes && spec->memory_max_bytes < MEMORY_MAX_BYTES_LOWEST)
		return error_set(e, ERROR_INVALID, "memory limit of %llu bytes is too low for any VMM",
		                 (unsigned long long)spec->memory_max_bytes);
	if (spec->cpu_percent && (spec->cpu_percent < CPU_PERCENT_LOWEST || spec->cpu_percent > CPU_PERCENT_HIGHEST))
		return error_set(e, ERROR_INVALID, "CPU limit of %u %% is out of range", spec->cpu_percent);
	return 0;
}

static int hand_out(const struct sandbox *s, pid_t *ret_pid, int *ret_pidfd, struct error *e)
{
	*ret_pid = s->pid;
	*ret_pidfd = fcntl(s->pidfd, F_DUPFD_CLOEXEC, 0);
	return *ret_pidfd < 0 ? error_set_errno(e, errno, "pidfd") : 0;
}

/* The answer to this very call was lost: gives it again. 0 if the sandbox is not of this call. */
static int start_was_done(struct sandbox_host *host, const char *id, uint64_t nonce, pid_t *ret_pid, int *ret_pidfd)
{
	struct sandbox *s = sandbox_get(host, id);
	if (!s)
		return 0;
	pthread_mutex_lock(&s->work);
	int done = s->listed && s->started && nonce && s->nonce == nonce && s->pidfd >= 0 &&
	           hand_out(s, ret_pid, ret_pidfd, NULL) == 0;
	pthread_mutex_unlock(&s->work);
	sandbox_put(host, s);
	return done;
}

int sandbox_start(struct sandbox_host *host, const struct host_sandbox_spec *spec, uint64_t nonce, pid_t *ret_pid,
                  int *ret_pidfd, struct error *e)
{
	struct command command = {0};
	int r = check_spec(spec, e);
	if (r == 0 && start_was_done(host, spec->id, nonce, ret_pid, ret_pidfd))
		return 0;
	if (r == 0)
		r = build_command(host, spec, &command, e);
	struct sandbox *s = r == 0 ? sandbox_new(spec->id) : NULL;
	if (r == 0 && !s)
		r = error_set_errno(e, ENOMEM, "sandbox");
	if (r < 0) {
		command_free(&command);
		return r;
	}
	s->nonce = nonce;
	pthread_mutex_lock(&s->work);
	r = table_add(host, s, HOST_SANDBOXES_MAX, e);
	if (r < 0) {
		pthread_mutex_unlock(&s->work);
		sandbox_destroy(s);
		command_free(&command);
		return r;
	}
	s->output = make_output();
	struct start start = {.host = host, .sandbox = s, .spec = spec, .command = &command};
	r = s->output < 0 ? error_set_errno(e, s->output, "output of the VMM")
	                  : spawner_run(host->spawner, start_in_place, &start, e);
	command_free(&command);
	if (r == 0)
		r = hand_out(s, ret_pid, ret_pidfd, e);
	int started = s->started;
	if (!started)
		table_remove(host, s);
	pthread_mutex_unlock(&s->work);
	sandbox_put(host, s);
	if (r < 0 && started)
		sandbox_kill(host, spec->id, NULL);
	return r < 0 ? error_prefix(e, "sandbox %s cannot be started", spec->id) : 0;
}

/* --- end ------------------------------------------------------------------------------------------------------ */

/* Collects the exit status if the VMM is our child and has ended. */
static void reap_locked(struct sandbox *s)
{
	siginfo_t info = {0};
	if (s->pidfd < 0 || s->exit_known || waitid(P_PIDFD, (id_t)s->pidfd, &info, WEXITED | WNOHANG) < 0 || !info.si_pid)
		return;
	s->exit_known = 1;
	s->exit_status = info.si_code == CLD_EXITED ? (info.si_status & 0xff) << 8 : info.si_status & 0x7f;
}

void sandbox_reap(struct sandbox_host *host)
{
	pthread_mutex_lock(&host->lock);
	for (size_t i = 0; i < HOST_SANDBOXES_MAX; i++)
		if (host->slots[i])
			reap_locked(host->slots[i]);
	pthread_mutex_unlock(&host->lock);
}

static int end_process(struct sandbox_host *host, struct sandbox *s, struct error *e)
{
	if (s->pidfd < 0)
		return 0;
	syscall(SYS_pidfd_send_signal, s->pidfd, SIGKILL, NULL, 0);
	uint64_t deadline = time_monotonic_ms() + KILL_WAIT_MS;
	struct pollfd p = {.fd = s->pidfd, .events = POLLIN};
	while (!p.revents) {
		uint64_t now = time_monotonic_ms();
		if (now >= deadline)
			return error_set(e, ERROR_TIMEOUT, "VMM %d of sandbox %s did not end within %d s of SIGKILL", (int)s->pid,
			                 s->id, KILL_WAIT_MS / 1000);
		poll(&p, 1, (int)(deadline - now));
	}
	pthread_mutex_lock(&host->lock);
	reap_locked(s);
	pthread_mutex_unlock(&host->lock);
	return 0;
}

static void put_tap_aside(struct sandbox_host *host, struct sandbox *s)
{
	pthread_mutex_lock(&host->lock);
	if (s->tap >= 0 && host->tap_count < TAPS_KEPT_MAX)
		host->taps[host->tap_count++] = TAKE_FD(s->tap);
	pthread_mutex_unlock(&host->lock);
}

int sandbox_kill(struct sandbox_host *host, const char *id, struct error *e)
{
	if (!id_is_valid(id, 'b'))
		return error_set(e, ERROR_INVALID, "not a sandbox id: \"%.*s\"", ID_BYTES, id);
	struct sandbox *s = sandbox_get(host, id);
	if (!s)
		return 0;
	int r = 0;
	pthread_mutex_lock(&s->work);
	if (s->listed) {
		r = end_process(host, s, e);
		if (r == 0)
			r = cgroup_remove(&host->cgroups, id, CGROUP_WAIT_MS, e);
		if (r == 0) {
			record_remove(host->records, id);
			table_remove(host, s);
			put_tap_aside(host, s);
		}
	}
	pthread_mutex_unlock(&s->work);
	sandbox_put(host, s);
	return r;
}

/* --- use ------------------------------------------------------------------------------------------------------ */

static int describe_locked(struct sandbox *s, struct host_sandbox_info *info)
{
	reap_locked(s);
	*info = (struct host_sandbox_info){
	    .pid = s->pid, .pidfd = -1, .exit_known = s->exit_known, .exit_status = s->exit_status};
	text_copy(info->id, sizeof(info->id), s->id);
	info->alive = s->pidfd >= 0 && !pidfd_has_ended(s->pidfd);
	if (!info->alive)
		return 0;
	info->pidfd = fcntl(s->pidfd, F_DUPFD_CLOEXEC, 0);
	return info->pidfd < 0 ? -errno : 0;
}

int sandbox_list(struct sandbox_host *host, struct host_sandbox_info **ret, size_t *ret_count, struct error *e)
{
	int r = 0;
	size_t count = 0;
	pthread_mutex_lock(&host->lock);
	struct host_sandbox_info *list = calloc(host->count + 1, sizeof(*list));
	if (!list)
		r = -ENOMEM;
	for (size_t i = 0; i < HOST_SANDBOXES_MAX && r == 0; i++) {
		if (!host->slots[i] || !host->slots[i]->started)
			continue;
		r = describe_locked(host->slots[i], &list[count]);
		if (r == 0)
			count++;
	}
	pthread_mutex_unlock(&host->lock);
	if (r < 0) {
		while (count)
			close_if_open(&list[--count].pidfd);
		free(list);
		return error_set_errno(e, r, "list of sandboxes");
	}
	*ret = list;
	*ret_count = count;
	return 0;
}

int sandbox_sockets(struct sandbox_host *host, const char *id, int *fds, size_t count, struct error *e)
{
	CLEANUP_CLOSE int netns = -1;
	struct sandbox *s = require(host, id, e);
	if (!s)
		return -ENOENT;
	pthread_mutex_lock(&host->lock);
	/* A namespace without its VMM is an empty one: say so instead of letting connections time out. */
	int alive = s->pidfd >= 0 && !pidfd_has_ended(s->pidfd);
	if (alive && s->started)
		netns = fcntl(s->netns, F_DUPFD_CLOEXEC, 0);
	pthread_mutex_unlock(&host->lock);
	int r = netns < 0 ? error_set(e, ERROR_UNAVAILABLE, "the VMM of sandbox %s has ended", id)
	                  : netns_sockets(netns, host->home_netns, fds, count, e);
	sandbox_put(host, s);
	return r;
}

int sandbox_output(struct sandbox_host *host, const char *id, char *ret, size_t *ret_size, struct error *e)
{
	struct sandbox *s = require(host, id, e);
	if (!s)
		return -ENOENT;
	ssize_t n = s->output < 0 ? 0 : fd_pread_full(s->output, ret, PROTOCOL_OUTPUT_BYTES_MAX, 0);
	sandbox_put(host, s);
	if (n < 0)
		return error_set_errno(e, (int)n, "output of sandbox %s", id);
	ret[n] = '\0';
	*ret_size = strlen(ret);
	return 0;
}

int sandbox_memory_copy(struct sandbox_host *host, const char *id, int base_fd, uint64_t size, int pages_fd,
                        int bitmap_fd, uint64_t *ret_pages, struct error *e)
{
	struct sandbox *s = require(host, id, e);
	if (!s)
		return -ENOENT;
	int r;
	pthread_mutex_lock(&s->memory);
	if (s->pidfd < 0 || pidfd_has_ended(s->pidfd))
		r = error_set(e, ERROR_UNAVAILABLE, "the VMM of sandbox %s has ended", id);
	else
		r = memory_copy(s->pid, base_fd, size, pages_fd, bitmap_fd, &s->window, ret_pages, e);
	/* While it lived its pid was its own, so what was read is known to be its memory. */
	if (r == 0 && pidfd_has_ended(s->pidfd))
		r = error_set(e, ERROR_UNAVAILABLE, "the VMM of sandbox %s ended during the copy", id);
	pthread_mutex_unlock(&s->memory);
	sandbox_put(host, s);
	return r;
}

static void close_taps(struct sandbox_host *host)
{
	for (;;) {
		pthread_mutex_lock(&host->lock);
		int tap = host->tap_count ? host->taps[--host->tap_count] : -1;
		pthread_mutex_unlock(&host->lock);
		if (tap < 0)
			return;
		close(tap);
	}
}

static void drop_windows(struct sandbox_host *host)
{
	uint64_t now = time_monotonic_ms();
	for (size_t i = 0; i < HOST_SANDBOXES_MAX; i++) {
		pthread_mutex_lock(&host->lock);
		struct sandbox *s = host->slots[i];
		if (s)
			s->references++;
		pthread_mutex_unlock(&host->lock);
		if (!s)
			continue;
		/* One that is busy is not idle. */
		if (pthread_mutex_trylock(&s->memory) == 0) {
			if (s->window.use_count >= 2 || (s->window.address && now - s->window.used_ms >= MEMORY_KEEP_MS))
				memory_window_drop(&s->window);
			pthread_mutex_unlock(&s->memory);
		}
		sandbox_put(host, s);
	}
}

void sandbox_settle(struct sandbox_host *host)
{
	pthread_mutex_lock(&host->lock);
	host->unsettled = 1;
	pthread_cond_signal(&host->janitor_wakes);
	pthread_mutex_unlock(&host->lock);
}

/* Does what takes milliseconds and nobody should wait for. Idle but for a look every MEMORY_KEEP_MS. */
static void *janitor_main(void *context)
{
	struct sandbox_host *host = context;
	for (;;) {
		struct timespec until;
		clock_gettime(CLOCK_REALTIME, &until);
		until.tv_sec += MEMORY_KEEP_MS / 1000;
		pthread_mutex_lock(&host->lock);
		if (!host->unsettled)
			pthread_cond_timedwait(&host->janitor_wakes, &host->lock, &until);
		host->unsettled = 0;
		pthread_mutex_unlock(&host->lock);
		close_taps(host);
		drop_windows(host);
	}
	return NULL;
}

static int start_janitor(struct sandbox_host *host, struct error *e)
{
	pthread_t thread;
	int r = pthread_create(&thread, NULL, janitor_main, host);
	if (r)
		return error_set_errno(e, r, "thread");
	pthread_detach(thread);
	return 0;
}

/* --- restart -------------------------------------------------------------------------------------------------- */

static int open_output(pid_t pid)
{
	char path[48];
	text_format(path, sizeof(path), "/proc/%d/fd/2", (int)pid);
	/* Only our memfd is worth anything; a VMM may have put something else there. */
	CLEANUP_CLOSE int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
	if (fd < 0 || fcntl(fd, F_GET_SEALS) < 0)
		return -1;
	return TAKE_FD(fd);
}

/* A record's process, if it is still the same one: -1 if not. */
static int open_process(const struct record *record)
{
	uint64_t start_time;
	CLEANUP_CLOSE int pidfd = (int)syscall(SYS_pidfd_open, record->pid, 0);
	if (pidfd < 0 || record_start_time(record->pid, &start_time) < 0 || start_time != record->start_time)
		return -1;
	return TAKE_FD(pidfd);
}

static void adopt(void *context, const struct record *record)
{
	struct sandbox_host *host = context;
	struct error e;
	struct sandbox *s = sandbox_new(record->id);
	if (!s)
		return;
	s->pid = record->pid;
	s->start_time = record->start_time;
	s->nonce = record->nonce;
	s->pidfd = open_process(record);
	if (s->pidfd >= 0) {
		s->netns = open_netns(s->pid);
		s->output = open_output(s->pid);
	}
	s->started = 1;
	if (table_add(host, s, record->index, &e) < 0) {
		log_warning("helper", "record of sandbox %s: %s", record->id, e.message);
		sandbox_destroy(s);
		return;
	}
	log_info("helper", "sandbox %s %s", record->id, s->pidfd < 0 ? "had ended" : "taken over");
	sandbox_put(host, s);
}

static int is_known(void *context, const char *id)
{
	struct sandbox *s = sandbox_get(context, id);
	if (s)
		sandbox_put(context, s);
	return s != NULL;
}

static int open_records(struct sandbox_host *host, struct error *e)
{
	char path[CONFIG_PATH_BYTES + 16];
	text_format(path, sizeof(path), "%s/helper", host->config->runtime_dir);
	if (mkdir(path, 0700) < 0 && errno != EEXIST)
		return error_set_errno(e, errno, "%s", path);
	host->records = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
	if (host->records < 0)
		return error_set_errno(e, errno, "%s", path);
	/* The runtime folder belongs to the daemon's user, who could have put something here. */
	struct stat st;
	if (fstat(host->records, &st) < 0 || st.st_uid != 0 || (st.st_mode & 077))
		return error_set(e, ERROR_FORBIDDEN, "%s must belong to root with mode 0700", path);
	return 0;
}

static int open_handles(struct sandbox_host *host, struct error *e)
{
	host->home_netns = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
	host->null_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
	if (host->home_netns < 0 || host->null_fd < 0)
		return error_set_errno(e, errno, "network namespace of the host, /dev/null");
	return open_records(host, e);
}

/* Only while it is being opened: later on threads use it until the end of the process. */
static void sandbox_host_close(struct sandbox_host *host)
{
	if (host->count == 0)
		cgroup_close(&host->cgroups);
	for (size_t i = 0; i < HOST_SANDBOXES_MAX; i++)
		if (host->slots[i])
			sandbox_destroy(host->slots[i]);
	jail_close(&host->jail);
	close_if_open(&host->home_netns);
	close_if_open(&host->null_fd);
	close_if_open(&host->records);
	pthread_mutex_destroy(&host->lock);
	free(host);
}

int sandbox_host_open(struct sandbox_host **ret, const struct config *config, struct error *e)
{
	struct sandbox_host *host = calloc(1, sizeof(*host));
	if (!host)
		return error_set_errno(e, ENOMEM, "sandboxes");
	host->config = config;
	host->home_netns = host->null_fd = host->records = -1;
	host->jail.mount_namespace = -1;
	pthread_mutex_init(&host->lock, NULL);
	pthread_cond_init(&host->janitor_wakes, NULL);
	int r = open_handles(host, e);
	if (r == 0)
		r = cgroup_open(&host->cgroups, config->instance, e);
	if (r == 0)
		r = jail_open(&host->jail, config, e);
	if (r == 0)
		r = record_scan(host->records, adopt, host, e);
	if (r < 0) {
		sandbox_host_close(host);
		return r;
	}
	unsigned removed = cgroup_sweep(&host->cgroups, is_known, host);
	if (removed)
		log_info("helper", "removed %u left-over process groups", removed);
	/* From here on threads use the object, so it stays even if the last of them could not be started. */
	r = spawner_new(&host->cgroups, &host->spawner, e);
	if (r == 0)
		r = start_janitor(host, e);
	if (r == 0)
		*ret = host;
	return r;
}

const struct cgroup_host *sandbox_cgroups(const struct sandbox_host *host)
{
	return &host->cgroups;
}

const struct jail *sandbox_jail(const struct sandbox_host *host)
{
	return &host->jail;
}
