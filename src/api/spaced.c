/* spaced: the daemon. Started by root it is the supervisor (host/supervisor.h); with --worker, or started by anybody
 * else, it serves. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "api/worker.h"
#include "base/log.h"
#include "host/supervisor.h"

static int usage(FILE *to, int status)
{
	struct buf keys = {0};
	fputs("usage: spaced [--KEY VALUE]...\n\n"
	      "Serves sessions to the local socket and to TCP. As root it starts the helper and the worker and watches "
	      "them;\n"
	      "the worker alone is `spaced --worker`. Every key can also stand in the configuration file as `key = value` "
	      "and in\n"
	      "the environment as SPACE_KEY.\n\n"
	      "  --config FILE   configuration file (default " CONFIG_DEFAULT_FILE ", if it exists)\n"
	      "  --version       print the version\n",
	      to);
	if (config_describe(&keys) == 0 && keys.data)
		fputs(keys.data, to);
	buf_free(&keys);
	return status;
}

int main(int argc, char **argv)
{
	struct config config;
	struct error e;
	if (config_load(&config, &argc, argv, &e) < 0) {
		fprintf(stderr, "spaced: %s\n", e.message);
		return 2;
	}
	int worker = 0;
	for (int i = 1; i < argc; i++) {
		if (!strcmp(argv[i], "--worker")) {
			worker = 1;
		} else if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h")) {
			return usage(stdout, 0);
		} else if (!strcmp(argv[i], "--version")) {
			puts("spaced " SPACE_VERSION);
			return 0;
		} else {
			fprintf(stderr, "spaced: unknown argument \"%s\"\n\n", argv[i]);
			return usage(stderr, 2);
		}
	}
	if (log_set_level(config.log_level) < 0) {
		fprintf(stderr, "spaced: log_level \"%s\" is none of error, warning, info, debug\n", config.log_level);
		return 2;
	}
	return geteuid() == 0 && !worker ? supervisor_main(&config) : worker_main(&config);
}
