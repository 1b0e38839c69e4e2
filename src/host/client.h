/*
 * Requests to the host helper, the only part of SPACE that runs as root.
 *
 * The helper listens on a SEQPACKET unix socket (RUNTIME_DIR/helper.sock) that only the daemon's user may open. Every
 * request is one typed message; files travel as descriptors, so the helper never opens a path that the daemon names.
 * A client is thread-safe (it keeps a few connections) and reconnects by itself after the helper was restarted. A
 * request that was in flight then is sent again (but for image builds), since all requests are idempotent; if that does
 * not help it fails with ERROR_UNAVAILABLE.
 */
#ifndef SPACE_HOST_CLIENT_H
#define SPACE_HOST_CLIENT_H

#include <sys/types.h>

#include "base/error.h"
#include "base/text.h"

struct host_client;

int host_client_new(const char *socket_path, struct host_client **ret, struct error *e);
void host_client_free(struct host_client *client);

/* Addresses inside every sandbox's network namespace; the same everywhere, so that a snapshot fits anywhere. */
#define HOST_GUEST_ADDRESS "169.254.77.2"
#define HOST_GATEWAY_ADDRESS "169.254.77.1"
#define HOST_NETWORK_PREFIX 30
#define HOST_GUEST_MAC "06:53:50:41:00:02"
#define HOST_GATEWAY_MAC "06:53:50:41:00:01"
#define HOST_AGENT_PORT 49983

#define HOST_ARGUMENTS_MAX 96
#define HOST_ARGUMENT_BYTES_MAX 32768 /* all arguments together */
#define HOST_SANDBOX_FDS_MAX 12
#define HOST_SANDBOXES_MAX 1024

struct host_sandbox_spec {
	const char *id;      /* sandbox id, prefix 'b' */
	const char *program; /* a name in the helper's own table of VMM programs: "qemu" */
	/* NULL-terminated, without argv[0]. The text "@TAP@" is replaced by the number of the tap's descriptor. */
	const char *const *arguments;
	const int *fds; /* become descriptors 3, 4, 5, … of the VMM in this order; the tap comes after the last */
	size_t fd_count;
	uint64_t memory_max_bytes; /* cgroup limit of the VMM, guest memory and overhead */
	unsigned cpu_percent;      /* 100 = one host CPU; 0 = no limit */
	unsigned pids_max;
	const char
	    *preload_environment; /* value for LD_PRELOAD: name of a library in the helper's table ("vmm-shim") or NULL */
};

struct host_sandbox_info {
	char id[ID_BYTES];
	pid_t pid;
	int pidfd; /* the caller's; readable once the VMM has ended; -1 if it has ended already */
	int alive;
	int exit_known;
	int exit_status; /* as by waitpid, if exit_known */
};

/* Makes network namespace, tap, cgroup and jail, and starts the VMM in them. On failure nothing is left behind.
 * ret_pidfd is the caller's to close. */
int host_sandbox_start(struct host_client *client, const struct host_sandbox_spec *spec, pid_t *ret_pid, int *ret_pidfd,
                       struct error *e);
/* Kills the VMM (SIGKILL, whatever its state), waits until it is gone, then removes namespace, cgroup and jail.
 * Succeeds if there is no such sandbox. Never returns success while a process of the sandbox lives. */
int host_sandbox_kill(struct host_client *client, const char *id, struct error *e);
/* All sandboxes the helper knows, ended ones included until they are killed. *ret is the caller's to free(), pidfds to
 * close. */
int host_sandbox_list(struct host_client *client, struct host_sandbox_info **ret, size_t *ret_count, struct error *e);
/* New unconnected TCP sockets (CLOEXEC, blocking) that live in the sandbox's namespace; at most 8 a call. */
int host_sandbox_sockets(struct host_client *client, const char *id, int *fds, size_t count, struct error *e);
/* What the VMM has written to its stderr so far (why it did not start): text of at most 16 KiB, free() it. Works after
 * the VMM has ended, until it is killed. */
int host_sandbox_output(struct host_client *client, const char *id, char **ret, struct error *e);
/*
 * Copies the pages of guest memory that differ from the base file: those of the VMM's private mapping of `base_fd`
 * (found by device and inode, `size` bytes long) that are anonymous, in RAM or swapped out.
 *
 * The bytes go to the same offsets of `pages_fd`, a memfd of `size` bytes; bit n of `bitmap_fd` (memfd of size/4096/8
 * bytes, rounded up, zeroed by the callee first) says that page n was copied. Meant to be called once while the guest
 * runs (this populates pages_fd, so that the second call only copies) and again while it is stopped.
 */
int host_memory_copy(struct host_client *client, const char *id, int base_fd, uint64_t size, int pages_fd,
                     int bitmap_fd, uint64_t *ret_pages, struct error *e);

struct host_image_spec {
	const char *const *packages; /* Debian package names, NULL-terminated; checked by the helper */
	uint64_t size_bytes;         /* size of the ext4 image */
	const char *suite;           /* "bookworm", "trixie"; NULL = the host's own */
	int agent_fd;                /* guest agent binary, becomes /sbin/space-agent of the image and init of the initrd */
	/* Outputs, opened for writing by the caller, empty. */
	int disk_fd;
	int kernel_fd;
	int initrd_fd;
};

/* Builds a root file system; takes tens of seconds. `progress` is called with one line of text a step, from the calling
 * thread. On failure the outputs' content is undefined and nothing else is left. */
int host_image_build(struct host_client *client, const struct host_image_spec *spec,
                     void (*progress)(void *context, const char *line), void *context, struct error *e);

struct host_storage_info {
	char data_dir[512];
	int reflink;      /* FICLONE works in the pool */
	int loop_mounted; /* the pool is an XFS image of ours */
	char filesystem[32];
};
/* What the helper found and prepared at its start (see storage.c). */
int host_storage(struct host_client *client, struct host_storage_info *ret, struct error *e);
/* What this host can do: fills a JSON-free list of lines "name\tok|warn|fail\ttext" for `space doctor`; free() it. */
int host_doctor(struct host_client *client, char **ret_lines, struct error *e);

#endif
