/* Shared by proxy.c (finding the guest, kept connections), exchange.c (the streaming) and forward.c (heads). */
#ifndef SPACE_API_EXCHANGE_H
#define SPACE_API_EXCHANGE_H

#include "api/auth.h"
#include "api/proxy.h"
#include "api/upstream.h"

#define PROXY_IDLE_MAX 256       /* kept connections to agents */
#define PROXY_IDLE_SESSION_MAX 8 /* of one session */
#define PROXY_IDLE_MS 5000
#define PROXY_TUNNEL_TIMEOUT_MS 5000
#define PROXY_CONTINUE_MS 1000 /* then the client is told to go on, whatever the guest says */
#define PROXY_EXCHANGES_MAX 4096

struct idle_upstream {
	struct proxy *proxy;
	struct upstream *upstream;
	uint64_t generation;
	uint64_t since_ms;
	struct idle_upstream *next;
};

struct proxy {
	struct api *api;
	struct proxy_stats stats;
	struct exchange *exchanges; /* doubly linked */
	struct idle_upstream *idle;
	uv_timer_t sweep;
};

enum exchange_state {
	EXCHANGE_LOOKUP,
	EXCHANGE_OPEN,
	EXCHANGE_TUNNEL, /* waits for the agent's 101 */
	EXCHANGE_HTTP,
	EXCHANGE_RAW,
	EXCHANGE_OVER /* answered or cut; waits for the stream to close */
};

struct exchange {
	struct work work; /* first */
	struct proxy *proxy;
	struct exchange *next, *previous;
	struct http_stream *stream; /* NULL once closed */
	struct upstream *upstream;
	enum exchange_state state;
	int working; /* a worker has it */
	struct preview preview;
	struct auth auth;
	int has_token;
	int has_signature; /* a signed link to a file: the agent checks it */
	int token_from_query;
	char token[TOKEN_BYTES]; /* what the client presented */
	char request_id[ID_BYTES];
	uint64_t deadline_ms; /* of EXCHANGE_TUNNEL, or until 100 (Continue) is made up */
	int awaits_continue;
	int request_done;
	int answer_done;
	int is_upgrade;
	/* Results of the workers. */
	struct session_caller caller;
	char session_id[ID_BYTES];
	char access_token[TOKEN_BYTES];
	uint64_t generation;
	int is_running;
	int may_see_inside; /* the caller is an operator */
	struct session_endpoint endpoint;
	int result;
	struct error error;
};

/* exchange.c: with an upstream at hand; ends by itself. */
void exchange_start(struct exchange *x);
void exchange_fail(struct exchange *x, const struct error *e);
void exchange_sweep(struct exchange *x, uint64_t now_ms);
void exchange_cut(struct exchange *x);
extern const struct http_stream_handler exchange_stream_handler;

/* proxy.c */
void proxy_keep(struct proxy *proxy, struct upstream *u, uint64_t generation);
void proxy_release(struct exchange *x);

/* forward.c: heads as they are passed on. */
int forward_tunnel_head(const struct exchange *x, struct buf *ret);
int forward_request_head(const struct exchange *x, struct buf *ret);
#define FORWARD_HEADERS_MAX (HTTP_HEADERS_MAX + 2)
struct forward_answer {
	struct http_header headers[FORWARD_HEADERS_MAX];
	size_t count;
	struct buf text; /* of rewritten values */
};
int forward_answer_head(const struct exchange *x, const struct http_parser *answer, struct forward_answer *ret);
/* An error page for browsers, JSON for everybody else. */
int forward_error_body(const struct exchange *x, const char *code, const char *message, struct buf *ret,
                       const char **ret_type);

#endif
