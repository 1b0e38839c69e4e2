#include "base/config.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <pwd.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/text.h"

#define CONFIG_FILE_BYTES_MAX (64 * KIB)
#define CONFIG_ENVIRONMENT_PREFIX "SPACE_"
/* uids of VMMs stay clear of system users, of ordinary users and of the top of the 32-bit range. */
#define CONFIG_UID_MIN 10000
#define CONFIG_UID_MAX UINT64_C(4000000000)

enum key_kind {
	KEY_PATH,  /* absolute */
	KEY_TEXT,  /* printable, no space */
	KEY_NAME,  /* [a-z_][a-z0-9_-]* */
	KEY_COUNT, /* decimal */
	KEY_SIZE,
	KEY_DURATION
};

struct key {
	const char *name;
	enum key_kind kind;
	size_t offset;
	size_t size; /* of a text field */
	uint64_t min;
	uint64_t max;
	const char *value; /* default; NULL = worked out at the end of loading */
	const char *help;
};

#define TEXT_KEY(key_name, field, key_kind, key_default, key_help)                                                     \
	{                                                                                                                  \
		.name = key_name, .kind = key_kind, .offset = offsetof(struct config, field),                                  \
		.size = sizeof(((struct config *)NULL)->field), .value = key_default, .help = key_help                         \
	}
#define NUMBER_KEY(key_name, field, key_kind, low, high, key_default, key_help)                                        \
	{                                                                                                                  \
		.name = key_name, .kind = key_kind, .offset = offsetof(struct config, field), .min = low, .max = high,         \
		.value = key_default, .help = key_help                                                                         \
	}

static const struct key keys[] = {
    TEXT_KEY("data_dir", data_dir, KEY_PATH, "/var/lib/space", "database, templates and snapshots"),
    TEXT_KEY("runtime_dir", runtime_dir, KEY_PATH, "/run/space", "sockets and records of running sandboxes"),
    TEXT_KEY("socket", socket, KEY_PATH, NULL, "local API socket (default RUNTIME_DIR/space.sock)"),
    TEXT_KEY("listen", listen, KEY_TEXT, "127.0.0.1:7700", "ADDRESS:PORT of the API, or none"),
    TEXT_KEY("domain", domain, KEY_TEXT, "localhost", "PORT-ID.DOMAIN leads to a port of a guest"),
    TEXT_KEY("user", user, KEY_NAME, "space", "user of the daemon"),
    TEXT_KEY("group", group, KEY_NAME, "space", "group that may use the local socket"),
    TEXT_KEY("instance", instance, KEY_NAME, "space", "cgroup name, to run several daemons on one host"),
    TEXT_KEY("log_level", log_level, KEY_NAME, "info", "error, warning, info or debug"),
    TEXT_KEY("agent_path", agent_path, KEY_PATH, NULL, "guest agent (default: beside this program)"),
    TEXT_KEY("helper_path", helper_path, KEY_PATH, NULL, "root helper (default: beside this program)"),
    TEXT_KEY("qemu_path", qemu_path, KEY_PATH, "/usr/bin/qemu-system-x86_64", "QEMU"),
    NUMBER_KEY("vmm_uid_base", vmm_uid_base, KEY_COUNT, CONFIG_UID_MIN, CONFIG_UID_MAX, "200000",
               "first of the 1024 user ids that sandboxes run as"),
    NUMBER_KEY("pool_size", pool_size, KEY_COUNT, 0, 64, "2", "warm sandboxes kept ready"),
    NUMBER_KEY("spares", spares, KEY_COUNT, 0, 64, "2", "VMMs kept started up for restores"),
    NUMBER_KEY("sessions_max", sessions_max, KEY_COUNT, 1, 1000000, "10000", "sessions in all states"),
    NUMBER_KEY("sandboxes_max", sandboxes_max, KEY_COUNT, 1, CONFIG_SANDBOXES_MAX, "100", "sandboxes at one time"),
    NUMBER_KEY("snapshot_interval", snapshot_interval_s, KEY_DURATION, 0, 7 * 86400, "60",
               "time between rolling snapshots, 0 for none"),
    NUMBER_KEY("snapshot_budget", snapshot_budget_bytes, KEY_SIZE, 0, UINT64_MAX, "0",
               "bytes that snapshots may take, 0 for 80 % of the file system"),
    NUMBER_KEY("default_timeout", default_timeout_s, KEY_DURATION, 0, 365 * 86400, "0",
               "timeout of sessions that name none, 0 for no timeout"),
    NUMBER_KEY("storage_size", storage_size_bytes, KEY_SIZE, 0, UINT64_C(1) << 50, "0",
               "size of the pool's own file system, 0 for 80 % of the free space"),
};

static const struct key *find_key(const char *name)
{
	for (size_t i = 0; i < ARRAY_SIZE(keys); i++)
		if (strcmp(keys[i].name, name) == 0)
			return &keys[i];
	return NULL;
}

static char *text_field(struct config *config, const struct key *key)
{
	return (char *)config + key->offset;
}

static int check_text(const struct key *key, const char *value, struct error *e)
{
	size_t length = strlen(value);
	if (length == 0)
		return error_set(e, ERROR_INVALID, "%s must not be empty", key->name);
	if (length >= key->size)
		return error_set(e, ERROR_INVALID, "%s is longer than %zu bytes", key->name, key->size - 1);
	for (const unsigned char *p = (const unsigned char *)value; *p; p++)
		if (*p <= ' ' || *p == 127)
			return error_set(e, ERROR_INVALID, "%s contains a space or control character", key->name);
	if (key->kind == KEY_PATH && (value[0] != '/' || strstr(value, "/../") || text_ends_with(value, "/..")))
		return error_set(e, ERROR_INVALID, "%s must be an absolute path without \"..\", not \"%s\"", key->name, value);
	if (key->kind == KEY_NAME)
		for (const char *p = value; *p; p++)
			if (!islower((unsigned char)*p) && *p != '_' && (p == value || (!isdigit((unsigned char)*p) && *p != '-')))
				return error_set(e, ERROR_INVALID, "%s \"%s\" may hold only a-z, 0-9, _ and - and starts with a letter",
				                 key->name, value);
	return 0;
}

static int parse_number(const struct key *key, const char *value, uint64_t *ret, struct error *e)
{
	int r;
	const char *form;
	switch (key->kind) {
	case KEY_SIZE:
		r = text_parse_size(value, ret);
		form = "a size such as 512M";
		break;
	case KEY_DURATION:
		r = text_parse_duration(value, ret);
		form = "a time such as 90, 5m or 2h";
		break;
	default:
		r = text_parse_u64(value, UINT64_MAX, ret);
		form = "a whole number";
		break;
	}
	if (r < 0)
		return error_set(e, ERROR_INVALID, "%s must be %s, not \"%s\"", key->name, form, value);
	if (*ret < key->min || *ret > key->max)
		return error_set(e, ERROR_INVALID, "%s must be between %llu and %llu, not %s", key->name,
		                 (unsigned long long)key->min, (unsigned long long)key->max, value);
	return 0;
}

int config_set(struct config *config, const char *name, const char *value, struct error *e)
{
	const struct key *key = find_key(name);
	if (!key)
		return error_set(e, ERROR_INVALID, "unknown key \"%s\"", name);
	int r;
	if (key->size) {
		r = check_text(key, value, e);
		if (r == 0)
			text_copy(text_field(config, key), key->size, value);
	} else {
		uint64_t number;
		r = parse_number(key, value, &number, e);
		if (r == 0)
			*(uint64_t *)(void *)((char *)config + key->offset) = number;
	}
	return r;
}

void config_defaults(struct config *config)
{
	*config = (struct config){0};
	for (size_t i = 0; i < ARRAY_SIZE(keys); i++)
		if (keys[i].value)
			config_set(config, keys[i].name, keys[i].value, NULL);
}

static char *trim(char *text)
{
	while (isspace((unsigned char)*text))
		text++;
	size_t length = strlen(text);
	while (length && isspace((unsigned char)text[length - 1]))
		text[--length] = '\0';
	return text;
}

static int load_line(struct config *config, char *line, unsigned number, unsigned *seen, struct error *e)
{
	char *text = trim(line);
	if (!*text || *text == '#')
		return 0;
	char *equals = strchr(text, '=');
	int r;
	if (!equals) {
		r = error_set(e, ERROR_INVALID, "not of the form key = value");
	} else {
		*equals = '\0';
		const char *name = trim(text);
		const struct key *key = find_key(name);
		if (key && seen[key - keys])
			r = error_set(e, ERROR_INVALID, "%s was set before, in line %u", name, seen[key - keys]);
		else
			r = config_set(config, name, trim(equals + 1), e);
		if (r == 0)
			seen[key - keys] = number;
	}
	return r < 0 ? error_prefix(e, "%s:%u", config->file, number) : 0;
}

static int load_file(struct config *config, const char *path, int must_exist, struct error *e)
{
	CLEANUP_FREE char *data = NULL;
	size_t size;
	unsigned seen[ARRAY_SIZE(keys)] = {0};
	int r = fd_read_file(AT_FDCWD, path, CONFIG_FILE_BYTES_MAX, &data, &size);
	if (r == -ENOENT && !must_exist)
		return 0;
	if (r < 0)
		return error_set_errno(e, r, "configuration file %s", path);
	if (memchr(data, '\0', size))
		return error_set(e, ERROR_INVALID, "configuration file %s holds a NUL byte", path);
	if (text_copy(config->file, sizeof(config->file), path) < 0)
		return error_set(e, ERROR_INVALID, "name of the configuration file is too long");
	unsigned number = 1;
	for (char *line = data; line; number++) {
		char *end = strchr(line, '\n');
		if (end)
			*end++ = '\0';
		r = load_line(config, line, number, seen, e);
		if (r < 0)
			return r;
		line = end;
	}
	return 0;
}

static void environment_name(const struct key *key, char *to, size_t size)
{
	text_format(to, size, "%s%s", CONFIG_ENVIRONMENT_PREFIX, key->name);
	for (char *p = to; *p; p++)
		*p = (char)toupper((unsigned char)*p);
}

static int load_environment(struct config *config, struct error *e)
{
	for (size_t i = 0; i < ARRAY_SIZE(keys); i++) {
		char name[64];
		environment_name(&keys[i], name, sizeof(name));
		const char *value = getenv(name);
		if (!value || !*value)
			continue;
		int r = config_set(config, keys[i].name, value, e);
		if (r < 0)
			return error_prefix(e, "environment variable %s", name);
	}
	return 0;
}

/* If argv[at] is the flag of `name` (with _ as -), points *ret_value to its value and returns the number of arguments
 * it takes; 0 if it is another one, -EINVAL if the value is missing. */
static int match_flag(const char *name, int argc, char **argv, int at, const char **ret_value)
{
	const char *text = argv[at];
	if (!text_starts_with(text, "--"))
		return 0;
	text += 2;
	for (; *name; name++, text++)
		if (*text != (*name == '_' ? '-' : *name))
			return 0;
	if (*text == '=') {
		*ret_value = text + 1;
		return 1;
	}
	if (*text)
		return 0;
	if (at + 1 >= argc)
		return -EINVAL;
	*ret_value = argv[at + 1];
	return 2;
}

static int find_config_flag(int argc, char **argv, const char **ret_path, struct error *e)
{
	for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++) {
		int used = match_flag("config", argc, argv, i, ret_path);
		if (used < 0)
			return error_set(e, ERROR_INVALID, "--config needs a file name");
	}
	return 0;
}

static int load_flags(struct config *config, int *argc, char **argv, struct error *e)
{
	int kept = 1;
	int i = 1;
	while (i < *argc && strcmp(argv[i], "--") != 0) {
		const char *value = NULL;
		int used = match_flag("config", *argc, argv, i, &value);
		for (size_t k = 0; k < ARRAY_SIZE(keys) && used == 0; k++) {
			used = match_flag(keys[k].name, *argc, argv, i, &value);
			if (used < 0)
				return error_set(e, ERROR_INVALID, "%s needs a value", argv[i]);
			if (used > 0 && config_set(config, keys[k].name, value, e) < 0)
				return error_prefix(e, "flag %s", argv[i]);
		}
		if (used == 0) {
			argv[kept++] = argv[i];
			used = 1;
		}
		i += used;
	}
	while (i < *argc)
		argv[kept++] = argv[i++];
	argv[kept] = NULL;
	*argc = kept;
	return 0;
}

static int fill_program_path(char *field, size_t size, const char *name, struct error *e)
{
	if (*field)
		return 0;
	char self[CONFIG_PATH_BYTES];
	ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);
	if (n < 0)
		return error_set_errno(e, errno, "path of this program");
	self[n] = '\0';
	char *slash = strrchr(self, '/');
	if (!slash)
		return error_set(e, ERROR_INTERNAL, "path of this program, \"%s\", has no folder", self);
	*slash = '\0';
	if (text_format(field, size, "%s/%s", self, name) < 0)
		return error_set(e, ERROR_INVALID, "path of this program is too long");
	return 0;
}

int config_load(struct config *config, int *argc, char **argv, struct error *e)
{
	config_defaults(config);
	const char *path = getenv("SPACE_CONFIG");
	if (path && !*path)
		path = NULL;
	int r = find_config_flag(*argc, argv, &path, e);
	if (r == 0)
		r = load_file(config, path ? path : CONFIG_DEFAULT_FILE, path != NULL, e);
	if (r == 0)
		r = load_environment(config, e);
	if (r == 0)
		r = load_flags(config, argc, argv, e);
	if (r == 0 && !*config->socket &&
	    text_format(config->socket, sizeof(config->socket), "%s/space.sock", config->runtime_dir) < 0)
		r = error_set(e, ERROR_INVALID, "runtime_dir is too long");
	if (r == 0)
		r = fill_program_path(config->agent_path, sizeof(config->agent_path), "space-agent", e);
	if (r == 0)
		r = fill_program_path(config->helper_path, sizeof(config->helper_path), "space-helper", e);
	return r;
}

int config_export(const struct config *config, struct error *e)
{
	for (size_t i = 0; i < ARRAY_SIZE(keys); i++) {
		char name[64];
		char number[32];
		environment_name(&keys[i], name, sizeof(name));
		const char *field = (const char *)config + keys[i].offset;
		if (!keys[i].size) {
			snprintf(number, sizeof(number), "%llu", (unsigned long long)*(const uint64_t *)(const void *)field);
			field = number;
		}
		if (*field && setenv(name, field, 1) < 0)
			return error_set_errno(e, errno, "environment variable %s", name);
	}
	/* The file has been read; a program of another user might not be able to, or find it changed. */
	if (setenv("SPACE_CONFIG", "/dev/null", 1) < 0)
		return error_set_errno(e, errno, "environment variable SPACE_CONFIG");
	return 0;
}

int config_describe(struct buf *ret)
{
	int r = buf_printf(ret, "  --%-24s %s\n", "config FILE", "configuration file (default " CONFIG_DEFAULT_FILE ")");
	for (size_t i = 0; i < ARRAY_SIZE(keys) && r == 0; i++) {
		char flag[48];
		text_format(flag, sizeof(flag), "%s VALUE", keys[i].name);
		for (char *p = flag; *p; p++)
			if (*p == '_')
				*p = '-';
		r = buf_printf(ret, "  --%-24s %s", flag, keys[i].help);
		if (r == 0 && keys[i].value)
			r = buf_printf(ret, " (default %s)", keys[i].value);
		if (r == 0)
			r = buf_append_string(ret, "\n");
	}
	return r;
}

void config_helper_socket(const struct config *config, char *to, size_t size)
{
	text_format(to, size, "%s/helper.sock", config->runtime_dir);
}

int config_identity(const struct config *config, uid_t *ret_uid, gid_t *ret_gid, struct error *e)
{
	errno = 0;
	const struct passwd *user = getpwnam(config->user);
	if (!user)
		return error_set(e, ERROR_NOT_FOUND, "user \"%s\" does not exist (create it, or set `user`)", config->user);
	*ret_uid = user->pw_uid;
	const struct group *group = getgrnam(config->group);
	if (!group)
		return error_set(e, ERROR_NOT_FOUND, "group \"%s\" does not exist (create it, or set `group`)", config->group);
	*ret_gid = group->gr_gid;
	return 0;
}
