/*
 * Calls to the agent of one sandbox over TCP inside its network namespace.
 *
 * The connection is kept between calls, so that a quiesce costs a round trip and no handshake. Guests are hostile:
 * answers are bounded in size and time, and nothing in them is trusted beyond what it is about.
 */
#ifndef SPACE_SESSION_GUEST_CLIENT_H
#define SPACE_SESSION_GUEST_CLIENT_H

#include <jansson.h>

#include "base/error.h"
#include "base/text.h"
#include "host/client.h"

struct http_client;

struct guest {
	struct host_client *helper;
	char sandbox_id[ID_BYTES];
	struct http_client *http; /* kept connection or NULL */
};

struct guest_status {
	int frozen;
	uint64_t user_cpu_us;
	uint64_t writes;
};

/* A new TCP connection to a port of the agent, blocking, TCP_NODELAY. Tries again until `timeout_ms` is over. */
int guest_connect(struct host_client *helper, const char *sandbox_id, unsigned timeout_ms, int *ret_fd,
                  struct error *e);
void guest_close(struct guest *guest);

/* One call of the `space` service; `body` is stolen (NULL = {}); `ret` may be NULL. A status of 401 or 403 is
 * ERROR_UNAUTHENTICATED. */
int guest_call(struct guest *guest, const char *control_token, const char *method, const char *path, json_t *body,
               unsigned timeout_ms, json_t **ret, struct error *e);
int guest_status_get(struct guest *guest, const char *control_token, unsigned timeout_ms, struct guest_status *ret,
                     struct error *e);
int guest_quiesce(struct guest *guest, const char *control_token, unsigned timeout_ms, struct guest_status *ret,
                  struct error *e);
int guest_thaw(struct guest *guest, const char *control_token, unsigned timeout_ms, struct error *e);

struct guest_identity {
	const char *session_id;
	const char *sandbox_id;
	const char *template_id;
	const char *hostname;
	const char *machine_id;
	const char *environment;   /* JSON object */
	const char *access_token;  /* "" = none */
	const char *control_token; /* the new one */
	int thaw;
};
/* `present_token` is what the guest expects now. Adds host time and fresh entropy. */
int guest_resume_as(struct guest *guest, const char *present_token, const struct guest_identity *identity,
                    unsigned timeout_ms, struct error *e);

/* Runs a shell command as root through the agent's process service, without an access token; its output goes to `line`
 * by lines. ERROR_INVALID with the last line if it does not end with 0. */
int guest_run(struct guest *guest, const char *command, unsigned timeout_ms,
              void (*line)(void *context, const char *text), void *context, struct error *e);
/* Runs `true` as the user of sandboxes the way a client's command is run. */
int guest_run_true(struct guest *guest, const char *access_token, unsigned timeout_ms, struct error *e);

#endif
