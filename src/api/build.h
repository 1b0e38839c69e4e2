/* The answer to POST /v1/templates: lines of progress while a template is built, then its outcome. */
#ifndef SPACE_API_BUILD_H
#define SPACE_API_BUILD_H

#include "api/call.h"

/* Progress that a slow client has not taken; older lines are dropped and counted. */
#define BUILD_PENDING_BYTES_MAX (256 * 1024)

/* `finish` of the route: starts the build and takes over the stream. */
void build_begin(struct api_call *call);

#endif
