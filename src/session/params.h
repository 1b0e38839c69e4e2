/* Parameters of verbs: which there are, their limits, and how they go into a session's row. */
#ifndef SPACE_SESSION_PARAMS_H
#define SPACE_SESSION_PARAMS_H

#include <jansson.h>

#include "session/internal.h"

/* A name of a session, snapshot or template: letters, digits, '.', '_', '-', first one a letter or digit; and nothing
 * that looks like an id. */
int params_check_name(const char *name, const char *what, struct error *e);
/* "name" of `params` into `to` (unchanged if absent; "" if empty or null and `may_clear`). */
int params_read_name(const json_t *params, char to[STORE_NAME_BYTES], int may_clear, struct error *e);
/* labels, timeout_s, on_timeout, snapshot_interval_s, retention, wake_on_use; what is absent stays as it is. */
int params_read_policy(const json_t *params, struct store_session *row, struct error *e);
/* "environment": merged into the row's if `merge`, else in its place. */
int params_read_environment(const json_t *params, struct store_session *row, int merge, struct error *e);
/* True if `field` is there (be it null). */
int params_has(const json_t *params, const char *field);

#endif
