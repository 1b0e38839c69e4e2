/*
 * Captures: one instant of a guest, taken into host memory while it stands still, and then made into a snapshot's
 * folder while it goes on.
 *
 *   capture_take    freeze users' processes, stop the vCPUs, { device state, clone of the disk | changed pages },
 *                   vCPUs and processes go on. Everything in here stalls the guest.
 *   capture_write   clone of the previous memory file plus what has changed, checksums, manifest, sync, final name.
 *   (the caller commits the row, or removes the folder again)
 */
#ifndef SPACE_SESSION_CAPTURE_H
#define SPACE_SESSION_CAPTURE_H

#include "session/internal.h"

enum capture_mode {
	CAPTURE_LIVE,   /* the guest runs and goes on */
	CAPTURE_FINAL,  /* the guest runs and stays stopped on success */
	CAPTURE_STOPPED /* it is paused, and stays so */
};

struct capture {
	char id[ID_BYTES]; /* of the snapshot (or template) to come; its folder is in tmp */
	int folder_fd;
	int pages_fd;
	int bitmap_fd;
	int state_fd;
	uint64_t stall_us;
	uint64_t created_at_ms;
	struct guest_status status;
};

/* On failure the guest is as it was. ret needs capture_free() on success only. */
int capture_take(struct session_manager *m, struct sandbox *sandbox, char id_prefix, enum capture_mode mode,
                 struct capture *ret, struct error *e);
/* After CAPTURE_FINAL, when the snapshot could not be made: lets the guest go on. */
int capture_undo_final(struct sandbox *sandbox, struct error *e);
void capture_free(struct capture *capture);

struct capture_source {
	int folder_fd; /* memory, checksums, and (if use_disk) disk to compare with; -1 = nothing: all is new */
	int use_disk;
	int memory_fd; /* used when folder_fd is -1: the empty base of a fresh boot */
};
struct capture_result {
	uint64_t bytes_stored;
	uint64_t changed_bytes;
	char manifest_sum[STORE_SUM_BYTES];
	char fingerprint[STORE_FINGERPRINT_BYTES];
};
/* Writes the files of the folder in tmp, synced, and installs it in `area`. On failure nothing is left of the folder.
 */
int capture_write(struct session_manager *m, struct capture *capture, const struct sandbox *sandbox,
                  const struct capture_source *source, enum pool_area area, const char *kind, const char *parent,
                  struct capture_result *ret, struct error *e);

#endif
