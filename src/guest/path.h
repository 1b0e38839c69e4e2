/*
 * Paths of file calls: from what a client wrote to an absolute text, and from that to descriptors.
 *
 * The caller's identity (guest_user_enter) is the only fence: a path may lead wherever that user may go. What path.c
 * adds is that magic links of /proc are never followed, because "self" there is the agent and its threads may look at
 * themselves whatever their file system identity is.
 */
#ifndef SPACE_GUEST_PATH_H
#define SPACE_GUEST_PATH_H

#include <sys/stat.h>
#include <sys/types.h>

#include "base/error.h"

#define PATH_BYTES_MAX 4096    /* with the NUL, as PATH_MAX */
#define PATH_NAME_BYTES 256    /* one component with the NUL */
#define PATH_LINKS_MAX 40      /* as the kernel's MAXSYMLINKS */
#define PATH_DISPLAY_BYTES 320 /* a path inside an error message */

struct path {
	char text[PATH_BYTES_MAX]; /* absolute; no empty or "." components, no trailing slash (but "/") */
	int wants_directory;       /* the client wrote a trailing slash */
};

/* Resolves what a client sent: "" is `workdir` (may be NULL) or the home, "~" and "~/x" are in `home`, relative paths
 * are too (".." in those is resolved in the text; in absolute ones by the kernel). Errors: ERROR_INVALID. */
int path_resolve(struct path *p, const char *asked, const char *home, const char *workdir, struct error *e);

/* Decodes %XX into `to` (a NUL is added). Length, -EINVAL for a bad escape or NUL byte, -ENAMETOOLONG. */
ssize_t path_percent_decode(char *to, size_t to_size, const char *text, size_t size);

/* Last component of an absolute path ("/" for the root itself). */
const char *path_name(const char *text);

/* The path for people and JSON: one line of valid UTF-8, at most PATH_DISPLAY_BYTES, cut in the middle. */
void path_display(char to[PATH_DISPLAY_BYTES], const char *text);

/* Sets "cannot WHAT 'PATH': REASON (ENAME)" with the code that belongs to the errno (ELOOP, EXDEV and ETXTBSY are
 * conflicts here, EEXIST is ERROR_EXISTS). Returns the error's negative errno. */
int path_fail(struct error *e, int errnum, const char *what, const char *text);

/* open() that follows ordinary links but no magic ones; `at` AT_FDCWD or a directory. Descriptor or -errno. */
int path_open_at(int at, const char *text, int flags);
/* Opens anew what an O_PATH descriptor stands for. Refuses (-EACCES) files of the agent's own /proc folder unless the
 * thread's identity is root's. */
int path_reopen(int fd, int flags);
/* True if the thread's file system identity is root's. */
int path_identity_is_root(void);
/* Walks to the directory `text` (absolute), creating what is missing with mode 0755. Descriptor (O_PATH) or a negative
 * errno with *e set. */
int path_make_directories(const char *text, struct error *e);
/* Finds where a path's last component really is: follows final links, also dangling ones. *ret_fd is an O_PATH
 * descriptor of the directory. *st has st_mode 0 if nothing is there yet. */
int path_open_target(const struct path *p, int *ret_fd, char name[PATH_NAME_BYTES], struct stat *st, struct error *e);
/* Splits off the last component: opens its directory without following the last component itself. */
int path_open_parent(const struct path *p, int *ret_fd, char name[PATH_NAME_BYTES], struct error *e);
/* Name of a file type ("directory", "FIFO", …) for messages. */
const char *path_type_name(mode_t mode);

#endif
