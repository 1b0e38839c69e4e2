/* What an operator should know about this host, as a list of checks. */
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

#include "session/internal.h"
#include "session/spare.h"
#include "session/warm_pool.h"

#define FILES_WANTED 4096

static void add(json_t *checks, const char *name, const char *status, const char *text)
{
	json_array_append_new(checks, json_pack("{s:s, s:s, s:s}", "name", name, "status", status, "text", text));
}

static void add_helper(struct session_manager *m, json_t *checks)
{
	struct error e;
	CLEANUP_FREE char *lines = NULL;
	if (host_doctor(m->helper, &lines, &e) < 0) {
		add(checks, "helper", "fail", e.message);
		return;
	}
	char *rest = lines;
	for (char *line; (line = strsep(&rest, "\n"));) {
		char *name = strsep(&line, "\t");
		char *status = strsep(&line, "\t");
		if (name && status && line)
			add(checks, name, status, line);
	}
}

static void add_pool(struct session_manager *m, json_t *checks)
{
	char text[256];
	char free_text[24];
	char total_text[24];
	uint64_t total = 0;
	uint64_t free_bytes = 0;
	if (pool_space(&m->pool, &total, &free_bytes) < 0) {
		add(checks, "pool", "fail", "the pool's file system cannot be asked for its size");
		return;
	}
	text_format_size(free_text, sizeof(free_text), free_bytes);
	text_format_size(total_text, sizeof(total_text), total);
	text_format(text, sizeof(text), "%s: %s of %s free; %s", m->pool.path, free_text, total_text,
	            m->pool.reflink ? "snapshots are reflink clones" : "no reflinks: snapshots are sparse copies");
	add(checks, "pool", !m->pool.reflink || free_bytes < total / 20 ? "warn" : "ok", text);
}

static void add_counts(struct session_manager *m, json_t *checks)
{
	char text[256];
	struct error e;
	uint64_t sessions = 0;
	uint64_t snapshots = 0;
	uint64_t bytes = 0;
	if (store_check(m->store, &e) < 0 || store_session_count(m->store, &sessions, &e) < 0 ||
	    store_snapshot_totals(m->store, &snapshots, &bytes, &e) < 0) {
		add(checks, "database", "fail", e.message);
		return;
	}
	char size[24];
	text_format_size(size, sizeof(size), bytes);
	text_format(text, sizeof(text), "whole; %llu sessions of at most %u, %llu snapshots with %s",
	            (unsigned long long)sessions, m->config.sessions_max, (unsigned long long)snapshots, size);
	add(checks, "database", "ok", text);
	pthread_mutex_lock(&m->mutex);
	unsigned sandboxes = m->sandboxes;
	pthread_mutex_unlock(&m->mutex);
	text_format(text, sizeof(text), "%u of at most %u, %u of them in the warm pool (size %u), %u spare VMMs (of %u)",
	            sandboxes, m->config.sandboxes_max, warm_pool_ready(m), m->config.pool_size, spare_ready(m),
	            m->config.spares);
	add(checks, "sandboxes", sandboxes < m->config.sandboxes_max ? "ok" : "warn", text);
}

static void add_default_template(struct session_manager *m, json_t *checks)
{
	char text[512];
	struct error e;
	struct store_template template;
	const char *accel = m->host.accel == VMM_ACCEL_KVM ? "kvm" : "tcg";
	if (store_template_find(m->store, SESSION_TEMPLATE_DEFAULT, &template, &e) < 0) {
		add(checks, "default template", "warn", "there is none; build it with: space template build default");
		return;
	}
	if (strcmp(template.engine, m->host.engine) != 0 || strcmp(template.engine_version, m->host.version) != 0 ||
	    strcmp(template.accel, accel) != 0) {
		text_format(
		    text, sizeof(text),
		    "%s:%s was made by %s %s with %s and does not load here; build it anew with: space template build default",
		    template.name, template.tag, template.engine, template.engine_version, template.accel);
		add(checks, "default template", "warn", text);
	} else {
		text_format(text, sizeof(text), "%s:%s, %.19s…", template.name, template.tag, template.digest);
		add(checks, "default template", "ok", text);
	}
	store_template_clear(&template);
}

int session_doctor(struct session_manager *m, json_t **ret, struct error *e)
{
	json_t *checks = json_array();
	char text[512];
	text_format(text, sizeof(text), "%s %s: %s", m->host.engine, m->host.version, m->host_why);
	add(checks, "engine", m->host.accel == VMM_ACCEL_KVM ? "ok" : "warn", text);
	add_helper(m, checks);
	add_pool(m, checks);
	add_counts(m, checks);
	struct rlimit files;
	if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
		text_format(text, sizeof(text), "%llu open files allowed", (unsigned long long)files.rlim_cur);
		add(checks, "descriptors", files.rlim_cur >= FILES_WANTED ? "ok" : "warn", text);
	}
	add_default_template(m, checks);
	*ret = json_pack("{s:o}", "checks", checks);
	return *ret ? 0 : error_set(e, ERROR_EXHAUSTED, "no memory");
}
