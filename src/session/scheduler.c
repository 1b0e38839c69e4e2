#include "session/scheduler.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/log.h"
#include "session/internal.h"
#include "session/jobs.h"
#include "session/warm_pool.h"

#define RETENTION_EVERY_MS 60000
#define DOOMED_EVERY_MS 2000
#define TIMEOUT_RETRY_MS 15000
#define SNAPSHOT_BUSY_RETRY_MS 1000
#define SNAPSHOT_FAILED_RETRY_MS 30000
#define WAKE_SLOT UINT64_MAX
#define EVENTS_MAX 64

struct watch {
	struct sandbox *sandbox; /* NULL = free; only compared, never followed */
	char session_id[ID_BYTES];
	int pidfd;
	uint32_t generation;
};

struct doomed {
	struct doomed *next;
	char id[ID_BYTES];
};

struct scheduler {
	pthread_t thread;
	int started;
	atomic_int stopping;
	int epoll_fd;
	int wake_fd;
	pthread_mutex_t mutex; /* watches and doomed */
	struct watch *watches;
	size_t watch_count;
	struct doomed *doomed;
	uint64_t retention_at;
	uint64_t doomed_at;
	atomic_int retention_pending;
};

void scheduler_wake(struct session_manager *m)
{
	uint64_t one = 1;
	if (m->scheduler) {
		ssize_t ignored = write(m->scheduler->wake_fd, &one, sizeof(one));
		(void)ignored;
	}
}

int scheduler_watch(struct session_manager *m, struct sandbox *sandbox, const char *session_id, struct error *e)
{
	struct scheduler *scheduler = m->scheduler;
	int r = 0;
	pthread_mutex_lock(&scheduler->mutex);
	struct watch *found = NULL;
	for (size_t i = 0; i < scheduler->watch_count; i++) {
		if (scheduler->watches[i].sandbox == sandbox) {
			text_copy(scheduler->watches[i].session_id, ID_BYTES, session_id);
			pthread_mutex_unlock(&scheduler->mutex);
			return 0;
		}
		if (!scheduler->watches[i].sandbox)
			found = &scheduler->watches[i];
	}
	if (!found) {
		struct watch *more = realloc(scheduler->watches, (scheduler->watch_count + 1) * sizeof(*more));
		if (!more) {
			pthread_mutex_unlock(&scheduler->mutex);
			return error_set_errno(e, ENOMEM, "watching a sandbox");
		}
		scheduler->watches = more;
		found = &more[scheduler->watch_count++];
		*found = (struct watch){0};
	}
	found->generation++;
	struct epoll_event event = {.events = EPOLLIN | EPOLLONESHOT,
	                            .data.u64 = (uint64_t)found->generation << 32 | (uint64_t)(found - scheduler->watches)};
	found->pidfd = vmm_pidfd(sandbox->vmm);
	if (epoll_ctl(scheduler->epoll_fd, EPOLL_CTL_ADD, found->pidfd, &event) < 0) {
		r = error_set_errno(e, errno, "watching a sandbox");
	} else {
		found->sandbox = sandbox;
		text_copy(found->session_id, ID_BYTES, session_id);
	}
	pthread_mutex_unlock(&scheduler->mutex);
	return r;
}

void scheduler_forget(struct session_manager *m, struct sandbox *sandbox)
{
	struct scheduler *scheduler = m->scheduler;
	if (!scheduler)
		return;
	pthread_mutex_lock(&scheduler->mutex);
	for (size_t i = 0; i < scheduler->watch_count; i++) {
		struct watch *watch = &scheduler->watches[i];
		if (watch->sandbox != sandbox)
			continue;
		epoll_ctl(scheduler->epoll_fd, EPOLL_CTL_DEL, watch->pidfd, NULL);
		watch->sandbox = NULL;
	}
	pthread_mutex_unlock(&scheduler->mutex);
}

void scheduler_doom(struct session_manager *m, const char *sandbox_id)
{
	struct doomed *doomed = calloc(1, sizeof(*doomed));
	if (!doomed || !m->scheduler) {
		free(doomed); /* found again at the next start */
		return;
	}
	text_copy(doomed->id, sizeof(doomed->id), sandbox_id);
	pthread_mutex_lock(&m->scheduler->mutex);
	doomed->next = m->scheduler->doomed;
	m->scheduler->doomed = doomed;
	pthread_mutex_unlock(&m->scheduler->mutex);
}

static void kill_doomed(struct session_manager *m)
{
	pthread_mutex_lock(&m->scheduler->mutex);
	struct doomed *list = m->scheduler->doomed;
	m->scheduler->doomed = NULL;
	pthread_mutex_unlock(&m->scheduler->mutex);
	while (list) {
		struct doomed *doomed = list;
		list = doomed->next;
		struct error e;
		if (host_sandbox_kill(m->helper, doomed->id, &e) == 0) {
			sandbox_remove_traces(m, doomed->id);
			sandbox_unreserve(m);
		} else {
			scheduler_doom(m, doomed->id);
		}
		free(doomed);
	}
}

/* ---- work for one session, on a worker thread ---- */

struct task {
	struct session_manager *m;
	struct session *s; /* referenced */
};

static void task_done(struct task *task)
{
	pthread_mutex_lock(&task->s->mutex);
	task->s->job_pending = 0;
	pthread_mutex_unlock(&task->s->mutex);
	session_release(task->m, task->s);
	free(task);
}

static void task_drop(void *context)
{
	task_done(context);
}

static void task_start(struct session_manager *m, struct session *s, void (*work)(void *context))
{
	struct task *task = calloc(1, sizeof(*task));
	if (!task)
		return;
	task->m = m;
	task->s = s;
	pthread_mutex_lock(&m->mutex);
	s->refs++;
	pthread_mutex_unlock(&m->mutex);
	pthread_mutex_lock(&s->mutex);
	s->job_pending = 1;
	pthread_mutex_unlock(&s->mutex);
	if (jobs_add(m->jobs, work, task_drop, task) < 0)
		task_done(task);
}

static void ended_work(void *context)
{
	struct task *task = context;
	struct session *s = task->s;
	if (session_turn_begin(s, NULL) == 0) {
		session_notice_end(task->m, s, 0);
		session_turn_end(s);
	}
	task_done(task);
}

static void timeout_work(void *context)
{
	struct task *task = context;
	struct session_manager *m = task->m;
	struct session *s = task->s;
	struct error e;
	if (session_turn_begin(s, NULL) == 0) {
		int r = 0;
		if (s->state == STATE_RUNNING && s->row.end_at_ms && s->row.end_at_ms <= time_realtime_ms()) {
			int kills = strcmp(s->row.on_timeout, "kill") == 0;
			atomic_fetch_add(&m->metrics.timeouts, 1);
			event_session(m, "session.timeout", &s->row, json_pack("{s:s}", "action", kills ? "kill" : "suspend"));
			r = kills ? remove_session(m, s, &e) : suspend_session(m, s, &e);
		}
		if (r < 0) {
			log_error("session", "timeout of %s: %s", s->id, e.message);
			s->retry_at = time_monotonic_ms() + TIMEOUT_RETRY_MS;
		}
		session_turn_end(s);
	}
	task_done(task);
}

static void rolling_work(void *context)
{
	struct task *task = context;
	struct session *s = task->s;
	struct error e;
	uint64_t now = time_monotonic_ms();
	uint64_t interval = s->row.snapshot_interval_s * 1000;
	if (session_turn_try(s) == 0) {
		s->snapshot_at = now;
		if (s->state == STATE_RUNNING && s->row.snapshot_interval_s) {
			struct store_snapshot row;
			if (snapshot_session(task->m, s, "rolling", "", &row, &e) < 0) {
				log_warning("session", "rolling snapshot of %s: %s", s->id, e.message);
				if (interval > SNAPSHOT_FAILED_RETRY_MS)
					s->snapshot_at = now - interval + SNAPSHOT_FAILED_RETRY_MS;
			}
		}
		session_turn_end(s);
	} else {
		s->snapshot_at = interval > SNAPSHOT_BUSY_RETRY_MS ? now - interval + SNAPSHOT_BUSY_RETRY_MS : now;
	}
	task_done(task);
}

static void retention_work(void *context)
{
	struct session_manager *m = context;
	retention_run(m, time_realtime_ms());
	template_collect(m);
	atomic_store(&m->scheduler->retention_pending, 0);
}

/* ---- the thread ---- */

static void look_at(struct session_manager *m, struct session *s, uint64_t now, uint64_t real_now)
{
	pthread_mutex_lock(&s->mutex);
	int idle = s->state == STATE_RUNNING && !s->job_pending;
	int expired = idle && s->row.end_at_ms && s->row.end_at_ms <= real_now && s->retry_at <= now;
	int snapshot =
	    idle && !expired && s->row.snapshot_interval_s && now - s->snapshot_at >= s->row.snapshot_interval_s * 1000;
	pthread_mutex_unlock(&s->mutex);
	if (expired)
		task_start(m, s, timeout_work);
	else if (snapshot)
		task_start(m, s, rolling_work);
}

static void tick(struct session_manager *m)
{
	struct scheduler *scheduler = m->scheduler;
	uint64_t now = time_monotonic_ms();
	uint64_t real_now = time_realtime_ms();
	struct session **list = NULL;
	size_t count = 0;
	session_acquire_live(m, &list, &count);
	for (size_t i = 0; i < count; i++) {
		look_at(m, list[i], now, real_now);
		session_release(m, list[i]);
	}
	free(list);
	if (now >= scheduler->doomed_at) {
		scheduler->doomed_at = now + DOOMED_EVERY_MS;
		kill_doomed(m);
	}
	if (now >= scheduler->retention_at) {
		scheduler->retention_at = now + RETENTION_EVERY_MS;
		if (!atomic_exchange(&scheduler->retention_pending, 1) && jobs_add(m->jobs, retention_work, NULL, m) < 0)
			atomic_store(&scheduler->retention_pending, 0);
	}
}

static void vmm_ended(struct session_manager *m, uint64_t key)
{
	struct scheduler *scheduler = m->scheduler;
	char session_id[ID_BYTES] = "";
	uint32_t slot = (uint32_t)key;
	pthread_mutex_lock(&scheduler->mutex);
	struct watch *watch = slot < scheduler->watch_count ? &scheduler->watches[slot] : NULL;
	int known = watch && watch->sandbox && watch->generation == key >> 32;
	if (known)
		memcpy(session_id, watch->session_id, ID_BYTES);
	pthread_mutex_unlock(&scheduler->mutex);
	if (!known)
		return;
	atomic_fetch_add(&m->metrics.lost, 1);
	struct session *s;
	if (!session_id[0]) {
		warm_pool_refresh(m);
	} else if (session_acquire(m, session_id, &s, NULL) == 0) {
		task_start(m, s, ended_work);
		session_release(m, s);
	}
}

static void *scheduler_thread(void *context)
{
	struct session_manager *m = context;
	struct scheduler *scheduler = m->scheduler;
	uint64_t tick_at = 0;
	while (!atomic_load(&scheduler->stopping)) {
		uint64_t now = time_monotonic_ms();
		int wait = now >= tick_at ? 0 : (int)(tick_at - now);
		struct epoll_event events[EVENTS_MAX];
		int n = epoll_wait(scheduler->epoll_fd, events, EVENTS_MAX, wait);
		for (int i = 0; i < n; i++) {
			if (events[i].data.u64 == WAKE_SLOT) {
				uint64_t ignored;
				ssize_t got = read(scheduler->wake_fd, &ignored, sizeof(ignored));
				(void)got;
				tick_at = 0;
			} else {
				vmm_ended(m, events[i].data.u64);
			}
		}
		if (time_monotonic_ms() >= tick_at && !atomic_load(&scheduler->stopping)) {
			tick(m);
			tick_at = time_monotonic_ms() + SCHEDULER_TICK_MS;
		}
	}
	return NULL;
}

int scheduler_prepare(struct session_manager *m, struct error *e)
{
	struct scheduler *scheduler = calloc(1, sizeof(*scheduler));
	if (!scheduler)
		return error_set_errno(e, ENOMEM, "scheduler");
	pthread_mutex_init(&scheduler->mutex, NULL);
	scheduler->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	scheduler->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	struct epoll_event event = {.events = EPOLLIN, .data.u64 = WAKE_SLOT};
	m->scheduler = scheduler;
	if (scheduler->epoll_fd < 0 || scheduler->wake_fd < 0 ||
	    epoll_ctl(scheduler->epoll_fd, EPOLL_CTL_ADD, scheduler->wake_fd, &event) < 0)
		return error_set_errno(e, errno, "scheduler");
	return 0;
}

int scheduler_start(struct session_manager *m, struct error *e)
{
	struct scheduler *scheduler = m->scheduler;
	scheduler->retention_at = time_monotonic_ms() + RETENTION_EVERY_MS / 4;
	int r = pthread_create(&scheduler->thread, NULL, scheduler_thread, m);
	if (r)
		return error_set_errno(e, r, "scheduler");
	scheduler->started = 1;
	return 0;
}

void scheduler_stop(struct session_manager *m)
{
	struct scheduler *scheduler = m->scheduler;
	if (!scheduler || !scheduler->started)
		return;
	atomic_store(&scheduler->stopping, 1);
	scheduler_wake(m);
	pthread_join(scheduler->thread, NULL);
	scheduler->started = 0;
}

void scheduler_free(struct session_manager *m)
{
	struct scheduler *scheduler = m->scheduler;
	if (!scheduler)
		return;
	m->scheduler = NULL;
	while (scheduler->doomed) {
		struct doomed *doomed = scheduler->doomed;
		scheduler->doomed = doomed->next;
		free(doomed);
	}
	if (scheduler->epoll_fd >= 0)
		close(scheduler->epoll_fd);
	if (scheduler->wake_fd >= 0)
		close(scheduler->wake_fd);
	pthread_mutex_destroy(&scheduler->mutex);
	free(scheduler->watches);
	free(scheduler);
}
