/* The command line of a QEMU that runs one sandbox. */
#ifndef SPACE_VMM_QEMU_ARGUMENTS_H
#define SPACE_VMM_QEMU_ARGUMENTS_H

#include "base/buf.h"
#include "base/error.h"
#include "vmm/vmm.h"

/* Memory a QEMU process needs besides guest RAM: its own heap, one translation buffer, 64 disk workers. */
#define QEMU_OVERHEAD_BYTES (256 * MIB)
#define QEMU_MEMORY_BYTES_MIN (64 * MIB)
#define QEMU_MEMORY_BYTES_MAX (256 * GIB)
#define QEMU_VCPUS_MAX 32
/* The serial console's ring; a power of two. */
#define QEMU_CONSOLE_BYTES (64 * KIB)

/* Counts the machines that sandboxes have had: to be raised with every change of it, of its devices or its processor,
 * since the state of another machine does not load. */
#define QEMU_MACHINE_REVISION 2

struct qemu_arguments {
	const char *list[HOST_ARGUMENTS_MAX + 1]; /* NULL-terminated */
	size_t count;
	char *owned[HOST_ARGUMENTS_MAX];
	size_t owned_count;
	int fds[HOST_SANDBOX_FDS_MAX]; /* borrowed */
	size_t fd_count;
	int failed; /* -errno of the first append that did not fit */
};

/* Checks the configuration and fills *a. `console_fd` (-1: ring) must be open for writing only; `control_fd` is a
 * listening socket. `memory_channel_fd` (-1: none) is the shim's end of the pair that brings other memory. `incoming`:
 * wait for device state rather than boot. */
int qemu_arguments_make(struct qemu_arguments *a, const struct vmm_host *host, const struct vmm_config *config,
                        int control_fd, int console_fd, int memory_channel_fd, int incoming, struct error *e);
/* A QEMU without a machine whose control socket is the connected `control_fd`. */
int qemu_arguments_probe(struct qemu_arguments *a, int control_fd, struct error *e);
void qemu_arguments_free(struct qemu_arguments *a);

#endif
