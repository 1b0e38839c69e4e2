#include "host/record.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/log.h"
#include "host/client.h"

#define RECORD_BYTES_MAX 512

int record_write(int folder_fd, const struct record *record, struct error *e)
{
	char text[RECORD_BYTES_MAX];
	char temporary[ID_BYTES + 8];
	int size = snprintf(text, sizeof(text), "%s pid %d start %" PRIu64 " index %u nonce %" PRIx64 "\n", record->id,
	                    (int)record->pid, record->start_time, record->index, record->nonce);
	text_format(temporary, sizeof(temporary), ".%s", record->id);
	CLEANUP_CLOSE int fd = openat(folder_fd, temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	int r = fd < 0 ? -errno : fd_write_full(fd, text, (size_t)size);
	if (r == 0 && renameat(folder_fd, temporary, folder_fd, record->id) < 0)
		r = -errno;
	if (r < 0) {
		unlinkat(folder_fd, temporary, 0);
		return error_set_errno(e, r, "record of sandbox %s", record->id);
	}
	return 0;
}

void record_remove(int folder_fd, const char *id)
{
	unlinkat(folder_fd, id, 0);
}

static int read_record(int folder_fd, const char *name, struct record *ret)
{
	CLEANUP_FREE char *text = NULL;
	char id[ID_BYTES];
	if (!id_is_valid(name, 'b'))
		return -EINVAL;
	int r = fd_read_file(folder_fd, name, RECORD_BYTES_MAX, &text, NULL);
	if (r < 0)
		return r;
	int pid;
	*ret = (struct record){0};
	if (sscanf(text, "%23s pid %d start %" SCNu64 " index %u nonce %" SCNx64, id, &pid, &ret->start_time, &ret->index,
	           &ret->nonce) != 5)
		return -EBADMSG;
	if (strcmp(id, name) != 0 || pid <= 1 || ret->index >= HOST_SANDBOXES_MAX)
		return -EBADMSG;
	ret->pid = pid;
	return text_copy(ret->id, sizeof(ret->id), id);
}

int record_scan(int folder_fd, void (*each)(void *context, const struct record *record), void *context, struct error *e)
{
	int fd = openat(folder_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *dir = fd < 0 ? NULL : fdopendir(fd);
	if (!dir) {
		if (fd >= 0)
			close(fd);
		return error_set_errno(e, errno, "folder of sandbox records");
	}
	struct dirent *entry;
	while ((entry = readdir(dir))) {
		struct record record;
		if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
			continue;
		if (read_record(folder_fd, entry->d_name, &record) == 0) {
			each(context, &record);
		} else {
			log_warning("helper", "removing damaged record %s", entry->d_name);
			unlinkat(folder_fd, entry->d_name, 0);
		}
	}
	closedir(dir);
	return 0;
}

int record_start_time(pid_t pid, uint64_t *ret)
{
	char path[32];
	CLEANUP_FREE char *text = NULL;
	text_format(path, sizeof(path), "/proc/%d/stat", (int)pid);
	int r = fd_read_file(AT_FDCWD, path, 4096, &text, NULL);
	if (r < 0)
		return r;
	/* The name in parentheses may hold anything; fields are counted from its end, where the third one begins. */
	const char *p = strrchr(text, ')');
	for (int field = 2; p && field < 22; field++)
		p = strchr(p + 1, ' ');
	return p && sscanf(p, " %" SCNu64, ret) == 1 ? 0 : -EBADMSG;
}
