/*
 * Signals of the CLI go through one thread, so that verbs can react with network calls instead of handlers.
 *
 * signals_start() blocks INT, TERM, HUP, QUIT and WINCH for all threads made later and starts the thread. Without a
 * handler a first signal is kept for signals_pending() and a second one ends the program at once.
 */
#ifndef SPACE_CLI_SIGNALS_H
#define SPACE_CLI_SIGNALS_H

/* Called on the signal thread. */
typedef void (*signals_handler)(void *context, int signal);

void signals_start(void);
/* NULL takes the handler away; returns only when no call of the former one is running. A signal that was kept is
 * delivered to the new handler first. */
void signals_set_handler(signals_handler handler, void *context);
/* The ending signal that arrived while no handler was set, or 0. */
int signals_pending(void);
/* "INT", "SIGINT" or "2" to its number; -EINVAL. */
int signals_from_name(const char *name);
/* "SIGINT"; "signal N" parts are the caller's for numbers without a name (NULL). */
const char *signals_name(int signal);

#endif
