#include "cli/terminal.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

static struct termios former;
static volatile sig_atomic_t is_raw;

void terminal_size(unsigned *ret_columns, unsigned *ret_rows)
{
	static const int candidates[] = {STDOUT_FILENO, STDERR_FILENO, STDIN_FILENO};
	*ret_columns = 80;
	*ret_rows = 24;
	for (size_t i = 0; i < ARRAY_SIZE(candidates); i++) {
		struct winsize size;
		if (ioctl(candidates[i], TIOCGWINSZ, &size) == 0 && size.ws_col && size.ws_row) {
			*ret_columns = size.ws_col;
			*ret_rows = size.ws_row;
			return;
		}
	}
}

void terminal_restore(void)
{
	if (!is_raw)
		return;
	is_raw = 0;
	tcsetattr(STDIN_FILENO, TCSADRAIN, &former);
}

static void on_fatal(int number)
{
	terminal_restore();
	signal(number, SIG_DFL);
	raise(number);
}

int terminal_raw(struct error *e)
{
	static int registered;
	if (tcgetattr(STDIN_FILENO, &former) < 0)
		return error_set_errno(e, errno, "reading the terminal's mode");
	struct termios raw = former;
	cfmakeraw(&raw);
	if (!registered) {
		static const int fatal[] = {SIGSEGV, SIGBUS, SIGABRT, SIGFPE, SIGILL};
		for (size_t i = 0; i < ARRAY_SIZE(fatal); i++)
			signal(fatal[i], on_fatal);
		atexit(terminal_restore);
		registered = 1;
	}
	is_raw = 1;
	if (tcsetattr(STDIN_FILENO, TCSADRAIN, &raw) < 0) {
		is_raw = 0;
		return error_set_errno(e, errno, "switching the terminal to raw mode");
	}
	return 0;
}
