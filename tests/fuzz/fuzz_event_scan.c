/* The stream of a guest's process as the command line client reads it, whole and in pieces. */
#include <string.h>

#include "cli/event_scan.h"
#include "fuzz.h"

struct outcome {
	int failed;
	int finished;
	unsigned events;
	uint64_t sum;
};

static void note(struct outcome *o, const struct event_scan_event *event)
{
	o->events++;
	o->sum = fuzz_sum(o->sum, &event->kind, sizeof(event->kind));
	if (event->kind == EVENT_SCAN_DATA && event->base64_size) {
		unsigned char *decoded = malloc(event->base64_size / 4 * 3 + 3);
		FUZZ_CHECK(decoded);
		long n = event_scan_decode(decoded, event->base64, event->base64_size);
		if (n > 0)
			o->sum = fuzz_sum(o->sum, decoded, (size_t)n);
		free(decoded);
	}
	if (event->kind == EVENT_SCAN_END)
		o->sum = fuzz_sum(o->sum, event->text, strlen(event->text));
}

static struct outcome scan_all(const uint8_t *data, size_t size, size_t piece)
{
	struct event_scan scan = {0};
	struct outcome o = {0};
	for (size_t at = 0; at < size && !o.failed && !o.finished;) {
		size_t n = size - at < piece ? size - at : piece;
		char *room = event_scan_space(&scan, n);
		if (!room)
			break;
		memcpy(room, data + at, n);
		event_scan_filled(&scan, n);
		at += n;
		for (;;) {
			struct event_scan_event event = {0};
			struct error e = {0};
			if (event_scan_next(&scan, &event, &e) < 0) {
				FUZZ_CHECK(e.code != ERROR_NONE);
				o.failed = 1;
				break;
			}
			if (event.kind == EVENT_SCAN_NONE)
				break;
			note(&o, &event);
			if (event.kind == EVENT_SCAN_FINISH) {
				o.finished = 1;
				break;
			}
		}
	}
	event_scan_free(&scan);
	return o;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct outcome whole = scan_all(data, size, size ? size : 1);
	struct outcome pieces = scan_all(data, size, 3);
	FUZZ_CHECK(whole.failed == pieces.failed && whole.events == pieces.events && whole.sum == pieces.sum);
	return 0;
}
