/*
 * The table of processes that clients started, and the one thread that serves them.
 *
 * That thread ("pump", process_pump.c) reads all output, reaps all children (also orphans that PID 1 inherits) and
 * keeps all deadlines. Client threads start processes, wait for news of a log, write input and send signals.
 *
 * Locks: table lock, then a process's own lock; never two processes' locks at once. A process is freed with its last
 * reference; the table holds one, the pump one while it watches descriptors, and each client thread its own.
 */
#ifndef SPACE_GUEST_PROCESS_H
#define SPACE_GUEST_PROCESS_H

#include <jansson.h>
#include <pthread.h>
#include <sys/types.h>

#include "guest/process_log.h"
#include "guest/request.h"

#define PROCESSES_RUNNING_MAX 2048
/* Ended processes stay findable for this long, unless more than PROCESSES_ENDED_MAX end in that time. */
#define PROCESS_ENDED_KEEP_MS (10 * 60 * 1000)
#define PROCESSES_ENDED_MAX 1024
/* What is kept of the output of all ended processes together; the oldest goes first. */
#define PROCESS_ENDED_OUTPUT_BYTES_MAX (8 * 1024 * 1024)
#define PROCESS_ARGUMENTS_MAX 65536
#define PROCESS_TAG_BYTES_MAX 1024
/* From SIGTERM to SIGKILL when a process runs out of time. */
#define PROCESS_TIMEOUT_GRACE_MS 700
/* A client hears of the timeout at the latest this long after it. */
#define PROCESS_TIMEOUT_ANSWER_MS 950
#define PROCESS_STREAM_OUT 0 /* or the terminal */
#define PROCESS_STREAM_ERR 1

struct process_stream {
	struct process *process;
	int index;
	int fd;       /* -1 once closed */
	int armed;    /* the pump's poller watches it */
	size_t drain; /* bytes the leader had left in the pipe when it ended */
};

struct process {
	struct process *next; /* table, in order of start */
	struct process *previous;
	struct process *ended_next;
	struct process *released_next; /* pump */
	struct process *noted_next;    /* pump */
	int is_noted;
	unsigned references; /* table lock */

	pthread_mutex_t lock;
	volatile pid_t pid; /* 0 before the clone; written by the kernel */
	int is_started;     /* exec succeeded */
	int is_reaped;
	int is_ended; /* reaped and its output is complete */
	int wait_status;
	int is_watched;  /* handed to the pump */
	int is_draining; /* reaped; the leader's last output is being read */
	int timed_out;
	int timeout_done; /* whatever a timeout kills has been killed */
	struct process_log log;
	struct process_stream streams[2];
	int stdin_fd; /* write end of the pipe; -1 if none or closed */
	int stdin_busy;

	/* Fixed after the start. */
	int is_terminal;
	int is_group;
	char *tag;
	json_t *config;
	uint64_t started_realtime_ms;
	uint64_t ended_ms;

	/* Pump only, but for the first deadline. */
	uint64_t deadline_ms; /* monotonic, 0 = none */
	uint64_t kill_ms;
	int is_blocked; /* a reader holds it back */
};

struct process_request {
	const char *program;
	json_t *arguments;   /* array of strings or NULL */
	json_t *environment; /* object of strings or NULL */
	const char *workdir; /* as the client wrote it, NULL or "" = default */
	const char *tag;
	json_t *config; /* for List; a reference is taken */
	const struct guest_user *user;
	int has_stdin;
	int is_terminal;
	unsigned columns;
	unsigned rows;
	int is_group;
	uint64_t timeout_ms;
	int (*is_gone)(void *context);
	void *context;
};

/* Starts the pump. `reap_all`: children nobody knows are ours to reap too. */
int process_begin(struct error *e);

/* Starts a process and attaches `reader` (may be NULL) in front of its first byte. *ret holds a reference. */
int process_start(const struct process_request *request, struct process_log_reader *reader, struct process **ret,
                  int *ret_exec_errno, struct error *e);
void process_ref(struct process *p);
void process_unref(struct process *p);
struct process *process_find_pid(pid_t pid);       /* with a reference, NULL if unknown */
struct process *process_find_tag(const char *tag); /* the newest; running ones first */
/* Running and kept ended ones, in order of start, each with a reference; free() the array. */
struct process **process_list(size_t *ret_count);
unsigned process_count_running(void);
/* Takes an ended process out of the table, so that nobody finds it any more. */
void process_forget(struct process *p);

/* -ESRCH if it has ended (and, with `group`, nothing of its group is left). */
int process_signal(struct process *p, int signal, int group, struct error *e);
int process_resize(struct process *p, unsigned columns, unsigned rows, struct error *e);
/* Writes all bytes to stdin or the terminal; waits for the reader of the pipe, not longer than the client stays. */
int process_write(struct process *p, const void *data, size_t size, int to_terminal, struct request *r,
                  struct error *e);
int process_close_stdin(struct process *p, struct request *r, struct error *e);

/* process_pump.c */
int process_pump_begin(struct error *e);
/* The process was started: watch its output and its deadline. */
void process_pump_add(struct process *p);
/* A reader made room in a log that was full. */
void process_pump_wake(struct process *p);
/* process.c, for the pump: the process that has this number and is not reaped yet, with a reference. */
struct process *process_find_unreaped(pid_t pid);
/* Its output is complete; waking readers is left to the caller. */
void process_ended(struct process *p);

/* pty.c: a terminal of this size; the slave belongs to the user. */
int pty_open(const struct guest_user *user, unsigned columns, unsigned rows, int *ret_master, int *ret_slave,
             struct error *e);
int pty_resize(int master, unsigned columns, unsigned rows);

/* environment.c: argv (with two spare entries in front) and envp for a request. */
struct process_vectors {
	char **argv; /* the allocation starts two entries earlier */
	char **envp;
	char *search; /* points into envp's PATH, or NULL */
	char *storage;
};
int environment_build(const struct process_request *request, struct process_vectors *ret, struct error *e);
void environment_free(struct process_vectors *v);
/* Absolute directory for a request; *ret_optional if it is only a default. */
int environment_workdir(const struct process_request *request, char *to, size_t size, int *ret_optional,
                        struct error *e);

#endif
