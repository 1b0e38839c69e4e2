#include "session/params.h"

#include <errno.h>
#include <string.h>

#include "http/json.h"

#define LABEL_KEY_BYTES_MAX 64
#define LABEL_VALUE_BYTES_MAX 1024
#define ENVIRONMENT_KEY_BYTES_MAX 128
#define ENVIRONMENT_VALUE_BYTES_MAX 65536
#define SNAPSHOT_INTERVAL_S_MAX 86400

int params_has(const json_t *params, const char *field)
{
	return json_object_get(params, field) != NULL;
}

static int is_word(char c)
{
	return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
}

int params_check_name(const char *name, const char *what, struct error *e)
{
	size_t length = strlen(name);
	if (length == 0 || length >= STORE_NAME_BYTES)
		return error_set(e, ERROR_INVALID, "%s must have 1 to %d characters", what, STORE_NAME_BYTES - 1);
	for (size_t i = 0; i < length; i++)
		if (!is_word(name[i]) && (i == 0 || !strchr("._-", name[i])))
			return error_set(e, ERROR_INVALID,
			                 "%s \"%.64s\": only letters, digits, '.', '_' and '-' are allowed, the first a letter "
			                 "or digit",
			                 what, name);
	if (length == ID_RANDOM_CHARS + 1 && id_is_valid(name, name[0]))
		return error_set(e, ERROR_INVALID, "%s \"%s\" looks like an id", what, name);
	return 0;
}

int params_read_name(const json_t *params, char to[STORE_NAME_BYTES], int may_clear, struct error *e)
{
	const char *name;
	if (may_clear && json_is_null(json_object_get(params, "name"))) {
		to[0] = '\0';
		return 0;
	}
	int r = json_read_string(params, "name", STORE_NAME_BYTES - 1, &name, e);
	if (r <= 0)
		return r;
	if (!*name && may_clear) {
		to[0] = '\0';
		return 0;
	}
	r = params_check_name(name, "name", e);
	return r < 0 ? r : text_copy(to, STORE_NAME_BYTES, name);
}

static int store_map(const json_t *map, char **to, size_t bytes_max, const char *what, struct error *e)
{
	char *text = json_dumps(map, JSON_COMPACT | JSON_SORT_KEYS);
	if (!text)
		return error_set_errno(e, ENOMEM, "%s", what);
	if (strlen(text) > bytes_max) {
		free(text);
		return error_set(e, ERROR_TOO_LARGE, "%s take more than %zu bytes", what, bytes_max);
	}
	free(*to);
	*to = text;
	return 0;
}

static int read_labels(const json_t *params, struct store_session *row, struct error *e)
{
	json_t *labels;
	int r = json_read_string_map(params, "labels", SESSION_LABELS_MAX, LABEL_VALUE_BYTES_MAX, &labels, e);
	if (r <= 0)
		return r;
	const char *key;
	json_t *value;
	json_object_foreach(labels, key, value)
	{
		if (!*key || strlen(key) > LABEL_KEY_BYTES_MAX)
			return error_set(e, ERROR_INVALID, "labels: keys must have 1 to %d bytes", LABEL_KEY_BYTES_MAX);
	}
	return store_map(labels, &row->labels, SESSION_ENVIRONMENT_BYTES_MAX, "labels", e);
}

int params_read_environment(const json_t *params, struct store_session *row, int merge, struct error *e)
{
	json_t *given;
	int r =
	    json_read_string_map(params, "environment", SESSION_ENVIRONMENT_MAX, ENVIRONMENT_VALUE_BYTES_MAX, &given, e);
	if (r <= 0)
		return r;
	const char *key;
	json_t *value;
	json_object_foreach(given, key, value)
	{
		size_t length = strlen(key);
		if (length == 0 || length > ENVIRONMENT_KEY_BYTES_MAX)
			return error_set(e, ERROR_INVALID, "environment: names must have 1 to %d bytes", ENVIRONMENT_KEY_BYTES_MAX);
		for (size_t i = 0; i < length; i++)
			if (!(is_word(key[i]) || key[i] == '_') || (i == 0 && key[i] >= '0' && key[i] <= '9'))
				return error_set(e, ERROR_INVALID, "environment: \"%.64s\" is no name of a variable", key);
	}
	json_t *all = merge && row->environment ? json_loads(row->environment, 0, NULL) : NULL;
	if (!all)
		all = json_object();
	r = all && json_object_update(all, given) == 0 ? 0 : error_set_errno(e, ENOMEM, "environment");
	if (r == 0 && json_object_size(all) > SESSION_ENVIRONMENT_MAX)
		r = error_set(e, ERROR_TOO_LARGE, "environment: more than %d variables", SESSION_ENVIRONMENT_MAX);
	if (r == 0)
		r = store_map(all, &row->environment, SESSION_ENVIRONMENT_BYTES_MAX, "environment", e);
	json_decref(all);
	return r;
}

static int read_retention(const json_t *params, struct store_session *row, struct error *e)
{
	static const char *const fields[] = {"all_s", "hourly_s", "daily_s", NULL};
	json_t *retention;
	int r = json_read_object_field(params, "retention", ARRAY_SIZE(fields), &retention, e);
	if (r <= 0)
		return r;
	r = json_check_fields(retention, fields, e);
	if (r >= 0)
		r = json_read_u64(retention, "all_s", 0, SESSION_TIMEOUT_S_MAX, &row->keep_all_s, e);
	if (r >= 0)
		r = json_read_u64(retention, "hourly_s", 0, SESSION_TIMEOUT_S_MAX, &row->keep_hourly_s, e);
	if (r >= 0)
		r = json_read_u64(retention, "daily_s", 0, SESSION_TIMEOUT_S_MAX, &row->keep_daily_s, e);
	return r < 0 ? error_prefix(e, "retention") : 0;
}

int params_read_policy(const json_t *params, struct store_session *row, struct error *e)
{
	const char *action;
	int r = read_labels(params, row, e);
	if (r >= 0)
		r = json_read_u64(params, "timeout_s", 0, SESSION_TIMEOUT_S_MAX, &row->timeout_s, e);
	if (r >= 0)
		r = json_read_string(params, "on_timeout", 16, &action, e);
	if (r > 0) {
		if (strcmp(action, "suspend") != 0 && strcmp(action, "kill") != 0)
			return error_set(e, ERROR_INVALID, "on_timeout must be \"suspend\" or \"kill\", not \"%.16s\"", action);
		text_copy(row->on_timeout, sizeof(row->on_timeout), action);
	}
	if (r >= 0)
		r = json_read_u64(params, "snapshot_interval_s", 0, SNAPSHOT_INTERVAL_S_MAX, &row->snapshot_interval_s, e);
	if (r >= 0)
		r = read_retention(params, row, e);
	if (r >= 0)
		r = json_read_bool(params, "wake_on_use", &row->wake_on_use, e);
	return r < 0 ? r : 0;
}
