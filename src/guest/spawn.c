#include "guest/spawn.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/sched.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/fd.h"
#include "guest/cgroup.h"

#define SPAWN_STACK_BYTES 24576
/* Code on the borrowed stack never returns through its frames: address sanitizer must not mark them. */
#define CHILD_CODE __attribute__((no_sanitize("address")))

/* Shared between parent (suspended meanwhile) and child. */
struct child {
	const struct spawn *spawn;
	int is_root;
	int cgroup_fd; /* to enter by hand, -1 if the kernel did it */
	volatile int stage;
	volatile int error;
};

/* The child's code runs in the parent's memory: raw system calls only, for the wrappers of setresuid() and its like
 * would act on the parent's threads, and nothing that takes a lock. */

CHILD_CODE static int reset_oom_score(void)
{
	int fd = (int)syscall(SYS_openat, AT_FDCWD, "/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC, 0);
	if (fd < 0)
		return 0;
	long n = syscall(SYS_write, fd, "0", 1);
	syscall(SYS_close, fd);
	return n < 0 ? -1 : 0;
}

CHILD_CODE static int child_setup(const struct child *c)
{
	const struct spawn *s = c->spawn;
	if (c->cgroup_fd >= 0) {
		int fd = (int)syscall(SYS_openat, c->cgroup_fd, "cgroup.procs", O_WRONLY | O_CLOEXEC, 0);
		if (fd < 0 || syscall(SYS_write, fd, "0", 1) < 0)
			return -1;
		syscall(SYS_close, fd);
	}
	if (syscall(SYS_setsid) < 0)
		return -1;
	if (s->is_terminal && syscall(SYS_ioctl, s->fds[0], TIOCSCTTY, 0) < 0)
		return -1;
	for (int i = 0; i < 3; i++)
		if (syscall(SYS_dup3, s->fds[i], i, 0) < 0)
			return -1;
	syscall(SYS_close_range, 3, ~0U, 0);
	syscall(SYS_umask, 022);
	return c->is_root ? reset_oom_score() : 0;
}

CHILD_CODE static int child_take_user(const struct child *c)
{
	const struct guest_user *u = c->spawn->user;
	if (!c->is_root)
		return 0;
	if (syscall(SYS_setgroups, u->group_count, u->groups) < 0)
		return -1;
	if (syscall(SYS_setresgid, u->gid, u->gid, u->gid) < 0)
		return -1;
	return (int)syscall(SYS_setresuid, u->uid, u->uid, u->uid);
}

CHILD_CODE static int child_enter(const struct spawn *s)
{
	if (syscall(SYS_chdir, s->workdir) == 0)
		return 0;
	if (!s->workdir_optional)
		return -1;
	if (syscall(SYS_chdir, s->user->home) == 0)
		return 0;
	return (int)syscall(SYS_chdir, "/");
}

CHILD_CODE static void child_exec_path(const struct spawn *s, const char *path)
{
	syscall(SYS_execve, path, s->argv, s->envp);
	if (errno != ENOEXEC)
		return;
	/* A script without "#!" is run by the shell, as shells and execvp() do. */
	char **argv = s->argv - 1;
	char *first = argv[1];
	argv[0] = (char *)(uintptr_t) "/bin/sh";
	argv[1] = (char *)(uintptr_t)path;
	syscall(SYS_execve, "/bin/sh", argv, s->envp);
	int kept = errno;
	argv[1] = first;
	errno = kept;
}

CHILD_CODE static void child_exec(const struct spawn *s)
{
	char path[PATH_MAX];
	int denied = 0;
	if (strchr(s->program, '/') || !*s->program) {
		child_exec_path(s, s->program);
		return;
	}
	size_t name_size = strlen(s->program);
	const char *directory = s->search ? s->search : "/usr/local/bin:/usr/bin:/bin";
	for (;;) {
		size_t size = strcspn(directory, ":");
		if (size + name_size + 2 <= sizeof(path)) {
			memcpy(path, directory, size);
			size_t at = size;
			if (size)
				path[at++] = '/';
			memcpy(path + at, s->program, name_size + 1);
			child_exec_path(s, path);
			if (errno == EACCES)
				denied = 1;
			else if (errno != ENOENT && errno != ENOTDIR && errno != ELOOP)
				return;
		}
		if (!directory[size])
			break;
		directory += size + 1;
	}
	errno = denied ? EACCES : ENOENT;
}

CHILD_CODE static int child_main(void *context)
{
	struct child *c = context;
	static const uint64_t no_signals = 0;
	c->stage = SPAWN_STAGE_SETUP;
	if (child_setup(c) == 0) {
		c->stage = SPAWN_STAGE_USER;
		if (child_take_user(c) == 0) {
			c->stage = SPAWN_STAGE_WORKDIR;
			if (child_enter(c->spawn) == 0) {
				c->stage = SPAWN_STAGE_EXEC;
				/* The agent blocks all signals and handles none: nothing else is to be reset. */
				syscall(SYS_rt_sigprocmask, SIG_SETMASK, &no_signals, NULL, sizeof(no_signals));
				child_exec(c->spawn);
			}
		}
	}
	c->error = errno;
	syscall(SYS_exit_group, 127);
	__builtin_unreachable();
}

#ifdef __x86_64__
/* clone3() has no wrapper that runs a function on another stack. */
static long clone_into(struct clone_args *args, struct child *c)
{
	long r;
	register int (*entry)(void *) __asm__("r12") = child_main;
	register void *context __asm__("r13") = c;
	__asm__ volatile("syscall\n\t"
	                 "test %%rax, %%rax\n\t"
	                 "jnz 1f\n\t"
	                 "xor %%ebp, %%ebp\n\t"
	                 "mov %%r13, %%rdi\n\t"
	                 "call *%%r12\n\t"
	                 "hlt\n"
	                 "1:"
	                 : "=a"(r)
	                 : "0"((long)SYS_clone3), "D"(args), "S"(sizeof(*args)), "r"(entry), "r"(context)
	                 : "rcx", "r11", "memory");
	return r;
}

static int clone_child(struct child *c, char *stack, volatile pid_t *pid)
{
	struct clone_args args = {
	    .flags = CLONE_VM | CLONE_VFORK | CLONE_PARENT_SETTID,
	    .parent_tid = (uint64_t)(uintptr_t)pid,
	    .exit_signal = SIGCHLD,
	    .stack = (uint64_t)(uintptr_t)stack,
	    .stack_size = SPAWN_STACK_BYTES,
	};
	int user = cgroup_user_fd();
	if (user >= 0) {
		args.flags |= CLONE_INTO_CGROUP;
		args.cgroup = (uint64_t)user;
	}
	c->cgroup_fd = -1;
	long r = clone_into(&args, c);
	return r < 0 ? (int)r : 0;
}
#else
static int clone_child(struct child *c, char *stack, volatile pid_t *pid)
{
	c->cgroup_fd = cgroup_user_fd();
	int r = clone(child_main, stack + SPAWN_STACK_BYTES, CLONE_VM | CLONE_VFORK | CLONE_PARENT_SETTID | SIGCHLD, c,
	              (pid_t *)(uintptr_t)pid);
	return r < 0 ? -errno : 0;
}
#endif

static int tell_exec(const struct spawn *s, int error, struct error *e)
{
	struct stat st;
	switch (error) {
	case ENOENT:
		if (strchr(s->program, '/') && stat(s->program, &st) == 0)
			return error_set(e, ERROR_NOT_FOUND, "cannot run '%.200s': its interpreter does not exist", s->program);
		if (strchr(s->program, '/'))
			return error_set(e, ERROR_NOT_FOUND, "cannot run '%.200s': no such file", s->program);
		return error_set(e, ERROR_NOT_FOUND, "cannot run '%.200s': executable file not found in PATH", s->program);
	case E2BIG:
		return error_set(e, ERROR_INVALID,
		                 "cannot run '%.200s': the argument list is too long (one argument or variable may have at "
		                 "most 131071 bytes, all together a quarter of the stack limit)",
		                 s->program);
	case EACCES:
		return error_set(e, ERROR_FORBIDDEN, "cannot run '%.200s': not an executable file, or no permission",
		                 s->program);
	default:
		return error_set_errno(e, error, "cannot run '%.200s'", s->program);
	}
}

static int tell_failure(const struct spawn *s, const struct child *c, int *ret_exec_errno, struct error *e)
{
	switch (c->stage) {
	case SPAWN_STAGE_EXEC:
		*ret_exec_errno = c->error;
		return tell_exec(s, c->error, e);
	case SPAWN_STAGE_WORKDIR:
		return error_set(e, ERROR_INVALID, "cwd '%.300s' %s", s->workdir,
		                 c->error == ENOENT    ? "does not exist"
		                 : c->error == ENOTDIR ? "is not a directory"
		                 : c->error == EACCES  ? "cannot be entered: permission denied"
		                                       : strerror(c->error));
	case SPAWN_STAGE_USER:
		return error_set_errno(e, c->error, "cannot become user '%s'", s->user->name);
	default:
		return error_set_errno(e, c->error, "cannot prepare the process");
	}
}

int spawn_start(const struct spawn *s, volatile pid_t *pid, int *ret_exec_errno, struct error *e)
{
	_Alignas(64) char stack[SPAWN_STACK_BYTES];
	struct child c = {.spawn = s, .is_root = geteuid() == 0, .cgroup_fd = -1};
	*ret_exec_errno = 0;
	if (!c.is_root && s->user->uid != geteuid())
		return error_set(e, ERROR_FORBIDDEN, "the agent has no right to act as user '%s'", s->user->name);
	int r = clone_child(&c, stack, pid);
	if (r < 0)
		return error_set_errno(e, r, "cannot create a process");
	return c.error ? tell_failure(s, &c, ret_exec_errno, e) : 0;
}
