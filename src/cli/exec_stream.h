/*
 * One remote process with its streams: start or attach, output in order and byte-exact, input with back-pressure,
 * signals forwarded, and re-attachment where it left off when the connection breaks.
 *
 * Threads: the caller's reads the event stream and calls `output`; one pumps `input`; the signal thread (signals.h)
 * forwards signals. Each uses a connection of its own.
 */
#ifndef SPACE_CLI_EXEC_STREAM_H
#define SPACE_CLI_EXEC_STREAM_H

#include <sys/types.h>

#include "cli/api.h"
#include "cli/event_scan.h"
#include "cli/options.h"

/* Attempts to re-attach without any progress in between, with growing pauses: about half a minute in all. */
#define EXEC_STREAM_ATTEMPTS_MAX 15
/* How often the same ending signal is forwarded before this side gives up waiting for the command. */
#define EXEC_STREAM_SIGNALS_MAX 3
/* A signal that cannot be delivered within this time is obeyed here. */
#define EXEC_STREAM_SIGNAL_TIMEOUT_MS 5000
/* What the guest gets on top of a time limit before this side stops waiting for its word. */
#define EXEC_STREAM_GRACE_MS 10000

struct exec_stream_request {
	const char *session;
	const char *user;                       /* NULL = default */
	const char *directory;                  /* NULL = default */
	const char *const *argv;                /* NULL-terminated; NULL attaches to `pid` from `offset` (if has_offset) */
	const struct options_list *environment; /* "K=V", or "K" to pass on our own value; may be NULL */
	uint64_t timeout_ms;                    /* 0 = none */
	int tty;
	uint64_t pid;
	uint64_t offset;
	int has_offset;
	int detach; /* return once it runs */
	int quiet;  /* no remarks on stderr about re-attaching */
};

struct exec_stream_handlers {
	/* Called in order. Negative errno stops the command. `raw` is the base64 text the bytes came in. */
	int (*output)(void *context, enum event_scan_channel channel, const void *data, size_t size,
	              const struct event_scan_event *raw);
	/* On a thread of its own: bytes, 0 at the end, -errno to stop the command. NULL = no input. `stop_fd` becomes
	 * readable when nobody needs input any more: return 0 then. */
	ssize_t (*input)(void *context, void *data, size_t size, int stop_fd);
	void (*started)(void *context, uint64_t pid); /* may be NULL */
	void *context;
};

struct exec_stream_result {
	uint64_t pid;
	int exit_status; /* what this program should exit with */
	int remote_code; /* the command's own, meaningless when signal is set */
	int signal;      /* it died by this, 0 = no */
	int timed_out;
	int from_guest;  /* the error is what the guest's agent said */
	int interrupted; /* our user ended it with this signal before or instead of an answer, 0 = no */
	int forwarded;   /* last signal of our user's that was passed on, 0 = none */
	uint64_t lost_bytes;
};

/* 0 with *ret filled when the command's end is known, when the user broke off, or at once with detach. Otherwise the
 * error; ret->exit_status is then 124, 125, 126 or 127. signals_start() must have been called. */
int exec_stream_run(struct api *api, const struct exec_stream_request *request,
                    const struct exec_stream_handlers *handlers, struct exec_stream_result *ret, struct error *e);

#endif
