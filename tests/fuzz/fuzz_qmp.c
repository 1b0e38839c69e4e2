/* What a VMM that its guest has taken over may say on its control socket. */
#include <sys/socket.h>
#include <unistd.h>

#include "base/fd.h"
#include "fuzz.h"
#include "vmm/qmp.h"

#define TALK_BYTES_MAX 100000

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	int pair[2];
	struct qmp qmp;
	struct error e = {0};
	if (size > TALK_BYTES_MAX || socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) < 0)
		return 0;
	if (size)
		FUZZ_CHECK(fd_write_full(pair[1], data, size) == 0);
	FUZZ_CHECK(shutdown(pair[1], SHUT_WR) == 0);
	qmp_init(&qmp);
	if (qmp_attach(&qmp, pair[0], -1, 200, &e) == 0) {
		json_t *value = NULL;
		if (qmp_command(&qmp, "query-status", NULL, -1, 200, &value, &e) == 0)
			json_decref(value);
		else
			FUZZ_CHECK(e.code != ERROR_NONE && e.message[0]);
		qmp_drain(&qmp);
		FUZZ_CHECK(qmp.in.size <= QMP_MESSAGE_BYTES_MAX);
	} else {
		FUZZ_CHECK(e.code != ERROR_NONE && e.message[0]);
	}
	qmp_close(&qmp);
	close(pair[1]);
	return 0;
}
