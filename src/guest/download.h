/* Header values of downloads: ranges, encodings, names, types. Pure functions. */
#ifndef SPACE_GUEST_DOWNLOAD_H
#define SPACE_GUEST_DOWNLOAD_H

#include <sys/stat.h>

#include "base/buf.h"

#define DOWNLOAD_ETAG_BYTES 64
#define DOWNLOAD_DATE_BYTES 40

enum download_range {
	DOWNLOAD_WHOLE,         /* no range, one that is malformed, or several: all of the file is sent (RFC 9110, 14.2) */
	DOWNLOAD_PART,          /* from..to, both included */
	DOWNLOAD_UNSATISFIABLE, /* 416 */
};
enum download_range download_parse_range(const char *range, uint64_t size, uint64_t *ret_from, uint64_t *ret_to);

enum download_encoding { DOWNLOAD_IDENTITY, DOWNLOAD_GZIP, DOWNLOAD_NOT_ACCEPTABLE };
/* Of Accept-Encoding (NULL if absent). Compressing costs the guest more than the way to the host gains, so a client
 * gets gzip only if it names that alone, or refuses identity. */
enum download_encoding download_negotiate(const char *accept);
int download_identity_is_acceptable(const char *accept);

/* `inline; filename="…"`, with a filename* (RFC 5987, RFC 6266) next to it if the name is more than plain ASCII. */
int download_disposition(struct buf *b, const char *name);
/* Media type by the name's ending. */
const char *download_content_type(const char *name);

void download_etag(char to[DOWNLOAD_ETAG_BYTES], const struct stat *st);
/* IMF-fixdate. */
void download_date(char to[DOWNLOAD_DATE_BYTES], time_t time);
/* True if a list of entity tags ("*", "a", W/"b") holds this one, compared weakly or strongly. */
int download_etag_matches(const char *list, const char *etag, int is_strong);

#endif
