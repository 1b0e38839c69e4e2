/*
 * The pool: flat files on a reflink file system, one folder a template, snapshot or live sandbox.
 *
 *   POOL/templates/ID  POOL/snapshots/ID   memory disk state checksums manifest.json; never changed once in place
 *   POOL/sandboxes/ID                      memory, checksums (hard links to the base's), disk (its own clone)
 *   POOL/tmp/ID                            being written; removed at start
 *
 * A folder comes into being in tmp, is synced, and is renamed into place; only then is its row committed. So a folder
 * without a row is rubbish, and a row without a folder is damage.
 */
#ifndef SPACE_SESSION_POOL_H
#define SPACE_SESSION_POOL_H

#include "base/error.h"

enum pool_area { POOL_TEMPLATES, POOL_SNAPSHOTS, POOL_SANDBOXES, POOL_TMP, POOL_AREA_COUNT };

struct pool {
	int fds[POOL_AREA_COUNT];
	int reflink; /* the file system clones; without it files are copied sparsely */
	char path[512];
};

int pool_open(const char *data_dir, struct pool *ret, struct error *e);
void pool_close(struct pool *pool);
/* Makes an empty folder; returns its descriptor. */
int pool_make(struct pool *pool, enum pool_area area, const char *id, struct error *e);
int pool_folder(struct pool *pool, enum pool_area area, const char *id, struct error *e);
/* Syncs a folder in tmp and moves it into its area, durably. */
int pool_install(struct pool *pool, const char *id, enum pool_area area, struct error *e);
/* Succeeds if there is none. */
int pool_remove(struct pool *pool, enum pool_area area, const char *id);
/* The same for a folder of files anywhere. */
int pool_remove_flat(int parent_fd, const char *name);
/* Removes every folder for which keep() is false. */
int pool_sweep(struct pool *pool, enum pool_area area, int (*keep)(void *context, const char *id), void *context);
int pool_sweep_dir(int dir_fd, int (*keep)(void *context, const char *id), void *context);
/* Makes an empty `to` the same as `from`: a clone where that works, else a copy that keeps holes. */
int pool_clone(const struct pool *pool, int from, int to, struct error *e);
/* Opens or creates a file in a folder. */
int pool_create_file(int folder_fd, const char *name, struct error *e);
int pool_open_file(int folder_fd, const char *name, int flags, struct error *e);
/* Bytes that removing this folder's files would free: extents that no other file shares. */
uint64_t pool_exclusive_bytes(int folder_fd);
int pool_space(const struct pool *pool, uint64_t *ret_total, uint64_t *ret_free);

#endif
