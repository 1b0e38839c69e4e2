/*
 * The parent of the daemon: `spaced` when root starts it.
 *
 * Runs two children, the root helper and the worker (`spaced --worker`, the configured user, no privileges), and starts
 * each anew when it ends. Children die with the supervisor, VMMs do not; the next start takes them over. Nothing that
 * can be lost is kept here, so that kill -9 of any of the three is recovered from.
 *
 * SIGTERM or SIGINT: ends the worker, then the helper, and leaves sandboxes running. A second one ends both at once.
 */
#ifndef SPACE_HOST_SUPERVISOR_H
#define SPACE_HOST_SUPERVISOR_H

#include "base/config.h"

/* Returns the exit status of the program. Must be called by root, before any thread exists. */
int supervisor_main(const struct config *config);

#endif
