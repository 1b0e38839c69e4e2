#include "host/jail.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/text.h"

#define JAIL_OPEN_FILES_MAX 1024
#define JAIL_FILE_BYTES_MAX (UINT64_C(1) << 40) /* a guest's disk; no VMM has a reason to write more */
#define JAIL_CPUINFO_BYTES_MAX (16 * MIB)

/* Everything is built below "root" of a scratch tmpfs, the working directory, and "root" becomes / at the end. The
 * scratch covers the runtime folder in this mount namespace, so files that may lie there are opened before. */
struct builder {
	const struct config *config;
	char shim[CONFIG_PATH_BYTES + 32]; /* on the host; "" = none */
	int shim_fd;
	int qemu_fd; /* only if it is outside /usr */
	int has_kvm;
};

int jail_cpu_has_virtualization(void)
{
	CLEANUP_FREE char *text = NULL;
	if (fd_read_file(AT_FDCWD, "/proc/cpuinfo", JAIL_CPUINFO_BYTES_MAX, &text, NULL) < 0)
		return 0;
	const char *flags = strstr(text, "\nflags");
	if (!flags)
		return 0;
	const char *end = strchr(flags + 1, '\n');
	char line[8192];
	size_t length = end ? (size_t)(end - flags) : strlen(flags);
	length = MIN(length, sizeof(line) - 2);
	memcpy(line, flags, length);
	memcpy(line + length, " ", 2);
	return strstr(line, " vmx ") || strstr(line, " svm ");
}

/* Makes the folders that lead to `path` (its last part too if `whole`). */
static int make_parents(const char *path, int whole)
{
	char copy[CONFIG_PATH_BYTES + 64];
	if (text_copy(copy, sizeof(copy), path) < 0)
		return -ENAMETOOLONG;
	for (char *p = copy; *p; p++) {
		if (*p != '/')
			continue;
		*p = '\0';
		if (mkdir(copy, 0755) < 0 && errno != EEXIST)
			return -errno;
		*p = '/';
	}
	return whole && mkdir(copy, 0755) < 0 && errno != EEXIST ? -errno : 0;
}

static int bind_read_only(const char *from, const char *to)
{
	if (mount(from, to, NULL, MS_BIND, NULL) < 0)
		return -errno;
	unsigned long flags = MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV;
	return mount(NULL, to, NULL, flags, NULL) < 0 ? -errno : 0;
}

/* `inside` starts with a slash. */
static int staged(char *to, size_t size, const char *inside)
{
	return text_format(to, size, "root%s", inside);
}

static int add_file(int from_fd, const char *inside)
{
	char from[64];
	char to[CONFIG_PATH_BYTES + 64];
	int r = staged(to, sizeof(to), inside);
	if (r == 0)
		r = make_parents(to, 0);
	if (r < 0)
		return r;
	CLEANUP_CLOSE int fd = open(to, O_CREAT | O_WRONLY | O_CLOEXEC, 0644);
	if (fd < 0)
		return -errno;
	text_format(from, sizeof(from), "/proc/self/fd/%d", from_fd);
	return bind_read_only(from, to);
}

static int add_folder(const char *inside)
{
	char to[CONFIG_PATH_BYTES + 64];
	int r = staged(to, sizeof(to), inside);
	if (r == 0)
		r = make_parents(to, 1);
	return r < 0 ? r : bind_read_only(inside, to);
}

/* /lib and its like are links into /usr on a merged system, folders otherwise, or missing. */
static int add_link_or_folder(const char *inside)
{
	char target[256];
	char to[CONFIG_PATH_BYTES];
	ssize_t n = readlink(inside, target, sizeof(target) - 1);
	if (n < 0)
		return errno == EINVAL ? add_folder(inside) : errno == ENOENT ? 0 : -errno;
	target[n] = '\0';
	int r = staged(to, sizeof(to), inside);
	return r < 0 ? r : symlink(target, to) < 0 ? -errno : 0;
}

/* A node of our own has the mode that the jail needs; where nodes cannot be made, the host's is bound. */
static int add_device(const char *name, mode_t mode)
{
	char from[64];
	char to[128];
	struct stat st;
	if (text_format(from, sizeof(from), "/dev/%s", name) < 0 || text_format(to, sizeof(to), "root/dev/%s", name) < 0)
		return -ENAMETOOLONG;
	if (stat(from, &st) < 0)
		return -errno;
	if (!S_ISCHR(st.st_mode))
		return -ENOTTY;
	if (mknod(to, S_IFCHR | mode, st.st_rdev) == 0)
		return chmod(to, mode) < 0 ? -errno : 0;
	CLEANUP_CLOSE int fd = open(to, O_CREAT | O_WRONLY | O_CLOEXEC, 0644);
	if (fd < 0)
		return -errno;
	return mount(from, to, NULL, MS_BIND, NULL) < 0 ? -errno : 0;
}

static int populate(const struct builder *b, const char **step)
{
	static const char *const links[] = {"/lib", "/lib64", "/lib32", "/bin", "/sbin"};
	static const char *const devices[] = {"null", "zero", "urandom"};
	*step = "/usr";
	int r = add_folder("/usr");
	for (size_t i = 0; i < ARRAY_SIZE(links) && r == 0; i++) {
		*step = links[i];
		r = add_link_or_folder(links[i]);
	}
	if (r == 0) {
		*step = "/etc/ld.so.cache";
		CLEANUP_CLOSE int cache = open(*step, O_PATH | O_CLOEXEC);
		r = cache >= 0 ? add_file(cache, *step) : 0;
	}
	if (r == 0 && b->qemu_fd >= 0) {
		*step = b->config->qemu_path;
		r = add_file(b->qemu_fd, *step);
	}
	if (r == 0 && b->shim_fd >= 0) {
		*step = b->shim;
		r = add_file(b->shim_fd, JAIL_SHIM_PATH);
	}
	if (r == 0) {
		*step = "/dev";
		r = mkdir("root/dev", 0755) < 0 ? -errno : 0;
	}
	for (size_t i = 0; i < ARRAY_SIZE(devices) && r == 0; i++) {
		*step = devices[i];
		r = add_device(devices[i], i == 2 ? 0444 : 0666);
	}
	if (r == 0 && b->has_kvm) {
		*step = "kvm";
		r = add_device("kvm", 0666);
	}
	return r;
}

/* After unshare(): a bind mount takes its source from this mount namespace only. */
static int open_sources(struct builder *b, const char **step)
{
	b->shim_fd = b->qemu_fd = -1;
	*step = b->shim;
	if (*b->shim && (b->shim_fd = open(b->shim, O_PATH | O_CLOEXEC)) < 0)
		return -errno;
	*step = b->config->qemu_path;
	if (!text_starts_with(b->config->qemu_path, "/usr/") && access(b->config->qemu_path, X_OK) == 0 &&
	    (b->qemu_fd = open(b->config->qemu_path, O_PATH | O_CLOEXEC)) < 0)
		return -errno;
	return 0;
}

/* Runs in a child that has its mount namespace for itself. */
static int build(struct builder *b, const char **step)
{
	unsigned long flags = MS_NOSUID | MS_NOEXEC | MS_NOATIME;
	*step = "mount propagation";
	if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0)
		return -errno;
	int r = open_sources(b, step);
	if (r < 0)
		return r;
	*step = "scratch file system";
	if (mount("space-stage", b->config->runtime_dir, "tmpfs", flags, "mode=755,size=64k,nr_inodes=64") < 0)
		return -errno;
	if (chdir(b->config->runtime_dir) < 0 || mkdir("root", 0755) < 0)
		return -errno;
	/* Not nodev: the nodes in it are ours, and nobody in the jail can make others. */
	if (mount("space-jail", "root", "tmpfs", flags, "mode=755,size=64k,nr_inodes=128") < 0)
		return -errno;
	r = populate(b, step);
	if (r < 0)
		return r;
	*step = "read-only root";
	if (mount(NULL, "root", NULL, MS_REMOUNT | MS_BIND | MS_RDONLY | flags, NULL) < 0)
		return -errno;
	*step = "pivot_root";
	if (chdir("root") < 0 || syscall(SYS_pivot_root, ".", ".") < 0)
		return -errno;
	*step = "leaving the host's root";
	if (umount2(".", MNT_DETACH) < 0 || chdir("/") < 0)
		return -errno;
	return 0;
}

struct report {
	int error;
	char step[128];
};

static void builder_child(struct builder *b, int report_fd, int hold_fd)
{
	struct report report = {0};
	const char *step = "mount namespace";
	report.error = unshare(CLONE_NEWNS) < 0 ? -errno : build(b, &step);
	text_copy(report.step, sizeof(report.step), step);
	if (fd_write_full(report_fd, &report, sizeof(report)) == 0) {
		/* Stays until the parent has opened the namespace. */
		char byte;
		fd_read_full(hold_fd, &byte, 1);
	}
	_exit(0);
}

static int find_shim(struct builder *b)
{
	const char *slash = strrchr(b->config->helper_path, '/');
	if (!slash || text_format(b->shim, sizeof(b->shim), "%.*s/libspace-vmm-shim.so",
	                          (int)(slash - b->config->helper_path), b->config->helper_path) < 0)
		*b->shim = '\0';
	if (*b->shim && access(b->shim, R_OK) < 0)
		*b->shim = '\0';
	return *b->shim != '\0';
}

static int take_namespace(struct jail *jail, pid_t child, int report_fd, struct error *e)
{
	struct report report;
	if (fd_read_full(report_fd, &report, sizeof(report)) != (ssize_t)sizeof(report))
		return error_set(e, ERROR_INTERNAL, "jail: its builder died");
	report.step[sizeof(report.step) - 1] = '\0';
	if (report.error)
		return error_set_errno(e, report.error, "jail: %s", report.step);
	char path[64];
	text_format(path, sizeof(path), "/proc/%d/ns/mnt", (int)child);
	jail->mount_namespace = open(path, O_RDONLY | O_CLOEXEC);
	return jail->mount_namespace < 0 ? error_set_errno(e, errno, "jail: %s", path) : 0;
}

int jail_open(struct jail *jail, const struct config *config, struct error *e)
{
	struct builder b = {.config = config};
	*jail = (struct jail){.mount_namespace = -1};
	jail->has_shim = find_shim(&b);
	jail->has_kvm = b.has_kvm = access("/dev/kvm", F_OK) == 0 && jail_cpu_has_virtualization();
	int report[2];
	int hold[2];
	if (pipe2(report, O_CLOEXEC) < 0)
		return error_set_errno(e, errno, "jail: pipe");
	if (pipe2(hold, O_CLOEXEC) < 0) {
		close(report[0]);
		close(report[1]);
		return error_set_errno(e, errno, "jail: pipe");
	}
	pid_t child = fork();
	if (child == 0) {
		close(hold[1]);
		builder_child(&b, report[1], hold[0]);
	}
	close(report[1]);
	close(hold[0]);
	int r = child < 0 ? error_set_errno(e, errno, "jail: fork") : take_namespace(jail, child, report[0], e);
	close(report[0]);
	close(hold[1]);
	if (child > 0)
		waitpid(child, NULL, 0);
	return r;
}

void jail_close(struct jail *jail)
{
	if (jail->mount_namespace >= 0)
		close(jail->mount_namespace);
	jail->mount_namespace = -1;
}

int jail_enter(const struct jail *jail, const char **ret_step)
{
	*ret_step = "jail: mount namespace";
	/* Sets root and working directory to those of the namespace as well. */
	if (setns(jail->mount_namespace, CLONE_NEWNS) < 0)
		return -errno;
	*ret_step = "jail: root";
	return chdir("/") < 0 ? -errno : 0;
}

/* Lowers a limit, never raises it (that would need a privilege which a container may lack). */
static void lower_limit(int resource, rlim_t value)
{
	struct rlimit limit;
	if (getrlimit(resource, &limit) < 0)
		return;
	limit.rlim_max = MIN(limit.rlim_max, value);
	limit.rlim_cur = limit.rlim_max;
	setrlimit(resource, &limit);
}

int jail_drop_privileges(uid_t uid, const char **ret_step)
{
	lower_limit(RLIMIT_CORE, 0);
	lower_limit(RLIMIT_NOFILE, JAIL_OPEN_FILES_MAX);
	lower_limit(RLIMIT_FSIZE, JAIL_FILE_BYTES_MAX);
	*ret_step = "jail: capability bounding set";
	for (unsigned long cap = 0; prctl(PR_CAPBSET_READ, cap, 0, 0, 0) >= 0; cap++)
		if (prctl(PR_CAPBSET_DROP, cap, 0, 0, 0) < 0)
			return -errno;
	/* The raw calls: glibc's would signal threads that this copy of the process does not have. */
	*ret_step = "jail: user id";
	if (syscall(SYS_setgroups, 0, NULL) < 0 || syscall(SYS_setresgid, uid, uid, uid) < 0 ||
	    syscall(SYS_setresuid, uid, uid, uid) < 0)
		return -errno;
	*ret_step = "jail: capabilities";
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct none[_LINUX_CAPABILITY_U32S_3] = {0};
	if (syscall(SYS_capset, &header, none) < 0)
		return -errno;
	*ret_step = "jail: no_new_privs";
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
		return -errno;
	umask(077);
	return 0;
}
