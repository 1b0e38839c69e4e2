#include "host/supervisor.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/log.h"
#include "base/text.h"
#include "host/cgroup.h"

#define AREA "supervisor"
#define RESTART_FIRST_MS 20
#define RESTART_LONGEST_MS 1000
/* A child that ran this long was not in a crash loop. */
#define RESTART_FORGET_MS 3000
#define READY_POLL_MS 20
#define HELPER_START_WAIT_MS 120000 /* makes the storage at the very first start */
#define WORKER_FIRST_TRIES 10
#define WORKER_END_WAIT_MS 60000 /* verbs in progress are finished */
#define HELPER_END_WAIT_MS 10000
#define OOM_SCORE "-500"

struct child {
	const char *name;
	pid_t pid; /* 0: not running */
	uint64_t started_ms;
	uint64_t restart_at_ms;
	unsigned delay_ms;
	unsigned starts;
};

struct supervisor {
	const struct config *config;
	uid_t uid;
	gid_t gid;
	char self[CONFIG_PATH_BYTES];
	char helper_socket[CONFIG_PATH_BYTES + 32];
	int signals;
	int pid_file;
	struct child helper;
	struct child worker;
	int ready;    /* the worker has answered once */
	int stopping; /* number of requests to stop */
	int failed;
};

/* --- children ------------------------------------------------------------------------------------------------- */

/* In the child: dies with the supervisor, even if that has died in this very moment. */
static void bind_to_parent(pid_t parent)
{
	prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
	if (getppid() != parent)
		_exit(1);
}

static void reset_signals(void)
{
	sigset_t none;
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
}

static void raise_open_files(void)
{
	struct rlimit limit;
	if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
		limit.rlim_cur = limit.rlim_max;
		setrlimit(RLIMIT_NOFILE, &limit);
	}
}

static int drop_privileges(uid_t uid, gid_t gid)
{
	for (unsigned long cap = 0; prctl(PR_CAPBSET_READ, cap, 0, 0, 0) >= 0; cap++)
		if (prctl(PR_CAPBSET_DROP, cap, 0, 0, 0) < 0)
			return -errno;
	if (setgroups(0, NULL) < 0 || setresgid(gid, gid, gid) < 0 || setresuid(uid, uid, uid) < 0)
		return -errno;
	return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 ? -errno : 0;
}

static void exec_helper(const struct supervisor *s)
{
	char name[] = "space-helper";
	char *argv[] = {name, NULL};
	execv(s->config->helper_path, argv);
	log_error(AREA, "%s: %s", s->config->helper_path, strerror(errno));
}

static void exec_worker(const struct supervisor *s, pid_t parent)
{
	char name[] = "spaced";
	char option[] = "--worker";
	char *argv[] = {name, option, NULL};
	/* Opened while still root: the program may lie in a folder that the user cannot enter. */
	int program = open(s->self, O_PATH | O_CLOEXEC);
	int r = drop_privileges(s->uid, s->gid);
	if (r < 0) {
		log_error(AREA, "privileges of the worker: %s", strerror(-r));
		return;
	}
	/* The change of user has cleared it. */
	bind_to_parent(parent);
	raise_open_files();
	umask(077);
	execv(s->self, argv);
	if (errno == EACCES)
		fexecve(program, argv, environ);
	log_error(AREA, "%s: %s", s->self, strerror(errno));
}

static void start_child(struct supervisor *s, struct child *child)
{
	pid_t parent = getpid();
	child->started_ms = time_monotonic_ms();
	child->starts++;
	pid_t pid = fork();
	if (pid == 0) {
		bind_to_parent(parent);
		reset_signals();
		if (child == &s->helper)
			exec_helper(s);
		else
			exec_worker(s, parent);
		_exit(127);
	}
	if (pid < 0) {
		log_error(AREA, "cannot start the %s: %s", child->name, strerror(errno));
		child->restart_at_ms = child->started_ms + RESTART_LONGEST_MS;
		return;
	}
	child->pid = pid;
}

static void describe_exit(int status, char *to, size_t size)
{
	if (WIFSIGNALED(status))
		text_format(to, size, "was killed by signal %d (%s)", WTERMSIG(status), strsignal(WTERMSIG(status)));
	else
		text_format(to, size, "ended with status %d", WEXITSTATUS(status));
}

static void child_ended(struct supervisor *s, struct child *child, int status)
{
	char how[96];
	uint64_t now = time_monotonic_ms();
	describe_exit(status, how, sizeof(how));
	child->pid = 0;
	if (s->stopping) {
		log_info(AREA, "%s %s", child->name, how);
		return;
	}
	int lasted = now - child->started_ms >= RESTART_FORGET_MS;
	child->delay_ms = lasted || !child->delay_ms ? RESTART_FIRST_MS : MIN(child->delay_ms * 2, RESTART_LONGEST_MS);
	child->restart_at_ms = now + child->delay_ms;
	log_error(AREA, "%s %s; starting it again in %u ms", child->name, how, child->delay_ms);
	if (!s->ready && (child == &s->helper || child->starts >= WORKER_FIRST_TRIES)) {
		log_error(AREA, "giving up, as the %s never came up", child->name);
		s->failed = 1;
	}
}

/* Orphans come here as well: VMMs whose helper died, and what they leave. */
static void reap(struct supervisor *s)
{
	int status;
	pid_t pid;
	while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
		if (pid == s->helper.pid)
			child_ended(s, &s->helper, status);
		else if (pid == s->worker.pid)
			child_ended(s, &s->worker, status);
	}
}

/* --- readiness ------------------------------------------------------------------------------------------------ */

static int answers(const char *path, int type)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	if (text_copy(address.sun_path, sizeof(address.sun_path), path) < 0)
		return 0;
	CLEANUP_CLOSE int fd = socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	return fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof(address)) == 0;
}

/* sd_notify(3): one datagram to the socket that the service manager names. */
static void notify(const char *state)
{
	const char *path = getenv("NOTIFY_SOCKET");
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	if (!path || (*path != '/' && *path != '@') || text_copy(address.sun_path, sizeof(address.sun_path), path) < 0)
		return;
	socklen_t size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + strlen(path));
	if (*path == '@')
		address.sun_path[0] = '\0';
	CLEANUP_CLOSE int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	if (fd >= 0)
		sendto(fd, state, strlen(state), MSG_NOSIGNAL, (struct sockaddr *)&address, size);
}

static void check_ready(struct supervisor *s)
{
	if (s->ready || !s->worker.pid || !answers(s->config->socket, SOCK_STREAM))
		return;
	s->ready = 1;
	log_info(AREA, "ready at %s, TCP %s", s->config->socket, s->config->listen);
	notify("READY=1");
}

/* --- loop ----------------------------------------------------------------------------------------------------- */

static void take_signals(struct supervisor *s, int wait_ms)
{
	struct pollfd p = {.fd = s->signals, .events = POLLIN};
	if (poll(&p, 1, wait_ms) <= 0)
		return;
	struct signalfd_siginfo info;
	if (fd_read_full(s->signals, &info, sizeof(info)) != (ssize_t)sizeof(info))
		return;
	if (info.ssi_signo == SIGTERM || info.ssi_signo == SIGINT)
		s->stopping++;
	reap(s);
}

/* Starts a child whose time has come; returns in how many ms to look again, -1 if only a signal matters. */
static int tend(struct supervisor *s, struct child *child)
{
	uint64_t now = time_monotonic_ms();
	if (child->pid)
		return -1;
	if (now < child->restart_at_ms)
		return (int)(child->restart_at_ms - now);
	start_child(s, child);
	return child->pid ? -1 : RESTART_LONGEST_MS;
}

static int sooner(int a, int b)
{
	if (a < 0 || b < 0)
		return MAX(a, b);
	return MIN(a, b);
}

/* The worker is of no use before the helper answers. */
static int helper_came_up(struct supervisor *s)
{
	uint64_t deadline = time_monotonic_ms() + HELPER_START_WAIT_MS;
	start_child(s, &s->helper);
	while (!s->stopping && !s->failed) {
		if (s->helper.pid && answers(s->helper_socket, SOCK_SEQPACKET))
			return 1;
		if (time_monotonic_ms() >= deadline) {
			log_error(AREA, "helper does not answer after %d s", HELPER_START_WAIT_MS / 1000);
			s->failed = 1;
		}
		take_signals(s, READY_POLL_MS);
	}
	return 0;
}

static void supervise(struct supervisor *s)
{
	if (!helper_came_up(s))
		return;
	while (!s->stopping && !s->failed) {
		int wait_ms = sooner(tend(s, &s->helper), tend(s, &s->worker));
		check_ready(s);
		take_signals(s, s->ready ? wait_ms : sooner(wait_ms, READY_POLL_MS));
	}
}

static void end_child(struct supervisor *s, struct child *child, unsigned wait_ms)
{
	uint64_t deadline = time_monotonic_ms() + wait_ms;
	int asked = s->stopping;
	s->stopping += !s->stopping;
	if (child->pid)
		kill(child->pid, SIGTERM);
	while (child->pid) {
		uint64_t now = time_monotonic_ms();
		if (now >= deadline || (asked && s->stopping > asked)) {
			log_warning(AREA, "killing the %s", child->name);
			kill(child->pid, SIGKILL);
			deadline = now + wait_ms;
		}
		take_signals(s, (int)MIN(deadline - now, 1000));
	}
}

/* --- start and end -------------------------------------------------------------------------------------------- */

static int make_folder(const char *path, mode_t mode, uid_t uid, gid_t gid, struct error *e)
{
	char copy[CONFIG_PATH_BYTES + 32];
	if (text_copy(copy, sizeof(copy), path) < 0)
		return error_set(e, ERROR_INVALID, "%s is too long", path);
	for (char *p = copy + 1; *p; p++) {
		if (*p != '/')
			continue;
		*p = '\0';
		if (mkdir(copy, 0755) < 0 && errno != EEXIST)
			return error_set_errno(e, errno, "%s", copy);
		*p = '/';
	}
	if (mkdir(copy, 0700) < 0 && errno != EEXIST)
		return error_set_errno(e, errno, "%s", path);
	CLEANUP_CLOSE int fd = open(copy, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (fd < 0 || fchown(fd, uid, gid) < 0 || fchmod(fd, mode) < 0)
		return error_set_errno(e, errno, "%s", path);
	return 0;
}

static int prepare_folders(const struct supervisor *s, struct error *e)
{
	char path[CONFIG_PATH_BYTES + 32];
	int r = make_folder(s->config->data_dir, 0700, s->uid, s->gid, e);
	/* The worker makes its socket here and may not touch what is root's. */
	if (r == 0)
		r = make_folder(s->config->runtime_dir, 01775, 0, s->gid, e);
	if (r == 0) {
		text_format(path, sizeof(path), "%s/sandboxes", s->config->runtime_dir);
		r = make_folder(path, 0700, s->uid, s->gid, e);
	}
	return r;
}

static int take_pid_file(struct supervisor *s, struct error *e)
{
	char path[CONFIG_PATH_BYTES + 32];
	char text[32];
	text_format(path, sizeof(path), "%s/spaced.pid", s->config->runtime_dir);
	s->pid_file = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644);
	if (s->pid_file < 0)
		return error_set_errno(e, errno, "%s", path);
	if (flock(s->pid_file, LOCK_EX | LOCK_NB) < 0) {
		ssize_t n = fd_pread_full(s->pid_file, text, sizeof(text) - 1, 0);
		text[MAX(n, 0)] = '\0';
		text[strcspn(text, "\n")] = '\0';
		return error_set(e, ERROR_CONFLICT, "spaced runs already (process %s)", text);
	}
	int size = snprintf(text, sizeof(text), "%d\n", (int)getpid());
	if (ftruncate(s->pid_file, 0) < 0 || fd_pwrite_full(s->pid_file, text, (size_t)size, 0) < 0)
		return error_set_errno(e, errno, "%s", path);
	return 0;
}

static int open_signals(struct supervisor *s, struct error *e)
{
	sigset_t mask;
	sigemptyset(&mask);
	sigaddset(&mask, SIGCHLD);
	sigaddset(&mask, SIGTERM);
	sigaddset(&mask, SIGINT);
	sigaddset(&mask, SIGHUP);
	sigprocmask(SIG_BLOCK, &mask, NULL);
	signal(SIGPIPE, SIG_IGN);
	s->signals = signalfd(-1, &mask, SFD_CLOEXEC);
	return s->signals < 0 ? error_set_errno(e, errno, "signalfd") : 0;
}

static void protect_from_oom(void)
{
	CLEANUP_CLOSE int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
	/* Fails in containers without CAP_SYS_RESOURCE, where it is not ours to decide. */
	if (fd >= 0 && fd_write_full(fd, OOM_SCORE, sizeof(OOM_SCORE) - 1) < 0)
		log_debug(AREA, "oom_score_adj cannot be lowered");
}

/* Left by a worker that was killed, perhaps of another user, which the next one could not remove. */
static void remove_stale_socket(const char *path)
{
	struct stat st;
	if (lstat(path, &st) == 0 && S_ISSOCK(st.st_mode) && !answers(path, SOCK_STREAM))
		unlink(path);
}

/* Whoever starts the daemon has an environment of their own, credentials perhaps, which is none of its business. */
static int is_kept_variable(const char *variable)
{
	static const char *const kept[] = {
	    "SPACE_",    "PATH=",       "LANG=",        "TZ=",       "JOURNAL_STREAM=", "http_proxy=", "https_proxy=",
	    "no_proxy=", "HTTP_PROXY=", "HTTPS_PROXY=", "NO_PROXY=", "ASAN_",           "UBSAN_",      "NOTIFY_SOCKET="};
	for (size_t i = 0; i < ARRAY_SIZE(kept); i++)
		if (text_starts_with(variable, kept[i]))
			return 1;
	return 0;
}

static void filter_environment(void)
{
	char **to = environ;
	for (char **from = environ; from && *from; from++)
		if (is_kept_variable(*from))
			*to++ = *from;
	if (to)
		*to = NULL;
	/* A secret of the starter would do nobody any good either. */
	unsetenv("SPACE_API_KEY");
}

static int prepare(struct supervisor *s, struct error *e)
{
	ssize_t n = readlink("/proc/self/exe", s->self, sizeof(s->self) - 1);
	if (n < 0)
		return error_set_errno(e, errno, "path of this program");
	config_helper_socket(s->config, s->helper_socket, sizeof(s->helper_socket));
	int r = config_identity(s->config, &s->uid, &s->gid, e);
	if (r == 0 && s->uid == 0)
		r = error_set(e, ERROR_INVALID, "the daemon's user must not be root");
	if (r == 0)
		r = prepare_folders(s, e);
	if (r == 0)
		r = take_pid_file(s, e);
	if (r == 0)
		remove_stale_socket(s->config->socket);
	filter_environment();
	if (r == 0)
		r = config_export(s->config, e);
	if (r == 0)
		r = open_signals(s, e);
	if (r == 0 && prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) < 0)
		r = error_set_errno(e, errno, "child subreaper");
	return r;
}

static int is_sandbox(void *context, const char *id)
{
	return id_is_valid(id, 'b');
}

/* What an orderly end leaves of the process groups: those of sandboxes that go on running. */
static void remove_groups(const struct config *config)
{
	struct cgroup_host cgroups;
	if (cgroup_open(&cgroups, config->instance, NULL) < 0)
		return;
	cgroup_sweep(&cgroups, is_sandbox, NULL);
	cgroup_close(&cgroups);
}

static void remove_pid_file(const struct supervisor *s)
{
	char path[CONFIG_PATH_BYTES + 32];
	text_format(path, sizeof(path), "%s/spaced.pid", s->config->runtime_dir);
	unlink(path);
}

int supervisor_main(const struct config *config)
{
	struct error e;
	struct supervisor s = {
	    .config = config,
	    .signals = -1,
	    .pid_file = -1,
	    .helper = {.name = "helper"},
	    .worker = {.name = "worker"},
	};
	log_set_level(config->log_level);
	if (prepare(&s, &e) < 0) {
		log_error(AREA, "%s", e.message);
		return 1;
	}
	protect_from_oom();
	supervise(&s);
	notify("STOPPING=1");
	end_child(&s, &s.worker, WORKER_END_WAIT_MS);
	end_child(&s, &s.helper, HELPER_END_WAIT_MS);
	remove_groups(config);
	remove_pid_file(&s);
	return s.failed ? 1 : 0;
}
