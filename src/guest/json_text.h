/*
 * JSON of requests, with limits in front of the library.
 *
 * Input to processes arrives as one very long base64 string inside a small object. Reading such a string character by
 * character is most of what it costs on a translated guest, so long plain strings are cut out before the library sees
 * the text, and put into the tree afterwards.
 */
#ifndef SPACE_GUEST_JSON_TEXT_H
#define SPACE_GUEST_JSON_TEXT_H

#include <jansson.h>

#include "base/error.h"

/* Strings from this length on are taken around the parser, at most so many in one text. */
#define JSON_TEXT_LONG_BYTES 2048
#define JSON_TEXT_LONG_MAX 8

/* Parses one object, nested at most AGENT_JSON_DEPTH_MAX deep; an empty text gives {}. Duplicate keys are refused. */
int json_text_parse(const char *text, size_t size, json_t **ret, struct error *e);

#endif
