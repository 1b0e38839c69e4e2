/*
 * The pool: the folder DATA/pool in which templates and snapshots live, on a file system that can share extents.
 *
 * If the data folder's own file system can (XFS, btrfs), pool is a plain folder. If not, it is the mount point of an
 * XFS in the sparse file DATA/pool.xfs. If that is impossible as well, it is a plain folder and snapshots are sparse
 * copies (host_storage() and `space doctor` say so). The mount lives in the host's mount namespace and outlives every
 * process of ours, because VMMs that are still running have files open in it.
 */
#ifndef SPACE_HOST_STORAGE_H
#define SPACE_HOST_STORAGE_H

#include <sys/types.h>

#include "base/config.h"
#include "base/error.h"
#include "host/client.h"

#define STORAGE_IMAGE_NAME "pool.xfs"
/* What mkfs.xfs accepts at least, since xfsprogs 5.19. */
#define STORAGE_SIZE_BYTES_MIN (300 * MIB)

/* Creates, mounts or finds the pool; can be repeated at any time. uid and gid will own it. */
int storage_open(const struct config *config, uid_t uid, gid_t gid, struct host_storage_info *ret, struct error *e);
/* Unmounts the pool if it is ours and nobody uses it. */
void storage_close(const struct config *config);

#endif
