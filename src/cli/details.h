/* "key   value" lines of one JSON object, for info and inspect. */
#ifndef SPACE_CLI_DETAILS_H
#define SPACE_CLI_DETAILS_H

#include <jansson.h>

/* Members in the object's order, nested objects indented; names ending in _bytes and _at are shown for people. */
void details_print(const json_t *object);

#endif
