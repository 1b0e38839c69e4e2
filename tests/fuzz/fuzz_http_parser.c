/* HTTP messages of clients and guests: first byte even = request, odd = answer; whole and in pieces. */
#include <string.h>

#include "fuzz.h"
#include "http/parser.h"

struct outcome {
	int result; /* negative, or 0 = needs more, 1 = done */
	size_t used;
	uint64_t body;
	size_t headers;
	int status;
	enum http_framing framing;
};

static int take_body(void *context, const char *data, size_t size)
{
	struct outcome *o = context;
	o->body = fuzz_sum(o->body, data, size);
	return 0;
}

static struct outcome parse(enum http_parser_kind kind, const uint8_t *data, size_t size, size_t piece)
{
	struct http_parser p;
	struct outcome o = {0};
	struct error e = {0};
	http_parser_init(&p, kind, 4096);
	while (o.result == 0 && o.used < size) {
		size_t n = size - o.used < piece ? size - o.used : piece;
		char *copy = fuzz_copy(data + o.used, n);
		ssize_t used =
		    p.head_done ? http_parser_body(&p, copy, n, take_body, &o, &e) : http_parser_head(&p, copy, n, &e);
		free(copy);
		FUZZ_CHECK(used <= (ssize_t)n);
		if (used < 0) {
			o.result = (int)used;
			FUZZ_CHECK(e.code != ERROR_NONE && e.message[0]);
		} else if (p.done) {
			o.used += (size_t)used;
			o.result = 1;
		} else {
			FUZZ_CHECK(used > 0 || p.head_done);
			if (used == 0 && !p.head_done)
				break;
			o.used += (size_t)used;
		}
	}
	if (p.head_done) {
		o.headers = p.header_count;
		o.status = p.status;
		o.framing = p.framing;
		FUZZ_CHECK(p.header_count <= HTTP_HEADERS_MAX);
		for (size_t i = 0; i < p.header_count; i++)
			FUZZ_CHECK(!strpbrk(p.headers[i].value, "\r\n") && !strpbrk(p.headers[i].name, "\r\n :"));
		if (kind == HTTP_PARSER_REQUEST)
			FUZZ_CHECK(p.method && p.target && !strpbrk(p.target, "\r\n "));
	}
	if (o.result == 0)
		(void)http_parser_eof(&p, &e);
	http_parser_free(&p);
	return o;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	if (size < 2)
		return 0;
	enum http_parser_kind kind = data[0] & 1 ? HTTP_PARSER_ANSWER : HTTP_PARSER_REQUEST;
	struct outcome whole = parse(kind, data + 1, size - 1, size);
	struct outcome bytes = parse(kind, data + 1, size - 1, 1);
	struct outcome pieces = parse(kind, data + 1, size - 1, 7);
	FUZZ_CHECK((whole.result < 0) == (bytes.result < 0) && (whole.result < 0) == (pieces.result < 0));
	if (whole.result >= 0) {
		FUZZ_CHECK(whole.body == bytes.body && whole.body == pieces.body);
		FUZZ_CHECK(whole.result != 1 || (whole.used == bytes.used && whole.used == pieces.used));
		FUZZ_CHECK(whole.headers == bytes.headers && whole.status == bytes.status && whole.framing == bytes.framing);
	}
	return 0;
}
