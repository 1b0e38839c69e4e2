#include <errno.h>

#include "base/error.h"
#include "check.h"

static void test_set_and_prefix(void)
{
	struct error e = {0};
	CHECK_INT(error_set(&e, ERROR_NOT_FOUND, "no session %s", "x"), -ENOENT);
	CHECK_STR(e.message, "no session x");
	CHECK_INT(e.code, ERROR_NOT_FOUND);
	CHECK_INT(error_prefix(&e, "branch %d", 3), -ENOENT);
	CHECK_STR(e.message, "branch 3: no session x");
	CHECK_INT(error_set(NULL, ERROR_CONFLICT, "nobody listens"), -EBUSY);
	CHECK_INT(error_set_errno(NULL, ENOSPC, "nobody listens"), -ENOSPC);
}

static void test_errno_is_told(void)
{
	struct error e = {0};
	CHECK_INT(error_set_errno(&e, -ENOSPC, "write %s", "disk"), -ENOSPC);
	CHECK_INT(e.code, ERROR_NO_SPACE);
	CHECK_STR(e.message, "write disk: No space left on device");
	CHECK_INT(error_set_errno(&e, ENOENT, "open"), -ENOENT);
	CHECK_INT(e.code, ERROR_NOT_FOUND);
	CHECK_INT(error_set_errno(&e, EBADMSG, "read"), -EBADMSG);
	CHECK_INT(e.code, ERROR_DAMAGED);
}

static void test_long_messages_are_cut(void)
{
	struct error e = {0};
	char text[2 * ERROR_MESSAGE_BYTES];
	memset(text, 'x', sizeof(text) - 1);
	text[sizeof(text) - 1] = '\0';
	error_set(&e, ERROR_INVALID, "%s", text);
	CHECK(strlen(e.message) < ERROR_MESSAGE_BYTES);
	error_prefix(&e, "%s", text);
	CHECK(strlen(e.message) < ERROR_MESSAGE_BYTES);
	CHECK_INT(e.code, ERROR_INVALID);
}

/* The table is public interface: each name, HTTP status and Connect code comes back as it went in. */
static void test_table_is_complete(void)
{
	for (int code = 0; code < ERROR_CODE_COUNT; code++) {
		CHECK(error_code_name(code) && *error_code_name(code));
		CHECK(error_code_connect(code) && *error_code_connect(code));
		CHECK_INT(error_code_from_name(error_code_name(code)), code);
		CHECK(error_code_http_status(code) >= 200 && error_code_http_status(code) < 600);
		if (code)
			CHECK(error_code_errno(code) < 0 && error_code_exit_status(code) >= 124);
	}
	CHECK_INT(error_code_http_status(ERROR_NO_SPACE), 507);
	CHECK_STR(error_code_connect(ERROR_INVALID), "invalid_argument");
	CHECK_INT(error_code_from_name("never heard of"), ERROR_INTERNAL);
}

int main(void)
{
	test_set_and_prefix();
	test_errno_is_told();
	test_long_messages_are_cut();
	test_table_is_complete();
	return 0;
}
