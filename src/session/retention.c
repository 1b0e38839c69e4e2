#include "session/retention.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "session/internal.h"

#define HOUR_MS UINT64_C(3600000)
#define DAY_MS (24 * HOUR_MS)
#define BUDGET_PERCENT 80 /* of the file system, if no budget is configured */
#define ROOM_BYTES (256 * MIB)

void retention_plan(const struct retention_item *items, size_t count, uint64_t now_ms,
                    const struct retention_policy *policy, unsigned char *drop)
{
	/* From the newest to the oldest, so that the newest of each hour or day is the one that is met first. */
	uint64_t last_hour = UINT64_MAX;
	uint64_t last_day = UINT64_MAX;
	for (size_t i = count; i-- > 0;) {
		const struct retention_item *item = &items[i];
		uint64_t age_s = now_ms > item->created_at_ms ? (now_ms - item->created_at_ms) / 1000 : 0;
		drop[i] = 0;
		if (age_s <= policy->all_s) {
			continue;
		} else if (age_s <= policy->hourly_s) {
			uint64_t hour = item->created_at_ms / HOUR_MS;
			drop[i] = hour == last_hour;
			last_hour = hour;
		} else if (age_s <= policy->daily_s) {
			uint64_t day = item->created_at_ms / DAY_MS;
			drop[i] = day == last_day;
			last_day = day;
		} else {
			drop[i] = 1;
		}
		if (item->is_kept)
			drop[i] = 0;
	}
}

struct rows {
	struct store_snapshot *list;
	size_t count;
	size_t capacity;
};

static int collect(void *context, const struct store_snapshot *row)
{
	struct rows *rows = context;
	if (rows->count == rows->capacity) {
		size_t capacity = rows->capacity ? rows->capacity * 2 : 64;
		struct store_snapshot *more = realloc(rows->list, capacity * sizeof(*more));
		if (!more)
			return -ENOMEM;
		rows->list = more;
		rows->capacity = capacity;
	}
	rows->list[rows->count++] = *row;
	return 0;
}

int snapshot_remove(struct session_manager *m, const struct store_snapshot *row, struct error *e)
{
	struct error missing;
	uint64_t freed = 0;
	int folder = pool_folder(&m->pool, POOL_SNAPSHOTS, row->id, &missing);
	if (folder >= 0) {
		freed = pool_exclusive_bytes(folder);
		close(folder);
	}
	/* What it has stored and others go on using is charged to a child. */
	uint64_t inherited = row->bytes_stored > freed ? row->bytes_stored - freed : 0;
	int r = store_begin(m->store, STORE_RELAXED, e);
	if (r == 0) {
		r = store_snapshot_delete(m->store, row->id, inherited, e);
		if (r == 0)
			r = store_commit(m->store, e);
		else
			store_rollback(m->store);
	}
	if (r == 0)
		pool_remove(&m->pool, POOL_SNAPSHOTS, row->id);
	return r;
}

static int is_kept(const struct session *s, const struct store_snapshot *row)
{
	return strcmp(row->id, s->row.head) == 0 || strcmp(row->kind, "manual") == 0 || row->name[0];
}

/* What the present run of retention works with. */
struct run {
	struct session_manager *m;
	struct session *held;                  /* its turn is the caller's already */
	const struct retention_policy *policy; /* NULL = each session's own */
	uint64_t now_ms;
	int (*enough)(struct run *run); /* ends the run early */
	size_t removed;
};

static void thin_rows(struct run *run, struct session *s, const struct store_snapshot *list, size_t count)
{
	struct retention_policy policy = {s->row.keep_all_s, s->row.keep_hourly_s, s->row.keep_daily_s};
	CLEANUP_FREE struct retention_item *items = calloc(count, sizeof(*items));
	CLEANUP_FREE unsigned char *drop = calloc(count, 1);
	if (!items || !drop)
		return;
	for (size_t i = 0; i < count; i++)
		items[i] = (struct retention_item){list[i].created_at_ms, is_kept(s, &list[i])};
	retention_plan(items, count, run->now_ms, run->policy ? run->policy : &policy, drop);
	for (size_t i = 0; i < count && !(run->enough && run->enough(run)); i++) {
		struct error e;
		if (!drop[i])
			continue;
		if (snapshot_remove(run->m, &list[i], &e) < 0) {
			log_warning("session", "removing snapshot %s: %s", list[i].id, e.message);
			continue;
		}
		run->removed++;
		atomic_fetch_add(&run->m->metrics.snapshots_thinned, 1);
	}
}

/* One session's snapshots, in its turn (if that is free now). */
static void thin_session(struct run *run, const char *session_id)
{
	struct session *s;
	struct rows rows = {0};
	struct error e;
	if (session_acquire(run->m, session_id, &s, &e) < 0)
		return;
	int held = s == run->held;
	if (held || session_turn_try(s) == 0) {
		if (store_snapshot_each(run->m->store, session_id, collect, &rows, &e) == 0 && rows.count)
			thin_rows(run, s, rows.list, rows.count);
		free(rows.list);
		if (!held)
			session_turn_end(s);
	}
	session_release(run->m, s);
}

struct ids {
	char (*list)[ID_BYTES];
	size_t count;
	size_t capacity;
};

/* Snapshots come oldest first, so sessions come by the age of their oldest one. */
static int collect_session(void *context, const struct store_snapshot *row)
{
	struct ids *ids = context;
	for (size_t i = ids->count; i-- > 0;)
		if (strcmp(ids->list[i], row->session_id) == 0)
			return 0;
	if (ids->count == ids->capacity) {
		size_t capacity = ids->capacity ? ids->capacity * 2 : 64;
		void *more = realloc(ids->list, capacity * ID_BYTES);
		if (!more)
			return -ENOMEM;
		ids->list = more;
		ids->capacity = capacity;
	}
	memcpy(ids->list[ids->count++], row->session_id, ID_BYTES);
	return 0;
}

static void run_all(struct run *run)
{
	struct ids ids = {0};
	struct error e;
	if (store_snapshot_each(run->m->store, NULL, collect_session, &ids, &e) == 0)
		for (size_t i = 0; i < ids.count && !(run->enough && run->enough(run)); i++)
			thin_session(run, ids.list[i]);
	free(ids.list);
}

static int within_budget(struct run *run)
{
	struct session_manager *m = run->m;
	struct error e;
	uint64_t count;
	uint64_t bytes;
	uint64_t total;
	uint64_t free_bytes;
	if (m->config.snapshot_budget_bytes)
		return store_snapshot_totals(m->store, &count, &bytes, &e) < 0 || bytes <= m->config.snapshot_budget_bytes;
	return pool_space(&m->pool, &total, &free_bytes) < 0 || total - free_bytes <= total / 100 * BUDGET_PERCENT;
}

static int has_room(struct run *run)
{
	uint64_t total;
	uint64_t free_bytes;
	return pool_space(&run->m->pool, &total, &free_bytes) < 0 || free_bytes >= ROOM_BYTES;
}

/* Stricter and stricter. */
static size_t squeeze(struct session_manager *m, struct session *held, uint64_t now_ms, int (*enough)(struct run *run))
{
	static const struct retention_policy policies[] = {
	    {600, 86400, 7 * 86400}, {0, 86400, 7 * 86400}, {0, 0, 7 * 86400}, {0, 0, 0}};
	struct run run = {.m = m, .held = held, .now_ms = now_ms, .enough = enough};
	for (size_t i = 0; i < ARRAY_SIZE(policies) && !enough(&run); i++) {
		run.policy = &policies[i];
		run_all(&run);
	}
	return run.removed;
}

void retention_run(struct session_manager *m, uint64_t now_ms)
{
	struct run run = {.m = m, .now_ms = now_ms};
	run_all(&run);
	run.removed += squeeze(m, NULL, now_ms, within_budget);
	if (run.removed)
		log_info("session", "retention removed %zu snapshots", run.removed);
}

int retention_make_room(struct session_manager *m, struct session *held)
{
	return squeeze(m, held, time_realtime_ms(), has_room) > 0;
}
