/*
 * The `space` service: what the host asks of the agent around snapshots (docs/AGENT.md, section 2).
 *
 * resume-as keeps an order that no clone may see broken: old streams go first, then clock and random state, then
 * identity and tokens, and only then users' processes run again.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/reboot.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/reboot.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/log.h"
#include "base/text.h"
#include "guest/boot.h"
#include "guest/cgroup.h"
#include "guest/connection.h"
#include "guest/identity.h"
#include "guest/process.h"
#include "guest/server.h"
#include "guest/tunnel.h"

#define WARM_WAIT_MS 10000

/* Bytes written to the disk since boot, from /proc/diskstats. */
static uint64_t disk_bytes_written(void)
{
	CLEANUP_FREE char *text = NULL;
	if (fd_read_file(AT_FDCWD, "/proc/diskstats", 1 << 16, &text, NULL) < 0)
		return 0;
	const char *line = strstr(text, " vda ");
	unsigned long long sectors = 0;
	if (!line || sscanf(line, " vda %*u %*u %*u %*u %*u %*u %llu", &sectors) != 1)
		return 0;
	return (uint64_t)sectors * 512;
}

static void read_boot_id(char *to, size_t size)
{
	CLEANUP_CLOSE int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
	ssize_t n = fd < 0 ? -1 : read(fd, to, size - 1);
	to[n > 0 ? n : 0] = '\0';
	to[strcspn(to, "\n")] = '\0';
}

static json_t *status_object(int confirmed)
{
	char boot_id[64];
	read_boot_id(boot_id, sizeof(boot_id));
	json_t *status = json_pack("{s:s,s:s,s:s,s:I,s:I,s:i,s:I}", "version", SPACE_VERSION, "state",
	                           cgroup_is_frozen() ? "frozen" : "running", "boot_id", boot_id, "user_cpu_us",
	                           (json_int_t)cgroup_user_cpu_us(), "writes", (json_int_t)server_writes(), "processes",
	                           (int)process_count_running(), "user_bytes_written", (json_int_t)disk_bytes_written());
	if (status && confirmed >= 0)
		json_object_set_new(status, "confirmed", json_boolean(confirmed));
	return status;
}

/* On the way of every restored session to its user: no more than what is at hand. */
static json_t *state_object(void)
{
	return json_pack("{s:s}", "state", cgroup_is_frozen() ? "frozen" : "running");
}

static int fail(struct request *r, const struct error *e)
{
	return response_json(r, error_code_http_status(e->code),
	                     json_pack("{s:s,s:s}", "code", error_code_name(e->code), "message", e->message));
}

static int serve_status(struct request *r)
{
	return response_json(r, 200, status_object(-1));
}

static int text_field(json_t *body, const char *name, size_t max, const char **ret, struct error *e)
{
	json_t *value = json_object_get(body, name);
	*ret = NULL;
	if (!value || json_is_null(value))
		return 0;
	if (!json_is_string(value) || json_string_length(value) > max)
		return error_set(e, ERROR_INVALID, "%s must be a string of at most %zu bytes", name, max);
	*ret = json_string_value(value);
	return 0;
}

static int time_field(json_t *body, uint64_t *ret_ns, struct error *e)
{
	const char *text;
	*ret_ns = 0;
	int x = text_field(body, "time_ns", 32, &text, e);
	if (x == 0 && text && text_parse_u64(text, INT64_MAX, ret_ns) < 0)
		x = error_set(e, ERROR_INVALID, "time_ns must be a decimal number in a string");
	return x;
}

static int set_time(uint64_t ns, struct error *e)
{
	return ns ? identity_set_clock(ns, IDENTITY_CLOCK_SLACK_NS, IDENTITY_CLOCK_SLACK_NS, e) : 0;
}

static int serve_quiesce(struct request *r)
{
	struct error e;
	json_t *body = NULL;
	int confirmed = 0;
	int x = request_read_json(r, &body, &e);
	json_decref(body);
	if (x == 0)
		x = cgroup_freeze(&confirmed, &e);
	return x < 0 ? fail(r, &e) : response_json(r, 200, status_object(confirmed));
}

static int serve_thaw(struct request *r)
{
	struct error e;
	json_t *body = NULL;
	uint64_t ns = 0;
	int x = request_read_json(r, &body, &e);
	if (x == 0)
		x = time_field(body, &ns, &e);
	json_decref(body);
	if (x == 0)
		x = set_time(ns, &e);
	if (x == 0)
		x = cgroup_thaw(&e);
	return x < 0 ? fail(r, &e) : response_json(r, 200, state_object());
}

struct resume {
	const char *session;
	const char *sandbox;
	const char *template_id;
	const char *hostname;
	const char *machine_id;
	const char *user;
	const char *workdir;
	const char *access;
	const char *control;
	json_t *environment;
	uint64_t time_ns;
	unsigned char entropy[IDENTITY_ENTROPY_BYTES_MAX];
	size_t entropy_size;
	int thaw;
};

static int read_entropy(json_t *body, struct resume *q, struct error *e)
{
	const char *text;
	int x = text_field(body, "entropy", IDENTITY_ENTROPY_BYTES_MAX, &text, e);
	if (x < 0 || !text)
		return x;
	long n = text_base64_decode(q->entropy, text, strlen(text));
	if (n < IDENTITY_ENTROPY_BYTES_MIN)
		return error_set(e, ERROR_INVALID, "entropy must be base64 of at least %d bytes", IDENTITY_ENTROPY_BYTES_MIN);
	q->entropy_size = (size_t)n;
	return 0;
}

/* Checks everything before anything is changed. */
static int read_resume(json_t *body, struct resume *q, struct error *e)
{
	const struct {
		const char *name;
		size_t max;
		const char **to;
	} fields[] = {
	    {"session_id", IDENTITY_ID_BYTES_MAX, &q->session},
	    {"sandbox_id", IDENTITY_ID_BYTES_MAX, &q->sandbox},
	    {"template_id", IDENTITY_ID_BYTES_MAX, &q->template_id},
	    {"hostname", 63, &q->hostname},
	    {"machine_id", 32, &q->machine_id},
	    {"default_user", 63, &q->user},
	    {"default_workdir", 4095, &q->workdir},
	    {"access_token", IDENTITY_TOKEN_BYTES_MAX, &q->access},
	    {"control_token", IDENTITY_TOKEN_BYTES_MAX, &q->control},
	};
	int x = 0;
	for (size_t i = 0; i < ARRAY_SIZE(fields) && x == 0; i++)
		x = text_field(body, fields[i].name, fields[i].max, fields[i].to, e);
	if (x == 0)
		x = time_field(body, &q->time_ns, e);
	if (x == 0)
		x = read_entropy(body, q, e);
	if (x < 0)
		return x;
	q->environment = json_object_get(body, "environment");
	if (json_is_null(q->environment))
		q->environment = NULL;
	if (q->environment && (x = identity_check_environment(q->environment, e)) < 0)
		return error_prefix(e, "environment");
	json_t *thaw = json_object_get(body, "thaw");
	if (thaw && !json_is_boolean(thaw))
		return error_set(e, ERROR_INVALID, "thaw must be true or false");
	q->thaw = thaw ? json_is_true(thaw) : 1;
	return 0;
}

static int apply_resume(const struct request *r, const struct resume *q, struct error *e)
{
	server_drop_clients(r->connection);
	int x = set_time(q->time_ns, e);
	if (x == 0 && q->entropy_size)
		x = identity_add_entropy(q->entropy, q->entropy_size, e);
	if (x == 0 && q->hostname)
		x = identity_set_hostname(q->hostname, e);
	if (x == 0 && q->machine_id)
		x = identity_set_machine_id(q->machine_id, e);
	if (x == 0 && q->access)
		x = identity_set_access_token(q->access, e);
	if (x == 0 && q->environment)
		x = identity_set_environment(q->environment, e);
	if (x == 0)
		x = identity_set_ids(q->session, q->sandbox, q->template_id, e);
	if (x == 0)
		x = identity_set_defaults(q->user, q->workdir, e);
	/* Last of all that can fail: the caller can repeat the call with the token it knows. */
	if (x == 0 && q->control)
		x = identity_set_control_token(q->control, e);
	if (x == 0 && q->thaw)
		x = cgroup_thaw(e);
	return x;
}

static int serve_resume(struct request *r)
{
	struct error e;
	json_t *body = NULL;
	struct resume *q = calloc(1, sizeof(*q));
	int x = q ? request_read_json(r, &body, &e) : error_set(&e, ERROR_EXHAUSTED, "out of memory");
	if (x == 0)
		x = read_resume(body, q, &e);
	if (x == 0)
		x = apply_resume(r, q, &e);
	if (q)
		explicit_bzero(q, sizeof(*q));
	free(q);
	json_decref(body);
	return x < 0 ? fail(r, &e) : response_json(r, 200, state_object());
}

static int serve_sync(struct request *r)
{
	CLEANUP_CLOSE int fd = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	struct error e;
	if (fd < 0 || syncfs(fd) < 0) {
		error_set_errno(&e, errno, "cannot sync the root file system");
		return fail(r, &e);
	}
	return response_json(r, 200, json_object());
}

static int serve_warm(struct request *r)
{
	struct error e;
	struct guest_user user;
	struct process *p = NULL;
	int exec_errno;
	json_t *arguments = json_pack("[s,s]", "-c", "true");
	struct process_request q = {
	    .program = "/bin/sh", .arguments = arguments, .user = &user, .has_stdin = 1, .timeout_ms = WARM_WAIT_MS};
	q.config = json_pack("{s:s}", "cmd", q.program);
	int x = arguments && q.config ? guest_user_find(NULL, &user, &e) : error_set(&e, ERROR_EXHAUSTED, "out of memory");
	if (x == 0)
		x = process_start(&q, NULL, &p, &exec_errno, &e);
	for (int ended = x < 0; !ended;) {
		usleep(1000);
		pthread_mutex_lock(&p->lock);
		ended = p->is_ended;
		pthread_mutex_unlock(&p->lock);
	}
	if (p)
		process_forget(p);
	process_unref(p);
	json_decref(arguments);
	json_decref(q.config);
	return x < 0 ? fail(r, &e) : response_json(r, 200, json_object());
}

static void *poweroff_main(void *unused)
{
	usleep(50000); /* lets the answer leave */
	boot_poweroff();
	return NULL;
}

static int serve_poweroff(struct request *r)
{
	pthread_t thread;
	struct error e;
	if (!boot_is_guest()) {
		error_set(&e, ERROR_UNSUPPORTED, "this agent does not run a machine");
		return fail(r, &e);
	}
	int x = response_json(r, 200, json_object());
	if (pthread_create(&thread, NULL, poweroff_main, NULL) == 0)
		pthread_detach(thread);
	return x;
}

const struct request_route space_routes[] = {
    {"GET", "/space/v1/status", serve_status, 0},
    {"POST", "/space/v1/quiesce", serve_quiesce, 0},
    {"POST", "/space/v1/thaw", serve_thaw, 0},
    {"POST", "/space/v1/resume-as", serve_resume, 0},
    {"GET", "/space/v1/tunnel", tunnel_serve, 0},
    {"POST", "/space/v1/sync", serve_sync, 0},
    {"POST", "/space/v1/warm", serve_warm, 0},
    {"POST", "/space/v1/poweroff", serve_poweroff, 0},
    {NULL, NULL, NULL, 0},
};
