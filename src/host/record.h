/* What must be known of a sandbox to take it over after the helper was killed: one small file each in
 * RUNTIME_DIR/helper, not synced (it need not survive the machine). */
#ifndef SPACE_HOST_RECORD_H
#define SPACE_HOST_RECORD_H

#include <sys/types.h>

#include "base/error.h"
#include "base/text.h"

struct record {
	char id[ID_BYTES];
	pid_t pid;
	uint64_t start_time; /* of the process, so that a reused pid is not taken for it */
	unsigned index;      /* of its user id */
	uint64_t nonce;      /* of the call that started it */
};

int record_write(int folder_fd, const struct record *record, struct error *e);
void record_remove(int folder_fd, const char *id);
/* Calls `each` for every whole record; others (half-written, foreign) are removed. */
int record_scan(int folder_fd, void (*each)(void *context, const struct record *record), void *context,
                struct error *e);
/* Field 22 of /proc/PID/stat, or -errno. */
int record_start_time(pid_t pid, uint64_t *ret);

#endif
