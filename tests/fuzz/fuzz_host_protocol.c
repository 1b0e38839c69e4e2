/*
 * Requests to the helper from a daemon that has been taken over: dispatch() of host/server.c with everything behind it
 * replaced by checks of what handlers pass on. The first byte says how many descriptors come along.
 */
#include "host/server.c" /* for its static functions */

#include "fuzz.h"

static void check_id(const char *id)
{
	FUZZ_CHECK(memchr(id, '\0', ID_BYTES) != NULL);
}

int sandbox_start(struct sandbox_host *host, const struct host_sandbox_spec *spec, uint64_t nonce, pid_t *ret_pid,
                  int *ret_pidfd, struct error *e)
{
	check_id(spec->id);
	FUZZ_CHECK(spec->fd_count <= HOST_SANDBOX_FDS_MAX);
	size_t bytes = 0;
	size_t count = 0;
	for (; spec->arguments[count]; count++)
		bytes += strlen(spec->arguments[count]) + 1;
	FUZZ_CHECK(count <= HOST_ARGUMENTS_MAX && bytes <= HOST_ARGUMENT_BYTES_MAX);
	FUZZ_CHECK(strlen(spec->program) < PROTOCOL_NAME_BYTES);
	*ret_pid = 1;
	*ret_pidfd = -1;
	return nonce % 2 ? error_set(e, ERROR_UNSUPPORTED, "nothing is started here") : 0;
}

int sandbox_kill(struct sandbox_host *host, const char *id, struct error *e)
{
	check_id(id);
	return 0;
}

int sandbox_list(struct sandbox_host *host, struct host_sandbox_info **ret, size_t *ret_count, struct error *e)
{
	*ret_count = 40; /* more than one batch */
	*ret = calloc(*ret_count, sizeof(**ret));
	FUZZ_CHECK(*ret);
	for (size_t i = 0; i < *ret_count; i++)
		(*ret)[i].pidfd = -1;
	return 0;
}

int sandbox_sockets(struct sandbox_host *host, const char *id, int *fds, size_t count, struct error *e)
{
	check_id(id);
	FUZZ_CHECK(count >= 1 && count <= PROTOCOL_SOCKETS_MAX);
	for (size_t i = 0; i < count; i++)
		fds[i] = fd_memfd("fuzz", 1);
	return 0;
}

int sandbox_output(struct sandbox_host *host, const char *id, char *ret, size_t *ret_size, struct error *e)
{
	check_id(id);
	*ret_size = 0;
	return 0;
}

int sandbox_memory_copy(struct sandbox_host *host, const char *id, int base_fd, uint64_t size, int pages_fd,
                        int bitmap_fd, uint64_t *ret_pages, struct error *e)
{
	check_id(id);
	FUZZ_CHECK(base_fd >= 0 && pages_fd >= 0 && bitmap_fd >= 0);
	*ret_pages = size;
	return 0;
}

void sandbox_settle(struct sandbox_host *host)
{
}

void sandbox_reap(struct sandbox_host *host)
{
}

int builder_run(const struct config *config, const struct host_image_spec *spec,
                int (*progress)(void *context, const char *line), int (*canceled)(void *context), void *context,
                struct error *e)
{
	size_t count = 0;
	while (spec->packages[count])
		count++;
	FUZZ_CHECK(count <= PROTOCOL_PACKAGES_MAX);
	(void)canceled(context);
	return progress(context, "a line");
}

int doctor_report(const struct config *config, struct sandbox_host *sandboxes, const struct host_storage_info *storage,
                  struct buf *ret)
{
	return buf_append_string(ret, "name\tok\ttext\n");
}

static void drain(int sock)
{
	static char data[PROTOCOL_MESSAGE_BYTES_MAX];
	int fds[FD_PASS_MAX];
	size_t count;
	while (fd_receive_message(sock, data, sizeof(data), fds, FD_PASS_MAX, &count) > 0)
		for (size_t i = 0; i < count; i++)
			close(fds[i]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static struct config config;
	static struct server server = {.config = &config};
	int pair[2];
	int fds[FD_PASS_MAX];
	if (size < 1 || size - 1 > PROTOCOL_MESSAGE_BYTES_MAX ||
	    socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0)
		return 0;
	struct connection *c = calloc(1, sizeof(*c));
	FUZZ_CHECK(c);
	c->server = &server;
	c->sock = pair[0];
	size_t fd_count = data[0] % (FD_PASS_MAX + 1);
	for (size_t i = 0; i < fd_count; i++)
		fds[i] = fd_memfd("fuzz", 4096);
	if (fd_send_message(pair[1], data + 1, size - 1, fds, fd_count) == 0 && size > 1) {
		ssize_t n = fd_receive_message(pair[0], c->message, sizeof(c->message), c->fds, FD_PASS_MAX, &c->fd_count);
		FUZZ_CHECK(n == (ssize_t)size - 1);
		c->size = (size_t)n;
		serve_one(c);
		FUZZ_CHECK(c->fd_count == 0);
	}
	for (size_t i = 0; i < fd_count; i++)
		close(fds[i]);
	close(pair[0]);
	drain(pair[1]);
	close(pair[1]);
	free(c);
	return 0;
}
