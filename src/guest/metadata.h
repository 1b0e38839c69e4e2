/* What clients attach to files: "X-Metadata-KEY: value" headers, kept as extended attributes user.e2b.KEY. */
#ifndef SPACE_GUEST_METADATA_H
#define SPACE_GUEST_METADATA_H

#include "base/buf.h"
#include "base/error.h"
#include "guest/request.h"

#define METADATA_KEY_BYTES_MAX 246    /* an attribute's name has 255 bytes with the prefix */
#define METADATA_TOTAL_BYTES_MAX 4096 /* what ext4 can keep on one inode */
#define METADATA_COUNT_MAX 128

struct metadata_pair {
	const char *key; /* both point into the request's headers */
	const char *value;
};

struct metadata {
	size_t count;
	struct metadata_pair pairs[METADATA_COUNT_MAX];
};

/* Collects and checks the headers. ERROR_INVALID. */
int metadata_from_request(struct metadata *m, const struct request *r, struct error *e);
/* Makes the file's attributes those of m, removing others of our prefix. A file system without extended attributes is
 * no error. 0 or -errno. */
int metadata_write(int fd, const struct metadata *m);
/* Appends `,"metadata":{…}` if the file at `path` (not followed if a link) has any. 0 or -ENOMEM. */
int metadata_append_json(struct buf *b, const char *path);

#endif
