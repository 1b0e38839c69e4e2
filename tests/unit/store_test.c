/* The store on real files: what goes in comes out, leases exclude each other, and what was committed survives. */
#include "store/store.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

static char folder[] = "/tmp/store-test-XXXXXX";
static char path[128];
static struct error e;

static struct store *open_store(void)
{
	struct store *store;
	if (store_open(path, &store, &e) < 0) {
		fprintf(stderr, "%s\n", e.message);
		exit(1);
	}
	return store;
}

static struct store_session session_row(const char *id, const char *tenant, const char *name, uint64_t created)
{
	struct store_session row = {.timeout_s = 30,
	                            .wake_on_use = 1,
	                            .vcpus = 1,
	                            .memory_bytes = 512 * MIB,
	                            .created_at_ms = created,
	                            .labels = strdup("{\"a\":\"b\"}"),
	                            .environment = strdup("{}")};
	CHECK_INT(text_copy(row.id, sizeof(row.id), id), 0);
	CHECK_INT(text_copy(row.tenant, sizeof(row.tenant), tenant), 0);
	CHECK_INT(text_copy(row.name, sizeof(row.name), name), 0);
	CHECK_INT(text_copy(row.state, sizeof(row.state), "running"), 0);
	CHECK_INT(text_copy(row.on_timeout, sizeof(row.on_timeout), "suspend"), 0);
	CHECK_INT(text_copy(row.template_id, sizeof(row.template_id), "t1"), 0);
	return row;
}

static void add_session(struct store *store, const char *id, const char *tenant, const char *name, uint64_t created)
{
	struct store_session row = session_row(id, tenant, name, created);
	CHECK_INT(store_session_insert(store, &row, &e), 0);
	store_session_clear(&row);
}

static void sessions(struct store *store)
{
	add_session(store, "s1", "one", "web", 10);
	add_session(store, "s2", "two", "web", 20); /* names belong to tenants */
	add_session(store, "s3", "one", "", 30);
	add_session(store, "s4", "one", "", 30); /* no name is no name to collide with */
	struct store_session row = session_row("s5", "one", "web", 40);
	CHECK(store_session_insert(store, &row, &e) < 0);
	CHECK_INT(e.code, ERROR_CONFLICT);
	CHECK_STR(e.message, "a session named \"web\" exists already");
	store_session_clear(&row);
	CHECK_INT(store_session_find(store, "two", "web", &row, &e), 0);
	CHECK_STR(row.id, "s2");
	CHECK_STR(row.labels, "{\"a\":\"b\"}");
	CHECK_STR(row.head, "");
	CHECK_INT(row.memory_bytes, 512 * MIB);
	store_session_clear(&row);
	CHECK(store_session_get(store, "s9", &row, &e) < 0);
	CHECK_INT(e.code, ERROR_NOT_FOUND);
}

static int count_row(void *context, const struct store_session *row)
{
	(*(int *)context)++;
	CHECK(row->labels != NULL);
	return 0;
}

static void listing(struct store *store)
{
	int count = 0;
	CHECK_INT(store_session_each(store, NULL, 0, "", count_row, &count, &e), 0);
	CHECK_INT(count, 4);
	count = 0;
	CHECK_INT(store_session_each(store, "one", 0, "", count_row, &count, &e), 0);
	CHECK_INT(count, 3);
	/* Two of the same millisecond: the id parts them, so that no page loses one. */
	count = 0;
	CHECK_INT(store_session_each(store, "one", 30, "s3", count_row, &count, &e), 0);
	CHECK_INT(count, 1);
}

static void fences(struct store *store)
{
	struct store_session row;
	CHECK_INT(store_session_get(store, "s1", &row, &e), 0);
	row.fence = 5;
	CHECK_INT(store_session_update(store, &row, &e), 0);
	row.fence = 4; /* somebody with an older lease */
	CHECK(store_session_update(store, &row, &e) < 0);
	CHECK_INT(e.code, ERROR_CONFLICT);
	store_session_clear(&row);
}

static struct store_sandbox sandbox_row(const char *id, const char *session)
{
	struct store_sandbox row = {.fence = 1};
	CHECK_INT(text_copy(row.id, sizeof(row.id), id), 0);
	CHECK_INT(text_copy(row.session_id, sizeof(row.session_id), session), 0);
	CHECK_INT(text_copy(row.base, sizeof(row.base), "t1"), 0);
	CHECK_INT(text_copy(row.control_token, sizeof(row.control_token), "token"), 0);
	return row;
}

static void leases(struct store *store)
{
	struct store_sandbox row = sandbox_row("b1", "s1");
	CHECK_INT(store_sandbox_insert(store, &row, &e), 0);
	row = sandbox_row("b2", "s1");
	CHECK(store_sandbox_insert(store, &row, &e) < 0);
	CHECK_INT(e.code, ERROR_CONFLICT);
	/* Pooled ones have no session and do not exclude each other. */
	row = sandbox_row("b3", "");
	CHECK_INT(store_sandbox_insert(store, &row, &e), 0);
	row = sandbox_row("b4", "");
	CHECK_INT(store_sandbox_insert(store, &row, &e), 0);
	row = sandbox_row("b4", "s1");
	CHECK(store_sandbox_update(store, &row, &e) < 0);
	CHECK_INT(e.code, ERROR_CONFLICT);
	CHECK_INT(store_sandbox_delete(store, "b1", &e), 0);
	CHECK_INT(store_sandbox_update(store, &row, &e), 0);
	/* No lease of a session that is not there. */
	row = sandbox_row("b5", "s99");
	CHECK(store_sandbox_insert(store, &row, &e) < 0);
}

static void add_snapshot(struct store *store, const char *id, const char *parent, uint64_t created, uint64_t bytes)
{
	struct store_snapshot row = {.created_at_ms = created, .bytes_stored = bytes};
	CHECK_INT(text_copy(row.id, sizeof(row.id), id), 0);
	CHECK_INT(text_copy(row.session_id, sizeof(row.session_id), "s2"), 0);
	CHECK_INT(text_copy(row.parent, sizeof(row.parent), parent), 0);
	CHECK_INT(text_copy(row.kind, sizeof(row.kind), "rolling"), 0);
	CHECK_INT(store_snapshot_insert(store, &row, &e), 0);
}

static void timeline(struct store *store)
{
	struct store_snapshot row;
	uint64_t count;
	uint64_t bytes;
	add_snapshot(store, "n1", "", 1, 100);
	add_snapshot(store, "n2", "n1", 2, 50);
	add_snapshot(store, "n3", "n2", 3, 20);
	add_snapshot(store, "n4", "n2", 4, 30);
	/* The tree stays whole, and what the children go on using is charged to one of them. */
	CHECK_INT(store_snapshot_delete(store, "n2", 40, &e), 0);
	CHECK_INT(store_snapshot_get(store, "n3", &row, &e), 0);
	CHECK_STR(row.parent, "n1");
	CHECK_INT(row.bytes_stored, 60);
	CHECK_INT(store_snapshot_get(store, "n4", &row, &e), 0);
	CHECK_STR(row.parent, "n1");
	CHECK_INT(row.bytes_stored, 30);
	CHECK_INT(store_snapshot_totals(store, &count, &bytes, &e), 0);
	CHECK_INT(count, 3);
	CHECK_INT(bytes, 190);
	/* Rows of a session go with it. */
	CHECK_INT(store_session_delete(store, "s2", &e), 0);
	CHECK_INT(store_snapshot_totals(store, &count, &bytes, &e), 0);
	CHECK_INT(count, 0);
}

static struct store_template template_row(const char *id, const char *digest)
{
	struct store_template row = {.packages = strdup("[]"), .run = strdup("[]")};
	CHECK_INT(text_copy(row.id, sizeof(row.id), id), 0);
	CHECK_INT(text_copy(row.name, sizeof(row.name), "default"), 0);
	CHECK_INT(text_copy(row.tag, sizeof(row.tag), "latest"), 0);
	CHECK_INT(text_copy(row.digest, sizeof(row.digest), digest), 0);
	return row;
}

static void templates(struct store *store)
{
	struct store_template row = template_row("t1", "sha256:1");
	CHECK_INT(store_template_insert(store, &row, &e), 0);
	store_template_clear(&row);
	row = template_row("t2", "sha256:2");
	CHECK_INT(store_template_insert(store, &row, &e), 0);
	store_template_clear(&row);
	static const char *const wanted[][2] = {
	    {"default", "t2"}, {"default:latest", "t2"}, {"t1", "t1"}, {"sha256:1", "t1"}};
	for (size_t i = 0; i < ARRAY_SIZE(wanted); i++) {
		CHECK_INT(store_template_find(store, wanted[i][0], &row, &e), 0);
		CHECK_STR(row.id, wanted[i][1]);
		store_template_clear(&row);
	}
	CHECK(store_template_find(store, "default:v1", &row, &e) < 0);
	CHECK_INT(e.code, ERROR_NOT_FOUND);
	uint64_t count;
	CHECK_INT(store_session_count_on_template(store, "t1", &count, &e), 0);
	CHECK_INT(count, 3);
}

static void undone(struct store *store)
{
	uint64_t before;
	uint64_t after;
	CHECK_INT(store_session_count(store, &before, &e), 0);
	CHECK_INT(store_begin(store, STORE_DURABLE, &e), 0);
	add_session(store, "s8", "one", "", 80);
	store_rollback(store);
	CHECK_INT(store_session_count(store, &after, &e), 0);
	CHECK_INT(after, before);
}

#define WRITERS 4
#define ROUNDS 100
static void *writer(void *context)
{
	struct store *store = context;
	for (int i = 0; i < ROUNDS; i++) {
		struct error local;
		struct store_session row;
		CHECK_INT(store_begin(store, STORE_RELAXED, &local), 0);
		CHECK_INT(store_session_get(store, "s3", &row, &local), 0);
		row.left_ms++;
		CHECK_INT(store_session_update(store, &row, &local), 0);
		store_session_clear(&row);
		CHECK_INT(store_commit(store, &local), 0);
	}
	return NULL;
}

static void threads(struct store *store)
{
	pthread_t list[WRITERS];
	struct store_session row;
	for (size_t i = 0; i < WRITERS; i++)
		CHECK_INT(pthread_create(&list[i], NULL, writer, store), 0);
	for (size_t i = 0; i < WRITERS; i++)
		pthread_join(list[i], NULL);
	CHECK_INT(store_session_get(store, "s3", &row, &e), 0);
	CHECK_INT(row.left_ms, WRITERS * ROUNDS);
	store_session_clear(&row);
}

/* A process that is killed right behind its commits, both kinds, leaves them. */
static void death(void)
{
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		struct store *store = open_store();
		CHECK_INT(store_begin(store, STORE_RELAXED, &e), 0);
		add_session(store, "s11", "one", "", 110);
		CHECK_INT(store_commit(store, &e), 0);
		CHECK_INT(store_begin(store, STORE_DURABLE, &e), 0);
		add_session(store, "s12", "one", "", 120);
		CHECK_INT(store_commit(store, &e), 0);
		CHECK_INT(store_begin(store, STORE_DURABLE, &e), 0);
		add_session(store, "s13", "one", "", 130);
		_exit(0);
	}
	int status;
	CHECK_INT(waitpid(child, &status, 0), child);
	CHECK_INT(status, 0);
	struct store *store = open_store();
	struct store_session row;
	CHECK_INT(store_session_get(store, "s11", &row, &e), 0);
	store_session_clear(&row);
	CHECK_INT(store_session_get(store, "s12", &row, &e), 0);
	store_session_clear(&row);
	CHECK(store_session_get(store, "s13", &row, &e) < 0);
	CHECK_INT(store_check(store, &e), 0);
	store_close(store);
}

static void damage(void)
{
	char other[160];
	struct store *store;
	struct stat st;
	CHECK_INT(text_format(other, sizeof(other), "%s/other.db", folder), 0);
	int fd = open(other, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
	CHECK(fd >= 0);
	char junk[4096];
	memset(junk, 'x', sizeof(junk));
	CHECK(write(fd, junk, sizeof(junk)) == sizeof(junk));
	close(fd);
	CHECK(store_open(other, &store, &e) < 0);
	CHECK_INT(e.code, ERROR_DAMAGED);
	CHECK_INT(unlink(other), 0);
	CHECK_INT(stat(path, &st), 0);
	CHECK_INT(st.st_mode & 077, 0);
}

int main(void)
{
	CHECK(mkdtemp(folder) != NULL);
	CHECK_INT(text_format(path, sizeof(path), "%s/space.db", folder), 0);
	struct store *store = open_store();
	sessions(store);
	listing(store);
	fences(store);
	leases(store);
	timeline(store);
	templates(store);
	undone(store);
	threads(store);
	store_close(store);
	store = open_store();
	CHECK_INT(store_check(store, &e), 0);
	store_close(store);
	death();
	damage();
	static const char *const ends[] = {"", "-wal", "-shm"};
	for (size_t i = 0; i < ARRAY_SIZE(ends); i++) {
		char file[160];
		CHECK_INT(text_format(file, sizeof(file), "%s%s", path, ends[i]), 0);
		unlink(file);
	}
	CHECK_INT(rmdir(folder), 0);
	return 0;
}
