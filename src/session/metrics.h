/* Counters of the session room. All are atomic; reading them takes no lock. */
#ifndef SPACE_SESSION_METRICS_H
#define SPACE_SESSION_METRICS_H

#include "session/session.h"

#define METRICS_CREATE SESSION_VERB_COUNT /* create is no verb of an existing session */
#define METRICS_STALL_BUCKETS 8

struct metrics {
	_Atomic uint64_t verbs[SESSION_VERB_COUNT + 1][2]; /* [verb][failed] */
	_Atomic uint64_t verb_us[SESSION_VERB_COUNT + 1];  /* of successful ones, together */
	_Atomic uint64_t stalls[METRICS_STALL_BUCKETS + 1];
	_Atomic uint64_t stall_us;
	_Atomic uint64_t stall_count;
	_Atomic uint64_t snapshots_taken;
	_Atomic uint64_t snapshots_unchanged; /* rolling ones that found nothing new */
	_Atomic uint64_t snapshots_failed;
	_Atomic uint64_t snapshots_thinned;
	_Atomic uint64_t snapshot_written_bytes;
	_Atomic uint64_t snapshot_changed_bytes;
	_Atomic uint64_t warm_hits;
	_Atomic uint64_t warm_misses;
	_Atomic uint64_t spare_hits;
	_Atomic uint64_t spare_misses;
	_Atomic uint64_t lost;    /* sandboxes that ended by themselves */
	_Atomic uint64_t damaged; /* wakes refused because of damaged files */
	_Atomic uint64_t timeouts;
};

void metrics_verb(struct metrics *metrics, int verb, int failed, uint64_t us);
void metrics_stall(struct metrics *metrics, uint64_t us);

#endif
