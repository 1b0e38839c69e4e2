/*
 * A client of QEMU's control protocol (QMP): JSON objects, one a line, over a unix socket.
 *
 * Blocking calls with deadlines. Events are noted as they pass (why the guest ended, whether it runs) and otherwise
 * dropped. The VMM at the other end may have been taken over by its guest, so everything it says is bounded in size and
 * time and only used for that one sandbox.
 */
#ifndef SPACE_VMM_QMP_H
#define SPACE_VMM_QMP_H

#include <jansson.h>
#include <pthread.h>
#include <stdatomic.h>

#include "base/buf.h"
#include "base/error.h"
#include "vmm/vmm.h"

#define QMP_MESSAGE_BYTES_MAX ((size_t)(512 * KIB))
#define QMP_EVENTS_MAX 4096 /* between a command and its answer */
#define QMP_VERSION_BYTES 32

struct qmp {
	int fd;
	struct buf in;
	pthread_mutex_t lock; /* held for the length of a command; guards fd and in */
	uint64_t next_id;
	_Atomic int exit; /* enum vmm_exit as told by events */
	char version[QMP_VERSION_BYTES];
};

void qmp_init(struct qmp *qmp);
void qmp_close(struct qmp *qmp);

/* A listening socket at runtime_dir/name (of any length); an older one is replaced. The descriptor or -errno. */
int qmp_listen(const char *runtime_dir, const char *name, struct error *e);
/* Connects to such a socket, waits for the greeting and leaves negotiation mode. Fails at once when `pidfd` (>= 0)
 * ends. */
int qmp_connect(struct qmp *qmp, const char *runtime_dir, const char *name, int pidfd, int timeout_ms, struct error *e);
/* The same over a connected socket, which the qmp owns from now on, also on failure. */
int qmp_attach(struct qmp *qmp, int fd, int pidfd, int timeout_ms, struct error *e);

/* Runs a command. `arguments` may be NULL and is consumed; `pass_fd` (-1: none) travels along and is not closed.
 * ret_value may be NULL; else the caller owns the answer's "return" value. */
int qmp_command(struct qmp *qmp, const char *name, json_t *arguments, int pass_fd, int timeout_ms, json_t **ret_value,
                struct error *e);
/* Takes in what has arrived without waiting, unless a command is under way (which does so itself). */
void qmp_drain(struct qmp *qmp);

#endif
