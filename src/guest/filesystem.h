/* What filesystem.c and watch_service.c share. */
#ifndef SPACE_GUEST_FILESYSTEM_H
#define SPACE_GUEST_FILESYSTEM_H

#include "guest/path.h"
#include "guest/request.h"

/* Resolves the path in `field` of a request, or the exact bytes in `fieldBytes` (base64). ERROR_INVALID. */
int filesystem_read_path(const json_t *body, const char *field, const struct guest_user *user, struct path *ret,
                         struct error *e);

int watch_service_stream(struct request *r);
int watch_service_create(struct request *r);
int watch_service_events(struct request *r);
int watch_service_remove(struct request *r);

#endif
