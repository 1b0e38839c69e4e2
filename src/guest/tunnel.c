/*
 * The host reaches servers of the guest through the agent, so that one that listens on a loopback address only is as
 * reachable as any other.
 *
 * Which listener: 127.0.0.1, then ::1, then any other local address that /proc/net/tcp{,6} shows. The loopback
 * addresses are simply tried: a connect that nobody accepts fails at once, which costs less than reading the table and
 * cannot be out of date. Wildcard listeners answer there too.
 *
 * The pipe carries half-closes: the end of one direction is passed on with shutdown() and the other goes on.
 */
#include "guest/tunnel.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/text.h"
#include "guest/connection.h"
#include "guest/server.h"

#define PROC_NET_BYTES_MAX (4 * 1024 * 1024)
#define TCP_STATE_LISTEN 0x0a

union address {
	struct sockaddr any;
	struct sockaddr_in four;
	struct sockaddr_in6 six;
};

static socklen_t address_size(const union address *a)
{
	return a->any.sa_family == AF_INET ? sizeof(a->four) : sizeof(a->six);
}

/* A connect from within the range of ephemeral ports can meet itself: then nobody listens. */
static int met_itself(int fd)
{
	union address own;
	union address peer;
	socklen_t own_size = sizeof(own);
	socklen_t peer_size = sizeof(peer);
	memset(&own, 0, sizeof(own));
	memset(&peer, 0, sizeof(peer));
	if (getsockname(fd, &own.any, &own_size) < 0 || getpeername(fd, &peer.any, &peer_size) < 0)
		return 1;
	return own_size == peer_size && memcmp(&own, &peer, own_size) == 0;
}

static int connect_to(const union address *a)
{
	static const int on = 1;
	CLEANUP_CLOSE int fd = socket(a->any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return -errno;
	if (connect(fd, &a->any, address_size(a)) < 0) {
		if (errno != EINPROGRESS)
			return -errno;
		struct pollfd p = {.fd = fd, .events = POLLOUT};
		int failure = ETIMEDOUT;
		socklen_t size = sizeof(failure);
		if (poll(&p, 1, TUNNEL_CONNECT_MS) > 0 && getsockopt(fd, SOL_SOCKET, SO_ERROR, &failure, &size) < 0)
			failure = errno;
		if (failure)
			return -failure;
	}
	if (met_itself(fd))
		return -ECONNREFUSED;
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
	return TAKE_FD(fd);
}

/* An address column of /proc/net/tcp: 32-bit words in the byte order of the machine. */
static int parse_address(const char *hex, union address *ret)
{
	unsigned words[4];
	unsigned port;
	memset(ret, 0, sizeof(*ret));
	if (sscanf(hex, "%8x%8x%8x%8x:%4x", &words[0], &words[1], &words[2], &words[3], &port) == 5) {
		ret->six.sin6_family = AF_INET6;
		ret->six.sin6_port = htons((uint16_t)port);
		memcpy(&ret->six.sin6_addr, words, sizeof(words));
		return 0;
	}
	if (sscanf(hex, "%8x:%4x", &words[0], &port) == 2) {
		ret->four.sin_family = AF_INET;
		ret->four.sin_port = htons((uint16_t)port);
		ret->four.sin_addr.s_addr = words[0];
		return 0;
	}
	return -EINVAL;
}

/* Tries the listeners on this port that one table shows. */
static int connect_listed(const char *path, uint16_t port)
{
	CLEANUP_FREE char *text = NULL;
	if (fd_read_file(AT_FDCWD, path, PROC_NET_BYTES_MAX, &text, NULL) < 0)
		return -ECONNREFUSED;
	char *rest = text;
	for (char *line; (line = strsep(&rest, "\n"));) {
		char local[64];
		char remote[64];
		unsigned state;
		union address a;
		if (sscanf(line, " %*d: %63s %63s %x", local, remote, &state) != 3 || state != TCP_STATE_LISTEN ||
		    parse_address(local, &a) < 0)
			continue;
		if (ntohs(a.any.sa_family == AF_INET ? a.four.sin_port : a.six.sin6_port) != port)
			continue;
		int fd = connect_to(&a);
		if (fd >= 0)
			return fd;
	}
	return -ECONNREFUSED;
}

static int connect_port(uint16_t port)
{
	union address a;
	memset(&a, 0, sizeof(a));
	a.four = (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons(port)};
	a.four.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	int fd = connect_to(&a);
	if (fd >= 0)
		return fd;
	int first = fd;
	memset(&a, 0, sizeof(a));
	a.six = (struct sockaddr_in6){.sin6_family = AF_INET6, .sin6_port = htons(port), .sin6_addr = in6addr_loopback};
	fd = connect_to(&a);
	if (fd < 0)
		fd = connect_listed("/proc/net/tcp", port);
	if (fd < 0)
		fd = connect_listed("/proc/net/tcp6", port);
	return fd < 0 && first == -ETIMEDOUT ? first : fd;
}

/* One direction of the pipe. Pages of the buffer that stay untouched cost nothing. */
struct direction {
	int from;
	int to;
	char *data;
	size_t start;
	size_t end;
	int ended;  /* nothing more will come */
	int closed; /* and that was passed on */
};

static int direction_read(struct direction *d)
{
	ssize_t n = recv(d->from, d->data, TUNNEL_BUFFER_BYTES, MSG_DONTWAIT);
	if (n < 0)
		return errno == EAGAIN || errno == EINTR ? 0 : -errno;
	d->start = 0;
	d->end = (size_t)n;
	if (n == 0)
		d->ended = 1;
	return 0;
}

static int direction_write(struct direction *d)
{
	while (d->start < d->end) {
		ssize_t n = send(d->to, d->data + d->start, d->end - d->start, MSG_DONTWAIT | MSG_NOSIGNAL);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return errno == EAGAIN ? 0 : -errno;
		d->start += (size_t)n;
	}
	return 0;
}

static int direction_step(struct direction *d, int readable)
{
	int r = 0;
	if (readable && d->start == d->end && !d->ended)
		r = direction_read(d);
	if (r == 0)
		r = direction_write(d);
	if (r == 0 && d->ended && d->start == d->end && !d->closed) {
		d->closed = 1;
		shutdown(d->to, SHUT_WR);
	}
	return r;
}

static void pipe_both(int client, int target, const char *early, size_t early_size)
{
	struct direction d[2] = {{.from = client, .to = target}, {.from = target, .to = client}};
	d[0].data = malloc(TUNNEL_BUFFER_BYTES);
	d[1].data = malloc(TUNNEL_BUFFER_BYTES);
	int r = d[0].data && d[1].data && early_size <= TUNNEL_BUFFER_BYTES ? 0 : -ENOMEM;
	if (r == 0 && early_size) {
		memcpy(d[0].data, early, early_size);
		d[0].end = early_size;
		r = direction_step(&d[0], 0);
	}
	while (r == 0 && !(d[0].closed && d[1].closed)) {
		struct pollfd p[2] = {{.fd = client}, {.fd = target}};
		for (int i = 0; i < 2; i++) {
			int pending = d[i].start < d[i].end;
			if (!pending && !d[i].ended)
				p[i].events |= POLLIN;
			if (pending)
				p[1 - i].events |= POLLOUT;
		}
		if (poll(p, 2, -1) < 0 && errno != EINTR)
			break;
		/* An error or a full hang-up of one side with nothing left to read ends both. */
		for (int i = 0; i < 2 && r == 0; i++) {
			if (p[i].revents & (POLLERR | POLLNVAL))
				r = -ECONNRESET;
			else if ((p[i].revents & POLLHUP) && d[i].ended)
				r = -EPIPE;
		}
		for (int i = 0; i < 2 && r == 0; i++)
			r = direction_step(&d[i], p[i].revents & (POLLIN | POLLHUP));
	}
	if (r < 0) {
		/* A reset is passed on as one: the other side must not take a cut stream for a whole one. */
		static const struct linger now = {.l_onoff = 1, .l_linger = 0};
		if (r == -ECONNRESET)
			setsockopt(client, SOL_SOCKET, SO_LINGER, &now, sizeof(now));
	}
	free(d[0].data);
	free(d[1].data);
}

static int refuse(struct request *r, int status, const char *code, const char *message)
{
	/* Bytes for the port may be behind the request already: they are no next request. */
	r->connection->must_close = 1;
	return response_json(r, status, json_pack("{s:s,s:s}", "code", code, "message", message));
}

int tunnel_serve(struct request *r)
{
	CLEANUP_FREE char *text = NULL;
	char message[128];
	uint64_t port = 0;
	const char *protocol = request_header(r, "upgrade");
	if (request_query(r, "port", &text) < 0 || text_parse_u64(text, 65535, &port) < 0 || port == 0)
		return refuse(r, 400, "invalid", "port must be a number from 1 to 65535");
	if (!r->connection->head.is_upgrade || !protocol || strcmp(protocol, "space-tunnel") != 0)
		return refuse(r, 400, "invalid", "the tunnel needs Connection: Upgrade and Upgrade: space-tunnel");
	if (port == server_port())
		return refuse(r, 403, "forbidden", "the agent's own port is not reached through its tunnel");
	int fd = connect_port((uint16_t)port);
	if (fd < 0) {
		text_format(message, sizeof(message), "nothing listens on port %u of the sandbox", (unsigned)port);
		return refuse(r, fd == -ETIMEDOUT ? 504 : 502, fd == -ETIMEDOUT ? "timeout" : "port_closed", message);
	}
	static const struct request_header headers[] = {
	    {.name = (char *)(uintptr_t) "Connection", .value = (char *)(uintptr_t) "Upgrade"},
	    {.name = (char *)(uintptr_t) "Upgrade", .value = (char *)(uintptr_t) "space-tunnel"},
	};
	struct connection *c = r->connection;
	int x = response_start(r, 101, headers, ARRAY_SIZE(headers), 0);
	if (x == 0)
		x = response_end(r);
	c->must_close = 1;
	if (x == 0)
		pipe_both(c->fd, fd, c->in + c->in_start, c->in_end - c->in_start);
	c->in_start = c->in_end;
	/* Both directions are over: nothing is left to wait for. */
	c->failure = -EPIPE;
	close(fd);
	return x;
}
