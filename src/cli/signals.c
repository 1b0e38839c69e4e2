#include "cli/signals.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "base/macros.h"
#include "base/text.h"
#include "cli/terminal.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static signals_handler current;
static void *current_context;
static int kept;
static sigset_t watched;

static void deliver(int number)
{
	pthread_mutex_lock(&lock);
	if (current) {
		current(current_context, number);
	} else if (number != SIGWINCH) {
		if (kept) {
			terminal_restore();
			_exit(128 + number);
		}
		kept = number;
	}
	pthread_mutex_unlock(&lock);
}

static void *watch(void *context)
{
	for (;;) {
		int number;
		if (sigwait(&watched, &number) == 0)
			deliver(number);
	}
	return context;
}

void signals_start(void)
{
	pthread_t thread;
	sigemptyset(&watched);
	sigaddset(&watched, SIGINT);
	sigaddset(&watched, SIGTERM);
	/* nohup means it. INT and QUIT are watched even so: a shell ignores them for any job in the background. */
	struct sigaction former;
	if (sigaction(SIGHUP, NULL, &former) < 0 || former.sa_handler != SIG_IGN)
		sigaddset(&watched, SIGHUP);
	sigaddset(&watched, SIGQUIT);
	sigaddset(&watched, SIGWINCH);
	pthread_sigmask(SIG_BLOCK, &watched, NULL);
	if (pthread_create(&thread, NULL, watch, NULL) != 0) {
		pthread_sigmask(SIG_UNBLOCK, &watched, NULL);
		return;
	}
	pthread_detach(thread);
}

void signals_set_handler(signals_handler handler, void *context)
{
	pthread_mutex_lock(&lock);
	current = handler;
	current_context = context;
	if (handler && kept) {
		handler(context, kept);
		kept = 0;
	}
	pthread_mutex_unlock(&lock);
}

int signals_pending(void)
{
	pthread_mutex_lock(&lock);
	int number = kept;
	pthread_mutex_unlock(&lock);
	return number;
}

static const struct {
	int number;
	const char *name;
} names[] = {
    {SIGHUP, "SIGHUP"},   {SIGINT, "SIGINT"},     {SIGQUIT, "SIGQUIT"}, {SIGILL, "SIGILL"},   {SIGTRAP, "SIGTRAP"},
    {SIGABRT, "SIGABRT"}, {SIGBUS, "SIGBUS"},     {SIGFPE, "SIGFPE"},   {SIGKILL, "SIGKILL"}, {SIGUSR1, "SIGUSR1"},
    {SIGSEGV, "SIGSEGV"}, {SIGUSR2, "SIGUSR2"},   {SIGPIPE, "SIGPIPE"}, {SIGALRM, "SIGALRM"}, {SIGTERM, "SIGTERM"},
    {SIGCHLD, "SIGCHLD"}, {SIGCONT, "SIGCONT"},   {SIGSTOP, "SIGSTOP"}, {SIGTSTP, "SIGTSTP"}, {SIGTTIN, "SIGTTIN"},
    {SIGTTOU, "SIGTTOU"}, {SIGURG, "SIGURG"},     {SIGXCPU, "SIGXCPU"}, {SIGXFSZ, "SIGXFSZ"}, {SIGVTALRM, "SIGVTALRM"},
    {SIGPROF, "SIGPROF"}, {SIGWINCH, "SIGWINCH"}, {SIGIO, "SIGIO"},     {SIGPWR, "SIGPWR"},   {SIGSYS, "SIGSYS"},
};

int signals_from_name(const char *name)
{
	uint64_t number;
	if (text_parse_u64(name, 64, &number) == 0)
		return number ? (int)number : -EINVAL;
	for (size_t i = 0; i < ARRAY_SIZE(names); i++)
		if (strcasecmp(name, names[i].name) == 0 || strcasecmp(name, names[i].name + 3) == 0)
			return names[i].number;
	return -EINVAL;
}

const char *signals_name(int signal)
{
	for (size_t i = 0; i < ARRAY_SIZE(names); i++)
		if (names[i].number == signal)
			return names[i].name;
	return NULL;
}
