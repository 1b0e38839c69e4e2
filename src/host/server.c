#include "host/server.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/fd.h"
#include "base/log.h"
#include "host/builder.h"
#include "host/doctor.h"
#include "host/protocol.h"

#define SERVER_CONNECTIONS_MAX 64
#define SERVER_THREAD_STACK_BYTES (512 * 1024)
#define SERVER_SEND_WAIT_S 10
#define SERVER_BUILDS_MAX 2 /* image builds at one time */

struct connection {
	struct server *server;
	int sock;
	/* The request being served. */
	char message[PROTOCOL_MESSAGE_BYTES_MAX];
	size_t size;
	int fds[FD_PASS_MAX];
	size_t fd_count;
	int settle; /* there is work for after the reply */
};

/* Handlers send their own reply on success and return 0; on failure they fill e. */
struct request {
	enum protocol_type type;
	size_t size_min;
	size_t size_max;
	size_t fds_min;
	size_t fds_max;
	int (*handle)(struct connection *c, struct error *e);
};

static pthread_mutex_t count_lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned connection_count;
static unsigned build_count;

static int send_reply(struct connection *c, enum protocol_type type, struct protocol_reply head, const void *body,
                      size_t body_size, const int *fds, size_t fd_count)
{
	CLEANUP_BUF struct buf message = {0};
	head.header = (struct protocol_header){.magic = PROTOCOL_MAGIC,
	                                       .version = PROTOCOL_VERSION,
	                                       .type = (uint16_t)type,
	                                       .size = (uint32_t)(sizeof(head) + body_size)};
	if (buf_append(&message, &head, sizeof(head)) < 0 || buf_append(&message, body, body_size) < 0)
		return -ENOMEM;
	return fd_send_message(c->sock, message.data, message.size, fds, fd_count);
}

static int reply_value(struct connection *c, uint64_t value, const int *fds, size_t fd_count)
{
	return send_reply(c, PROTOCOL_REPLY, (struct protocol_reply){.value = value}, NULL, 0, fds, fd_count);
}

static int reply_error(struct connection *c, const struct error *e)
{
	struct protocol_reply head = {.code = e->code ? e->code : ERROR_INTERNAL};
	return send_reply(c, PROTOCOL_REPLY, head, e->message, strlen(e->message), NULL, 0);
}

/* A fixed text field of a request: terminated within its size? */
static int is_text(const char *field, size_t size)
{
	return memchr(field, '\0', size) != NULL;
}

/*
 * Splits `bytes` bytes that follow the fixed part into `count` NUL-terminated strings; `to` gets pointers into the
 * message and a final NULL. They must fill the rest of the message exactly.
 */
static int split_strings(struct connection *c, size_t fixed, uint32_t count, uint32_t bytes, size_t count_max,
                         const char **to, struct error *e)
{
	const char *p = c->message + fixed;
	const char *end = c->message + c->size;
	if (count > count_max || bytes != (size_t)(end - p))
		return error_set(e, ERROR_INVALID, "malformed list of strings");
	for (uint32_t i = 0; i < count; i++) {
		const char *nul = memchr(p, '\0', (size_t)(end - p));
		if (!nul)
			return error_set(e, ERROR_INVALID, "malformed list of strings");
		to[i] = p;
		p = nul + 1;
	}
	to[count] = NULL;
	return p == end ? 0 : error_set(e, ERROR_INVALID, "malformed list of strings");
}

static int handle_start(struct connection *c, struct error *e)
{
	struct protocol_start start;
	const char *arguments[HOST_ARGUMENTS_MAX + 1];
	pid_t pid;
	memcpy(&start, c->message, sizeof(start));
	if (!is_text(start.id, sizeof(start.id)) || !is_text(start.program, sizeof(start.program)) ||
	    !is_text(start.preload, sizeof(start.preload)))
		return error_set(e, ERROR_INVALID, "malformed start request");
	int r =
	    split_strings(c, sizeof(start), start.argument_count, start.argument_bytes, HOST_ARGUMENTS_MAX, arguments, e);
	if (r < 0)
		return r;
	struct host_sandbox_spec spec = {
	    .id = start.id,
	    .program = start.program,
	    .arguments = arguments,
	    .fds = c->fds,
	    .fd_count = c->fd_count,
	    .memory_max_bytes = start.memory_max_bytes,
	    .cpu_percent = start.cpu_percent,
	    .pids_max = start.pids_max,
	    .preload_environment = *start.preload ? start.preload : NULL,
	};
	CLEANUP_CLOSE int pidfd = -1;
	r = sandbox_start(c->server->sandboxes, &spec, start.nonce, &pid, &pidfd, e);
	if (r < 0)
		return r;
	if (reply_value(c, (uint64_t)pid, &pidfd, 1) < 0)
		sandbox_kill(c->server->sandboxes, start.id, NULL);
	return 0;
}

static int take_sandbox(struct connection *c, struct protocol_sandbox *request, struct error *e)
{
	memcpy(request, c->message, sizeof(*request));
	if (!is_text(request->id, sizeof(request->id)) || !id_is_valid(request->id, 'b'))
		return error_set(e, ERROR_INVALID, "not a sandbox id");
	return 0;
}

static int handle_kill(struct connection *c, struct error *e)
{
	struct protocol_sandbox request;
	int r = take_sandbox(c, &request, e);
	if (r == 0)
		r = sandbox_kill(c->server->sandboxes, request.id, e);
	if (r == 0)
		reply_value(c, 0, NULL, 0);
	c->settle = 1;
	return r;
}

static int send_batch(struct connection *c, const struct host_sandbox_info *list, size_t count, int more)
{
	struct protocol_entry entries[PROTOCOL_LIST_BATCH];
	int fds[PROTOCOL_LIST_BATCH];
	size_t fd_count = 0;
	memset(entries, 0, sizeof(entries));
	for (size_t i = 0; i < count; i++) {
		entries[i].pid = list[i].pid;
		entries[i].exit_status = list[i].exit_status;
		entries[i].exit_known = (uint8_t)list[i].exit_known;
		entries[i].alive = (uint8_t)list[i].alive;
		entries[i].has_pidfd = list[i].pidfd >= 0;
		text_copy(entries[i].id, sizeof(entries[i].id), list[i].id);
		if (list[i].pidfd >= 0)
			fds[fd_count++] = list[i].pidfd;
	}
	struct protocol_reply head = {.more = (uint32_t)more, .value = count};
	return send_reply(c, PROTOCOL_REPLY, head, entries, count * sizeof(*entries), fds, fd_count);
}

static int handle_list(struct connection *c, struct error *e)
{
	CLEANUP_FREE struct host_sandbox_info *list = NULL;
	size_t count;
	int r = sandbox_list(c->server->sandboxes, &list, &count, e);
	if (r < 0)
		return r;
	size_t sent = 0;
	do {
		size_t batch = MIN(count - sent, PROTOCOL_LIST_BATCH);
		r = send_batch(c, list + sent, batch, sent + batch < count);
		sent += batch;
	} while (sent < count && r == 0);
	for (size_t i = 0; i < count; i++)
		if (list[i].pidfd >= 0)
			close(list[i].pidfd);
	return 0;
}

static int handle_sockets(struct connection *c, struct error *e)
{
	struct protocol_sandbox request;
	int fds[PROTOCOL_SOCKETS_MAX];
	int r = take_sandbox(c, &request, e);
	if (r < 0)
		return r;
	if (request.count < 1 || request.count > PROTOCOL_SOCKETS_MAX)
		return error_set(e, ERROR_INVALID, "%u sockets asked for, 1 to %d are allowed", request.count,
		                 PROTOCOL_SOCKETS_MAX);
	r = sandbox_sockets(c->server->sandboxes, request.id, fds, request.count, e);
	if (r < 0)
		return r;
	reply_value(c, request.count, fds, request.count);
	for (uint32_t i = 0; i < request.count; i++)
		close(fds[i]);
	return 0;
}

static int handle_output(struct connection *c, struct error *e)
{
	struct protocol_sandbox request;
	size_t size;
	CLEANUP_FREE char *text = malloc(PROTOCOL_OUTPUT_BYTES_MAX + 1);
	if (!text)
		return error_set_errno(e, ENOMEM, "output of a sandbox");
	int r = take_sandbox(c, &request, e);
	if (r == 0)
		r = sandbox_output(c->server->sandboxes, request.id, text, &size, e);
	if (r == 0)
		send_reply(c, PROTOCOL_REPLY, (struct protocol_reply){0}, text, size, NULL, 0);
	return r;
}

static int handle_memory(struct connection *c, struct error *e)
{
	struct protocol_memory request;
	uint64_t pages;
	memcpy(&request, c->message, sizeof(request));
	if (!is_text(request.id, sizeof(request.id)))
		return error_set(e, ERROR_INVALID, "not a sandbox id");
	int r =
	    sandbox_memory_copy(c->server->sandboxes, request.id, c->fds[0], request.size, c->fds[1], c->fds[2], &pages, e);
	if (r == 0)
		reply_value(c, pages, NULL, 0);
	c->settle = 1;
	return r;
}

static int send_progress(void *context, const char *line)
{
	return send_reply(context, PROTOCOL_PROGRESS, (struct protocol_reply){0}, line, strlen(line), NULL, 0);
}

static int peer_is_gone(void *context)
{
	const struct connection *c = context;
	struct pollfd p = {.fd = c->sock, .events = POLLRDHUP};
	return poll(&p, 1, 0) > 0;
}

static int build_slot(int change)
{
	pthread_mutex_lock(&count_lock);
	int ok = change < 0 || build_count < SERVER_BUILDS_MAX;
	if (ok)
		build_count += (unsigned)change;
	pthread_mutex_unlock(&count_lock);
	return ok;
}

static int handle_build(struct connection *c, struct error *e)
{
	struct protocol_image image;
	const char *packages[PROTOCOL_PACKAGES_MAX + 1];
	memcpy(&image, c->message, sizeof(image));
	if (!is_text(image.suite, sizeof(image.suite)))
		return error_set(e, ERROR_INVALID, "malformed image request");
	int r =
	    split_strings(c, sizeof(image), image.package_count, image.package_bytes, PROTOCOL_PACKAGES_MAX, packages, e);
	if (r < 0)
		return r;
	if (!build_slot(1))
		return error_set(e, ERROR_EXHAUSTED, "%d images are being built already", SERVER_BUILDS_MAX);
	struct host_image_spec spec = {
	    .packages = packages,
	    .size_bytes = image.size_bytes,
	    .suite = *image.suite ? image.suite : NULL,
	    .agent_fd = c->fds[0],
	    .disk_fd = c->fds[1],
	    .kernel_fd = c->fds[2],
	    .initrd_fd = c->fds[3],
	};
	r = builder_run(c->server->config, &spec, send_progress, peer_is_gone, c, e);
	build_slot(-1);
	if (r == 0)
		reply_value(c, 0, NULL, 0);
	return r;
}

static int handle_storage(struct connection *c, struct error *e)
{
	(void)e;
	send_reply(c, PROTOCOL_REPLY, (struct protocol_reply){0}, &c->server->storage, sizeof(c->server->storage), NULL, 0);
	return 0;
}

static int handle_doctor(struct connection *c, struct error *e)
{
	CLEANUP_BUF struct buf lines = {.limit = PROTOCOL_MESSAGE_BYTES_MAX / 2};
	int r = doctor_report(c->server->config, c->server->sandboxes, &c->server->storage, &lines);
	if (r < 0)
		return error_set_errno(e, r, "doctor");
	send_reply(c, PROTOCOL_REPLY, (struct protocol_reply){0}, lines.data, lines.size, NULL, 0);
	return 0;
}

static const struct request requests[] = {
    {PROTOCOL_SANDBOX_START, sizeof(struct protocol_start), sizeof(struct protocol_start) + HOST_ARGUMENT_BYTES_MAX, 0,
     HOST_SANDBOX_FDS_MAX, handle_start},
    {PROTOCOL_SANDBOX_KILL, sizeof(struct protocol_sandbox), sizeof(struct protocol_sandbox), 0, 0, handle_kill},
    {PROTOCOL_SANDBOX_LIST, sizeof(struct protocol_header), sizeof(struct protocol_header), 0, 0, handle_list},
    {PROTOCOL_SANDBOX_SOCKETS, sizeof(struct protocol_sandbox), sizeof(struct protocol_sandbox), 0, 0, handle_sockets},
    {PROTOCOL_SANDBOX_OUTPUT, sizeof(struct protocol_sandbox), sizeof(struct protocol_sandbox), 0, 0, handle_output},
    {PROTOCOL_MEMORY_COPY, sizeof(struct protocol_memory), sizeof(struct protocol_memory), 3, 3, handle_memory},
    {PROTOCOL_IMAGE_BUILD, sizeof(struct protocol_image), sizeof(struct protocol_image) + PROTOCOL_PACKAGE_BYTES_MAX, 4,
     4, handle_build},
    {PROTOCOL_STORAGE, sizeof(struct protocol_header), sizeof(struct protocol_header), 0, 0, handle_storage},
    {PROTOCOL_DOCTOR, sizeof(struct protocol_header), sizeof(struct protocol_header), 0, 0, handle_doctor},
};

static int dispatch(struct connection *c, struct error *e)
{
	struct protocol_header header;
	if (c->size < sizeof(header))
		return error_set(e, ERROR_INVALID, "request is shorter than its header");
	memcpy(&header, c->message, sizeof(header));
	if (header.magic != PROTOCOL_MAGIC || header.version != PROTOCOL_VERSION || header.size != c->size)
		return error_set(e, ERROR_INVALID, "request has a foreign header");
	for (size_t i = 0; i < ARRAY_SIZE(requests); i++) {
		const struct request *request = &requests[i];
		if (header.type != request->type)
			continue;
		if (c->size < request->size_min || c->size > request->size_max)
			return error_set(e, ERROR_INVALID, "request %u has %zu bytes", header.type, c->size);
		if (c->fd_count < request->fds_min || c->fd_count > request->fds_max)
			return error_set(e, ERROR_INVALID, "request %u came with %zu descriptors", header.type, c->fd_count);
		return request->handle(c, e);
	}
	return error_set(e, ERROR_INVALID, "unknown request %u", header.type);
}

static void serve_one(struct connection *c)
{
	struct error e = {0};
	int r = dispatch(c, &e);
	for (size_t i = 0; i < c->fd_count; i++)
		close(c->fds[i]);
	c->fd_count = 0;
	if (r < 0)
		reply_error(c, &e);
	if (c->settle)
		sandbox_settle(c->server->sandboxes);
	c->settle = 0;
}

static void *connection_thread(void *context)
{
	struct connection *c = context;
	for (;;) {
		/* One byte is kept free so that a message that fills the buffer is seen as too long. */
		ssize_t n = fd_receive_message(c->sock, c->message, sizeof(c->message), c->fds, FD_PASS_MAX, &c->fd_count);
		if (n == -EMSGSIZE) {
			struct error e;
			error_set(&e, ERROR_TOO_LARGE, "request is larger than %d bytes or has more than %d descriptors",
			          PROTOCOL_MESSAGE_BYTES_MAX, FD_PASS_MAX);
			if (reply_error(c, &e) < 0)
				break;
			continue;
		}
		if (n <= 0)
			break;
		c->size = (size_t)n;
		serve_one(c);
	}
	close(c->sock);
	free(c);
	pthread_mutex_lock(&count_lock);
	connection_count--;
	pthread_mutex_unlock(&count_lock);
	return NULL;
}

static int peer_is_allowed(const struct server *server, int sock)
{
	struct ucred peer;
	socklen_t size = sizeof(peer);
	if (getsockopt(sock, SOL_SOCKET, SO_PEERCRED, &peer, &size) < 0)
		return 0;
	if (peer.uid == 0 || peer.uid == server->user)
		return 1;
	log_warning("helper", "refused a connection of user id %u (process %d)", (unsigned)peer.uid, (int)peer.pid);
	return 0;
}

static int take_place(void)
{
	pthread_mutex_lock(&count_lock);
	int free_place = connection_count < SERVER_CONNECTIONS_MAX;
	connection_count += (unsigned)free_place;
	pthread_mutex_unlock(&count_lock);
	return free_place;
}

static void accept_one(struct server *server, int listener)
{
	CLEANUP_CLOSE int sock = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
	if (sock < 0 || !peer_is_allowed(server, sock))
		return;
	if (!take_place()) {
		log_warning("helper", "refused a connection: %d are open", SERVER_CONNECTIONS_MAX);
		return;
	}
	struct connection *c = calloc(1, sizeof(*c));
	pthread_attr_t attributes;
	pthread_t thread;
	pthread_attr_init(&attributes);
	pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
	pthread_attr_setstacksize(&attributes, SERVER_THREAD_STACK_BYTES);
	if (c) {
		/* Someone who does not read their replies must not hold a thread for ever. */
		struct timeval wait = {.tv_sec = SERVER_SEND_WAIT_S};
		setsockopt(sock, SOL_SOCKET, SO_SNDTIMEO, &wait, sizeof(wait));
		c->server = server;
		c->sock = sock;
	}
	if (c && pthread_create(&thread, &attributes, connection_thread, c) == 0) {
		sock = -1;
	} else {
		free(c);
		pthread_mutex_lock(&count_lock);
		connection_count--;
		pthread_mutex_unlock(&count_lock);
	}
	pthread_attr_destroy(&attributes);
}

static int open_listener(const struct server *server, struct error *e)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	char path[CONFIG_PATH_BYTES + 32];
	config_helper_socket(server->config, path, sizeof(path));
	if (text_copy(address.sun_path, sizeof(address.sun_path), path) < 0)
		return error_set(e, ERROR_INVALID, "socket path %s is longer than %zu bytes", path,
		                 sizeof(address.sun_path) - 1);
	CLEANUP_CLOSE int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return error_set_errno(e, errno, "socket");
	unlink(path);
	mode_t old = umask(0777);
	int r = bind(fd, (const struct sockaddr *)&address, sizeof(address)) < 0 ? -errno : 0;
	umask(old);
	if (r < 0)
		return error_set_errno(e, r, "%s", path);
	if (lchown(path, 0, server->group) < 0 || fchmodat(AT_FDCWD, path, 0660, 0) < 0 || listen(fd, 64) < 0)
		return error_set_errno(e, errno, "%s", path);
	return TAKE_FD(fd);
}

int server_run(struct server *server, struct error *e)
{
	sigset_t mask;
	sigemptyset(&mask);
	sigaddset(&mask, SIGCHLD);
	sigaddset(&mask, SIGTERM);
	sigaddset(&mask, SIGINT);
	CLEANUP_CLOSE int signals = signalfd(-1, &mask, SFD_CLOEXEC);
	if (signals < 0)
		return error_set_errno(e, errno, "signalfd");
	CLEANUP_CLOSE int listener = open_listener(server, e);
	if (listener < 0)
		return listener;
	log_info("helper", "ready");
	for (;;) {
		struct pollfd p[] = {{.fd = signals, .events = POLLIN}, {.fd = listener, .events = POLLIN}};
		if (poll(p, ARRAY_SIZE(p), -1) < 0 && errno != EINTR)
			return error_set_errno(e, errno, "poll");
		if (p[0].revents) {
			struct signalfd_siginfo info;
			if (fd_read_full(signals, &info, sizeof(info)) == (ssize_t)sizeof(info) && info.ssi_signo != SIGCHLD)
				break;
			sandbox_reap(server->sandboxes);
		}
		if (p[1].revents)
			accept_one(server, listener);
	}
	char path[CONFIG_PATH_BYTES + 32];
	config_helper_socket(server->config, path, sizeof(path));
	unlink(path);
	return 0;
}
