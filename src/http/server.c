#include "server_internal.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/text.h"

#define SERVER_BACKLOG 1024
#define SERVER_TCP_KEEPALIVE_S 60

static int set_uv(struct error *e, int r, const char *what)
{
	return error_set(e, ERROR_UNAVAILABLE, "%s: %s", what, uv_strerror(r));
}

static void on_idle(uv_idle_t *idle);

void server_defer(struct connection *c)
{
	if (c->is_deferred)
		return;
	struct http_server *server = c->server;
	c->is_deferred = 1;
	c->next_deferred = server->deferred;
	server->deferred = c;
	uv_idle_start(&server->idle, on_idle);
}

static void on_idle(uv_idle_t *idle)
{
	struct http_server *server = (struct http_server *)((char *)idle - offsetof(struct http_server, idle));
	struct connection *list = server->deferred;
	server->deferred = NULL;
	while (list) {
		struct connection *c = list;
		list = c->next_deferred;
		c->is_deferred = 0;
		http1_advance(c);
	}
	if (!server->deferred)
		uv_idle_stop(idle);
}

static void on_sweep(uv_timer_t *timer)
{
	struct http_server *server = (struct http_server *)((char *)timer - offsetof(struct http_server, sweep));
	uint64_t now = time_monotonic_ms();
	for (struct connection *c = server->connections; c; c = c->next)
		http1_sweep(c, now);
	if (!server->connections)
		uv_timer_stop(timer);
}

const char *server_date(struct http_server *server)
{
	uint64_t now = time_realtime_ms() / 1000;
	if (now != server->date_s) {
		time_t t = (time_t)now;
		struct tm tm;
		gmtime_r(&t, &tm);
		strftime(server->date, sizeof(server->date), "%a, %d %b %Y %H:%M:%S GMT", &tm);
		server->date_s = now;
	}
	return server->date;
}

int http_server_new(uv_loop_t *loop, const struct http_server_limits *limits,
                    void (*on_request)(void *context, struct http_stream *s), void *context, struct http_server **ret,
                    struct error *e)
{
	struct http_server *server = calloc(1, sizeof(*server));
	if (!server)
		return error_set_errno(e, ENOMEM, "HTTP server");
	server->loop = loop;
	server->limits = *limits;
	server->on_request = on_request;
	server->context = context;
	uv_timer_init(loop, &server->sweep);
	uv_unref((uv_handle_t *)&server->sweep);
	uv_idle_init(loop, &server->idle);
	*ret = server;
	return 0;
}

static void fill_peer(struct connection *c)
{
	int fd;
	struct sockaddr_storage address;
	int size = sizeof(address);
	if (c->handle.handle.type == UV_NAMED_PIPE) {
		struct ucred credentials;
		socklen_t length = sizeof(credentials);
		c->peer.is_unix = 1;
		c->peer.uid = (uid_t)-1;
		c->peer.gid = (gid_t)-1;
		if (uv_fileno(&c->handle.handle, &fd) == 0 &&
		    getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &length) == 0) {
			c->peer.uid = credentials.uid;
			c->peer.gid = credentials.gid;
			c->peer.pid = credentials.pid;
		}
		return;
	}
	if (uv_tcp_getpeername(&c->handle.tcp, (struct sockaddr *)&address, &size) == 0)
		uv_ip_name((struct sockaddr *)&address, c->peer.address, sizeof(c->peer.address));
	uv_tcp_nodelay(&c->handle.tcp, 1);
	uv_tcp_keepalive(&c->handle.tcp, 1, SERVER_TCP_KEEPALIVE_S);
}

static void on_refused_closed(uv_handle_t *handle)
{
	free(handle);
}

static void refuse_connection(struct connection *c)
{
	static const char body[] = "{\"code\":\"exhausted\",\"message\":\"too many open connections\",\"details\":{}}";
	char answer[256];
	int size = snprintf(answer, sizeof(answer),
	                    "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n"
	                    "connection: close\r\ncontent-length: %zu\r\n\r\n%s",
	                    sizeof(body) - 1, body);
	uv_buf_t buf = uv_buf_init(answer, (unsigned)size);
	uv_try_write(&c->handle.stream, &buf, 1);
	c->server->stats.refused++;
	uv_close(&c->handle.handle, on_refused_closed);
}

static void on_connection(uv_stream_t *listener, int status)
{
	struct http_server *server = listener->data;
	if (status < 0)
		return;
	struct connection *c = calloc(1, sizeof(*c));
	if (!c)
		return; /* the backlog keeps it until there is memory */
	c->server = server;
	int r = listener->type == UV_NAMED_PIPE ? uv_pipe_init(server->loop, &c->handle.pipe, 0)
	                                        : uv_tcp_init(server->loop, &c->handle.tcp);
	if (r < 0) {
		free(c);
		return;
	}
	r = uv_accept(listener, &c->handle.stream);
	if (r < 0) {
		uv_close(&c->handle.handle, on_refused_closed);
		return;
	}
	server->stats.accepted++;
	if (server->stopping || server->stats.connections >= server->limits.connections_max) {
		refuse_connection(c);
		return;
	}
	fill_peer(c);
	server->stats.connections++;
	c->next = server->connections;
	if (c->next)
		c->next->previous = c;
	server->connections = c;
	if (!uv_is_active((uv_handle_t *)&server->sweep)) {
		uv_timer_start(&server->sweep, on_sweep, SERVER_SWEEP_MS, SERVER_SWEEP_MS);
		uv_unref((uv_handle_t *)&server->sweep);
	}
	http1_begin(c);
}

static union server_handle *new_listener(struct http_server *server, struct error *e)
{
	if (server->listener_count == SERVER_LISTENERS_MAX) {
		error_set(e, ERROR_EXHAUSTED, "more than %d listeners", SERVER_LISTENERS_MAX);
		return NULL;
	}
	return &server->listeners[server->listener_count];
}

static int start_listener(struct http_server *server, union server_handle *l, const char *what, struct error *e)
{
	l->handle.data = server;
	server->listener_count++;
	int r = uv_listen(&l->stream, SERVER_BACKLOG, on_connection);
	return r < 0 ? set_uv(e, r, what) : 0;
}

int http_server_listen_tcp(struct http_server *server, const char *host, unsigned port, unsigned *ret_port,
                           struct error *e)
{
	union server_handle *l = new_listener(server, e);
	if (!l)
		return -EAGAIN;
	char what[128];
	snprintf(what, sizeof(what), "listen on %.64s port %u", host, port);
	struct sockaddr_storage address;
	int r = port > 65535 ? UV_EINVAL : uv_ip4_addr(host, (int)port, (struct sockaddr_in *)&address);
	if (r < 0 && port <= 65535)
		r = uv_ip6_addr(host, (int)port, (struct sockaddr_in6 *)&address);
	if (r < 0)
		return error_set(e, ERROR_INVALID, "%s: not a numeric address and port", what);
	r = uv_tcp_init(server->loop, &l->tcp);
	if (r < 0)
		return set_uv(e, r, what);
	int bound = uv_tcp_bind(&l->tcp, (struct sockaddr *)&address, 0);
	r = start_listener(server, l, what, e);
	if (bound < 0)
		return set_uv(e, bound, what);
	int size = sizeof(address);
	if (r == 0 && ret_port && uv_tcp_getsockname(&l->tcp, (struct sockaddr *)&address, &size) == 0)
		*ret_port = ntohs(address.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&address)->sin6_port
		                                                : ((struct sockaddr_in *)&address)->sin_port);
	return r;
}

/* 0 if nobody listens there (a stale socket was removed), ERROR_CONFLICT if somebody does. */
static int clear_stale_socket(const struct sockaddr_un *address, struct error *e)
{
	struct stat st;
	if (lstat(address->sun_path, &st) < 0)
		return errno == ENOENT ? 0 : error_set_errno(e, errno, "%s", address->sun_path);
	if (!S_ISSOCK(st.st_mode))
		return error_set(e, ERROR_CONFLICT, "%s exists and is not a socket", address->sun_path);
	CLEANUP_CLOSE int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return error_set_errno(e, errno, "socket");
	if (connect(fd, (const struct sockaddr *)address, sizeof(*address)) == 0 || errno == EAGAIN)
		return error_set(e, ERROR_CONFLICT, "another process listens on %s", address->sun_path);
	if (unlink(address->sun_path) < 0 && errno != ENOENT)
		return error_set_errno(e, errno, "remove stale %s", address->sun_path);
	return 0;
}

int http_server_listen_unix(struct http_server *server, const char *path, mode_t mode, struct error *e)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	if (text_copy(address.sun_path, sizeof(address.sun_path), path) < 0)
		return error_set(e, ERROR_INVALID, "socket path \"%.200s\" is longer than %zu bytes", path,
		                 sizeof(address.sun_path) - 1);
	int r = clear_stale_socket(&address, e);
	if (r < 0)
		return r;
	CLEANUP_CLOSE int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return error_set_errno(e, errno, "socket");
	/* Nobody can connect before listen(), so the mode is right from the first connection on. */
	if (bind(fd, (struct sockaddr *)&address, sizeof(address)) < 0 || chmod(path, mode) < 0)
		return error_set_errno(e, errno, "bind %s", path);
	return http_server_listen_fd(server, TAKE_FD(fd), e);
}

int http_server_listen_fd(struct http_server *server, int descriptor, struct error *e)
{
	CLEANUP_CLOSE int fd = descriptor;
	union server_handle *l = new_listener(server, e);
	if (!l)
		return -EAGAIN;
	int domain = 0;
	socklen_t size = sizeof(domain);
	if (getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size) < 0)
		return error_set_errno(e, errno, "listen on descriptor %d", fd);
	if (domain == AF_UNIX)
		uv_pipe_init(server->loop, &l->pipe, 0);
	else
		uv_tcp_init(server->loop, &l->tcp);
	int r = domain == AF_UNIX ? uv_pipe_open(&l->pipe, fd) : uv_tcp_open(&l->tcp, fd);
	if (r == 0)
		(void)TAKE_FD(fd);
	/* The handle stays in the table in any case: it is closed with the others. */
	int started = start_listener(server, l, "listen on a descriptor", e);
	return r < 0 ? set_uv(e, r, "listen on a descriptor") : started;
}

const struct http_server_stats *http_server_stats(const struct http_server *server)
{
	return &server->stats;
}

void http_server_stop(struct http_server *server)
{
	if (server->stopping)
		return;
	server->stopping = 1;
	for (size_t i = 0; i < server->listener_count; i++)
		uv_close(&server->listeners[i].handle, NULL);
	/* Idle connections see `stopping` when they are advanced. */
	for (struct connection *c = server->connections; c; c = c->next)
		server_defer(c);
}

void http_server_abort(struct http_server *server)
{
	http_server_stop(server);
	for (struct connection *c = server->connections; c; c = c->next) {
		c->dead = 1;
		server_defer(c);
	}
}

void http_server_free(struct http_server *server)
{
	if (!server)
		return;
	http_server_abort(server);
	uv_run(server->loop, UV_RUN_DEFAULT);
	uv_close((uv_handle_t *)&server->sweep, NULL);
	uv_close((uv_handle_t *)&server->idle, NULL);
	uv_run(server->loop, UV_RUN_NOWAIT);
	free(server);
}
