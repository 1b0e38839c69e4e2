/* Copying the changed pages of a guest's memory out of a VMM (see host_memory_copy() in client.h). */
#ifndef SPACE_HOST_MEMORY_H
#define SPACE_HOST_MEMORY_H

#include <sys/types.h>

#include "base/error.h"

/*
 * The pages memfd of the last copy stays mapped (and so populated) for the next one of the same sandbox, because
 * faulting 100 MiB in again would cost more than copying them. Whoever owns it drops it soon (MEMORY_KEEP_MS) or the
 * caller's memfd would live on. Zero-initialise.
 */
struct memory_window {
	void *address;
	size_t size;
	dev_t device; /* of the memfd */
	ino_t inode;
	uint64_t used_ms; /* monotonic time of the last copy */
	unsigned use_count;
};

#define MEMORY_KEEP_MS 3000

int memory_copy(pid_t pid, int base_fd, uint64_t size, int pages_fd, int bitmap_fd, struct memory_window *window,
                uint64_t *ret_pages, struct error *e);
void memory_window_drop(struct memory_window *window);

#endif
