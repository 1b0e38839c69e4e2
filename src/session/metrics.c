#include "session/metrics.h"

#include <string.h>

#include "base/buf.h"
#include "session/internal.h"
#include "session/spare.h"
#include "session/warm_pool.h"

static const uint64_t stall_limits_us[METRICS_STALL_BUCKETS] = {2500,  5000,   10000,  25000,
                                                                50000, 100000, 250000, 1000000};

void metrics_verb(struct metrics *metrics, int verb, int failed, uint64_t us)
{
	atomic_fetch_add(&metrics->verbs[verb][failed != 0], 1);
	if (!failed)
		atomic_fetch_add(&metrics->verb_us[verb], us);
}

void metrics_stall(struct metrics *metrics, uint64_t us)
{
	size_t i = 0;
	while (i < METRICS_STALL_BUCKETS && us > stall_limits_us[i])
		i++;
	atomic_fetch_add(&metrics->stalls[i], 1);
	atomic_fetch_add(&metrics->stall_us, us);
	atomic_fetch_add(&metrics->stall_count, 1);
}

static const char *verb_label(int verb)
{
	return verb == METRICS_CREATE ? "create" : session_verb_name((enum session_verb)verb);
}

static void write_verbs(struct metrics *metrics, struct buf *ret)
{
	buf_append_string(ret, "# HELP space_session_verbs_total Verbs on sessions by outcome.\n"
	                       "# TYPE space_session_verbs_total counter\n");
	for (int i = 0; i <= SESSION_VERB_COUNT; i++)
		for (int failed = 0; failed < 2; failed++)
			buf_printf(ret, "space_session_verbs_total{verb=\"%s\",outcome=\"%s\"} %llu\n", verb_label(i),
			           failed ? "failed" : "ok", (unsigned long long)atomic_load(&metrics->verbs[i][failed]));
	buf_append_string(ret, "# HELP space_session_verb_seconds_total Time spent in successful verbs.\n"
	                       "# TYPE space_session_verb_seconds_total counter\n");
	for (int i = 0; i <= SESSION_VERB_COUNT; i++)
		buf_printf(ret, "space_session_verb_seconds_total{verb=\"%s\"} %.6f\n", verb_label(i),
		           (double)atomic_load(&metrics->verb_us[i]) / 1e6);
}

static void write_stalls(struct metrics *metrics, struct buf *ret)
{
	buf_append_string(ret, "# HELP space_snapshot_stall_seconds How long live snapshots stopped their guest.\n"
	                       "# TYPE space_snapshot_stall_seconds histogram\n");
	uint64_t sum = 0;
	for (size_t i = 0; i < METRICS_STALL_BUCKETS; i++) {
		sum += atomic_load(&metrics->stalls[i]);
		buf_printf(ret, "space_snapshot_stall_seconds_bucket{le=\"%g\"} %llu\n", (double)stall_limits_us[i] / 1e6,
		           (unsigned long long)sum);
	}
	sum += atomic_load(&metrics->stalls[METRICS_STALL_BUCKETS]);
	buf_printf(ret,
	           "space_snapshot_stall_seconds_bucket{le=\"+Inf\"} %llu\nspace_snapshot_stall_seconds_sum %.6f\n"
	           "space_snapshot_stall_seconds_count %llu\n",
	           (unsigned long long)sum, (double)atomic_load(&metrics->stall_us) / 1e6, (unsigned long long)sum);
}

static int count_state(void *context, const struct store_session *row)
{
	uint64_t *counts = context;
	int state = state_from_name(row->state);
	if (state >= 0)
		counts[state]++;
	return 0;
}

static void write_one(struct buf *ret, const char *name, const char *type, const char *help, uint64_t value)
{
	buf_printf(ret, "# HELP %s %s\n# TYPE %s %s\n%s %llu\n", name, help, name, type, name, (unsigned long long)value);
}

int session_metrics(struct session_manager *m, struct buf *ret)
{
	struct metrics *metrics = &m->metrics;
	uint64_t states[STATE_COUNT] = {0};
	uint64_t snapshots = 0;
	uint64_t stored = 0;
	uint64_t total = 0;
	uint64_t free_bytes = 0;
	struct error ignored;
	store_session_each(m->store, NULL, 0, "", count_state, states, &ignored);
	store_snapshot_totals(m->store, &snapshots, &stored, &ignored);
	pool_space(&m->pool, &total, &free_bytes);
	buf_append_string(ret, "# HELP space_sessions Sessions by stored state.\n# TYPE space_sessions gauge\n");
	for (int i = 0; i < STATE_COUNT; i++)
		if (!state_is_transitional((enum session_state)i) || states[i])
			buf_printf(ret, "space_sessions{state=\"%s\"} %llu\n", state_name((enum session_state)i),
			           (unsigned long long)states[i]);
	pthread_mutex_lock(&m->mutex);
	unsigned sandboxes = m->sandboxes;
	pthread_mutex_unlock(&m->mutex);
	write_one(ret, "space_sandboxes", "gauge", "Sandboxes alive, pooled ones included.", sandboxes);
	write_one(ret, "space_sandboxes_limit", "gauge", "Most sandboxes at once.", m->config.sandboxes_max);
	write_one(ret, "space_warm_pool_ready", "gauge", "Pooled sandboxes ready to be handed out.", warm_pool_ready(m));
	write_one(ret, "space_warm_pool_hits_total", "counter", "Creates served from the pool.",
	          atomic_load(&metrics->warm_hits));
	write_one(ret, "space_warm_pool_misses_total", "counter", "Creates that restored a sandbox.",
	          atomic_load(&metrics->warm_misses));
	write_one(ret, "space_spares_ready", "gauge", "VMMs started up for restores to come.", spare_ready(m));
	write_one(ret, "space_spare_hits_total", "counter", "Restores that found a started VMM.",
	          atomic_load(&metrics->spare_hits));
	write_one(ret, "space_spare_misses_total", "counter", "Restores that had to start one.",
	          atomic_load(&metrics->spare_misses));
	write_one(ret, "space_snapshots", "gauge", "Snapshots kept.", snapshots);
	write_one(ret, "space_snapshot_bytes", "gauge", "Bytes that snapshots have stored.", stored);
	write_one(ret, "space_snapshots_total", "counter", "Snapshots committed.", atomic_load(&metrics->snapshots_taken));
	write_one(ret, "space_snapshots_unchanged_total", "counter", "Rolling snapshots not taken: nothing had changed.",
	          atomic_load(&metrics->snapshots_unchanged));
	write_one(ret, "space_snapshots_failed_total", "counter", "Snapshots that failed.",
	          atomic_load(&metrics->snapshots_failed));
	write_one(ret, "space_snapshots_thinned_total", "counter", "Snapshots removed by retention.",
	          atomic_load(&metrics->snapshots_thinned));
	write_one(ret, "space_snapshot_written_bytes_total", "counter", "Bytes written for snapshots.",
	          atomic_load(&metrics->snapshot_written_bytes));
	write_one(ret, "space_snapshot_changed_bytes_total", "counter", "Bytes that had changed since the parent.",
	          atomic_load(&metrics->snapshot_changed_bytes));
	write_one(ret, "space_sandboxes_lost_total", "counter", "Sandboxes that ended by themselves.",
	          atomic_load(&metrics->lost));
	write_one(ret, "space_snapshots_damaged_total", "counter", "Restores refused because of damaged files.",
	          atomic_load(&metrics->damaged));
	write_one(ret, "space_session_timeouts_total", "counter", "Timeouts that were acted on.",
	          atomic_load(&metrics->timeouts));
	write_one(ret, "space_pool_bytes", "gauge", "Size of the pool's file system.", total);
	write_one(ret, "space_pool_free_bytes", "gauge", "Free bytes of the pool's file system.", free_bytes);
	write_verbs(metrics, ret);
	write_stalls(metrics, ret);
	return ret->data ? 0 : -1;
}
