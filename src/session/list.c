/* Listing sessions: filters, pages, and the states that only live in memory. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "http/json.h"
#include "session/internal.h"

#define LIST_LIMIT_DEFAULT 100
#define LIST_LIMIT_MAX 1000
#define CURSOR_BYTES 64

struct live_state {
	char id[ID_BYTES];
	enum session_state state;
};

struct listing {
	struct session_manager *m;
	unsigned states; /* bits; 0 = all */
	json_t *labels;  /* borrowed; NULL = any */
	const char *name;
	size_t limit;
	struct live_state *live; /* sessions whose state differs from what is stored */
	size_t live_count;
	json_t *list;
	uint64_t last_ms;
	char last_id[ID_BYTES];
	int more;
};

static enum session_state state_of(const struct listing *l, const struct store_session *row)
{
	for (size_t i = 0; i < l->live_count; i++)
		if (strcmp(l->live[i].id, row->id) == 0)
			return l->live[i].state;
	int state = state_from_name(row->state);
	return state < 0 ? STATE_SUSPENDED : (enum session_state)state;
}

static int has_labels(json_t *wanted, const char *text)
{
	json_t *labels = json_loads(text, 0, NULL);
	const char *key;
	json_t *value;
	int ok = 1;
	json_object_foreach(wanted, key, value)
	{
		if (!json_equal(json_object_get(labels, key), value))
			ok = 0;
	}
	json_decref(labels);
	return ok;
}

static int visit(void *context, const struct store_session *row)
{
	struct listing *l = context;
	enum session_state state = state_of(l, row);
	if (l->states && !(l->states & 1u << state))
		return 0;
	if (l->name && strcmp(l->name, row->name) != 0)
		return 0;
	if (l->labels && !has_labels(l->labels, row->labels))
		return 0;
	if (json_array_size(l->list) == l->limit) {
		l->more = 1;
		return 1;
	}
	json_array_append_new(l->list, session_json(l->m, row, state, 0));
	l->last_ms = row->created_at_ms;
	memcpy(l->last_id, row->id, sizeof(l->last_id));
	return 0;
}

/* Before the store is walked: the order of locks forbids looking at entries meanwhile. */
static int note_live(struct session_manager *m, struct listing *l)
{
	int r = 0;
	size_t capacity = 0;
	pthread_mutex_lock(&m->mutex);
	for (size_t i = 0; i < SESSION_BUCKETS && r == 0; i++) {
		for (struct session *s = m->buckets[i]; s; s = s->next) {
			pthread_mutex_lock(&s->mutex);
			enum session_state state = s->state;
			pthread_mutex_unlock(&s->mutex);
			if (!state_is_transitional(state))
				continue;
			if (l->live_count == capacity) {
				capacity = capacity ? capacity * 2 : 16;
				struct live_state *more = realloc(l->live, capacity * sizeof(*more));
				if (!more) {
					r = -ENOMEM;
					break;
				}
				l->live = more;
			}
			memcpy(l->live[l->live_count].id, s->id, ID_BYTES);
			l->live[l->live_count++].state = state;
		}
	}
	pthread_mutex_unlock(&m->mutex);
	return r;
}

static int read_states(const json_t *filter, unsigned *ret, struct error *e)
{
	json_t *states;
	int r = json_read_string_array(filter, "state", STATE_COUNT * 2, 16, &states, e);
	if (r <= 0)
		return r;
	size_t i;
	json_t *item;
	json_array_foreach(states, i, item)
	{
		int state = state_from_name(json_string_value(item));
		if (state < 0)
			return error_set(e, ERROR_INVALID, "state: there is no state \"%.16s\"", json_string_value(item));
		*ret |= 1u << state;
	}
	return 0;
}

static int read_cursor(const json_t *filter, uint64_t *ret_ms, char ret_id[ID_BYTES], struct error *e)
{
	const char *cursor;
	int r = json_read_string(filter, "cursor", CURSOR_BYTES, &cursor, e);
	if (r <= 0)
		return r;
	const char *dash = strchr(cursor, '-');
	char number[24];
	if (!dash || (size_t)(dash - cursor) >= sizeof(number) || !id_is_valid(dash + 1, 's'))
		return error_set(e, ERROR_INVALID, "cursor: not one of ours");
	memcpy(number, cursor, (size_t)(dash - cursor));
	number[dash - cursor] = '\0';
	if (text_parse_u64(number, INT64_MAX, ret_ms) < 0)
		return error_set(e, ERROR_INVALID, "cursor: not one of ours");
	return text_copy(ret_id, ID_BYTES, dash + 1);
}

int session_list(struct session_manager *m, const struct session_caller *who, const json_t *filter, json_t **ret,
                 struct error *e)
{
	static const char *const fields[] = {"state", "labels", "name", "limit", "cursor", NULL};
	struct listing l = {.m = m, .list = json_array()};
	uint64_t limit = LIST_LIMIT_DEFAULT;
	uint64_t after_ms = 0;
	char after_id[ID_BYTES] = "";
	int r = filter ? json_check_fields(filter, fields, e) : 0;
	if (r >= 0 && filter)
		r = read_states(filter, &l.states, e);
	if (r >= 0 && filter)
		r = json_read_string_map(filter, "labels", SESSION_LABELS_MAX, 1024, &l.labels, e);
	if (r >= 0 && filter)
		r = json_read_string(filter, "name", STORE_NAME_BYTES - 1, &l.name, e);
	if (r >= 0 && filter)
		r = json_read_u64(filter, "limit", 1, LIST_LIMIT_MAX, &limit, e);
	if (r >= 0 && filter)
		r = read_cursor(filter, &after_ms, after_id, e);
	if (r >= 0) {
		l.limit = (size_t)limit;
		r = note_live(m, &l);
		if (r < 0)
			error_set_errno(e, r, "listing sessions");
	}
	if (r >= 0)
		r = store_session_each(m->store, who->is_admin ? NULL : who->tenant, after_ms, after_id, visit, &l, e);
	free(l.live);
	if (r < 0) {
		json_decref(l.list);
		return r;
	}
	char cursor[CURSOR_BYTES];
	text_format(cursor, sizeof(cursor), "%llu-%s", (unsigned long long)l.last_ms, l.last_id);
	*ret = json_pack("{s:o, s:o}", "sessions", l.list, "next_cursor", l.more ? json_string(cursor) : json_null());
	return *ret ? 0 : error_set_errno(e, ENOMEM, "listing sessions");
}
