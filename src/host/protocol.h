/*
 * Wire format between host/client.c and the helper's host/server.c: one SEQPACKET message a request, one or more
 * replies. Both programs are built and installed together; the version only guards against a helper that is still
 * running from before an upgrade.
 *
 * Request: header, the fixed struct of its type, then the type's strings. Reply: header, struct protocol_reply, then
 * text (error message, doctor lines, output) or an array of entries. Numbers are in host order.
 */
#ifndef SPACE_HOST_PROTOCOL_H
#define SPACE_HOST_PROTOCOL_H

#include "base/error.h"
#include "base/text.h"
#include "host/client.h"

#define PROTOCOL_MAGIC 0x48435053u
#define PROTOCOL_VERSION 1
#define PROTOCOL_MESSAGE_BYTES_MAX 65536
#define PROTOCOL_LIST_BATCH 16 /* entries a reply; one descriptor each, so at most FD_PASS_MAX */
#define PROTOCOL_SOCKETS_MAX 8
#define PROTOCOL_OUTPUT_BYTES_MAX 16384
#define PROTOCOL_PACKAGES_MAX 512
#define PROTOCOL_PACKAGE_BYTES_MAX 32768 /* all names together */
#define PROTOCOL_NAME_BYTES 16           /* program, preload library */
#define PROTOCOL_SUITE_BYTES 32

enum protocol_type {
	PROTOCOL_SANDBOX_START = 1,
	PROTOCOL_SANDBOX_KILL,
	PROTOCOL_SANDBOX_LIST,
	PROTOCOL_SANDBOX_SOCKETS,
	PROTOCOL_SANDBOX_OUTPUT,
	PROTOCOL_MEMORY_COPY,
	PROTOCOL_IMAGE_BUILD,
	PROTOCOL_STORAGE,
	PROTOCOL_DOCTOR,
	PROTOCOL_REQUEST_END, /* one past the last request */
	PROTOCOL_REPLY = 100,
	PROTOCOL_PROGRESS /* a line of text before the reply of a long request */
};

struct protocol_header {
	uint32_t magic;
	uint16_t version;
	uint16_t type;
	uint32_t size; /* of the whole message */
	uint32_t reserved;
};

/* Followed by argument_count NUL-terminated strings of argument_bytes together. */
struct protocol_start {
	struct protocol_header header;
	char id[ID_BYTES];
	char program[PROTOCOL_NAME_BYTES];
	char preload[PROTOCOL_NAME_BYTES]; /* "" = none */
	uint64_t nonce;                    /* of the call: a repetition of it is told from another start of the same id */
	uint64_t memory_max_bytes;
	uint32_t cpu_percent;
	uint32_t pids_max;
	uint32_t argument_count;
	uint32_t argument_bytes;
};

/* KILL, SOCKETS, OUTPUT */
struct protocol_sandbox {
	struct protocol_header header;
	char id[ID_BYTES];
	uint32_t count; /* SOCKETS only, else 0 */
	uint32_t reserved;
};

struct protocol_memory {
	struct protocol_header header;
	char id[ID_BYTES];
	uint64_t size;
};

/* Followed by package_count NUL-terminated names of package_bytes together. */
struct protocol_image {
	struct protocol_header header;
	char suite[PROTOCOL_SUITE_BYTES]; /* "" = the host's own */
	uint64_t size_bytes;
	uint32_t package_count;
	uint32_t package_bytes;
};

/* LIST, STORAGE, DOCTOR are a bare header. */

struct protocol_reply {
	struct protocol_header header;
	uint32_t code;  /* enum error_code; not 0: the text is the message */
	uint32_t more;  /* another reply of the same request follows */
	uint64_t value; /* START: pid. MEMORY_COPY: pages. LIST: entries in this reply */
};

struct protocol_entry {
	char id[ID_BYTES];
	int32_t pid;
	int32_t exit_status;
	uint8_t has_pidfd; /* the next descriptor of the message is this one's */
	uint8_t alive;
	uint8_t exit_known;
	uint8_t reserved;
};

#endif
