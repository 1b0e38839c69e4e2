/*
 * Spares: VMMs that have started up and wait, with an empty memory file and an empty disk. A restore that finds one of
 * its size clones the disk into place, gives it the memory to map and loads device state, and so saves the start of the
 * process, which is most of the time a restore takes. They belong to no session and no template, have no row in the
 * store, and are ended by the next start if they outlive this process. The warm pool's thread fills them.
 */
#ifndef SPACE_SESSION_SPARE_H
#define SPACE_SESSION_SPARE_H

#include <stdint.h>

#include "base/error.h"

struct session_manager;
struct sandbox;
struct spares;

int spare_init(struct session_manager *m, struct error *e);
/* Ends all of them. */
void spare_end(struct session_manager *m);
/* One that is alive and of this size, or NULL. It counts as a sandbox already. */
struct sandbox *spare_take(struct session_manager *m, uint64_t memory_bytes, uint64_t disk_bytes, uint64_t vcpus);
/* Starts a spare's VMM for a fresh sandbox with its sizes set: with a placeholder for memory and an empty disk. */
int spare_start(struct session_manager *m, struct sandbox *sandbox, struct error *e);
/* Ends one to make room; false if there was none. */
int spare_evict(struct session_manager *m);
unsigned spare_ready(struct session_manager *m);
/* Starts one of this size and drops those of another. Nothing to do is success. */
int spare_fill_one(struct session_manager *m, uint64_t memory_bytes, uint64_t disk_bytes, uint64_t vcpus,
                   struct error *e);

#endif
