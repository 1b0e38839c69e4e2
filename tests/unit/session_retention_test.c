/* Which snapshots retention keeps, by the rule as it is documented. */
#include "session/retention.h"

#include "base/macros.h"
#include "check.h"

#define MINUTE_MS UINT64_C(60000)
#define HOUR_MS (60 * MINUTE_MS)
#define DAY_MS (24 * HOUR_MS)
#define ITEMS 20000

static const struct retention_policy usual = {3600, 86400, 7 * 86400};
static struct retention_item items[ITEMS];
static unsigned char drop[ITEMS];

/* One a minute, up to `now`; returns how many. */
static size_t each_minute(uint64_t now, uint64_t span_ms)
{
	size_t count = (size_t)(span_ms / MINUTE_MS);
	CHECK(count <= ITEMS);
	for (size_t i = 0; i < count; i++)
		items[i] = (struct retention_item){.created_at_ms = now - (count - 1 - i) * MINUTE_MS};
	return count;
}

static size_t kept_between(size_t count, uint64_t now, uint64_t from_age_ms, uint64_t to_age_ms)
{
	size_t kept = 0;
	for (size_t i = 0; i < count; i++) {
		uint64_t age = now - items[i].created_at_ms;
		kept += !drop[i] && age >= from_age_ms && age < to_age_ms;
	}
	return kept;
}

static void a_session_of_ten_days(void)
{
	uint64_t now = 20000 * DAY_MS + 5 * HOUR_MS + 17 * MINUTE_MS;
	size_t count = each_minute(now, 10 * DAY_MS);
	retention_plan(items, count, now, &usual, drop);
	CHECK_INT(kept_between(count, now, 0, HOUR_MS), 60);
	size_t hourly = kept_between(count, now, HOUR_MS + MINUTE_MS, DAY_MS + MINUTE_MS);
	CHECK(hourly >= 23 && hourly <= 24);
	size_t daily = kept_between(count, now, DAY_MS + MINUTE_MS, 7 * DAY_MS + MINUTE_MS);
	CHECK(daily >= 6 && daily <= 7);
	CHECK_INT(kept_between(count, now, 7 * DAY_MS + MINUTE_MS, 11 * DAY_MS), 0);
}

/* Run again and again as time goes by, it must not eat its own result. */
static void is_stable_over_time(void)
{
	uint64_t start = 20000 * DAY_MS;
	size_t count = 0;
	for (uint64_t now = start; now < start + 9 * DAY_MS; now += 10 * MINUTE_MS) {
		items[count++] = (struct retention_item){.created_at_ms = now};
		retention_plan(items, count, now, &usual, drop);
		size_t left = 0;
		for (size_t i = 0; i < count; i++)
			if (!drop[i])
				items[left++] = items[i];
		count = left;
		CHECK(count <= 7 + 24 + 8);
	}
	uint64_t now = start + 9 * DAY_MS;
	size_t days = 0;
	for (size_t i = 0; i < count; i++)
		days += now - items[i].created_at_ms > DAY_MS + HOUR_MS;
	CHECK(days >= 5 && days <= 7);
}

static void the_newest_of_an_hour_stays(void)
{
	uint64_t hour = 480000 * HOUR_MS;
	uint64_t now = hour + 5 * HOUR_MS;
	items[0] = (struct retention_item){.created_at_ms = hour + 1 * MINUTE_MS};
	items[1] = (struct retention_item){.created_at_ms = hour + 30 * MINUTE_MS};
	items[2] = (struct retention_item){.created_at_ms = hour + 59 * MINUTE_MS};
	retention_plan(items, 3, now, &usual, drop);
	CHECK(drop[0] && drop[1] && !drop[2]);
}

static void kept_ones_stay_at_any_age(void)
{
	uint64_t now = 20000 * DAY_MS;
	items[0] = (struct retention_item){.created_at_ms = now - 300 * DAY_MS, .is_kept = 1};
	items[1] = (struct retention_item){.created_at_ms = now - 299 * DAY_MS};
	items[2] = (struct retention_item){.created_at_ms = now - 5 * HOUR_MS - 2, .is_kept = 1};
	items[3] = (struct retention_item){.created_at_ms = now - 5 * HOUR_MS - 1, .is_kept = 1};
	retention_plan(items, 4, now, &usual, drop);
	CHECK(!drop[0] && drop[1] && !drop[2] && !drop[3]);
	static const struct retention_policy nothing = {0, 0, 0};
	retention_plan(items, 4, now, &nothing, drop);
	CHECK(!drop[0] && drop[1] && !drop[2] && !drop[3]);
}

static void clocks_that_went_back(void)
{
	uint64_t now = 20000 * DAY_MS;
	items[0] = (struct retention_item){.created_at_ms = now + DAY_MS};
	retention_plan(items, 1, now, &usual, drop);
	CHECK(!drop[0]);
	retention_plan(items, 0, now, &usual, drop);
}

int main(void)
{
	a_session_of_ten_days();
	is_stable_over_time();
	the_newest_of_an_hour_stays();
	kept_ones_stay_at_any_age();
	clocks_that_went_back();
	return 0;
}
