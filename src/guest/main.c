/*
 * space-agent: PID 1 of a guest. With --test it is an ordinary program that serves the same protocol on a loopback
 * port, adopts orphans of its children, and leaves the machine alone.
 */
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/log.h"
#include "base/text.h"
#include "guest/boot.h"
#include "guest/cgroup.h"
#include "guest/identity.h"
#include "guest/process.h"
#include "guest/server.h"

struct options {
	int test;
	uint16_t port;
	const char *control;
	const char *cgroup;
	const char *user;
	char control_text[IDENTITY_TOKEN_BYTES_MAX + 1];
};

static void usage(void)
{
	fputs("usage: space-agent [--version]\n"
	      "       space-agent --test [--port N] [--control TOKEN] [--cgroup DIR] [--user NAME] [--debug]\n"
	      "Without options it must be PID 1 of a guest.\n",
	      stderr);
}

static int read_options(int argc, char **argv, struct options *o)
{
	for (int i = 1; i < argc; i++) {
		const char *value = i + 1 < argc ? argv[i + 1] : NULL;
		uint64_t port;
		if (strcmp(argv[i], "--test") == 0) {
			o->test = 1;
		} else if (strcmp(argv[i], "--debug") == 0) {
			log_set_level("debug");
		} else if (value && strcmp(argv[i], "--port") == 0 && text_parse_u64(value, 65535, &port) == 0) {
			o->port = (uint16_t)port;
			i++;
		} else if (value && strcmp(argv[i], "--control") == 0) {
			o->control = value;
			i++;
		} else if (value && strcmp(argv[i], "--cgroup") == 0) {
			o->cgroup = value;
			i++;
		} else if (value && strcmp(argv[i], "--user") == 0) {
			o->user = value;
			i++;
		} else {
			return -EINVAL;
		}
	}
	return 0;
}

/* All signals are blocked in all threads: SIGCHLD is read from a descriptor, SIGPIPE becomes EPIPE, and what others
 * send to PID 1 does nothing. Dispositions are the default ones, so that children need not reset any; the system call
 * itself, since the C library keeps 32 and 33 to itself and whoever started the agent may ignore those too. */
static void set_signals(void)
{
	sigset_t all;
	/* As the kernel lays it out (sigaction(2), "C library/kernel differences"); all zero is SIG_DFL everywhere. */
	static const uint64_t standard[4];
	for (int i = 1; i < NSIG; i++)
		syscall(SYS_rt_sigaction, i, standard, NULL, sizeof(uint64_t));
	sigfillset(&all);
	sigdelset(&all, SIGSEGV);
	sigdelset(&all, SIGBUS);
	sigdelset(&all, SIGABRT);
	sigprocmask(SIG_SETMASK, &all, NULL);
}

/* Descriptors 0 to 2 are always taken, so that no pipe of a child ever gets such a number. */
static void set_standard_files(int quiet)
{
	for (int fd = 0; fd < 3; fd++) {
		if (fcntl(fd, F_GETFD) >= 0 && !quiet)
			continue;
		int null = open("/dev/null", O_RDWR | O_CLOEXEC);
		if (null >= 0 && null != fd) {
			dup2(null, fd);
			close(null);
		}
	}
}

static int is_debug(void)
{
	char text[8];
	return boot_option("space.debug", text, sizeof(text)) == 0 && strcmp(text, "1") == 0;
}

static void begin_guest(struct options *o)
{
	boot_machine();
	if (boot_option("space.control", o->control_text, sizeof(o->control_text)) == 0)
		o->control = o->control_text;
	log_set_level(is_debug() ? "debug" : "error");
	o->cgroup = "/sys/fs/cgroup";
	o->port = AGENT_PORT;
}

/* The image's name gets its entry in /etc/hosts: programs look themselves up. */
static void name_machine(void)
{
	char name[65] = "";
	struct error e;
	if (gethostname(name, sizeof(name) - 1) < 0 || identity_set_hostname(name, &e) < 0)
		log_warning("agent", "cannot tell the machine's name");
}

static int run(struct options *o, struct error *e)
{
	struct server_options serve = {.port = o->port, .address = o->test ? "127.0.0.1" : NULL, .trust_local = o->test};
	int r = cgroup_begin(o->cgroup, !o->test, e);
	if (r < 0) {
		if (o->test)
			return r;
		log_error("agent", "%s", e->message);
	}
	identity_begin(o->control, !o->test);
	if (!o->test)
		name_machine();
	if (o->user)
		identity_set_defaults(o->user, NULL, e);
	r = process_begin(e);
	if (r == 0)
		r = server_begin(&serve, e);
	if (r < 0)
		return r;
	/* What is in memory stays there: under pressure the agent must not wait for its own pages. */
	if (!o->test && mlockall(MCL_CURRENT | MCL_FUTURE | MCL_ONFAULT) < 0)
		log_warning("agent", "cannot lock memory: %s", strerror(errno));
	if (o->test) {
		printf("listening on port %u\n", server_port());
		fflush(stdout);
	}
	return 0;
}

int main(int argc, char **argv)
{
	struct options o = {.test = 0};
	struct error e;
	if (argc == 2 && strcmp(argv[1], "--version") == 0) {
		printf("space-agent %s\n", SPACE_VERSION);
		return 0;
	}
	if (boot_is_initrd()) {
		boot_initrd(&e);
		log_error("boot", "%s", e.message);
		return 1;
	}
	if (getpid() != 1 && (read_options(argc, argv, &o) < 0 || !o.test)) {
		usage();
		return 2;
	}
	set_signals();
	set_standard_files(0);
	umask(022);
	/* One heap: threads of clients come and go, and each would leave its own behind. */
	mallopt(M_ARENA_MAX, 1);
	if (getpid() == 1)
		begin_guest(&o);
	else if (prctl(PR_SET_CHILD_SUBREAPER, 1) < 0)
		log_warning("agent", "cannot adopt orphans: %s", strerror(errno));
	if (run(&o, &e) < 0) {
		log_error("agent", "%s", e.message);
		return 1;
	}
	for (;;)
		pause();
}
