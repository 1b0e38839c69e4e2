/* Ways into a running guest for proxied traffic, which wake it if they must. */
#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "session/internal.h"

#define OPEN_ATTEMPTS 4
#define OPEN_CONNECT_MS 10000

/* A guest that is gone when it should resume is woken from its head, as it would be a moment later. */
int session_make_run(struct session_manager *m, struct session *s, struct error *e)
{
	session_notice_end(m, s, 0);
	int r = 0;
	if (s->state == STATE_PAUSED) {
		r = resume_session(m, s, e);
		if (r < 0 && session_notice_end(m, s, SESSION_END_WAIT_MS))
			r = 0;
	}
	return r == 0 && s->state == STATE_SUSPENDED ? wake_session(m, s, e) : r;
}

/* With the turn held: whatever gets it running. */
static int make_it_run(struct session_manager *m, struct session *s, int wake, struct error *e)
{
	session_notice_end(m, s, 0);
	if (s->state == STATE_RUNNING)
		return 0;
	if (s->state == STATE_DELETING)
		return state_refuse(s->state, SESSION_WAKE, e);
	if (!wake || !s->row.wake_on_use)
		return error_set(e, ERROR_CONFLICT, "session %s is %s and is not to be woken by use", s->id,
		                 state_name(s->state));
	return session_make_run(m, s, e);
}

/* The sandbox's id if the session runs. A snapshot in progress does not matter: it stalls the guest for milliseconds.
 */
static int running_sandbox(struct session *s, char sandbox_id[ID_BYTES])
{
	pthread_mutex_lock(&s->mutex);
	int ok = s->state == STATE_RUNNING && s->sandbox && !s->gone;
	if (ok)
		memcpy(sandbox_id, s->sandbox->row.id, ID_BYTES);
	pthread_mutex_unlock(&s->mutex);
	return ok;
}

static void drop_stale(struct session *s)
{
	size_t kept = 0;
	for (size_t i = 0; i < s->stream_count; i++) {
		struct stat st;
		if (fstat(s->streams[i].fd, &st) == 0 && st.st_ino == s->streams[i].inode)
			s->streams[kept++] = s->streams[i];
	}
	s->stream_count = kept;
}

/* Remembers the connection, if the sandbox is still the one that it leads into. */
static int note_stream(struct session *s, const char *sandbox_id, struct session_endpoint *endpoint, struct error *e)
{
	struct stat st;
	if (fstat(endpoint->fd, &st) < 0)
		return error_set_errno(e, errno, "connection into the guest");
	int r = 0;
	pthread_mutex_lock(&s->mutex);
	if (!s->sandbox || strcmp(s->sandbox->row.id, sandbox_id) != 0) {
		r = -EAGAIN;
	} else {
		if (s->stream_count >= 64 && s->stream_count >= s->open_count * 2)
			drop_stale(s);
		if (s->stream_count == s->stream_capacity) {
			size_t capacity = s->stream_capacity ? s->stream_capacity * 2 : 8;
			void *more =
			    s->stream_count < SESSION_STREAMS_MAX ? realloc(s->streams, capacity * sizeof(*s->streams)) : NULL;
			if (more) {
				s->streams = more;
				s->stream_capacity = capacity;
			} else {
				r = error_set(e, ERROR_EXHAUSTED, "session %s has %zu open connections, which is the limit", s->id,
				              s->stream_count);
			}
		}
		if (r == 0) {
			s->streams[s->stream_count].fd = endpoint->fd;
			s->streams[s->stream_count++].inode = st.st_ino;
			s->open_count++;
			memcpy(endpoint->session_id, s->id, sizeof(endpoint->session_id));
			memcpy(endpoint->access_token, s->row.access_token, sizeof(endpoint->access_token));
		}
	}
	pthread_mutex_unlock(&s->mutex);
	return r;
}

int session_open(struct session_manager *m, const struct session_caller *who, const char *id, int wake,
                 struct session_endpoint *ret, struct error *e)
{
	struct session *s;
	int r = session_acquire_for(m, who, id, &s, e);
	if (r < 0)
		return r;
	for (int attempt = 0; attempt < OPEN_ATTEMPTS; attempt++) {
		char sandbox_id[ID_BYTES];
		if (!running_sandbox(s, sandbox_id)) {
			/* A suspend in progress is waited for, then the session is woken again. */
			r = session_turn_begin(s, e);
			if (r < 0)
				break;
			r = make_it_run(m, s, wake, e);
			session_turn_end(s);
			if (r < 0)
				break;
			continue;
		}
		r = guest_connect(m->helper, sandbox_id, OPEN_CONNECT_MS, &ret->fd, e);
		if (r == 0) {
			r = note_stream(s, sandbox_id, ret, e);
			if (r == 0)
				break;
			close(ret->fd);
		}
		/* Was it taken away while we connected, or has its VMM ended? Then the next round waits and wakes; else the
		 * guest is in trouble. */
		if (session_turn_begin(s, NULL) < 0)
			break;
		session_notice_end(m, s, r == -EAGAIN ? 0 : SESSION_END_WAIT_MS);
		session_turn_end(s);
		char now[ID_BYTES];
		if (r != -EAGAIN && running_sandbox(s, now) && strcmp(now, sandbox_id) == 0)
			break;
		r = error_set(e, ERROR_UNAVAILABLE, "session %s changes its state all the time", s->id);
	}
	session_release(m, s);
	return r;
}

void session_close(struct session_manager *m, const char *session_id)
{
	struct session *s;
	struct error ignored;
	if (session_acquire(m, session_id, &s, &ignored) < 0)
		return;
	pthread_mutex_lock(&s->mutex);
	if (s->open_count)
		s->open_count--;
	if (!s->open_count)
		s->stream_count = 0;
	pthread_mutex_unlock(&s->mutex);
	session_release(m, s);
}
