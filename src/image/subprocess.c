#include "image/subprocess.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/text.h"

#define READ_BYTES 4096
/* How long to wait for programs in the background that hold the output open after the program itself has ended. */
#define LINGER_MS 1000
#define POLL_MS 200

struct running {
	const struct subprocess *p;
	pid_t pid;
	int out_fd; /* -1 once closed */
	int err_fd;
	char line[SUBPROCESS_LINE_BYTES];
	size_t line_size;
	char tail[SUBPROCESS_TAIL_LINES][SUBPROCESS_LINE_BYTES];
	size_t lines;
	int canceled;
	int overflow;
};

static void __attribute__((noreturn)) child(const struct subprocess *p, int out, int err, int fd)
{
	int null = open("/dev/null", O_RDONLY);
	sigset_t none;

	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	signal(SIGPIPE, SIG_DFL);
	setpgid(0, 0);
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	/* `fd` lies above the ones that are replaced. */
	if (null < 0 || dup2(null, 0) < 0 || dup2(out, 1) < 0 || dup2(err, 2) < 0 || (fd >= 0 && dup2(fd, 3) < 0) ||
	    chdir(p->directory ? p->directory : "/") < 0)
		_exit(126);
	closefrom(fd >= 0 ? 4 : 3);
	execvpe(p->argv[0], (char *const *)(uintptr_t)p->argv, (char *const *)(uintptr_t)p->environment);
	dprintf(2, "cannot start %s: %s\n", p->argv[0], strerror(errno));
	_exit(127);
}

static int start(struct running *r, struct error *e)
{
	const struct subprocess *p = r->p;
	CLEANUP_CLOSE int high = -1;
	int out[2] = {-1, -1}, err[2] = {-1, -1};

	if (p->inherit_fd >= 0 && (high = fcntl(p->inherit_fd, F_DUPFD_CLOEXEC, 10)) < 0)
		return error_set_errno(e, errno, "start %s", p->argv[0]);
	if (pipe2(err, O_CLOEXEC) < 0 || (p->output && pipe2(out, O_CLOEXEC) < 0)) {
		int failed = errno;

		if (err[0] >= 0) {
			close(err[0]);
			close(err[1]);
		}
		return error_set_errno(e, failed, "start %s", p->argv[0]);
	}
	r->pid = fork();
	if (r->pid == 0)
		child(p, p->output ? out[1] : err[1], err[1], high);
	close(err[1]);
	if (p->output)
		close(out[1]);
	r->err_fd = err[0];
	r->out_fd = out[0];
	return r->pid < 0 ? error_set_errno(e, errno, "start %s", p->argv[0]) : 0;
}

static void end_line(struct running *r)
{
	r->line[r->line_size] = '\0';
	r->line_size = 0;
	if (!*r->line)
		return;
	memcpy(r->tail[r->lines++ % SUBPROCESS_TAIL_LINES], r->line, SUBPROCESS_LINE_BYTES);
	if (r->p->on_line && r->p->on_line(r->p->context, r->line) < 0)
		r->canceled = 1;
}

static void take_text(struct running *r, const char *text, size_t size)
{
	for (size_t i = 0; i < size; i++) {
		if (text[i] == '\n' || text[i] == '\r')
			end_line(r);
		else if (r->line_size < sizeof(r->line) - 1)
			r->line[r->line_size++] = (unsigned char)text[i] < ' ' ? ' ' : text[i];
	}
}

/* Reads once; closes the descriptor at its end. */
static void take_from(struct running *r, int *fd)
{
	char data[READ_BYTES];
	ssize_t n = read(*fd, data, sizeof(data));

	if (n < 0 && (errno == EINTR || errno == EAGAIN))
		return;
	if (n <= 0) {
		close(*fd);
		*fd = -1;
		return;
	}
	if (fd == &r->err_fd)
		take_text(r, data, (size_t)n);
	else if (!r->overflow && buf_append(r->p->output, data, (size_t)n) < 0)
		r->overflow = 1;
}

static int failure(struct running *r, int status, int timed_out, struct error *e)
{
	const char *name = r->p->argv[0];
	size_t count = MIN(r->lines, (size_t)SUBPROCESS_TAIL_LINES);
	char words[ERROR_MESSAGE_BYTES / 2] = "";
	size_t used = 0;

	if (r->canceled)
		return error_set(e, ERROR_CANCELED, "canceled");
	/* The latest lines that fit, in order. */
	for (size_t i = count; i > 0; i--) {
		const char *line = r->tail[(r->lines - i) % SUBPROCESS_TAIL_LINES];
		size_t size = MIN(strlen(line), sizeof(words) / 2 - 8);

		while (used && used + size + 4 > sizeof(words)) {
			char *next = strstr(words, " | ");

			used = next ? used - (size_t)(next + 3 - words) : 0;
			memmove(words, next ? next + 3 : words, used);
		}
		used += (size_t)snprintf(words + used, sizeof(words) - used, "%s%.*s", used ? " | " : "", (int)size, line);
	}
	if (timed_out)
		return error_set(e, ERROR_TIMEOUT, "%s did not end within %u s; it said: %s", name, r->p->timeout_s, words);
	if (r->overflow)
		return error_set(e, ERROR_TOO_LARGE, "%s wrote more than %zu bytes", name, r->p->output->limit);
	if (WIFSIGNALED(status))
		return error_set(e, ERROR_INTERNAL, "%s was ended by signal %d; it said: %s", name, WTERMSIG(status), words);
	return error_set(e, ERROR_INTERNAL, "%s failed with status %d; it said: %s", name, WEXITSTATUS(status), words);
}

int subprocess_run(const struct subprocess *p, struct error *e)
{
	uint64_t deadline_ms = time_monotonic_ms() + (uint64_t)p->timeout_s * 1000;
	struct running r = {.p = p, .out_fd = -1, .err_fd = -1};
	int status = 0, ended = 0, timed_out = 0;
	int started = start(&r, e);

	while (started == 0 && (!ended || r.err_fd >= 0 || r.out_fd >= 0)) {
		struct pollfd poll_fds[2] = {{.fd = r.err_fd, .events = POLLIN}, {.fd = r.out_fd, .events = POLLIN}};
		uint64_t now = time_monotonic_ms();

		if (now >= deadline_ms) {
			timed_out = !ended;
			break;
		}
		if (r.canceled || r.overflow)
			break;
		(void)poll(poll_fds, 2, POLL_MS);
		if (poll_fds[0].revents)
			take_from(&r, &r.err_fd);
		if (poll_fds[1].revents)
			take_from(&r, &r.out_fd);
		if (!ended && waitpid(r.pid, &status, WNOHANG) == r.pid) {
			ended = 1;
			deadline_ms = MIN(deadline_ms, time_monotonic_ms() + LINGER_MS);
		}
	}
	if (started == 0) {
		kill(-r.pid, SIGKILL);
		if (!ended)
			(void)waitpid(r.pid, &status, 0);
		end_line(&r);
	}
	if (r.err_fd >= 0)
		close(r.err_fd);
	if (r.out_fd >= 0)
		close(r.out_fd);
	if (started < 0)
		return started;
	return status || timed_out || r.canceled || r.overflow ? failure(&r, status, timed_out, e) : 0;
}
