/* Percent-encoding and query strings. */
#ifndef SPACE_API_URI_H
#define SPACE_API_URI_H

#include <jansson.h>

#include "base/error.h"

#define URI_QUERY_PARAMETERS_MAX 64

/* Decodes `size` bytes into `to` (NUL-terminated). -EINVAL for a bad escape or a NUL, -ENAMETOOLONG. */
int uri_decode(char *to, size_t capacity, const char *text, size_t size);
/* a=1&b=2 as an object of strings; a repeated name becomes an array of strings. NULL with an error. */
json_t *uri_query(const char *text, struct error *e);

#endif
