/* Routes of templates. Everybody may read them; building and deleting is for operators. */
#include "api/build.h"
#include "api/router.h"

static int list(struct api_call *call, struct error *e)
{
	return template_list(call->api->manager, &call->caller, &call->answer, e);
}

static int get(struct api_call *call, struct error *e)
{
	return template_get(call->api->manager, &call->caller, call->parameters[0], &call->answer, e);
}

static int delete (struct api_call *call, struct error *e)
{
	return template_delete(call->api->manager, &call->caller, call->parameters[0], e);
}

const struct api_route templates_routes[] = {
    {"GET", "/v1/templates", 0, WORK_QUICK, list, NULL},
    {"POST", "/v1/templates", ROUTE_BODY | ROUTE_ADMIN, WORK_QUICK, NULL, build_begin},
    {"GET", "/v1/templates/{}", 0, WORK_QUICK, get, NULL},
    {"DELETE", "/v1/templates/{}", ROUTE_ADMIN, WORK_VERB, delete, NULL},
    {0},
};
