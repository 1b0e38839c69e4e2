/* Routes of sessions and their snapshots. The session room checks fields and states; here query becomes filter. */
#include <errno.h>
#include <string.h>

#include "api/router.h"
#include "base/text.h"

static int list(struct api_call *call, struct error *e)
{
	json_t *filter = json_object();
	const char *name;
	json_t *value;
	int r = filter ? 0 : error_set_errno(e, ENOMEM, "filter");
	json_object_foreach(call->query, name, value)
	{
		const char *text = json_string_value(value);
		uint64_t number;
		if (r < 0)
			break;
		if (!strcmp(name, "state")) {
			json_t *states = text ? json_array() : json_incref(value);
			/* state=a,b as well as state=a&state=b */
			for (const char *c = text; c && *c;) {
				size_t size = strcspn(c, ",");
				if (size)
					json_array_append_new(states, json_stringn(c, size));
				c += size + (c[size] == ',');
			}
			json_object_set_new(filter, name, states);
		} else if (!strcmp(name, "label")) {
			json_t *labels = json_object();
			size_t count = text ? 1 : json_array_size(value);
			for (size_t i = 0; i < count && r == 0; i++) {
				const char *pair = text ? text : json_string_value(json_array_get(value, i));
				const char *equal = strchr(pair, '=');
				if (!equal || equal == pair)
					r = error_set(e, ERROR_INVALID, "query parameter \"label\" must be KEY=VALUE");
				else
					json_object_setn_new_nocheck(labels, pair, (size_t)(equal - pair), json_string(equal + 1));
			}
			json_object_set_new(filter, "labels", labels);
		} else if (!strcmp(name, "limit")) {
			if (!text || text_parse_u64(text, 1000, &number) < 0 || number == 0)
				r = error_set(e, ERROR_INVALID, "query parameter \"limit\" must be a number from 1 to 1000");
			else
				json_object_set_new(filter, name, json_integer((json_int_t)number));
		} else if (text && (!strcmp(name, "name") || !strcmp(name, "cursor"))) {
			json_object_set(filter, name, value);
		} else {
			r = error_set(e, ERROR_INVALID, "unknown or repeated query parameter \"%.64s\"", name);
		}
	}
	if (r == 0)
		r = session_list(call->api->manager, &call->caller, filter, &call->answer, e);
	json_decref(filter);
	return r;
}

static int create(struct api_call *call, struct error *e)
{
	call->status = 201;
	return session_create(call->api->manager, &call->caller, call->body, &call->answer, e);
}

static int get(struct api_call *call, struct error *e)
{
	return session_get(call->api->manager, &call->caller, call->parameters[0], &call->answer, e);
}

static int verb(struct api_call *call, enum session_verb verb, const json_t *parameters, struct error *e)
{
	return session_do(call->api->manager, &call->caller, call->parameters[0], verb, parameters, &call->answer, e);
}

static int update(struct api_call *call, struct error *e)
{
	return verb(call, SESSION_UPDATE, call->body, e);
}

static int delete (struct api_call *call, struct error *e)
{
	json_t *none = json_object();
	int r = none ? verb(call, SESSION_DELETE, none, e) : error_set_errno(e, ENOMEM, "delete");
	json_decref(none);
	json_decref(TAKE_PTR(call->answer)); /* nothing is left to tell of */
	return r;
}

#define VERB(name, which)                                                                                              \
	static int name(struct api_call *call, struct error *e)                                                            \
	{                                                                                                                  \
		return verb(call, which, call->body, e);                                                                       \
	}
VERB(do_pause, SESSION_PAUSE)
VERB(do_resume, SESSION_RESUME)
VERB(do_suspend, SESSION_SUSPEND)
VERB(do_wake, SESSION_WAKE)
VERB(do_connect, SESSION_CONNECT)
VERB(do_rewind, SESSION_REWIND)

static int do_snapshot(struct api_call *call, struct error *e)
{
	call->status = 201;
	return verb(call, SESSION_SNAPSHOT, call->body, e);
}

static int do_branch(struct api_call *call, struct error *e)
{
	call->status = 201;
	return verb(call, SESSION_BRANCH, call->body, e);
}

static int history(struct api_call *call, struct error *e)
{
	return session_history(call->api->manager, &call->caller, call->parameters[0], &call->answer, e);
}

static int snapshot_delete(struct api_call *call, struct error *e)
{
	return session_snapshot_delete(call->api->manager, &call->caller, call->parameters[0], call->parameters[1], e);
}

const struct api_route sessions_routes[] = {
    {"GET", "/v1/sessions", 0, WORK_QUICK, list, NULL},
    {"POST", "/v1/sessions", ROUTE_BODY, WORK_VERB, create, NULL},
    {"GET", "/v1/sessions/{}", 0, WORK_QUICK, get, NULL},
    {"PATCH", "/v1/sessions/{}", ROUTE_BODY, WORK_VERB, update, NULL},
    {"DELETE", "/v1/sessions/{}", 0, WORK_VERB, delete, NULL},
    {"POST", "/v1/sessions/{}/pause", ROUTE_BODY, WORK_VERB, do_pause, NULL},
    {"POST", "/v1/sessions/{}/resume", ROUTE_BODY, WORK_VERB, do_resume, NULL},
    {"POST", "/v1/sessions/{}/suspend", ROUTE_BODY, WORK_VERB, do_suspend, NULL},
    {"POST", "/v1/sessions/{}/wake", ROUTE_BODY, WORK_VERB, do_wake, NULL},
    {"POST", "/v1/sessions/{}/connect", ROUTE_BODY, WORK_VERB, do_connect, NULL},
    {"POST", "/v1/sessions/{}/snapshot", ROUTE_BODY, WORK_VERB, do_snapshot, NULL},
    {"POST", "/v1/sessions/{}/branch", ROUTE_BODY, WORK_VERB, do_branch, NULL},
    {"POST", "/v1/sessions/{}/rewind", ROUTE_BODY, WORK_VERB, do_rewind, NULL},
    {"GET", "/v1/sessions/{}/snapshots", 0, WORK_QUICK, history, NULL},
    {"DELETE", "/v1/sessions/{}/snapshots/{}", 0, WORK_VERB, snapshot_delete, NULL},
    {0},
};
