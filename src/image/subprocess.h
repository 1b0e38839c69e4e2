/* Runs a program to its end: bounded in time, its output passed on line by line and its last words kept. */
#ifndef SPACE_IMAGE_SUBPROCESS_H
#define SPACE_IMAGE_SUBPROCESS_H

#include "base/buf.h"
#include "base/error.h"

#define SUBPROCESS_LINE_BYTES 1024
#define SUBPROCESS_TAIL_LINES 6

struct subprocess {
	const char *const *argv;        /* argv[0] is looked up in PATH */
	const char *const *environment; /* NULL-terminated */
	const char *directory;          /* working directory, NULL = / */
	int inherit_fd;                 /* becomes descriptor 3; -1 = none */
	unsigned timeout_s;
	struct buf *output; /* takes stdout (set its limit); NULL: stdout is treated like stderr */
	/* Called for each line of stderr; may be NULL. A negative return ends the program with ERROR_CANCELED. */
	int (*on_line)(void *context, const char *line);
	void *context;
};

/* 0 if it exited with 0. Otherwise the error names the program and carries the last lines it wrote. */
int subprocess_run(const struct subprocess *p, struct error *e);

#endif
