/*
 * Command-line options, one table a verb. The same table drives parsing, `space help`, the nearest-name hint and bash
 * completion, so that none of them can disagree.
 */
#ifndef SPACE_CLI_OPTIONS_H
#define SPACE_CLI_OPTIONS_H

#include "base/error.h"

enum options_kind {
	OPTIONS_FLAG,     /* target: int */
	OPTIONS_STRING,   /* target: const char * */
	OPTIONS_LIST,     /* target: struct options_list */
	OPTIONS_COUNT,    /* target: struct options_number; plain decimal */
	OPTIONS_DURATION, /* target: struct options_number; seconds, or 5m, 2h, 7d */
	OPTIONS_SIZE,     /* target: struct options_number; bytes, or 512M, 4G */
};

#define OPTIONS_LIST_MAX 1024

struct options_list {
	const char **items; /* point into argv */
	size_t count;
};

struct options_number {
	uint64_t value;
	int is_set;
};

struct options_entry {
	char letter;      /* 0 = none */
	const char *name; /* long name without dashes; NULL ends a table */
	enum options_kind kind;
	void *target;
	const char *argument; /* its name in help; NULL for flags */
	const char *help;
	const char *choices; /* "suspend kill": the only values allowed; NULL = any */
};

struct options_result {
	const char **positional; /* points into argv's strings; the caller frees the array */
	size_t positional_count;
	char **rest; /* what follows the last positional or "--"; NULL-terminated part of argv */
	size_t rest_count;
	int has_rest;
};

/*
 * Parses argv[0…argc). Options and positionals may mix until `stop_after` positionals have been seen (SIZE_MAX =
 * never); from there, and after "--", all words belong to `rest` untouched. With stop_after SIZE_MAX "--" only ends
 * options. `tables` are searched in order and end with NULL.
 */
int options_parse(const struct options_entry *const *tables, size_t stop_after, int argc, char **argv,
                  struct options_result *ret, struct error *e);

/* The candidate nearest to `word` (edit distance at most a third of its length, at least 1), or NULL. */
const char *options_nearest(const char *word, const char *const *candidates, size_t count);

#endif
