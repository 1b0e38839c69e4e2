/* What the steps of a build share. */
#ifndef SPACE_IMAGE_BUILD_H
#define SPACE_IMAGE_BUILD_H

#include "base/buf.h"
#include "image/image.h"
#include "image/subprocess.h"

#define IMAGE_PATH_BYTES 512
/*
 * The time of everything that has no time of its own. Not 0: some programs take that as "unset".
 */
#define IMAGE_EPOCH 1700000000
#define IMAGE_EPOCH_TEXT "1700000000"
#define IMAGE_ENVIRONMENT_MAX 24

struct image_build {
	const struct image_spec *spec;
	int (*progress)(void *context, const char *line);
	void *context;
	int64_t started_s;              /* files younger than this were made by the build, not by a package */
	char cache[IMAGE_PATH_BYTES];   /* downloaded packages */
	char dir[IMAGE_PATH_BYTES];     /* this build's own folder */
	int dir_lock;                   /* held while it lives */
	char root[IMAGE_PATH_BYTES];    /* the root file system */
	char kernel[IMAGE_PATH_BYTES];  /* the unpacked kernel package */
	char modules[IMAGE_PATH_BYTES]; /* its folder of modules, …/lib/modules/RELEASE */
	char release[128];              /* kernel release */
	const char *environment[IMAGE_ENVIRONMENT_MAX + 1];
	size_t environment_count;
};

/* Tells the user; ERROR_CANCELED if nobody wants the image any more. */
int build_say(struct image_build *b, struct error *e, const char *format, ...) PRINTF_LIKE(3, 4);
/* A program with the build's environment. `output` may be NULL. */
int build_run(struct image_build *b, const char *const *argv, const char *directory, unsigned timeout_s,
              struct buf *output, struct error *e);
int build_path(char *to, size_t size, struct error *e, const char *format, ...) PRINTF_LIKE(4, 5);
/* Removes a tree; a missing one is fine. */
int build_remove_tree(const char *path);
/* Copies a regular file's bytes from the start of `from` to the start of `to`, skipping holes. */
int build_copy(int from, int to, struct error *e);

/* rootfs.c: makes b->root. */
int rootfs_make(struct image_build *b, struct error *e);
/* rootfs.c: takes out of b->root what differs from build to build. */
int rootfs_settle(struct image_build *b, struct error *e);
/* kernel.c: fetches and unpacks the kernel, writes spec->kernel_fd, puts modules into b->root. */
int kernel_fetch(struct image_build *b, struct error *e);
int kernel_install(struct image_build *b, struct error *e);
/* initrd.c: writes spec->initrd_fd. */
int initrd_write(struct image_build *b, struct error *e);
/* ext4.c: writes spec->disk_fd from b->root. */
int ext4_write(struct image_build *b, struct error *e);

#endif
