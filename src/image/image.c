/*
 * Steps of a build, in one folder work_dir/build-XXXXXX that is removed at the end. The folder stays locked while its
 * build lives, so that the next build can tell the ones that died from the ones that run.
 */
#include "image/image.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/text.h"
#include "image/build.h"

#define BUILD_PREFIX "build-"
#define TREE_FDS 64
#define COPY_BYTES (1 << 20)
/* Packages that no build has used for this long leave the cache. */
#define CACHE_AGE_S (60 * 24 * 3600)
/* A folder this young may belong to a build that has not locked it yet. */
#define STALE_AGE_S 60
/* A build takes half a GiB with the default packages; it may fill half of what is free. */
#define MEMORY_BUILD_AVAILABLE_BYTES (6 * GIB)
#define MEMORY_BUILD_OPTIONS "size=3g,mode=0755"

const char *const image_default_packages[] = {"bash",
                                              "ca-certificates",
                                              "coreutils",
                                              "curl",
                                              "diffutils",
                                              "file",
                                              "findutils",
                                              "git",
                                              "gzip",
                                              "hostname",
                                              "iproute2",
                                              "jq",
                                              "kmod",
                                              "less",
                                              "libnss-myhostname",
                                              "nano",
                                              "openssl",
                                              "passwd",
                                              "procps",
                                              "python3",
                                              "python3-pip",
                                              "python3-venv",
                                              "sqlite3",
                                              "sudo",
                                              "tar",
                                              "tzdata",
                                              "unzip",
                                              "xz-utils",
                                              "zip",
                                              NULL};

int build_say(struct image_build *b, struct error *e, const char *format, ...)
{
	char line[SUBPROCESS_LINE_BYTES];
	va_list arguments;

	va_start(arguments, format);
	(void)vsnprintf(line, sizeof(line), format, arguments);
	va_end(arguments);
	return b->progress && b->progress(b->context, line) < 0 ? error_set(e, ERROR_CANCELED, "canceled") : 0;
}

int build_path(char *to, size_t size, struct error *e, const char *format, ...)
{
	va_list arguments;
	int n;

	va_start(arguments, format);
	n = vsnprintf(to, size, format, arguments);
	va_end(arguments);
	return n < 0 || (size_t)n >= size ? error_set(e, ERROR_INVALID, "the path %.100s… is too long", to) : 0;
}

int build_run(struct image_build *b, const char *const *argv, const char *directory, unsigned timeout_s,
              struct buf *output, struct error *e)
{
	struct subprocess p = {.argv = argv,
	                       .environment = b->environment,
	                       .directory = directory,
	                       .inherit_fd = -1,
	                       .timeout_s = timeout_s,
	                       .output = output};

	return subprocess_run(&p, e);
}

static int remove_entry(const char *path, const struct stat *st, int type, struct FTW *at)
{
	return remove(path) < 0 && errno != ENOENT ? -1 : 0;
}

int build_remove_tree(const char *path)
{
	/* A mount below would be somebody else's files. */
	return nftw(path, remove_entry, TREE_FDS, FTW_DEPTH | FTW_PHYS | FTW_MOUNT) < 0 && errno != ENOENT ? -errno : 0;
}

int build_copy(int from, int to, struct error *e)
{
	CLEANUP_FREE char *block = malloc(COPY_BYTES);
	struct stat st;
	off_t offset = 0;

	if (!block)
		return error_set(e, ERROR_EXHAUSTED, "out of memory");
	if (fstat(from, &st) < 0 || ftruncate(to, 0) < 0 || ftruncate(to, st.st_size) < 0)
		return error_set_errno(e, errno, "copy a file");
	while (offset < st.st_size && (offset = lseek(from, offset, SEEK_DATA)) >= 0) {
		ssize_t n = fd_pread_full(from, block, COPY_BYTES, offset);
		int r = n < 0 ? (int)n : fd_pwrite_full(to, block, (size_t)n, offset);

		if (r < 0)
			return error_set_errno(e, r, "copy a file");
		if (n == 0)
			break;
		offset += n;
	}
	return 0;
}

int image_package_name_is_valid(const char *name)
{
	size_t size = strlen(name);

	if (size < 2 || size >= IMAGE_PACKAGE_NAME_BYTES || !strchr("abcdefghijklmnopqrstuvwxyz0123456789", *name))
		return 0;
	return strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789+-.") == size;
}

static int check(const struct image_spec *spec, struct error *e)
{
	size_t count = 0;

	if (geteuid() != 0)
		return error_set(e, ERROR_FORBIDDEN, "only root can build an image");
	if (spec->size_bytes < IMAGE_SIZE_MIN || spec->size_bytes > IMAGE_SIZE_MAX || spec->size_bytes % MIB)
		return error_set(e, ERROR_INVALID, "the disk of a template has 1 GiB to 1 TiB, in whole MiB, not %llu bytes",
		                 (unsigned long long)spec->size_bytes);
	for (; spec->packages && spec->packages[count]; count++) {
		if (!image_package_name_is_valid(spec->packages[count]))
			return error_set(e, ERROR_INVALID, "\"%.100s\" is not the name of a Debian package", spec->packages[count]);
		if (count >= IMAGE_PACKAGES_MAX)
			return error_set(e, ERROR_TOO_LARGE, "more than %d packages", IMAGE_PACKAGES_MAX);
	}
	for (const char *c = spec->suite ? spec->suite : ""; *c; c++)
		if (!strchr("abcdefghijklmnopqrstuvwxyz", *c))
			return error_set(e, ERROR_INVALID, "\"%.60s\" is not the name of a Debian suite", spec->suite);
	return 0;
}

static void add_environment(struct image_build *b, const char *assignment)
{
	if (assignment && b->environment_count < IMAGE_ENVIRONMENT_MAX)
		b->environment[b->environment_count++] = assignment;
}

/* Programs that make packages' files must not see anything that changes from build to build. */
static void set_environment(struct image_build *b)
{
	static const char *const proxies[] = {
	    "http_proxy=", "https_proxy=", "no_proxy=", "HTTP_PROXY=", "HTTPS_PROXY=", "NO_PROXY="};

	add_environment(b, "PATH=/usr/sbin:/usr/bin:/sbin:/bin");
	add_environment(b, "HOME=/root");
	add_environment(b, "LC_ALL=C.UTF-8");
	add_environment(b, "TZ=UTC");
	add_environment(b, "DEBIAN_FRONTEND=noninteractive");
	add_environment(b, "SOURCE_DATE_EPOCH=" IMAGE_EPOCH_TEXT);
	add_environment(b, "E2FSPROGS_FAKE_TIME=" IMAGE_EPOCH_TEXT);
	add_environment(b, "PYTHONHASHSEED=0");
	for (char **variable = environ; *variable; variable++)
		for (size_t i = 0; i < ARRAY_SIZE(proxies); i++)
			if (text_starts_with(*variable, proxies[i]))
				add_environment(b, *variable);
}

/* Folders of builds that died with their lock. */
static void remove_stale(const char *work_dir)
{
	DIR *dir = opendir(work_dir);
	struct dirent *entry;

	while (dir && (entry = readdir(dir))) {
		char path[IMAGE_PATH_BYTES];
		struct stat st;
		int fd;

		if (!text_starts_with(entry->d_name, BUILD_PREFIX) ||
		    text_format(path, sizeof(path), "%s/%s", work_dir, entry->d_name) < 0)
			continue;
		fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
		if (fd >= 0 && fstat(fd, &st) == 0 && st.st_mtime < time(NULL) - STALE_AGE_S &&
		    flock(fd, LOCK_EX | LOCK_NB) == 0)
			(void)build_remove_tree(path);
		if (fd >= 0)
			close(fd);
	}
	if (dir)
		closedir(dir);
}

static void prune_cache(struct image_build *b)
{
	DIR *dir = opendir(b->cache);
	struct dirent *entry;
	struct stat st;

	while (dir && (entry = readdir(dir)))
		if (fstatat(dirfd(dir), entry->d_name, &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(st.st_mode) &&
		    st.st_mtime < b->started_s - CACHE_AGE_S)
			(void)unlinkat(dirfd(dir), entry->d_name, 0);
	if (dir)
		closedir(dir);
}

/*
 * Unpacking writes and syncs tens of thousands of small files, which memory does several times faster than a disk. In a
 * mount namespace of this process's own, so that the mount ends with it. Failing is fine: the build is slower then.
 */
static void use_memory(struct image_build *b)
{
	CLEANUP_FREE char *text = NULL;
	unsigned long long available_kib = 0;
	const char *at;
	size_t size;

	if (fd_read_file(AT_FDCWD, "/proc/meminfo", 65536, &text, &size) < 0 || !(at = strstr(text, "MemAvailable:")) ||
	    sscanf(at, "MemAvailable: %llu", &available_kib) != 1 || available_kib * KIB < MEMORY_BUILD_AVAILABLE_BYTES)
		return;
	if (unshare(CLONE_NEWNS) < 0 || mount(NULL, "/", NULL, MS_REC | MS_SLAVE, NULL) < 0)
		return;
	(void)mount("space-image", b->dir, "tmpfs", MS_NOSUID, MEMORY_BUILD_OPTIONS);
}

static int make_dir(const char *path, struct error *e)
{
	return mkdir(path, 0755) < 0 && errno != EEXIST ? error_set_errno(e, errno, "make %s", path) : 0;
}

static int prepare(struct image_build *b, struct error *e)
{
	const char *work_dir = b->spec->work_dir;
	int r = make_dir(work_dir, e);

	if (r < 0)
		return r;
	remove_stale(work_dir);
	r = build_path(b->cache, sizeof(b->cache), e, "%s/packages", work_dir);
	if (r == 0)
		r = make_dir(b->cache, e);
	if (r == 0)
		r = build_path(b->dir, sizeof(b->dir), e, "%s/" BUILD_PREFIX "XXXXXX", work_dir);
	if (r < 0)
		return r;
	if (!mkdtemp(b->dir)) {
		*b->dir = '\0';
		return error_set_errno(e, errno, "make a folder in %s", work_dir);
	}
	b->dir_lock = open(b->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	/* apt downloads as a user of its own, which must be able to pass. */
	if (b->dir_lock < 0 || flock(b->dir_lock, LOCK_EX | LOCK_NB) < 0 || chmod(b->dir, 0755) < 0)
		return error_set_errno(e, errno, "take %s", b->dir);
	use_memory(b);
	r = build_path(b->root, sizeof(b->root), e, "%s/root", b->dir);
	return r < 0 ? r : build_path(b->kernel, sizeof(b->kernel), e, "%s/kernel", b->dir);
}

static int run_steps(struct image_build *b, struct error *e)
{
	static int (*const steps[])(struct image_build * b, struct error * e) = {
	    kernel_fetch, rootfs_make, kernel_install, initrd_write, rootfs_settle, ext4_write};
	int r = prepare(b, e);

	for (size_t i = 0; r == 0 && i < ARRAY_SIZE(steps); i++)
		r = steps[i](b, e);
	return r;
}

int image_build(const struct image_spec *spec, int (*progress)(void *context, const char *line), void *context,
                struct error *e)
{
	struct image_build b = {.spec = spec, .progress = progress, .context = context, .dir_lock = -1};
	int r = check(spec, e);

	if (r < 0)
		return r;
	b.started_s = (int64_t)time(NULL);
	set_environment(&b);
	umask(022);
	r = run_steps(&b, e);
	if (*b.dir) {
		(void)umount2(b.dir, MNT_DETACH);
		(void)build_remove_tree(b.dir);
	}
	if (b.dir_lock >= 0)
		close(b.dir_lock);
	if (r == 0)
		prune_cache(&b);
	return r;
}
