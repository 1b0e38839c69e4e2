/* Listening, one thread a connection, authorisation and the way to the handlers. */
#ifndef SPACE_GUEST_SERVER_H
#define SPACE_GUEST_SERVER_H

#include "base/error.h"
#include "guest/request.h"

#define AGENT_PORT 49983
#define SERVER_THREAD_STACK_BYTES (256 * 1024)
/* Threads that wait for the next connection instead of ending. */
#define SERVER_SPARE_THREADS 8

struct server_options {
	const char *address; /* NULL = all, both families */
	uint16_t port;
	int trust_local; /* test runs: callers on this machine count as the host */
};

/* Listens and starts serving. */
int server_begin(const struct server_options *options, struct error *e);
uint16_t server_port(void);
int server_trusts_local(void);
/* Ends every connection but `keep` (may be NULL); their threads come back from whatever they wait for on them. */
void server_drop_clients(const struct connection *keep);
/* Changing calls so far. */
uint64_t server_writes(void);

/* init.c: /health, /init, /metrics, /envs. */
extern const struct request_route init_routes[];

#endif
