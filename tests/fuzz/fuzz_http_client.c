/* What a hostile guest may answer to a call of ours: first byte = how it is read (whole call, or as a stream). */
#include <sys/socket.h>
#include <unistd.h>

#include "base/fd.h"
#include "fuzz.h"
#include "http/client.h"

#define ANSWER_BYTES_MAX 100000

static void read_stream(struct http_client *client, const struct http_call *call)
{
	struct error e = {0};
	struct http_answer answer = {0};
	char data[64];
	if (http_client_start(client, call, &e) == 0 && http_client_read_head(client, &answer, &e) == 0) {
		ssize_t n;
		do
			n = http_client_read(client, data, sizeof(data), &e);
		while (n > 0);
	}
	http_answer_free(&answer);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	int pair[2];
	struct http_client *client = NULL;
	struct error e = {0};
	if (size < 1 || size > ANSWER_BYTES_MAX || socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) < 0)
		return 0;
	FUZZ_CHECK(http_client_from_fd(pair[0], "guest", &client, &e) == 0);
	/* All that will ever come is there already; then the peer is gone for reading and writing. */
	if (size > 1)
		FUZZ_CHECK(fd_write_full(pair[1], data + 1, size - 1) == 0);
	FUZZ_CHECK(shutdown(pair[1], SHUT_WR) == 0);
	struct http_call call = {
	    .method = data[0] & 2 ? "HEAD" : "GET", .target = "/", .timeout_ms = 1000, .answer_limit = 4096};
	if (data[0] & 1) {
		read_stream(client, &call);
	} else {
		struct http_answer answer = {0};
		if (http_client_call(client, &call, &answer, &e) == 0) {
			FUZZ_CHECK(answer.status >= 100 && answer.status <= 999 && answer.body.size <= 4096);
			(void)http_answer_header(&answer, "content-type");
		} else {
			FUZZ_CHECK(e.code != ERROR_NONE && e.message[0]);
		}
		http_answer_free(&answer);
	}
	http_client_free(client);
	close(pair[1]);
	return 0;
}
