#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include "base/config.h"
#include "base/fd.h"
#include "base/text.h"
#include "check.h"

static char folder[] = "/tmp/space-unit-XXXXXX";
static char path[64];

static void write_file(const char *content)
{
	CHECK_INT(fd_write_file_atomic(AT_FDCWD, path, content, strlen(content), 0600), 0);
}

/* Loads with --config PATH and the given further arguments. */
static int load(struct config *config, struct error *e, const char *first, const char *second, const char *third)
{
	char *argv[8] = {(char[]){"spaced"}, (char[]){"--config"}, path};
	int argc = 3;
	const char *more[] = {first, second, third};
	for (size_t i = 0; i < ARRAY_SIZE(more) && more[i]; i++)
		argv[argc++] = strdup(more[i]);
	char *owned[8];
	memcpy(owned, argv, sizeof(owned));
	int given = argc;
	int r = config_load(config, &argc, argv, e);
	CHECK(r < 0 || !argv[argc]);
	for (int i = 3; i < given; i++)
		free(owned[i]);
	return r < 0 ? r : argc;
}

static void test_later_source_wins(void)
{
	struct config config;
	struct error e = {0};
	write_file("# a comment\n\n  pool_size = 5  \nsessions_max=7\nlisten = 127.0.0.1:1\n");
	CHECK_INT(setenv("SPACE_POOL_SIZE", "6", 1), 0);
	CHECK_INT(load(&config, &e, "--listen=127.0.0.1:2", NULL, NULL), 1);
	CHECK_INT(config.pool_size, 6);
	CHECK_INT(config.sessions_max, 7);
	CHECK_STR(config.listen, "127.0.0.1:2");
	CHECK_STR(config.file, path);
	CHECK_STR(config.socket, "/run/space/space.sock");
	CHECK(text_ends_with(config.agent_path, "/space-agent"));
	CHECK_INT(load(&config, &e, "--pool-size", "9", NULL), 1);
	CHECK_INT(config.pool_size, 9);
	unsetenv("SPACE_POOL_SIZE");
	CHECK_INT(load(&config, &e, "--runtime-dir", "/run/other", "rest"), 2);
	CHECK_STR(config.socket, "/run/other/space.sock");
	CHECK_INT(load(&config, &e, "--", "--pool-size", "x"), 4); /* not looked at after -- */
}

static void check_refused(const char *content, const char *where)
{
	struct config config;
	struct error e = {0};
	write_file(content);
	CHECK(load(&config, &e, NULL, NULL, NULL) < 0);
	CHECK_INT(e.code, ERROR_INVALID);
	if (!strstr(e.message, where)) {
		fprintf(stderr, "\"%s\" does not name %s\n", e.message, where);
		exit(1);
	}
}

static void test_bad_files_name_the_line(void)
{
	check_refused("pool_size = 1\npool_size = 2\n", ":2");
	check_refused("\nno_such_key = 1\n", "no_such_key");
	check_refused("pool_size\n", ":1");
	check_refused("pool_size = many\n", "pool_size");
	check_refused("pool_size = 65\n", "64");
	check_refused("pool_size = -1\n", "pool_size");
	check_refused("data_dir = relative/path\n", "absolute");
	check_refused("data_dir = /a/../b\n", "data_dir");
	check_refused("data_dir =\n", "empty");
	check_refused("user = Root!\n", "user");
	check_refused("vmm_uid_base = 0\n", "vmm_uid_base");
	check_refused("snapshot_interval = 8d\n", "snapshot_interval");
}

static void test_units(void)
{
	struct config config;
	struct error e = {0};
	write_file("snapshot_interval = 5m\nsnapshot_budget = 3G\nstorage_size=512M\ndefault_timeout = 2h");
	CHECK_INT(load(&config, &e, NULL, NULL, NULL), 1);
	CHECK_INT(config.snapshot_interval_s, 300);
	CHECK(config.snapshot_budget_bytes == 3 * GIB);
	CHECK(config.storage_size_bytes == 512 * MIB);
	CHECK_INT(config.default_timeout_s, 7200);
}

static void test_missing_things(void)
{
	struct config config;
	struct error e = {0};
	write_file("");
	CHECK(load(&config, &e, "--pool-size", NULL, NULL) < 0);
	CHECK(strstr(e.message, "--pool-size") != NULL);
	CHECK(load(&config, &e, "--config", NULL, NULL) < 0);
	CHECK_INT(setenv("SPACE_LISTEN", "a b", 1), 0);
	CHECK(load(&config, &e, NULL, NULL, NULL) < 0);
	CHECK(strstr(e.message, "SPACE_LISTEN") != NULL);
	unsetenv("SPACE_LISTEN");
	unlink(path);
	CHECK_INT(load(&config, &e, NULL, NULL, NULL), -ENOENT); /* a file that was named has to exist */
}

static void test_export_is_what_a_child_reads(void)
{
	struct config config;
	struct config child;
	struct error e = {0};
	write_file("pool_size = 3\nsnapshot_budget = 3G\ninstance = mine\n");
	CHECK_INT(load(&config, &e, "--listen", "none", NULL), 1);
	CHECK_INT(config_export(&config, &e), 0);
	write_file("");
	CHECK_INT(load(&child, &e, NULL, NULL, NULL), 1);
	CHECK_INT(child.pool_size, 3);
	CHECK(child.snapshot_budget_bytes == 3 * GIB);
	CHECK_STR(child.instance, "mine");
	CHECK_STR(child.listen, "none");
	char helper[CONFIG_PATH_BYTES + 32];
	config_helper_socket(&child, helper, sizeof(helper));
	CHECK_STR(helper, "/run/space/helper.sock");
}

static void test_shipped_example_is_the_defaults(const char *source)
{
	/* Every line of the example that shows a key is legal once the # is taken away. */
	CLEANUP_FREE char *text = NULL;
	size_t size;
	CHECK_INT(fd_read_file(AT_FDCWD, source, 65536, &text, &size), 0);
	struct config config;
	struct config defaults;
	config_defaults(&config);
	config_defaults(&defaults);
	int keys = 0;
	char *save = NULL;
	for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
		char *equals = strstr(line, " = ");
		if (line[0] != '#' || line[1] == ' ' || !equals)
			continue;
		*equals = '\0';
		struct error e = {0};
		if (config_set(&config, line + 1, equals + 3, &e) < 0) {
			fprintf(stderr, "%s: %s\n", source, e.message);
			exit(1);
		}
		keys++;
	}
	CHECK(keys >= 15);
	CHECK_INT(config.pool_size, defaults.pool_size);
	CHECK_INT(config.snapshot_interval_s, defaults.snapshot_interval_s);
	CHECK_INT(config.vmm_uid_base, defaults.vmm_uid_base);
	CHECK_STR(config.data_dir, defaults.data_dir);
	CHECK_STR(config.listen, defaults.listen);
}

int main(int argc, char **argv)
{
	CHECK(mkdtemp(folder));
	snprintf(path, sizeof(path), "%s/space.conf", folder);
	test_later_source_wins();
	test_bad_files_name_the_line();
	test_units();
	test_missing_things();
	if (argc > 1)
		test_shipped_example_is_the_defaults(argv[1]);
	test_export_is_what_a_child_reads(); /* last: changes the environment */
	unlink(path);
	CHECK_INT(rmdir(folder), 0);
	return 0;
}
