#include "guest/server.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/log.h"
#include "base/text.h"
#include "guest/boot.h"
#include "guest/connection.h"
#include "guest/identity.h"

static struct {
	int listener;
	uint16_t port;
	int trust_local;
	pthread_attr_t thread;
	atomic_int waiting; /* threads in accept() */
	atomic_int threads;
	atomic_ullong writes;
	pthread_mutex_t lock; /* the list */
	struct connection *first;
} server = {.listener = -1, .lock = PTHREAD_MUTEX_INITIALIZER};

uint16_t server_port(void)
{
	return server.port;
}

int server_trusts_local(void)
{
	return server.trust_local;
}

uint64_t server_writes(void)
{
	return atomic_load(&server.writes);
}

static void enlist(struct connection *c)
{
	pthread_mutex_lock(&server.lock);
	c->next = server.first;
	if (c->next)
		c->next->previous = c;
	server.first = c;
	pthread_mutex_unlock(&server.lock);
}

/* Closes under the lock: server_drop_clients() must never meet a number that was given to somebody else. */
static void retire(struct connection *c)
{
	pthread_mutex_lock(&server.lock);
	if (c->previous)
		c->previous->next = c->next;
	else
		server.first = c->next;
	if (c->next)
		c->next->previous = c->previous;
	close(c->fd);
	pthread_mutex_unlock(&server.lock);
	free(c->in);
	buf_free(&c->out);
	free(c);
}

void server_drop_clients(const struct connection *keep)
{
	/* After a restore the peers of these connections do not exist: a reset on close spares their last retransmissions,
	 * which would otherwise be sent for minutes. */
	static const struct linger now = {.l_onoff = 1, .l_linger = 0};
	pthread_mutex_lock(&server.lock);
	for (struct connection *c = server.first; c; c = c->next) {
		if (c == keep)
			continue;
		atomic_store(&c->is_dropped, 1);
		setsockopt(c->fd, SOL_SOCKET, SO_LINGER, &now, sizeof(now));
		shutdown(c->fd, SHUT_RDWR);
	}
	pthread_mutex_unlock(&server.lock);
}

static const struct request_route *const tables[] = {process_routes, filesystem_routes, files_routes, init_routes,
                                                     space_routes};

static const struct request_route *find_route(const struct request *r, int *ret_path_known)
{
	const char *method = strcmp(r->method, "HEAD") == 0 ? "GET" : r->method;
	*ret_path_known = 0;
	for (size_t t = 0; t < ARRAY_SIZE(tables); t++) {
		for (const struct request_route *route = tables[t]; route->method; route++) {
			if (strcmp(route->path, r->path) != 0)
				continue;
			*ret_path_known = 1;
			if (strcmp(route->method, method) == 0)
				return route;
		}
	}
	return NULL;
}

static int is_connect_path(const char *path)
{
	return text_starts_with(path, "/process.Process/") || text_starts_with(path, "/filesystem.Filesystem/");
}

/* 0 if the call may go on; else the HTTP status to refuse it with. */
static int authorise(const struct request *r)
{
	const char *access = request_header(r, "x-access-token");
	if (strcmp(r->path, "/health") == 0)
		return 0;
	if (text_starts_with(r->path, "/space/")) {
		/* The host's own service is never for processes of this guest, whatever token they hold. */
		if (r->connection->is_local && !server.trust_local)
			return 403;
		if (identity_is_control_token(request_header(r, "x-space-control")))
			return 0;
		return strcmp(r->path, "/space/v1/tunnel") == 0 && identity_is_access_token(access) ? 0 : 401;
	}
	/* These two check for themselves: signed links, first set-up. */
	if (strcmp(r->path, "/files") == 0 || strcmp(r->path, "/init") == 0)
		return 0;
	if (identity_has_access_token() && !identity_is_access_token(access))
		return 401;
	return 0;
}

static int answer_preflight(struct request *r)
{
	static const struct request_header headers[] = {
	    {.name = (char *)(uintptr_t) "Access-Control-Allow-Methods",
	     .value = (char *)(uintptr_t) "GET, HEAD, POST, PUT, PATCH, DELETE"},
	    {.name = (char *)(uintptr_t) "Access-Control-Allow-Headers", .value = (char *)(uintptr_t) "*, Authorization"},
	    {.name = (char *)(uintptr_t) "Access-Control-Max-Age", .value = (char *)(uintptr_t) "7200"},
	};
	int x = response_start(r, 204, headers, ARRAY_SIZE(headers), 0);
	return x < 0 ? x : response_end(r);
}

static void refuse(struct request *r, int status)
{
	response_error_status(r, status,
	                      status == 403 ? "this service is for the host only"
	                                    : "unauthorized access, please provide a valid access token or method signing "
	                                      "if supported");
}

static int check_connect(struct request *r)
{
	const char *type = request_header(r, "content-type");
	const char *version = request_header(r, "connect-protocol-version");
	const char *coding = request_header(r, "content-encoding");
	if (!type || (!text_starts_with(type, "application/json") && !text_starts_with(type, "application/connect+json"))) {
		response_error_status(r, 415,
		                      "the agent speaks Connect with JSON: application/json or application/connect+json");
		return -1;
	}
	if (version && strcmp(version, "1") != 0) {
		response_error_status(r, 400, "unknown Connect-Protocol-Version");
		return -1;
	}
	if (coding && strcmp(coding, "identity") != 0) {
		response_error_status(r, 415, "compressed requests are not supported");
		return -1;
	}
	return 0;
}

static void dispatch(struct request *r)
{
	int known;
	if (strcmp(r->method, "OPTIONS") == 0 && request_header(r, "origin")) {
		answer_preflight(r);
		return;
	}
	int status = authorise(r);
	if (status) {
		refuse(r, status);
		return;
	}
	const struct request_route *route = find_route(r, &known);
	if (!route) {
		response_error_status(r, known ? 405 : 404, known ? "method not allowed" : "no such call");
		return;
	}
	if (is_connect_path(r->path) && check_connect(r) < 0)
		return;
	if (route->is_change)
		atomic_fetch_add(&server.writes, 1);
	route->handle(r);
}

/* Reads bytes of a head until it is whole. Its length, 0 if the client is gone, or the negative status to refuse. */
static ssize_t read_head(struct connection *c)
{
	size_t scanned = 0;
	/* What came behind the last request moves to the front. */
	if (c->in_start) {
		memmove(c->in, c->in + c->in_start, c->in_end - c->in_start);
		c->in_end -= c->in_start;
		c->in_start = 0;
	}
	for (;;) {
		/* RFC 9112, 2.2: an empty line in front of a request is skipped. */
		while (scanned == 0 && c->in_end >= 2 && c->in[0] == '\r' && c->in[1] == '\n') {
			memmove(c->in, c->in + 2, c->in_end - 2);
			c->in_end -= 2;
		}
		ssize_t size = head_find_end(c->in, c->in_end, &scanned);
		if (size)
			return size;
		if (c->in_end == c->in_capacity) {
			char *larger = realloc(c->in, c->in_capacity * 2);
			if (!larger)
				return -503;
			c->in = larger;
			c->in_capacity *= 2;
		}
		if (connection_wait_input(c, c->in_end ? CONNECTION_HEAD_MS : CONNECTION_IDLE_MS) < 0)
			return 0;
		ssize_t n = recv(c->fd, c->in + c->in_end, c->in_capacity - c->in_end, MSG_DONTWAIT);
		if (n < 0 && (errno == EINTR || errno == EAGAIN))
			continue;
		if (n <= 0)
			return 0;
		c->in_end += (size_t)n;
	}
}

/* The body's decoder needs some room behind the head. */
static int make_body_room(struct connection *c, size_t head_size)
{
	if (c->in_capacity - head_size >= CONNECTION_BODY_ROOM_BYTES)
		return 0;
	char *larger = realloc(c->in, head_size + CONNECTION_BODY_ROOM_BYTES);
	if (!larger)
		return -ENOMEM;
	c->in = larger;
	c->in_capacity = head_size + CONNECTION_BODY_ROOM_BYTES;
	return 0;
}

static void refuse_head(struct connection *c, int status)
{
	struct request r = {.connection = c};
	memset(&c->head, 0, sizeof(c->head));
	c->state = RESPONSE_NONE;
	c->is_head = 0;
	c->must_close = 1;
	response_error_status(&r, status, "malformed or oversized request head");
}

/* Skips what the handler left of the body. False if the connection is to be closed instead. */
static int finish_body(struct request *r)
{
	char waste[4096];
	size_t skipped = 0;
	/* A client that still waits for 100 Continue sends nothing, or everything: it cannot be told apart. */
	if (r->connection->must_continue)
		return 0;
	while (skipped <= CONNECTION_SKIP_BYTES_MAX) {
		ssize_t n = request_read(r, waste, sizeof(waste));
		if (n <= 0)
			return n == 0;
		skipped += (size_t)n;
	}
	return 0;
}

/* Serves one request. True if the connection can take another one. */
static int serve_one(struct connection *c)
{
	ssize_t size = read_head(c);
	if (size == 0)
		return 0;
	if (size > 0 && make_body_room(c, (size_t)size) < 0)
		return 0;
	int status = size < 0 ? (int)-size : head_parse(&c->head, c->in, (size_t)size);
	if (status) {
		refuse_head(c, status);
		return 0;
	}
	c->head_size = (size_t)size;
	c->in_start = (size_t)size;
	connection_begin(c);
	struct request r = {
	    .connection = c,
	    .method = c->head.method,
	    .path = c->head.path,
	    .query = c->head.query,
	    .headers = c->head.fields,
	    .header_count = c->head.field_count,
	    .has_body = !c->body_complete,
	    .content_length = c->head.is_chunked ? -1 : (int64_t)c->head.length,
	};
	dispatch(&r);
	if (c->state == RESPONSE_NONE && !c->failure)
		response_error_status(&r, 500, "the call gave no answer");
	/* A handler that stopped half way: only closing tells the client that the answer is incomplete. */
	if (c->state == RESPONSE_OPEN)
		return 0;
	return !c->failure && !c->must_close && finish_body(&r) && !c->must_close;
}

/* Closing with unread input resets the connection, and the peer may lose an answer it has not read yet. */
static void linger(struct connection *c)
{
	char waste[4096];
	uint64_t end = time_monotonic_ms() + 2000;
	if (c->failure || atomic_load(&c->is_dropped))
		return;
	shutdown(c->fd, SHUT_WR);
	for (uint64_t now; (now = time_monotonic_ms()) < end;) {
		if (connection_wait_input(c, (int)(end - now)) < 0 || recv(c->fd, waste, sizeof(waste), MSG_DONTWAIT) <= 0)
			return;
	}
}

/* Only the host has the gateway's address; processes of this guest can choose among all others, on both ends. */
static int peer_is_local(int fd)
{
	struct sockaddr_in6 peer;
	socklen_t size = sizeof(peer);
	struct in_addr host;
	struct in_addr address;
	inet_pton(AF_INET, NETWORK_GATEWAY, &host);
	if (getpeername(fd, (struct sockaddr *)&peer, &size) < 0)
		return 1;
	if (peer.sin6_family == AF_INET)
		address = ((const struct sockaddr_in *)&peer)->sin_addr;
	else if (IN6_IS_ADDR_V4MAPPED(&peer.sin6_addr))
		memcpy(&address, peer.sin6_addr.s6_addr + 12, sizeof(address));
	else
		return 1;
	return address.s_addr != host.s_addr;
}

static void serve(int fd)
{
	static const int on = 1;
	struct connection *c = calloc(1, sizeof(*c));
	char *in = malloc(CONNECTION_INPUT_BYTES);
	if (!c || !in) {
		free(c);
		free(in);
		close(fd);
		return;
	}
	c->fd = fd;
	c->in = in;
	c->in_capacity = CONNECTION_INPUT_BYTES;
	c->body_complete = 1;
	c->is_local = peer_is_local(fd);
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
	setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
	enlist(c);
	while (serve_one(c))
		;
	if (c->in_end > c->in_start || c->must_close || !c->body_complete)
		linger(c);
	retire(c);
}

static void refuse_connection(int fd)
{
	static const char text[] = "HTTP/1.1 503 Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
	send(fd, text, sizeof(text) - 1, MSG_NOSIGNAL | MSG_DONTWAIT);
	close(fd);
}

/* Each thread accepts for itself, so that a connection costs no hand-over; whoever takes the last waiting place makes
 * the next thread. */
static void *worker(void *unused)
{
	for (;;) {
		int fd = accept4(server.listener, NULL, NULL, SOCK_CLOEXEC);
		if (fd < 0) {
			if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS)
				usleep(20000);
			continue;
		}
		if (atomic_fetch_sub(&server.waiting, 1) == 1) {
			pthread_t thread;
			int full = atomic_load(&server.threads) >= AGENT_CONNECTIONS_MAX + 1;
			if (!full) {
				atomic_fetch_add(&server.waiting, 1);
				atomic_fetch_add(&server.threads, 1);
				full = pthread_create(&thread, &server.thread, worker, NULL) != 0;
				if (full) {
					atomic_fetch_sub(&server.waiting, 1);
					atomic_fetch_sub(&server.threads, 1);
				}
			}
			if (full) {
				/* Nobody else would accept: this thread stays free to. */
				refuse_connection(fd);
				atomic_fetch_add(&server.waiting, 1);
				continue;
			}
		}
		serve(fd);
		if (atomic_fetch_add(&server.waiting, 1) >= SERVER_SPARE_THREADS) {
			atomic_fetch_sub(&server.waiting, 1);
			atomic_fetch_sub(&server.threads, 1);
			return NULL;
		}
	}
}

static int open_listener(const struct server_options *options, struct error *e)
{
	static const int on = 1;
	static const int off = 0;
	struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_port = htons(options->port), .sin6_addr = in6addr_any};
	struct sockaddr_in four = {.sin_family = AF_INET, .sin_port = htons(options->port)};
	four.sin_addr.s_addr = htonl(options->address ? INADDR_LOOPBACK : INADDR_ANY);
	int is_six = !options->address;
	int fd = is_six ? socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0) : -1;
	if (fd < 0) {
		is_six = 0;
		fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	}
	if (fd < 0)
		return error_set_errno(e, errno, "cannot make the listener");
	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
	if (is_six)
		setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
	int r = is_six ? bind(fd, (struct sockaddr *)&six, sizeof(six)) : bind(fd, (struct sockaddr *)&four, sizeof(four));
	socklen_t size = sizeof(six);
	if (r < 0 || listen(fd, 1024) < 0 || getsockname(fd, (struct sockaddr *)&six, &size) < 0) {
		r = error_set_errno(e, errno, "cannot listen on port %u", options->port);
		close(fd);
		return r;
	}
	server.listener = fd;
	server.port = ntohs(six.sin6_port); /* at the same place in both address families */
	return 0;
}

int server_begin(const struct server_options *options, struct error *e)
{
	pthread_t thread;
	server.trust_local = options->trust_local;
	int r = open_listener(options, e);
	if (r < 0)
		return r;
	pthread_attr_init(&server.thread);
	pthread_attr_setstacksize(&server.thread, SERVER_THREAD_STACK_BYTES);
	pthread_attr_setdetachstate(&server.thread, PTHREAD_CREATE_DETACHED);
	atomic_store(&server.waiting, 1);
	atomic_store(&server.threads, 1);
	r = pthread_create(&thread, &server.thread, worker, NULL);
	return r ? error_set_errno(e, r, "cannot start serving") : 0;
}
