/*
 * Which snapshots are kept.
 *
 * Of a session's automatic snapshots all of the last `all_s` seconds are kept, then the newest of each hour up to
 * `hourly_s`, then the newest of each day up to `daily_s`. What a person has asked for (kind "manual", or with a name)
 * and the head are kept whatever their age. If the host's budget is passed the same is done with stricter rules, oldest
 * first and across all sessions, until it fits: a session never fails for want of room for its history.
 */
#ifndef SPACE_SESSION_RETENTION_H
#define SPACE_SESSION_RETENTION_H

#include <stddef.h>
#include <stdint.h>

struct retention_item {
	uint64_t created_at_ms;
	int is_kept; /* head, manual or named */
};

struct retention_policy {
	uint64_t all_s;
	uint64_t hourly_s;
	uint64_t daily_s;
};

/* Items oldest first; sets drop[i]. */
void retention_plan(const struct retention_item *items, size_t count, uint64_t now_ms,
                    const struct retention_policy *policy, unsigned char *drop);

#endif
