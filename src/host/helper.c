/* space-helper: the only part of SPACE that keeps root's privileges. Started by the supervisor, configured by the
 * environment it exports. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/config.h"
#include "base/log.h"
#include "host/builder.h"
#include "host/sandbox.h"
#include "host/server.h"
#include "host/storage.h"

/* Three descriptors for each sandbox, and some. */
static void raise_open_files(void)
{
	struct rlimit limit;
	if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
		limit.rlim_cur = limit.rlim_max;
		setrlimit(RLIMIT_NOFILE, &limit);
	}
}

/* Before any thread exists: all threads are to have these blocked, signalfd reads them. */
static void prepare_signals(void)
{
	sigset_t mask;
	sigemptyset(&mask);
	sigaddset(&mask, SIGCHLD);
	sigaddset(&mask, SIGTERM);
	sigaddset(&mask, SIGINT);
	sigprocmask(SIG_BLOCK, &mask, NULL);
	signal(SIGPIPE, SIG_IGN);
}

static int run(const struct config *config, struct error *e)
{
	struct server server = {.config = config};
	int r = config_identity(config, &server.user, &server.group, e);
	if (r == 0)
		r = storage_open(config, server.user, server.group, &server.storage, e);
	if (r == 0)
		builder_prepare(config);
	if (r == 0)
		r = sandbox_host_open(&server.sandboxes, config, e);
	if (r == 0)
		r = server_run(&server, e);
	if (server.sandboxes && sandbox_count(server.sandboxes) == 0)
		storage_close(config);
	/* Threads may still serve requests; the end of the process ends them, and the next start cleans up behind them. */
	return r;
}

int main(int argc, char **argv)
{
	struct config config;
	struct error e;
	if (argc > 1 && strcmp(argv[1], BUILDER_OPTION) == 0)
		return builder_main(argc, argv);
	if (config_load(&config, &argc, argv, &e) < 0) {
		fprintf(stderr, "space-helper: %s\n", e.message);
		return 2;
	}
	if (argc > 1) {
		fprintf(stderr, "space-helper: unknown argument \"%s\"\n", argv[1]);
		return 2;
	}
	if (geteuid() != 0) {
		fprintf(stderr, "space-helper: must be started by root (spaced does it)\n");
		return 2;
	}
	log_set_level(config.log_level);
	prepare_signals();
	raise_open_files();
	if (run(&config, &e) < 0) {
		log_error("helper", "%s", e.message);
		return 1;
	}
	return 0;
}
