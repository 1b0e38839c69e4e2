/* Events: told after what they tell of has been committed. Numbers rise across restarts, since they start from time. */
#include "session/internal.h"

void session_set_event_sink(struct session_manager *m, void (*sink)(void *context, const json_t *event), void *context)
{
	m->sink_context = context;
	m->sink = sink;
}

void event_session(struct session_manager *m, const char *type, const struct store_session *row, json_t *extra)
{
	if (!m->sink) {
		json_decref(extra);
		return;
	}
	char when[32];
	time_format_rfc3339(when, sizeof(when), time_realtime_ms());
	json_t *event = json_pack("{s:I, s:s, s:s, s:s, s:s, s:s, s:s}", "id",
	                          (json_int_t)atomic_fetch_add(&m->event_id, 1), "type", type, "time", when, "session_id",
	                          row->id, "tenant", row->tenant, "state", row->state, "template", row->template_name);
	if (event) {
		if (row->name[0])
			json_object_set_new(event, "name", json_string(row->name));
		if (row->reason[0])
			json_object_set_new(event, "reason", json_string(row->reason));
		json_object_update(event, extra);
		m->sink(m->sink_context, event);
	}
	json_decref(event);
	json_decref(extra);
}
