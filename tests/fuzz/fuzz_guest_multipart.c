/* Multipart uploads: the first line is the Content-Type, the rest the body, whole and in pieces. */
#include <string.h>

#include "fuzz.h"
#include "guest/multipart.h"

struct outcome {
	uint64_t sum;
	unsigned parts;
	unsigned open;
};

static int begin(void *context, const struct multipart_part *part)
{
	struct outcome *o = context;
	FUZZ_CHECK(!o->open && ++o->parts <= MULTIPART_PARTS_MAX);
	FUZZ_CHECK(strlen(part->name) < MULTIPART_NAME_BYTES && strlen(part->filename) < MULTIPART_FILENAME_BYTES);
	o->open = 1;
	o->sum = fuzz_sum(o->sum, part->filename, strlen(part->filename) + 1);
	return 0;
}

static int take(void *context, const void *data, size_t size)
{
	struct outcome *o = context;
	FUZZ_CHECK(o->open);
	o->sum = fuzz_sum(o->sum, data, size);
	return 0;
}

static int end(void *context)
{
	struct outcome *o = context;
	FUZZ_CHECK(o->open);
	o->open = 0;
	o->sum = fuzz_sum(o->sum, "|", 1);
	return 0;
}

static int feed(const char *type, const uint8_t *data, size_t size, size_t piece, struct outcome *o)
{
	static struct multipart m;
	struct error e = {0};
	struct multipart_callbacks callbacks = {begin, take, end, o};
	int r = multipart_init(&m, type, &e);
	for (size_t at = 0; r == 0 && at < size; at += piece) {
		size_t n = size - at < piece ? size - at : piece;
		void *copy = fuzz_copy(data + at, n);
		r = multipart_feed(&m, copy, n, &callbacks, &e);
		free(copy);
	}
	if (r == 0)
		r = multipart_finish(&m, &e);
	FUZZ_CHECK(r == 0 || (e.code != ERROR_NONE && e.message[0]));
	return r;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	const uint8_t *line_end = size ? memchr(data, '\n', size) : NULL;
	if (!line_end)
		return 0;
	size_t type_size = (size_t)(line_end - data);
	char *type = malloc(type_size + 1);
	FUZZ_CHECK(type);
	memcpy(type, data, type_size);
	type[type_size] = '\0';
	char value[64];
	long n = multipart_parameter(type, "boundary", value, sizeof(value));
	FUZZ_CHECK(n < 0 || (size_t)n < sizeof(value));
	struct outcome whole = {0};
	struct outcome bytes = {0};
	size_t body = size - type_size - 1;
	int a = feed(type, line_end + 1, body, body ? body : 1, &whole);
	int b = feed(type, line_end + 1, body, 1, &bytes);
	FUZZ_CHECK(a == b && whole.parts == bytes.parts && whole.sum == bytes.sum);
	free(type);
	return 0;
}
