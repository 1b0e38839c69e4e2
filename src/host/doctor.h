/* What this host can do, for `space doctor`: lines "name\tok|warn|fail\ttext". */
#ifndef SPACE_HOST_DOCTOR_H
#define SPACE_HOST_DOCTOR_H

#include "base/buf.h"
#include "base/config.h"
#include "host/sandbox.h"

int doctor_report(const struct config *config, struct sandbox_host *sandboxes, const struct host_storage_info *storage,
                  struct buf *ret);

#endif
