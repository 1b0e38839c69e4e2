/* Runs image_build() as root in a process group of its own, in its own mount and pid namespace, so that whatever
 * happens nothing is left of it. */
#ifndef SPACE_HOST_BUILDER_H
#define SPACE_HOST_BUILDER_H

#include "base/config.h"
#include "base/error.h"
#include "host/client.h"
#include "host/sandbox.h"

/* `progress` returns a negative number if nobody listens any more; then the build is ended with ERROR_CANCELED. */
int builder_run(const struct config *config, struct sandbox_host *host, const struct host_image_spec *spec,
                int (*progress)(void *context, const char *line), int (*canceled)(void *context), void *context,
                struct error *e);

#endif
