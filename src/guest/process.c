#include "guest/process.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/fsuid.h>
#include <unistd.h>

#include "base/text.h"
#include "guest/cgroup.h"
#include "guest/spawn.h"

/* A kept ended process's description is cut to its program above this size. */
#define CONFIG_KEEP_BYTES_MAX 4096
#define INPUT_POLL_MS 1000

static struct {
	pthread_mutex_t lock;
	struct process *first;
	struct process *last;
	unsigned running;
	unsigned ended;
	size_t ended_output;
} table = {.lock = PTHREAD_MUTEX_INITIALIZER};

int process_begin(struct error *e)
{
	return process_pump_begin(e);
}

static void process_free(struct process *p)
{
	for (size_t i = 0; i < ARRAY_SIZE(p->streams); i++)
		if (p->streams[i].fd >= 0)
			close(p->streams[i].fd);
	if (p->stdin_fd >= 0)
		close(p->stdin_fd);
	process_log_free(&p->log);
	pthread_mutex_destroy(&p->lock);
	json_decref(p->config);
	free(p->tag);
	free(p);
}

void process_ref(struct process *p)
{
	pthread_mutex_lock(&table.lock);
	p->references++;
	pthread_mutex_unlock(&table.lock);
}

void process_unref(struct process *p)
{
	if (!p)
		return;
	pthread_mutex_lock(&table.lock);
	int last = --p->references == 0;
	pthread_mutex_unlock(&table.lock);
	if (last)
		process_free(p);
}

/* Table lock held. The caller takes over the table's reference. */
static void unlink_process(struct process *p)
{
	if (p->previous)
		p->previous->next = p->next;
	else
		table.first = p->next;
	if (p->next)
		p->next->previous = p->previous;
	else
		table.last = p->previous;
	p->next = p->previous = NULL;
	if (p->is_ended) {
		table.ended--;
		table.ended_output -= p->log.capacity;
	} else {
		table.running--;
	}
}

/* Table lock held: forgets ended processes whose number or tag a new one takes, so that no late reader is given the
 * predecessor's result. Frees into *ret_free. */
static void forget_namesakes(const struct process *fresh, struct process **ret_free)
{
	struct process *next;
	for (struct process *q = table.first; q; q = next) {
		next = q->next;
		if (q == fresh || !q->is_ended)
			continue;
		if (q->pid != fresh->pid && !(q->tag && fresh->tag && strcmp(q->tag, fresh->tag) == 0))
			continue;
		unlink_process(q);
		q->ended_next = *ret_free;
		*ret_free = q;
	}
}

/* Table lock held: applies the limits on what is kept of ended processes, oldest first. */
static void trim_ended(uint64_t now, struct process **ret_free)
{
	struct process *next;
	for (struct process *q = table.first; q; q = next) {
		next = q->next;
		if (!q->is_ended)
			continue;
		if (table.ended > PROCESSES_ENDED_MAX || now - q->ended_ms > PROCESS_ENDED_KEEP_MS) {
			unlink_process(q);
			q->ended_next = *ret_free;
			*ret_free = q;
		} else if (table.ended_output > PROCESS_ENDED_OUTPUT_BYTES_MAX && q->log.capacity) {
			pthread_mutex_lock(&q->lock);
			/* A reader that is still at it keeps its bytes. */
			if (!q->log.readers)
				table.ended_output -= process_log_discard(&q->log);
			pthread_mutex_unlock(&q->lock);
		} else if (table.ended_output <= PROCESS_ENDED_OUTPUT_BYTES_MAX) {
			break;
		}
	}
}

static void free_list(struct process *p)
{
	while (p) {
		struct process *next = p->ended_next;
		process_unref(p);
		p = next;
	}
}

static void shrink_config(struct process *p)
{
	size_t size = json_dumpb(p->config, NULL, 0, JSON_COMPACT);
	if (size <= CONFIG_KEEP_BYTES_MAX)
		return;
	json_t *small = json_pack("{s:O?}", "cmd", json_object_get(p->config, "cmd"));
	if (!small)
		return;
	json_decref(p->config);
	p->config = small;
}

void process_ended(struct process *p)
{
	struct process *gone = NULL;
	uint64_t now = time_monotonic_ms();
	pthread_mutex_lock(&table.lock);
	pthread_mutex_lock(&p->lock);
	p->is_ended = 1;
	p->ended_ms = now;
	shrink_config(p);
	process_log_finish(&p->log);
	if (p->stdin_fd >= 0 && !p->stdin_busy) {
		close(p->stdin_fd);
		p->stdin_fd = -1;
	}
	pthread_mutex_unlock(&p->lock);
	table.running--;
	table.ended++;
	table.ended_output += p->log.capacity;
	trim_ended(now, &gone);
	pthread_mutex_unlock(&table.lock);
	free_list(gone);
}

/* From the newest on. Numbers are unique among started processes (forget_namesakes()), tags among ended ones. */
static struct process *find(pid_t pid, const char *tag, int unreaped_only)
{
	struct process *found = NULL;
	pthread_mutex_lock(&table.lock);
	for (struct process *q = table.last; q; q = q->previous) {
		if (unreaped_only ? q->pid != pid || q->is_reaped
		                  : !q->is_started || (tag ? !q->tag || strcmp(q->tag, tag) != 0 : q->pid != pid))
			continue;
		if (!found || !q->is_ended)
			found = q;
		if (!tag || !found->is_ended)
			break;
	}
	if (found)
		found->references++;
	pthread_mutex_unlock(&table.lock);
	return found;
}

struct process *process_find_pid(pid_t pid)
{
	return pid > 0 ? find(pid, NULL, 0) : NULL;
}

struct process *process_find_tag(const char *tag)
{
	return find(0, tag, 0);
}

struct process *process_find_unreaped(pid_t pid)
{
	return find(pid, NULL, 1);
}

struct process **process_list(size_t *ret_count)
{
	size_t count = 0;
	pthread_mutex_lock(&table.lock);
	struct process **list = calloc((size_t)table.running + table.ended + 1, sizeof(*list));
	for (struct process *q = table.first; list && q; q = q->next) {
		if (!q->is_started)
			continue;
		q->references++;
		list[count++] = q;
	}
	pthread_mutex_unlock(&table.lock);
	*ret_count = count;
	return list;
}

void process_forget(struct process *p)
{
	pthread_mutex_lock(&table.lock);
	int listed = p->is_ended && (p->previous || p->next || table.first == p);
	if (listed)
		unlink_process(p);
	pthread_mutex_unlock(&table.lock);
	if (listed)
		process_unref(p);
}

unsigned process_count_running(void)
{
	pthread_mutex_lock(&table.lock);
	unsigned running = table.running;
	pthread_mutex_unlock(&table.lock);
	return running;
}

/* Pipes belong to the user, so that its programs can open /dev/stdout and the like by name. */
static int open_pipes(struct process *p, const struct process_request *request, int child[3], struct error *e)
{
	int pair[2];
	int foreign = geteuid() == 0 && request->user->uid != 0;
	int r = 0;
	if (foreign)
		setfsuid(request->user->uid);
	if (request->has_stdin) {
		r = pipe2(pair, O_CLOEXEC) < 0 ? -errno : 0;
		if (r == 0) {
			child[0] = pair[0];
			p->stdin_fd = pair[1];
		}
	} else {
		child[0] = open("/dev/null", O_RDONLY | O_CLOEXEC);
		r = child[0] < 0 ? -errno : 0;
	}
	for (int i = 0; i < 2 && r == 0; i++) {
		r = pipe2(pair, O_CLOEXEC) < 0 ? -errno : 0;
		if (r == 0) {
			p->streams[i].fd = pair[0];
			child[1 + i] = pair[1];
		}
	}
	if (foreign)
		setfsuid(0);
	/* Only our ends are non-blocking: the flag lives in the open file, which is not shared between the ends. */
	if (r == 0 && p->stdin_fd >= 0 && fcntl(p->stdin_fd, F_SETFL, O_WRONLY | O_NONBLOCK) < 0)
		r = -errno;
	for (int i = 0; i < 2 && r == 0; i++)
		if (fcntl(p->streams[i].fd, F_SETFL, O_RDONLY | O_NONBLOCK) < 0)
			r = -errno;
	return r < 0 ? error_set_errno(e, r, "cannot make pipes") : 0;
}

static int open_terminal(struct process *p, const struct process_request *request, int child[3], struct error *e)
{
	int master;
	int slave;
	int r = pty_open(request->user, request->columns, request->rows, &master, &slave, e);
	if (r < 0)
		return r;
	p->streams[PROCESS_STREAM_OUT].fd = master;
	child[0] = slave;
	return 0;
}

static struct process *create(const struct process_request *request)
{
	struct process *p = calloc(1, sizeof(*p));
	if (!p)
		return NULL;
	pthread_mutex_init(&p->lock, NULL);
	p->references = 2; /* table and caller */
	p->stdin_fd = -1;
	for (int i = 0; i < 2; i++)
		p->streams[i] = (struct process_stream){.process = p, .index = i, .fd = -1};
	p->is_terminal = request->is_terminal;
	p->is_group = request->is_group;
	p->config = json_incref(request->config);
	if (request->tag && !(p->tag = strdup(request->tag))) {
		process_free(p);
		return NULL;
	}
	return p;
}

static int enlist(struct process *p, struct error *e)
{
	pthread_mutex_lock(&table.lock);
	int full = table.running >= PROCESSES_RUNNING_MAX;
	if (!full) {
		p->previous = table.last;
		if (table.last)
			table.last->next = p;
		else
			table.first = p;
		table.last = p;
		table.running++;
	}
	pthread_mutex_unlock(&table.lock);
	return full ? error_set(e, ERROR_EXHAUSTED, "%d processes are running already", PROCESSES_RUNNING_MAX) : 0;
}

/* Between the gate's two sides: nothing here may wait for anything but the child's exec. */
static int launch(struct process *p, const struct process_request *request, const struct process_vectors *v,
                  const int child[3], int *ret_exec_errno, struct error *e)
{
	char workdir[PATH_MAX];
	struct spawn s = {
	    .program = request->program,
	    .argv = v->argv,
	    .envp = v->envp,
	    .search = v->search,
	    .workdir = workdir,
	    .user = request->user,
	    .is_terminal = request->is_terminal,
	};
	for (int i = 0; i < 3; i++)
		s.fds[i] = request->is_terminal ? child[0] : child[i];
	int r = environment_workdir(request, workdir, sizeof(workdir), &s.workdir_optional, e);
	if (r < 0)
		return r;
	if (cgroup_gate_enter(request->is_gone, request->context) < 0)
		return error_set(e, ERROR_CANCELED, "the client left while the session was frozen");
	r = spawn_start(&s, &p->pid, ret_exec_errno, e);
	cgroup_gate_leave();
	return r;
}

static void started(struct process *p, const struct process_request *request)
{
	struct process *gone = NULL;
	p->started_realtime_ms = time_realtime_ms();
	if (request->timeout_ms)
		p->deadline_ms = time_monotonic_ms() + request->timeout_ms;
	pthread_mutex_lock(&table.lock);
	p->is_started = 1;
	forget_namesakes(p, &gone);
	pthread_mutex_unlock(&table.lock);
	free_list(gone);
	process_pump_add(p);
}

int process_start(const struct process_request *request, struct process_log_reader *reader, struct process **ret,
                  int *ret_exec_errno, struct error *e)
{
	int child[3] = {-1, -1, -1};
	struct process_vectors v = {0};
	*ret_exec_errno = 0;
	struct process *p = create(request);
	if (!p)
		return error_set(e, ERROR_EXHAUSTED, "out of memory");
	int r = enlist(p, e);
	if (r < 0) {
		process_free(p);
		return r;
	}
	r = environment_build(request, &v, e);
	if (r == 0)
		r = request->is_terminal ? open_terminal(p, request, child, e) : open_pipes(p, request, child, e);
	if (r == 0)
		r = launch(p, request, &v, child, ret_exec_errno, e);
	for (int i = 0; i < 3; i++)
		if (child[i] >= 0)
			close(child[i]);
	environment_free(&v);
	if (r < 0) {
		/* Its zombie, if there is one, is nobody's any more and goes with the orphans. */
		pthread_mutex_lock(&table.lock);
		unlink_process(p);
		pthread_mutex_unlock(&table.lock);
		process_unref(p);
		process_unref(p);
		return r;
	}
	if (reader)
		process_log_attach(&p->log, reader, 0);
	started(p, request);
	*ret = p;
	return 0;
}

int process_signal(struct process *p, int signal, int group, struct error *e)
{
	int r = -ESRCH;
	pthread_mutex_lock(&p->lock);
	/* A number that is reaped may belong to somebody else by now; a group's stays taken while it has members. */
	if (!p->is_reaped || group)
		r = kill(group ? -p->pid : p->pid, signal) < 0 ? -errno : 0;
	pthread_mutex_unlock(&p->lock);
	if (r == -ESRCH)
		return error_set(e, ERROR_NOT_FOUND, "process with pid %d not found: it has ended", (int)p->pid);
	return r < 0 ? error_set_errno(e, r, "cannot signal process %d", (int)p->pid) : 0;
}

int process_resize(struct process *p, unsigned columns, unsigned rows, struct error *e)
{
	if (!p->is_terminal)
		return error_set(e, ERROR_CONFLICT, "process %d has no terminal", (int)p->pid);
	pthread_mutex_lock(&p->lock);
	int fd = p->streams[PROCESS_STREAM_OUT].fd;
	int r = fd < 0 ? -ESRCH : pty_resize(fd, columns, rows);
	pthread_mutex_unlock(&p->lock);
	return r < 0 ? error_set_errno(e, r, "cannot resize the terminal of process %d", (int)p->pid) : 0;
}

static int input_fd(const struct process *p, int to_terminal)
{
	return to_terminal ? p->streams[PROCESS_STREAM_OUT].fd : p->stdin_fd;
}

/* Waits until input can be written again; a client that has left is not waited for. */
static int wait_for_room(int fd, struct request *r)
{
	struct pollfd p[2] = {{.fd = fd, .events = POLLOUT}, {.fd = r ? request_fd(r) : -1, .events = POLLRDHUP}};
	poll(p, 2, INPUT_POLL_MS);
	return r && (p[1].revents & (POLLRDHUP | POLLHUP | POLLERR)) ? -ECANCELED : 0;
}

/* Takes the right to write; others wait, so that bytes of two calls do not mix and a close comes behind them. */
static int take_input(struct process *p, struct request *r, struct error *e)
{
	pthread_mutex_lock(&p->lock);
	while (p->stdin_busy) {
		pthread_mutex_unlock(&p->lock);
		struct pollfd gone = {.fd = r ? request_fd(r) : -1, .events = POLLRDHUP};
		poll(&gone, 1, 5);
		if (r && gone.revents & (POLLRDHUP | POLLHUP | POLLERR))
			return error_set(e, ERROR_CANCELED, "the client left");
		pthread_mutex_lock(&p->lock);
	}
	p->stdin_busy = 1;
	pthread_mutex_unlock(&p->lock);
	return 0;
}

static void leave_input(struct process *p)
{
	pthread_mutex_lock(&p->lock);
	p->stdin_busy = 0;
	if (p->is_ended && p->stdin_fd >= 0) {
		close(p->stdin_fd);
		p->stdin_fd = -1;
	}
	pthread_mutex_unlock(&p->lock);
}

static int write_input(struct process *p, const char *data, size_t size, int to_terminal, struct request *r,
                       struct error *e)
{
	for (size_t done = 0; done < size;) {
		pthread_mutex_lock(&p->lock);
		int fd = input_fd(p, to_terminal);
		int ended = p->is_reaped;
		ssize_t n = fd < 0 ? -EBADF : write(fd, data + done, size - done);
		int x = fd < 0 ? EBADF : n < 0 ? errno : 0;
		pthread_mutex_unlock(&p->lock);
		if (n >= 0) {
			done += (size_t)n;
			continue;
		}
		if (x == EINTR)
			continue;
		if (ended)
			return error_set(e, ERROR_NOT_FOUND, "process with pid %d not found: it has ended", (int)p->pid);
		if (x == EPIPE || x == EBADF)
			return error_set(e, ERROR_CONFLICT, "stdin of process %d is closed", (int)p->pid);
		if (x != EAGAIN)
			return error_set_errno(e, x, "cannot write to process %d", (int)p->pid);
		if (wait_for_room(fd, r) < 0)
			return error_set(e, ERROR_CANCELED, "the client left with %zu bytes of input undelivered", size - done);
	}
	return 0;
}

int process_write(struct process *p, const void *data, size_t size, int to_terminal, struct request *r, struct error *e)
{
	if (to_terminal != p->is_terminal)
		return error_set(e, ERROR_CONFLICT,
		                 p->is_terminal ? "process %d has a terminal: send its input as pty"
		                                : "process %d has no terminal: send its input as stdin",
		                 (int)p->pid);
	int x = take_input(p, r, e);
	if (x < 0)
		return x;
	x = write_input(p, data, size, to_terminal, r, e);
	leave_input(p);
	return x;
}

int process_close_stdin(struct process *p, struct request *r, struct error *e)
{
	if (p->is_terminal)
		return error_set(e, ERROR_CONFLICT, "process %d has a terminal: send Ctrl+D (0x04) instead", (int)p->pid);
	int x = take_input(p, r, e);
	if (x < 0)
		return x;
	pthread_mutex_lock(&p->lock);
	if (p->stdin_fd >= 0)
		close(p->stdin_fd);
	p->stdin_fd = -1;
	pthread_mutex_unlock(&p->lock);
	leave_input(p);
	return 0;
}
