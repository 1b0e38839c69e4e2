/*
 * The root file system: mmdebstrap with the host's own package sources, then what makes a Debian a guest: the agent,
 * the user, names, and no trace of the build.
 *
 * What keeps the bytes the same: packages bring files with times of their own, everything younger than the build gets
 * the time of the youngest of those; compiled Python, which records times and hash orders, is compiled again last, in
 * a fixed order; logs, caches, backups and lists of packages go.
 */
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

#define BOOTSTRAP_TIMEOUT_S 3600
#define STEP_TIMEOUT_S 600
#define SOURCES_BYTES_MAX ((size_t)(64 * KIB))
#define ARGUMENTS_MAX 48

#define GUEST_USER "user"
#define GUEST_UID "1000"
#define GATEWAY "169.254.77.1"

static const char *host_suite(char *to, size_t size)
{
	CLEANUP_FREE char *text = NULL;
	const char *at;
	size_t length;

	if (fd_read_file(AT_FDCWD, "/etc/os-release", 65536, &text, &length) < 0 ||
	    !(at = strstr(text, "VERSION_CODENAME=")))
		return NULL;
	at += sizeof("VERSION_CODENAME=") - 1;
	length = strcspn(at, "\n\" ");
	if (!length || text_format(to, size, "%.*s", (int)length, at) < 0)
		return NULL;
	return to;
}

/*
 * The host's own sources of Debian's packages for this suite, as sources.list lines; other vendors' are left out. A
 * source whose address holds a password stays on the host.
 */
static int host_sources(struct image_build *b, const char *suite, struct buf *ret, struct error *e)
{
	static const char *const argv[] = {"apt-get",
	                                   "indextargets",
	                                   "--format",
	                                   "$(ORIGIN) $(CODENAME) $(REPO_URI) $(RELEASE) $(COMPONENT)",
	                                   "Created-By: Packages",
	                                   NULL};
	CLEANUP_BUF struct buf targets = {.limit = SOURCES_BYTES_MAX};
	size_t length = strlen(suite);
	char *save = NULL;
	int r = build_run(b, argv, NULL, STEP_TIMEOUT_S, &targets, e);

	if (r < 0)
		return r;
	for (char *line = targets.data ? strtok_r(targets.data, "\n", &save) : NULL; line;
	     line = strtok_r(NULL, "\n", &save)) {
		char origin[64], codename[64], uri[512], release[128], component[64];

		if (sscanf(line, "%63s %63s %511s %127s %63s", origin, codename, uri, release, component) != 5 ||
		    strcmp(origin, "Debian") != 0 || strncmp(codename, suite, length) != 0 ||
		    (codename[length] && codename[length] != '-') || strchr(uri, '@'))
			continue;
		if (strstr(codename, "-proposed") || strstr(codename, "-backports"))
			continue;
		if (buf_printf(ret, "deb %s %s %s\n", uri, release, component) < 0)
			return error_set(e, ERROR_EXHAUSTED, "out of memory");
	}
	return 0;
}

/* How the host's apt reaches its sources, for mmdebstrap's. */
static int host_apt_options(struct image_build *b, const char *path, struct error *e)
{
	static const char *const argv[] = {
	    "apt-config", "dump", "Acquire::http", "Acquire::https", "Acquire::Check-Valid-Until", NULL};
	CLEANUP_BUF struct buf text = {.limit = SOURCES_BYTES_MAX};
	int r = build_run(b, argv, NULL, STEP_TIMEOUT_S, &text, e);

	if (r < 0)
		return r;
	r = fd_write_file_atomic(AT_FDCWD, path, text.data ? text.data : "", text.size, 0644);
	return r < 0 ? error_set_errno(e, r, "write %s", path) : 0;
}

static int package_list(const struct image_build *b, struct buf *ret, struct error *e)
{
	int r = buf_append_string(ret, "--include=");

	for (size_t i = 0; r == 0 && image_default_packages[i]; i++)
		r = buf_printf(ret, "%s%s", i ? "," : "", image_default_packages[i]);
	for (size_t i = 0; r == 0 && b->spec->packages && b->spec->packages[i]; i++)
		r = buf_printf(ret, ",%s", b->spec->packages[i]);
	return r < 0 ? error_set(e, ERROR_EXHAUSTED, "out of memory") : 0;
}

/* mmdebstrap's own steps ("I: installing packages...") become progress. */
static int on_bootstrap_line(void *context, const char *line)
{
	struct image_build *b = context;

	return text_starts_with(line, "I: ") ? build_say(b, NULL, "root file system: %s", line + 3) : 0;
}

/* The cache's path goes into a hook, which is split into words like a shell does. */
static int is_plain(const char *path)
{
	return path[strspn(path, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/._-+")] == '\0';
}

struct bootstrap {
	char sources[IMAGE_PATH_BYTES], options[IMAGE_PATH_BYTES];
	char options_argument[IMAGE_PATH_BYTES + 16], sync_in[IMAGE_PATH_BYTES + 64], sync_out[IMAGE_PATH_BYTES + 64];
	struct buf packages;
	const char *argv[ARGUMENTS_MAX];
	size_t count;
};

static void fill_arguments(struct image_build *b, struct bootstrap *s, const char *suite, int has_sources)
{
	static const char *const fixed[] = {
	    "mmdebstrap",
	    "--mode=root",
	    "--variant=minbase",
	    "--format=directory",
	    "--dpkgopt=force-unsafe-io",
	    "--dpkgopt=path-exclude=/usr/share/man/*",
	    "--dpkgopt=path-exclude=/usr/share/info/*",
	    "--dpkgopt=path-exclude=/usr/share/lintian/*",
	    "--dpkgopt=path-exclude=/usr/share/locale/*",
	    "--dpkgopt=path-exclude=/usr/share/doc/*",
	    "--dpkgopt=path-include=/usr/share/doc/*/copyright",
	};

	for (size_t i = 0; i < ARRAY_SIZE(fixed); i++)
		s->argv[s->count++] = fixed[i];
	s->argv[s->count++] = s->packages.data;
	s->argv[s->count++] = s->options_argument;
	if (is_plain(b->cache)) {
		(void)text_format(s->sync_in, sizeof(s->sync_in), "--setup-hook=sync-in %s /var/cache/apt/archives", b->cache);
		(void)text_format(s->sync_out, sizeof(s->sync_out), "--customize-hook=sync-out /var/cache/apt/archives %s",
		                  b->cache);
		s->argv[s->count++] = "--skip=download/empty";
		s->argv[s->count++] = "--skip=essential/unlink";
		s->argv[s->count++] = "--setup-hook=mkdir -p \"$1/var/cache/apt/archives\"";
		s->argv[s->count++] = s->sync_in;
		s->argv[s->count++] = s->sync_out;
	}
	s->argv[s->count++] = suite;
	s->argv[s->count++] = b->root;
	if (has_sources)
		s->argv[s->count++] = s->sources;
	s->argv[s->count] = NULL;
}

static int bootstrap(struct image_build *b, struct bootstrap *s, struct error *e)
{
	CLEANUP_BUF struct buf lines = {.limit = SOURCES_BYTES_MAX};
	char own[64];
	const char *suite = b->spec->suite && *b->spec->suite ? b->spec->suite : host_suite(own, sizeof(own));
	struct subprocess p = {.argv = s->argv,
	                       .environment = b->environment,
	                       .inherit_fd = -1,
	                       .timeout_s = BOOTSTRAP_TIMEOUT_S,
	                       .on_line = on_bootstrap_line,
	                       .context = b};
	int r;

	if (!suite)
		return error_set(e, ERROR_UNSUPPORTED, "/etc/os-release names no suite; name one for the image");
	r = build_path(s->sources, sizeof(s->sources), e, "%s/sources.list", b->dir);
	if (r == 0)
		r = build_path(s->options, sizeof(s->options), e, "%s/apt.conf", b->dir);
	if (r == 0)
		r = host_sources(b, suite, &lines, e);
	if (r == 0 && lines.size && (r = fd_write_file_atomic(AT_FDCWD, s->sources, lines.data, lines.size, 0644)) < 0)
		r = error_set_errno(e, r, "write %s", s->sources);
	if (r == 0)
		r = host_apt_options(b, s->options, e);
	if (r == 0)
		r = package_list(b, &s->packages, e);
	if (r < 0)
		return r;
	(void)text_format(s->options_argument, sizeof(s->options_argument), "--aptopt=%s", s->options);
	fill_arguments(b, s, suite, lines.size > 0);
	r = build_say(b, e, "root file system: Debian %s%s", suite, lines.size ? "" : " from its default sources");
	return r < 0 ? r : subprocess_run(&p, e);
}

int rootfs_make(struct image_build *b, struct error *e)
{
	struct bootstrap s = {.count = 0};
	int r = bootstrap(b, &s, e);

	buf_free(&s.packages);
	if (r >= 0 || r == -ECANCELED)
		return r;
	return error_prefix(e, "make the root file system (are the package names right, is the network there, "
	                       "does \"apt-get update\" work on this host?)");
}

static int write_file(int root, const char *path, const char *text, unsigned mode, struct error *e)
{
	CLEANUP_CLOSE int fd = -1;
	int r;

	/* A link there (resolv.conf) is replaced, never followed. */
	if (unlinkat(root, path, 0) < 0 && errno != ENOENT)
		return error_set_errno(e, errno, "replace /%s", path);
	fd = openat(root, path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode);
	if (fd < 0)
		return error_set_errno(e, errno, "write /%s", path);
	r = fd_write_full(fd, text, strlen(text));
	if (r == 0 && fchmod(fd, mode) < 0)
		r = -errno;
	return r < 0 ? error_set_errno(e, r, "write /%s", path) : 0;
}

static int install_agent(struct image_build *b, int root, struct error *e)
{
	static const char path[] = "usr/sbin/space-agent";
	CLEANUP_CLOSE int fd = openat(root, path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0755);

	if (fd < 0)
		return error_set_errno(e, errno, "write /%s", path);
	return build_copy(b->spec->agent_fd, fd, e);
}

static int make_user(struct image_build *b, struct error *e)
{
	const char *const argv[] = {"chroot",       b->root,    "useradd", "--create-home",
	                            "--user-group", "--uid",    GUEST_UID, "-s",
	                            "/bin/bash",    GUEST_USER, NULL};

	return build_run(b, argv, NULL, STEP_TIMEOUT_S, NULL, e);
}

static int configure(struct image_build *b, int root, struct error *e)
{
	static const struct {
		const char *path;
		const char *text;
		unsigned mode;
	} files[] = {
	    {"etc/hostname", "sandbox\n", 0644},
	    {"etc/hosts",
	     "127.0.0.1\tlocalhost\n::1\t\tlocalhost ip6-localhost ip6-loopback\nff02::1\t\tip6-allnodes\n"
	     "ff02::2\t\tip6-allrouters\n",
	     0644},
	    {"etc/resolv.conf", "nameserver " GATEWAY "\n", 0644},
	    {"etc/machine-id", "", 0444},
	    {"etc/fstab", "", 0644},
	    {"etc/default/locale", "LANG=C.UTF-8\n", 0644},
	    {"etc/sudoers.d/" GUEST_USER, GUEST_USER " ALL=(ALL:ALL) NOPASSWD: ALL\n", 0440},
	};
	int r = make_user(b, e);

	for (size_t i = 0; r == 0 && i < ARRAY_SIZE(files); i++)
		r = write_file(root, files[i].path, files[i].text, files[i].mode, e);
	return r < 0 ? r : install_agent(b, root, e);
}

/* Paths whose content varies or only serves the build. A trailing slash: what is in it, not the folder. */
static int clean(struct image_build *b, struct error *e)
{
	static const char *const paths[] = {
	    "dev/",
	    "etc/apt/apt.conf.d/99mmdebstrap",
	    "etc/group-",
	    "etc/gshadow-",
	    "etc/passwd-",
	    "etc/shadow-",
	    "etc/subgid-",
	    "etc/subuid-",
	    "etc/.pwd.lock",
	    "root/.cache",
	    "run/",
	    "tmp/",
	    "var/cache/apt/",
	    "var/cache/debconf/",
	    "var/cache/fontconfig",
	    "var/cache/ldconfig/aux-cache",
	    "var/lib/apt/lists/",
	    "var/lib/dbus/machine-id",
	    "var/lib/dpkg/diversions-old",
	    "var/lib/dpkg/statoverride-old",
	    "var/lib/dpkg/status-old",
	    "var/lib/systemd/",
	    "var/log/",
	    "var/tmp/",
	};
	char path[IMAGE_PATH_BYTES];

	for (size_t i = 0; i < ARRAY_SIZE(paths); i++) {
		struct stat st;
		int keep = text_ends_with(paths[i], "/");
		int r = build_path(path, sizeof(path), e, "%s/%s", b->root, paths[i]);

		if (r < 0)
			return r;
		if (keep)
			path[strlen(path) - 1] = '\0';
		if (lstat(path, &st) < 0)
			continue;
		r = S_ISDIR(st.st_mode) ? build_remove_tree(path) : unlink(path) < 0 ? -errno : 0;
		if (r == 0 && keep && (mkdir(path, 0755) < 0 || chmod(path, st.st_mode & 07777) < 0))
			r = -errno;
		if (r < 0)
			return error_set_errno(e, r, "clean /%s of the image", paths[i]);
	}
	return 0;
}

static FTS *open_tree(struct image_build *b)
{
	char *paths[] = {b->root, NULL};

	return fts_open(paths, FTS_PHYSICAL | FTS_NOCHDIR | FTS_XDEV, NULL);
}

static int remove_compiled(struct image_build *b, struct error *e)
{
	FTS *tree = open_tree(b);
	FTSENT *entry;
	int r = tree ? 0 : -errno;

	while (r == 0 && (entry = fts_read(tree))) {
		if (entry->fts_info != FTS_D || strcmp(entry->fts_name, "__pycache__") != 0)
			continue;
		r = build_remove_tree(entry->fts_accpath);
		fts_set(tree, entry, FTS_SKIP);
	}
	if (tree)
		fts_close(tree);
	return r < 0 ? error_set_errno(e, r, "remove compiled Python") : 0;
}

static int compile_python(struct image_build *b, struct error *e)
{
	const char *const argv[] = {"chroot",
	                            b->root,
	                            "sh",
	                            "-c",
	                            "test ! -x /usr/bin/python3 || python3 -m compileall -q -j 1 "
	                            "$(ls -d /usr/lib/python3 /usr/lib/python3.* 2>/dev/null)",
	                            NULL};
	int r = remove_compiled(b, e);

	/* Some packages carry test files that are no valid Python; the status tells of them, nothing is missing. */
	if (r == 0 && build_run(b, argv, NULL, STEP_TIMEOUT_S, NULL, e) == -ETIMEDOUT)
		r = -ETIMEDOUT;
	return r;
}

static int64_t settled_time(const struct image_build *b, const struct stat *st, int64_t youngest)
{
	return st->st_mtim.tv_sec >= b->started_s ? youngest : st->st_mtim.tv_sec;
}

/* Two walks: the youngest file that a package brought, then the times. */
static int settle_times(struct image_build *b, struct error *e)
{
	int64_t youngest = IMAGE_EPOCH;
	FTSENT *entry;
	int r = 0;

	for (int pass = 0; r == 0 && pass < 2; pass++) {
		FTS *tree = open_tree(b);

		if (!tree)
			r = -errno;
		while (r == 0 && (entry = fts_read(tree))) {
			const struct stat *st = entry->fts_statp;

			if (entry->fts_info == FTS_D)
				continue;
			if (entry->fts_info == FTS_ERR || entry->fts_info == FTS_DNR || entry->fts_info == FTS_NS) {
				r = -entry->fts_errno;
			} else if (pass == 0) {
				if (st->st_mtim.tv_sec < b->started_s && st->st_mtim.tv_sec > youngest && S_ISREG(st->st_mode))
					youngest = st->st_mtim.tv_sec;
			} else {
				const struct timespec at = {.tv_sec = settled_time(b, st, youngest)};
				const struct timespec times[] = {at, at};

				if (utimensat(AT_FDCWD, entry->fts_accpath, times, AT_SYMLINK_NOFOLLOW) < 0)
					r = -errno;
			}
		}
		if (tree)
			fts_close(tree);
	}
	return r < 0 ? error_set_errno(e, r, "set the times of the image's files") : 0;
}

int rootfs_settle(struct image_build *b, struct error *e)
{
	CLEANUP_CLOSE int root = open(b->root, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	int r = root < 0 ? error_set_errno(e, errno, "open %s", b->root)
	                 : build_say(b, e, "root file system: guest's own files");

	if (r == 0)
		r = configure(b, root, e);
	if (r == 0)
		r = compile_python(b, e);
	if (r == 0)
		r = clean(b, e);
	return r < 0 ? r : settle_times(b, e);
}
