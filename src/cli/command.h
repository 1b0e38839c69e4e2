/* A remote command with this program's own stdin, stdout and stderr: what exec, run, shell and attach share. */
#ifndef SPACE_CLI_COMMAND_H
#define SPACE_CLI_COMMAND_H

#include "cli/exec_stream.h"
#include "cli/verb.h"

struct command_options {
	struct options_list environment;
	const char *user;
	const char *directory;
	struct options_number timeout;
	int interactive; /* forward stdin even if it is a terminal */
	int no_stdin;
	int tty;
	int detach;
	int escape; /* "~." at the start of a line hangs up */
};

/* Entries for a verb's option table. */
#define COMMAND_OPTIONS(o)                                                                                             \
	{'e', "env", OPTIONS_LIST, &(o).environment, "K=V", "set a variable; K alone passes on the value here", NULL},     \
	    {'u', "user", OPTIONS_STRING, &(o).user, "NAME", "run as this user of the guest", NULL},                       \
	{                                                                                                                  \
		'w', "workdir", OPTIONS_STRING, &(o).directory, "DIR", "start in this directory", NULL                         \
	}

/* Runs or (argv NULL) attaches, prints what failed, returns this program's exit status. */
int command_run(const struct verb_call *call, const char *session, const char *const *argv,
                const struct command_options *options, uint64_t pid, const uint64_t *offset);

#endif
