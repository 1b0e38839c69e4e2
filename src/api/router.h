/* The table of routes, and the way of a request to its handler. */
#ifndef SPACE_API_ROUTER_H
#define SPACE_API_ROUTER_H

#include "api/call.h"

enum route_flag {
	ROUTE_OPEN = 1,  /* no credential needed */
	ROUTE_ADMIN = 2, /* operators only */
	ROUTE_BODY = 4,  /* takes a JSON object */
};

struct api_route {
	const char *method;
	const char *path; /* {} stands for one segment */
	unsigned flags;
	enum work_class class;
	int (*run)(struct api_call *call, struct error *e); /* on a worker; NULL = nothing but authentication */
	void (*finish)(struct api_call *call); /* on the loop, after success and only with a stream; NULL = usual answer */
};

/* The server's request function; `context` is the struct api. */
void router_request(void *context, struct http_stream *s);

/* Tables of the files named like them; each ends with a NULL method. */
extern const struct api_route sessions_routes[];
extern const struct api_route templates_routes[];
extern const struct api_route keys_routes[];
extern const struct api_route system_routes[];

#endif
