/*
 * What has changed between two clones of one disk image.
 *
 * On a reflink file system two files that map a range to the same physical blocks hold the same bytes there: blocks
 * that are shared are never written in place. So the changed ranges are found by comparing the extent maps, without
 * reading any data. Where extents cannot be had every range that holds data counts as changed.
 */
#ifndef SPACE_SESSION_DISK_FILE_H
#define SPACE_SESSION_DISK_FILE_H

#include "base/error.h"

/* Calls `changed` for ranges [start, end) of `fd` that may differ from `previous_fd` (-1 = compare with nothing), in
 * rising order. Ranges that have become holes are told as well. */
int disk_file_changes(int previous_fd, int fd, int reflink, int (*changed)(void *context, uint64_t start, uint64_t end),
                      void *context, struct error *e);

#endif
