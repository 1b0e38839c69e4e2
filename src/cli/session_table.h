/* The table of sessions that ls and top show. */
#ifndef SPACE_CLI_SESSION_TABLE_H
#define SPACE_CLI_SESSION_TABLE_H

#include <jansson.h>

#include "cli/api.h"
#include "cli/table.h"

/* All pages of GET /v1/sessions with this query ("state=running&label=a=b", already escaped, or ""): a new array. */
int session_table_fetch(struct api *api, const char *query, json_t **ret, struct error *e);
struct table *session_table_make(const json_t *sessions);

#endif
