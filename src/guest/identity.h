/*
 * Who this guest is: tokens, environment, default user and directory, host name, clock, random state.
 *
 * All of it is set by the host (resume-as, or /init) and read by every thread; values are copied out under one lock.
 */
#ifndef SPACE_GUEST_IDENTITY_H
#define SPACE_GUEST_IDENTITY_H

#include <jansson.h>

#include "base/error.h"

#define IDENTITY_TOKEN_BYTES_MAX 512
#define IDENTITY_ID_BYTES_MAX 128
#define IDENTITY_ENVIRONMENT_ENTRIES_MAX 4096
#define IDENTITY_ENVIRONMENT_BYTES_MAX (1024 * 1024)
#define IDENTITY_ENTROPY_BYTES_MIN 64
#define IDENTITY_ENTROPY_BYTES_MAX 4096
/* A clock that is off by less than this is left alone by resume-as and thaw. */
#define IDENTITY_CLOCK_SLACK_NS 1000000

/* `is_guest`: host name, machine-id, clock and random state of this kernel are ours to set (not so in a test run). */
void identity_begin(const char *control_token, int is_guest);

int identity_has_access_token(void);
/* Constant time; false for NULL or if none is set. */
int identity_is_access_token(const char *token);
int identity_is_control_token(const char *token);
/* NULL or "" clears. */
int identity_set_access_token(const char *token, struct error *e);
int identity_set_control_token(const char *token, struct error *e);

char *identity_default_user(void);    /* free it */
char *identity_default_workdir(void); /* free it; NULL if unset */
int identity_set_defaults(const char *user, const char *workdir, struct error *e);

/* A reference to the environment of all processes (an object of strings that is never changed); json_decref() it. */
json_t *identity_environment(void);
/* 0 if every name and value may stand in a process's environment. */
int identity_check_environment(json_t *environment, struct error *e);
/* Replaces what the client set (takes a copy); the platform's own variables stay. */
int identity_set_environment(json_t *environment, struct error *e);
/* E2B_SANDBOX_ID and the like; NULL leaves one unset. */
int identity_set_ids(const char *session, const char *sandbox, const char *template_id, struct error *e);

int identity_set_hostname(const char *name, struct error *e);
int identity_set_machine_id(const char *hex, struct error *e);
/* Steps CLOCK_REALTIME if it is off by more than slack. */
int identity_set_clock(uint64_t realtime_ns, uint64_t slack_before_ns, uint64_t slack_after_ns, struct error *e);
/* Credits the bytes and makes the kernel's generator draw from them before the next getrandom(). Wipes nothing. */
int identity_add_entropy(const void *data, size_t size, struct error *e);

#endif
