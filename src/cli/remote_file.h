/* The guest's files as cp sees them: what is at a path, and copies in both directions. */
#ifndef SPACE_CLI_REMOTE_FILE_H
#define SPACE_CLI_REMOTE_FILE_H

#include <limits.h>

#include "cli/api.h"

struct remote_place {
	const char *session;
	const char *user; /* NULL = default */
	const char *path; /* as typed */
};

struct remote_stat {
	int exists;
	int is_directory;
	int is_file;
	char path[PATH_MAX]; /* absolute, with a link at its end resolved */
	uint64_t size;
};

/* What was copied. */
struct remote_summary {
	uint64_t bytes;
	size_t entries;
	size_t skipped;
	int interrupted;   /* our user ended it with this signal, 0 = no */
	char problem[512]; /* first thing that was left out or cut; "" = none */
};

/* A missing file is no error: ret->exists is 0. */
int remote_file_stat(struct api *api, const struct remote_place *place, struct remote_stat *ret, struct error *e);
/* Makes a directory with its parents. */
int remote_file_make_directory(struct api *api, const struct remote_place *place, struct error *e);

/* Local file or folder into the guest's directory `parent` as `name`. */
int remote_file_upload(struct api *api, const struct remote_place *place, const char *parent, const char *local,
                       const char *name, int progress, struct remote_summary *ret, struct error *e);
/* The guest's PARENT/BASE below the local directory as `name`. */
int remote_file_download(struct api *api, const struct remote_place *place, const char *parent, const char *base,
                         int directory, const char *name, uint64_t total, int progress, struct remote_summary *ret,
                         struct error *e);
/* Bytes of one file: stdin into it, or it to stdout. */
int remote_file_put_stdin(struct api *api, const struct remote_place *place, struct remote_summary *ret,
                          struct error *e);
int remote_file_get_stdout(struct api *api, const struct remote_place *place, struct remote_summary *ret,
                           struct error *e);

#endif
