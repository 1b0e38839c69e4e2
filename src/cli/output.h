/*
 * What the user sees: results on stdout (text, or with --json one JSON document or one JSON line an event), messages on
 * stderr as "space: what failed: why" with a hint line that says what to do next. Colours only on a terminal and
 * without NO_COLOR.
 */
#ifndef SPACE_CLI_OUTPUT_H
#define SPACE_CLI_OUTPUT_H

#include <jansson.h>
#include <stdio.h>

#include "base/error.h"

/* Exit status of everything that is our failure and not the remote command's; see EXIT STATUS in space(1). */
#define OUTPUT_EXIT_FAILURE 125
#define OUTPUT_EXIT_TIMEOUT 124

enum output_color {
	OUTPUT_PLAIN,
	OUTPUT_BOLD,
	OUTPUT_DIM,
	OUTPUT_RED,
	OUTPUT_GREEN,
	OUTPUT_YELLOW,
	OUTPUT_BLUE,
};

struct output_settings {
	int json;
	int color_out;
	int color_err;
	int utf8;
	int terminal_out;
	int terminal_err;
};
extern struct output_settings output;

void output_setup(void);
/* Escape sequences, or "" when that stream has no colours. */
const char *output_color(FILE *stream, enum output_color color);
const char *output_color_end(FILE *stream);
enum output_color output_state_color(const char *state);

/* "space: WHAT: why" and the hint (may be NULL) on stderr; with --json {"error":{…}} there. Returns the exit status. */
int output_error(const struct error *e, const char *hint, const char *what, ...) PRINTF_LIKE(3, 4);
/* A remark on stderr. */
void output_note(const char *format, ...) PRINTF_LIKE(1, 2);
/* One JSON document: indented on a terminal. The reference stays the caller's. */
void output_json(const json_t *value);
/* One compact line, flushed, for streams. */
void output_json_line(const json_t *value);
/* Copies text that others chose (names, labels, commands) with control characters made visible, so that it cannot drive
 * the terminal. Returns `to`. */
const char *output_safe(char *to, size_t size, const char *text);
/* A member of an object as string, or `otherwise` if it is none, or empty. */
const char *output_text(const json_t *object, const char *key, const char *otherwise);
/* Flushes stdout; reports a full disk or closed pipe. Returns `status`, or OUTPUT_EXIT_FAILURE if that failed. */
int output_finish(int status);

/* "3 min ago" style age of an RFC 3339 time (or "-"). */
void output_age(char *to, size_t size, const char *rfc3339);
/* Milliseconds since 1970 of an RFC 3339 time in UTC, or 0. */
uint64_t output_parse_time(const char *rfc3339);

#endif
