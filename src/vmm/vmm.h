/*
 * The engine interface: what a VMM must offer so that sessions can run on it.
 *
 * All calls block and belong on worker threads; calls on one struct vmm must not overlap (the session's verb lock sees
 * to that), but for vmm_exit_reason(), which may be called at any time. A VMM process outlives this process:
 * vmm_free() only lets go of it, host_sandbox_kill() ends it.
 *
 * An engine needs from the host a tap, a raw disk and a memory file that it maps privately, and keeps device state in
 * a file of its own format. Nothing outside one engine's file knows which engine runs.
 */
#ifndef SPACE_VMM_VMM_H
#define SPACE_VMM_VMM_H

#include <sys/types.h>

#include "base/buf.h"
#include "base/error.h"
#include "host/client.h"

struct vmm;

enum vmm_accel { VMM_ACCEL_TCG, VMM_ACCEL_KVM };

struct vmm_host {
	struct host_client *helper;
	enum vmm_accel accel;
	char engine[16]; /* "qemu" */
	/* "7.2.22-m2": the program's version and the revision of the machine it is told to emulate; device state only loads
	 * on the version and accel that wrote it. */
	char version[32];
	char program_version[24]; /* "7.2.22" */
};

/* Finds the engine and acceleration of this host; `why` says in one sentence what was chosen and for what reason. */
int vmm_probe(struct host_client *helper, struct vmm_host *ret, char *why, size_t why_size, struct error *e);

struct vmm_config {
	const char *sandbox_id;
	const char *runtime_dir; /* RUNTIME_DIR/sandboxes/ID, owned by the daemon, exists; control sockets go here */
	uint64_t memory_bytes;
	unsigned vcpus;
	int memory_fd; /* O_RDONLY, exactly memory_bytes long; mapped privately */
	int disk_fd;   /* O_RDWR raw image */
	/* Only for a first boot, else -1 / NULL. */
	int kernel_fd;
	int initrd_fd;
	const char *kernel_command_line;
	int console_fd; /* >= 0: the serial console is written here (a pipe or file); else kept in a bounded ring */
};

/* Starts a VMM that will boot the given kernel; the guest runs when this returns. */
int vmm_boot(const struct vmm_host *host, const struct vmm_config *config, struct vmm **ret, struct error *e);
/* Starts a VMM that waits for device state (can be kept in this condition for a pool). */
int vmm_prepare(const struct vmm_host *host, const struct vmm_config *config, struct vmm **ret, struct error *e);
/* The same with a placeholder for memory, an empty file of memory_bytes: a spare, which can become any sandbox of its
 * size. vmm_give_memory() must follow before vmm_load(), once; the disk must have its content by then as well. */
int vmm_prepare_spare(const struct vmm_host *host, const struct vmm_config *config, struct vmm **ret, struct error *e);
/* `is_random`: the kernel reads only the pages that are touched, none around them. */
int vmm_give_memory(struct vmm *vmm, int memory_fd, int is_random, struct error *e);
/* Loads device state into a prepared VMM; the guest stays stopped. */
int vmm_load(struct vmm *vmm, int state_fd, struct error *e);
/* Takes hold again of a VMM that an earlier process started. */
int vmm_adopt(const struct vmm_host *host, const char *sandbox_id, const char *runtime_dir, struct vmm **ret,
              struct error *e);

int vmm_stop(struct vmm *vmm, struct error *e); /* vCPUs; block I/O is drained. Stopping a stopped one succeeds. */
int vmm_run(struct vmm *vmm, struct error *e);
int vmm_is_running(struct vmm *vmm, int *ret_running, struct error *e);
/* Writes the device state (without RAM) of a stopped guest to a memfd from fd_memfd(). */
int vmm_save_state(struct vmm *vmm, int state_fd, struct error *e);
/* The last bytes of the serial console, as far as they are kept. */
int vmm_console_tail(struct vmm *vmm, struct buf *ret, struct error *e);

enum vmm_exit { VMM_EXIT_NONE, VMM_EXIT_GUEST_POWEROFF, VMM_EXIT_GUEST_REBOOT, VMM_EXIT_GUEST_PANIC, VMM_EXIT_CRASH };
/* Why the VMM ended, as far as it said so before it closed its control socket. */
enum vmm_exit vmm_exit_reason(struct vmm *vmm);
const char *vmm_exit_name(enum vmm_exit exit);

pid_t vmm_pid(const struct vmm *vmm);
/* Readable once the VMM process has ended; stays owned by the vmm. */
int vmm_pidfd(const struct vmm *vmm);
/* Lets go (does not end the process). NULL is fine. */
void vmm_free(struct vmm *vmm);

#endif
