/*
 * Reads the Connect stream of a process: envelopes (one flags byte, 32-bit big-endian length) around JSON messages.
 *
 * A data message holds base64 output and there may be hundreds of megabytes of it, so the usual form is scanned in
 * place without building a JSON tree; anything that does not look exactly like it goes to the JSON library. The bytes
 * come from a guest: lengths are bounded, nothing is trusted.
 */
#ifndef SPACE_CLI_EVENT_SCAN_H
#define SPACE_CLI_EVENT_SCAN_H

#include <jansson.h>

#include "base/error.h"

#define EVENT_SCAN_MESSAGE_MAX (8u * 1024 * 1024)

enum event_scan_kind {
	EVENT_SCAN_NONE,   /* more bytes are needed */
	EVENT_SCAN_START,  /* pid */
	EVENT_SCAN_DATA,   /* channel, base64, offset */
	EVENT_SCAN_END,    /* exit_code, exited, signal, text */
	EVENT_SCAN_GAP,    /* from, to */
	EVENT_SCAN_OTHER,  /* keepalive, or an event this version does not know */
	EVENT_SCAN_FINISH, /* end of the stream; failed tells whether error was filled */
};

enum event_scan_channel { EVENT_SCAN_STDOUT = 1, EVENT_SCAN_STDERR, EVENT_SCAN_PTY };

struct event_scan_event {
	enum event_scan_kind kind;
	uint64_t pid;
	enum event_scan_channel channel;
	const char *base64; /* valid until the next call */
	size_t base64_size;
	uint64_t offset;
	int has_offset;
	int exit_code;
	int exited;
	int signal;
	int timed_out;
	char text[256]; /* error or status of an end event */
	uint64_t from;
	uint64_t to;
	int failed;
	int exit_status; /* what a shell would answer for a program that cannot be run; 0 = not told */
	struct error error;
};

struct event_scan {
	char *buffer; /* bytes [start, end) are unread */
	size_t capacity;
	size_t start;
	size_t end;
	json_t *tree; /* keeps strings of the slow path alive */
};

/* Room for at least `size` more bytes: a pointer, or NULL when memory is exhausted. event_scan_filled() counts them. */
char *event_scan_space(struct event_scan *scan, size_t size);
void event_scan_filled(struct event_scan *scan, size_t size);
/* Next event into *ret (kind EVENT_SCAN_NONE when bytes are missing). 0, or negative for bytes that break the protocol.
 */
int event_scan_next(struct event_scan *scan, struct event_scan_event *ret, struct error *e);
/* Drops everything read so far, for a new stream. */
void event_scan_reset(struct event_scan *scan);
void event_scan_free(struct event_scan *scan);

/* Strict, fast base64: `to` has room for size/4*3 bytes. Returns the length or -EINVAL. */
long event_scan_decode(unsigned char *to, const char *text, size_t size);

#endif
