/* Turns a local file or folder into a tar archive, piece by piece. */
#ifndef SPACE_CLI_TAR_PACK_H
#define SPACE_CLI_TAR_PACK_H

#include <sys/types.h>

#include "base/error.h"

struct tar_pack;

/* `path` becomes `name` in the archive. Symbolic links are packed as such, but `path` itself is followed. */
int tar_pack_new(const char *path, const char *name, struct tar_pack **ret, struct error *e);
void tar_pack_free(struct tar_pack *pack);
/* Bytes of all regular files, counted when the object was made. */
uint64_t tar_pack_total(const struct tar_pack *pack);
int tar_pack_is_directory(const struct tar_pack *pack);
/* Up to `size` bytes of archive; 0 at its end, -errno when the archive cannot go on (tar_pack_problem() says why). */
ssize_t tar_pack_read(struct tar_pack *pack, void *data, size_t size);
/* Bytes of file content given out so far. */
uint64_t tar_pack_done(const struct tar_pack *pack);
/* Files that were left out or cut, 0 = all is well; *ret (if not NULL) gets the first reason. */
size_t tar_pack_problems(const struct tar_pack *pack, const char **ret);
size_t tar_pack_entries(const struct tar_pack *pack);

#endif
