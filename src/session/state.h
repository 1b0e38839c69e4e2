/* The states of a session and what each verb may do in each: the one table. */
#ifndef SPACE_SESSION_STATE_H
#define SPACE_SESSION_STATE_H

#include "session/session.h"

enum session_state {
	STATE_CREATING,
	STATE_RUNNING,
	STATE_PAUSED,
	STATE_SUSPENDING,
	STATE_SUSPENDED,
	STATE_WAKING,
	STATE_DELETING,
	STATE_COUNT
};

enum state_action {
	STATE_DENY,    /* ERROR_CONFLICT, nothing changes */
	STATE_WAIT,    /* transitional: the verb waits for its turn and is looked up again in the state it finds then */
	STATE_NOTHING, /* already so: success without any work */
	STATE_DO
};

struct state_rule {
	enum state_action action;
	enum session_state target; /* for STATE_DO: the state after success */
	const char *hint;          /* for STATE_DENY */
};

const struct state_rule *state_rule(enum session_state state, enum session_verb verb);
const char *state_name(enum session_state state);
int state_from_name(const char *name); /* or -EINVAL */
/* A verb holds the session in this state for the time of its work; it never outlives the verb. */
int state_is_transitional(enum session_state state);
/* ERROR_CONFLICT with the state, the verb and the hint. */
int state_refuse(enum session_state state, enum session_verb verb, struct error *e);

#endif
