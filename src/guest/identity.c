#include "guest/identity.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/random.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/fd.h"
#include "base/log.h"
#include "base/text.h"
#include "guest/request.h"

#define HOSTNAME_BYTES_MAX 63
#define HOSTS_BYTES_MAX (256 * 1024)
/* Marks the one line of /etc/hosts that is ours. */
#define HOSTS_MARK "# this machine"
#define RUN_DIR "/run/e2b"

static struct {
	pthread_mutex_t lock;
	int is_guest;
	char access[IDENTITY_TOKEN_BYTES_MAX + 1];
	char control[IDENTITY_TOKEN_BYTES_MAX + 1];
	char *user;
	char *workdir;
	json_t *given;       /* what the client set */
	json_t *own;         /* what the platform sets */
	json_t *environment; /* both, client's last */
	/* What files and kernel were last made to say. */
	char hostname[HOSTNAME_BYTES_MAX + 1];
	char machine_id[33];
	char session[IDENTITY_ID_BYTES_MAX + 1];
	char template_id[IDENTITY_ID_BYTES_MAX + 1];
} identity = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void merge_environment(void)
{
	json_t *merged = json_object();
	if (!merged)
		return;
	json_object_update(merged, identity.own);
	json_object_update(merged, identity.given);
	json_decref(identity.environment);
	identity.environment = merged;
}

void identity_begin(const char *control_token, int is_guest)
{
	pthread_mutex_lock(&identity.lock);
	identity.is_guest = is_guest;
	if (control_token)
		text_copy(identity.control, sizeof(identity.control), control_token);
	identity.given = json_object();
	identity.own = json_pack("{s:s}", "E2B_SANDBOX", "true");
	merge_environment();
	pthread_mutex_unlock(&identity.lock);
}

int identity_has_access_token(void)
{
	pthread_mutex_lock(&identity.lock);
	int set = identity.access[0] != '\0';
	pthread_mutex_unlock(&identity.lock);
	return set;
}

static int matches(const char *kept, const char *given)
{
	pthread_mutex_lock(&identity.lock);
	int equal = given && *given && kept[0] && text_equal_secret(given, kept);
	pthread_mutex_unlock(&identity.lock);
	return equal;
}

int identity_is_access_token(const char *token)
{
	return matches(identity.access, token);
}

int identity_is_control_token(const char *token)
{
	return matches(identity.control, token);
}

static int set_token(char *kept, const char *token, const char *what, struct error *e)
{
	if (token && strlen(token) > IDENTITY_TOKEN_BYTES_MAX)
		return error_set(e, ERROR_INVALID, "%s is longer than %d bytes", what, IDENTITY_TOKEN_BYTES_MAX);
	pthread_mutex_lock(&identity.lock);
	explicit_bzero(kept, IDENTITY_TOKEN_BYTES_MAX + 1);
	if (token)
		text_copy(kept, IDENTITY_TOKEN_BYTES_MAX + 1, token);
	pthread_mutex_unlock(&identity.lock);
	return 0;
}

int identity_set_access_token(const char *token, struct error *e)
{
	return set_token(identity.access, token, "access_token", e);
}

int identity_set_control_token(const char *token, struct error *e)
{
	return set_token(identity.control, token, "control_token", e);
}

char *agent_access_token(void)
{
	pthread_mutex_lock(&identity.lock);
	char *copy = identity.access[0] ? strdup(identity.access) : NULL;
	pthread_mutex_unlock(&identity.lock);
	return copy;
}

char *identity_default_user(void)
{
	pthread_mutex_lock(&identity.lock);
	char *copy = strdup(identity.user ? identity.user : "root");
	pthread_mutex_unlock(&identity.lock);
	return copy;
}

char *identity_default_workdir(void)
{
	pthread_mutex_lock(&identity.lock);
	char *copy = identity.workdir ? strdup(identity.workdir) : NULL;
	pthread_mutex_unlock(&identity.lock);
	return copy;
}

char *agent_default_workdir(void)
{
	return identity_default_workdir();
}

static int replace_text(char **kept, const char *text)
{
	if (!text || !*text || (*kept && strcmp(*kept, text) == 0))
		return 0;
	char *copy = strdup(text);
	if (!copy)
		return -ENOMEM;
	free(*kept);
	*kept = copy;
	return 0;
}

int identity_set_defaults(const char *user, const char *workdir, struct error *e)
{
	pthread_mutex_lock(&identity.lock);
	int r = replace_text(&identity.user, user);
	if (r == 0)
		r = replace_text(&identity.workdir, workdir);
	pthread_mutex_unlock(&identity.lock);
	return r < 0 ? error_set(e, ERROR_EXHAUSTED, "out of memory") : 0;
}

json_t *identity_environment(void)
{
	pthread_mutex_lock(&identity.lock);
	json_t *environment = json_incref(identity.environment);
	pthread_mutex_unlock(&identity.lock);
	return environment;
}

int identity_check_environment(json_t *environment, struct error *e)
{
	const char *name;
	json_t *value;
	size_t bytes = 0;
	if (!json_is_object(environment))
		return error_set(e, ERROR_INVALID, "the environment must be an object of strings");
	if (json_object_size(environment) > IDENTITY_ENVIRONMENT_ENTRIES_MAX)
		return error_set(e, ERROR_TOO_LARGE, "the environment has more than %d variables",
		                 IDENTITY_ENVIRONMENT_ENTRIES_MAX);
	json_object_foreach(environment, name, value)
	{
		if (!*name || strchr(name, '='))
			return error_set(e, ERROR_INVALID, "'%.100s' is not a name of an environment variable", name);
		if (!json_is_string(value))
			return error_set(e, ERROR_INVALID, "the environment variable %.100s must be a string", name);
		bytes += strlen(name) + json_string_length(value) + 2;
	}
	if (bytes > IDENTITY_ENVIRONMENT_BYTES_MAX)
		return error_set(e, ERROR_TOO_LARGE, "the environment has more than %d bytes", IDENTITY_ENVIRONMENT_BYTES_MAX);
	return 0;
}

int identity_set_environment(json_t *environment, struct error *e)
{
	int r = identity_check_environment(environment, e);
	if (r < 0)
		return r;
	json_t *copy = json_deep_copy(environment);
	if (!copy)
		return error_set(e, ERROR_EXHAUSTED, "out of memory");
	pthread_mutex_lock(&identity.lock);
	json_decref(identity.given);
	identity.given = copy;
	merge_environment();
	pthread_mutex_unlock(&identity.lock);
	return 0;
}

/*
 * False if the same was said before. A session that wakes is who it was: it needs no file touched, each of which costs
 * 10 ms and more in an emulated guest that runs this code for the first time, and users' own edits stay. Only the host
 * sets an identity, one at a time.
 */
static int is_news(char *said, size_t size, const char *text)
{
	return strcmp(said, text) != 0 && text_copy(said, size, text) == 0;
}

/* Programs that use E2B's conventions look for these files. */
static void write_run_file(const char *name, const char *text)
{
	char path[128];
	if (text_format(path, sizeof(path), RUN_DIR "/%s", name) < 0)
		return;
	CLEANUP_CLOSE int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0444);
	if (fd >= 0)
		fd_write_full(fd, text, strlen(text));
}

int identity_set_ids(const char *session, const char *sandbox, const char *template_id, struct error *e)
{
	/* What E2B calls a sandbox outlives its machine as a session of ours does. */
	json_t *own = json_pack("{s:s,s:s*,s:s*,s:s*,s:s*}", "E2B_SANDBOX", "true", "E2B_SANDBOX_ID", session,
	                        "E2B_TEMPLATE_ID", template_id, "SPACE_SESSION_ID", session, "SPACE_SANDBOX_ID", sandbox);
	if (!own)
		return error_set(e, ERROR_INVALID, "an identifier is not valid text");
	pthread_mutex_lock(&identity.lock);
	json_decref(identity.own);
	identity.own = own;
	merge_environment();
	int is_guest = identity.is_guest;
	pthread_mutex_unlock(&identity.lock);
	if (!is_guest)
		return 0;
	if (mkdir(RUN_DIR, 0755) == 0)
		write_run_file(".E2B_SANDBOX", "true");
	if (session && is_news(identity.session, sizeof(identity.session), session))
		write_run_file(".E2B_SANDBOX_ID", session);
	if (template_id && is_news(identity.template_id, sizeof(identity.template_id), template_id))
		write_run_file(".E2B_TEMPLATE_ID", template_id);
	return 0;
}

/* True if the file was there, plain and nobody else's name for something, and has the new text now. */
static int write_in_place(const char *path, const char *text, size_t size)
{
	struct stat st;
	CLEANUP_CLOSE int fd = open(path, O_WRONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY);
	if (fd < 0 || fstat(fd, &st) < 0 || !S_ISREG(st.st_mode) || st.st_nlink != 1)
		return 0;
	return fd_pwrite_full(fd, text, size, 0) == 0 && ((off_t)size >= st.st_size || ftruncate(fd, (off_t)size) == 0);
}

/* Without fsync: the disk's own ordering is enough for what is derived from host state. An unchanged file is not
 * touched, so that an idle session stays unchanged. A new identity is given while users' processes stand still, so
 * nobody sees a file half written; writing in place costs a tenth of a new file and a rename (measured on ext4 in a
 * translated guest: 0.7 ms against 8), three times on the way to every restored session. */
static int replace_file(const char *path, const char *text, size_t size, struct error *e)
{
	CLEANUP_FREE char *old = NULL;
	size_t old_size = 0;
	if (fd_read_file(AT_FDCWD, path, HOSTS_BYTES_MAX, &old, &old_size) == 0 && old_size == size &&
	    memcmp(old, text, size) == 0)
		return 0;
	if (write_in_place(path, text, size))
		return 0;
	char temporary[256];
	text_format(temporary, sizeof(temporary), "%s.space-new", path);
	unlink(temporary);
	CLEANUP_CLOSE int fd = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0644);
	int r = fd < 0 ? -errno : fd_write_full(fd, text, size);
	if (r == 0 && rename(temporary, path) < 0)
		r = -errno;
	if (r < 0) {
		unlink(temporary);
		return error_set_errno(e, r, "cannot write %s", path);
	}
	return 0;
}

static int write_hosts(const char *name, struct error *e)
{
	CLEANUP_FREE char *old = NULL;
	CLEANUP_BUF struct buf text = {0};
	if (fd_read_file(AT_FDCWD, "/etc/hosts", HOSTS_BYTES_MAX, &old, NULL) < 0)
		old = strdup("127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n");
	char *rest = old;
	for (char *line; rest && (line = strsep(&rest, "\n"));) {
		if (strstr(line, HOSTS_MARK) || (!*line && !rest))
			continue;
		if (buf_append_string(&text, line) < 0 || buf_append_string(&text, "\n") < 0)
			return error_set(e, ERROR_EXHAUSTED, "out of memory");
	}
	if (buf_printf(&text, "127.0.1.1 %s " HOSTS_MARK "\n", name) < 0)
		return error_set(e, ERROR_EXHAUSTED, "out of memory");
	return replace_file("/etc/hosts", text.data, text.size, e);
}

int identity_set_hostname(const char *name, struct error *e)
{
	char line[HOSTNAME_BYTES_MAX + 2];
	size_t length = strlen(name);
	int valid = length > 0 && length <= HOSTNAME_BYTES_MAX && name[0] != '-' && name[length - 1] != '-';
	for (size_t i = 0; valid && i < length; i++)
		valid = isalnum((unsigned char)name[i]) || name[i] == '-' || name[i] == '.';
	if (!valid)
		return error_set(e, ERROR_INVALID, "hostname '%.80s' is not a host name", name);
	if (!identity.is_guest || !is_news(identity.hostname, sizeof(identity.hostname), name))
		return 0;
	text_format(line, sizeof(line), "%s\n", name);
	int r = sethostname(name, length) < 0 ? error_set_errno(e, errno, "cannot set the host name") : 0;
	if (r == 0)
		r = replace_file("/etc/hostname", line, length + 1, e);
	if (r == 0)
		r = write_hosts(name, e);
	if (r < 0)
		identity.hostname[0] = '\0'; /* to be done again */
	return r;
}

int identity_set_machine_id(const char *hex, struct error *e)
{
	char line[34];
	int valid = strlen(hex) == 32;
	for (size_t i = 0; valid && hex[i]; i++)
		valid = isdigit((unsigned char)hex[i]) || (hex[i] >= 'a' && hex[i] <= 'f');
	if (!valid)
		return error_set(e, ERROR_INVALID, "machine_id must have 32 lower-case hexadecimal digits");
	if (!identity.is_guest || !is_news(identity.machine_id, sizeof(identity.machine_id), hex))
		return 0;
	text_format(line, sizeof(line), "%s\n", hex);
	int r = replace_file("/etc/machine-id", line, 33, e);
	if (r < 0)
		identity.machine_id[0] = '\0'; /* to be done again */
	return r;
}

int identity_set_clock(uint64_t realtime_ns, uint64_t slack_before_ns, uint64_t slack_after_ns, struct error *e)
{
	uint64_t now = time_realtime_ns();
	agent_note_host_time(realtime_ns);
	if (now + slack_before_ns >= realtime_ns && now <= realtime_ns + slack_after_ns)
		return 0;
	if (!identity.is_guest)
		return 0;
	struct timespec ts = {.tv_sec = (time_t)(realtime_ns / 1000000000), .tv_nsec = (long)(realtime_ns % 1000000000)};
	if (clock_settime(CLOCK_REALTIME, &ts) < 0)
		return error_set_errno(e, errno, "cannot set the clock");
	return 0;
}

int identity_add_entropy(const void *data, size_t size, struct error *e)
{
	if (size < IDENTITY_ENTROPY_BYTES_MIN || size > IDENTITY_ENTROPY_BYTES_MAX)
		return error_set(e, ERROR_INVALID, "entropy must have %d to %d bytes", IDENTITY_ENTROPY_BYTES_MIN,
		                 IDENTITY_ENTROPY_BYTES_MAX);
	if (!identity.is_guest)
		return 0;
	CLEANUP_CLOSE int fd = open("/dev/urandom", O_RDWR | O_CLOEXEC);
	if (fd < 0)
		return error_set_errno(e, errno, "cannot open /dev/urandom");
	struct rand_pool_info *pool = malloc(sizeof(*pool) + size);
	if (!pool)
		return error_set(e, ERROR_EXHAUSTED, "out of memory");
	pool->entropy_count = (int)(size * 8);
	pool->buf_size = (int)size;
	memcpy(pool->buf, data, size);
	int r = ioctl(fd, RNDADDENTROPY, pool) < 0 ? -errno : 0;
	explicit_bzero(pool, sizeof(*pool) + size);
	free(pool);
	/* Without this the generator's key would be renewed only at its next interval, up to minutes later: two guests of
	 * one snapshot would give the same bytes until then. Kernels without a generation counter depend on it. */
	if (r == 0 && ioctl(fd, RNDRESEEDCRNG) < 0)
		r = -errno;
	return r < 0 ? error_set_errno(e, r, "cannot reseed the kernel's random generator") : 0;
}
