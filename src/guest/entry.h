/*
 * EntryInfo: one file as the protocol describes it, written as JSON text.
 *
 * Names on Linux are bytes, JSON strings are Unicode. A name that is valid UTF-8 goes out unchanged (no normalisation).
 * In any other each bad byte shows as U+FFFD, and `nameBytes` / `pathBytes` (base64) carry the exact bytes; calls
 * accept `pathBytes` (`sourceBytes`, `destinationBytes`) in place of the text.
 *
 * A link has the type and mode of what it leads to, as clients expect; one that leads nowhere is FILE_TYPE_SYMLINK.
 * `symlinkTarget` is the resolved path, or the link's own text if it cannot be resolved.
 */
#ifndef SPACE_GUEST_ENTRY_H
#define SPACE_GUEST_ENTRY_H

#include <sys/stat.h>

#include "base/buf.h"
#include "base/error.h"

#define ENTRY_NAMES_CACHED 32
#define ENTRY_PERMISSIONS_BYTES 24

/* Names of users and groups seen during one call. Zero-initialise. */
struct entry_names {
	struct entry_name {
		unsigned id;
		char name[64];
	} users[ENTRY_NAMES_CACHED], groups[ENTRY_NAMES_CACHED];
	size_t user_count, group_count;
};

/* Appends a JSON string with its quotes. 0 or -errno of buf_append(). */
int entry_append_string(struct buf *b, const char *text, size_t size);
/* Appends `"KEY":"…"` and, if the text is not UTF-8, `,"KEYBytes":"base64"`. */
int entry_append_bytes(struct buf *b, const char *key, const char *text);
/* Appends the object for `name` in directory `at` (not followed). `path` is what is reported. -errno of lstat, -ENOMEM.
 */
int entry_append(struct buf *b, int at, const char *name, const char *path, struct entry_names *names);
/* "-rw-r--r--", "drwxr-xr-x", "Lrwxrwxrwx", "dtrwxrwxrwx", … */
void entry_permissions(char to[ENTRY_PERMISSIONS_BYTES], mode_t mode);

#endif
