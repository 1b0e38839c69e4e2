/* docs/openapi.yaml as it was when the program was built; made by embed.py. */
#ifndef SPACE_API_OPENAPI_H
#define SPACE_API_OPENAPI_H

#include <stddef.h>

extern const char openapi_text[];
extern const size_t openapi_text_size;

#endif
