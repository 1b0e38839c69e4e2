#include "base/error.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static const struct {
	const char *name;
	int http_status;
	const char *connect;
	int exit_status; /* CLI: 125 and up are ours, below belongs to remote commands; see space(1) */
	int errnum;
} codes[ERROR_CODE_COUNT] = {
    [ERROR_NONE] = {"ok", 200, "ok", 0, 0},
    [ERROR_INVALID] = {"invalid", 400, "invalid_argument", 125, EINVAL},
    [ERROR_UNAUTHENTICATED] = {"unauthenticated", 401, "unauthenticated", 125, EACCES},
    [ERROR_FORBIDDEN] = {"forbidden", 403, "permission_denied", 125, EPERM},
    [ERROR_NOT_FOUND] = {"not_found", 404, "not_found", 125, ENOENT},
    [ERROR_CONFLICT] = {"conflict", 409, "failed_precondition", 125, EBUSY},
    [ERROR_TOO_LARGE] = {"too_large", 413, "resource_exhausted", 125, EMSGSIZE},
    [ERROR_EXHAUSTED] = {"exhausted", 429, "resource_exhausted", 125, EAGAIN},
    [ERROR_NO_SPACE] = {"no_space", 507, "resource_exhausted", 125, ENOSPC},
    [ERROR_DAMAGED] = {"damaged", 500, "data_loss", 125, EBADMSG},
    [ERROR_TIMEOUT] = {"timeout", 504, "deadline_exceeded", 124, ETIMEDOUT},
    [ERROR_UNAVAILABLE] = {"unavailable", 503, "unavailable", 125, ECONNREFUSED},
    [ERROR_CANCELED] = {"canceled", 499, "canceled", 125, ECANCELED},
    [ERROR_UNSUPPORTED] = {"unsupported", 501, "unimplemented", 125, ENOSYS},
    [ERROR_INTERNAL] = {"internal", 500, "internal", 125, EIO},
    [ERROR_EXISTS] = {"exists", 409, "already_exists", 125, EEXIST},
};

static enum error_code code_from_errno(int errnum)
{
	switch (errnum) {
	case EINVAL:
	case ENAMETOOLONG:
	case ENOTDIR:
	case EISDIR:
	case ELOOP:
		return ERROR_INVALID;
	case EACCES:
	case EPERM:
	case EROFS:
		return ERROR_FORBIDDEN;
	case ENOENT:
	case ESRCH:
		return ERROR_NOT_FOUND;
	case EBUSY:
	case EEXIST:
	case ENOTEMPTY:
		return ERROR_CONFLICT;
	case EMSGSIZE:
	case EFBIG:
		return ERROR_TOO_LARGE;
	case EAGAIN:
	case EMFILE:
	case ENFILE:
	case ENOMEM:
		return ERROR_EXHAUSTED;
	case ENOSPC:
	case EDQUOT:
		return ERROR_NO_SPACE;
	case EBADMSG:
		return ERROR_DAMAGED;
	case ETIMEDOUT:
		return ERROR_TIMEOUT;
	case ECONNREFUSED:
	case ECONNRESET:
	case EPIPE:
	case EHOSTUNREACH:
	case ENETUNREACH:
		return ERROR_UNAVAILABLE;
	case ECANCELED:
		return ERROR_CANCELED;
	case ENOSYS:
	case EOPNOTSUPP:
		return ERROR_UNSUPPORTED;
	default:
		return ERROR_INTERNAL;
	}
}

int error_set(struct error *e, enum error_code code, const char *format, ...)
{
	if (e) {
		va_list args;
		va_start(args, format);
		e->code = code;
		vsnprintf(e->message, sizeof(e->message), format, args);
		va_end(args);
	}
	return error_code_errno(code);
}

int error_set_errno(struct error *e, int errnum, const char *format, ...)
{
	if (errnum < 0)
		errnum = -errnum;
	if (e) {
		va_list args;
		va_start(args, format);
		e->code = code_from_errno(errnum);
		int used = vsnprintf(e->message, sizeof(e->message), format, args);
		va_end(args);
		if (used >= 0 && (size_t)used < sizeof(e->message))
			snprintf(e->message + used, sizeof(e->message) - (size_t)used, ": %s", strerror(errnum));
	}
	return errnum ? -errnum : -EIO;
}

int error_prefix(struct error *e, const char *format, ...)
{
	if (!e)
		return -EIO;
	char tail[ERROR_MESSAGE_BYTES];
	memcpy(tail, e->message, sizeof(tail));
	va_list args;
	va_start(args, format);
	int used = vsnprintf(e->message, sizeof(e->message), format, args);
	va_end(args);
	if (used >= 0 && (size_t)used < sizeof(e->message))
		snprintf(e->message + used, sizeof(e->message) - (size_t)used, ": %.*s",
		         (int)(sizeof(e->message) - (size_t)used - 3), tail);
	return error_code_errno(e->code);
}

static enum error_code clamp(enum error_code code)
{
	return (unsigned)code < ERROR_CODE_COUNT ? code : ERROR_INTERNAL;
}

const char *error_code_name(enum error_code code)
{
	return codes[clamp(code)].name;
}

int error_code_http_status(enum error_code code)
{
	return codes[clamp(code)].http_status;
}

const char *error_code_connect(enum error_code code)
{
	return codes[clamp(code)].connect;
}

int error_code_exit_status(enum error_code code)
{
	return codes[clamp(code)].exit_status;
}

int error_code_errno(enum error_code code)
{
	return -codes[clamp(code)].errnum;
}

enum error_code error_code_from_name(const char *name)
{
	for (int i = 0; name && i < ERROR_CODE_COUNT; i++)
		if (strcmp(codes[i].name, name) == 0)
			return (enum error_code)i;
	return ERROR_INTERNAL;
}
