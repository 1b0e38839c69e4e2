/*
 * Writing one file as a whole.
 *
 * The bytes go to an unnamed file in the target's directory (O_TMPFILE; a hidden name where the file system has none of
 * those), which takes the target's place by rename(2) when all have come. Whoever reads the target sees the old content
 * or the new one; a cut upload or a full disk leaves the old one.
 *
 * An existing file keeps its mode, owner, ACL and attributes (but for our metadata, which each upload replaces). Where
 * a rename would change what the file is — another owner that the caller cannot set, further hard links, a bind-mounted
 * file, a directory without write permission, /proc and /sys — the bytes are collected in the same way and then copied
 * into the existing file. Only that last copy is not atomic.
 *
 * All calls need the caller's identity on the thread (guest_user_enter).
 */
#ifndef SPACE_GUEST_UPLOAD_H
#define SPACE_GUEST_UPLOAD_H

#include <sys/stat.h>

#include "base/error.h"
#include "guest/metadata.h"
#include "guest/path.h"

#define UPLOAD_BUFFER_BYTES 65536
/* From this size on, room is reserved before the body is read, so that a full disk is reported at once. */
#define UPLOAD_RESERVE_BYTES_MIN 65536
/* Hidden names exist for an instant before the rename; watch.c tells by them what the rename means. */
#define UPLOAD_NAME_NEW ".space-upload-new-"
#define UPLOAD_NAME_REPLACE ".space-upload-old-"
#define UPLOAD_MODE_DEFAULT 0644u
#define UPLOAD_MODE_KEEP (-1)

struct upload {
	struct path path;
	int directory; /* O_PATH */
	char name[PATH_NAME_BYTES];
	struct stat existing; /* st_mode 0: none */
	int fd;               /* where the bytes are collected */
	char hidden[64];      /* name of that file in the directory, "" if it has none */
	int is_in_place;
	int is_elsewhere; /* not in the directory: it can only be copied from */
	int mode;         /* asked for, or UPLOAD_MODE_KEEP */
	uint64_t size;
	size_t buffered;
	char buffer[UPLOAD_BUFFER_BYTES];
};

/* Makes missing parents (0755, the caller's) and starts. `expected` is the size if known, else -1. */
int upload_begin(struct upload *u, const struct path *path, int mode, int64_t expected, struct error *e);
int upload_write(struct upload *u, const void *data, size_t size, struct error *e);
/* Appends all that is left in an open file, inside the kernel where it can. */
int upload_append_file(struct upload *u, int fd, struct error *e);
/* Puts the file in its place. On failure the upload is as after upload_abort(). */
int upload_commit(struct upload *u, const struct metadata *metadata, struct error *e);
/* Leaves everything as it was (but for new parents). Harmless when nothing is open. */
void upload_abort(struct upload *u);

#endif
