/*
 * JSON from clients and guests: bounded in bytes and depth, duplicate keys refused, and field readers whose errors name
 * the field. Readers return 1 if the field is there, 0 if it is absent (or null; *ret is then untouched), -errno with
 * ERROR_INVALID if it has the wrong type or range.
 */
#ifndef SPACE_HTTP_JSON_H
#define SPACE_HTTP_JSON_H

#include <jansson.h>

#include "base/error.h"

#define JSON_DEPTH_MAX 32

/* Parses one JSON value; errors name line and column. An empty text is an error. */
int json_read(const char *data, size_t size, size_t size_max, json_t **ret, struct error *e);
/* The same, and it must be an object. An empty text (or only blanks) gives {}. */
int json_read_object(const char *data, size_t size, size_t size_max, json_t **ret, struct error *e);

/* Refuses fields of `object` that are not in the NULL-terminated list. */
int json_check_fields(const json_t *object, const char *const *allowed, struct error *e);

/* *ret points into the object. `bytes_max` is the greatest length allowed. */
int json_read_string(const json_t *object, const char *field, size_t bytes_max, const char **ret, struct error *e);
int json_read_u64(const json_t *object, const char *field, uint64_t min, uint64_t max, uint64_t *ret, struct error *e);
int json_read_bool(const json_t *object, const char *field, int *ret, struct error *e);
/* *ret is borrowed from the object. */
int json_read_object_field(const json_t *object, const char *field, size_t entries_max, json_t **ret, struct error *e);
int json_read_array(const json_t *object, const char *field, size_t entries_max, json_t **ret, struct error *e);
/* An array of strings, each non-empty and at most bytes_max long. */
int json_read_string_array(const json_t *object, const char *field, size_t entries_max, size_t bytes_max, json_t **ret,
                           struct error *e);
/* An object whose values are strings of at most bytes_max bytes. */
int json_read_string_map(const json_t *object, const char *field, size_t entries_max, size_t bytes_max, json_t **ret,
                         struct error *e);

#endif
