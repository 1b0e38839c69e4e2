/* The table of session entries in use, turns, and the few ways in which an entry changes. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/log.h"
#include "session/internal.h"

static unsigned bucket_of(const char *id)
{
	unsigned hash = 2166136261u;
	for (; *id; id++)
		hash = (hash ^ (unsigned char)*id) * 16777619u;
	return hash % SESSION_BUCKETS;
}

static struct session *entry_find(struct session_manager *m, const char *id)
{
	for (struct session *s = m->buckets[bucket_of(id)]; s; s = s->next)
		if (strcmp(s->id, id) == 0 && !s->gone)
			return s;
	return NULL;
}

static void entry_free(struct session *s)
{
	store_session_clear(&s->row);
	free(s->streams);
	pthread_cond_destroy(&s->changed);
	pthread_mutex_destroy(&s->mutex);
	free(s);
}

static enum session_state stable_state(const char *name)
{
	int state = state_from_name(name);
	if (state == STATE_RUNNING || state == STATE_PAUSED || state == STATE_DELETING || state == STATE_CREATING)
		return (enum session_state)state;
	return STATE_SUSPENDED;
}

/* With the manager's mutex held. */
static struct session *entry_add(struct session_manager *m, struct store_session *row, enum session_state state)
{
	struct session *s = calloc(1, sizeof(*s));
	if (!s)
		return NULL;
	pthread_mutex_init(&s->mutex, NULL);
	pthread_cond_init(&s->changed, NULL);
	memcpy(s->id, row->id, sizeof(s->id));
	s->row = *row;
	*row = (struct store_session){0};
	s->state = state;
	s->refs = 1;
	s->snapshot_at = time_monotonic_ms();
	unsigned bucket = bucket_of(s->id);
	s->next = m->buckets[bucket];
	m->buckets[bucket] = s;
	return s;
}

int session_enter(struct session_manager *m, struct store_session *row, enum session_state state, struct session **ret,
                  struct error *e)
{
	pthread_mutex_lock(&m->mutex);
	struct session *s = entry_add(m, row, state);
	pthread_mutex_unlock(&m->mutex);
	if (!s) {
		store_session_clear(row);
		return error_set_errno(e, ENOMEM, "session");
	}
	*ret = s;
	return 0;
}

int session_acquire(struct session_manager *m, const char *id, struct session **ret, struct error *e)
{
	pthread_mutex_lock(&m->mutex);
	struct session *s = entry_find(m, id);
	int r = 0;
	if (s) {
		s->refs++;
	} else {
		/* Loaded under the mutex, so that there is never a second entry of one session. */
		struct store_session row;
		r = store_session_get(m->store, id, &row, e);
		if (r == 0) {
			s = entry_add(m, &row, stable_state(row.state));
			if (!s) {
				store_session_clear(&row);
				r = error_set_errno(e, ENOMEM, "session");
			}
		}
	}
	pthread_mutex_unlock(&m->mutex);
	if (r == 0)
		*ret = s;
	return r;
}

int session_acquire_for(struct session_manager *m, const struct session_caller *who, const char *id,
                        struct session **ret, struct error *e)
{
	/* One text for what does not exist and for what belongs to somebody else. */
	static const char unknown[] = "no session \"%.80s\"";
	struct error local;
	char by_name[ID_BYTES];
	if (!id_is_valid(id, 's')) {
		struct store_session row;
		if (strlen(id) >= STORE_NAME_BYTES || store_session_find(m->store, who->tenant, id, &row, &local) < 0)
			return error_set(e, ERROR_NOT_FOUND, unknown, id);
		memcpy(by_name, row.id, sizeof(by_name));
		store_session_clear(&row);
		id = by_name;
	}
	struct session *s;
	int r = session_acquire(m, id, &s, &local);
	if (r < 0 && local.code != ERROR_NOT_FOUND) {
		if (e)
			*e = local;
		return r;
	}
	if (r < 0)
		return error_set(e, ERROR_NOT_FOUND, unknown, id);
	if (!who->is_admin && strcmp(who->tenant, s->row.tenant) != 0) {
		session_release(m, s);
		return error_set(e, ERROR_NOT_FOUND, unknown, id);
	}
	*ret = s;
	return 0;
}

void session_release(struct session_manager *m, struct session *s)
{
	if (!s)
		return;
	pthread_mutex_lock(&m->mutex);
	s->refs--;
	/* Entries with a sandbox stay: the scheduler works through them. */
	if (s->refs == 0 && !s->sandbox && (!s->open_count || s->gone)) {
		struct session **at = &m->buckets[bucket_of(s->id)];
		while (*at != s)
			at = &(*at)->next;
		*at = s->next;
		pthread_cond_broadcast(&m->idle);
		pthread_mutex_unlock(&m->mutex);
		entry_free(s);
		return;
	}
	pthread_cond_broadcast(&m->idle);
	pthread_mutex_unlock(&m->mutex);
}

int session_acquire_live(struct session_manager *m, struct session ***ret, size_t *ret_count)
{
	struct session **list = NULL;
	size_t count = 0;
	size_t capacity = 0;
	int r = 0;
	pthread_mutex_lock(&m->mutex);
	for (size_t i = 0; i < SESSION_BUCKETS && r == 0; i++) {
		for (struct session *s = m->buckets[i]; s; s = s->next) {
			if (!s->sandbox || s->gone)
				continue;
			if (count == capacity) {
				capacity = capacity ? capacity * 2 : 32;
				struct session **more = realloc(list, capacity * sizeof(*list));
				if (!more) {
					r = -ENOMEM;
					break;
				}
				list = more;
			}
			s->refs++;
			list[count++] = s;
		}
	}
	pthread_mutex_unlock(&m->mutex);
	*ret = list;
	*ret_count = count;
	return r;
}

uint64_t session_take_ticket(struct session *s)
{
	pthread_mutex_lock(&s->mutex);
	uint64_t ticket = s->next_ticket++;
	pthread_mutex_unlock(&s->mutex);
	return ticket;
}

int session_turn_wait(struct session *s, uint64_t ticket, struct error *e)
{
	pthread_mutex_lock(&s->mutex);
	while (s->serving != ticket)
		pthread_cond_wait(&s->changed, &s->mutex);
	int gone = s->gone;
	if (gone) {
		s->serving++;
		pthread_cond_broadcast(&s->changed);
	}
	pthread_mutex_unlock(&s->mutex);
	return gone ? error_set(e, ERROR_NOT_FOUND, "no session \"%s\"", s->id) : 0;
}

int session_turn_begin(struct session *s, struct error *e)
{
	return session_turn_wait(s, session_take_ticket(s), e);
}

int session_turn_try(struct session *s)
{
	int r = -EBUSY;
	pthread_mutex_lock(&s->mutex);
	if (s->serving == s->next_ticket && !s->gone) {
		s->next_ticket++;
		r = 0;
	}
	pthread_mutex_unlock(&s->mutex);
	return r;
}

void session_turn_end(struct session *s)
{
	pthread_mutex_lock(&s->mutex);
	s->serving++;
	pthread_cond_broadcast(&s->changed);
	pthread_mutex_unlock(&s->mutex);
}

void session_set_state(struct session *s, enum session_state state)
{
	pthread_mutex_lock(&s->mutex);
	s->state = state;
	pthread_cond_broadcast(&s->changed);
	pthread_mutex_unlock(&s->mutex);
}

int session_row_for(struct session *s, enum session_state state, struct store_session *ret, struct error *e)
{
	if (store_session_copy(&s->row, ret) < 0)
		return error_set_errno(e, ENOMEM, "session");
	text_copy(ret->state, sizeof(ret->state), state_name(state));
	ret->state_at_ms = time_realtime_ms();
	ret->reason_code[0] = '\0';
	ret->reason[0] = '\0';
	return 0;
}

void session_adopt_row(struct session *s, struct store_session *row)
{
	pthread_mutex_lock(&s->mutex);
	struct store_session old = s->row;
	s->row = *row;
	s->state = stable_state(row->state);
	pthread_cond_broadcast(&s->changed);
	pthread_mutex_unlock(&s->mutex);
	*row = (struct store_session){0};
	store_session_clear(&old);
}

int session_commit_row(struct session_manager *m, struct session *s, struct store_session *row,
                       enum store_durability durability, struct error *e)
{
	int r = store_begin(m->store, durability, e);
	if (r == 0) {
		r = store_session_update(m->store, row, e);
		if (r == 0)
			r = store_commit(m->store, e);
		else
			store_rollback(m->store);
	}
	if (r < 0)
		store_session_clear(row);
	else
		session_adopt_row(s, row);
	return r;
}

int session_check_canceled(struct session *s, struct error *e)
{
	return atomic_load(&s->canceled) ? error_set(e, ERROR_CANCELED, "session %s is being deleted", s->id) : 0;
}

/*
 * The caller owns the descriptors that session_open() gave out and closes them when it likes, so a number may mean
 * something else by now. A duplicate pins what the number stands for; only if that is still the socket with the
 * remembered inode number it is shut down, which whoever polls it sees at once.
 */
void session_cut_streams(struct session *s)
{
	pthread_mutex_lock(&s->mutex);
	for (size_t i = 0; i < s->stream_count; i++) {
		int fd = fcntl(s->streams[i].fd, F_DUPFD_CLOEXEC, 3);
		if (fd < 0)
			continue;
		struct stat st;
		if (fstat(fd, &st) == 0 && S_ISSOCK(st.st_mode) && st.st_ino == s->streams[i].inode)
			shutdown(fd, SHUT_RDWR);
		close(fd);
	}
	s->stream_count = 0;
	pthread_mutex_unlock(&s->mutex);
}

void session_start_timer(struct store_session *row)
{
	row->left_ms = 0;
	row->end_at_ms = row->timeout_s ? time_realtime_ms() + row->timeout_s * 1000 : 0;
}
