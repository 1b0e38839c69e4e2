/* Heads and chunked bodies as the guest agent reads them. */
#include <string.h>

#include "fuzz.h"
#include "guest/head.h"

static void check_strings(const struct head *h)
{
	FUZZ_CHECK(h->method && h->path && h->query && h->field_count <= HEAD_FIELDS_MAX);
	FUZZ_CHECK(!strpbrk(h->path, " \r\n?") && !strpbrk(h->query, " \r\n"));
	for (size_t i = 0; i < h->field_count; i++)
		FUZZ_CHECK(!strpbrk(h->fields[i].value, "\r\n") && !strpbrk(h->fields[i].name, "\r\n :"));
	FUZZ_CHECK(!(h->is_chunked && h->has_length));
	(void)head_list_has(head_field(h, "connection"), "upgrade");
}

/* Sum of the decoded body; *ret_failed tells whether it broke the coding. */
static uint64_t decode(const struct head *parsed, const uint8_t *data, size_t size, size_t piece, int *ret_failed)
{
	struct head h = *parsed;
	h.parser.data = &h;
	uint64_t sum = 0;
	*ret_failed = 0;
	for (size_t at = 0; at < size && !h.body_done;) {
		size_t n = size - at < piece ? size - at : piece;
		size_t decoded = 0;
		char *copy = fuzz_copy(data + at, n);
		ssize_t used = head_decode_chunks(&h, copy, n, &decoded);
		if (used < 0) {
			*ret_failed = 1;
			free(copy);
			break;
		}
		FUZZ_CHECK((size_t)used <= n && decoded <= (size_t)used);
		sum = fuzz_sum(sum, copy, decoded);
		free(copy);
		if (used == 0)
			break;
		at += (size_t)used;
	}
	return sum;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	char *copy = fuzz_copy(data, size);
	size_t scanned = 0;
	size_t step_scanned = 0;
	ssize_t end = head_find_end(copy, size, &scanned);
	FUZZ_CHECK(end <= (ssize_t)size);
	ssize_t stepped = 0;
	for (size_t n = 1; n <= size && stepped == 0; n++)
		stepped = head_find_end(copy, n, &step_scanned);
	FUZZ_CHECK(stepped == end || end < 0 || stepped < 0);
	if (end > 0) {
		static struct head h;
		memset(&h, 0, sizeof(h));
		char *head = fuzz_copy(copy, (size_t)end);
		int status = head_parse(&h, head, (size_t)end);
		FUZZ_CHECK(status == 0 || (status >= 400 && status < 600));
		if (status == 0) {
			check_strings(&h);
			if (h.is_chunked) {
				int whole_failed;
				int pieces_failed;
				uint64_t whole = decode(&h, data + end, size - (size_t)end, size, &whole_failed);
				uint64_t pieces = decode(&h, data + end, size - (size_t)end, 1, &pieces_failed);
				FUZZ_CHECK(whole_failed == pieces_failed && (whole_failed || whole == pieces));
			}
		}
		free(head);
	}
	free(copy);
	return 0;
}
