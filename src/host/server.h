/*
 * The helper's side of host/protocol.h.
 *
 * One thread for each connection, so a request that takes long (an image build) only keeps its own connection busy.
 * A peer must be the daemon's user or root. Each request is looked up in one table that holds its sizes and how many
 * descriptors it takes; what does not fit is refused before any of it is looked at.
 */
#ifndef SPACE_HOST_SERVER_H
#define SPACE_HOST_SERVER_H

#include "base/config.h"
#include "base/error.h"
#include "host/sandbox.h"

struct server {
	const struct config *config;
	struct sandbox_host *sandboxes;
	struct host_storage_info storage;
	uid_t user; /* who may ask, besides root */
	gid_t group;
};

/* Serves until SIGTERM or SIGINT, which the caller has blocked (with SIGCHLD) before any thread existed. */
int server_run(struct server *server, struct error *e);

#endif
