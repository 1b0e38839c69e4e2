#include "guest/cgroup.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/log.h"
#include "base/text.h"

static struct {
	int root;
	int user;
	int freeze; /* user/cgroup.freeze */
	int events; /* user/cgroup.events */
} cgroup = {.root = -1, .user = -1, .freeze = -1, .events = -1};

static struct {
	pthread_mutex_t lock;
	pthread_cond_t changed;
	int closed;
	int frozen;
	unsigned inside;
} gate = {.lock = PTHREAD_MUTEX_INITIALIZER};

static int write_at(int dirfd, const char *path, const char *text)
{
	CLEANUP_CLOSE int fd = openat(dirfd, path, O_WRONLY | O_CLOEXEC);
	if (fd < 0)
		return -errno;
	return write(fd, text, strlen(text)) < 0 ? -errno : 0;
}

/* What the kernel could give to programs now, at boot: all but its own needs and the agent's. */
static uint64_t memory_available_bytes(void)
{
	CLEANUP_FREE char *text = NULL;
	if (fd_read_file(AT_FDCWD, "/proc/meminfo", 65536, &text, NULL) < 0)
		return 0;
	const char *line = strstr(text, "MemAvailable:");
	return line ? strtoull(line + 13, NULL, 10) * 1024 : 0;
}

static void set_limits(void)
{
	char text[32];
	uint64_t available = memory_available_bytes();
	uint64_t reserve = MIN(MAX(available / 16, CGROUP_RESERVE_BYTES_MIN), CGROUP_RESERVE_BYTES_MAX);
	if (write_at(cgroup.root, "cgroup.subtree_control", "+memory") < 0)
		log_warning("cgroup", "the kernel has no memory controller: users' processes are not limited");
	if (write_at(cgroup.root, "cgroup.subtree_control", "+pids") < 0)
		log_warning("cgroup", "the kernel has no pids controller");
	if (available > 2 * reserve) {
		/* Users run out of memory in their own group, before the machine does. */
		text_format(text, sizeof(text), "%llu", (unsigned long long)(available - reserve));
		write_at(cgroup.user, "memory.max", text);
	}
	write_at(cgroup.root, "agent/memory.min", "16M");
}

int cgroup_begin(const char *root, int limits, struct error *e)
{
	pthread_condattr_t attributes;
	pthread_condattr_init(&attributes);
	pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
	pthread_cond_init(&gate.changed, &attributes);
	pthread_condattr_destroy(&attributes);
	if (!root)
		return 0;
	int dir = open(root, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (dir < 0)
		return error_set_errno(e, errno, "cannot open %s", root);
	if ((mkdirat(dir, "agent", 0755) < 0 && errno != EEXIST) || (mkdirat(dir, "user", 0755) < 0 && errno != EEXIST)) {
		int r = error_set_errno(e, errno, "cannot make cgroups in %s", root);
		close(dir);
		return r;
	}
	int user = openat(dir, "user", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	int freeze = user < 0 ? -1 : openat(user, "cgroup.freeze", O_RDWR | O_CLOEXEC);
	int events = user < 0 ? -1 : openat(user, "cgroup.events", O_RDONLY | O_CLOEXEC);
	if (freeze < 0 || events < 0) {
		int r = error_set_errno(e, errno, "%s is not a cgroup2 file system", root);
		if (user >= 0)
			close(user);
		if (freeze >= 0)
			close(freeze);
		close(dir);
		return r;
	}
	cgroup.root = dir;
	cgroup.user = user;
	cgroup.freeze = freeze;
	cgroup.events = events;
	int r = write_at(dir, "agent/cgroup.procs", "0");
	if (r < 0)
		log_warning("cgroup", "cannot move into %s/agent: %s", root, strerror(-r));
	if (limits)
		set_limits();
	return 0;
}

int cgroup_user_fd(void)
{
	return cgroup.user;
}

static void deadline_after(struct timespec *ts, long ms)
{
	clock_gettime(CLOCK_MONOTONIC, ts);
	ts->tv_sec += ms / 1000;
	ts->tv_nsec += ms % 1000 * 1000000;
	if (ts->tv_nsec >= 1000000000) {
		ts->tv_nsec -= 1000000000;
		ts->tv_sec++;
	}
}

int cgroup_gate_enter(int (*is_gone)(void *context), void *context)
{
	pthread_mutex_lock(&gate.lock);
	while (gate.closed) {
		struct timespec until;
		deadline_after(&until, 1000);
		pthread_cond_timedwait(&gate.changed, &gate.lock, &until);
		pthread_mutex_unlock(&gate.lock);
		/* Also when the gate has opened: a call that a clone inherited in this place has no client any more. */
		if (is_gone && is_gone(context))
			return -ECANCELED;
		pthread_mutex_lock(&gate.lock);
	}
	gate.inside++;
	pthread_mutex_unlock(&gate.lock);
	return 0;
}

void cgroup_gate_leave(void)
{
	pthread_mutex_lock(&gate.lock);
	if (--gate.inside == 0 && gate.closed)
		pthread_cond_broadcast(&gate.changed);
	pthread_mutex_unlock(&gate.lock);
}

/* True once the kernel reports all tasks of the group stopped. */
static int wait_frozen(void)
{
	uint64_t end = time_monotonic_ms() + CGROUP_FREEZE_WAIT_MS;
	for (;;) {
		char text[256];
		ssize_t n = pread(cgroup.events, text, sizeof(text) - 1, 0);
		if (n < 0)
			return 0;
		text[n] = '\0';
		if (strstr(text, "frozen 1"))
			return 1;
		uint64_t now = time_monotonic_ms();
		if (now >= end)
			return 0;
		struct pollfd p = {.fd = cgroup.events, .events = POLLPRI};
		poll(&p, 1, (int)MIN(end - now, UINT64_C(50)));
	}
}

int cgroup_freeze(int *ret_confirmed, struct error *e)
{
	*ret_confirmed = 0;
	if (cgroup.freeze < 0)
		return error_set(e, ERROR_UNSUPPORTED, "freezing needs a cgroup2 file system");
	pthread_mutex_lock(&gate.lock);
	gate.closed = 1;
	/* A start that hangs in its exec (a dead network file system) must not keep the snapshot waiting for ever. */
	struct timespec until;
	deadline_after(&until, CGROUP_FREEZE_WAIT_MS);
	while (gate.inside && pthread_cond_timedwait(&gate.changed, &gate.lock, &until) != ETIMEDOUT)
		;
	int r = pwrite(cgroup.freeze, "1", 1, 0) < 0 ? -errno : 0;
	if (r == 0) {
		gate.frozen = 1;
	} else {
		gate.closed = gate.frozen;
		pthread_cond_broadcast(&gate.changed);
	}
	pthread_mutex_unlock(&gate.lock);
	if (r < 0)
		return error_set_errno(e, r, "cannot freeze users' processes");
	*ret_confirmed = wait_frozen();
	return 0;
}

int cgroup_thaw(struct error *e)
{
	if (cgroup.freeze < 0)
		return 0;
	pthread_mutex_lock(&gate.lock);
	int r = !gate.frozen ? 0 : pwrite(cgroup.freeze, "0", 1, 0) < 0 ? -errno : 0;
	if (r == 0) {
		gate.frozen = 0;
		gate.closed = 0;
		pthread_cond_broadcast(&gate.changed);
	}
	pthread_mutex_unlock(&gate.lock);
	return r < 0 ? error_set_errno(e, r, "cannot thaw users' processes") : 0;
}

int cgroup_is_frozen(void)
{
	pthread_mutex_lock(&gate.lock);
	int frozen = gate.frozen;
	pthread_mutex_unlock(&gate.lock);
	return frozen;
}

uint64_t cgroup_user_cpu_us(void)
{
	char text[512];
	unsigned long long usage = 0;
	if (cgroup.user < 0)
		return 0;
	CLEANUP_CLOSE int fd = openat(cgroup.user, "cpu.stat", O_RDONLY | O_CLOEXEC);
	ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof(text) - 1);
	if (n <= 0)
		return 0;
	text[n] = '\0';
	const char *line = strstr(text, "usage_usec ");
	if (line)
		usage = strtoull(line + 11, NULL, 10);
	return usage;
}

void cgroup_kill_users(void)
{
	if (cgroup.user >= 0)
		write_at(cgroup.user, "cgroup.kill", "1");
}
