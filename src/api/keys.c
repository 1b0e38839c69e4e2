/* Routes of API keys: operators only. */
#include "api/router.h"

static int list(struct api_call *call, struct error *e)
{
	return key_list(call->api->manager, &call->caller, &call->answer, e);
}

static int create(struct api_call *call, struct error *e)
{
	call->status = 201;
	return key_create(call->api->manager, &call->caller, call->body, &call->answer, e);
}

static int delete (struct api_call *call, struct error *e)
{
	return key_delete(call->api->manager, &call->caller, call->parameters[0], e);
}

const struct api_route keys_routes[] = {
    {"GET", "/v1/keys", ROUTE_ADMIN, WORK_QUICK, list, NULL},
    {"POST", "/v1/keys", ROUTE_ADMIN | ROUTE_BODY, WORK_VERB, create, NULL},
    {"DELETE", "/v1/keys/{}", ROUTE_ADMIN, WORK_VERB, delete, NULL},
    {0},
};
