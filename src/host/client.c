#include "host/client.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/fd.h"
#include "host/protocol.h"

/* One connection carries one request at a time; threads beyond this many wait for a free one. */
#define CLIENT_CONNECTIONS_MAX 32
/* The supervisor restarts a dead helper within a fraction of this. */
#define CLIENT_CONNECT_WAIT_MS 3000
#define CLIENT_CONNECT_STEP_MS 20
#define CLIENT_REPEATS_MAX 4
#define CLIENT_REPLY_WAIT_MS 60000
/* Between two lines of progress of an image build. */
#define CLIENT_BUILD_WAIT_MS (20 * 60 * 1000)

struct host_client {
	struct sockaddr_un address;
	pthread_mutex_t lock;
	pthread_cond_t released;
	int idle[CLIENT_CONNECTIONS_MAX];
	size_t idle_count;
	size_t open_count; /* idle and in use */
};

struct reply {
	struct protocol_reply head;
	char body[PROTOCOL_MESSAGE_BYTES_MAX];
	size_t body_size;
	int fds[FD_PASS_MAX];
	size_t fd_count;
};

int host_client_new(const char *socket_path, struct host_client **ret, struct error *e)
{
	CLEANUP_FREE struct host_client *client = calloc(1, sizeof(*client));
	if (!client)
		return error_set_errno(e, ENOMEM, "helper client");
	client->address.sun_family = AF_UNIX;
	if (text_copy(client->address.sun_path, sizeof(client->address.sun_path), socket_path) < 0)
		return error_set(e, ERROR_INVALID, "helper socket path \"%s\" is longer than %zu bytes", socket_path,
		                 sizeof(client->address.sun_path) - 1);
	pthread_mutex_init(&client->lock, NULL);
	pthread_cond_init(&client->released, NULL);
	*ret = TAKE_PTR(client);
	return 0;
}

void host_client_free(struct host_client *client)
{
	if (!client)
		return;
	for (size_t i = 0; i < client->idle_count; i++)
		close(client->idle[i]);
	pthread_cond_destroy(&client->released);
	pthread_mutex_destroy(&client->lock);
	free(client);
}

static int connect_once(const struct host_client *client)
{
	CLEANUP_CLOSE int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return -errno;
	if (connect(fd, (const struct sockaddr *)&client->address, sizeof(client->address)) < 0)
		return -errno;
	return TAKE_FD(fd);
}

static int connect_helper(const struct host_client *client, struct error *e)
{
	uint64_t deadline = time_monotonic_ms() + CLIENT_CONNECT_WAIT_MS;
	for (;;) {
		int fd = connect_once(client);
		if (fd >= 0)
			return fd;
		int retry = fd == -ENOENT || fd == -ECONNREFUSED || fd == -EAGAIN || fd == -EINTR;
		if (!retry || time_monotonic_ms() >= deadline) {
			error_set_errno(e, fd, "host helper at %s", client->address.sun_path);
			if (e && retry)
				e->code = ERROR_UNAVAILABLE;
			return fd;
		}
		nanosleep(&(struct timespec){.tv_nsec = CLIENT_CONNECT_STEP_MS * 1000000L}, NULL);
	}
}

/* An idle connection has nothing to say; if it is readable, the helper has closed it. */
static int is_stale(int fd)
{
	struct pollfd p = {.fd = fd, .events = POLLIN};
	return poll(&p, 1, 0) != 0;
}

static void connection_drop(struct host_client *client, int fd)
{
	close(fd);
	pthread_mutex_lock(&client->lock);
	client->open_count--;
	pthread_cond_signal(&client->released);
	pthread_mutex_unlock(&client->lock);
}

static void connection_release(struct host_client *client, int fd)
{
	pthread_mutex_lock(&client->lock);
	client->idle[client->idle_count++] = fd;
	pthread_cond_signal(&client->released);
	pthread_mutex_unlock(&client->lock);
}

static int connection_take(struct host_client *client, struct error *e)
{
	for (;;) {
		int fd = -1;
		pthread_mutex_lock(&client->lock);
		while (!client->idle_count && client->open_count >= CLIENT_CONNECTIONS_MAX)
			pthread_cond_wait(&client->released, &client->lock);
		if (client->idle_count)
			fd = client->idle[--client->idle_count];
		else
			client->open_count++;
		pthread_mutex_unlock(&client->lock);
		if (fd >= 0 && !is_stale(fd))
			return fd;
		if (fd >= 0) {
			connection_drop(client, fd);
			continue;
		}
		fd = connect_helper(client, e);
		if (fd < 0) {
			pthread_mutex_lock(&client->lock);
			client->open_count--;
			pthread_cond_signal(&client->released);
			pthread_mutex_unlock(&client->lock);
		}
		return fd;
	}
}

static void reply_close(struct reply *reply)
{
	for (size_t i = 0; i < reply->fd_count; i++)
		close(reply->fds[i]);
	reply->fd_count = 0;
}

static int receive(int fd, struct reply *reply, int timeout_ms, struct error *e)
{
	struct pollfd p = {.fd = fd, .events = POLLIN};
	int r;
	do
		r = poll(&p, 1, timeout_ms);
	while (r < 0 && errno == EINTR);
	if (r < 0)
		return error_set_errno(e, errno, "host helper");
	if (r == 0)
		return error_set(e, ERROR_TIMEOUT, "host helper did not answer within %d s", timeout_ms / 1000);
	CLEANUP_FREE char *data = malloc(PROTOCOL_MESSAGE_BYTES_MAX);
	if (!data)
		return error_set_errno(e, ENOMEM, "host helper");
	ssize_t n = fd_receive_message(fd, data, PROTOCOL_MESSAGE_BYTES_MAX, reply->fds, FD_PASS_MAX, &reply->fd_count);
	if (n <= 0)
		return error_set(e, ERROR_UNAVAILABLE, "host helper went away before it answered");
	memset(&reply->head, 0, sizeof(reply->head));
	memcpy(&reply->head, data, MIN((size_t)n, sizeof(reply->head)));
	const struct protocol_header *header = &reply->head.header;
	if ((size_t)n < sizeof(reply->head) || header->magic != PROTOCOL_MAGIC || header->version != PROTOCOL_VERSION ||
	    header->size != (size_t)n) {
		reply_close(reply);
		return error_set(e, ERROR_INTERNAL, "host helper speaks another version; restart spaced");
	}
	reply->body_size = (size_t)n - sizeof(reply->head);
	memcpy(reply->body, data + sizeof(reply->head), reply->body_size);
	reply->body[MIN(reply->body_size, sizeof(reply->body) - 1)] = '\0';
	return 0;
}

struct call {
	const void *request;
	size_t size;
	const int *fds;
	size_t fd_count;
	int timeout_ms;
	int repeat; /* if the helper goes away without an answer */
	/* For each reply that is not an error; may take descriptors by setting them to -1. */
	int (*on_reply)(void *context, struct reply *reply, struct error *e);
	void *context;
};

/* Reads replies until the last one. *ret_clean says whether the connection can serve another request. */
static int collect(int fd, const struct call *call, struct reply *reply, int *ret_clean, int *ret_lost, struct error *e)
{
	*ret_clean = 0;
	for (int first = 1;; first = 0) {
		int r = receive(fd, reply, call->timeout_ms, e);
		/* A list whose beginning has been taken must not start over. */
		*ret_lost = r == -ECONNREFUSED && first;
		if (r < 0)
			return r;
		int progress = reply->head.header.type == PROTOCOL_PROGRESS;
		if (!progress && !reply->head.more)
			*ret_clean = 1;
		if (reply->head.code) {
			reply_close(reply);
			return error_set(e, (enum error_code)reply->head.code, "%s", reply->body);
		}
		if (call->on_reply)
			r = call->on_reply(call->context, reply, e);
		for (size_t i = 0; i < reply->fd_count; i++)
			if (reply->fds[i] >= 0)
				close(reply->fds[i]);
		if (r < 0 || *ret_clean)
			return r;
	}
}

/* One attempt. *ret_lost: the helper went away without an answer. */
static int attempt(struct host_client *client, const struct call *call, struct reply *reply, int *ret_lost,
                   struct error *e)
{
	*ret_lost = 0;
	int fd = connection_take(client, e);
	if (fd < 0)
		return fd;
	int clean = 0;
	int r = fd_send_message(fd, call->request, call->size, call->fds, call->fd_count);
	if (r == -EBADF || r == -EMSGSIZE || r == -EINVAL) {
		error_set_errno(e, r, "request to the host helper");
	} else if (r < 0) {
		*ret_lost = 1;
		error_set(e, ERROR_UNAVAILABLE, "host helper: cannot send a request: %s", strerror(-r));
	} else {
		r = collect(fd, call, reply, &clean, ret_lost, e);
	}
	if (clean)
		connection_release(client, fd);
	else
		connection_drop(client, fd);
	return r;
}

static int perform(struct host_client *client, const struct call *call, struct error *e)
{
	CLEANUP_FREE struct reply *reply = malloc(sizeof(*reply));
	if (!reply)
		return error_set_errno(e, ENOMEM, "host helper");
	int lost;
	int r = attempt(client, call, reply, &lost, e);
	/* What a helper that died had begun, its successor finishes or undoes, so the request can be sent again. One that
	 * is still dying takes connections and never answers: hence more than one try. */
	for (int i = 0; i < CLIENT_REPEATS_MAX && r < 0 && lost && call->repeat; i++) {
		nanosleep(&(struct timespec){.tv_nsec = (CLIENT_CONNECT_STEP_MS << i) * 1000000L}, NULL);
		r = attempt(client, call, reply, &lost, e);
	}
	return r;
}

static struct protocol_header make_header(enum protocol_type type, size_t size)
{
	return (struct protocol_header){
	    .magic = PROTOCOL_MAGIC, .version = PROTOCOL_VERSION, .type = (uint16_t)type, .size = (uint32_t)size};
}

static int set_id(char to[ID_BYTES], const char *id, struct error *e)
{
	if (!id || text_copy(to, ID_BYTES, id) < 0)
		return error_set(e, ERROR_INVALID, "not a sandbox id: \"%.40s\"", id ? id : "");
	return 0;
}

/* Appends NULL-terminated `strings` with their NULs and counts them. */
static int append_strings(struct buf *b, const char *const *strings, size_t count_max, uint32_t *ret_count)
{
	*ret_count = 0;
	for (; strings && strings[*ret_count]; (*ret_count)++) {
		if (*ret_count >= count_max)
			return -E2BIG;
		int r = buf_append(b, strings[*ret_count], strlen(strings[*ret_count]) + 1);
		if (r < 0)
			return r;
	}
	return 0;
}

struct start_result {
	pid_t pid;
	int pidfd;
};

static int on_start(void *context, struct reply *reply, struct error *e)
{
	struct start_result *result = context;
	if (reply->fd_count != 1)
		return error_set(e, ERROR_INTERNAL, "host helper sent no pidfd for the new sandbox");
	result->pid = (pid_t)reply->head.value;
	result->pidfd = TAKE_FD(reply->fds[0]);
	return 0;
}

int host_sandbox_start(struct host_client *client, const struct host_sandbox_spec *spec, pid_t *ret_pid, int *ret_pidfd,
                       struct error *e)
{
	CLEANUP_BUF struct buf message = {.limit = sizeof(struct protocol_start) + HOST_ARGUMENT_BYTES_MAX};
	struct protocol_start start = {
	    .memory_max_bytes = spec->memory_max_bytes, .cpu_percent = spec->cpu_percent, .pids_max = spec->pids_max};
	int r = set_id(start.id, spec->id, e);
	if (r < 0)
		return r;
	if (text_copy(start.program, sizeof(start.program), spec->program) < 0)
		return error_set(e, ERROR_INVALID, "no VMM program \"%.40s\"", spec->program);
	if (spec->preload_environment && text_copy(start.preload, sizeof(start.preload), spec->preload_environment) < 0)
		return error_set(e, ERROR_INVALID, "no preload library \"%.40s\"", spec->preload_environment);
	if (spec->fd_count > HOST_SANDBOX_FDS_MAX)
		return error_set(e, ERROR_TOO_LARGE, "more than %d descriptors for a sandbox", HOST_SANDBOX_FDS_MAX);
	r = buf_append(&message, &start, sizeof(start));
	if (r == 0)
		r = append_strings(&message, spec->arguments, HOST_ARGUMENTS_MAX, &start.argument_count);
	if (r < 0)
		return error_set(e, r == -ENOMEM ? ERROR_EXHAUSTED : ERROR_TOO_LARGE,
		                 "VMM arguments pass %d strings or %d bytes", HOST_ARGUMENTS_MAX, HOST_ARGUMENT_BYTES_MAX);
	start.argument_bytes = (uint32_t)(message.size - sizeof(start));
	random_bytes(&start.nonce, sizeof(start.nonce));
	start.header = make_header(PROTOCOL_SANDBOX_START, message.size);
	memcpy(message.data, &start, sizeof(start));
	struct start_result result = {.pidfd = -1};
	struct call call = {.request = message.data,
	                    .size = message.size,
	                    .fds = spec->fds,
	                    .fd_count = spec->fd_count,
	                    .timeout_ms = CLIENT_REPLY_WAIT_MS,
	                    .repeat = 1,
	                    .on_reply = on_start,
	                    .context = &result};
	r = perform(client, &call, e);
	if (r < 0) {
		/* The helper may have started it, in spite of all; nobody could know of it but by its id. */
		if (r == error_code_errno(ERROR_UNAVAILABLE) || r == error_code_errno(ERROR_TIMEOUT))
			host_sandbox_kill(client, spec->id, NULL);
		return r;
	}
	*ret_pid = result.pid;
	*ret_pidfd = result.pidfd;
	return 0;
}

static int call_sandbox(struct host_client *client, enum protocol_type type, const char *id, uint32_t count,
                        int (*on_reply)(void *context, struct reply *reply, struct error *e), void *context,
                        struct error *e)
{
	struct protocol_sandbox request = {.header = make_header(type, sizeof(request)), .count = count};
	int r = set_id(request.id, id, e);
	if (r < 0)
		return r;
	struct call call = {.request = &request,
	                    .size = sizeof(request),
	                    .timeout_ms = CLIENT_REPLY_WAIT_MS,
	                    .repeat = 1,
	                    .on_reply = on_reply,
	                    .context = context};
	return perform(client, &call, e);
}

int host_sandbox_kill(struct host_client *client, const char *id, struct error *e)
{
	return call_sandbox(client, PROTOCOL_SANDBOX_KILL, id, 0, NULL, NULL, e);
}

static int on_text(void *context, struct reply *reply, struct error *e)
{
	char **ret = context;
	*ret = strndup(reply->body, reply->body_size);
	return *ret ? 0 : error_set_errno(e, ENOMEM, "host helper");
}

int host_sandbox_output(struct host_client *client, const char *id, char **ret, struct error *e)
{
	return call_sandbox(client, PROTOCOL_SANDBOX_OUTPUT, id, 0, on_text, ret, e);
}

struct sockets_result {
	int *fds;
	size_t count;
};

static int on_sockets(void *context, struct reply *reply, struct error *e)
{
	struct sockets_result *result = context;
	if (reply->fd_count != result->count)
		return error_set(e, ERROR_INTERNAL, "host helper sent %zu sockets instead of %zu", reply->fd_count,
		                 result->count);
	for (size_t i = 0; i < result->count; i++)
		result->fds[i] = TAKE_FD(reply->fds[i]);
	return 0;
}

int host_sandbox_sockets(struct host_client *client, const char *id, int *fds, size_t count, struct error *e)
{
	if (count < 1 || count > PROTOCOL_SOCKETS_MAX)
		return error_set(e, ERROR_INVALID, "%zu sockets asked for, 1 to %d are allowed", count, PROTOCOL_SOCKETS_MAX);
	struct sockets_result result = {.fds = fds, .count = count};
	return call_sandbox(client, PROTOCOL_SANDBOX_SOCKETS, id, (uint32_t)count, on_sockets, &result, e);
}

struct list_result {
	struct host_sandbox_info *entries;
	size_t count;
};

static int on_list(void *context, struct reply *reply, struct error *e)
{
	struct list_result *result = context;
	size_t count = reply->head.value;
	size_t next_fd = 0;
	if (count > PROTOCOL_LIST_BATCH || count * sizeof(struct protocol_entry) != reply->body_size)
		return error_set(e, ERROR_INTERNAL, "host helper sent a damaged list");
	struct host_sandbox_info *larger = realloc(result->entries, (result->count + count + 1) * sizeof(*result->entries));
	if (!larger)
		return error_set_errno(e, ENOMEM, "list of sandboxes");
	result->entries = larger;
	for (size_t i = 0; i < count; i++) {
		struct protocol_entry entry;
		memcpy(&entry, reply->body + i * sizeof(entry), sizeof(entry));
		struct host_sandbox_info *info = &result->entries[result->count++];
		*info = (struct host_sandbox_info){.pid = entry.pid,
		                                   .pidfd = -1,
		                                   .alive = entry.alive,
		                                   .exit_known = entry.exit_known,
		                                   .exit_status = entry.exit_status};
		entry.id[ID_BYTES - 1] = '\0';
		text_copy(info->id, sizeof(info->id), entry.id);
		if (!entry.has_pidfd)
			continue;
		if (next_fd >= reply->fd_count)
			return error_set(e, ERROR_INTERNAL, "host helper sent a list without its pidfds");
		info->pidfd = TAKE_FD(reply->fds[next_fd]);
		next_fd++;
	}
	return 0;
}

static int call_bare(struct host_client *client, enum protocol_type type,
                     int (*on_reply)(void *context, struct reply *reply, struct error *e), void *context,
                     struct error *e)
{
	struct protocol_header request = make_header(type, sizeof(request));
	struct call call = {.request = &request,
	                    .size = sizeof(request),
	                    .timeout_ms = CLIENT_REPLY_WAIT_MS,
	                    .repeat = 1,
	                    .on_reply = on_reply,
	                    .context = context};
	return perform(client, &call, e);
}

int host_sandbox_list(struct host_client *client, struct host_sandbox_info **ret, size_t *ret_count, struct error *e)
{
	struct list_result result = {0};
	int r = call_bare(client, PROTOCOL_SANDBOX_LIST, on_list, &result, e);
	if (r < 0) {
		for (size_t i = 0; i < result.count; i++)
			if (result.entries[i].pidfd >= 0)
				close(result.entries[i].pidfd);
		free(result.entries);
		return r;
	}
	*ret = result.entries;
	*ret_count = result.count;
	return 0;
}

static int on_pages(void *context, struct reply *reply, struct error *e)
{
	*(uint64_t *)context = reply->head.value;
	return 0;
}

int host_memory_copy(struct host_client *client, const char *id, int base_fd, uint64_t size, int pages_fd,
                     int bitmap_fd, uint64_t *ret_pages, struct error *e)
{
	struct protocol_memory request = {.header = make_header(PROTOCOL_MEMORY_COPY, sizeof(request)), .size = size};
	int r = set_id(request.id, id, e);
	if (r < 0)
		return r;
	int fds[] = {base_fd, pages_fd, bitmap_fd};
	uint64_t pages = 0;
	struct call call = {.request = &request,
	                    .size = sizeof(request),
	                    .fds = fds,
	                    .fd_count = ARRAY_SIZE(fds),
	                    .timeout_ms = CLIENT_REPLY_WAIT_MS,
	                    .repeat = 1,
	                    .on_reply = on_pages,
	                    .context = &pages};
	r = perform(client, &call, e);
	if (r == 0 && ret_pages)
		*ret_pages = pages;
	return r;
}

struct build_context {
	void (*progress)(void *context, const char *line);
	void *context;
};

static int on_build(void *context, struct reply *reply, struct error *e)
{
	const struct build_context *build = context;
	if (reply->head.header.type == PROTOCOL_PROGRESS && build->progress)
		build->progress(build->context, reply->body);
	return 0;
}

int host_image_build(struct host_client *client, const struct host_image_spec *spec,
                     void (*progress)(void *context, const char *line), void *context, struct error *e)
{
	CLEANUP_BUF struct buf message = {.limit = sizeof(struct protocol_image) + PROTOCOL_PACKAGE_BYTES_MAX};
	struct protocol_image image = {.size_bytes = spec->size_bytes};
	if (spec->suite && text_copy(image.suite, sizeof(image.suite), spec->suite) < 0)
		return error_set(e, ERROR_INVALID, "no Debian suite \"%.40s\"", spec->suite);
	int r = buf_append(&message, &image, sizeof(image));
	if (r == 0)
		r = append_strings(&message, spec->packages, PROTOCOL_PACKAGES_MAX, &image.package_count);
	if (r < 0)
		return error_set(e, r == -ENOMEM ? ERROR_EXHAUSTED : ERROR_TOO_LARGE, "more than %d packages or %d bytes",
		                 PROTOCOL_PACKAGES_MAX, PROTOCOL_PACKAGE_BYTES_MAX);
	image.package_bytes = (uint32_t)(message.size - sizeof(image));
	image.header = make_header(PROTOCOL_IMAGE_BUILD, message.size);
	memcpy(message.data, &image, sizeof(image));
	int fds[] = {spec->agent_fd, spec->disk_fd, spec->kernel_fd, spec->initrd_fd};
	struct build_context build = {.progress = progress, .context = context};
	struct call call = {.request = message.data,
	                    .size = message.size,
	                    .fds = fds,
	                    .fd_count = ARRAY_SIZE(fds),
	                    .timeout_ms = CLIENT_BUILD_WAIT_MS,
	                    .on_reply = on_build,
	                    .context = &build};
	return perform(client, &call, e);
}

static int on_storage(void *context, struct reply *reply, struct error *e)
{
	struct host_storage_info *info = context;
	if (reply->body_size != sizeof(*info))
		return error_set(e, ERROR_INTERNAL, "host helper sent a damaged storage record");
	memcpy(info, reply->body, sizeof(*info));
	info->data_dir[sizeof(info->data_dir) - 1] = '\0';
	info->filesystem[sizeof(info->filesystem) - 1] = '\0';
	return 0;
}

int host_storage(struct host_client *client, struct host_storage_info *ret, struct error *e)
{
	return call_bare(client, PROTOCOL_STORAGE, on_storage, ret, e);
}

int host_doctor(struct host_client *client, char **ret_lines, struct error *e)
{
	return call_bare(client, PROTOCOL_DOCTOR, on_text, ret_lines, e);
}
