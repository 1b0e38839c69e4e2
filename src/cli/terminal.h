/* The user's terminal: size, raw mode, and that it is always given back as it was. */
#ifndef SPACE_CLI_TERMINAL_H
#define SPACE_CLI_TERMINAL_H

#include "base/error.h"

/* Columns and rows of stdout, stderr or stdin, whichever is a terminal; 80 × 24 if none is. */
void terminal_size(unsigned *ret_columns, unsigned *ret_rows);
/* Puts stdin's terminal into raw mode. It is restored at exit, by terminal_restore(), and on fatal signals. */
int terminal_raw(struct error *e);
/* Async-signal-safe, idempotent. */
void terminal_restore(void);

#endif
