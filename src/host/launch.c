#include "host/launch.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/sched.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/fd.h"
#include "host/client.h"

#define LAUNCH_FIRST_FD 3
#define LAUNCH_FDS_MAX (HOST_SANDBOX_FDS_MAX + 8)
#define LAUNCH_SETUP_WAIT_MS 15000
/* A VMM goes before the daemon when memory runs out. */
#define LAUNCH_OOM_SCORE "300"

/* The child is a copy of this process, so a pointer to a constant means the same here. */
struct launch_report {
	const char *step;
	int error;
};

/* What the child keeps of the helper's descriptors, at fixed numbers after those of the VMM and the tap's. */
struct layout {
	int fds[LAUNCH_FDS_MAX];
	size_t count;
	int null, output, status, go, jail;
};

static int add(struct layout *l, int fd)
{
	l->fds[l->count] = fd;
	return LAUNCH_FIRST_FD + (int)l->count++;
}

/*
 * Moves everything to its number and closes all else at once: other threads' pipes must not live on in this process.
 * Goes by way of copies above the final range, because source and target numbers overlap.
 */
static int arrange(struct layout *l, size_t vmm_count)
{
	int above = LAUNCH_FIRST_FD + (int)l->count;
	for (size_t i = 0; i < l->count; i++) {
		l->fds[i] = fcntl(l->fds[i], F_DUPFD_CLOEXEC, above);
		if (l->fds[i] < 0)
			return -errno;
	}
	for (size_t i = 0; i < l->count; i++)
		if (dup3(l->fds[i], LAUNCH_FIRST_FD + (int)i, i < vmm_count ? 0 : O_CLOEXEC) < 0)
			return -errno;
	if (syscall(SYS_close_range, (unsigned)above, ~0u, 0) < 0)
		return -errno;
	if (dup2(l->null, 0) < 0 || dup2(l->null, 1) < 0 || dup2(l->output, 2) < 0)
		return -errno;
	return 0;
}

static void reset_signals(void)
{
	for (int signal_number = 1; signal_number < NSIG; signal_number++)
		signal(signal_number, SIG_DFL);
	sigset_t none;
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
}

/* Everything between clone and the wait for the word. System calls only: other threads' locks may be held. */
static int set_up(const struct launch_spec *spec, const struct layout *l, const char **step)
{
	*step = "session";
	if (setsid() < 0 || sethostname("sandbox", 7) < 0)
		return -errno;
	int score = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
	if (score >= 0) {
		ssize_t ignored = write(score, LAUNCH_OOM_SCORE, sizeof(LAUNCH_OOM_SCORE) - 1);
		(void)ignored;
		close(score);
	}
	reset_signals();
	struct jail jail = *spec->jail;
	jail.mount_namespace = l->jail;
	int r = jail_enter(&jail, step);
	return r < 0 ? r : jail_drop_privileges(spec->uid, step);
}

static void child_main(const struct launch_spec *spec, int status_fd, int go_fd)
{
	struct launch_report report = {.step = "descriptors"};
	struct layout l = {0};
	for (size_t i = 0; i < spec->fd_count; i++)
		add(&l, spec->fds[i]);
	add(&l, spec->tap_fd);
	l.null = add(&l, spec->null_fd);
	l.output = add(&l, spec->output_fd);
	l.status = add(&l, status_fd);
	l.go = add(&l, go_fd);
	l.jail = add(&l, spec->jail->mount_namespace);
	report.error = arrange(&l, spec->fd_count + 1);
	if (report.error == 0)
		report.error = set_up(spec, &l, &report.step);
	char word;
	if (report.error == 0) {
		if (fd_read_full(l.go, &word, 1) != 1)
			_exit(1);
		execve(spec->program, spec->argv, spec->environment);
		report.step = "program";
		report.error = -errno;
	}
	fd_write_full(l.status, &report, sizeof(report));
	_exit(1);
}

static int clone_child(const struct launch_spec *spec, struct launch_child *child, int status_fd, int go_fd,
                       struct error *e)
{
	int pidfd = -1;
	struct clone_args args = {
	    .flags = CLONE_PIDFD | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS,
	    .pidfd = (uintptr_t)&pidfd,
	    .exit_signal = SIGCHLD,
	};
	if (spec->cgroup_fd >= 0) {
		args.flags |= CLONE_INTO_CGROUP;
		args.cgroup = (uint64_t)spec->cgroup_fd;
	}
	long pid = syscall(SYS_clone3, &args, sizeof(args));
	if (pid < 0)
		return error_set_errno(e, errno, "new process in its own namespaces");
	if (pid == 0)
		child_main(spec, status_fd, go_fd);
	child->pid = (pid_t)pid;
	child->pidfd = pidfd;
	return 0;
}

int launch_begin(const struct launch_spec *spec, struct launch_child *ret, struct error *e)
{
	int status[2];
	int go[2];
	if (spec->fd_count > HOST_SANDBOX_FDS_MAX)
		return error_set(e, ERROR_TOO_LARGE, "more than %d descriptors for a sandbox", HOST_SANDBOX_FDS_MAX);
	if (pipe2(status, O_CLOEXEC) < 0)
		return error_set_errno(e, errno, "pipe");
	if (pipe2(go, O_CLOEXEC) < 0) {
		close(status[0]);
		close(status[1]);
		return error_set_errno(e, errno, "pipe");
	}
	*ret = (struct launch_child){.pid = -1, .pidfd = -1, .go_fd = go[1], .status_fd = status[0]};
	int r = clone_child(spec, ret, status[1], go[0], e);
	close(status[1]);
	close(go[0]);
	if (r < 0)
		launch_abort(ret);
	return r;
}

int launch_commit(struct launch_child *child, struct error *e)
{
	struct launch_report report;
	struct pollfd p = {.fd = child->status_fd, .events = POLLIN};
	/* If the child has failed already, its end is closed and the report says why. SIGPIPE is ignored here. */
	ssize_t ignored = write(child->go_fd, "g", 1);
	(void)ignored;
	int r;
	do
		r = poll(&p, 1, LAUNCH_SETUP_WAIT_MS);
	while (r < 0 && errno == EINTR);
	if (r == 0)
		return error_set(e, ERROR_TIMEOUT, "the VMM was not started within %d s", LAUNCH_SETUP_WAIT_MS / 1000);
	ssize_t n = fd_read_full(child->status_fd, &report, sizeof(report));
	if (n == (ssize_t)sizeof(report))
		return error_set_errno(e, report.error, "%s", report.step);
	if (n != 0)
		return error_set(e, ERROR_INTERNAL, "the VMM's set-up sent a damaged report");
	close(child->go_fd);
	close(child->status_fd);
	child->go_fd = child->status_fd = -1;
	return 0;
}

void launch_abort(struct launch_child *child)
{
	if (child->go_fd >= 0)
		close(child->go_fd);
	if (child->status_fd >= 0)
		close(child->status_fd);
	if (child->pidfd >= 0) {
		siginfo_t info;
		syscall(SYS_pidfd_send_signal, child->pidfd, SIGKILL, NULL, 0);
		while (waitid(P_PIDFD, (id_t)child->pidfd, &info, WEXITED) < 0 && errno == EINTR)
			;
		close(child->pidfd);
	}
	*child = (struct launch_child){.pid = -1, .pidfd = -1, .go_fd = -1, .status_fd = -1};
}
