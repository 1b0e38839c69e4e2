#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <termios.h>
#include <unistd.h>

#include "base/macros.h"
#include "guest/process.h"

#define PTY_COLUMNS_DEFAULT 80
#define PTY_ROWS_DEFAULT 24
#define PTY_SIDE_MAX 65535
#define PTY_TTY_GROUP 5 /* Debian's group tty */

int pty_resize(int master, unsigned columns, unsigned rows)
{
	struct winsize size = {.ws_col = (unsigned short)MIN(columns ? columns : PTY_COLUMNS_DEFAULT, PTY_SIDE_MAX),
	                       .ws_row = (unsigned short)MIN(rows ? rows : PTY_ROWS_DEFAULT, PTY_SIDE_MAX)};
	/* The kernel sends SIGWINCH to the foreground group if the size changed. */
	return ioctl(master, TIOCSWINSZ, &size) < 0 ? -errno : 0;
}

int pty_open(const struct guest_user *user, unsigned columns, unsigned rows, int *ret_master, int *ret_slave,
             struct error *e)
{
	CLEANUP_CLOSE int master = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
	int unlock = 0;
	if (master < 0)
		return error_set_errno(e, errno, "cannot open a terminal");
	if (ioctl(master, TIOCSPTLCK, &unlock) < 0)
		return error_set_errno(e, errno, "cannot unlock a terminal");
	/* The peer is opened through the master: no path of the guest is trusted. */
	CLEANUP_CLOSE int slave = ioctl(master, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
	if (slave < 0)
		return error_set_errno(e, errno, "cannot open the terminal's other side");
	struct termios mode;
	if (tcgetattr(slave, &mode) == 0) {
		mode.c_iflag |= IUTF8;
		tcsetattr(slave, TCSANOW, &mode);
	}
	int r = pty_resize(master, columns, rows);
	if (r < 0)
		return error_set_errno(e, r, "cannot set the terminal's size");
	/* Programs open /dev/pts/N by name as the user. */
	if (geteuid() == 0 && (fchown(slave, user->uid, PTY_TTY_GROUP) < 0 || fchmod(slave, 0620) < 0))
		return error_set_errno(e, errno, "cannot give the terminal to user '%s'", user->name);
	*ret_master = TAKE_FD(master);
	*ret_slave = TAKE_FD(slave);
	return 0;
}
