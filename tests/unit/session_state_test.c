/* The table of states and verbs: complete, and as the interface promises. */
#include "session/state.h"

#include "check.h"

static enum state_action action(enum session_state state, enum session_verb verb)
{
	return state_rule(state, verb)->action;
}

static void every_rule_is_whole(void)
{
	for (int state = 0; state < STATE_COUNT; state++) {
		for (int verb = 0; verb < SESSION_VERB_COUNT; verb++) {
			const struct state_rule *rule = state_rule((enum session_state)state, (enum session_verb)verb);
			if (rule->action == STATE_DO)
				CHECK(rule->target < STATE_COUNT);
			if (rule->action == STATE_DENY)
				CHECK(rule->hint != NULL);
		}
	}
}

static void delete_is_legal_everywhere(void)
{
	for (int state = 0; state < STATE_COUNT; state++) {
		enum state_action a = action((enum session_state)state, SESSION_DELETE);
		CHECK(a == STATE_DO || (a == STATE_WAIT && state_is_transitional((enum session_state)state)));
	}
}

static void transitional_states_make_verbs_wait(void)
{
	static const enum session_state states[] = {STATE_CREATING, STATE_SUSPENDING, STATE_WAKING};
	for (size_t i = 0; i < ARRAY_SIZE(states); i++)
		for (int verb = 0; verb < SESSION_VERB_COUNT; verb++)
			CHECK_INT(action(states[i], (enum session_verb)verb), STATE_WAIT);
}

static void stable_states(void)
{
	/* wake and connect get it running from anywhere. */
	CHECK_INT(action(STATE_RUNNING, SESSION_WAKE), STATE_NOTHING);
	CHECK_INT(action(STATE_PAUSED, SESSION_WAKE), STATE_DO);
	CHECK_INT(action(STATE_SUSPENDED, SESSION_WAKE), STATE_DO);
	CHECK_INT(state_rule(STATE_SUSPENDED, SESSION_CONNECT)->target, STATE_RUNNING);
	/* resume belongs to pause alone. */
	CHECK_INT(action(STATE_RUNNING, SESSION_RESUME), STATE_DENY);
	CHECK_INT(action(STATE_SUSPENDED, SESSION_RESUME), STATE_DENY);
	CHECK_INT(state_rule(STATE_PAUSED, SESSION_RESUME)->target, STATE_RUNNING);
	/* Twice the same is no error and no second snapshot. */
	CHECK_INT(action(STATE_PAUSED, SESSION_PAUSE), STATE_NOTHING);
	CHECK_INT(action(STATE_SUSPENDED, SESSION_SUSPEND), STATE_NOTHING);
	/* A snapshot leaves the state alone. */
	CHECK_INT(state_rule(STATE_RUNNING, SESSION_SNAPSHOT)->target, STATE_RUNNING);
	CHECK_INT(state_rule(STATE_PAUSED, SESSION_SNAPSHOT)->target, STATE_PAUSED);
	/* Nothing but another delete touches what is being deleted. */
	for (int verb = 0; verb < SESSION_VERB_COUNT; verb++)
		CHECK_INT(action(STATE_DELETING, (enum session_verb)verb), verb == SESSION_DELETE ? STATE_DO : STATE_DENY);
}

static void names(void)
{
	for (int state = 0; state < STATE_COUNT; state++)
		CHECK_INT(state_from_name(state_name((enum session_state)state)), state);
	for (int verb = 0; verb < SESSION_VERB_COUNT; verb++)
		CHECK_INT(session_verb_from_name(session_verb_name((enum session_verb)verb)), verb);
	CHECK(state_from_name("hungry") < 0);
	CHECK(session_verb_from_name("") < 0);
	struct error e;
	CHECK_INT(state_refuse(STATE_SUSPENDED, SESSION_RESUME, &e), error_code_errno(ERROR_CONFLICT));
	CHECK_STR(e.message, "cannot resume a session that is suspended: use wake");
}

int main(void)
{
	every_rule_is_whole();
	delete_is_legal_everywhere();
	transitional_states_make_verbs_wait();
	stable_states();
	names();
	return 0;
}
