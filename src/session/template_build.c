/*
 * Building a template: root file system (made by the helper), first boot, commands, warming, and the one snapshot that
 * every session of the template starts from.
 *
 * The guest boots from a sandbox folder like any other, with an empty memory file as its base; what it has in memory
 * when it is quiesced becomes the template's memory file. Nothing is left of a build that fails.
 */
#include <errno.h>
#include <fcntl.h>
#include <openssl/evp.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/log.h"
#include "http/json.h"
#include "session/capture.h"
#include "session/hot_pages.h"
#include "session/internal.h"
#include "session/params.h"
#include "session/seal.h"
#include "session/warm_pool.h"

#define BUILD_PACKAGES_MAX 256
#define BUILD_COMMANDS_MAX 64
#define BUILD_COMMAND_BYTES_MAX 8192
#define BUILD_COMMAND_TIMEOUT_MS (30 * 60 * 1000)
#define BUILD_BOOT_TIMEOUT_MS 120000
#define BUILD_BOOT_ATTEMPT_MS 2000
#define BUILD_MEMORY_DEFAULT (512 * MIB)
#define BUILD_MEMORY_MIN (128 * MIB)
#define BUILD_MEMORY_MAX (64 * GIB)
#define BUILD_SIZE_DEFAULT (4 * GIB)
#define BUILD_SIZE_MIN (1 * GIB)
#define BUILD_SIZE_MAX (1024 * GIB)
#define BUILD_VCPUS_MAX 64
#define BUILD_CONSOLE_LINES 20

/* What those who work in a session expect to find; --packages come on top. */
static const char *const default_packages[] = {
    "bash", "ca-certificates", "coreutils", "curl",    "findutils", "git",  "iproute2", "jq",  "less",
    "nano", "openssl",         "procps",    "python3", "sqlite3",   "sudo", "unzip",    "zip",
};

/* Run before the snapshot, so that what sessions do first is in memory and translated already. A missing program is no
 * error. */
static const char warm_commands[] =
    "for i in 1 2; do"
    " (bash -lc true; sh -c 'ls / | wc -l'; python3 -c 'import json, os, sys, subprocess'; git --version;"
    " su user -c true) > /dev/null 2>&1 || true; done";

struct build {
	struct session_manager *m;
	char name[STORE_NAME_BYTES];
	char tag[STORE_NAME_BYTES];
	json_t *packages; /* all of them */
	json_t *run;      /* borrowed, may be NULL */
	uint64_t size_bytes;
	uint64_t memory_bytes;
	uint64_t vcpus;
	struct sandbox *sandbox;
	char digest[STORE_DIGEST_BYTES];
	void (*progress)(void *context, const char *line);
	void *context;
	uint64_t started_ms;
};

static void tell(struct build *b, const char *format, ...) PRINTF_LIKE(2, 3);
static void tell(struct build *b, const char *format, ...)
{
	char line[512];
	va_list args;
	va_start(args, format);
	vsnprintf(line, sizeof(line), format, args);
	va_end(args);
	if (b->progress)
		b->progress(b->context, line);
}

static int read_name(const json_t *params, struct build *b, struct error *e)
{
	const char *name;
	int r = json_read_string(params, "name", STORE_TEMPLATE_NAME_BYTES - 1, &name, e);
	if (r == 0)
		return error_set(e, ERROR_INVALID, "name: say what to call the template");
	if (r < 0)
		return r;
	const char *colon = strchr(name, ':');
	size_t length = colon ? (size_t)(colon - name) : strlen(name);
	char base[STORE_TEMPLATE_NAME_BYTES];
	memcpy(base, name, length);
	base[length] = '\0';
	r = params_check_name(base, "template name", e);
	if (r == 0)
		r = params_check_name(colon ? colon + 1 : "latest", "template tag", e);
	if (r == 0)
		r = text_copy(b->name, sizeof(b->name), base);
	return r < 0 ? r : text_copy(b->tag, sizeof(b->tag), colon ? colon + 1 : "latest");
}

static int read_packages(const json_t *params, struct build *b, struct error *e)
{
	json_t *given = NULL;
	int r = json_read_string_array(params, "packages", BUILD_PACKAGES_MAX, 128, &given, e);
	if (r < 0)
		return r;
	/* As an object first: sorted and without repeats, so that the order they were given in makes no difference. */
	json_t *set = json_object();
	for (size_t i = 0; i < ARRAY_SIZE(default_packages); i++)
		json_object_set_new(set, default_packages[i], json_true());
	size_t at;
	json_t *item;
	if (given)
		json_array_foreach(given, at, item) json_object_set_new(set, json_string_value(item), json_true());
	CLEANUP_FREE char *text = json_dumps(set, JSON_COMPACT | JSON_SORT_KEYS);
	json_decref(set);
	set = text ? json_loads(text, 0, NULL) : NULL;
	b->packages = json_array();
	const char *key;
	json_object_foreach(set, key, item) json_array_append_new(b->packages, json_string(key));
	json_decref(set);
	return json_array_size(b->packages) ? 0 : error_set_errno(e, ENOMEM, "packages");
}

static int read_params(const json_t *params, struct build *b, struct error *e)
{
	static const char *const fields[] = {"name", "packages", "run", "size_bytes", "memory_bytes", "vcpus", NULL};
	b->size_bytes = BUILD_SIZE_DEFAULT;
	b->memory_bytes = BUILD_MEMORY_DEFAULT;
	b->vcpus = 1;
	int r = json_check_fields(params, fields, e);
	if (r >= 0)
		r = read_name(params, b, e);
	if (r >= 0)
		r = json_read_string_array(params, "run", BUILD_COMMANDS_MAX, BUILD_COMMAND_BYTES_MAX, &b->run, e);
	if (r >= 0)
		r = json_read_u64(params, "size_bytes", BUILD_SIZE_MIN, BUILD_SIZE_MAX, &b->size_bytes, e);
	if (r >= 0)
		r = json_read_u64(params, "memory_bytes", BUILD_MEMORY_MIN, BUILD_MEMORY_MAX, &b->memory_bytes, e);
	if (r >= 0)
		r = json_read_u64(params, "vcpus", 1, BUILD_VCPUS_MAX, &b->vcpus, e);
	if (r >= 0 && b->memory_bytes % MIB)
		r = error_set(e, ERROR_INVALID, "memory_bytes must be whole MiB");
	if (r >= 0 && b->size_bytes % MIB)
		r = error_set(e, ERROR_INVALID, "size_bytes must be whole MiB");
	return r < 0 ? r : read_packages(params, b, e);
}

/* A sandbox folder with an empty memory file and an empty disk. */
static int make_files(struct build *b, struct error *e)
{
	struct session_manager *m = b->m;
	struct sandbox *sandbox = b->sandbox;
	sandbox->folder_fd = pool_make(&m->pool, POOL_SANDBOXES, sandbox->row.id, e);
	if (sandbox->folder_fd < 0)
		return sandbox->folder_fd;
	CLEANUP_CLOSE int memory = pool_create_file(sandbox->folder_fd, "memory", e);
	if (memory < 0)
		return memory;
	if (ftruncate(memory, (off_t)b->memory_bytes) < 0)
		return error_set_errno(e, errno, "empty memory file");
	sandbox->memory_fd = pool_open_file(sandbox->folder_fd, "memory", O_RDONLY, e);
	if (sandbox->memory_fd < 0)
		return sandbox->memory_fd;
	sandbox->disk_fd = pool_create_file(sandbox->folder_fd, "disk", e);
	if (sandbox->disk_fd < 0)
		return sandbox->disk_fd;
	if (mkdirat(m->runtime_fd, sandbox->row.id, 0700) < 0)
		return error_set_errno(e, errno, "making %s/%s", m->runtime_path, sandbox->row.id);
	return 0;
}

static int build_image(struct build *b, int kernel_fd, int initrd_fd, struct error *e)
{
	struct session_manager *m = b->m;
	if (!m->config.agent_path)
		return error_set(e, ERROR_UNSUPPORTED, "this daemon was not told where the guest agent is");
	CLEANUP_CLOSE int agent = open(m->config.agent_path, O_RDONLY | O_CLOEXEC);
	if (agent < 0)
		return error_set_errno(e, errno, "guest agent %s", m->config.agent_path);
	const char *packages[BUILD_PACKAGES_MAX + ARRAY_SIZE(default_packages) + 1] = {0};
	size_t at;
	json_t *item;
	json_array_foreach(b->packages, at, item) packages[at] = json_string_value(item);
	struct host_image_spec spec = {.packages = packages,
	                               .size_bytes = b->size_bytes,
	                               .agent_fd = agent,
	                               .disk_fd = b->sandbox->disk_fd,
	                               .kernel_fd = kernel_fd,
	                               .initrd_fd = initrd_fd};
	return host_image_build(m->helper, &spec, b->progress, b->context, e);
}

static void digest_text(EVP_MD_CTX *context, const char *text)
{
	EVP_DigestUpdate(context, text, strlen(text) + 1);
}

/*
 * SHA-256 of everything that makes the template what it is: the image, by the offset and bytes of each 64 KiB block
 * that is not zero (so holes do not matter), then the sizes and the commands.
 */
static int make_digest(struct build *b, struct error *e)
{
	EVP_MD_CTX *context = EVP_MD_CTX_new();
	CLEANUP_FREE char *block = malloc(SEAL_BLOCK_BYTES);
	int r = context && block && EVP_DigestInit_ex(context, EVP_sha256(), NULL) == 1
	            ? 0
	            : error_set_errno(e, ENOMEM, "digest of the image");
	off_t at = 0;
	while (r == 0 && (uint64_t)at < b->size_bytes) {
		off_t data = lseek(b->sandbox->disk_fd, at, SEEK_DATA);
		if (data < 0)
			break;
		at = data / SEAL_BLOCK_BYTES * SEAL_BLOCK_BYTES;
		ssize_t n = fd_pread_full(b->sandbox->disk_fd, block, SEAL_BLOCK_BYTES, at);
		if (n <= 0) {
			r = n < 0 ? error_set_errno(e, (int)n, "digest of the image") : 0;
			break;
		}
		if (block[0] || memcmp(block, block + 1, (size_t)n - 1) != 0) {
			char head[32];
			text_format(head, sizeof(head), "%llu", (unsigned long long)at);
			digest_text(context, head);
			EVP_DigestUpdate(context, block, (size_t)n);
		}
		at += n;
	}
	char sizes[96];
	text_format(sizes, sizeof(sizes), "size %llu memory %llu vcpus %llu", (unsigned long long)b->size_bytes,
	            (unsigned long long)b->memory_bytes, (unsigned long long)b->vcpus);
	if (r == 0) {
		size_t i;
		json_t *command;
		digest_text(context, sizes);
		if (b->run)
			json_array_foreach(b->run, i, command) digest_text(context, json_string_value(command));
		unsigned char digest[EVP_MAX_MD_SIZE];
		unsigned size = 0;
		if (EVP_DigestFinal_ex(context, digest, &size) != 1)
			r = error_set(e, ERROR_INTERNAL, "digest of the image");
		memcpy(b->digest, "sha256:", 7);
		text_hex(b->digest + 7, digest, 32);
	}
	EVP_MD_CTX_free(context);
	return r;
}

/* Puts what the guest said last behind the error. */
static int with_console(struct build *b, int r, struct error *e)
{
	CLEANUP_BUF struct buf console = {0};
	struct error ignored;
	if (r >= 0 || !e || !b->sandbox->vmm || vmm_console_tail(b->sandbox->vmm, &console, &ignored) < 0 || !console.size)
		return r;
	char *start = console.data + console.size;
	int lines = 0;
	while (start > console.data && lines < BUILD_CONSOLE_LINES)
		if (*--start == '\n')
			lines++;
	tell(b, "last lines of the guest's console:");
	for (char *line; (line = strsep(&start, "\n"));) {
		for (char *p = line; *p; p++)
			if ((unsigned char)*p < 32 || (unsigned char)*p > 126)
				*p = ' ';
		if (*line)
			tell(b, "  %s", line);
		if (*line && strlen(line) > 3)
			text_format(ignored.message, sizeof(ignored.message), "%.200s", line);
	}
	size_t used = strlen(e->message);
	snprintf(e->message + used, sizeof(e->message) - used, "; the guest's console ends with: %s", ignored.message);
	return r;
}

static int wait_for_agent(struct build *b, struct error *e)
{
	struct sandbox *sandbox = b->sandbox;
	uint64_t end = time_monotonic_ms() + BUILD_BOOT_TIMEOUT_MS;
	for (;;) {
		struct guest_status status;
		int r = guest_status_get(&sandbox->guest, sandbox->row.control_token, BUILD_BOOT_ATTEMPT_MS, &status, e);
		if (r == 0)
			return 0;
		struct pollfd ended = {.fd = vmm_pidfd(sandbox->vmm), .events = POLLIN};
		if (poll(&ended, 1, 0) != 0)
			return error_set(e, ERROR_UNAVAILABLE, "the guest ended while it booted (%s)",
			                 vmm_exit_name(vmm_exit_reason(sandbox->vmm)));
		if (time_monotonic_ms() > end)
			return error_prefix(e, "the guest's agent does not answer %d s after the start",
			                    BUILD_BOOT_TIMEOUT_MS / 1000);
	}
}

static int boot(struct build *b, int kernel_fd, int initrd_fd, struct error *e)
{
	struct session_manager *m = b->m;
	struct sandbox *sandbox = b->sandbox;
	char runtime[640];
	char command_line[TOKEN_BYTES + 32];
	text_format(runtime, sizeof(runtime), "%s/%s", m->runtime_path, sandbox->row.id);
	text_format(command_line, sizeof(command_line), "space.control=%s", sandbox->row.control_token);
	struct vmm_config config = {.sandbox_id = sandbox->row.id,
	                            .runtime_dir = runtime,
	                            .memory_bytes = b->memory_bytes,
	                            .vcpus = (unsigned)b->vcpus,
	                            .memory_fd = sandbox->memory_fd,
	                            .disk_fd = sandbox->disk_fd,
	                            .kernel_fd = kernel_fd,
	                            .initrd_fd = initrd_fd,
	                            .kernel_command_line = command_line,
	                            .console_fd = -1};
	int r = vmm_boot(&m->host, &config, &sandbox->vmm, e);
	return r < 0 ? r : with_console(b, wait_for_agent(b, e), e);
}

static int run_commands(struct build *b, struct error *e)
{
	size_t i;
	json_t *command;
	if (!b->run)
		return 0;
	json_array_foreach(b->run, i, command)
	{
		tell(b, "run: %.200s", json_string_value(command));
		int r = guest_run(&b->sandbox->guest, json_string_value(command), BUILD_COMMAND_TIMEOUT_MS, b->progress,
		                  b->context, e);
		if (r < 0)
			return with_console(b, error_prefix(e, "command %zu (%.80s)", i + 1, json_string_value(command)), e);
	}
	return 0;
}

static int warm_and_stop(struct build *b, struct error *e)
{
	struct sandbox *sandbox = b->sandbox;
	struct guest_status status;
	const char *token = sandbox->row.control_token;
	int r = guest_run(&sandbox->guest, warm_commands, BUILD_BOOT_TIMEOUT_MS, NULL, NULL, e);
	if (r == 0)
		r = guest_call(&sandbox->guest, token, "POST", "/space/v1/warm", NULL, GUEST_START_TIMEOUT_MS, NULL, e);
	if (r == 0)
		r = guest_call(&sandbox->guest, token, "POST", "/space/v1/sync", NULL, BUILD_BOOT_TIMEOUT_MS, NULL, e);
	if (r == 0)
		r = guest_quiesce(&sandbox->guest, token, GUEST_START_TIMEOUT_MS, &status, e);
	if (r < 0)
		return with_console(b, r, e);
	/* No connection of ours in the guest's memory. */
	guest_close(&sandbox->guest);
	usleep(50000);
	return vmm_stop(sandbox->vmm, e);
}

static int commit(struct build *b, const char *id, const struct capture_result *result, uint64_t created_at_ms,
                  json_t **ret, struct error *e)
{
	struct session_manager *m = b->m;
	struct store_template row = {.vcpus = b->vcpus,
	                             .memory_bytes = b->memory_bytes,
	                             .disk_bytes = b->size_bytes,
	                             .bytes_stored = result->bytes_stored,
	                             .created_at_ms = created_at_ms};
	text_copy(row.id, sizeof(row.id), id);
	memcpy(row.name, b->name, sizeof(row.name));
	memcpy(row.tag, b->tag, sizeof(row.tag));
	memcpy(row.digest, b->digest, sizeof(row.digest));
	memcpy(row.control_token, b->sandbox->row.control_token, sizeof(row.control_token));
	text_copy(row.engine, sizeof(row.engine), m->host.engine);
	text_copy(row.engine_version, sizeof(row.engine_version), m->host.version);
	text_copy(row.accel, sizeof(row.accel), m->host.accel == VMM_ACCEL_KVM ? "kvm" : "tcg");
	memcpy(row.manifest_sum, result->manifest_sum, sizeof(row.manifest_sum));
	memcpy(row.fingerprint, result->fingerprint, sizeof(row.fingerprint));
	memcpy(row.boot_id, m->boot_id, sizeof(row.boot_id));
	row.packages = json_dumps(b->packages, JSON_COMPACT);
	row.run = b->run ? json_dumps(b->run, JSON_COMPACT) : strdup("[]");
	int r = row.packages && row.run ? store_begin(m->store, STORE_DURABLE, e) : error_set_errno(e, ENOMEM, "template");
	if (r == 0) {
		r = store_template_insert(m->store, &row, e);
		if (r == 0)
			r = store_commit(m->store, e);
		else
			store_rollback(m->store);
	}
	if (r == 0 && template_json(&row, ret) < 0)
		r = error_set_errno(e, ENOMEM, "template");
	store_template_clear(&row);
	return r;
}

static int cut(struct build *b, json_t **ret, struct error *e)
{
	struct session_manager *m = b->m;
	struct sandbox *sandbox = b->sandbox;
	struct capture capture;
	struct capture_result result;
	static const struct capture_source nothing = {.folder_fd = -1};
	struct capture_clones clones = {.memory_fd = -1, .table_fd = -1};
	int r = capture_open(m, sandbox, 't', &capture, e);
	if (r < 0)
		return r;
	r = capture_take(m, sandbox, CAPTURE_STOPPED, &capture, e);
	if (r == 0)
		r = capture_clone(m, capture.id, sandbox, &nothing, &clones, e);
	if (r == 0)
		r = capture_write(m, &capture, sandbox, &nothing, &clones, POOL_TEMPLATES, "template", "", &result, e);
	if (r == 0) {
		r = commit(b, capture.id, &result, capture.created_at_ms, ret, e);
		if (r < 0)
			pool_remove(&m->pool, POOL_TEMPLATES, capture.id);
	}
	capture_clones_close(&clones);
	capture_close(m, &capture);
	return r;
}

static unsigned seconds(struct build *b)
{
	uint64_t now = time_monotonic_ms();
	unsigned spent = (unsigned)((now - b->started_ms + 500) / 1000);
	b->started_ms = now;
	return spent;
}

/* Restores are quicker with it and work without. Where files cannot be cloned, their copies are in the page cache. */
static void measure(struct build *b)
{
	if (!b->m->pool.reflink)
		return;
	struct store_template template;
	struct error e;
	char name[STORE_NAME_BYTES * 2];
	text_format(name, sizeof(name), "%s:%s", b->name, b->tag);
	int r = store_template_find(b->m->store, name, &template, &e);
	if (r == 0) {
		r = hot_pages_record(b->m, &template, &e);
		store_template_clear(&template);
	}
	if (r < 0)
		log_warning("session", "template %s: its first pages are not known: %s", name, e.message);
	else
		tell(b, "restored once and measured (%u s)", seconds(b));
}

static int build_in_sandbox(struct build *b, json_t **ret, struct error *e)
{
	int r = make_files(b, e);
	if (r < 0)
		return r;
	CLEANUP_CLOSE int kernel = pool_create_file(b->sandbox->folder_fd, "kernel", e);
	if (kernel < 0)
		return kernel;
	CLEANUP_CLOSE int initrd = pool_create_file(b->sandbox->folder_fd, "initrd", e);
	if (initrd < 0)
		return initrd;
	r = build_image(b, kernel, initrd, e);
	if (r < 0)
		return error_prefix(e, "building the root file system");
	tell(b, "root file system built (%u s)", seconds(b));
	r = make_digest(b, e);
	if (r < 0)
		return r;
	tell(b, "digest %s (%u s)", b->digest, seconds(b));
	r = boot(b, kernel, initrd, e);
	if (r < 0)
		return error_prefix(e, "first boot");
	tell(b, "guest booted (%u s)", seconds(b));
	r = run_commands(b, e);
	if (r == 0)
		r = warm_and_stop(b, e);
	if (r < 0)
		return r;
	tell(b, "guest warmed and stopped (%u s)", seconds(b));
	r = cut(b, ret, e);
	if (r < 0)
		return error_prefix(e, "keeping the guest's snapshot");
	tell(b, "snapshot committed (%u s)", seconds(b));
	measure(b);
	return 0;
}

int template_build(struct session_manager *m, const struct session_caller *who, const json_t *params,
                   void (*progress)(void *context, const char *line), void *context, json_t **ret, struct error *e)
{
	struct build b = {.m = m, .progress = progress, .context = context, .started_ms = time_monotonic_ms()};
	if (!who->is_admin)
		return error_set(e, ERROR_FORBIDDEN, "only an admin may build templates");
	int r = read_params(params, &b, e);
	if (r < 0) {
		json_decref(b.packages);
		return r;
	}
	if (pthread_mutex_trylock(&m->build_mutex) != 0) {
		tell(&b, "waiting for another build to end");
		pthread_mutex_lock(&m->build_mutex);
		seconds(&b);
	}
	struct base none = {.folder_fd = -1, .vcpus = b.vcpus, .memory_bytes = b.memory_bytes, .disk_bytes = b.size_bytes};
	r = sandbox_new(m, &none, &b.sandbox, e);
	if (r == 0)
		r = build_in_sandbox(&b, ret, e);
	sandbox_destroy(m, b.sandbox);
	pthread_mutex_unlock(&m->build_mutex);
	json_decref(b.packages);
	if (r < 0)
		return error_prefix(e, "template %s:%s", b.name, b.tag);
	warm_pool_refresh(m);
	return 0;
}
