/*
 * Writes what a tar archive from a guest holds below one local directory, and never anywhere else.
 *
 * Names are resolved with openat2() (RESOLVE_BENEATH, no symbolic links), so neither "..", absolute names nor links
 * that the archive itself made lead out. Files appear whole, by rename. Set-user-id, set-group-id and sticky bits,
 * owners and devices are not taken over.
 */
#ifndef SPACE_CLI_TAR_EXTRACT_H
#define SPACE_CLI_TAR_EXTRACT_H

#include "base/error.h"
#include "cli/tar.h"

#define TAR_EXTRACT_DIRECTORIES_MAX 1000000

struct tar_extract;

/* The first component of every name in the archive must be `from` and becomes `to`. `directory` stays the caller's. */
int tar_extract_new(int directory, const char *from, const char *to, struct tar_extract **ret, struct error *e);
/* Removes a half-written file. */
void tar_extract_free(struct tar_extract *extract);
int tar_extract_feed(struct tar_extract *extract, const void *data, size_t size, struct error *e);
/* Sets modes and times of directories; an error if the archive was cut. */
int tar_extract_finish(struct tar_extract *extract, struct error *e);
uint64_t tar_extract_done(const struct tar_extract *extract); /* bytes of file content */
size_t tar_extract_entries(const struct tar_extract *extract);
size_t tar_extract_skipped(const struct tar_extract *extract); /* devices, FIFOs */

#endif
