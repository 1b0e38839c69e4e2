#include "host/doctor.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/seccomp.h>
#include <pwd.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/text.h"
#include "host/cgroup.h"
#include "host/jail.h"

#define LINUX_MAJOR_LOWEST 5
#define LINUX_MINOR_LOWEST 11 /* close_range with all that the helper needs of it */
#define DISK_WARN_BYTES (5 * GIB)

static int line(struct buf *b, const char *name, const char *status, const char *text)
{
	return buf_printf(b, "%s\t%s\t%s\n", name, status, text);
}

static int check_kernel(struct buf *b)
{
	struct utsname name;
	unsigned long major = 0;
	unsigned long minor = 0;
	uname(&name);
	char *end;
	major = strtoul(name.release, &end, 10);
	if (*end == '.')
		minor = strtoul(end + 1, NULL, 10);
	int good = major > LINUX_MAJOR_LOWEST || (major == LINUX_MAJOR_LOWEST && minor >= LINUX_MINOR_LOWEST);
	return buf_printf(b, "kernel\t%s\tLinux %s%s\n", good ? "ok" : "fail", name.release,
	                  good ? "" : ", 5.11 or later is needed");
}

static int check_kvm(struct buf *b)
{
	int node = access("/dev/kvm", F_OK) == 0;
	int cpu = jail_cpu_has_virtualization();
	if (node && cpu)
		return line(b, "kvm", "ok", "/dev/kvm is there and the processor has vmx or svm: sandboxes run accelerated");
	if (cpu)
		return line(b, "kvm", "warn",
		            "the processor has vmx or svm but /dev/kvm is missing (load kvm_intel or kvm_amd)");
	if (node)
		return line(
		    b, "kvm", "warn",
		    "/dev/kvm is there but the processor shows neither vmx nor svm, so ordinary kernels cannot run on it: "
		    "sandboxes are emulated (TCG), which is several times slower");
	return line(b, "kvm", "warn",
	            "no hardware virtualisation: sandboxes are emulated (TCG), which is several times slower");
}

static int check_cgroups(struct buf *b, const struct cgroup_host *cgroups)
{
	static const char *const names[CGROUP_CONTROLLER_COUNT] = {"memory", "cpu", "pids"};
	int missing = 0;
	for (int c = 0; c < CGROUP_CONTROLLER_COUNT; c++)
		missing += cgroups->version[c] == 0;
	int r = buf_printf(b, "cgroup\t%s\t", missing ? "warn" : "ok");
	for (int c = 0; c < CGROUP_CONTROLLER_COUNT && r == 0; c++) {
		const char *separator = c ? ", " : "";
		if (cgroups->version[c])
			r = buf_printf(b, "%s%s by v%u", separator, names[c], cgroups->version[c]);
		else
			r = buf_printf(b, "%s%s missing (no limit)", separator, names[c]);
	}
	if (r == 0)
		r = buf_printf(b, "; processes are tracked in %s\n", cgroups->dirs[0].path);
	return r;
}

static int check_tun(struct buf *b)
{
	CLEANUP_CLOSE int fd = open("/dev/net/tun", O_RDWR | O_CLOEXEC);
	if (fd < 0)
		return buf_printf(b, "tun\tfail\t/dev/net/tun: %s (load the module tun)\n", strerror(errno));
	return line(b, "tun", "ok", "/dev/net/tun can be opened");
}

/* Tried in a process of its own, so that this one stays where it is. */
static int check_netns(struct buf *b)
{
	siginfo_t info = {0};
	pid_t pid = (pid_t)syscall(SYS_clone, SIGCHLD | CLONE_NEWNET | CLONE_NEWPID | CLONE_NEWNS, NULL, NULL, NULL, NULL);
	if (pid == 0)
		_exit(0);
	if (pid < 0)
		return buf_printf(b, "namespaces\tfail\tnetwork, pid and mount namespaces: %s\n", strerror(errno));
	while (waitid(P_PID, (id_t)pid, &info, WEXITED) < 0 && errno == EINTR)
		;
	return line(b, "namespaces", "ok", "network, pid and mount namespaces can be made");
}

static int check_storage(struct buf *b, const struct host_storage_info *s)
{
	struct statvfs fs;
	char free_text[32];
	int r;
	if (!s->reflink)
		r = buf_printf(b,
		               "storage\twarn\t%s/pool is on %s without reflink and no loop device can be used: every "
		               "snapshot is a full (sparse) copy\n",
		               s->data_dir, s->filesystem);
	else if (s->loop_mounted)
		r = buf_printf(b, "storage\tok\treflink on XFS in %s/pool.xfs, mounted at %s/pool\n", s->data_dir, s->data_dir);
	else
		r = buf_printf(b, "storage\tok\treflink on %s at %s/pool\n", s->filesystem, s->data_dir);
	if (r < 0 || statvfs(s->data_dir, &fs) < 0)
		return r;
	uint64_t free_bytes = (uint64_t)fs.f_bavail * fs.f_frsize;
	text_format_size(free_text, sizeof(free_text), free_bytes);
	return buf_printf(b, "disk\t%s\t%s free at %s\n", free_bytes < DISK_WARN_BYTES ? "warn" : "ok", free_text,
	                  s->data_dir);
}

static int check_user(struct buf *b, const struct config *config)
{
	uid_t uid;
	gid_t gid;
	struct error e;
	if (config_identity(config, &uid, &gid, &e) < 0)
		return line(b, "user", "fail", e.message);
	for (uint64_t id = config->vmm_uid_base; id < config->vmm_uid_base + HOST_SANDBOXES_MAX; id += 128) {
		if (getpwuid((uid_t)id))
			return buf_printf(
			    b,
			    "user\twarn\tuser id %llu belongs to a user of this host, but sandboxes run as %llu and up "
			    "(set vmm_uid_base)\n",
			    (unsigned long long)id, (unsigned long long)config->vmm_uid_base);
	}
	return buf_printf(b, "user\tok\tdaemon runs as %s (%u), sandboxes as user ids %llu to %llu\n", config->user,
	                  (unsigned)uid, (unsigned long long)config->vmm_uid_base,
	                  (unsigned long long)config->vmm_uid_base + HOST_SANDBOXES_MAX - 1);
}

static int check_seccomp(struct buf *b)
{
	uint32_t action = SECCOMP_RET_KILL_PROCESS;
	if (syscall(SYS_seccomp, SECCOMP_GET_ACTION_AVAIL, 0, &action) < 0)
		return line(b, "seccomp", "warn", "the kernel has no seccomp filters");
	return line(b, "seccomp", "ok", "filters are available");
}

static int run_version(const char *program, int output_fd)
{
	char *path = strdup(program);
	char option[] = "--version";
	char *argv[] = {path, option, NULL};
	char *environment[] = {NULL};
	posix_spawn_file_actions_t actions;
	posix_spawnattr_t attributes;
	sigset_t none;
	pid_t pid;
	int status = -1;
	sigemptyset(&none);
	posix_spawn_file_actions_init(&actions);
	posix_spawn_file_actions_adddup2(&actions, output_fd, 1);
	posix_spawnattr_init(&attributes);
	posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
	posix_spawnattr_setsigmask(&attributes, &none);
	int r = path ? posix_spawn(&pid, path, &actions, &attributes, argv, environment) : ENOMEM;
	posix_spawn_file_actions_destroy(&actions);
	posix_spawnattr_destroy(&attributes);
	free(path);
	if (r)
		return -r;
	while (waitpid(pid, &status, 0) < 0)
		if (errno != EINTR)
			return -errno;
	return status == 0 ? 0 : -ENOEXEC;
}

static int check_qemu(struct buf *b, const struct config *config)
{
	char text[256] = "";
	CLEANUP_CLOSE int fd = fd_memfd("version", 0);
	int r = fd < 0 ? fd : run_version(config->qemu_path, fd);
	if (r < 0)
		return buf_printf(b, "qemu\tfail\t%s: %s (package qemu-system-x86)\n", config->qemu_path, strerror(-r));
	ssize_t n = fd_pread_full(fd, text, sizeof(text) - 1, 0);
	text[MAX(n, 0)] = '\0';
	text[strcspn(text, "\n")] = '\0';
	return buf_printf(b, "qemu\tok\t%s\n", text);
}

int doctor_report(const struct config *config, struct sandbox_host *sandboxes, const struct host_storage_info *storage,
                  struct buf *ret)
{
	int r = check_kernel(ret);
	if (r == 0)
		r = check_kvm(ret);
	if (r == 0)
		r = check_qemu(ret, config);
	if (r == 0)
		r = check_cgroups(ret, sandbox_cgroups(sandboxes));
	if (r == 0)
		r = check_tun(ret);
	if (r == 0)
		r = check_netns(ret);
	if (r == 0)
		r = check_storage(ret, storage);
	if (r == 0)
		r = check_user(ret, config);
	if (r == 0)
		r = check_seccomp(ret);
	if (r == 0 && !sandbox_jail(sandboxes)->has_shim)
		r = line(ret, "shim", "warn", "libspace-vmm-shim.so is not beside the host helper: QEMU cannot be restored");
	return r;
}
