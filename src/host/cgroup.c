#include "host/cgroup.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/log.h"

#define MOUNTINFO_BYTES_MAX (4 * MIB)
#define CGROUP_FILE_BYTES_MAX (64 * KIB)
#define CPU_PERIOD_US 100000

static const char *const controller_names[CGROUP_CONTROLLER_COUNT] = {"memory", "cpu", "pids"};

static int write_file(const char *dir, const char *id, const char *name, const char *text)
{
	char path[CGROUP_PATH_BYTES + 64];
	if (text_format(path, sizeof(path), "%s/%s/%s", dir, id, name) < 0)
		return -ENAMETOOLONG;
	CLEANUP_CLOSE int fd = open(path, O_WRONLY | O_CLOEXEC);
	if (fd < 0)
		return -errno;
	return fd_write_full(fd, text, strlen(text));
}

/* Whether the blank- or comma-separated list has the word. */
static int has_word(const char *list, const char *word)
{
	size_t length = strlen(word);
	for (const char *p = strstr(list, word); p; p = strstr(p + 1, word)) {
		int starts = p == list || strchr(", \n", p[-1]);
		int ends = !p[length] || strchr(", \n", p[length]);
		if (starts && ends)
			return 1;
	}
	return 0;
}

static int has_controller(const char *dir, const char *name)
{
	char path[CGROUP_PATH_BYTES + 32];
	CLEANUP_FREE char *list = NULL;
	if (text_format(path, sizeof(path), "%s/cgroup.controllers", dir) < 0 ||
	    fd_read_file(AT_FDCWD, path, CGROUP_FILE_BYTES_MAX, &list, NULL) < 0)
		return 0;
	return has_word(list, name);
}

static struct cgroup_dir *add_dir(struct cgroup_host *host, const char *mount, const char *instance, int unified)
{
	struct cgroup_dir dir = {.unified = unified};
	if (text_format(dir.path, sizeof(dir.path), "%s/%s", mount, instance) < 0)
		return NULL;
	for (size_t i = 0; i < host->dir_count; i++)
		if (strcmp(host->dirs[i].path, dir.path) == 0)
			return &host->dirs[i];
	if (host->dir_count == CGROUP_DIRS_MAX || (mkdir(dir.path, 0755) < 0 && errno != EEXIST))
		return NULL;
	host->dirs[host->dir_count] = dir;
	return &host->dirs[host->dir_count++];
}

/* A controller must be switched on level by level before groups below have its files. */
static void open_unified(struct cgroup_host *host, const char *mount, const char *instance)
{
	struct cgroup_dir *dir = add_dir(host, mount, instance, 1);
	if (!dir)
		return;
	for (int c = 0; c < CGROUP_CONTROLLER_COUNT; c++) {
		char change[16];
		text_format(change, sizeof(change), "+%s", controller_names[c]);
		if (!has_controller(mount, controller_names[c]))
			continue;
		write_file(mount, ".", "cgroup.subtree_control", change);
		if (has_controller(dir->path, controller_names[c]) &&
		    write_file(dir->path, ".", "cgroup.subtree_control", change) == 0) {
			dir->controllers |= 1u << c;
			host->version[c] = 2;
		}
	}
}

static void open_legacy(struct cgroup_host *host, const char *mount, const char *instance, const char *options)
{
	for (int c = 0; c < CGROUP_CONTROLLER_COUNT; c++) {
		if (host->version[c] || !has_word(options, controller_names[c]))
			continue;
		struct cgroup_dir *dir = add_dir(host, mount, instance, 0);
		if (!dir)
			continue;
		dir->controllers |= 1u << c;
		host->version[c] = 1;
	}
}

/* mountinfo(proc(5)): ID PARENT MAJ:MIN ROOT MOUNTPOINT OPTIONS [TAGS…] - TYPE SOURCE SUPER_OPTIONS */
static void scan_line(struct cgroup_host *host, const char *line, const char *instance, int unified)
{
	char mount[CGROUP_PATH_BYTES];
	char type[32];
	char options[256];
	const char *tail = strstr(line, " - ");
	if (!tail || sscanf(line, "%*s %*s %*s %*s %255s", mount) != 1 ||
	    sscanf(tail, " - %31s %*s %255s", type, options) != 2)
		return;
	if (unified && strcmp(type, "cgroup2") == 0 && host->dir_count == 0)
		open_unified(host, mount, instance);
	if (!unified && strcmp(type, "cgroup") == 0)
		open_legacy(host, mount, instance, options);
}

int cgroup_open(struct cgroup_host *host, const char *instance, struct error *e)
{
	*host = (struct cgroup_host){0};
	for (int unified = 1; unified >= 0; unified--) {
		CLEANUP_FREE char *table = NULL;
		int r = fd_read_file(AT_FDCWD, "/proc/self/mountinfo", MOUNTINFO_BYTES_MAX, &table, NULL);
		if (r < 0)
			return error_set_errno(e, r, "/proc/self/mountinfo");
		char *cursor = table;
		for (char *line = strsep(&cursor, "\n"); line; line = strsep(&cursor, "\n"))
			scan_line(host, line, instance, unified);
	}
	if (!host->dir_count)
		return error_set(e, ERROR_UNSUPPORTED, "no cgroup hierarchy is mounted writable");
	return 0;
}

static int apply_limits(const struct cgroup_dir *dir, const char *id, const struct cgroup_limits *limits)
{
	char text[64];
	int r = 0;
	if (dir->controllers & (1u << CGROUP_MEMORY) && limits->memory_max_bytes) {
		snprintf(text, sizeof(text), "%llu", (unsigned long long)limits->memory_max_bytes);
		r = write_file(dir->path, id, dir->unified ? "memory.max" : "memory.limit_in_bytes", text);
		if (r == 0 && dir->unified)
			r = write_file(dir->path, id, "memory.oom.group", "1");
	}
	if (r == 0 && dir->controllers & (1u << CGROUP_CPU) && limits->cpu_percent) {
		unsigned long long quota = (unsigned long long)limits->cpu_percent * CPU_PERIOD_US / 100;
		/* v1 takes the quota alone; its period is this one unless somebody changed it. */
		snprintf(text, sizeof(text), "%llu%s", quota, dir->unified ? " 100000" : "");
		r = write_file(dir->path, id, dir->unified ? "cpu.max" : "cpu.cfs_quota_us", text);
	}
	if (r == 0 && dir->controllers & (1u << CGROUP_PIDS) && limits->pids_max) {
		snprintf(text, sizeof(text), "%u", limits->pids_max);
		r = write_file(dir->path, id, "pids.max", text);
	}
	return r;
}

int cgroup_prepare(const struct cgroup_host *host, const char *name, struct error *e)
{
	for (size_t i = 0; i < host->dir_count; i++) {
		const struct cgroup_dir *dir = &host->dirs[i];
		char path[CGROUP_PATH_BYTES + 64];
		if (dir->unified)
			continue;
		if (text_format(path, sizeof(path), "%s/%s", dir->path, name) < 0)
			return error_set(e, ERROR_INTERNAL, "cgroup path is too long");
		int r = mkdir(path, 0755) < 0 && errno != EEXIST ? -errno : write_file(dir->path, name, "tasks", "0");
		if (r < 0)
			return error_set_errno(e, r, "cgroup %s", path);
	}
	return 0;
}

void cgroup_leave(const struct cgroup_host *host)
{
	for (size_t i = 0; i < host->dir_count; i++)
		if (!host->dirs[i].unified)
			write_file(host->dirs[i].path, ".", "tasks", "0");
}

static int create_one(const struct cgroup_dir *dir, const char *prepared, const char *id,
                      const struct cgroup_limits *limits)
{
	char from[CGROUP_PATH_BYTES + 64];
	char to[CGROUP_PATH_BYTES + 64];
	if (text_format(from, sizeof(from), "%s/%s", dir->path, prepared) < 0 ||
	    text_format(to, sizeof(to), "%s/%s", dir->path, id) < 0)
		return -ENAMETOOLONG;
	if (dir->unified ? mkdir(to, 0755) : rename(from, to))
		return -errno;
	return apply_limits(dir, id, limits);
}

int cgroup_create(const struct cgroup_host *host, const char *prepared, const char *id,
                  const struct cgroup_limits *limits, int *ret_unified_fd, struct error *e)
{
	int r = 0;
	*ret_unified_fd = -1;
	for (size_t i = 0; i < host->dir_count && r == 0; i++) {
		const struct cgroup_dir *dir = &host->dirs[i];
		r = create_one(dir, prepared, id, limits);
		if (r == 0 && dir->unified) {
			char path[CGROUP_PATH_BYTES + 64];
			text_format(path, sizeof(path), "%s/%s", dir->path, id);
			*ret_unified_fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
			r = *ret_unified_fd < 0 ? -errno : 0;
		}
		if (r < 0)
			error_set_errno(e, r, "cgroup %s/%s", dir->path, id);
	}
	if (r < 0 && *ret_unified_fd >= 0) {
		close(*ret_unified_fd);
		*ret_unified_fd = -1;
	}
	return r;
}

/* Signals every process of one group; cgroup.kill came with Linux 5.14. */
static void kill_members(const struct cgroup_dir *dir, const char *id)
{
	char path[CGROUP_PATH_BYTES + 64];
	CLEANUP_FREE char *list = NULL;
	if (dir->unified && write_file(dir->path, id, "cgroup.kill", "1") == 0)
		return;
	text_format(path, sizeof(path), "%s/%s/cgroup.procs", dir->path, id);
	if (fd_read_file(AT_FDCWD, path, CGROUP_FILE_BYTES_MAX, &list, NULL) < 0)
		return;
	char *cursor = list;
	for (char *line = strsep(&cursor, "\n"); line; line = strsep(&cursor, "\n")) {
		uint64_t pid;
		/* A thread of ours may not have left the group yet that it started the sandbox from. */
		if (text_parse_u64(line, INT32_MAX, &pid) == 0 && pid > 1 && (pid_t)pid != getpid())
			kill((pid_t)pid, SIGKILL);
	}
}

static int remove_one(const struct cgroup_dir *dir, const char *id, uint64_t deadline_ms, struct error *e)
{
	char path[CGROUP_PATH_BYTES + 64];
	text_format(path, sizeof(path), "%s/%s", dir->path, id);
	long pause_ns = 200000;
	for (;;) {
		if (rmdir(path) == 0 || errno == ENOENT)
			return 0;
		if (errno != EBUSY || time_monotonic_ms() >= deadline_ms)
			return error_set_errno(e, errno, "cgroup %s", path);
		kill_members(dir, id);
		nanosleep(&(struct timespec){.tv_nsec = pause_ns}, NULL);
		pause_ns = MIN(pause_ns * 2, 20 * 1000000L);
	}
}

int cgroup_remove(const struct cgroup_host *host, const char *id, unsigned wait_ms, struct error *e)
{
	uint64_t deadline_ms = time_monotonic_ms() + wait_ms;
	int r = 0;
	for (size_t i = 0; i < host->dir_count; i++) {
		int one = remove_one(&host->dirs[i], id, deadline_ms, r < 0 ? NULL : e);
		if (r == 0)
			r = one;
	}
	return r;
}

unsigned cgroup_sweep(const struct cgroup_host *host, int (*keep)(void *context, const char *id), void *context)
{
	unsigned removed = 0;
	for (size_t i = 0; i < host->dir_count; i++) {
		DIR *dir = opendir(host->dirs[i].path);
		if (!dir)
			continue;
		struct dirent *entry;
		while ((entry = readdir(dir))) {
			struct error e;
			if (entry->d_type != DT_DIR || entry->d_name[0] == '.' || keep(context, entry->d_name))
				continue;
			if (cgroup_remove(host, entry->d_name, 5000, &e) < 0)
				log_warning("helper", "left-over group %s: %s", entry->d_name, e.message);
			else
				removed++;
		}
		closedir(dir);
	}
	return removed;
}

void cgroup_close(const struct cgroup_host *host)
{
	for (size_t i = 0; i < host->dir_count; i++)
		rmdir(host->dirs[i].path);
}
