/*
 * What a VMM sees of the host: a read-only root with /usr, a few device nodes and nothing else; no privilege; its own
 * user id.
 *
 * The root is built once when the helper starts, in a mount namespace that no process lives in and that only a
 * descriptor keeps; a VMM enters it with one setns(). Nothing in it can be written, so sharing it shares nothing.
 */
#ifndef SPACE_HOST_JAIL_H
#define SPACE_HOST_JAIL_H

#include <sys/types.h>

#include "base/config.h"
#include "base/error.h"

/* Where the library of the preload table lies in the jail. */
#define JAIL_SHIM_PATH "/space/libspace-vmm-shim.so"

struct jail {
	int mount_namespace; /* -1 before jail_open() */
	int has_shim;        /* the library lay beside the helper */
	int has_kvm;
};

/* The helper must run single-threaded still. */
int jail_open(struct jail *jail, const struct config *config, struct error *e);
void jail_close(struct jail *jail);
/* Whether the processor offers vmx or svm, without which /dev/kvm cannot run an ordinary kernel. */
int jail_cpu_has_virtualization(void);

/* The two steps of a new process between clone and exec; system calls only. -errno, *ret_step names what failed. */
int jail_enter(const struct jail *jail, const char **ret_step);
int jail_drop_privileges(uid_t uid, const char **ret_step);

#endif
