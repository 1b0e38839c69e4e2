/*
 * Captures: one instant of a guest, taken into host memory while it stands still, and then made into a snapshot's
 * folder while it goes on.
 *
 *   capture_open    a folder in tmp, memory for the copy
 *   capture_clone   clones of the previous memory file and table (meanwhile)
 *   capture_take    freeze users' processes, stop the vCPUs, { device state, clone of the disk | changed pages },
 *                   vCPUs and processes go on. Everything in here stalls the guest.
 *   capture_write   what has changed into the clone, checksums, manifest, sync, final name.
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
	uint64_t *page_sums; /* of the pages in the delta, by capture_write(); owned */
};

/* Makes the folder in tmp and what the copy goes into. */
int capture_open(struct session_manager *m, const struct sandbox *sandbox, char id_prefix, struct capture *ret,
                 struct error *e);
/* On failure the guest is as it was. */
int capture_take(struct session_manager *m, struct sandbox *sandbox, enum capture_mode mode, struct capture *capture,
                 struct error *e);
/* After CAPTURE_FINAL, when the snapshot could not be made: lets the guest go on. */
int capture_undo_final(struct sandbox *sandbox, struct error *e);
/* Lets go of everything, and removes the folder if it is still in tmp. */
void capture_close(struct session_manager *m, struct capture *capture);

/* What a snapshot's folder is made from. */
struct capture_source {
	int folder_fd; /* memory and checksums to clone, and (if use_disk) a disk to compare with; -1 = all is new */
	int use_disk;
	const uint64_t *page_sums; /* of that folder's memory, as far as known; may be NULL */
};
/* The part of writing that needs nothing of the guest: clones of the source's files in the capture's folder. May run
 * beside capture_take(), in a thread of its own. */
struct capture_clones {
	int memory_fd; /* owned */
	int table_fd;
};
int capture_clone(struct session_manager *m, const char *id, const struct sandbox *sandbox,
                  const struct capture_source *source, struct capture_clones *ret, struct error *e);
void capture_clones_close(struct capture_clones *clones);
struct capture_result {
	uint64_t bytes_stored;
	uint64_t changed_bytes;
	char manifest_sum[STORE_SUM_BYTES];
	char fingerprint[STORE_FINGERPRINT_BYTES];
};
/* Writes the files of the folder in tmp, synced, and installs it in `area`. On failure nothing is left of the folder.
 */
int capture_write(struct session_manager *m, struct capture *capture, const struct sandbox *sandbox,
                  const struct capture_source *source, const struct capture_clones *clones, enum pool_area area,
                  const char *kind, const char *parent, struct capture_result *ret, struct error *e);

#endif
