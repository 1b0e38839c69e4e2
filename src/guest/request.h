/*
 * One HTTP request inside the guest agent, as its handlers see it.
 *
 * Theory of operation: the agent runs one thread a connection (bounded, AGENT_CONNECTIONS_MAX). File systems in a guest
 * can block any system call for ever (FIFOs, FUSE, a frozen cgroup's NFS); a thread of its own confines that to the one
 * client that asked. Handlers therefore use blocking calls; everything they block on ends when resume-as shuts the
 * connection's socket down.
 */
#ifndef SPACE_GUEST_REQUEST_H
#define SPACE_GUEST_REQUEST_H

#include <jansson.h>
#include <sys/types.h>

#include "base/buf.h"
#include "base/error.h"

#define AGENT_CONNECTIONS_MAX 512
#define AGENT_HEAD_BYTES_MAX 65536
#define AGENT_JSON_BYTES_MAX (4 * 1024 * 1024)
#define AGENT_JSON_DEPTH_MAX 64

struct connection;

struct request_header {
	char *name; /* lower case */
	char *value;
};

struct request {
	struct connection *connection;
	char *method;
	char *path;  /* percent-encoded as sent, without the query */
	char *query; /* after '?', "" if none */
	struct request_header *headers;
	size_t header_count;
	int has_body;
	int64_t content_length; /* -1 = chunked */
};

const char *request_header(const struct request *r, const char *name); /* lower-case name; NULL if absent */
/* Decodes query parameter `name` into a new string (free it). -ENOENT if absent, -EINVAL for bad escapes or NUL. */
int request_query(const struct request *r, const char *name, char **ret);
/* Body bytes in order, decoded from chunked (not from Content-Encoding). Count, 0 at the end, -errno if it was cut. */
ssize_t request_read(struct request *r, void *data, size_t size);
/* The whole body as JSON object; errors are ERROR_INVALID / ERROR_TOO_LARGE. An empty body gives {}. */
int request_read_json(struct request *r, json_t **ret, struct error *e);

/* Answers. `length` -1 means chunked. Header arrays are name, value pairs. 0 or -errno (client gone). */
int response_start(struct request *r, int status, const struct request_header *headers, size_t count, int64_t length);
int response_write(struct request *r, const void *data, size_t size);
int response_end(struct request *r);
int response_empty(struct request *r, int status);
int response_json(struct request *r, int status, json_t *body /* stolen */);
/* {"code": HTTP status number, "message": text} as envd sends it for plain HTTP calls. */
int response_error(struct request *r, const struct error *e);
int response_error_status(struct request *r, int status, const char *message);

/* Connect RPC (application/json unary, application/connect+json streams). */
int connect_reply(struct request *r, json_t *message /* stolen */);
int connect_fail(struct request *r, const struct error *e);
/* Reads the one request message of a server-streaming call (enveloped). */
int connect_stream_request(struct request *r, json_t **ret, struct error *e);
int connect_stream_start(struct request *r);
int connect_stream_send(struct request *r, json_t *message /* stolen */);
/* Sends already serialised JSON as one message. */
int connect_stream_send_text(struct request *r, const char *json, size_t size);
/* Ends the stream with {} or {"error":{code,message}}. */
int connect_stream_end(struct request *r, const struct error *e);
/* For client streams: next message, *ret NULL at the end of the stream. */
int connect_stream_next(struct request *r, json_t **ret, struct error *e);

/* The deadline that a client asked for in Connect-Timeout-Ms, in ms; 0 = none. ERROR_INVALID. */
int connect_timeout_ms(const struct request *r, uint64_t *ret, struct error *e);

/* True once the client has closed or resume-as dropped the connection; cheap poll for long waits. */
int request_is_gone(struct request *r);
/* A descriptor that becomes readable or hung up when the client goes away (for poll()); stays the connection's. */
int request_fd(const struct request *r);

/* The user a call runs as: `name` NULL = from Basic auth or the default user. Fills ids and home from /etc/passwd and
 * /etc/group (read anew each time, in the agent itself: static libc has no NSS). */
#define GUEST_GROUPS_MAX 64
struct guest_user {
	char name[64];
	uid_t uid;
	gid_t gid;
	gid_t groups[GUEST_GROUPS_MAX];
	size_t group_count;
	char home[4096];
	char shell[4096];
};
int guest_user_find(const char *name, struct guest_user *ret, struct error *e);
int request_user(const struct request *r, const char *name, struct guest_user *ret, struct error *e);
/* Gives the calling thread (only) the user's file system identity: fsuid, fsgid, supplementary groups; root's
 * capabilities over files go with it. guest_user_leave() undoes it. */
int guest_user_enter(const struct guest_user *user, struct error *e);
void guest_user_leave(void);

typedef int (*request_handler)(struct request *r);
/* Handlers register by exact path, a table per file: files_routes in files.c, filesystem_routes in filesystem.c,
 * process_routes in process_service.c, space_routes in space_service.c. `is_change` counts the call as a write. */
struct request_route {
	const char *method;
	const char *path;
	request_handler handle;
	int is_change;
};
extern const struct request_route files_routes[];
extern const struct request_route filesystem_routes[];
extern const struct request_route process_routes[];
extern const struct request_route space_routes[];
/* Each table ends with an entry whose method is NULL. */

/* What /init and resume-as set; copies under a lock. Strings are NULL when unset. */
char *agent_default_workdir(void); /* free() it */
char *agent_access_token(void);    /* wipe with explicit_bzero() and free() it */
/* The host's time, as it was last told and counted on since then, whatever somebody in the guest makes of its clock.
 * Without a host that told the time: the clock. */
void agent_note_host_time(uint64_t realtime_ns);
uint64_t agent_host_time_ms(void);
/* Whole authorisation of a /files call: no token set, the right token in X-Access-Token, or a valid v1 signature over
 * path, operation ("read", "write"), user (all as sent in the query) and expiry. 0 or ERROR_UNAUTHENTICATED. */
int agent_check_signature(const struct request *r, const char *path, const char *operation, const char *user,
                          struct error *e);

#endif
