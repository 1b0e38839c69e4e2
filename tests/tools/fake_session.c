/*
 * A session manager in memory, for tests of the HTTP server and the proxy: sessions have states but no sandboxes; ways
 * into a guest lead to the address in TEST_AGENT (127.0.0.1:PORT), where the test plays the agent.
 *
 * Usage: spaced-protocol [the flags of spaced]. Keys: the environment's TEST_KEYS, "KEY=TENANT[:admin],…".
 */
#include <errno.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "api/worker.h"
#include "base/buf.h"
#include "base/log.h"
#include "http/json.h"
#include "session/session.h"

struct session_manager {
	pthread_mutex_t mutex;
	json_t *sessions; /* id → object */
	json_t *templates;
	json_t *keys;
	uint64_t event_id;
	int open_claims;
	void (*sink)(void *context, const json_t *event);
	void *sink_context;
};

static const char *const verb_names[SESSION_VERB_COUNT] = {"pause",    "resume", "suspend", "wake",   "connect",
                                                           "snapshot", "branch", "rewind",  "delete", "update"};

const char *session_verb_name(enum session_verb verb)
{
	return verb_names[verb];
}

int session_verb_from_name(const char *name)
{
	for (int i = 0; i < SESSION_VERB_COUNT; i++) {
		if (!strcmp(verb_names[i], name))
			return i;
	}
	return -EINVAL;
}

int session_manager_new(const struct session_config *config, struct session_manager **ret, struct error *e)
{
	struct session_manager *m = calloc(1, sizeof(*m));
	pthread_mutex_init(&m->mutex, NULL);
	m->sessions = json_object();
	m->templates = json_object();
	m->keys = json_object();
	*ret = m;
	return 0;
}

void session_manager_free(struct session_manager *m)
{
	fprintf(stderr, "claims left open: %d\n", m->open_claims);
	json_decref(m->sessions);
	json_decref(m->templates);
	json_decref(m->keys);
	free(m);
}

static void lock(struct session_manager *m)
{
	pthread_mutex_lock(&m->mutex);
}

static void unlock(struct session_manager *m)
{
	pthread_mutex_unlock(&m->mutex);
}

void session_set_event_sink(struct session_manager *m, void (*sink)(void *context, const json_t *event), void *context)
{
	lock(m);
	m->sink = sink;
	m->sink_context = context;
	unlock(m);
}

/* With the lock held. */
static void publish(struct session_manager *m, const char *type, const json_t *session)
{
	json_t *event = json_pack("{s:I,s:s,s:I,s:O,s:O,s:O}", "id", (json_int_t)++m->event_id, "type", type, "time",
	                          (json_int_t)time_realtime_ms(), "session_id", json_object_get(session, "id"), "tenant",
	                          json_object_get(session, "tenant"), "state", json_object_get(session, "state"));
	if (m->sink)
		m->sink(m->sink_context, event);
	json_decref(event);
}

static void set_state(struct session_manager *m, json_t *session, const char *state)
{
	char type[64];
	snprintf(type, sizeof(type), "session.%s", state);
	json_object_set_new(session, "state", json_string(state));
	publish(m, type, session);
}

static json_t *find(struct session_manager *m, const struct session_caller *who, const char *id, struct error *e)
{
	json_t *s = json_object_get(m->sessions, id);
	if (!s || (!who->is_admin && strcmp(json_string_value(json_object_get(s, "tenant")), who->tenant) != 0)) {
		error_set(e, ERROR_NOT_FOUND, "there is no session %s", id);
		return NULL;
	}
	return s;
}

int session_create(struct session_manager *m, const struct session_caller *who, const json_t *params, json_t **ret,
                   struct error *e)
{
	static const char *const fields[] = {"name", "template", "labels", "private_ports", "timeout_s", NULL};
	const char *name = "";
	int private_ports = 1;
	if (json_check_fields(params, fields, e) < 0 || json_read_string(params, "name", 63, &name, e) < 0 ||
	    json_read_bool(params, "private_ports", &private_ports, e) < 0)
		return -EINVAL;
	char id[ID_BYTES], token[TOKEN_BYTES];
	id_make(id, 's');
	token_make(token);
	json_t *s = json_pack("{s:s,s:s,s:s,s:s,s:s,s:b,s:I}", "id", id, "name", name, "tenant", who->tenant, "state",
	                      "creating", "access_token", token, "private_ports", private_ports, "starts", (json_int_t)1);
	lock(m);
	json_object_set_new(m->sessions, id, s);
	publish(m, "session.creating", s);
	set_state(m, s, "running");
	*ret = json_deep_copy(s);
	unlock(m);
	return 0;
}

int session_do(struct session_manager *m, const struct session_caller *who, const char *id, enum session_verb verb,
               const json_t *params, json_t **ret, struct error *e)
{
	static const char *const states[SESSION_VERB_COUNT] = {
	    [SESSION_PAUSE] = "paused",  [SESSION_RESUME] = "running",  [SESSION_SUSPEND] = "suspended",
	    [SESSION_WAKE] = "running",  [SESSION_CONNECT] = "running", [SESSION_DELETE] = "deleting",
	    [SESSION_REWIND] = "running"};
	uint64_t delay_ms = 0;
	if (json_read_u64(params, "test_delay_ms", 0, 60000, &delay_ms, e) < 0)
		return -EINVAL;
	usleep((useconds_t)delay_ms * 1000);
	lock(m);
	json_t *s = find(m, who, id, e);
	if (s && json_is_true(json_object_get(params, "test_internal"))) {
		error_set(e, ERROR_INTERNAL, "/secret/path broke");
		s = NULL;
	}
	if (s && verb == SESSION_WAKE && !strcmp(json_string_value(json_object_get(s, "state")), "suspended")) {
		json_int_t generation = json_integer_value(json_object_get(s, "starts"));
		json_object_set_new(s, "starts", json_integer(generation + 1));
	}
	if (s && states[verb])
		set_state(m, s, states[verb]);
	if (s && verb == SESSION_BRANCH)
		*ret = json_pack("{s:[O]}", "sessions", s);
	else if (s && verb == SESSION_SNAPSHOT)
		*ret = json_pack("{s:s}", "id", "n0000000000000000000");
	else if (s && verb != SESSION_DELETE)
		*ret = json_deep_copy(s);
	if (s && verb == SESSION_DELETE)
		json_object_del(m->sessions, id);
	unlock(m);
	return s ? 0 : error_code_errno(e->code);
}

int session_get(struct session_manager *m, const struct session_caller *who, const char *id, json_t **ret,
                struct error *e)
{
	lock(m);
	json_t *s = find(m, who, id, e);
	if (s)
		*ret = json_deep_copy(s);
	unlock(m);
	return s ? 0 : -ENOENT;
}

int session_list(struct session_manager *m, const struct session_caller *who, const json_t *filter, json_t **ret,
                 struct error *e)
{
	json_t *list = json_array();
	const char *id;
	json_t *s;
	lock(m);
	json_object_foreach(m->sessions, id, s)
	{
		if (who->is_admin || !strcmp(json_string_value(json_object_get(s, "tenant")), who->tenant))
			json_array_append_new(list, json_deep_copy(s));
	}
	unlock(m);
	*ret = json_pack("{s:o,s:n}", "sessions", list, "next_cursor");
	return 0;
}

int session_history(struct session_manager *m, const struct session_caller *who, const char *id, json_t **ret,
                    struct error *e)
{
	lock(m);
	json_t *s = find(m, who, id, e);
	unlock(m);
	if (!s)
		return -ENOENT;
	*ret = json_pack("{s:n,s:[]}", "head", "snapshots");
	return 0;
}

int session_snapshot_delete(struct session_manager *m, const struct session_caller *who, const char *id,
                            const char *snapshot_id, struct error *e)
{
	return error_set(e, ERROR_NOT_FOUND, "there is no snapshot %s", snapshot_id);
}

int session_open(struct session_manager *m, const struct session_caller *who, const char *id, int wake,
                 struct session_endpoint *ret, struct error *e)
{
	const char *agent = getenv("TEST_AGENT");
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	address.sin_port = htons((uint16_t)strtoul(agent ? agent : "1", NULL, 10));
	lock(m);
	json_t *s = find(m, who, id, e);
	if (s) {
		char state[32];
		(void)text_copy(state, sizeof(state), json_string_value(json_object_get(s, "state")));
		if (!strcmp(state, "suspended")) {
			json_int_t generation = json_integer_value(json_object_get(s, "starts"));
			json_object_set_new(s, "starts", json_integer(generation + 1));
			set_state(m, s, "waking");
		}
		if (strcmp(state, "running") != 0)
			set_state(m, s, "running");
		*ret = (struct session_endpoint){.fd = -1};
		(void)text_copy(ret->session_id, sizeof(ret->session_id), id);
		(void)text_copy(ret->access_token, sizeof(ret->access_token),
		                json_string_value(json_object_get(s, "access_token")));
		m->open_claims++;
	}
	unlock(m);
	if (!s)
		return -ENOENT;
	ret->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (connect(ret->fd, (struct sockaddr *)&address, sizeof(address)) == 0)
		return 0;
	close(ret->fd);
	session_close(m, id);
	return error_set(e, ERROR_UNAVAILABLE, "the guest's agent does not answer");
}

void session_close(struct session_manager *m, const char *session_id)
{
	lock(m);
	m->open_claims--;
	unlock(m);
}

int template_build(struct session_manager *m, const struct session_caller *who, const json_t *params,
                   void (*progress)(void *context, const char *line), void *context, json_t **ret, struct error *e)
{
	const char *name = NULL;
	uint64_t lines = 3;
	int fails = 0;
	if (json_read_string(params, "name", 63, &name, e) < 0 ||
	    json_read_u64(params, "test_lines", 0, 1000000, &lines, e) < 0 ||
	    json_read_bool(params, "test_fails", &fails, e) < 0)
		return -EINVAL;
	if (!name)
		return error_set(e, ERROR_INVALID, "field \"name\" is missing");
	for (uint64_t i = 0; i < lines; i++) {
		char line[64];
		snprintf(line, sizeof(line), "step %llu", (unsigned long long)i);
		progress(context, line);
		if (lines < 10)
			usleep(20000);
	}
	if (fails)
		return error_set(e, ERROR_INTERNAL, "a step failed");
	*ret = json_pack("{s:s}", "name", name);
	lock(m);
	json_object_set(m->templates, name, *ret);
	unlock(m);
	return 0;
}

int template_list(struct session_manager *m, const struct session_caller *who, json_t **ret, struct error *e)
{
	json_t *list = json_array();
	const char *name;
	json_t *t;
	lock(m);
	json_object_foreach(m->templates, name, t)
	{
		json_array_append(list, t);
	}
	unlock(m);
	*ret = json_pack("{s:o}", "templates", list);
	return 0;
}

int template_get(struct session_manager *m, const struct session_caller *who, const char *name, json_t **ret,
                 struct error *e)
{
	lock(m);
	*ret = json_incref(json_object_get(m->templates, name));
	unlock(m);
	return *ret ? 0 : error_set(e, ERROR_NOT_FOUND, "there is no template %s", name);
}

int template_delete(struct session_manager *m, const struct session_caller *who, const char *name, struct error *e)
{
	lock(m);
	int r = json_object_del(m->templates, name);
	unlock(m);
	return r == 0 ? 0 : error_set(e, ERROR_NOT_FOUND, "there is no template %s", name);
}

int key_create(struct session_manager *m, const struct session_caller *who, const json_t *params, json_t **ret,
               struct error *e)
{
	*ret = json_pack("{s:s,s:s}", "id", "k1", "key", "e2b_0000000000000000000000000000000000000000");
	return 0;
}

int key_list(struct session_manager *m, const struct session_caller *who, json_t **ret, struct error *e)
{
	*ret = json_pack("{s:[]}", "keys");
	return 0;
}

int key_delete(struct session_manager *m, const struct session_caller *who, const char *id, struct error *e)
{
	return error_set(e, ERROR_NOT_FOUND, "there is no key %s", id);
}

int key_authenticate(struct session_manager *m, const char *key, struct session_caller *ret, struct error *e)
{
	const char *all = getenv("TEST_KEYS");
	size_t size = strlen(key);
	for (const char *c = all ? all : ""; *c;) {
		size_t n = strcspn(c, ",");
		if (n > size && !strncmp(c, key, size) && c[size] == '=') {
			char value[64];
			(void)text_format(value, sizeof(value), "%.*s", (int)(n - size - 1), c + size + 1);
			char *admin = strstr(value, ":admin");
			ret->is_admin = admin != NULL;
			if (admin)
				*admin = '\0';
			return text_copy(ret->tenant, sizeof(ret->tenant), value);
		}
		c += n + (c[n] == ',');
	}
	return error_set(e, ERROR_UNAUTHENTICATED, "unknown API key");
}

int session_metrics(struct session_manager *m, struct buf *ret)
{
	lock(m);
	int claims = m->open_claims;
	unlock(m);
	return buf_printf(ret, "space_test_open_claims %d\n", claims);
}

int session_doctor(struct session_manager *m, json_t **ret, struct error *e)
{
	*ret = json_pack("{s:[]}", "checks");
	return 0;
}

int main(int argc, char **argv)
{
	struct config config;
	struct error e;
	if (config_load(&config, &argc, argv, &e) < 0) {
		log_error("spaced", "%s", e.message);
		return 2;
	}
	log_set_level(config.log_level);
	return worker_main(&config);
}
