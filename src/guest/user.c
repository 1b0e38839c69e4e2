/*
 * Users of the guest, from /etc/passwd and /etc/group.
 *
 * A static libc has no name service, and a lookup must never run the guest's code inside the agent: the files are
 * parsed here. The last answer is kept together with the identity of both files, so that a call in a row costs two
 * stat() calls.
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <strings.h>
#include <sys/fsuid.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/text.h"
#include "guest/identity.h"
#include "guest/request.h"

#define USER_FILE_BYTES_MAX (1024 * 1024)
#define USER_FIELDS 7

struct file_mark {
	dev_t device;
	ino_t inode;
	off_t size;
	struct timespec modified;
	struct timespec changed;
};

static struct {
	pthread_mutex_t lock;
	int valid;
	struct file_mark passwd;
	struct file_mark group;
	char asked[64];
	struct guest_user user;
} cache = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void mark_file(const char *path, struct file_mark *ret)
{
	struct stat st;
	memset(ret, 0, sizeof(*ret));
	if (stat(path, &st) < 0)
		return;
	ret->device = st.st_dev;
	ret->inode = st.st_ino;
	ret->size = st.st_size;
	ret->modified = st.st_mtim;
	ret->changed = st.st_ctim;
}

/* Cuts a line at its colons; returns the number of fields. */
static size_t cut_line(char *line, char *fields[], size_t max)
{
	size_t count = 0;
	while (count < max) {
		fields[count++] = line;
		char *colon = strchr(line, ':');
		if (!colon)
			break;
		*colon = '\0';
		line = colon + 1;
	}
	return count;
}

static int parse_id(const char *text, uint32_t *ret)
{
	uint64_t value;
	if (text_parse_u64(text, UINT32_MAX - 1, &value) < 0)
		return -EINVAL;
	*ret = (uint32_t)value;
	return 0;
}

static int find_in_passwd(char *text, const char *name, struct guest_user *ret)
{
	uint32_t wanted = 0;
	int numeric = parse_id(name, &wanted) == 0;
	char *rest = text;
	for (char *line; (line = strsep(&rest, "\n"));) {
		char *f[USER_FIELDS];
		uint32_t uid;
		uint32_t gid;
		if (cut_line(line, f, USER_FIELDS) != USER_FIELDS || parse_id(f[2], &uid) < 0 || parse_id(f[3], &gid) < 0)
			continue;
		if (strcmp(f[0], name) != 0 && !(numeric && uid == wanted))
			continue;
		if (text_copy(ret->name, sizeof(ret->name), f[0]) < 0 ||
		    text_copy(ret->home, sizeof(ret->home), f[5][0] == '/' ? f[5] : "/") < 0 ||
		    text_copy(ret->shell, sizeof(ret->shell), f[6][0] ? f[6] : "/bin/sh") < 0)
			continue;
		ret->uid = uid;
		ret->gid = gid;
		return 0;
	}
	return -ENOENT;
}

static void find_groups(char *text, struct guest_user *user)
{
	user->groups[0] = user->gid;
	user->group_count = 1;
	char *rest = text;
	for (char *line; (line = strsep(&rest, "\n"));) {
		char *f[4];
		uint32_t gid;
		if (cut_line(line, f, 4) != 4 || parse_id(f[2], &gid) < 0 || gid == user->gid)
			continue;
		char *members = f[3];
		for (char *member; (member = strsep(&members, ","));) {
			if (strcmp(member, user->name) == 0 && user->group_count < GUEST_GROUPS_MAX) {
				user->groups[user->group_count++] = gid;
				break;
			}
		}
	}
}

static int read_user(const char *name, struct guest_user *ret, struct error *e)
{
	CLEANUP_FREE char *passwd = NULL;
	CLEANUP_FREE char *group = NULL;
	int r = fd_read_file(AT_FDCWD, "/etc/passwd", USER_FILE_BYTES_MAX, &passwd, NULL);
	if (r < 0)
		return error_set_errno(e, r, "cannot read /etc/passwd");
	memset(ret, 0, sizeof(*ret));
	if (find_in_passwd(passwd, name, ret) < 0)
		return error_set(e, ERROR_UNAUTHENTICATED, "invalid username: '%.64s'", name);
	if (fd_read_file(AT_FDCWD, "/etc/group", USER_FILE_BYTES_MAX, &group, NULL) == 0) {
		find_groups(group, ret);
	} else {
		ret->groups[0] = ret->gid;
		ret->group_count = 1;
	}
	return 0;
}

int guest_user_find(const char *name, struct guest_user *ret, struct error *e)
{
	CLEANUP_FREE char *fallback = NULL;
	if (!name || !*name) {
		fallback = identity_default_user();
		if (!fallback)
			return error_set(e, ERROR_EXHAUSTED, "out of memory");
		name = fallback;
	}
	struct file_mark passwd;
	struct file_mark group;
	mark_file("/etc/passwd", &passwd);
	mark_file("/etc/group", &group);
	pthread_mutex_lock(&cache.lock);
	int hit = cache.valid && strcmp(cache.asked, name) == 0 && memcmp(&cache.passwd, &passwd, sizeof(passwd)) == 0 &&
	          memcmp(&cache.group, &group, sizeof(group)) == 0;
	if (hit)
		*ret = cache.user;
	pthread_mutex_unlock(&cache.lock);
	if (hit)
		return 0;
	int r = read_user(name, ret, e);
	if (r < 0)
		return r;
	pthread_mutex_lock(&cache.lock);
	cache.valid = text_copy(cache.asked, sizeof(cache.asked), name) == 0;
	cache.passwd = passwd;
	cache.group = group;
	cache.user = *ret;
	pthread_mutex_unlock(&cache.lock);
	return 0;
}

/* The name in "Authorization: Basic base64(name:anything)"; empty if the header is absent. */
static int basic_user(const struct request *r, char *to, size_t size, struct error *e)
{
	const char *header = request_header(r, "authorization");
	*to = '\0';
	if (!header || strncasecmp(header, "Basic ", 6) != 0)
		return 0;
	header += 6;
	header += strspn(header, " ");
	size_t length = strlen(header);
	if (length > 300)
		return error_set(e, ERROR_INVALID, "the user name in Authorization is too long");
	char raw[300 / 4 * 3 + 4];
	long n = text_base64_decode(raw, header, length);
	if (n < 0)
		return error_set(e, ERROR_UNAUTHENTICATED, "Authorization is not valid Basic authentication");
	raw[n] = '\0';
	char *colon = memchr(raw, ':', (size_t)n);
	if (!colon || strlen(raw) < (size_t)(colon - raw))
		return error_set(e, ERROR_UNAUTHENTICATED, "Authorization is not valid Basic authentication");
	*colon = '\0';
	if (text_copy(to, size, raw) < 0)
		return error_set(e, ERROR_UNAUTHENTICATED, "invalid username: '%.64s'", raw);
	return 0;
}

int request_user(const struct request *r, const char *name, struct guest_user *ret, struct error *e)
{
	char basic[64];
	if (!name || !*name) {
		int x = basic_user(r, basic, sizeof(basic), e);
		if (x < 0)
			return x;
		name = basic;
	}
	return guest_user_find(name, ret, e);
}

/* Raw system calls: the C library's wrappers would change every thread of the process. */
int guest_user_enter(const struct guest_user *user, struct error *e)
{
	if (geteuid() != 0) {
		/* Run by an ordinary user (tests): only that user can be served. */
		if (user->uid != geteuid())
			return error_set(e, ERROR_FORBIDDEN, "the agent has no right to act as user '%s'", user->name);
		return 0;
	}
	if (syscall(SYS_setgroups, user->group_count, user->groups) < 0)
		return error_set_errno(e, errno, "cannot take the groups of user '%s'", user->name);
	setfsgid(user->gid);
	setfsuid(user->uid);
	return 0;
}

void guest_user_leave(void)
{
	if (geteuid() != 0)
		return;
	setfsuid(0);
	setfsgid(0);
	syscall(SYS_setgroups, 0, NULL);
}
