#include "host/storage.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <linux/loop.h>
#include <linux/magic.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/log.h"
#include "base/text.h"

#define LOOP_TRIES_MAX 16
#define LOOP_BLOCK_BYTES 4096
/* Not in linux/magic.h. */
#define XFS_MAGIC 0x58465342
#define STORAGE_FREE_PERCENT 80
#define TEMPORARY_NAME STORAGE_IMAGE_NAME ".new"

static const char *filesystem_name(long magic)
{
	switch (magic) {
	case XFS_MAGIC:
		return "xfs";
	case BTRFS_SUPER_MAGIC:
		return "btrfs";
	case EXT4_SUPER_MAGIC:
		return "ext4";
	case TMPFS_MAGIC:
		return "tmpfs";
	case OVERLAYFS_SUPER_MAGIC:
		return "overlay";
	case 0x2fc12fc1:
		return "zfs";
	case 0xca451a4e:
		return "bcachefs";
	default:
		return "other";
	}
}

/* Tries it out, on two files without names. */
static int can_reflink(int folder_fd)
{
	char block[4096] = {1};
	CLEANUP_CLOSE int from = openat(folder_fd, ".", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
	CLEANUP_CLOSE int to = openat(folder_fd, ".", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
	if (from < 0 || to < 0 || fd_write_full(from, block, sizeof(block)) < 0)
		return 0;
	return ioctl(to, FICLONE, from) == 0;
}

static void describe(int pool_fd, struct host_storage_info *info)
{
	struct statfs fs;
	if (fstatfs(pool_fd, &fs) == 0)
		text_copy(info->filesystem, sizeof(info->filesystem), filesystem_name(fs.f_type));
	info->reflink = can_reflink(pool_fd);
}

static int is_mount_point(int parent_fd, int fd)
{
	struct stat parent;
	struct stat st;
	return fstat(parent_fd, &parent) == 0 && fstat(fd, &st) == 0 && parent.st_dev != st.st_dev;
}

#define MKFS_FD 3
#define MKFS_PATH "/proc/self/fd/3"

/* The file goes by descriptor: the folder is the daemon's, which might put something else in its place. */
static int run_mkfs(int fd, struct error *e)
{
	char words[][20] = {"mkfs.xfs", "-q",        "-f", "-K",         "-m",     "reflink=1",
	                    "-s",       "size=4096", "-L", "space-pool", MKFS_PATH};
	char variables[][48] = {"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C"};
	char *argv[ARRAY_SIZE(words) + 1] = {NULL};
	char *environment[] = {variables[0], variables[1], NULL};
	posix_spawn_file_actions_t actions;
	posix_spawnattr_t attributes;
	sigset_t none;
	pid_t pid;
	int status;
	for (size_t i = 0; i < ARRAY_SIZE(words); i++)
		argv[i] = words[i];
	sigemptyset(&none);
	posix_spawn_file_actions_init(&actions);
	posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
	posix_spawn_file_actions_adddup2(&actions, fd, MKFS_FD);
	posix_spawnattr_init(&attributes);
	posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
	posix_spawnattr_setsigmask(&attributes, &none);
	int r = posix_spawnp(&pid, argv[0], &actions, &attributes, argv, environment);
	posix_spawn_file_actions_destroy(&actions);
	posix_spawnattr_destroy(&attributes);
	if (r)
		return error_set_errno(e, r, "mkfs.xfs (package xfsprogs)");
	while (waitpid(pid, &status, 0) < 0)
		if (errno != EINTR)
			return error_set_errno(e, errno, "mkfs.xfs");
	if (!WIFEXITED(status) || WEXITSTATUS(status))
		return error_set(e, ERROR_INTERNAL, "mkfs.xfs failed with status %#x", (unsigned)status);
	return 0;
}

static uint64_t default_size(int data_fd)
{
	struct statvfs fs;
	if (fstatvfs(data_fd, &fs) < 0)
		return 0;
	uint64_t free_bytes = (uint64_t)fs.f_bavail * fs.f_frsize;
	return free_bytes / 100 * STORAGE_FREE_PERCENT / MIB * MIB;
}

/* Under a temporary name first: a file with the final name holds a whole file system. */
static int make_image(const struct config *config, int data_fd, struct error *e)
{
	uint64_t size = config->storage_size_bytes ? config->storage_size_bytes : default_size(data_fd);
	if (size < STORAGE_SIZE_BYTES_MIN)
		return error_set(e, ERROR_NO_SPACE, "storage of %llu MiB is too small, XFS needs %llu MiB",
		                 (unsigned long long)(size / MIB), (unsigned long long)(STORAGE_SIZE_BYTES_MIN / MIB));
	unlinkat(data_fd, TEMPORARY_NAME, 0);
	CLEANUP_CLOSE int fd = openat(data_fd, TEMPORARY_NAME, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	if (fd < 0)
		return error_set_errno(e, errno, "%s/" TEMPORARY_NAME, config->data_dir);
	int r = ftruncate(fd, (off_t)size) < 0 ? -errno : 0;
	if (r < 0)
		error_set_errno(e, r, "storage image of %llu bytes", (unsigned long long)size);
	else
		r = run_mkfs(fd, e);
	if (r == 0 &&
	    (fsync(fd) < 0 || renameat(data_fd, TEMPORARY_NAME, data_fd, STORAGE_IMAGE_NAME) < 0 || fsync(data_fd) < 0))
		r = error_set_errno(e, errno, "%s/" TEMPORARY_NAME, config->data_dir);
	if (r < 0)
		unlinkat(data_fd, TEMPORARY_NAME, 0);
	return r;
}

/*
 * A loop device that already has the image: a VMM may hold files of a pool that is no longer mounted, and the same
 * image on two devices would be destroyed. Returns the open device, -ENODEV if there is none.
 */
static int find_loop(const struct stat *image, char *ret_path, size_t path_size)
{
	for (int i = 0; i < 1024; i++) {
		struct loop_info64 info;
		text_format(ret_path, path_size, "/dev/loop%d", i);
		/* Read-only: closing a writable block device makes device managers look at it again. */
		CLEANUP_CLOSE int fd = open(ret_path, O_RDONLY | O_CLOEXEC);
		if (fd < 0 || ioctl(fd, LOOP_GET_STATUS64, &info) < 0)
			continue;
		if (info.lo_inode == image->st_ino && info.lo_device == image->st_dev)
			return TAKE_FD(fd);
	}
	return -ENODEV;
}

static int configure_loop(int loop_fd, int image_fd)
{
	struct loop_config config = {
	    .fd = (uint32_t)image_fd,
	    .block_size = LOOP_BLOCK_BYTES,
	    .info = {.lo_flags = LO_FLAGS_AUTOCLEAR | LO_FLAGS_DIRECT_IO},
	};
	text_copy((char *)config.info.lo_file_name, sizeof(config.info.lo_file_name), "space " STORAGE_IMAGE_NAME);
	if (ioctl(loop_fd, LOOP_CONFIGURE, &config) == 0)
		return 0;
	if (errno != EINVAL)
		return -errno;
	/* The file system below does not do direct I/O: everything is cached twice then, which is only slower. */
	config.info.lo_flags = LO_FLAGS_AUTOCLEAR;
	return ioctl(loop_fd, LOOP_CONFIGURE, &config) < 0 ? -errno : 0;
}

static int attach_loop(int image_fd, char *ret_path, size_t path_size, struct error *e)
{
	struct stat image;
	if (fstat(image_fd, &image) < 0)
		return error_set_errno(e, errno, "storage image");
	int found = find_loop(&image, ret_path, path_size);
	if (found >= 0)
		return found;
	CLEANUP_CLOSE int control = open("/dev/loop-control", O_RDWR | O_CLOEXEC);
	if (control < 0)
		return error_set_errno(e, errno, "/dev/loop-control");
	/* Another process may take the free device between the two calls. */
	for (int i = 0; i < LOOP_TRIES_MAX; i++) {
		int number = ioctl(control, LOOP_CTL_GET_FREE);
		if (number < 0)
			return error_set_errno(e, errno, "free loop device");
		text_format(ret_path, path_size, "/dev/loop%d", number);
		/* Where no device manager runs, the node may be missing. */
		if (access(ret_path, F_OK) < 0)
			mknod(ret_path, S_IFBLK | 0600, (dev_t)(7 << 8 | (number & 0xff)));
		CLEANUP_CLOSE int fd = open(ret_path, O_RDWR | O_CLOEXEC);
		if (fd < 0)
			return error_set_errno(e, errno, "%s", ret_path);
		int r = configure_loop(fd, image_fd);
		if (r == 0)
			return TAKE_FD(fd);
		if (r != -EBUSY)
			return error_set_errno(e, r, "%s", ret_path);
	}
	return error_set(e, ERROR_EXHAUSTED, "no loop device stays free");
}

static int mount_image(const struct config *config, int data_fd, int pool_fd, struct error *e)
{
	char device[32];
	struct stat st;
	if (fstatat(data_fd, STORAGE_IMAGE_NAME, &st, AT_SYMLINK_NOFOLLOW) < 0) {
		int r = make_image(config, data_fd, e);
		if (r < 0)
			return r;
	}
	CLEANUP_CLOSE int image = openat(data_fd, STORAGE_IMAGE_NAME, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
	if (image < 0)
		return error_set_errno(e, errno, "%s/" STORAGE_IMAGE_NAME, config->data_dir);
	/* The daemon's user owns the folder; what root mounts must be a file of root's. */
	if (fstat(image, &st) < 0 || !S_ISREG(st.st_mode) || st.st_uid != 0)
		return error_set(e, ERROR_FORBIDDEN, "%s/" STORAGE_IMAGE_NAME " is not a file of root's", config->data_dir);
	CLEANUP_CLOSE int loop = attach_loop(image, device, sizeof(device), e);
	if (loop < 0)
		return loop;
	/* By descriptor again: the pool must be mounted on that very folder. */
	char pool[32];
	text_format(pool, sizeof(pool), "/proc/self/fd/%d", pool_fd);
	/* With `discard`, deleted snapshots give their blocks back to the sparse file. */
	if (mount(device, pool, "xfs", MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_NOATIME, "discard") < 0)
		return error_set_errno(e, errno, "mount of %s/" STORAGE_IMAGE_NAME, config->data_dir);
	return 0;
}

static int open_pool(int data_fd, struct error *e)
{
	if (mkdirat(data_fd, "pool", 0700) < 0 && errno != EEXIST)
		return error_set_errno(e, errno, "pool folder");
	int fd = openat(data_fd, "pool", O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	return fd < 0 ? error_set_errno(e, errno, "pool folder") : fd;
}

int storage_open(const struct config *config, uid_t uid, gid_t gid, struct host_storage_info *ret, struct error *e)
{
	*ret = (struct host_storage_info){0};
	text_copy(ret->data_dir, sizeof(ret->data_dir), config->data_dir);
	CLEANUP_CLOSE int data_fd = open(config->data_dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (data_fd < 0)
		return error_set_errno(e, errno, "data folder %s", config->data_dir);
	CLEANUP_CLOSE int pool_fd = open_pool(data_fd, e);
	if (pool_fd < 0)
		return pool_fd;
	ret->loop_mounted = faccessat(data_fd, STORAGE_IMAGE_NAME, F_OK, 0) == 0;
	if (!is_mount_point(data_fd, pool_fd) && (ret->loop_mounted || !can_reflink(pool_fd))) {
		struct error why;
		int r = mount_image(config, data_fd, pool_fd, &why);
		/* With an image there is data in it: going on with an empty folder would look like losing it all. */
		if (r < 0 && ret->loop_mounted) {
			if (e)
				*e = why;
			return error_prefix(e, "storage");
		}
		if (r < 0)
			unlinkat(data_fd, STORAGE_IMAGE_NAME, 0); /* made just now, so it is empty */
		if (r < 0)
			log_warning("helper", "no reflink storage, snapshots will be full copies: %s", why.message);
		ret->loop_mounted = r == 0;
		close(pool_fd);
		pool_fd = open_pool(data_fd, e);
		if (pool_fd < 0)
			return TAKE_FD(pool_fd);
	}
	if (fchown(pool_fd, uid, gid) < 0 || fchmod(pool_fd, 0700) < 0)
		return error_set_errno(e, errno, "pool folder");
	describe(pool_fd, ret);
	return 0;
}

void storage_close(const struct config *config)
{
	char path[CONFIG_PATH_BYTES + 32];
	text_format(path, sizeof(path), "%s/" STORAGE_IMAGE_NAME, config->data_dir);
	if (access(path, F_OK) < 0)
		return;
	text_format(path, sizeof(path), "%s/pool", config->data_dir);
	/* Fails with EBUSY while a VMM or anybody else has a file open there, EINVAL if it is not mounted. */
	if (umount2(path, UMOUNT_NOFOLLOW) == 0)
		log_info("helper", "unmounted %s", path);
}
