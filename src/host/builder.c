#include "host/builder.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/log.h"
#include "base/text.h"
#include "host/protocol.h"
#include "image/build.h"
#include "image/image.h"

#define BUILD_TIME_MAX_MS (60 * 60 * 1000)
#define BUILD_POLL_MS 500
#define BUILD_LOCK_WAIT_S 2

/* Descriptors of the builder process. */
enum { FD_AGENT = 3, FD_DISK, FD_KERNEL, FD_INITRD, FD_REPORT, FD_END };

enum message_kind { MESSAGE_PROGRESS, MESSAGE_DONE, MESSAGE_FAILED };

struct message {
	uint32_t kind;
	uint32_t code;
	char text[ERROR_MESSAGE_BYTES];
};

/* --- in the helper -------------------------------------------------------------------------------------------- */

/* The folder is root's inside the daemon's: by descriptor from here on, so that moving it changes nothing. */
static int open_work_folder(const char *data_dir, struct error *e)
{
	CLEANUP_CLOSE int data = open(data_dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (data < 0)
		return error_set_errno(e, errno, "%s", data_dir);
	if (mkdirat(data, "build", 0700) < 0 && errno != EEXIST)
		return error_set_errno(e, errno, "%s/build", data_dir);
	CLEANUP_CLOSE int work = openat(data, "build", O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	struct stat st;
	if (work < 0 || fstat(work, &st) < 0)
		return error_set_errno(e, errno, "%s/build", data_dir);
	if (st.st_uid != 0 || (st.st_mode & 022))
		return error_set(e, ERROR_FORBIDDEN, "%s/build does not belong to root alone", data_dir);
	return TAKE_FD(work);
}

/* A build holds a lock on its folder; one that has none any more, and is not about to take it, has died. */
static int is_abandoned(int work, const char *name)
{
	struct stat st;
	CLEANUP_CLOSE int fd = openat(work, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	if (fd < 0 || fstat(fd, &st) < 0 || flock(fd, LOCK_EX | LOCK_NB) < 0)
		return 0;
	return time_realtime_ms() / 1000 >= (uint64_t)st.st_ctime + BUILD_LOCK_WAIT_S;
}

static void sweep(const char *data_dir)
{
	CLEANUP_CLOSE int work = open_work_folder(data_dir, NULL);
	int copy = work < 0 ? -1 : fcntl(work, F_DUPFD_CLOEXEC, 0);
	DIR *dir = copy < 0 ? NULL : fdopendir(copy);
	if (!dir) {
		if (copy >= 0)
			close(copy);
		return;
	}
	struct dirent *entry;
	while ((entry = readdir(dir))) {
		char path[300];
		if (entry->d_name[0] == '.' || strcmp(entry->d_name, "packages") == 0 || !is_abandoned(work, entry->d_name))
			continue;
		text_format(path, sizeof(path), "/proc/self/fd/%d/%s", work, entry->d_name);
		if (build_remove_tree(path) < 0)
			log_warning("helper", "left-over build %s cannot be removed", entry->d_name);
		else
			log_info("helper", "removed left-over build %s", entry->d_name);
	}
	closedir(dir);
}

void builder_prepare(const struct config *config)
{
	char mount_point[CONFIG_PATH_BYTES + 32];
	text_format(mount_point, sizeof(mount_point), "%s/build", config->runtime_dir);
	if (mkdir(mount_point, 0700) < 0 && errno != EEXIST)
		log_warning("helper", "%s: %s", mount_point, strerror(errno));
	sweep(config->data_dir);
}

/* Between fork and exec in a process with threads: system calls only. */
static void exec_builder(const int *fds, char *const *argv)
{
	int copies[FD_END];
	prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
	for (int i = FD_AGENT; i < FD_END; i++)
		copies[i] = fcntl(fds[i], F_DUPFD_CLOEXEC, FD_END);
	for (int i = FD_AGENT; i < FD_END; i++)
		if (copies[i] < 0 || dup3(copies[i], i, 0) < 0)
			_exit(126);
	if (syscall(SYS_close_range, (unsigned)FD_END, ~0u, 0) < 0)
		_exit(126);
	sigset_t none;
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	signal(SIGPIPE, SIG_DFL);
	setsid();
	execve("/proc/self/exe", argv, environ);
	_exit(127);
}

/* SIGTERM has the builder end its namespace and wait until that is empty; it does nothing else, so it comes soon. */
static void end_builder(pid_t pid)
{
	kill(pid, SIGTERM);
	while (waitpid(pid, NULL, 0) < 0 && errno == EINTR)
		;
}

struct watch {
	int report;
	int (*progress)(void *context, const char *line);
	int (*canceled)(void *context);
	void *context;
};

/* Until the builder says that it is done or has failed. */
static int watch_builder(const struct watch *w, struct error *e)
{
	uint64_t deadline = time_monotonic_ms() + BUILD_TIME_MAX_MS;
	for (;;) {
		struct pollfd p = {.fd = w->report, .events = POLLIN};
		int ready = poll(&p, 1, BUILD_POLL_MS);
		if (w->canceled(w->context))
			return error_set(e, ERROR_CANCELED, "image build was canceled");
		if (time_monotonic_ms() >= deadline)
			return error_set(e, ERROR_TIMEOUT, "image build took more than %d min", BUILD_TIME_MAX_MS / 60000);
		if (ready <= 0)
			continue;
		struct message message;
		ssize_t n = recv(w->report, &message, sizeof(message), 0);
		if (n < 0 && errno == EINTR)
			continue;
		if (n != (ssize_t)sizeof(message))
			return error_set(e, ERROR_INTERNAL, "image builder died");
		message.text[sizeof(message.text) - 1] = '\0';
		if (message.kind == MESSAGE_DONE)
			return 0;
		if (message.kind == MESSAGE_FAILED)
			return error_set(e, (enum error_code)message.code, "%s", message.text);
		if (w->progress(w->context, message.text) < 0)
			return error_set(e, ERROR_CANCELED, "image build was canceled");
	}
}

static int start_builder(const struct config *config, const struct host_image_spec *spec, int report, pid_t *ret_pid,
                         struct error *e)
{
	char size[24];
	char folder[CONFIG_PATH_BYTES + 32];
	char data[CONFIG_PATH_BYTES];
	char option[] = BUILDER_OPTION;
	char name[] = "space-helper";
	char *argv[PROTOCOL_PACKAGES_MAX + 8] = {name, option, size, folder, data, NULL};
	CLEANUP_FREE char *suite = strdup(spec->suite ? spec->suite : "");
	size_t count = 5;
	if (!suite)
		return error_set_errno(e, ENOMEM, "image build");
	text_format(size, sizeof(size), "%llu", (unsigned long long)spec->size_bytes);
	text_format(folder, sizeof(folder), "%s/build", config->runtime_dir);
	text_copy(data, sizeof(data), config->data_dir);
	argv[count++] = suite;
	/* execve() takes them as char *, but does not write to them. */
	for (size_t i = 0; spec->packages[i] && i < PROTOCOL_PACKAGES_MAX; i++)
		argv[count++] = (char *)(uintptr_t)spec->packages[i];
	int fds[FD_END] = {[FD_AGENT] = spec->agent_fd,
	                   [FD_DISK] = spec->disk_fd,
	                   [FD_KERNEL] = spec->kernel_fd,
	                   [FD_INITRD] = spec->initrd_fd,
	                   [FD_REPORT] = report};
	pid_t pid = fork();
	if (pid == 0)
		exec_builder(fds, argv);
	if (pid < 0)
		return error_set_errno(e, errno, "image builder");
	*ret_pid = pid;
	return 0;
}

int builder_run(const struct config *config, const struct host_image_spec *spec,
                int (*progress)(void *context, const char *line), int (*canceled)(void *context), void *context,
                struct error *e)
{
	int pair[2];
	pid_t pid;
	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0)
		return error_set_errno(e, errno, "image build");
	struct watch watch = {.report = pair[0], .progress = progress, .canceled = canceled, .context = context};
	int r = start_builder(config, spec, pair[1], &pid, e);
	close(pair[1]);
	if (r == 0) {
		r = watch_builder(&watch, e);
		end_builder(pid);
		if (r < 0)
			sweep(config->data_dir);
	}
	close(pair[0]);
	return r;
}

/* --- in the builder ------------------------------------------------------------------------------------------- */

static int send_message(enum message_kind kind, enum error_code code, const char *text)
{
	struct message message = {.kind = kind, .code = code};
	snprintf(message.text, sizeof(message.text), "%s", text);
	return send(FD_REPORT, &message, sizeof(message), MSG_NOSIGNAL) < 0 ? -errno : 0;
}

static int say(void *context, const char *line)
{
	return send_message(MESSAGE_PROGRESS, ERROR_NONE, line);
}

/* A /proc that fits the pid namespace, and the work folder at a path that nobody else can move. */
static int mount_own(const char *folder, const char *data_dir, struct error *e)
{
	char from[32];
	/* Opened in this mount namespace, or it could not be mounted. */
	CLEANUP_CLOSE int work = open_work_folder(data_dir, e);
	if (work < 0)
		return work;
	text_format(from, sizeof(from), "/proc/self/fd/%d", work);
	if (mount(from, folder, NULL, MS_BIND, NULL) < 0)
		return error_set_errno(e, errno, "mount of the build folder");
	if (mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL) < 0)
		return error_set_errno(e, errno, "mount of /proc for the build");
	return 0;
}

static void build_in_namespace(int argc, char **argv)
{
	struct error e;
	uint64_t size = 0;
	const char *folder = argv[3];
	struct image_spec spec = {
	    .packages = (const char *const *)argv + 6,
	    .suite = argv[5],
	    .agent_fd = FD_AGENT,
	    .disk_fd = FD_DISK,
	    .kernel_fd = FD_KERNEL,
	    .initrd_fd = FD_INITRD,
	    .work_dir = folder,
	};
	for (int fd = FD_AGENT; fd < FD_END; fd++)
		fcntl(fd, F_SETFD, FD_CLOEXEC);
	int r = text_parse_u64(argv[2], UINT64_MAX, &size);
	if (r < 0)
		error_set(&e, ERROR_INVALID, "malformed image size");
	spec.size_bytes = size ? size : IMAGE_SIZE_DEFAULT;
	if (r == 0)
		r = mount_own(folder, argv[4], &e);
	if (r == 0)
		r = image_build(&spec, say, NULL, &e);
	if (r < 0)
		send_message(MESSAGE_FAILED, e.code, e.message);
	else
		send_message(MESSAGE_DONE, ERROR_NONE, "");
}

static volatile pid_t namespace_pid;

static void on_term(int signal_number)
{
	if (!namespace_pid)
		_exit(1);
	kill(namespace_pid, SIGKILL);
}

int builder_main(int argc, char **argv)
{
	if (argc < 6)
		return 2;
	/* The helper may have died before PR_SET_PDEATHSIG was set; then its end of the socket is closed. */
	struct pollfd p = {.fd = FD_REPORT};
	if (poll(&p, 1, 0) > 0)
		return 1;
	umask(022);
	signal(SIGTERM, on_term);
	if (unshare(CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS) < 0 ||
	    mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0) {
		char text[128];
		text_format(text, sizeof(text), "namespaces for the image build: %s", strerror(errno));
		send_message(MESSAGE_FAILED, ERROR_UNSUPPORTED, text);
		return 1;
	}
	pid_t pid = fork();
	if (pid == 0) {
		/* First process of the namespace: its end is the end of all others. */
		prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
		signal(SIGTERM, SIG_DFL);
		build_in_namespace(argc, argv);
		_exit(0);
	}
	if (pid < 0)
		return 1;
	namespace_pid = pid;
	while (waitpid(pid, NULL, 0) < 0 && errno == EINTR)
		;
	return 0;
}
