/*
 * Root file systems of templates: a Debian made by mmdebstrap, the guest agent as PID 1, a kernel taken out of Debian's
 * package, all as one raw ext4 image with kernel and initrd beside it.
 *
 * The same packages, agent and kernel give the same bytes: times, caches, logs and random identities are taken out
 * (see rootfs.c and ext4.c). Downloads go through the host's own apt configuration.
 *
 * Runs as root, blocks for tens of seconds to minutes, and starts programs: it belongs in a process of its own.
 */
#ifndef SPACE_IMAGE_IMAGE_H
#define SPACE_IMAGE_IMAGE_H

#include "base/error.h"

#define IMAGE_SIZE_DEFAULT (4 * GIB)
#define IMAGE_SIZE_MIN (1 * GIB)
#define IMAGE_SIZE_MAX (1024 * GIB)
#define IMAGE_PACKAGES_MAX 256
#define IMAGE_PACKAGE_NAME_BYTES 96

struct image_spec {
	/* Debian package names beyond the default ones, NULL-terminated; NULL = none. */
	const char *const *packages;
	uint64_t size_bytes; /* of the ext4 image, multiple of 1 MiB */
	const char *suite;   /* "bookworm", "trixie"; NULL or "" = the host's own */
	int agent_fd;        /* guest agent binary */
	int disk_fd;         /* outputs, open for reading and writing, empty */
	int kernel_fd;
	int initrd_fd;
	/* A folder for the build (a few GiB free) and, in `packages` of it, for downloaded packages; made if missing.
	 * Builds that ended without cleaning up are removed by the next one. */
	const char *work_dir;
};

/* What every image holds, NULL-terminated. */
extern const char *const image_default_packages[];

/* `progress` (may be NULL) gets one line a step; a negative return cancels the build (ERROR_CANCELED). On failure the
 * outputs' content is undefined, and the error carries the last words of the program that failed. */
int image_build(const struct image_spec *spec, int (*progress)(void *context, const char *line), void *context,
                struct error *e);

/* Debian policy 5.6.7. */
int image_package_name_is_valid(const char *name);

#endif
