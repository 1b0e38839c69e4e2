/*
 * Building images, which takes minutes and runs other people's programs as root: in a process of its own (this program
 * started again with BUILDER_OPTION), in its own mount and pid namespace, so that the end of that process, or of the
 * helper, ends all of it and leaves no mount.
 */
#ifndef SPACE_HOST_BUILDER_H
#define SPACE_HOST_BUILDER_H

#include "base/config.h"
#include "base/error.h"
#include "host/client.h"

#define BUILDER_OPTION "--build-image"

/* `progress` returns a negative number if nobody listens any more; that, or `canceled`, ends the build with
 * ERROR_CANCELED. Blocks. */
int builder_run(const struct config *config, const struct host_image_spec *spec,
                int (*progress)(void *context, const char *line), int (*canceled)(void *context), void *context,
                struct error *e);
/* At the helper's start: makes the folders, removes what builds of an earlier helper left. */
void builder_prepare(const struct config *config);
/* The program's main with BUILDER_OPTION as first argument. */
int builder_main(int argc, char **argv);

#endif
