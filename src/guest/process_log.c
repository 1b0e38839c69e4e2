#include "guest/process_log.h"

#include <errno.h>
#include <linux/sockios.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/text.h"

static atomic_size_t total_bytes;

size_t process_log_total(void)
{
	return atomic_load(&total_bytes);
}

static size_t used(const struct process_log *log)
{
	return (size_t)(log->end - log->start);
}

static struct process_log_segment *segment_at(const struct process_log *log, size_t i)
{
	return &log->segments[(log->segment_first + i) % log->segment_capacity];
}

static void copy_out(const struct process_log *log, uint64_t from, char *to, size_t size)
{
	size_t at = (size_t)(from % log->capacity);
	size_t first = MIN(size, log->capacity - at);
	memcpy(to, log->data + at, first);
	memcpy(to + first, log->data, size - first);
}

/* Gives the kept bytes a new home; bytes stay at offset % capacity. */
static int resize(struct process_log *log, size_t capacity)
{
	char *data = malloc(capacity);
	if (!data)
		return -ENOMEM;
	size_t size = used(log);
	if (size) {
		size_t at = (size_t)(log->start % capacity);
		size_t first = MIN(size, capacity - at);
		copy_out(log, log->start, data + at, first);
		copy_out(log, log->start + first, data, size - first);
	}
	free(log->data);
	atomic_fetch_add(&total_bytes, capacity);
	atomic_fetch_sub(&total_bytes, log->capacity);
	log->data = data;
	log->capacity = capacity;
	return 0;
}

size_t process_log_discard(struct process_log *log)
{
	size_t bytes = log->capacity;
	free(log->data);
	free(log->segments);
	atomic_fetch_sub(&total_bytes, log->capacity);
	log->data = NULL;
	log->capacity = 0;
	log->segments = NULL;
	log->segment_capacity = log->segment_first = log->segment_count = 0;
	log->start = log->end;
	return bytes;
}

void process_log_free(struct process_log *log)
{
	process_log_discard(log);
}

void process_log_attach(struct process_log *log, struct process_log_reader *reader, uint64_t position)
{
	reader->position = position;
	reader->progress_ms = time_monotonic_ms();
	reader->next = log->readers;
	log->readers = reader;
}

void process_log_detach(struct process_log *log, struct process_log_reader *reader)
{
	for (struct process_log_reader **p = &log->readers; *p; p = &(*p)->next) {
		if (*p == reader) {
			*p = reader->next;
			return;
		}
	}
}

void process_log_notify(struct process_log *log)
{
	static const uint64_t one = 1;
	for (struct process_log_reader *r = log->readers; r; r = r->next) {
		if (!r->waiting)
			continue;
		r->waiting = 0;
		ssize_t ignored = write(r->event_fd, &one, sizeof(one));
		(void)ignored;
	}
}

/* The oldest byte that must stay: the slowest attached reader's next one. */
static uint64_t needed_from(const struct process_log *log)
{
	uint64_t from = log->end;
	for (const struct process_log_reader *r = log->readers; r; r = r->next)
		if (!r->detached && r->position < from)
			from = r->position;
	return from;
}

size_t process_log_room(const struct process_log *log)
{
	uint64_t from = needed_from(log);
	if (log->segment_count == PROCESS_LOG_SEGMENTS_MAX && segment_at(log, 0)->end > from)
		return 0;
	size_t unread = (size_t)(log->end - from);
	size_t limit = PROCESS_LOG_BYTES_MAX;
	if (log->capacity >= PROCESS_LOG_BYTES_MIN && process_log_total() >= PROCESS_LOG_TOTAL_BYTES_MAX)
		limit = log->capacity;
	return unread >= limit ? 0 : limit - unread;
}

static void drop_before(struct process_log *log, uint64_t offset)
{
	if (offset <= log->start)
		return;
	log->start = offset;
	while (log->segment_count && segment_at(log, 0)->end <= offset) {
		log->segment_first = (log->segment_first + 1) % log->segment_capacity;
		log->segment_count--;
	}
}

/* Makes room for `want` bytes: grows while that is allowed, then lets the oldest bytes go. Returns how many fit. */
static size_t make_room(struct process_log *log, size_t want)
{
	while (used(log) + want > log->capacity && log->capacity < PROCESS_LOG_BYTES_MAX) {
		size_t capacity = log->capacity ? log->capacity * 2 : PROCESS_LOG_BYTES_MIN;
		if (log->capacity && process_log_total() + capacity > PROCESS_LOG_TOTAL_BYTES_MAX)
			break;
		if (resize(log, capacity) < 0)
			break;
	}
	want = MIN(want, log->capacity);
	if (want && used(log) + want > log->capacity)
		drop_before(log, log->end + want - log->capacity);
	return want;
}

static int add_segment(struct process_log *log, int stream, size_t size)
{
	if (log->segment_count) {
		struct process_log_segment *last = segment_at(log, log->segment_count - 1);
		if (last->stream == stream) {
			last->end += size;
			return 0;
		}
	}
	if (log->segment_count == PROCESS_LOG_SEGMENTS_MAX)
		drop_before(log, segment_at(log, 0)->end);
	if (log->segment_count == log->segment_capacity) {
		size_t capacity = log->segment_capacity ? log->segment_capacity * 2 : 8;
		struct process_log_segment *larger = malloc(capacity * sizeof(*larger));
		if (!larger)
			return -ENOMEM;
		for (size_t i = 0; i < log->segment_count; i++)
			larger[i] = *segment_at(log, i);
		free(log->segments);
		log->segments = larger;
		log->segment_capacity = capacity;
		log->segment_first = 0;
	}
	log->segment_count++;
	*segment_at(log, log->segment_count - 1) = (struct process_log_segment){.end = log->end + size, .stream = stream};
	return 0;
}

static int append(struct process_log *log, int stream, const char *data, size_t size)
{
	if (make_room(log, size) < size || add_segment(log, stream, size) < 0)
		return -ENOMEM;
	for (size_t i = 0; i < size; i++)
		log->data[(log->end + i) % log->capacity] = data[i];
	log->end += size;
	return 0;
}

ssize_t process_log_fill(struct process_log *log, int fd, int stream, size_t max)
{
	size_t room = process_log_room(log);
	if (!room)
		return -ENOBUFS;
	/* The pipe says how much there is, so that a log of a few bytes stays small. */
	int pending = 0;
	char single;
	if (ioctl(fd, FIONREAD, &pending) < 0 || pending <= 0) {
		/* Most likely the end: no kept byte may go for a read that brings none. */
		ssize_t got = read(fd, &single, 1);
		if (got <= 0)
			return got < 0 ? -errno : 0;
		return append(log, stream, &single, 1) < 0 ? -ENOMEM : 1;
	}
	size_t want = MIN(MIN(room, max), MIN((size_t)pending, (size_t)PROCESS_LOG_READ_BYTES));
	/* The space is made before the read: bytes that were read have nowhere else to go. */
	want = make_room(log, want);
	if (!want)
		return -ENOMEM;
	size_t at = (size_t)(log->end % log->capacity);
	size_t first = MIN(want, log->capacity - at);
	struct iovec iov[2] = {
	    {.iov_base = log->data + at, .iov_len = first},
	    {.iov_base = log->data, .iov_len = want - first},
	};
	ssize_t n;
	do
		n = readv(fd, iov, want > first ? 2 : 1);
	while (n < 0 && errno == EINTR);
	if (n <= 0)
		return n < 0 ? -errno : 0;
	if (add_segment(log, stream, (size_t)n) < 0)
		return -ENOMEM;
	log->end += (uint64_t)n;
	return n;
}

size_t process_log_next(struct process_log *log, struct process_log_reader *reader, void *to, size_t size,
                        int *ret_stream, uint64_t *ret_offset)
{
	if (reader->position < log->start || reader->position >= log->end)
		return 0;
	/* Ends rise along the ring: find the segment by halving. */
	size_t low = 0;
	size_t high = log->segment_count - 1;
	while (low < high) {
		size_t middle = (low + high) / 2;
		if (segment_at(log, middle)->end > reader->position)
			high = middle;
		else
			low = middle + 1;
	}
	const struct process_log_segment *segment = segment_at(log, low);
	size_t n = (size_t)MIN((uint64_t)size, segment->end - reader->position);
	copy_out(log, reader->position, to, n);
	*ret_stream = segment->stream;
	*ret_offset = reader->position;
	reader->position += n;
	return n;
}

int process_log_drop_stalled(struct process_log *log, uint64_t now_ms)
{
	int dropped = 0;
	uint64_t from = needed_from(log);
	for (struct process_log_reader *r = log->readers; r; r = r->next) {
		int queue = 0;
		if (r->detached)
			continue;
		if (ioctl(r->socket, SIOCOUTQ, &queue) < 0)
			queue = 0;
		/* A reader that takes a few bytes a second makes progress long before a whole chunk is through. */
		if (queue != r->last_queue) {
			r->last_queue = queue;
			r->progress_ms = now_ms;
		}
		if (r->position == from && now_ms - r->progress_ms >= PROCESS_LOG_STALL_MS) {
			r->detached = 1;
			dropped = 1;
		}
	}
	return dropped;
}

void process_log_finish(struct process_log *log)
{
	log->finished = 1;
	size_t size = used(log);
	if (size == 0)
		process_log_discard(log);
	else if (log->capacity > 2 * size && resize(log, MAX(size, (size_t)64)) < 0)
		return;
}
