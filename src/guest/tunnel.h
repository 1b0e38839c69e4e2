/* GET /space/v1/tunnel: a byte pipe to a TCP port of this guest. */
#ifndef SPACE_GUEST_TUNNEL_H
#define SPACE_GUEST_TUNNEL_H

#include "guest/request.h"

#define TUNNEL_CONNECT_MS 5000
#define TUNNEL_BUFFER_BYTES 65536

int tunnel_serve(struct request *r);

#endif
