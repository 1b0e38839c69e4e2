/*
 * The one configuration of all programs of the daemon side: built-in defaults, then the file, then the environment,
 * then flags; the later one wins.
 *
 * File: `key = value` lines, `#` starts a comment line, blank lines are fine. A key that does not exist, is set twice
 * or has a value out of range is an error that names file and line. Environment: SPACE_DATA_DIR for data_dir. Flags:
 * --data-dir VALUE or --data-dir=VALUE. Sizes take "512M", "4G"; durations "90", "5m", "2h".
 */
#ifndef SPACE_BASE_CONFIG_H
#define SPACE_BASE_CONFIG_H

#include <sys/types.h>

#include "base/buf.h"
#include "base/error.h"

#define CONFIG_DEFAULT_FILE "/etc/space/space.conf"
#define CONFIG_PATH_BYTES 512
#define CONFIG_NAME_BYTES 64
#define CONFIG_INSTANCE_BYTES 24
#define CONFIG_SANDBOXES_MAX 1024

struct config {
	char file[CONFIG_PATH_BYTES]; /* the file that was read; "" if there was none */

	char data_dir[CONFIG_PATH_BYTES];    /* absolute; database, templates, snapshots */
	char runtime_dir[CONFIG_PATH_BYTES]; /* absolute; sockets and records that need not survive a reboot */
	char socket[CONFIG_PATH_BYTES];      /* the daemon's own socket; RUNTIME_DIR/space.sock unless set */
	char listen[CONFIG_NAME_BYTES];      /* ADDRESS:PORT of the API; "none" for no TCP at all */
	char domain[CONFIG_NAME_BYTES];      /* PORT-ID.DOMAIN goes to a guest's port */
	char user[CONFIG_NAME_BYTES];        /* the daemon's user and the group that may use its socket */
	char group[CONFIG_NAME_BYTES];
	char instance[CONFIG_INSTANCE_BYTES]; /* name of the cgroup; two daemons on one host need different ones */
	char log_level[16];

	char agent_path[CONFIG_PATH_BYTES];  /* guest agent binary; beside the running program unless set */
	char helper_path[CONFIG_PATH_BYTES]; /* root helper; beside the running program unless set */
	char qemu_path[CONFIG_PATH_BYTES];

	uint64_t vmm_uid_base; /* VMMs run as uids (and gids) from here on, CONFIG_SANDBOXES_MAX of them */
	uint64_t pool_size;    /* warm sandboxes kept ready; 0 = none */
	uint64_t spares;       /* VMMs kept started up for restores; 0 = none */
	uint64_t sessions_max;
	uint64_t sandboxes_max;
	uint64_t snapshot_interval_s;   /* 0 = no rolling snapshots */
	uint64_t snapshot_budget_bytes; /* 0 = 80 % of the file system */
	uint64_t default_timeout_s;     /* 0 = sessions that name no timeout have none */
	uint64_t storage_size_bytes;    /* of the pool's own file system, where one is needed; 0 = 80 % of what is free */
};

/* Reads file, environment and flags. Flags that were understood are removed from argv (argc is adjusted, argv[argc]
 * stays NULL); everything else is left to the program. `--config FILE` or SPACE_CONFIG names the file, which must then
 * exist. Arguments after "--" are not looked at. */
int config_load(struct config *config, int *argc, char **argv, struct error *e);
/* Only the built-in defaults. */
void config_defaults(struct config *config);
/* Sets one key; the error names key and allowed values. */
int config_set(struct config *config, const char *key, const char *value, struct error *e);
/* Puts every key into the environment, so that a program started from here sees the same configuration. */
int config_export(const struct config *config, struct error *e);
/* Appends one "  --key VALUE   meaning (default)" line for each key, for --help. */
int config_describe(struct buf *ret);

/* RUNTIME_DIR/helper.sock into `to` (CONFIG_PATH_BYTES + 32 bytes suffice). */
void config_helper_socket(const struct config *config, char *to, size_t size);
/* uid of config->user and gid of config->group. */
int config_identity(const struct config *config, uid_t *ret_uid, gid_t *ret_gid, struct error *e);

#endif
