/*
 * Watching a directory, or a whole tree, by inotify.
 *
 * inotify watches single directories. For a tree every directory gets a watch of its own; when one appears it is first
 * watched and then read, and what is in it is reported as created, because it may have come before the watch. An entry
 * seen both by that reading and in the events that were queued at the time is reported once. A directory that is moved
 * away loses its watches; one that is moved in is treated like a new one.
 *
 * What can be missed: everything between a queue overflow and the re-reading that follows it (reported as an overflow),
 * changes inside directories that the caller may not read, and names whose path is longer than PATH_MAX.
 */
#ifndef SPACE_GUEST_WATCH_H
#define SPACE_GUEST_WATCH_H

#include "base/error.h"
#include "guest/path.h"

#define WATCH_DIRECTORIES_MAX 65536 /* of one watch; the kernel's fs.inotify.max_user_watches may be lower */
#define WATCH_SYNTHETIC_MAX 16384   /* names remembered for not being reported twice */
#define WATCH_READ_BYTES 65536

enum watch_kind {
	WATCH_CREATE,
	WATCH_WRITE,
	WATCH_REMOVE,
	WATCH_RENAME, /* the old name; the new one follows as WATCH_CREATE */
	WATCH_CHMOD,
	WATCH_OVERFLOW, /* events were lost; name is "." */
};

/* Gets each event with its path relative to the root ("." for the root itself). Non-zero ends watch_process() and is
 * handed through. */
typedef int (*watch_emit)(void *context, enum watch_kind kind, const char *name);

struct watch;

/* Starts to watch the directory open as `root` (O_PATH), which is found again by `path` later on. The thread needs the
 * caller's identity here and in watch_process(). ERROR_EXHAUSTED if the kernel's limits are reached. */
int watch_open(int root, const char *path, int is_recursive, struct watch **ret, struct error *e);
/* Readable when there is something to process. */
int watch_fd(const struct watch *w);
/* For callbacks of watch_process(): the root, for looking at entries, or -errno. */
int watch_root(struct watch *w);
/* Reports what is queued; does not wait. 0, 1 when the root is gone and nothing more will come, or emit's value. */
int watch_process(struct watch *w, watch_emit emit, void *context);
void watch_close(struct watch *w);

#endif
