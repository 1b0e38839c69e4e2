#include "guest/path.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/magic.h>
#include <linux/openat2.h>
#include <stdio.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "base/text.h"

static int hex_value(char c)
{
	if (c >= '0' && c <= '9')
		return c - '0';
	if (c >= 'a' && c <= 'f')
		return c - 'a' + 10;
	if (c >= 'A' && c <= 'F')
		return c - 'A' + 10;
	return -1;
}

ssize_t path_percent_decode(char *to, size_t to_size, const char *text, size_t size)
{
	size_t n = 0;
	for (size_t i = 0; i < size; i++) {
		int c = (unsigned char)text[i];
		if (c == '%') {
			if (size - i < 3 || hex_value(text[i + 1]) < 0 || hex_value(text[i + 2]) < 0)
				return -EINVAL;
			c = hex_value(text[i + 1]) * 16 + hex_value(text[i + 2]);
			i += 2;
		}
		if (c == 0)
			return -EINVAL;
		if (n + 1 >= to_size)
			return -ENAMETOOLONG;
		to[n++] = (char)c;
	}
	if (to_size == 0)
		return -ENAMETOOLONG;
	to[n] = 0;
	return (ssize_t)n;
}

/* Appends the components of `from` to the absolute text in p. With `lexical`, ".." removes the one before it, but never
 * goes above the root. */
static int append_components(struct path *p, const char *from, int lexical)
{
	size_t used = strlen(p->text);
	while (*from) {
		size_t size = strcspn(from, "/");
		const char *component = from;
		from += size + (from[size] == '/');
		if (size == 0 || (size == 1 && component[0] == '.'))
			continue;
		if (lexical && size == 2 && component[0] == '.' && component[1] == '.') {
			while (used > 0 && p->text[--used] != '/')
				;
			p->text[used] = 0;
			continue;
		}
		/* Room for the slash, the component and the NUL. */
		if (size >= sizeof(p->text) - used - 1)
			return -ENAMETOOLONG;
		p->text[used++] = '/';
		memcpy(p->text + used, component, size);
		used += size;
		p->text[used] = 0;
	}
	return 0;
}

int path_resolve(struct path *p, const char *asked, const char *home, const char *workdir, struct error *e)
{
	p->text[0] = 0;
	if (asked[0] == 0)
		asked = workdir ? workdir : "";
	size_t size = strlen(asked);
	p->wants_directory = size > 0 && asked[size - 1] == '/';
	int r;
	if (asked[0] == '/') {
		r = append_components(p, asked, 0);
	} else {
		if (asked[0] == '~') {
			if (asked[1] != 0 && asked[1] != '/')
				return error_set(e, ERROR_INVALID, "only '~' and '~/…' are expanded, not another user's home");
			asked++;
		}
		r = append_components(p, home[0] ? home : "/", 0);
		if (r == 0)
			r = append_components(p, asked, 1);
	}
	if (r < 0)
		return path_fail(e, ENAMETOOLONG, "resolve", asked);
	if (p->text[0] == 0)
		memcpy(p->text, "/", 2);
	return 0;
}

const char *path_name(const char *text)
{
	const char *slash = strrchr(text, '/');
	return slash && slash[1] ? slash + 1 : text;
}

void path_display(char to[PATH_DISPLAY_BYTES], const char *text)
{
	size_t size = strlen(text);
	size_t half = (PATH_DISPLAY_BYTES - 8) / 2;
	size_t n = 0;
	for (size_t i = 0; i < size; i++) {
		if (size > 2 * half && i == half) {
			i = size - half;
			to[n++] = '.', to[n++] = '.', to[n++] = '.';
		}
		to[n++] = (unsigned char)text[i] < 0x20 || text[i] == 0x7f ? '?' : text[i];
	}
	to[n] = 0;
	/* A cut inside a character, or a name that never was UTF-8, must not make the message unsendable. */
	if (!text_is_utf8(to, n))
		for (size_t i = 0; i < n; i++)
			if ((unsigned char)to[i] >= 0x80)
				to[i] = '?';
}

int path_fail(struct error *e, int errnum, const char *what, const char *text)
{
	if (errnum < 0)
		errnum = -errnum;
	char shown[PATH_DISPLAY_BYTES];
	path_display(shown, text);
	int r = error_set_errno(e, errnum, "cannot %s '%s'", what, shown);
	if (!e)
		return r;
	const char *name = strerrorname_np(errnum);
	size_t used = strlen(e->message);
	if (name)
		snprintf(e->message + used, sizeof(e->message) - used, " (%s)", name);
	switch (errnum) {
	case ELOOP:
	case EXDEV:
	case ETXTBSY:
		e->code = ERROR_CONFLICT;
		break;
	case EEXIST:
		e->code = ERROR_EXISTS;
		break;
	default:
		break;
	}
	return r;
}

int path_open_at(int at, const char *text, int flags)
{
	struct open_how how = {.flags = (uint64_t)(unsigned)(flags | O_CLOEXEC), .resolve = RESOLVE_NO_MAGICLINKS};
	long fd;
	do
		fd = syscall(SYS_openat2, at, text, &how, sizeof(how));
	while (fd < 0 && (errno == EINTR || errno == EAGAIN));
	return fd < 0 ? -errno : (int)fd;
}

/* True if the descriptor is in the /proc folder of this very process. The kernel lets a process look at itself with no
 * regard to the thread's fsuid, so this must be refused here. */
static int is_own_proc(int fd)
{
	struct statfs fs;
	if (fstatfs(fd, &fs) < 0 || fs.f_type != PROC_SUPER_MAGIC)
		return 0;
	char link[64], target[PATH_BYTES_MAX], own[32];
	snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
	ssize_t n = readlink(link, target, sizeof(target) - 1);
	if (n < 0)
		return 1;
	target[n] = 0;
	snprintf(own, sizeof(own), "/%d/", (int)getpid());
	return strstr(target, own) != NULL;
}

int path_identity_is_root(void)
{
	/* setfsuid() with an impossible id changes nothing and returns the present one. */
	return setfsuid((uid_t)-1) == 0;
}

int path_reopen(int fd, int flags)
{
	if (is_own_proc(fd) && !path_identity_is_root())
		return -EACCES;
	char link[64];
	snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
	int r = open(link, flags | O_CLOEXEC);
	return r < 0 ? -errno : r;
}

/* mkdir with exactly 0755 whatever the umask is; a set-group-ID bit inherited from the parent stays. */
static int make_directory(int at, const char *name)
{
	if (mkdirat(at, name, 0755) < 0)
		return errno == EEXIST ? 0 : -errno;
	int fd = openat(at, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	struct stat st;
	if (fd >= 0 && fstat(fd, &st) == 0 && (st.st_mode & 0777) != 0755)
		(void)fchmod(fd, (st.st_mode & 07000) | 0755);
	if (fd >= 0)
		close(fd);
	return 0;
}

int path_make_directories(const char *text, struct error *e)
{
	CLEANUP_CLOSE int fd = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (fd < 0)
		return path_fail(e, errno, "open", "/");
	const char *from = text;
	while (*from) {
		size_t size = strcspn(from, "/");
		char name[PATH_NAME_BYTES];
		if (size >= sizeof(name))
			return path_fail(e, ENAMETOOLONG, "create directory", text);
		memcpy(name, from, size);
		name[size] = 0;
		from += size + (from[size] == '/');
		if (size == 0)
			continue;
		int next = path_open_at(fd, name, O_PATH | O_DIRECTORY);
		if (next == -ENOENT) {
			int r = make_directory(fd, name);
			if (r < 0)
				return path_fail(e, r, "create directory", text);
			next = path_open_at(fd, name, O_PATH | O_DIRECTORY);
		}
		if (next < 0)
			return path_fail(e, next, "use directory", text);
		close(fd);
		fd = next;
	}
	return TAKE_FD(fd);
}

/* Opens the directory part of `text` below `at` and copies out the last component. */
static int split(int at, const char *text, int *ret_fd, char name[PATH_NAME_BYTES])
{
	char directory[PATH_BYTES_MAX];
	int r = text_copy(directory, sizeof(directory), text);
	if (r < 0)
		return r;
	size_t size = strlen(directory);
	while (size > 1 && directory[size - 1] == '/')
		directory[--size] = 0;
	char *slash = strrchr(directory, '/');
	r = text_copy(name, PATH_NAME_BYTES, slash ? slash + 1 : directory);
	if (r < 0)
		return r;
	if (name[0] == 0 || strcmp(name, ".") == 0 || strcmp(name, "..") == 0)
		return -EISDIR;
	if (slash)
		slash[slash == directory] = 0;
	int fd = path_open_at(at, slash ? directory : ".", O_PATH | O_DIRECTORY);
	if (fd < 0)
		return fd;
	*ret_fd = fd;
	return 0;
}

int path_open_parent(const struct path *p, int *ret_fd, char name[PATH_NAME_BYTES], struct error *e)
{
	int r = split(AT_FDCWD, p->text, ret_fd, name);
	return r < 0 ? path_fail(e, r, "use", p->text) : 0;
}

int path_open_target(const struct path *p, int *ret_fd, char name[PATH_NAME_BYTES], struct stat *st, struct error *e)
{
	char text[PATH_BYTES_MAX];
	memcpy(text, p->text, sizeof(text));
	CLEANUP_CLOSE int at = -1;
	for (int links = 0; links <= PATH_LINKS_MAX; links++) {
		int fd = -1;
		int r = split(at < 0 ? AT_FDCWD : at, text, &fd, name);
		if (r < 0)
			return path_fail(e, r, "use", p->text);
		if (at >= 0)
			close(at);
		at = fd;
		if (fstatat(at, name, st, AT_SYMLINK_NOFOLLOW) < 0) {
			if (errno != ENOENT)
				return path_fail(e, errno, "use", p->text);
			st->st_mode = 0;
		}
		if (!S_ISLNK(st->st_mode)) {
			*ret_fd = TAKE_FD(at);
			return 0;
		}
		struct statfs fs;
		if (fstatfs(at, &fs) < 0 || fs.f_type == PROC_SUPER_MAGIC)
			return path_fail(e, ELOOP, "follow a link of /proc at", p->text);
		ssize_t n = readlinkat(at, name, text, sizeof(text) - 1);
		if (n <= 0)
			return path_fail(e, n < 0 ? errno : ENOENT, "follow", p->text);
		text[n] = 0;
	}
	return path_fail(e, ELOOP, "follow", p->text);
}

const char *path_type_name(mode_t mode)
{
	switch (mode & S_IFMT) {
	case S_IFREG:
		return "regular file";
	case S_IFDIR:
		return "directory";
	case S_IFLNK:
		return "symbolic link";
	case S_IFIFO:
		return "FIFO";
	case S_IFSOCK:
		return "socket";
	case S_IFCHR:
		return "character device";
	case S_IFBLK:
		return "block device";
	default:
		return "unknown kind of file";
	}
}
