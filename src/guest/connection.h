/* One client's connection, as server.c, request.c, connect.c and the tunnel see it; handlers only use request.h. */
#ifndef SPACE_GUEST_CONNECTION_H
#define SPACE_GUEST_CONNECTION_H

#include <stdatomic.h>

#include "guest/head.h"
#include "guest/request.h"

/* First size of the input buffer; it grows up to the limit of a head and a rest for the body. */
#define CONNECTION_INPUT_BYTES 16384
#define CONNECTION_BODY_ROOM_BYTES 8192
#define CONNECTION_IDLE_MS (640 * 1000)
#define CONNECTION_HEAD_MS (30 * 1000)
#define CONNECTION_BODY_MS (300 * 1000)
/* Unread request body that is skipped to keep a connection; more closes it. */
#define CONNECTION_SKIP_BYTES_MAX (256 * 1024)

enum response_state { RESPONSE_NONE, RESPONSE_OPEN, RESPONSE_DONE };

struct connection {
	int fd;
	int is_local; /* the peer is a process of this guest, not the host */
	atomic_int is_dropped;
	struct head head;

	/* Input: [0, head_size) is the head, [in_start, in_end) bytes not used yet, chunk-decoded ones in
	 * [body_start, body_end). */
	char *in;
	size_t in_capacity;
	size_t head_size;
	size_t in_start;
	size_t in_end;
	size_t body_start;
	size_t body_end;
	uint64_t body_left; /* of a body of known length */
	int body_complete;
	int must_continue; /* 100 Continue is owed before the body is read */

	struct buf out; /* answer bytes that were not sent yet */
	enum response_state state;
	int is_chunked;
	int is_head;       /* HEAD: no body is sent */
	int64_t body_owed; /* bytes of an answer of known length still to come */
	int must_close;
	int failure; /* -errno once sending failed */

	struct connection *next;
	struct connection *previous;
};

/* Sends what waits in `out`. 0 or -errno. */
int connection_flush(struct connection *c);
/* Appends one piece of a chunked answer to `out` without sending it; used to put small events into one packet. */
int connection_queue(struct connection *c, const void *data, size_t size);
/* Prepares for the body of the request whose head was parsed. */
void connection_begin(struct connection *c);
/* Waits until the peer sends something; 0, -ETIMEDOUT, -ECONNRESET. */
int connection_wait_input(struct connection *c, int timeout_ms);

#endif
