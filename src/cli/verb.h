/*
 * One verb of the program: what it is called, what it takes, what help says about it, what runs it. The table of all of
 * them is in verbs.c; each verb's file defines one (or, with sub-verbs, a few) of these.
 */
#ifndef SPACE_CLI_VERB_H
#define SPACE_CLI_VERB_H

#include "cli/api.h"
#include "cli/options.h"
#include "cli/output.h"

#define VERB_UNLIMITED SIZE_MAX

struct verb;

struct verb_call {
	const struct verb *verb;
	struct api *api;
	const char *const *args;
	size_t arg_count;
	const char *const *rest; /* NULL-terminated words of a remote command; NULL if none were given */
	size_t rest_count;
};

enum verb_group { VERB_SESSIONS, VERB_COMMANDS, VERB_TIMELINE, VERB_SUPPLIES, VERB_HOST, VERB_GROUP_COUNT };

struct verb {
	const char *name; /* "ls", or "template ls" */
	enum verb_group group;
	const char *summary;     /* one line, lower case, no full stop */
	const char *arguments;   /* after the name in the usage line */
	const char *description; /* whole sentences, lines of at most 78 columns; may be NULL */
	const char *examples;    /* lines; may be NULL */
	const struct options_entry *options;
	size_t args_min;
	size_t args_max;
	int takes_command; /* words after args_max positionals are a remote command */
	int is_hidden;
	int is_raw; /* gets all words after its name unparsed, in rest */
	int (*run)(struct verb_call *call);
};

extern const struct verb *const verb_table[]; /* ends with NULL */

const struct verb *verb_find(const char *name);
/* Nearest verb's name for a mistyped word, or NULL. */
const char *verb_nearest(const char *word);

/* output_error() with the hint that api_hint() has for it; returns the exit status. */
int verb_fail(const struct verb_call *call, const struct error *e, const char *kind, const char *what, ...)
    PRINTF_LIKE(4, 5);
/* POST /v1/sessions/ID/ACTION; `body` is stolen and may be NULL. */
int verb_session_post(const struct verb_call *call, const char *session, const char *action, json_t *body, json_t **ret,
                      struct error *e);
/* DELETE PREFIX + each argument from `first` on; `kind` as for api_hint(). With `missing_ok` one that is not there is
 * passed over. Returns the exit status. */
int verb_remove(const struct verb_call *call, size_t first, const char *prefix, const char *kind, int missing_ok);
/* "K=V" items to an object. */
int verb_pairs(const struct options_list *list, const char *option, json_t **ret, struct error *e);
/* Writes the usage text of a verb. */
void verb_print_help(const struct verb *verb, FILE *to);
/* Options that every verb takes. */
extern const struct options_entry verb_global_options[];

#endif
