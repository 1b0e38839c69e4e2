/* The scanner of process streams: chunking, both paths, hostile bytes; base64 against its definition. */
#include <errno.h>

#include "check.h"
#include "cli/event_scan.h"

static size_t envelope(char *to, int flags, const char *json)
{
	size_t size = strlen(json);
	to[0] = (char)flags;
	to[1] = (char)(size >> 24);
	to[2] = (char)(size >> 16);
	to[3] = (char)(size >> 8);
	to[4] = (char)size;
	memcpy(to + 5, json, size);
	return size + 5;
}

static void push(struct event_scan *scan, const void *data, size_t size)
{
	char *room = event_scan_space(scan, size);
	CHECK(room);
	memcpy(room, data, size);
	event_scan_filled(scan, size);
}

static struct event_scan_event one(struct event_scan *scan, int flags, const char *json)
{
	static char bytes[65536];
	struct event_scan_event event;
	struct error e;
	push(scan, bytes, envelope(bytes, flags, json));
	CHECK_INT(event_scan_next(scan, &event, &e), 0);
	return event;
}

static void check_data(const char *json, int channel, const char *base64, int64_t offset)
{
	struct event_scan scan = {0};
	struct event_scan_event event = one(&scan, 0, json);
	CHECK_INT(event.kind, EVENT_SCAN_DATA);
	CHECK_INT(event.channel, channel);
	CHECK_INT(event.base64_size, strlen(base64));
	CHECK(memcmp(event.base64, base64, event.base64_size) == 0);
	CHECK_INT(event.has_offset, offset >= 0);
	if (offset >= 0)
		CHECK_INT(event.offset, offset);
	event_scan_free(&scan);
}

static void test_data_forms(void)
{
	check_data("{\"event\":{\"data\":{\"stdout\":\"QUJD\"}}}", EVENT_SCAN_STDOUT, "QUJD", -1);
	check_data("{\"event\":{\"data\":{\"offset\":7,\"stderr\":\"QUJD\"}}}", EVENT_SCAN_STDERR, "QUJD", 7);
	check_data("{\"event\":{\"data\":{\"pty\":\"\",\"offset\":\"12345678901\"}}}", EVENT_SCAN_PTY, "", 12345678901);
	check_data(" { \"event\" : { \"data\" : { \"stdout\" : \"QQ==\" } , \"offset\" : 3 } } ", EVENT_SCAN_STDOUT,
	           "QQ==", 3);
	/* Only the slow path knows these. */
	check_data("{\"event\":{\"data\":{\"stdout\":\"\\/\\/\\/\\/\"}}}", EVENT_SCAN_STDOUT, "////", -1);
	check_data("{\"event\":{\"data\":{\"stdout\":\"QUJD\",\"later\":{\"x\":[1]}}}}", EVENT_SCAN_STDOUT, "QUJD", -1);
	check_data("{\"more\":1,\"event\":{\"data\":{\"stdout\":\"QUJD\",\"offset\":9}}}", EVENT_SCAN_STDOUT, "QUJD", 9);
}

static void test_other_events(void)
{
	struct event_scan scan = {0};
	struct event_scan_event event = one(&scan, 0, "{\"event\":{\"start\":{\"pid\":42}}}");
	CHECK_INT(event.kind, EVENT_SCAN_START);
	CHECK_INT(event.pid, 42);
	event = one(&scan, 0,
	            "{\"event\":{\"end\":{\"exitCode\":-1,\"exited\":false,\"status\":\"signal: killed\",\"signal\":9}}}");
	CHECK_INT(event.kind, EVENT_SCAN_END);
	CHECK_INT(event.exit_code, -1);
	CHECK_INT(event.exited, 0);
	CHECK_INT(event.signal, 9);
	CHECK_STR(event.text, "signal: killed");
	event = one(&scan, 0, "{\"event\":{\"gap\":{\"from\":5,\"to\":\"9\"}}}");
	CHECK_INT(event.kind, EVENT_SCAN_GAP);
	CHECK_INT(event.from, 5);
	CHECK_INT(event.to, 9);
	CHECK_INT(one(&scan, 0, "{\"event\":{\"keepalive\":{}}}").kind, EVENT_SCAN_OTHER);
	CHECK_INT(one(&scan, 0, "{\"unknown\":1}").kind, EVENT_SCAN_OTHER);
	event = one(&scan, 2, "{}");
	CHECK_INT(event.kind, EVENT_SCAN_FINISH);
	CHECK_INT(event.failed, 0);
	event = one(&scan, 2, "{\"error\":{\"code\":\"not_found\",\"message\":\"gone\",\"exitStatus\":127}}");
	CHECK_INT(event.failed, 1);
	CHECK_INT(event.error.code, ERROR_NOT_FOUND);
	CHECK_INT(event.exit_status, 127);
	CHECK_STR(event.error.message, "gone");
	event = one(&scan, 2, "{\"error\":{}}");
	CHECK_INT(event.failed, 1);
	CHECK_INT(event.error.code, ERROR_INTERNAL);
	event_scan_free(&scan);
}

/* The same bytes cut everywhere give the same events. */
static void test_chunking(void)
{
	static const char data[] = "{\"event\":{\"data\":{\"stdout\":\"QUJDRA==\",\"offset\":1}}}";
	char bytes[512];
	size_t size = envelope(bytes, 0, "{\"event\":{\"start\":{\"pid\":1}}}");
	size += envelope(bytes + size, 0, data);
	size += envelope(bytes + size, 2, "{}");
	for (size_t step = 1; step <= size; step++) {
		struct event_scan scan = {0};
		struct event_scan_event event;
		struct error e;
		int kinds[4] = {0};
		int count = 0;
		for (size_t at = 0; at < size; at += step) {
			push(&scan, bytes + at, MIN(step, size - at));
			for (;;) {
				CHECK_INT(event_scan_next(&scan, &event, &e), 0);
				if (event.kind == EVENT_SCAN_NONE)
					break;
				CHECK(count < 4);
				kinds[count++] = event.kind;
			}
		}
		CHECK_INT(count, 3);
		CHECK_INT(kinds[0], EVENT_SCAN_START);
		CHECK_INT(kinds[1], EVENT_SCAN_DATA);
		CHECK_INT(kinds[2], EVENT_SCAN_FINISH);
		event_scan_free(&scan);
	}
}

static void check_refused(const void *bytes, size_t size)
{
	struct event_scan scan = {0};
	struct event_scan_event event;
	struct error e;
	push(&scan, bytes, size);
	CHECK(event_scan_next(&scan, &event, &e) < 0);
	event_scan_free(&scan);
}

static void test_hostile_bytes(void)
{
	check_refused("\1\0\0\0\2{}", 7);       /* compressed */
	check_refused("\x80\0\0\0\2{}", 7);     /* unknown flag */
	check_refused("\0\xff\xff\xff\xff", 5); /* beyond the limit: refused before it is waited for */
	check_refused("\0\0\0\0\3{}}", 8);      /* no JSON */
	check_refused("\2\0\0\0\1{", 6);        /* no JSON at the end */
	check_refused("\0\0\0\0\0", 5);         /* empty message */
	check_refused("\0\0\0\0\16{\"a\":1,\"a\":2}X", 20);
}

static void test_base64(void)
{
	unsigned char out[16];
	CHECK_INT(event_scan_decode(out, "", 0), 0);
	CHECK_INT(event_scan_decode(out, "Zg==", 4), 1);
	CHECK_INT(event_scan_decode(out, "Zm8=", 4), 2);
	CHECK_INT(event_scan_decode(out, "Zm9vYmFy", 8), 6);
	CHECK(memcmp(out, "foobar", 6) == 0);
	CHECK_INT(event_scan_decode(out, "+/+/", 4), 3);
	CHECK(memcmp(out, "\xfb\xff\xbf", 3) == 0);
	CHECK_INT(event_scan_decode(out, "Zg=", 3), -EINVAL);
	CHECK_INT(event_scan_decode(out, "Z===", 4), -EINVAL);
	CHECK_INT(event_scan_decode(out, "====", 4), -EINVAL);
	CHECK_INT(event_scan_decode(out, "Zg==Zg==", 8), -EINVAL);
	CHECK_INT(event_scan_decode(out, "Zm9*", 4), -EINVAL);
	CHECK_INT(event_scan_decode(out, "Zm9\xff", 4), -EINVAL);
}

int main(void)
{
	test_data_forms();
	test_other_events();
	test_chunking();
	test_hostile_bytes();
	test_base64();
	return 0;
}
