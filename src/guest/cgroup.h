/*
 * The guest's two cgroups: `agent` (this program) and `user` (everything else).
 *
 * Only the memory and pids controllers are used. The CPU controller stays off on purpose: the kernel's autogroups then
 * give each session of processes (the agent, each process it starts) an equal share whatever nice values are used
 * inside, at no cost per process; the agent's own autogroup gets the greatest weight.
 *
 * The gate keeps the start of a process and a freeze apart: a child that is frozen before its exec would hold the agent
 * thread that waits for it, until the thaw.
 */
#ifndef SPACE_GUEST_CGROUP_H
#define SPACE_GUEST_CGROUP_H

#include "base/error.h"

#define CGROUP_FREEZE_WAIT_MS 2000
/* Memory that users' processes cannot take: kernel, agent, and room to act when they have taken the rest. */
#define CGROUP_RESERVE_BYTES_MIN (24 * MIB)
#define CGROUP_RESERVE_BYTES_MAX (64 * MIB)

/* Makes both groups under `root` and moves the agent into its own. Errors leave the program without groups: processes
 * then start in the agent's own one and freezing is unsupported. */
int cgroup_begin(const char *root, int set_limits, struct error *e);
/* Directory of `user` for clone3(), or -1. */
int cgroup_user_fd(void);

/* Waits until the gate is open, asking `is_gone` about once a second. 0 or -ECANCELED. */
int cgroup_gate_enter(int (*is_gone)(void *context), void *context);
void cgroup_gate_leave(void);

/* Closes the gate and freezes `user`; *ret_confirmed tells whether all tasks have stopped in time. */
int cgroup_freeze(int *ret_confirmed, struct error *e);
int cgroup_thaw(struct error *e);
int cgroup_is_frozen(void);
/* CPU time of all users' processes ever, in microseconds; 0 if unknown. */
uint64_t cgroup_user_cpu_us(void);
/* Sends SIGKILL to all users' processes. */
void cgroup_kill_users(void);

#endif
