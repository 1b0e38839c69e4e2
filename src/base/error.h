/*
 * The error object that crosses room boundaries.
 *
 * Functions return 0 (or a count) on success and a negative errno on failure; functions that can fail in ways a user
 * should read about also take a last `struct error *` (may be NULL). The object lives on the caller's stack, needs no
 * freeing, and gains context on its way up with error_prefix().
 */
#ifndef SPACE_BASE_ERROR_H
#define SPACE_BASE_ERROR_H

#include "base/macros.h"

enum error_code {
	ERROR_NONE = 0,
	ERROR_INVALID,         /* the request itself is wrong; repeating it cannot help */
	ERROR_UNAUTHENTICATED, /* no or a wrong credential */
	ERROR_FORBIDDEN,       /* a valid credential that may not do this */
	ERROR_NOT_FOUND,
	ERROR_CONFLICT,    /* the object's present state does not allow it */
	ERROR_TOO_LARGE,   /* a named size limit was passed */
	ERROR_EXHAUSTED,   /* a count, rate or capacity limit was reached */
	ERROR_NO_SPACE,    /* disk full, in the guest or on the host */
	ERROR_DAMAGED,     /* stored data does not match its checksum or is missing */
	ERROR_TIMEOUT,     /* a bounded wait ran out */
	ERROR_UNAVAILABLE, /* a component that should answer does not (yet) */
	ERROR_CANCELED,
	ERROR_UNSUPPORTED, /* this host or version cannot do it */
	ERROR_INTERNAL,
	ERROR_EXISTS, /* what should be created is there already */
	ERROR_CODE_COUNT
};

#define ERROR_MESSAGE_BYTES 768

struct error {
	enum error_code code;
	char message[ERROR_MESSAGE_BYTES]; /* one line of UTF-8, no trailing newline, no full stop */
};

/* Fills *e (if not NULL) and returns the negative errno that belongs to the code, so callers can `return error_set(…)`.
 */
int error_set(struct error *e, enum error_code code, const char *format, ...) PRINTF_LIKE(3, 4);
/* The same from an errno value (positive or negative): code is derived from it and ": strerror" is appended.
 * Returns -errno. */
int error_set_errno(struct error *e, int errnum, const char *format, ...) PRINTF_LIKE(3, 4);
/* Puts "context: " in front of the message. Returns the negative errno of the code. */
int error_prefix(struct error *e, const char *format, ...) PRINTF_LIKE(2, 3);

/* The one table: each code's stable lower-case name ("not_found"), HTTP status, Connect RPC code and CLI exit code. */
const char *error_code_name(enum error_code code);
int error_code_http_status(enum error_code code);
const char *error_code_connect(enum error_code code);
int error_code_exit_status(enum error_code code);
int error_code_errno(enum error_code code); /* negative */
/* Reverse of error_code_name(); ERROR_INTERNAL for an unknown name. */
enum error_code error_code_from_name(const char *name);

#endif
