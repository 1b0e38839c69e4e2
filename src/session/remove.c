/* Delete, legal from every state, and needing nothing of the session to be whole. */
#include <errno.h>
#include <string.h>

#include "base/log.h"
#include "session/internal.h"

static int remove_folder(void *context, const struct store_snapshot *row)
{
	struct session_manager *m = context;
	int r = pool_remove(&m->pool, POOL_SNAPSHOTS, row->id);
	if (r < 0)
		log_warning("session", "folder of snapshot %s: %s", row->id, strerror(-r));
	return 0;
}

int remove_session(struct session_manager *m, struct session *s, struct error *e)
{
	struct store_session row;
	struct error local;
	session_set_state(s, STATE_DELETING);
	/* Noted first, so that after a crash in between the rest is done at the next start. On a full disk this may fail;
	 * what follows frees the space for the final transaction. */
	if (session_row_for(s, STATE_DELETING, &row, &local) == 0 &&
	    session_commit_row(m, s, &row, STORE_RELAXED, &local) < 0)
		log_warning("session", "delete of %s: %s", s->id, local.message);
	if (s->sandbox)
		session_drop_sandbox(m, s);
	session_cut_streams(s);
	int r = store_snapshot_each(m->store, s->id, remove_folder, m, e);
	if (r == 0)
		r = store_begin(m->store, STORE_DURABLE, e);
	if (r == 0) {
		r = store_session_delete(m->store, s->id, e);
		if (r == 0)
			r = store_commit(m->store, e);
		else
			store_rollback(m->store);
	}
	if (r < 0)
		return error_prefix(e, "deleting session %s", s->id);
	pthread_mutex_lock(&s->mutex);
	s->gone = 1;
	pthread_mutex_unlock(&s->mutex);
	event_session(m, "session.deleted", &s->row, NULL);
	return 0;
}
