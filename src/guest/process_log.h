/*
 * The output of one process: the last bytes of all its streams in the order they were read, addressed by offset (the
 * number of output bytes before them), with any number of readers.
 *
 * Policy. Output without a reader never holds the process back: the oldest bytes go. An attached reader does hold it
 * back, once the log is full of bytes that this reader has not had; a reader that accepts nothing for
 * PROCESS_LOG_STALL_MS in that situation is detached and holds nothing back any more (it gets an error when it comes
 * back, and may attach again by offset). The log has no lock of its own: its process's lock guards it.
 */
#ifndef SPACE_GUEST_PROCESS_LOG_H
#define SPACE_GUEST_PROCESS_LOG_H

#include <sys/types.h>

#include "base/macros.h"

#define PROCESS_LOG_BYTES_MAX (1024 * 1024)
#define PROCESS_LOG_BYTES_MIN 4096
/* Changes between streams that are remembered; more drop the oldest bytes. */
#define PROCESS_LOG_SEGMENTS_MAX 16384
/* All logs of the guest together; above it logs stay at the size they have. */
#define PROCESS_LOG_TOTAL_BYTES_MAX (32 * 1024 * 1024)
#define PROCESS_LOG_STALL_MS 30000
#define PROCESS_LOG_READ_BYTES 65536

struct process_log_reader {
	struct process_log_reader *next;
	uint64_t position; /* next byte this reader wants */
	int socket;        /* whose queue shows whether the reader takes anything */
	int event_fd;      /* written when there is news for a waiting reader */
	int waiting;
	int detached;
	int last_queue;
	uint64_t progress_ms;
};

struct process_log_segment {
	uint64_t end; /* offset behind its last byte */
	int stream;
};

struct process_log {
	char *data;
	size_t capacity;
	uint64_t start;
	uint64_t end;
	struct process_log_segment *segments; /* ring */
	size_t segment_capacity;
	size_t segment_first;
	size_t segment_count;
	struct process_log_reader *readers;
	int finished;
};

void process_log_free(struct process_log *log);
void process_log_attach(struct process_log *log, struct process_log_reader *reader, uint64_t position);
void process_log_detach(struct process_log *log, struct process_log_reader *reader);
/* Wakes readers that wait. */
void process_log_notify(struct process_log *log);
/* How many bytes may be added now without taking unread ones from a reader. */
size_t process_log_room(const struct process_log *log);
/* Reads up to `max` bytes from a non-blocking descriptor. Count, 0 at end of file, -EAGAIN, -ENOBUFS if a reader holds
 * the log back, or another -errno. */
ssize_t process_log_fill(struct process_log *log, int fd, int stream, size_t max);
/* Copies the next bytes of one stream for `reader` (whose position must be within the log) and moves it on. Returns the
 * count, 0 if there are none. */
size_t process_log_next(struct process_log *log, struct process_log_reader *reader, void *to, size_t size,
                        int *ret_stream, uint64_t *ret_offset);
/* Detaches readers that took nothing for too long; returns true if one was. */
int process_log_drop_stalled(struct process_log *log, uint64_t now_ms);
/* No more output will come: gives memory back that the kept bytes do not need. */
void process_log_finish(struct process_log *log);
/* Forgets the kept bytes. Returns the memory this gave back. */
size_t process_log_discard(struct process_log *log);
/* Bytes of memory all logs have now. */
size_t process_log_total(void);

#endif
