/* The unprivileged daemon: session manager, listeners and loop. */
#ifndef SPACE_API_WORKER_H
#define SPACE_API_WORKER_H

#include "base/config.h"

/* Runs until SIGTERM or SIGINT; returns the exit status. */
int worker_main(const struct config *config);

#endif
