#include "session/state.h"

#include <errno.h>
#include <string.h>

#define DO(target)                                                                                                     \
	{                                                                                                                  \
		STATE_DO, STATE_##target, NULL                                                                                 \
	}
#define NOTHING                                                                                                        \
	{                                                                                                                  \
		STATE_NOTHING, STATE_COUNT, NULL                                                                               \
	}
#define WAIT                                                                                                           \
	{                                                                                                                  \
		STATE_WAIT, STATE_COUNT, NULL                                                                                  \
	}
#define DENY(hint)                                                                                                     \
	{                                                                                                                  \
		STATE_DENY, STATE_COUNT, hint                                                                                  \
	}

#define ALL_WAIT                                                                                                       \
	{                                                                                                                  \
		[SESSION_PAUSE] = WAIT, [SESSION_RESUME] = WAIT, [SESSION_SUSPEND] = WAIT, [SESSION_WAKE] = WAIT,              \
		[SESSION_CONNECT] = WAIT, [SESSION_SNAPSHOT] = WAIT, [SESSION_BRANCH] = WAIT, [SESSION_REWIND] = WAIT,         \
		[SESSION_DELETE] = WAIT, [SESSION_UPDATE] = WAIT                                                               \
	}

/* Every verb of a transitional state waits for its turn. `deleting` is met with the turn held only when a former
 * process ended within a delete: then only another delete makes sense. */
static const struct state_rule rules[STATE_COUNT][SESSION_VERB_COUNT] = {
    [STATE_CREATING] = ALL_WAIT,
    [STATE_SUSPENDING] = ALL_WAIT,
    [STATE_WAKING] = ALL_WAIT,
    [STATE_RUNNING] =
        {
            [SESSION_PAUSE] = DO(PAUSED),
            [SESSION_RESUME] = DENY("it runs already"),
            [SESSION_SUSPEND] = DO(SUSPENDED),
            [SESSION_WAKE] = NOTHING,
            [SESSION_CONNECT] = DO(RUNNING),
            [SESSION_SNAPSHOT] = DO(RUNNING),
            [SESSION_BRANCH] = DO(RUNNING),
            [SESSION_REWIND] = DO(RUNNING),
            [SESSION_DELETE] = DO(DELETING),
            [SESSION_UPDATE] = DO(RUNNING),
        },
    [STATE_PAUSED] =
        {
            [SESSION_PAUSE] = NOTHING,
            [SESSION_RESUME] = DO(RUNNING),
            [SESSION_SUSPEND] = DO(SUSPENDED),
            [SESSION_WAKE] = DO(RUNNING),
            [SESSION_CONNECT] = DO(RUNNING),
            [SESSION_SNAPSHOT] = DO(PAUSED),
            [SESSION_BRANCH] = DO(PAUSED),
            [SESSION_REWIND] = DO(RUNNING),
            [SESSION_DELETE] = DO(DELETING),
            [SESSION_UPDATE] = DO(PAUSED),
        },
    [STATE_SUSPENDED] =
        {
            [SESSION_PAUSE] = DENY("it is suspended, which is more than paused"),
            [SESSION_RESUME] = DENY("use wake"),
            [SESSION_SUSPEND] = NOTHING,
            [SESSION_WAKE] = DO(RUNNING),
            [SESSION_CONNECT] = DO(RUNNING),
            [SESSION_SNAPSHOT] = DENY("nothing has changed since its head snapshot"),
            [SESSION_BRANCH] = DO(SUSPENDED),
            [SESSION_REWIND] = DO(SUSPENDED),
            [SESSION_DELETE] = DO(DELETING),
            [SESSION_UPDATE] = DO(SUSPENDED),
        },
    [STATE_DELETING] =
        {
            [SESSION_PAUSE] = DENY("it is being deleted"),
            [SESSION_RESUME] = DENY("it is being deleted"),
            [SESSION_SUSPEND] = DENY("it is being deleted"),
            [SESSION_WAKE] = DENY("it is being deleted"),
            [SESSION_CONNECT] = DENY("it is being deleted"),
            [SESSION_SNAPSHOT] = DENY("it is being deleted"),
            [SESSION_BRANCH] = DENY("it is being deleted"),
            [SESSION_REWIND] = DENY("it is being deleted"),
            [SESSION_DELETE] = DO(DELETING),
            [SESSION_UPDATE] = DENY("it is being deleted"),
        },
};

static const char *const state_names[STATE_COUNT] = {
    [STATE_CREATING] = "creating",     [STATE_RUNNING] = "running",     [STATE_PAUSED] = "paused",
    [STATE_SUSPENDING] = "suspending", [STATE_SUSPENDED] = "suspended", [STATE_WAKING] = "waking",
    [STATE_DELETING] = "deleting",
};

static const char *const verb_names[SESSION_VERB_COUNT] = {
    [SESSION_PAUSE] = "pause",   [SESSION_RESUME] = "resume",   [SESSION_SUSPEND] = "suspend",
    [SESSION_WAKE] = "wake",     [SESSION_CONNECT] = "connect", [SESSION_SNAPSHOT] = "snapshot",
    [SESSION_BRANCH] = "branch", [SESSION_REWIND] = "rewind",   [SESSION_DELETE] = "delete",
    [SESSION_UPDATE] = "update",
};

const struct state_rule *state_rule(enum session_state state, enum session_verb verb)
{
	return &rules[state][verb];
}

const char *state_name(enum session_state state)
{
	return state_names[state];
}

int state_from_name(const char *name)
{
	for (int i = 0; i < STATE_COUNT; i++)
		if (strcmp(state_names[i], name) == 0)
			return i;
	return -EINVAL;
}

int state_is_transitional(enum session_state state)
{
	return state == STATE_CREATING || state == STATE_SUSPENDING || state == STATE_WAKING || state == STATE_DELETING;
}

int state_refuse(enum session_state state, enum session_verb verb, struct error *e)
{
	const char *hint = state_rule(state, verb)->hint;
	return error_set(e, ERROR_CONFLICT, "cannot %s a session that is %s%s%s", session_verb_name(verb),
	                 state_name(state), hint ? ": " : "", hint ? hint : "");
}

const char *session_verb_name(enum session_verb verb)
{
	return (unsigned)verb < SESSION_VERB_COUNT ? verb_names[verb] : "unknown";
}

int session_verb_from_name(const char *name)
{
	for (int i = 0; i < SESSION_VERB_COUNT; i++)
		if (strcmp(verb_names[i], name) == 0)
			return i;
	return -EINVAL;
}
