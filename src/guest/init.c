/* envd's plain calls: /health, /init, /metrics, /envs. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/text.h"
#include "guest/cgroup.h"
#include "guest/connection.h"
#include "guest/identity.h"
#include "guest/server.h"

/* As envd: a clock within these bounds of the caller's is left alone. */
#define INIT_CLOCK_BEFORE_NS UINT64_C(50000000)
#define INIT_CLOCK_AFTER_NS UINT64_C(5000000000)

static int serve_health(struct request *r)
{
	return response_empty(r, 204);
}

static int serve_envs(struct request *r)
{
	return response_json(r, 200, identity_environment());
}

/* "2026-01-31T12:00:00.123456789Z", also with a numeric zone. */
static int parse_rfc3339(const char *text, uint64_t *ret_ns)
{
	struct tm tm = {0};
	const char *rest = strptime(text, "%Y-%m-%dT%H:%M:%S", &tm);
	uint64_t fraction = 0;
	if (!rest)
		return -EINVAL;
	if (*rest == '.') {
		uint64_t unit = 100000000;
		for (rest++; *rest >= '0' && *rest <= '9'; rest++, unit /= 10)
			fraction += (uint64_t)(*rest - '0') * unit;
	}
	long zone = 0;
	if (*rest == '+' || *rest == '-') {
		int hours;
		int minutes;
		if (sscanf(rest + 1, "%2d:%2d", &hours, &minutes) != 2 || strlen(rest) != 6)
			return -EINVAL;
		zone = (hours * 60L + minutes) * 60 * (*rest == '-' ? -1 : 1);
	} else if (strcmp(rest, "Z") != 0 && strcmp(rest, "z") != 0) {
		return -EINVAL;
	}
	time_t seconds = timegm(&tm) - zone;
	if (seconds < 0)
		return -ERANGE;
	*ret_ns = (uint64_t)seconds * 1000000000 + fraction;
	return 0;
}

/* Who may set this guest up: the holder of the token; while there is none, only the host. */
static int may_init(const struct request *r, const char *body_token, struct error *e)
{
	if (identity_is_control_token(request_header(r, "x-space-control")))
		return 0;
	if (identity_has_access_token()) {
		if (identity_is_access_token(request_header(r, "x-access-token")) || identity_is_access_token(body_token))
			return 0;
		return error_set(e, ERROR_UNAUTHENTICATED,
		                 body_token ? "access token validation failed" : "access token reset not authorized");
	}
	if (r->connection->is_local && !server_trusts_local())
		return error_set(e, ERROR_UNAUTHENTICATED, "a process of the sandbox may not set it up");
	return 0;
}

static int text_field(json_t *body, const char *name, const char **ret, struct error *e)
{
	json_t *value = json_object_get(body, name);
	*ret = NULL;
	if (value && !json_is_null(value) && !json_is_string(value))
		return error_set(e, ERROR_INVALID, "%s must be a string", name);
	*ret = json_string_value(value);
	return 0;
}

static int apply_init(const struct request *r, json_t *body, struct error *e)
{
	const char *token;
	const char *timestamp;
	const char *user;
	const char *workdir;
	uint64_t now_ns = 0;
	json_t *environment = json_object_get(body, "envVars");
	int x = text_field(body, "accessToken", &token, e);
	if (x == 0)
		x = text_field(body, "timestamp", &timestamp, e);
	if (x == 0)
		x = text_field(body, "defaultUser", &user, e);
	if (x == 0)
		x = text_field(body, "defaultWorkdir", &workdir, e);
	if (x == 0)
		x = may_init(r, token, e);
	if (x < 0)
		return x;
	if (timestamp && parse_rfc3339(timestamp, &now_ns) < 0)
		return error_set(e, ERROR_INVALID, "timestamp is not RFC 3339 time");
	if (environment && !json_is_null(environment) && (x = identity_set_environment(environment, e)) < 0)
		return x;
	if (timestamp && (x = identity_set_clock(now_ns, INIT_CLOCK_BEFORE_NS, INIT_CLOCK_AFTER_NS, e)) < 0)
		return x;
	if (token && *token && (x = identity_set_access_token(token, e)) < 0)
		return x;
	return identity_set_defaults(user, workdir, e);
}

static int serve_init(struct request *r)
{
	json_t *body = NULL;
	struct error e;
	int x = request_read_json(r, &body, &e);
	if (x == 0)
		x = apply_init(r, body, &e);
	json_decref(body);
	return x < 0 ? response_error(r, &e) : response_empty(r, 204);
}

static uint64_t memory_field(const char *text, const char *name)
{
	const char *line = strstr(text, name);
	return line ? strtoull(line + strlen(name), NULL, 10) * 1024 : 0;
}

/* Share of the time since the last call in which the CPUs were busy. */
static double cpu_used_percent(void)
{
	static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
	static unsigned long long last_total;
	static unsigned long long last_idle;
	unsigned long long v[8] = {0};
	CLEANUP_FREE char *text = NULL;
	if (fd_read_file(AT_FDCWD, "/proc/stat", 1 << 20, &text, NULL) < 0)
		return 0;
	if (sscanf(text, "cpu %llu %llu %llu %llu %llu %llu %llu %llu", &v[0], &v[1], &v[2], &v[3], &v[4], &v[5], &v[6],
	           &v[7]) < 4)
		return 0;
	unsigned long long total = 0;
	for (size_t i = 0; i < ARRAY_SIZE(v); i++)
		total += v[i];
	unsigned long long idle = v[3] + v[4];
	pthread_mutex_lock(&lock);
	double share = 0;
	if (total > last_total && idle >= last_idle)
		share = 100.0 * (1.0 - (double)(idle - last_idle) / (double)(total - last_total));
	last_total = total;
	last_idle = idle;
	pthread_mutex_unlock(&lock);
	return share < 0 ? 0 : (double)(long)(share * 100 + 0.5) / 100;
}

static int serve_metrics(struct request *r)
{
	CLEANUP_FREE char *text = NULL;
	struct statvfs disk;
	if (fd_read_file(AT_FDCWD, "/proc/meminfo", 1 << 16, &text, NULL) < 0 || statvfs("/", &disk) < 0)
		return response_error_status(r, 500, "cannot read the kernel's figures");
	uint64_t total = memory_field(text, "MemTotal:");
	uint64_t available = memory_field(text, "MemAvailable:");
	uint64_t used = total > available ? total - available : 0;
	uint64_t disk_total = (uint64_t)disk.f_blocks * disk.f_frsize;
	uint64_t disk_free = (uint64_t)disk.f_bavail * disk.f_frsize;
	json_t *body = json_pack(
	    "{s:I,s:i,s:f,s:I,s:I,s:I,s:I,s:I,s:I,s:I}", "ts", (json_int_t)time(NULL), "cpu_count",
	    (int)sysconf(_SC_NPROCESSORS_ONLN), "cpu_used_pct", cpu_used_percent(), "mem_total_mib",
	    (json_int_t)(total / MIB), "mem_used_mib", (json_int_t)(used / MIB), "mem_total", (json_int_t)total, "mem_used",
	    (json_int_t)used, "mem_cache", (json_int_t)memory_field(text, "\nCached:"), "disk_used",
	    (json_int_t)(disk_total > disk_free ? disk_total - disk_free : 0), "disk_total", (json_int_t)disk_total);
	return response_json(r, 200, body);
}

const struct request_route init_routes[] = {
    {"GET", "/health", serve_health, 0},
    {"POST", "/init", serve_init, 1},
    {"GET", "/metrics", serve_metrics, 0},
    {"GET", "/envs", serve_envs, 0},
    {NULL, NULL, NULL, 0},
};
