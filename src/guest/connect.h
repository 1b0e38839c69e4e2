/* Connect RPC inside the agent, beyond what handlers of request.h need. */
#ifndef SPACE_GUEST_CONNECT_H
#define SPACE_GUEST_CONNECT_H

#include "guest/connection.h"

#define CONNECT_ENVELOPE_BYTES 5
#define CONNECT_FLAG_COMPRESSED 0x01
#define CONNECT_FLAG_END 0x02

/* Splits an envelope's prefix; 0, or -errno with an error that names what is wrong. */
int connect_envelope_parse(const unsigned char prefix[CONNECT_ENVELOPE_BYTES], unsigned *ret_flags, size_t *ret_size,
                           struct error *e);
/* Puts one message into the connection's output without sending it; connection_flush() sends. */
int connect_stream_queue(struct request *r, const char *json, size_t size);
/* connect_stream_end() with one more number in the error object, for clients that map failures to exit codes. */
int connect_stream_end_with(struct request *r, const struct error *e, const char *field, int value);
/* The deadline a client asked for in Connect-Timeout-Ms, in ms; 0 = none. */
int connect_timeout_ms(const struct request *r, uint64_t *ret, struct error *e);

#endif
