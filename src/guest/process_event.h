/* The JSON of process events. Output is encoded straight into the message that is sent, without a JSON tree. */
#ifndef SPACE_GUEST_PROCESS_EVENT_H
#define SPACE_GUEST_PROCESS_EVENT_H

#include "guest/process.h"

/* Output bytes of one data event, a multiple of 3: a full pipe fits into one. */
#define PROCESS_EVENT_RAW_BYTES 65538
#define PROCESS_EVENT_TEXT_BYTES (PROCESS_EVENT_RAW_BYTES / 3 * 4)
/* Room for frame, envelope and JSON in front of the text, and behind it. */
#define PROCESS_EVENT_FRONT_BYTES 160
#define PROCESS_EVENT_BACK_BYTES 16
#define PROCESS_EVENT_BYTES (PROCESS_EVENT_FRONT_BYTES + PROCESS_EVENT_TEXT_BYTES + PROCESS_EVENT_BACK_BYTES)

/* Where the raw bytes of an event are to be put in a buffer of PROCESS_EVENT_BYTES: at its end, for encoding in place.
 */
char *process_event_raw(char *buffer);
/* Sends `size` raw bytes that stand at process_event_raw(), or collects them while less than `collect` bytes wait. */
int process_event_send_data(struct request *r, char *buffer, size_t size, const char *stream, uint64_t offset,
                            size_t collect);
int process_event_queue_start(struct request *r, const struct process *p);
int process_event_queue_end(struct request *r, struct process *p);
int process_event_queue_gap(struct request *r, uint64_t from, uint64_t to);
/* An entry of List; NULL if the process has ended and `all` is not set. */
json_t *process_event_describe(struct process *p, int all);

#endif
