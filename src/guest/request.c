#include "guest/request.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/text.h"
#include "guest/connection.h"
#include "guest/json_text.h"

/* Answers below this size are copied behind their head and leave in one packet. */
#define RESPONSE_JOIN_BYTES 4096

const char *request_header(const struct request *r, const char *name)
{
	return head_field(&r->connection->head, name);
}

static int hex_value(char c)
{
	if (c >= '0' && c <= '9')
		return c - '0';
	if (c >= 'a' && c <= 'f')
		return c - 'a' + 10;
	if (c >= 'A' && c <= 'F')
		return c - 'A' + 10;
	return -1;
}

static int decode_query(const char *from, size_t size, char *to)
{
	for (size_t i = 0; i < size; i++) {
		if (from[i] == '+') {
			*to++ = ' ';
			continue;
		}
		if (from[i] != '%') {
			*to++ = from[i];
			continue;
		}
		if (size - i < 3)
			return -EINVAL;
		int high = hex_value(from[i + 1]);
		int low = hex_value(from[i + 2]);
		if (high < 0 || low < 0 || (high == 0 && low == 0))
			return -EINVAL;
		*to++ = (char)(high << 4 | low);
		i += 2;
	}
	*to = '\0';
	return 0;
}

int request_query(const struct request *r, const char *name, char **ret)
{
	size_t name_size = strlen(name);
	for (const char *p = r->query; *p;) {
		size_t size = strcspn(p, "&");
		size_t key = strcspn(p, "=&");
		if (key == name_size && strncmp(p, name, key) == 0) {
			size_t value_size = size > key ? size - key - 1 : 0;
			CLEANUP_FREE char *value = malloc(value_size + 1);
			if (!value)
				return -ENOMEM;
			if (decode_query(p + key + (size > key), value_size, value) < 0)
				return -EINVAL;
			*ret = TAKE_PTR(value);
			return 0;
		}
		p += size;
		p += *p == '&';
	}
	return -ENOENT;
}

int connection_wait_input(struct connection *c, int timeout_ms)
{
	struct pollfd p = {.fd = c->fd, .events = POLLIN};
	int r;
	do
		r = poll(&p, 1, timeout_ms);
	while (r < 0 && errno == EINTR);
	if (r == 0)
		return -ETIMEDOUT;
	return r < 0 ? -errno : 0;
}

void connection_begin(struct connection *c)
{
	c->body_left = c->head.has_length ? c->head.length : 0;
	c->body_complete = !c->head.is_chunked && c->body_left == 0;
	c->body_start = c->body_end = 0;
	const char *expect = head_field(&c->head, "expect");
	c->must_continue = !c->body_complete && expect && strcasecmp(expect, "100-continue") == 0;
	c->state = RESPONSE_NONE;
	c->is_chunked = 0;
	c->is_head = strcmp(c->head.method, "HEAD") == 0;
	c->body_owed = 0;
	c->must_close = !c->head.keep_alive;
}

static int send_all(struct connection *c, struct iovec *iov, size_t count)
{
	struct msghdr message = {.msg_iov = iov, .msg_iovlen = count};
	while (c->failure == 0) {
		while (message.msg_iovlen && message.msg_iov->iov_len == 0) {
			message.msg_iov++;
			message.msg_iovlen--;
		}
		if (!message.msg_iovlen)
			return 0;
		ssize_t n = sendmsg(c->fd, &message, MSG_NOSIGNAL);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0) {
			c->failure = -errno;
			break;
		}
		size_t left = (size_t)n;
		while (left) {
			size_t part = MIN(left, message.msg_iov->iov_len);
			message.msg_iov->iov_base = (char *)message.msg_iov->iov_base + part;
			message.msg_iov->iov_len -= part;
			left -= part;
			if (message.msg_iov->iov_len == 0 && left) {
				message.msg_iov++;
				message.msg_iovlen--;
			}
		}
	}
	return c->failure;
}

int connection_flush(struct connection *c)
{
	struct iovec iov = {.iov_base = c->out.data, .iov_len = c->out.size};
	int r = send_all(c, &iov, 1);
	c->out.size = 0;
	return r;
}

static int owe_continue(struct connection *c)
{
	static const char text[] = "HTTP/1.1 100 Continue\r\n\r\n";
	if (!c->must_continue)
		return 0;
	c->must_continue = 0;
	if (c->state != RESPONSE_NONE)
		return 0;
	struct iovec iov = {.iov_base = (char *)(uintptr_t)text, .iov_len = sizeof(text) - 1};
	return send_all(c, &iov, 1);
}

/* One read from the socket, bounded in time. */
static ssize_t receive(struct connection *c, void *data, size_t size)
{
	for (;;) {
		ssize_t n = recv(c->fd, data, size, MSG_DONTWAIT);
		if (n > 0)
			return n;
		if (n == 0)
			return -ECONNRESET;
		if (errno == EINTR)
			continue;
		if (errno != EAGAIN)
			return -errno;
		int r = connection_wait_input(c, CONNECTION_BODY_MS);
		if (r < 0)
			return r;
	}
}

static ssize_t read_plain(struct connection *c, void *data, size_t size)
{
	size_t want = (size_t)MIN((uint64_t)size, c->body_left);
	size_t buffered = c->in_end - c->in_start;
	ssize_t n;
	if (buffered) {
		n = (ssize_t)MIN(want, buffered);
		memcpy(data, c->in + c->in_start, (size_t)n);
		c->in_start += (size_t)n;
	} else {
		n = receive(c, data, want);
		if (n < 0)
			return n;
	}
	c->body_left -= (uint64_t)n;
	if (c->body_left == 0)
		c->body_complete = 1;
	return n;
}

static ssize_t read_chunked(struct connection *c, void *data, size_t size)
{
	while (c->body_start == c->body_end) {
		if (c->head.body_done) {
			c->body_complete = 1;
			return 0;
		}
		if (c->in_start == c->in_end) {
			c->in_start = c->in_end = c->head_size;
			ssize_t n = receive(c, c->in + c->in_end, c->in_capacity - c->in_end);
			if (n < 0)
				return n;
			c->in_end += (size_t)n;
		}
		size_t decoded;
		ssize_t used = head_decode_chunks(&c->head, c->in + c->in_start, c->in_end - c->in_start, &decoded);
		if (used < 0)
			return used;
		c->body_start = c->in_start;
		c->body_end = c->in_start + decoded;
		c->in_start += (size_t)used;
	}
	size_t n = MIN(size, c->body_end - c->body_start);
	memcpy(data, c->in + c->body_start, n);
	c->body_start += n;
	return (ssize_t)n;
}

ssize_t request_read(struct request *r, void *data, size_t size)
{
	struct connection *c = r->connection;
	if (c->body_complete || !size)
		return 0;
	int e = owe_continue(c);
	ssize_t n = e < 0 ? e : c->head.is_chunked ? read_chunked(c, data, size) : read_plain(c, data, size);
	if (n < 0) {
		c->must_close = 1;
		c->body_complete = 1;
	}
	return n;
}

int request_read_json(struct request *r, json_t **ret, struct error *e)
{
	CLEANUP_BUF struct buf body = {0};
	if (r->content_length > AGENT_JSON_BYTES_MAX)
		return error_set(e, ERROR_TOO_LARGE, "the request body has more than %d bytes", AGENT_JSON_BYTES_MAX);
	for (;;) {
		size_t step = r->content_length > 0 ? (size_t)r->content_length - body.size : 16384;
		char *room = buf_reserve(&body, MAX(step, (size_t)1));
		if (!room)
			return error_set(e, ERROR_EXHAUSTED, "out of memory");
		ssize_t n = request_read(r, room, MAX(step, (size_t)1));
		if (n == -EBADMSG)
			return error_set(e, ERROR_INVALID, "malformed chunked body");
		if (n < 0)
			return error_set(e, ERROR_CANCELED, "the request body was cut off");
		if (n == 0)
			break;
		body.size += (size_t)n;
		if (body.size > AGENT_JSON_BYTES_MAX)
			return error_set(e, ERROR_TOO_LARGE, "the request body has more than %d bytes", AGENT_JSON_BYTES_MAX);
	}
	return json_text_parse(body.data, body.size, ret, e);
}

static const char *reason(int status)
{
	static const struct {
		int status;
		const char *text;
	} reasons[] = {
	    {101, "Switching Protocols"},
	    {200, "OK"},
	    {204, "No Content"},
	    {206, "Partial Content"},
	    {304, "Not Modified"},
	    {400, "Bad Request"},
	    {401, "Unauthorized"},
	    {403, "Forbidden"},
	    {404, "Not Found"},
	    {405, "Not Allowed"},
	    {406, "Not Acceptable"},
	    {409, "Conflict"},
	    {413, "Too Large"},
	    {416, "Not Satisfiable"},
	    {429, "Too Many Requests"},
	    {500, "Internal Error"},
	    {502, "Bad Gateway"},
	    {503, "Unavailable"},
	    {507, "Insufficient Storage"},
	};
	for (size_t i = 0; i < ARRAY_SIZE(reasons); i++)
		if (reasons[i].status == status)
			return reasons[i].text;
	return "Status";
}

int response_start(struct request *r, int status, const struct request_header *headers, size_t count, int64_t length)
{
	struct connection *c = r->connection;
	if (c->state != RESPONSE_NONE)
		return -EALREADY;
	c->state = RESPONSE_OPEN;
	int has_body = status >= 200 && status != 204 && status != 304;
	/* An HTTP/1.0 client knows no chunks: the end of the connection ends its body. */
	c->is_chunked = length < 0 && has_body && !c->head.is_http_1_0;
	c->body_owed = length;
	if (length < 0 && !c->is_chunked)
		c->must_close = 1;
	int e = buf_printf(&c->out, "HTTP/1.1 %d %s\r\n", status, reason(status));
	for (size_t i = 0; i < count && e == 0; i++)
		e = buf_printf(&c->out, "%s: %s\r\n", headers[i].name, headers[i].value);
	if (e == 0 && c->is_chunked)
		e = buf_append_string(&c->out, "Transfer-Encoding: chunked\r\n");
	else if (e == 0 && length >= 0 && has_body)
		e = buf_printf(&c->out, "Content-Length: %lld\r\n", (long long)length);
	if (e == 0 && c->must_close && status != 101)
		e = buf_append_string(&c->out, "Connection: close\r\n");
	if (e == 0 && request_header(r, "origin"))
		e = buf_append_string(&c->out, "Access-Control-Allow-Origin: *\r\nAccess-Control-Expose-Headers: *\r\n");
	if (e == 0)
		e = buf_append_string(&c->out, "\r\n");
	if (!has_body)
		c->is_head = 1;
	if (e < 0)
		c->failure = e;
	return e;
}

int connection_queue(struct connection *c, const void *data, size_t size)
{
	if (c->failure || c->is_head || !size)
		return c->failure;
	int e = c->is_chunked ? buf_printf(&c->out, "%zx\r\n", size) : 0;
	if (e == 0)
		e = buf_append(&c->out, data, size);
	if (e == 0 && c->is_chunked)
		e = buf_append(&c->out, "\r\n", 2);
	if (e < 0)
		c->failure = e;
	return e;
}

int response_write(struct request *r, const void *data, size_t size)
{
	struct connection *c = r->connection;
	if (c->state != RESPONSE_OPEN)
		return -EINVAL;
	if (c->failure || c->is_head || !size)
		return c->failure;
	if (!c->is_chunked && c->body_owed >= 0) {
		if ((uint64_t)size > (uint64_t)c->body_owed)
			return -EMSGSIZE;
		c->body_owed -= (int64_t)size;
		/* The last byte of a short answer leaves together with its head. */
		if (c->body_owed == 0 && size <= RESPONSE_JOIN_BYTES)
			return connection_queue(c, data, size);
	}
	if (c->is_chunked && buf_printf(&c->out, "%zx\r\n", size) < 0)
		return c->failure = -ENOMEM;
	struct iovec iov[3] = {
	    {.iov_base = c->out.data, .iov_len = c->out.size},
	    {.iov_base = (char *)(uintptr_t)data, .iov_len = size},
	    {.iov_base = (char *)(uintptr_t) "\r\n", .iov_len = c->is_chunked ? 2 : 0},
	};
	int e = send_all(c, iov, ARRAY_SIZE(iov));
	c->out.size = 0;
	return e;
}

int response_end(struct request *r)
{
	struct connection *c = r->connection;
	if (c->state != RESPONSE_OPEN)
		return c->state == RESPONSE_DONE ? 0 : -EINVAL;
	c->state = RESPONSE_DONE;
	if (c->failure)
		return c->failure;
	if (c->is_chunked && !c->is_head && buf_append_string(&c->out, "0\r\n\r\n") < 0)
		c->failure = -ENOMEM;
	/* Fewer bytes than announced: only closing tells the client. */
	if (!c->is_chunked && !c->is_head && c->body_owed > 0)
		c->must_close = 1;
	return c->failure ? c->failure : connection_flush(c);
}

int response_empty(struct request *r, int status)
{
	int e = response_start(r, status, NULL, 0, 0);
	return e < 0 ? e : response_end(r);
}

static int response_text(struct request *r, int status, const char *type, const char *text, size_t size)
{
	const struct request_header headers[] = {
	    {.name = (char *)(uintptr_t) "Content-Type", .value = (char *)(uintptr_t)type},
	    {.name = (char *)(uintptr_t) "Cache-Control", .value = (char *)(uintptr_t) "no-store"},
	};
	int e = response_start(r, status, headers, ARRAY_SIZE(headers), (int64_t)size);
	if (e == 0)
		e = response_write(r, text, size);
	if (e == 0)
		e = response_end(r);
	return e;
}

int response_json(struct request *r, int status, json_t *body)
{
	CLEANUP_FREE char *text = body ? json_dumps(body, JSON_COMPACT | JSON_ENCODE_ANY) : NULL;
	json_decref(body);
	if (!text)
		return response_start(r, 500, NULL, 0, 0) < 0 ? -ENOMEM : response_end(r);
	return response_text(r, status, "application/json", text, strlen(text));
}

int response_error_status(struct request *r, int status, const char *message)
{
	return response_json(r, status, json_pack("{s:i,s:s}", "code", status, "message", message));
}

int response_error(struct request *r, const struct error *e)
{
	return response_error_status(r, error_code_http_status(e->code), e->message);
}

int request_is_gone(struct request *r)
{
	struct connection *c = r->connection;
	if (c->failure || atomic_load(&c->is_dropped))
		return 1;
	struct pollfd p = {.fd = c->fd, .events = POLLRDHUP};
	return poll(&p, 1, 0) > 0 && (p.revents & (POLLRDHUP | POLLHUP | POLLERR));
}

int request_fd(const struct request *r)
{
	return r->connection->fd;
}
