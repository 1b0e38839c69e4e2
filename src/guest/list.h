/*
 * Directory listings, streamed: entries are written to the client while the tree is read, so that 100,000 of them need
 * no more memory than their names. Order: each entry before what is in it, names sorted (in a directory with more than
 * LIST_BATCH_BYTES of names they are sorted within batches of that size).
 */
#ifndef SPACE_GUEST_LIST_H
#define SPACE_GUEST_LIST_H

#include "guest/path.h"
#include "guest/request.h"

#define LIST_DEPTH_MAX 256
#define LIST_BATCH_BYTES ((size_t)4 * MIB)
#define LIST_NAMES_BYTES_MAX ((size_t)64 * MIB) /* of all directories that are open at once */

/* Answers a ListDir call, with a failure too. `directory` is opened for reading. Links are not followed; entries that
 * vanish are left out, and so is what is in directories that the caller cannot read. 0 or -errno if the answer broke
 * off. */
int list_reply(struct request *r, int directory, const struct path *path, unsigned depth);

#endif
