/*
 * The thread that reads all output, reaps all children and keeps all deadlines.
 *
 * End of a process: its leader is reaped; what the leader wrote is in the pipes by then, so exactly the bytes found
 * there are still read ("drain"), then the process has ended, whoever else holds the pipes open. Later output of such
 * background children is read and dropped until they close: they see neither a full pipe nor a broken one. A terminal
 * is hung up when its leader ends.
 *
 * Back-pressure: a stream whose log is full for the sake of a reader leaves the poller; process_pump_wake() brings it
 * back when the reader has moved on, and the pump's clock when the reader was given up.
 *
 * Reaping: PID 1 inherits every orphan. Children are looked at before they are taken (WNOWAIT), so that a number stays
 * reserved until its process is marked; what the table does not know is taken and forgotten.
 */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/log.h"
#include "base/text.h"
#include "guest/process.h"

#define PUMP_EVENTS 64
#define PUMP_TICK_MS 1000
#define PUMP_TIMEOUT_TICK_MS 50
/* A terminal does not tell how much it holds: at most this much is read after its leader's end. */
#define PUMP_TERMINAL_DRAIN_BYTES (256 * 1024)
/*
 * A writer of small pieces would be interrupted by the pump at each of them, at several times the cost of the pieces
 * themselves. When output comes without a pause, the pump rests a little behind each batch and finds the pieces joined:
 * longer while batches are small, shorter when a pipe was found full. First pieces are never delayed.
 */
#define PUMP_REST_US_MIN 250
#define PUMP_REST_US_MAX 15000
#define PUMP_REST_AFTER 4
#define PUMP_SMALL_BYTES 16384
#define PUMP_LARGE_BYTES 49152
#define PUMP_PAUSE_US 30000

static struct {
	int poller;
	int signals;
	int wake;
	atomic_ullong next_due; /* monotonic ms of the next look at deadlines, UINT64_MAX = none */
	pthread_mutex_t lock;
	struct process **woken; /* each with a reference */
	size_t woken_count;
	size_t woken_capacity;
	size_t batch_bytes;       /* output read for the present batch of events */
	struct process *noted;    /* readers to wake behind the batch: data and end of a short process go out together */
	struct process *released; /* references to drop behind the batch of events, which may still point there */
} pump = {.poller = -1, .lock = PTHREAD_MUTEX_INITIALIZER};

static void wake_pump(void)
{
	static const uint64_t one = 1;
	ssize_t ignored = write(pump.wake, &one, sizeof(one));
	(void)ignored;
}

/* Makes the pump look at deadlines at `due` at the latest. */
static void lower_due(uint64_t due, int must_wake)
{
	unsigned long long seen = atomic_load(&pump.next_due);
	while (due < seen) {
		if (atomic_compare_exchange_weak(&pump.next_due, &seen, due)) {
			if (must_wake)
				wake_pump();
			return;
		}
	}
}

/* Process lock held. A watched stream holds a reference to its process. */
static void arm(struct process_stream *s)
{
	struct epoll_event event = {.events = EPOLLIN, .data.ptr = s};
	if (s->fd < 0 || s->armed)
		return;
	if (epoll_ctl(pump.poller, EPOLL_CTL_ADD, s->fd, &event) == 0)
		s->armed = 1;
	else
		log_error("process", "cannot watch output: %s", strerror(errno));
}

static void disarm(struct process_stream *s)
{
	if (!s->armed)
		return;
	epoll_ctl(pump.poller, EPOLL_CTL_DEL, s->fd, NULL);
	s->armed = 0;
}

static void close_stream(struct process_stream *s)
{
	disarm(s);
	if (s->fd >= 0)
		close(s->fd);
	s->fd = -1;
	s->drain = 0;
}

void process_pump_wake(struct process *p)
{
	pthread_mutex_lock(&pump.lock);
	if (pump.woken_count == pump.woken_capacity) {
		size_t capacity = pump.woken_capacity ? pump.woken_capacity * 2 : 16;
		struct process **larger = realloc(pump.woken, capacity * sizeof(*larger));
		if (!larger) {
			/* The tick does what this call would have done, a second later. */
			pthread_mutex_unlock(&pump.lock);
			lower_due(time_monotonic_ms() + PUMP_TICK_MS, 1);
			return;
		}
		pump.woken = larger;
		pump.woken_capacity = capacity;
	}
	process_ref(p);
	pump.woken[pump.woken_count++] = p;
	pthread_mutex_unlock(&pump.lock);
	wake_pump();
}

void process_pump_add(struct process *p)
{
	process_ref(p); /* the pump's own, until all streams are closed */
	pthread_mutex_lock(&p->lock);
	for (size_t i = 0; i < ARRAY_SIZE(p->streams); i++)
		arm(&p->streams[i]);
	p->is_watched = 1;
	int early = p->is_reaped;
	uint64_t deadline = p->deadline_ms;
	pthread_mutex_unlock(&p->lock);
	if (deadline)
		lower_due(deadline, 1);
	/* It ended before its streams were watched: nobody else would finish it. */
	if (early)
		process_pump_wake(p);
}

/* Process lock held. Reads what one stream has; returns 0 if it may have more, -EAGAIN, -ENOBUFS or -EPIPE (closed). */
static int read_stream(struct process *p, struct process_stream *s, size_t max)
{
	ssize_t n = process_log_fill(&p->log, s->fd, s->index, max);
	if (n > 0) {
		pump.batch_bytes += (size_t)n;
		s->drain -= MIN(s->drain, (size_t)n);
		return 0;
	}
	if (n == -EAGAIN || n == -ENOBUFS)
		return (int)n;
	if (n == -ENOMEM) {
		log_warning("process", "no memory for the output of process %d", (int)p->pid);
		return -ENOBUFS;
	}
	/* End of file; on a terminal -EIO says that its other side is closed. */
	close_stream(s);
	return -EPIPE;
}

/* Process lock held. */
static void note(struct process *p)
{
	if (p->is_noted)
		return;
	p->is_noted = 1;
	p->noted_next = pump.noted;
	pump.noted = p;
}

static void block(struct process *p, struct process_stream *s)
{
	disarm(s);
	p->is_blocked = 1;
	lower_due(time_monotonic_ms() + PUMP_TICK_MS, 0);
}

/* Process lock held, leader reaped, not ended: reads the rest. Returns true once the output is complete. */
static int drain(struct process *p)
{
	for (size_t i = 0; i < ARRAY_SIZE(p->streams); i++) {
		struct process_stream *s = &p->streams[i];
		while (s->fd >= 0 && s->drain) {
			int r = read_stream(p, s, s->drain);
			if (r == -EAGAIN)
				s->drain = 0;
			if (r == -ENOBUFS) {
				block(p, s);
				return 0;
			}
		}
	}
	return 1;
}

static void release(struct process *p)
{
	p->released_next = pump.released;
	pump.released = p;
}

/* No lock held: the end of a process whose output is complete. */
static void finish(struct process *p)
{
	process_ended(p);
	pthread_mutex_lock(&p->lock);
	note(p);
	if (p->is_terminal)
		close_stream(&p->streams[PROCESS_STREAM_OUT]);
	int open = 0;
	for (size_t i = 0; i < ARRAY_SIZE(p->streams); i++) {
		arm(&p->streams[i]); /* a blocked one has to be emptied for background children */
		open |= p->streams[i].fd >= 0;
	}
	pthread_mutex_unlock(&p->lock);
	if (!open)
		release(p);
}

/* Process lock held: how much of the output is the leader's. */
static void begin_drain(struct process *p)
{
	p->is_draining = 1;
	for (size_t i = 0; i < ARRAY_SIZE(p->streams); i++) {
		struct process_stream *s = &p->streams[i];
		int left = 0;
		if (s->fd < 0)
			continue;
		if (p->is_terminal)
			left = PUMP_TERMINAL_DRAIN_BYTES;
		else if (ioctl(s->fd, FIONREAD, &left) < 0)
			left = 0;
		s->drain = (size_t)left;
	}
}

/* The leader was reaped, or what held the process back may be gone: goes as far as it can. */
static void advance(struct process *p)
{
	int complete = 0;
	pthread_mutex_lock(&p->lock);
	if (!p->is_ended) {
		p->is_blocked = 0;
		if (p->is_reaped && !p->is_draining)
			begin_drain(p);
		if (p->is_draining)
			complete = drain(p);
		else
			for (size_t i = 0; i < ARRAY_SIZE(p->streams); i++)
				arm(&p->streams[i]);
		note(p);
	}
	pthread_mutex_unlock(&p->lock);
	if (complete)
		finish(p);
}

static void reap(void)
{
	for (;;) {
		siginfo_t info = {0};
		int status = 0;
		int watched = 0;
		if (waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) < 0 || info.si_pid == 0)
			return;
		struct process *p = process_find_unreaped(info.si_pid);
		if (p)
			pthread_mutex_lock(&p->lock);
		pid_t got = waitpid(info.si_pid, &status, WNOHANG);
		if (p) {
			p->is_reaped = 1;
			p->wait_status = status;
			/* If its starter has not handed it over yet, process_pump_add() will see the mark. */
			watched = p->is_watched;
			pthread_mutex_unlock(&p->lock);
			if (watched)
				advance(p);
			process_unref(p);
		}
		if (got <= 0)
			return;
	}
}

/* Background children of an ended process: their output goes nowhere. */
static void discard(struct process_stream *s)
{
	static char waste[PROCESS_LOG_READ_BYTES];
	ssize_t n;
	do
		n = read(s->fd, waste, sizeof(waste));
	while (n < 0 && errno == EINTR);
	if (n == 0 || (n < 0 && errno != EAGAIN))
		close_stream(s);
}

static void on_stream(struct process_stream *s)
{
	struct process *p = s->process;
	pthread_mutex_lock(&p->lock);
	if (s->fd < 0 || !s->armed) {
		pthread_mutex_unlock(&p->lock);
		return;
	}
	int ended = p->is_ended;
	int draining = p->is_draining;
	if (ended) {
		discard(s);
	} else {
		if (read_stream(p, s, PROCESS_LOG_READ_BYTES) == -ENOBUFS)
			block(p, s);
		note(p);
	}
	int open = p->streams[0].fd >= 0 || p->streams[1].fd >= 0;
	pthread_mutex_unlock(&p->lock);
	if (ended && !open)
		release(p);
	else if (!ended && draining)
		advance(p);
}

/* Process lock held. One process's deadlines; returns when to look again. */
static uint64_t check_deadline(struct process *p, uint64_t now)
{
	if (p->deadline_ms && p->is_reaped)
		p->deadline_ms = 0;
	if (p->deadline_ms && now >= p->deadline_ms) {
		p->deadline_ms = 0;
		p->timed_out = 1;
		p->kill_ms = now + PROCESS_TIMEOUT_GRACE_MS;
		kill(p->is_group ? -p->pid : p->pid, SIGTERM);
	}
	if (!p->kill_ms)
		return p->deadline_ms ? p->deadline_ms : UINT64_MAX;
	int gone = p->is_group ? kill(-p->pid, 0) < 0 && errno == ESRCH : p->is_reaped;
	if (!gone && now < p->kill_ms)
		return MIN(now + PUMP_TIMEOUT_TICK_MS, p->kill_ms);
	if (!gone)
		kill(p->is_group ? -p->pid : p->pid, SIGKILL);
	p->kill_ms = 0;
	p->timeout_done = 1;
	note(p);
	return UINT64_MAX;
}

static uint64_t check_process(struct process *p, uint64_t now)
{
	pthread_mutex_lock(&p->lock);
	uint64_t due = check_deadline(p, now);
	int resume = 0;
	if (p->is_blocked) {
		resume = process_log_drop_stalled(&p->log, now) || process_log_room(&p->log);
		due = MIN(due, now + PUMP_TICK_MS);
	}
	pthread_mutex_unlock(&p->lock);
	if (resume)
		advance(p);
	return due;
}

static void check_all(uint64_t now)
{
	size_t count = 0;
	atomic_store(&pump.next_due, UINT64_MAX);
	struct process **list = process_list(&count);
	if (!list) {
		lower_due(now + PUMP_TICK_MS, 0);
		return;
	}
	for (size_t i = 0; i < count; i++) {
		uint64_t due = check_process(list[i], now);
		if (due != UINT64_MAX)
			lower_due(due, 0);
		process_unref(list[i]);
	}
	free(list);
}

static void take_woken(void)
{
	uint64_t ignored;
	ssize_t n = read(pump.wake, &ignored, sizeof(ignored));
	(void)n;
	pthread_mutex_lock(&pump.lock);
	struct process **woken = pump.woken;
	size_t count = pump.woken_count;
	pump.woken = NULL;
	pump.woken_count = pump.woken_capacity = 0;
	pthread_mutex_unlock(&pump.lock);
	for (size_t i = 0; i < count; i++) {
		advance(woken[i]);
		process_unref(woken[i]);
	}
	free(woken);
}

static int poll_timeout(void)
{
	uint64_t due = atomic_load(&pump.next_due);
	if (due == UINT64_MAX)
		return -1;
	uint64_t now = time_monotonic_ms();
	return due <= now ? 0 : (int)MIN(due - now, UINT64_C(3600000));
}

struct rest {
	unsigned streak; /* batches without a pause between them */
	unsigned us;
	uint64_t last_us; /* end of the last batch */
};

static void rest_a_little(struct rest *rest)
{
	if (pump.batch_bytes == 0)
		return;
	uint64_t now = time_monotonic_us();
	rest->streak = now - rest->last_us < PUMP_PAUSE_US ? rest->streak + 1 : 0;
	if (rest->streak < PUMP_REST_AFTER)
		rest->us = 0;
	else if (pump.batch_bytes < PUMP_SMALL_BYTES)
		rest->us = MIN(MAX(rest->us * 2, 2 * PUMP_REST_US_MIN), PUMP_REST_US_MAX);
	else if (pump.batch_bytes >= PUMP_LARGE_BYTES)
		rest->us /= 2;
	if (rest->us >= PUMP_REST_US_MIN) {
		usleep(rest->us);
		now = time_monotonic_us();
	}
	rest->last_us = now;
	pump.batch_bytes = 0;
}

static void *pump_main(void *unused)
{
	struct epoll_event events[PUMP_EVENTS];
	struct rest rest = {0};
	for (;;) {
		int n = epoll_wait(pump.poller, events, PUMP_EVENTS, poll_timeout());
		int must_reap = 0;
		for (int i = 0; i < n; i++) {
			if (events[i].data.ptr == &pump.signals)
				must_reap = 1;
			else if (events[i].data.ptr == &pump.wake)
				take_woken();
			else
				on_stream(events[i].data.ptr);
		}
		if (must_reap) {
			struct signalfd_siginfo info[8];
			ssize_t ignored = read(pump.signals, info, sizeof(info));
			(void)ignored;
			reap();
		}
		uint64_t due = atomic_load(&pump.next_due);
		if (due != UINT64_MAX) {
			uint64_t now = time_monotonic_ms();
			if (now >= due)
				check_all(now);
		}
		while (pump.noted) {
			struct process *p = pump.noted;
			pthread_mutex_lock(&p->lock);
			pump.noted = p->noted_next;
			p->is_noted = 0;
			process_log_notify(&p->log);
			pthread_mutex_unlock(&p->lock);
		}
		while (pump.released) {
			struct process *p = pump.released;
			pump.released = p->released_next;
			process_unref(p);
		}
		rest_a_little(&rest);
	}
	return NULL;
}

int process_pump_begin(struct error *e)
{
	sigset_t set;
	pthread_t thread;
	sigemptyset(&set);
	sigaddset(&set, SIGCHLD);
	atomic_store(&pump.next_due, UINT64_MAX);
	pump.poller = epoll_create1(EPOLL_CLOEXEC);
	pump.signals = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
	pump.wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (pump.poller < 0 || pump.signals < 0 || pump.wake < 0)
		return error_set_errno(e, errno, "cannot make the poller");
	struct epoll_event on_signal = {.events = EPOLLIN, .data.ptr = &pump.signals};
	struct epoll_event on_wake = {.events = EPOLLIN, .data.ptr = &pump.wake};
	if (epoll_ctl(pump.poller, EPOLL_CTL_ADD, pump.signals, &on_signal) < 0 ||
	    epoll_ctl(pump.poller, EPOLL_CTL_ADD, pump.wake, &on_wake) < 0)
		return error_set_errno(e, errno, "cannot fill the poller");
	int r = pthread_create(&thread, NULL, pump_main, NULL);
	return r ? error_set_errno(e, r, "cannot start the process thread") : 0;
}
