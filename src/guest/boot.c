#include "guest/boot.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/reboot.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/log.h"
#include "base/text.h"
#include "guest/cgroup.h"

#define BOOT_LIST_BYTES_MAX 65536
#define BOOT_NEW_ROOT "/newroot"
#define BOOT_FILES_SOFT 65536
#define BOOT_FILES_HARD 1048576
#define BOOT_TERM_WAIT_US 1500000

static int is_guest;

int boot_is_initrd(void)
{
	return getpid() == 1 && access(BOOT_MODULES "/order", R_OK) == 0;
}

int boot_is_guest(void)
{
	return is_guest;
}

int boot_option(const char *name, char *to, size_t size)
{
	CLEANUP_FREE char *line = NULL;
	size_t name_size = strlen(name);
	if (fd_read_file(AT_FDCWD, "/proc/cmdline", 16384, &line, NULL) < 0)
		return -ENOENT;
	char *rest = line;
	for (char *word; (word = strsep(&rest, " \n"));)
		if (strncmp(word, name, name_size) == 0 && word[name_size] == '=')
			return text_copy(to, size, word + name_size + 1);
	return -ENOENT;
}

static int mount_on(const char *source, const char *target, const char *type, unsigned long flags, const char *options)
{
	if (mkdir(target, 0755) < 0 && errno != EEXIST)
		log_warning("boot", "cannot make %s: %s", target, strerror(errno));
	if (mount(source, target, type, flags, options) < 0 && errno != EBUSY) {
		int r = -errno;
		log_error("boot", "cannot mount %s on %s: %s", type, target, strerror(errno));
		return r;
	}
	return 0;
}

static int load_module(const char *name, struct error *e)
{
	char path[512];
	if (text_format(path, sizeof(path), BOOT_MODULES "/%s", name) < 0)
		return error_set(e, ERROR_INVALID, "the name of module %.100s is too long", name);
	CLEANUP_CLOSE int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return error_set_errno(e, errno, "cannot open module %s", path);
	if (syscall(SYS_finit_module, fd, "", 0) < 0 && errno != EEXIST)
		return error_set_errno(e, errno, "cannot load module %s", path);
	return 0;
}

static int load_modules(struct error *e)
{
	CLEANUP_FREE char *list = NULL;
	int r = fd_read_file(AT_FDCWD, BOOT_MODULES "/order", BOOT_LIST_BYTES_MAX, &list, NULL);
	if (r < 0)
		return error_set_errno(e, r, "cannot read " BOOT_MODULES "/order");
	char *rest = list;
	for (char *name; (name = strsep(&rest, " \t\r\n"));) {
		struct error one;
		if (!*name || *name == '#')
			continue;
		/* A kernel that lacks a bus has drivers that refuse to load: what matters is whether the disk shows up. */
		if (load_module(name, &one) < 0)
			log_warning("boot", "%s", one.message);
		char path[512];
		if (text_format(path, sizeof(path), BOOT_MODULES "/%s", name) == 0)
			unlink(path);
	}
	return 0;
}

static int wait_for_disk(struct error *e)
{
	for (int waited = 0; access(BOOT_DISK, F_OK) < 0; waited += 2) {
		if (waited >= BOOT_DISK_WAIT_MS)
			return error_set(e, ERROR_UNAVAILABLE, "the disk " BOOT_DISK " did not appear within %d s",
			                 BOOT_DISK_WAIT_MS / 1000);
		usleep(2000);
	}
	return 0;
}

int boot_initrd(struct error *e)
{
	char *argv[] = {(char *)(uintptr_t)BOOT_AGENT, NULL};
	char *envp[] = {(char *)(uintptr_t) "PATH=/usr/sbin:/usr/bin:/sbin:/bin", NULL};
	mount_on("devtmpfs", "/dev", "devtmpfs", MS_NOSUID, "mode=0755");
	int r = load_modules(e);
	if (r == 0)
		r = wait_for_disk(e);
	if (r < 0)
		return r;
	mkdir(BOOT_NEW_ROOT, 0755);
	/* Reading must not write: access times would make each snapshot larger. And no kernel thread is to read all block
	 * bitmaps a few seconds after the mount, which is in every clone of a template anew. */
	if (mount(BOOT_DISK, BOOT_NEW_ROOT, "ext4", MS_NOATIME, "noinit_itable,no_prefetch_block_bitmaps") < 0)
		return error_set_errno(e, errno, "cannot mount " BOOT_DISK);
	mkdir(BOOT_NEW_ROOT "/dev", 0755);
	if (mount("/dev", BOOT_NEW_ROOT "/dev", NULL, MS_MOVE, NULL) < 0)
		return error_set_errno(e, errno, "cannot move /dev");
	/* The initrd lives in memory: what it no longer needs is given back. */
	unlink(BOOT_MODULES "/order");
	unlink("/init");
	if (chdir(BOOT_NEW_ROOT) < 0 || mount(".", "/", NULL, MS_MOVE, NULL) < 0 || chroot(".") < 0 || chdir("/") < 0)
		return error_set_errno(e, errno, "cannot switch to the disk");
	execve(BOOT_AGENT, argv, envp);
	return error_set_errno(e, errno, "cannot run " BOOT_AGENT);
}

static void mount_all(void)
{
	const unsigned long strict = MS_NOSUID | MS_NODEV | MS_NOEXEC;
	mount_on("proc", "/proc", "proc", strict, NULL);
	mount_on("sysfs", "/sys", "sysfs", strict, NULL);
	mount_on("devtmpfs", "/dev", "devtmpfs", MS_NOSUID, "mode=0755");
	mount_on("devpts", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "gid=5,mode=0620,ptmxmode=0666");
	mount_on("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777");
	mount_on("tmpfs", "/run", "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755");
	mount_on("cgroup2", "/sys/fs/cgroup", "cgroup2", strict, "nsdelegate");
	mkdir("/run/lock", 01777);
	chmod("/run/lock", 01777);
	mkdir("/tmp", 01777);
	chmod("/tmp", 01777);
	/* devtmpfs has devices only. */
	if (symlink("/proc/self/fd", "/dev/fd") < 0 || symlink("/proc/self/fd/0", "/dev/stdin") < 0 ||
	    symlink("/proc/self/fd/1", "/dev/stdout") < 0 || symlink("/proc/self/fd/2", "/dev/stderr") < 0)
		log_debug("boot", "links in /dev are there already");
}

static void set_kernel(void)
{
	static const struct {
		const char *path;
		const char *value;
	} settings[] = {
	    /* A number is not given out again soon: late calls by number must not hit a stranger. */
	    {"/proc/sys/kernel/pid_max", "4194304"},
	    {"/proc/sys/kernel/printk", "3 4 1 3"},
	    /* Equal shares for each session of processes; see guest/cgroup.h. */
	    {"/proc/sys/kernel/sched_autogroup_enabled", "1"},
	    {"/proc/self/autogroup", "-20"},
	    {"/proc/sys/kernel/core_pattern", "core"},
	    {"/proc/sys/net/ipv4/ip_unprivileged_port_start", "0"},
	    {"/proc/sys/net/ipv4/ping_group_range", "0 2147483647"},
	    {"/proc/sys/fs/inotify/max_user_instances", "1024"},
	    {"/proc/sys/fs/inotify/max_user_watches", "524288"},
	    {"/proc/sys/vm/max_map_count", "262144"},
	    {"/proc/sys/fs/protected_hardlinks", "1"},
	    {"/proc/sys/fs/protected_symlinks", "1"},
	};
	for (size_t i = 0; i < ARRAY_SIZE(settings); i++) {
		CLEANUP_CLOSE int fd = open(settings[i].path, O_WRONLY | O_CLOEXEC);
		if (fd < 0 || write(fd, settings[i].value, strlen(settings[i].value)) < 0)
			log_warning("boot", "cannot set %s: %s", settings[i].path, strerror(errno));
	}
}

static void set_limits(void)
{
	const struct rlimit files = {.rlim_cur = BOOT_FILES_SOFT, .rlim_max = BOOT_FILES_HARD};
	const struct rlimit core = {.rlim_cur = 0, .rlim_max = RLIM_INFINITY};
	CLEANUP_CLOSE int nr_open = open("/proc/sys/fs/nr_open", O_WRONLY | O_CLOEXEC);
	if (nr_open >= 0)
		fd_write_full(nr_open, "1048576", 7);
	setrlimit(RLIMIT_NOFILE, &files);
	setrlimit(RLIMIT_CORE, &core);
	CLEANUP_CLOSE int score = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
	if (score < 0 || write(score, "-1000", 5) < 0)
		log_warning("boot", "cannot protect the agent from the OOM killer: %s", strerror(errno));
}

static void set_hostname(void)
{
	CLEANUP_FREE char *name = NULL;
	if (fd_read_file(AT_FDCWD, "/etc/hostname", 256, &name, NULL) < 0)
		name = strdup("space");
	if (!name)
		return;
	name[strcspn(name, " \t\r\n")] = '\0';
	if (sethostname(name, strlen(name)) < 0)
		log_warning("boot", "cannot set the host name: %s", strerror(errno));
}

static void set_resolver(void)
{
	static const char text[] = "nameserver " NETWORK_GATEWAY "\noptions timeout:2 attempts:2\n";
	struct stat st;
	/* A link into /run points nowhere here: nobody fills it. */
	if (lstat("/etc/resolv.conf", &st) == 0 && S_ISREG(st.st_mode) && st.st_size > 0)
		return;
	unlink("/etc/resolv.conf");
	CLEANUP_CLOSE int fd = open("/etc/resolv.conf", O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
	if (fd < 0 || fd_write_full(fd, text, sizeof(text) - 1) < 0)
		log_warning("boot", "cannot write /etc/resolv.conf: %s", strerror(errno));
}

void boot_machine(void)
{
	struct error e;
	is_guest = 1;
	/* An autogroup of its own; fails harmlessly if PID 1 leads a session already. */
	setsid();
	umask(022);
	mount_all();
	set_limits();
	set_kernel();
	set_hostname();
	set_resolver();
	reboot(RB_DISABLE_CAD);
	if (network_begin(&e) < 0)
		log_error("boot", "%s", e.message);
}

void boot_poweroff(void)
{
	struct error e;
	cgroup_thaw(&e);
	kill(-1, SIGTERM);
	usleep(BOOT_TERM_WAIT_US);
	cgroup_kill_users();
	kill(-1, SIGKILL);
	sync();
	mount(NULL, "/", NULL, MS_REMOUNT | MS_RDONLY, NULL);
	sync();
	reboot(RB_POWER_OFF);
	/* A machine without a power switch ends by a reset: its VMM runs with -no-reboot. */
	reboot(RB_AUTOBOOT);
	for (;;)
		pause();
}
