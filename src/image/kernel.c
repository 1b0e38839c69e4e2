/*
 * The guest's kernel: Debian's cloud flavour, downloaded as a package and unpacked into the build's folder. Nothing is
 * installed on the host, no maintainer script runs.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fts.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/text.h"
#include "image/build.h"

#define META_PACKAGE "linux-image-cloud-amd64"
#define DOWNLOAD_TIMEOUT_S 1800
#define STEP_TIMEOUT_S 300
#define OUTPUT_BYTES_MAX ((size_t)(256 * KIB))

/* The package that the meta package of today depends on. */
static int resolve(struct image_build *b, char *to, size_t size, struct error *e)
{
	static const char *const argv[] = {"apt-cache", "depends", META_PACKAGE, NULL};
	CLEANUP_BUF struct buf output = {.limit = OUTPUT_BYTES_MAX};
	const char *at;
	int r = build_run(b, argv, NULL, STEP_TIMEOUT_S, &output, e);

	if (r < 0)
		return error_prefix(e, "look up " META_PACKAGE " (run \"apt-get update\" first)");
	at = output.data ? strstr(output.data, "Depends: linux-image-") : NULL;
	if (!at)
		return error_set(e, ERROR_NOT_FOUND,
		                 META_PACKAGE " is not known on this host or depends on nothing; run \"apt-get update\"");
	at += sizeof("Depends: ") - 1;
	if (text_format(to, size, "%.*s", (int)strcspn(at, " \n"), at) < 0 || !image_package_name_is_valid(to))
		return error_set(e, ERROR_INTERNAL, META_PACKAGE " depends on something that is no package name");
	return 0;
}

struct download {
	char file[256];
	char sha256[65];
};

/* 'URI' FILE SIZE SHA256:HEX */
static int describe(struct image_build *b, const char *package, struct download *ret, struct error *e)
{
	const char *const argv[] = {"apt-get", "download", "--print-uris", package, NULL};
	CLEANUP_BUF struct buf output = {.limit = OUTPUT_BYTES_MAX};
	int r = build_run(b, argv, NULL, STEP_TIMEOUT_S, &output, e);

	if (r < 0)
		return r;
	memset(ret, 0, sizeof(*ret));
	if (!output.data || sscanf(output.data, "'%*[^']' %255s %*u SHA256:%64[0-9a-f]", ret->file, ret->sha256) != 2 ||
	    strchr(ret->file, '/') || !text_ends_with(ret->file, ".deb"))
		return error_set(e, ERROR_INTERNAL, "apt-get does not tell where %s comes from", package);
	return 0;
}

/* 1 if the cache has the package whole, 0 if not. */
static int is_cached(struct image_build *b, const struct download *d, const char *path)
{
	const char *const argv[] = {"sha256sum", path, NULL};
	CLEANUP_BUF struct buf output = {.limit = OUTPUT_BYTES_MAX};

	return access(path, R_OK) == 0 && build_run(b, argv, NULL, STEP_TIMEOUT_S, &output, NULL) == 0 &&
	       output.size > 64 && strncmp(output.data, d->sha256, 64) == 0;
}

/* Into the cache, which may be on another file system than the build; a cut copy is found by its digest. */
static int keep(const char *file, const char *path, const struct download *d, struct error *e)
{
	CLEANUP_CLOSE int from = open(file, O_RDONLY | O_CLOEXEC);
	if (from < 0)
		return error_set_errno(e, errno, "open %s", d->file);
	CLEANUP_CLOSE int to = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	if (to < 0)
		return error_set_errno(e, errno, "keep %s", d->file);
	int r = build_copy(from, to, e);
	if (r < 0)
		unlink(path);
	return r < 0 ? error_prefix(e, "keep %s", d->file) : 0;
}

static int download(struct image_build *b, const char *package, const char *path, const struct download *d,
                    struct error *e)
{
	const char *const argv[] = {"apt-get", "-q", "download", package, NULL};
	char dir[IMAGE_PATH_BYTES], file[IMAGE_PATH_BYTES];
	int r = build_path(dir, sizeof(dir), e, "%s/download", b->dir);

	if (r == 0)
		r = build_path(file, sizeof(file), e, "%s/%s", dir, d->file);
	if (r < 0)
		return r;
	/* apt gives up root for downloads and must be able to write here. */
	if (mkdir(dir, 0777) < 0 || chmod(dir, 01777) < 0)
		return error_set_errno(e, errno, "make %s", dir);
	r = build_say(b, e, "kernel: download %s", package);
	if (r == 0)
		r = build_run(b, argv, dir, DOWNLOAD_TIMEOUT_S, NULL, e);
	if (r < 0)
		return r;
	if (!is_cached(b, d, file))
		return error_set(e, ERROR_DAMAGED, "%s was downloaded damaged", d->file);
	return keep(file, path, d, e);
}

/* lib/modules before Debian 13, usr/lib/modules since; one release in it. */
static int find_modules(struct image_build *b, struct error *e)
{
	static const char *const places[] = {"lib/modules", "usr/lib/modules"};

	for (size_t i = 0; i < ARRAY_SIZE(places); i++) {
		char path[IMAGE_PATH_BYTES];
		struct dirent *entry;
		DIR *dir;

		if (build_path(path, sizeof(path), e, "%s/%s", b->kernel, places[i]) < 0)
			return -EINVAL;
		dir = opendir(path);
		while (dir && (entry = readdir(dir)))
			if (*entry->d_name != '.' && text_copy(b->release, sizeof(b->release), entry->d_name) == 0)
				break;
		if (dir)
			closedir(dir);
		if (*b->release)
			return build_path(b->modules, sizeof(b->modules), e, "%s/%s", path, b->release);
	}
	return error_set(e, ERROR_INTERNAL, "the kernel package holds no modules");
}

int kernel_fetch(struct image_build *b, struct error *e)
{
	char package[IMAGE_PACKAGE_NAME_BYTES], path[IMAGE_PATH_BYTES];
	const char *const unpack[] = {"dpkg-deb", "-x", path, b->kernel, NULL};
	const char *const order[] = {"depmod", "-b", b->kernel, b->release, NULL};
	struct download d;
	int r = resolve(b, package, sizeof(package), e);

	if (r == 0)
		r = describe(b, package, &d, e);
	if (r == 0)
		r = build_path(path, sizeof(path), e, "%s/%s", b->cache, d.file);
	if (r == 0 && !is_cached(b, &d, path))
		r = download(b, package, path, &d, e);
	if (r == 0 && utimensat(AT_FDCWD, path, NULL, 0) < 0)
		r = error_set_errno(e, errno, "touch %s", path);
	if (r == 0)
		r = build_say(b, e, "kernel: unpack %s", package);
	if (r == 0)
		r = build_run(b, unpack, NULL, STEP_TIMEOUT_S, NULL, e);
	if (r == 0)
		r = find_modules(b, e);
	if (r == 0)
		r = build_run(b, order, NULL, STEP_TIMEOUT_S, NULL, e);
	return r < 0 && r != -ECANCELED ? error_prefix(e, "get the guest's kernel") : r;
}

static int copy_kernel(struct image_build *b, struct error *e)
{
	CLEANUP_CLOSE int fd = -1;
	char path[IMAGE_PATH_BYTES];
	int r = build_path(path, sizeof(path), e, "%s/boot/vmlinuz-%s", b->kernel, b->release);

	if (r < 0)
		return r;
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return error_set_errno(e, errno, "open %s", path);
	return build_copy(fd, b->spec->kernel_fd, e);
}

/*
 * What a guest without hardware may want to load: file systems, networking, crypto, virtual devices. Drivers of real
 * hardware are two thirds of the package.
 */
static int is_wanted(const char *path)
{
	static const char *const trees[] = {
	    "kernel/arch/",
	    "kernel/block/",
	    "kernel/crypto/",
	    "kernel/fs/",
	    "kernel/lib/",
	    "kernel/mm/",
	    "kernel/net/",
	    "kernel/drivers/block/",
	    "kernel/drivers/char/",
	    "kernel/drivers/md/",
	    "kernel/drivers/misc/pvpanic/",
	    "kernel/drivers/net/wireguard/",
	    "kernel/drivers/vhost/",
	    "kernel/drivers/virtio/",
	};
	static const char net[] = "kernel/drivers/net/";

	for (size_t i = 0; i < ARRAY_SIZE(trees); i++)
		if (text_starts_with(path, trees[i]))
			return 1;
	/* tun, veth, macvlan, … lie directly in it, hardware in folders below. */
	return text_starts_with(path, net) && !strchr(path + sizeof(net) - 1, '/');
}

/* Makes the folders on the way to a file. */
static int make_parents(char *path, size_t from, struct error *e)
{
	for (char *slash = path + from; (slash = strchr(slash, '/')); slash++) {
		*slash = '\0';
		if (mkdir(path, 0755) < 0 && errno != EEXIST)
			return error_set_errno(e, errno, "make %s", path);
		*slash = '/';
	}
	return 0;
}

static int copy_module(struct image_build *b, const char *from, const char *relative, struct error *e)
{
	CLEANUP_CLOSE int in = open(from, O_RDONLY | O_CLOEXEC);
	CLEANUP_CLOSE int out = -1;
	char path[IMAGE_PATH_BYTES];
	int r = build_path(path, sizeof(path), e, "%s/usr/lib/modules/%s/%s", b->root, b->release, relative);

	if (in < 0)
		return error_set_errno(e, errno, "open %s", from);
	if (r == 0)
		r = make_parents(path, strlen(b->root) + 1, e);
	if (r < 0)
		return r;
	out = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
	return out < 0 ? error_set_errno(e, errno, "write %s", path) : build_copy(in, out, e);
}

static int copy_modules(struct image_build *b, struct error *e)
{
	char *paths[] = {b->modules, NULL};
	FTS *tree = fts_open(paths, FTS_PHYSICAL | FTS_NOCHDIR, NULL);
	size_t skip = strlen(b->modules) + 1;
	FTSENT *entry;
	int r = tree ? 0 : error_set_errno(e, errno, "read %s", b->modules);

	while (r == 0 && (entry = fts_read(tree))) {
		const char *relative = entry->fts_pathlen > skip ? entry->fts_path + skip : "";

		if (entry->fts_info != FTS_F)
			continue;
		/* depmod wants the two lists; the rest of its files it makes. */
		if ((strstr(relative, ".ko") && is_wanted(relative)) || strcmp(relative, "modules.builtin") == 0 ||
		    strcmp(relative, "modules.builtin.modinfo") == 0 || strcmp(relative, "modules.order") == 0)
			r = copy_module(b, entry->fts_path, relative, e);
	}
	if (tree)
		fts_close(tree);
	return r;
}

int kernel_install(struct image_build *b, struct error *e)
{
	const char *const order[] = {"depmod", "-b", b->root, b->release, NULL};
	int r = build_say(b, e, "kernel: %s and its modules", b->release);

	if (r == 0)
		r = copy_kernel(b, e);
	if (r == 0)
		r = copy_modules(b, e);
	return r < 0 ? r : build_run(b, order, NULL, STEP_TIMEOUT_S, NULL, e);
}
