#include "guest/entry.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <pwd.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/text.h"
#include "guest/metadata.h"
#include "guest/path.h"

#define ENTRY_DATABASE_LINE_BYTES 8192
/* The range of google.protobuf.Timestamp. */
#define ENTRY_TIME_MIN INT64_C(-62135596800)
#define ENTRY_TIME_MAX INT64_C(253402300799)

/* Length of the valid UTF-8 sequence at text, 0 if there is none. */
static size_t utf8_length(const char *text, size_t size)
{
	unsigned char c = (unsigned char)text[0];
	size_t n = c < 0x80 ? 1 : c < 0xc2 ? 0 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : c < 0xf5 ? 4 : 0;
	return n > 0 && n <= size && text_is_utf8(text, n) ? n : 0;
}

int entry_append_string(struct buf *b, const char *text, size_t size)
{
	static const char hex[] = "0123456789abcdef";
	/* Worst case: every byte becomes \u00XX. */
	char *to = buf_reserve(b, 6 * size + 2);
	if (!to)
		return -ENOMEM;
	size_t n = 0;
	to[n++] = '"';
	for (size_t i = 0; i < size;) {
		unsigned char c = (unsigned char)text[i];
		size_t length = utf8_length(text + i, size - i);
		if (length == 0) {
			memcpy(to + n, "\xef\xbf\xbd", 3);
			n += 3, i++;
		} else if (c == '"' || c == '\\') {
			to[n++] = '\\', to[n++] = (char)c;
			i++;
		} else if (c < 0x20 || c == 0x7f) {
			memcpy(to + n, "\\u00", 4);
			to[n + 4] = hex[c >> 4], to[n + 5] = hex[c & 15];
			n += 6, i++;
		} else {
			memcpy(to + n, text + i, length);
			n += length, i += length;
		}
	}
	to[n++] = '"';
	b->size += n;
	b->data[b->size] = 0;
	return 0;
}

int entry_append_bytes(struct buf *b, const char *key, const char *text)
{
	size_t size = strlen(text);
	int r = buf_printf(b, "\"%s\":", key);
	if (r == 0)
		r = entry_append_string(b, text, size);
	if (r < 0 || text_is_utf8(text, size))
		return r;
	CLEANUP_FREE char *base64 = malloc(text_base64_size(size));
	if (!base64)
		return -ENOMEM;
	text_base64(base64, text, size);
	return buf_printf(b, ",\"%sBytes\":\"%s\"", key, base64);
}

void entry_permissions(char to[ENTRY_PERMISSIONS_BYTES], mode_t mode)
{
	size_t n = 0;
	if (S_ISDIR(mode))
		to[n++] = 'd';
	if (S_ISLNK(mode))
		to[n++] = 'L';
	if (S_ISBLK(mode) || S_ISCHR(mode))
		to[n++] = 'D';
	if (S_ISFIFO(mode))
		to[n++] = 'p';
	if (S_ISSOCK(mode))
		to[n++] = 'S';
	if (mode & S_ISUID)
		to[n++] = 'u';
	if (mode & S_ISGID)
		to[n++] = 'g';
	if (S_ISCHR(mode))
		to[n++] = 'c';
	if (mode & S_ISVTX)
		to[n++] = 't';
	if (n == 0)
		to[n++] = '-';
	for (int i = 8; i >= 0; i--)
		to[n++] = mode & (1u << i) ? "xwr"[i % 3] : '-';
	to[n] = 0;
}

static void read_user_name(unsigned id, char *to, size_t size)
{
	FILE *f = fopen("/etc/passwd", "re");
	char line[ENTRY_DATABASE_LINE_BYTES];
	struct passwd entry, *found = NULL;
	while (f && fgetpwent_r(f, &entry, line, sizeof(line), &found) == 0 && found)
		if (found->pw_uid == id && text_copy(to, size, found->pw_name) == 0)
			break;
	if (f)
		fclose(f);
}

static void read_group_name(unsigned id, char *to, size_t size)
{
	FILE *f = fopen("/etc/group", "re");
	char line[ENTRY_DATABASE_LINE_BYTES];
	struct group entry, *found = NULL;
	while (f && fgetgrent_r(f, &entry, line, sizeof(line), &found) == 0 && found)
		if (found->gr_gid == id && text_copy(to, size, found->gr_name) == 0)
			break;
	if (f)
		fclose(f);
}

/* The name of an id, or the number as text. */
static const char *find_name(struct entry_name *cache, size_t *count, unsigned id,
                             void (*read_name)(unsigned id, char *to, size_t size))
{
	for (size_t i = 0; i < MIN(*count, (size_t)ENTRY_NAMES_CACHED); i++)
		if (cache[i].id == id)
			return cache[i].name;
	struct entry_name *slot = &cache[(*count)++ % ENTRY_NAMES_CACHED];
	slot->id = id;
	snprintf(slot->name, sizeof(slot->name), "%u", id);
	read_name(id, slot->name, sizeof(slot->name));
	if (slot->name[0] == 0)
		snprintf(slot->name, sizeof(slot->name), "%u", id);
	return slot->name;
}

static const char *type_of(mode_t mode)
{
	if (S_ISREG(mode))
		return "FILE_TYPE_FILE";
	if (S_ISDIR(mode))
		return "FILE_TYPE_DIRECTORY";
	if (S_ISLNK(mode))
		return "FILE_TYPE_SYMLINK";
	return "FILE_TYPE_UNSPECIFIED";
}

/* Where a link leads: its resolved path and what is there. 0, or -errno with *target set to the link's own text. */
static int follow(int at, const char *name, char target[PATH_BYTES_MAX], struct stat *st)
{
	CLEANUP_CLOSE int fd = path_open_at(at, name, O_PATH);
	int r = fd < 0 ? fd : fstat(fd, st) < 0 ? -errno : 0;
	ssize_t n = -1;
	if (r == 0) {
		char link[64];
		snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
		n = readlink(link, target, PATH_BYTES_MAX - 1);
		r = n < 0 ? -errno : 0;
	}
	if (r < 0)
		n = readlinkat(at, name, target, PATH_BYTES_MAX - 1);
	target[n > 0 ? n : 0] = 0;
	return r;
}

static int append_time(struct buf *b, const struct timespec *time)
{
	if (time->tv_sec < ENTRY_TIME_MIN || time->tv_sec > ENTRY_TIME_MAX)
		return 0;
	struct tm tm;
	time_t s = time->tv_sec;
	if (!gmtime_r(&s, &tm))
		return 0;
	return buf_printf(b, ",\"modifiedTime\":\"%04d-%02d-%02dT%02d:%02d:%02d.%09ldZ\"", tm.tm_year + 1900, tm.tm_mon + 1,
	                  tm.tm_mday, tm.tm_hour, tm.tm_min, tm.tm_sec, time->tv_nsec);
}

static int append_fields(struct buf *b, const struct stat *st, const struct stat *shown, struct entry_names *names)
{
	char permissions[ENTRY_PERMISSIONS_BYTES];
	entry_permissions(permissions, st->st_mode);
	int r = buf_printf(
	    b, ",\"type\":\"%s\",\"size\":\"%lld\",\"mode\":%u,\"permissions\":\"%s\",\"owner\":", type_of(shown->st_mode),
	    (long long)st->st_size, S_ISLNK(shown->st_mode) ? 0u : (unsigned)shown->st_mode & 0777u, permissions);
	const char *name = find_name(names->users, &names->user_count, st->st_uid, read_user_name);
	if (r == 0)
		r = entry_append_string(b, name, strlen(name));
	if (r == 0)
		r = buf_append_string(b, ",\"group\":");
	name = find_name(names->groups, &names->group_count, st->st_gid, read_group_name);
	if (r == 0)
		r = entry_append_string(b, name, strlen(name));
	return r == 0 ? append_time(b, &st->st_mtim) : r;
}

int entry_append(struct buf *b, int at, const char *name, const char *path, struct entry_names *names)
{
	struct stat st, followed;
	if (fstatat(at, name, &st, AT_SYMLINK_NOFOLLOW) < 0)
		return -errno;
	const struct stat *shown = &st;
	char target[PATH_BYTES_MAX];
	if (S_ISLNK(st.st_mode) && follow(at, name, target, &followed) == 0)
		shown = &followed;

	int r = buf_append_string(b, "{");
	if (r == 0)
		r = entry_append_bytes(b, "name", path_name(path));
	if (r == 0)
		r = buf_append_string(b, ",");
	if (r == 0)
		r = entry_append_bytes(b, "path", path);
	if (r == 0)
		r = append_fields(b, &st, shown, names);
	if (r == 0 && S_ISLNK(st.st_mode)) {
		r = buf_append_string(b, ",");
		if (r == 0)
			r = entry_append_bytes(b, "symlinkTarget", target);
	}
	if (r == 0 && (S_ISREG(st.st_mode) || S_ISDIR(st.st_mode))) {
		char located[PATH_BYTES_MAX + 64];
		if (text_format(located, sizeof(located), "/proc/self/fd/%d/%s", at, name) == 0)
			r = metadata_append_json(b, located);
	}
	return r == 0 ? buf_append_string(b, "}") : r;
}
