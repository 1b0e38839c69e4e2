/*
 * The blocking client. The socket is used with MSG_DONTWAIT and poll(), so timeouts hold whatever mode it is in, and a
 * writer and a reader may be two threads: start() touches both sides, afterwards write/finish_body use only the
 * sender's fields and read_head/read only the receiver's.
 */
#include "http/client.h"

#include <errno.h>
#include <limits.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/text.h"
#include "http/parser.h"

#define CLIENT_BUFFER_BYTES 65536
#define CLIENT_ANSWER_BYTES_DEFAULT ((size_t)16 * 1024 * 1024)
#define CLIENT_INTERIM_ANSWERS_MAX 16
#define CLIENT_HOST_BYTES 256

struct http_client {
	int fd;
	char host[CLIENT_HOST_BYTES];
	/* Sender. */
	int streaming; /* a chunked body is being sent */
	int body_sent;
	unsigned timeout_ms;
	uint64_t deadline_ms; /* monotonic, for the whole of http_client_call(); 0 = none */
	/* Receiver. */
	struct http_parser parser;
	int started;   /* a call is in progress */
	int head_read; /* its answer's head was delivered */
	int broken;
	char *input; /* read ahead: input[input_at, input_size) */
	size_t input_at;
	size_t input_size;
	int raw; /* after 101 */
};

int http_client_from_fd(int fd, const char *host, struct http_client **ret, struct error *e)
{
	struct http_client *c = calloc(1, sizeof(*c));
	char *input = malloc(CLIENT_BUFFER_BYTES);
	if (!c || !input || text_copy(c->host, sizeof(c->host), host) < 0) {
		int r = c && input ? EINVAL : ENOMEM;
		free(c);
		free(input);
		close(fd);
		return error_set_errno(e, r, "HTTP client for %.100s", host);
	}
	c->fd = fd;
	c->input = input;
	c->body_sent = 1;
	http_parser_init(&c->parser, HTTP_PARSER_ANSWER, HTTP_HEAD_BYTES_MAX);
	*ret = c;
	return 0;
}

int http_client_connect_unix(const char *path, const char *host, struct http_client **ret, struct error *e)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	if (text_copy(address.sun_path, sizeof(address.sun_path), path) < 0)
		return error_set(e, ERROR_INVALID, "socket path \"%.200s\" is longer than %zu bytes", path,
		                 sizeof(address.sun_path) - 1);
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return error_set_errno(e, errno, "socket");
	if (connect(fd, (struct sockaddr *)&address, sizeof(address)) < 0) {
		int errnum = errno;
		close(fd);
		if (errnum == ENOENT || errnum == ECONNREFUSED)
			return error_set(e, ERROR_UNAVAILABLE, "nothing listens on %.200s", path);
		return error_set_errno(e, errnum, "connect to %.200s", path);
	}
	return http_client_from_fd(fd, host, ret, e);
}

/* Waits for the descriptor. 0, -ETIMEDOUT or -errno. `timeout_ms` 0 = for ever. */
static int wait_for(int fd, short events, short *ret_events, unsigned timeout_ms)
{
	uint64_t end = timeout_ms ? time_monotonic_ms() + timeout_ms : 0;
	for (;;) {
		int wait = -1;
		if (end) {
			uint64_t now = time_monotonic_ms();
			wait = now >= end ? 0 : (int)MIN(end - now, (uint64_t)INT_MAX);
		}
		struct pollfd p = {.fd = fd, .events = events};
		int r = poll(&p, 1, wait);
		if (r > 0) {
			if (ret_events)
				*ret_events = p.revents;
			return 0;
		}
		if (r == 0)
			return -ETIMEDOUT;
		if (errno != EINTR)
			return -errno;
	}
}

static int connect_address(const struct addrinfo *address, unsigned timeout_ms)
{
	CLEANUP_CLOSE int fd = socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return -errno;
	if (connect(fd, address->ai_addr, address->ai_addrlen) < 0) {
		if (errno != EINPROGRESS)
			return -errno;
		int r = wait_for(fd, POLLOUT, NULL, timeout_ms);
		if (r < 0)
			return r;
		int errnum = 0;
		socklen_t size = sizeof(errnum);
		if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &errnum, &size) < 0)
			return -errno;
		if (errnum)
			return -errnum;
	}
	int on = 1;
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
	int r = fd_set_nonblocking(fd, 0);
	return r < 0 ? r : TAKE_FD(fd);
}

/* Splits "HOST:PORT", "[V6]:PORT" or "HOST" with port 80. */
static int split_authority(const char *authority, char host[CLIENT_HOST_BYTES], char port[8], struct error *e)
{
	const char *colon;
	size_t host_size;
	if (*authority == '[') {
		const char *end = strchr(authority, ']');
		if (!end || (end[1] && end[1] != ':'))
			return error_set(e, ERROR_INVALID, "address \"%.100s\" is not HOST:PORT", authority);
		colon = end[1] ? end + 1 : NULL;
		host_size = (size_t)(end - authority - 1);
		authority++;
	} else {
		colon = strchr(authority, ':');
		host_size = colon ? (size_t)(colon - authority) : strlen(authority);
	}
	uint64_t number = 80;
	if (host_size == 0 || host_size >= CLIENT_HOST_BYTES ||
	    (colon && (text_parse_u64(colon + 1, 65535, &number) < 0 || number == 0)))
		return error_set(e, ERROR_INVALID, "address \"%.100s\" is not HOST:PORT", authority);
	memcpy(host, authority, host_size);
	host[host_size] = '\0';
	return text_format(port, 8, "%u", (unsigned)number);
}

int http_client_connect_url(const char *url, unsigned timeout_ms, struct http_client **ret, struct error *e)
{
	if (text_starts_with(url, "unix:"))
		return http_client_connect_unix(url + 5, "localhost", ret, e);
	if (text_starts_with(url, "https://"))
		return error_set(e, ERROR_UNSUPPORTED, "%.200s: https is not supported", url);
	if (!text_starts_with(url, "http://"))
		return error_set(e, ERROR_INVALID, "\"%.200s\" is neither http://HOST:PORT nor unix:/PATH", url);
	char authority[CLIENT_HOST_BYTES], host[CLIENT_HOST_BYTES], port[8];
	if (text_copy(authority, sizeof(authority), url + 7) < 0)
		return error_set(e, ERROR_INVALID, "URL is longer than %d bytes", CLIENT_HOST_BYTES);
	char *slash = strchr(authority, '/');
	if (slash && slash[1])
		return error_set(e, ERROR_INVALID, "\"%.200s\": a path is not allowed here", url);
	if (slash)
		*slash = '\0';
	int r = split_authority(authority, host, port, e);
	if (r < 0)
		return r;
	struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV};
	struct addrinfo *list;
	int g = getaddrinfo(host, port, &hints, &list);
	if (g)
		return error_set(e, ERROR_UNAVAILABLE, "%.200s: %s", host, gai_strerror(g));
	int fd = -ECONNREFUSED;
	for (struct addrinfo *a = list; a && fd < 0; a = a->ai_next)
		fd = connect_address(a, timeout_ms);
	freeaddrinfo(list);
	if (fd < 0)
		return error_set(e, fd == -ETIMEDOUT ? ERROR_TIMEOUT : ERROR_UNAVAILABLE, "connect to %.200s: %s", url,
		                 strerror(-fd));
	return http_client_from_fd(fd, authority, ret, e);
}

void http_client_free(struct http_client *client)
{
	if (!client)
		return;
	http_parser_free(&client->parser);
	free(client->input);
	close(client->fd);
	free(client);
}

int http_client_fd(const struct http_client *client)
{
	return client->fd;
}

/* Time left for one wait; 0 = no limit, -ETIMEDOUT once the whole call's deadline has passed. */
static int64_t time_left(const struct http_client *c)
{
	if (!c->deadline_ms)
		return c->timeout_ms;
	uint64_t now = time_monotonic_ms();
	return now >= c->deadline_ms ? -ETIMEDOUT : (int64_t)(c->deadline_ms - now);
}

static void advance(struct iovec **iov, size_t *count, size_t n)
{
	while (*count && n >= (*iov)->iov_len) {
		n -= (*iov)->iov_len;
		(*iov)++;
		(*count)--;
	}
	if (*count) {
		(*iov)->iov_base = (char *)(*iov)->iov_base + n;
		(*iov)->iov_len -= n;
	}
}

/* Sends everything. 1 if the peer answers (or hangs up) instead of reading on and `stop_on_answer` is set, 0 when all
 * was sent, else -errno. */
static int send_all(struct http_client *c, struct iovec *iov, size_t count, int stop_on_answer)
{
	advance(&iov, &count, 0);
	while (count) {
		struct msghdr message = {.msg_iov = iov, .msg_iovlen = count};
		ssize_t n = sendmsg(c->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
		if (n >= 0) {
			advance(&iov, &count, (size_t)n);
			continue;
		}
		if (errno == EINTR)
			continue;
		if (errno != EAGAIN && errno != EWOULDBLOCK)
			return -errno;
		int64_t left = time_left(c);
		if (left < 0)
			return (int)left;
		short events;
		int r = wait_for(c->fd, (short)(stop_on_answer ? POLLOUT | POLLIN : POLLOUT), &events, (unsigned)left);
		if (r < 0)
			return r;
		if (stop_on_answer && (events & POLLIN) && !(events & POLLOUT))
			return 1;
	}
	return 0;
}

static int build_head(const struct http_client *c, const struct http_call *call, struct buf *head, struct error *e)
{
	if (!http_name_is_valid(call->method) || call->target[0] != '/' || strpbrk(call->target, " \r\n\t"))
		return error_set(e, ERROR_INVALID, "HTTP call %.20s %.200s is malformed", call->method, call->target);
	int r = buf_printf(head, "%s %s HTTP/1.1\r\nHost: %s\r\n", call->method, call->target, c->host);
	for (size_t i = 0; r == 0 && i < call->header_count; i++) {
		const struct http_header *h = &call->headers[i];
		if (!http_name_is_valid(h->name) || !http_value_is_valid(h->value))
			return error_set(e, ERROR_INVALID, "HTTP header \"%.64s\" is malformed", h->name);
		r = buf_printf(head, "%s: %s\r\n", h->name, h->value);
	}
	int needs_length =
	    call->body || !strcmp(call->method, "POST") || !strcmp(call->method, "PUT") || !strcmp(call->method, "PATCH");
	if (r == 0 && call->stream_body)
		r = buf_append_string(head, "Transfer-Encoding: chunked\r\n");
	else if (r == 0 && needs_length)
		r = buf_printf(head, "Content-Length: %zu\r\n", call->body ? call->body_size : 0);
	if (r == 0)
		r = buf_append_string(head, "\r\n");
	return r < 0 ? error_set_errno(e, r, "HTTP request head") : 0;
}

static int start(struct http_client *c, const struct http_call *call, struct error *e)
{
	if (c->started || c->raw || c->broken || c->streaming)
		return error_set(e, ERROR_CONFLICT, "HTTP connection cannot carry another call");
	CLEANUP_BUF struct buf head = {.limit = HTTP_HEAD_BYTES_MAX};
	int r = build_head(c, call, &head, e);
	if (r < 0)
		return r;
	http_parser_reset(&c->parser);
	c->parser.head_answer = !strcmp(call->method, "HEAD");
	c->timeout_ms = call->timeout_ms;
	c->started = 1;
	c->head_read = 0;
	c->body_sent = 0;
	c->streaming = call->stream_body;
	struct iovec iov[2] = {{head.data, head.size}, {(void *)(uintptr_t)call->body, call->body ? call->body_size : 0}};
	size_t count = call->stream_body ? 1 : 2;
	r = send_all(c, iov, count, !call->stream_body);
	if (r == 0 && !call->stream_body)
		c->body_sent = 1;
	if (r < 0)
		c->broken = 1;
	/* A peer that refuses a body may have said why before it closed: the answer is worth reading. */
	if (r == -EPIPE || r == -ECONNRESET || r == 1)
		return 0;
	return r < 0 ? error_set_errno(e, r, "send of HTTP request") : 0;
}

int http_client_start(struct http_client *client, const struct http_call *call, struct error *e)
{
	client->deadline_ms = 0;
	return start(client, call, e);
}

int http_client_write(struct http_client *client, const void *data, size_t size, struct error *e)
{
	if (!client->streaming)
		return error_set(e, ERROR_CONFLICT, "HTTP call has no streamed body");
	if (size == 0)
		return 0; /* an empty chunk would end the body */
	char line[24];
	int n = snprintf(line, sizeof(line), "%zx\r\n", size);
	struct iovec iov[3] = {{line, (size_t)n}, {(void *)(uintptr_t)data, size}, {(void *)(uintptr_t) "\r\n", 2}};
	int r = send_all(client, iov, 3, 0);
	return r < 0 ? error_set_errno(e, r, "send of HTTP body") : 0;
}

int http_client_finish_body(struct http_client *client, struct error *e)
{
	if (!client->streaming)
		return 0;
	struct iovec iov = {(void *)(uintptr_t) "0\r\n\r\n", 5};
	int r = send_all(client, &iov, 1, 0);
	if (r < 0)
		return error_set_errno(e, r, "send of HTTP body");
	client->streaming = 0;
	client->body_sent = 1;
	return 0;
}

/* Fills the input buffer: bytes received, 0 at end of file, -errno. */
static ssize_t receive(struct http_client *c, void *data, size_t size)
{
	for (;;) {
		ssize_t n = recv(c->fd, data, size, MSG_DONTWAIT);
		if (n >= 0)
			return n;
		if (errno == EINTR)
			continue;
		if (errno != EAGAIN && errno != EWOULDBLOCK)
			return -errno;
		int64_t left = time_left(c);
		int r = left < 0 ? (int)left : wait_for(c->fd, POLLIN, NULL, (unsigned)left);
		if (r < 0)
			return r;
	}
}

static int fill(struct http_client *c, struct error *e)
{
	if (c->input_at < c->input_size)
		return 1;
	c->input_at = c->input_size = 0;
	ssize_t n = receive(c, c->input, CLIENT_BUFFER_BYTES);
	if (n < 0) {
		c->broken = 1;
		if (n == -ECONNRESET || n == -EPIPE)
			return error_set(e, ERROR_UNAVAILABLE, "connection was reset while waiting for an HTTP answer");
		return error_set_errno(e, (int)n, "HTTP answer");
	}
	c->input_size = (size_t)n;
	return n > 0;
}

static int read_one_head(struct http_client *c, struct error *e)
{
	while (!c->parser.head_done) {
		int r = fill(c, e);
		if (r == 0) {
			c->broken = 1;
			r = http_parser_eof(&c->parser, e);
		}
		if (r < 0)
			return r;
		ssize_t used = http_parser_head(&c->parser, c->input + c->input_at, c->input_size - c->input_at, e);
		if (used < 0) {
			c->broken = 1;
			return (int)used;
		}
		c->input_at += (size_t)used;
	}
	return 0;
}

int http_client_read_head(struct http_client *client, struct http_answer *ret, struct error *e)
{
	*ret = (struct http_answer){0};
	if (!client->started || client->head_read)
		return error_set(e, ERROR_CONFLICT, "no HTTP answer is awaited");
	for (unsigned interim = 0;; interim++) {
		int r = read_one_head(client, e);
		if (r < 0)
			return r;
		if (client->parser.status >= 200 || client->parser.status == 101)
			break;
		if (interim == CLIENT_INTERIM_ANSWERS_MAX) {
			client->broken = 1;
			return error_set(e, ERROR_UNAVAILABLE, "peer sent more than %d interim HTTP answers",
			                 CLIENT_INTERIM_ANSWERS_MAX);
		}
		int head_answer = client->parser.head_answer;
		http_parser_reset(&client->parser);
		client->parser.head_answer = head_answer;
	}
	struct http_parser *p = &client->parser;
	client->head_read = 1;
	client->raw = p->status == 101;
	ret->status = p->status;
	ret->keep_alive = p->keep_alive;
	ret->header_count = p->header_count;
	memcpy(ret->headers, p->headers, sizeof(ret->headers[0]) * p->header_count);
	ret->head = p->head;
	p->head = (struct buf){0};
	return 0;
}

struct copy_sink {
	char *to;
	size_t size;
};

static int copy_sink_take(void *context, const char *data, size_t size)
{
	struct copy_sink *s = context;
	memcpy(s->to + s->size, data, size);
	s->size += size;
	return 0;
}

static ssize_t read_raw(struct http_client *c, void *data, size_t size, struct error *e)
{
	int r = fill(c, e);
	if (r <= 0)
		return r;
	size_t n = MIN(size, c->input_size - c->input_at);
	memcpy(data, c->input + c->input_at, n);
	c->input_at += n;
	return (ssize_t)n;
}

ssize_t http_client_read(struct http_client *client, void *data, size_t size, struct error *e)
{
	if (client->raw)
		return read_raw(client, data, size, e);
	if (!client->head_read)
		return error_set(e, ERROR_CONFLICT, "the HTTP answer's head was not read yet");
	struct http_parser *p = &client->parser;
	struct copy_sink sink = {.to = data};
	while (!p->done && sink.size == 0 && size > 0) {
		int r = fill(client, e);
		if (r == 0) {
			client->broken = 1;
			r = http_parser_eof(p, e);
			if (r < 0)
				return r;
			break;
		}
		if (r < 0)
			return r;
		/* Decoding never makes bytes more, so `size` input bytes always fit. */
		size_t give = MIN(size, client->input_size - client->input_at);
		ssize_t used = http_parser_body(p, client->input + client->input_at, give, copy_sink_take, &sink, e);
		if (used < 0) {
			client->broken = 1;
			return used;
		}
		client->input_at += (size_t)used;
	}
	if (p->done)
		client->started = 0;
	return (ssize_t)sink.size;
}

int http_client_reusable(const struct http_client *client)
{
	if (client->broken || client->raw || client->streaming || !client->body_sent ||
	    client->input_at < client->input_size)
		return 0;
	if (client->head_read && (!client->parser.done || !client->parser.keep_alive))
		return 0;
	if (client->started && !client->head_read)
		return 0;
	/* Readable now means closed by the peer, or bytes nobody asked for. */
	struct pollfd p = {.fd = client->fd, .events = POLLIN};
	return poll(&p, 1, 0) == 0;
}

static int read_whole_body(struct http_client *c, struct buf *body, struct error *e)
{
	for (;;) {
		char *room = buf_reserve(body, 16384);
		size_t size = 16384;
		if (!room && body->limit && body->size < body->limit) {
			size = body->limit - body->size;
			room = buf_reserve(body, size);
		}
		if (room)
			*room = '\0'; /* an empty body is an empty string, too */
		char probe;
		int full = !room && body->limit && body->size == body->limit;
		if (!room && !full)
			return error_set_errno(e, ENOMEM, "HTTP answer");
		ssize_t n = http_client_read(c, full ? &probe : room, full ? 1 : size, e);
		if (n < 0)
			return (int)n;
		if (n == 0)
			return 0;
		if (full)
			return error_set(e, ERROR_TOO_LARGE, "HTTP answer is larger than %zu bytes", body->limit);
		body->size += (size_t)n;
		body->data[body->size] = '\0';
	}
}

int http_client_call(struct http_client *client, const struct http_call *call, struct http_answer *ret, struct error *e)
{
	*ret = (struct http_answer){0};
	if (call->stream_body)
		return error_set(e, ERROR_INVALID, "a streamed body needs http_client_start()");
	client->deadline_ms = call->timeout_ms ? time_monotonic_ms() + call->timeout_ms : 0;
	int r = start(client, call, e);
	if (r == 0)
		r = http_client_read_head(client, ret, e);
	if (r == 0 && client->raw)
		return 0;
	if (r == 0) {
		ret->body.limit = call->answer_limit ? call->answer_limit : CLIENT_ANSWER_BYTES_DEFAULT;
		r = read_whole_body(client, &ret->body, e);
	}
	if (r < 0) {
		client->broken = 1;
		http_answer_free(ret);
		return error_prefix(e, "%s %.200s", call->method, call->target);
	}
	return 0;
}

void http_answer_free(struct http_answer *answer)
{
	buf_free(&answer->head);
	buf_free(&answer->body);
	*answer = (struct http_answer){0};
}

const char *http_answer_header(const struct http_answer *answer, const char *name)
{
	for (size_t i = 0; i < answer->header_count; i++) {
		if (!strcasecmp(answer->headers[i].name, name))
			return answer->headers[i].value;
	}
	return NULL;
}
