#include "api/worker.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "api/api.h"
#include "base/log.h"
#include "base/text.h"

/* Time that answers in progress get to be completed once the daemon was told to stop. */
#define WORKER_STOP_MS 5000
#define WORKER_SOCKET_MODE 0660

struct worker {
	uv_loop_t loop;
	uv_signal_t signals[2];
	uv_timer_t deadline;
	struct api *api;
	int stopping;
};

/* Every connection and every proxied one is a descriptor: take what the hard limit allows. */
static void raise_descriptor_limit(void)
{
	struct rlimit limit;
	if (getrlimit(RLIMIT_NOFILE, &limit) < 0)
		return;
	limit.rlim_cur = limit.rlim_max;
	if (setrlimit(RLIMIT_NOFILE, &limit) < 0)
		log_warning("spaced", "open files stay limited: %s", strerror(errno));
}

static int listen_tcp(struct api *api, const char *address, struct error *e)
{
	(void)text_copy(api->listen, sizeof(api->listen), "none");
	if (!strcmp(address, "none"))
		return 0;
	char host[CONFIG_NAME_BYTES];
	if (text_copy(host, sizeof(host), address) < 0)
		return error_set(e, ERROR_INVALID, "listen: \"%s\" is too long", address);
	char *colon = strrchr(host, ':');
	uint64_t port;
	if (!colon || text_parse_u64(colon + 1, 65535, &port) < 0)
		return error_set(e, ERROR_INVALID, "listen: \"%s\" is not ADDRESS:PORT", address);
	*colon = '\0';
	char *from = host;
	size_t size = strlen(host);
	if (size > 1 && host[0] == '[' && host[size - 1] == ']') {
		host[size - 1] = '\0';
		from++;
	}
	unsigned used = 0;
	int r = http_server_listen_tcp(api->server, from, (unsigned)port, &used, e);
	if (r < 0)
		return r;
	(void)text_format(api->listen, sizeof(api->listen), strchr(from, ':') ? "[%s]:%u" : "%s:%u", from, used);
	log_info("spaced", "listens on http://%s", api->listen);
	return 0;
}

static void on_deadline(uv_timer_t *timer)
{
	struct worker *w = timer->data;
	log_warning("spaced", "cutting requests that did not end within %d ms", WORKER_STOP_MS);
	api_abort(w->api);
}

static void on_signal(uv_signal_t *signal, int number)
{
	struct worker *w = signal->data;
	if (w->stopping) {
		api_abort(w->api);
		return;
	}
	w->stopping = 1;
	log_info("spaced", "stops on %s; sandboxes go on", strsignal(number));
	api_stop(w->api);
	uv_timer_start(&w->deadline, on_deadline, WORKER_STOP_MS, 0);
	uv_unref((uv_handle_t *)&w->deadline);
}

static int start_loop(struct worker *w, struct error *e)
{
	static const int numbers[] = {SIGTERM, SIGINT};
	int r = uv_loop_init(&w->loop);
	if (r < 0)
		return error_set(e, ERROR_INTERNAL, "loop: %s", uv_strerror(r));
	uv_timer_init(&w->loop, &w->deadline);
	w->deadline.data = w;
	for (size_t i = 0; i < ARRAY_SIZE(numbers); i++) {
		uv_signal_init(&w->loop, &w->signals[i]);
		w->signals[i].data = w;
		uv_signal_start(&w->signals[i], on_signal, numbers[i]);
		uv_unref((uv_handle_t *)&w->signals[i]);
	}
	return 0;
}

static int start_manager(const struct config *config, struct session_manager **ret, struct error *e)
{
	char helper[CONFIG_PATH_BYTES + 32];
	config_helper_socket(config, helper, sizeof(helper));
	struct session_config session = {
	    .data_dir = config->data_dir,
	    .runtime_dir = config->runtime_dir,
	    .helper_socket = helper,
	    .pool_size = (unsigned)config->pool_size,
	    .spares = (unsigned)config->spares,
	    .snapshot_interval_s = (unsigned)config->snapshot_interval_s,
	    .snapshot_budget_bytes = config->snapshot_budget_bytes,
	    .default_timeout_s = config->default_timeout_s,
	    .sessions_max = (unsigned)config->sessions_max,
	    .sandboxes_max = (unsigned)config->sandboxes_max,
	    .agent_path = config->agent_path,
	};
	return session_manager_new(&session, ret, e);
}

static void close_handle(uv_handle_t *handle, void *context)
{
	if (!uv_is_closing(handle))
		uv_close(handle, NULL);
}

static int serve(struct worker *w, const struct config *config, struct session_manager *manager, struct error *e)
{
	int r = api_new(&w->loop, manager, config->domain, &w->api, e);
	if (r == 0)
		r = http_server_listen_unix(w->api->server, config->socket, WORKER_SOCKET_MODE, e);
	if (r == 0)
		r = listen_tcp(w->api, config->listen, e);
	if (r == 0) {
		log_info("spaced", "version %s, data in %s, local socket %s", SPACE_VERSION, config->data_dir, config->socket);
		uv_run(&w->loop, UV_RUN_DEFAULT);
		unlink(config->socket);
	}
	/* First the manager: its threads publish events until they end. */
	session_manager_free(manager);
	api_free(w->api);
	return r;
}

int worker_main(const struct config *config)
{
	struct error e;
	struct worker w = {0};
	struct session_manager *manager = NULL;
	signal(SIGPIPE, SIG_IGN);
	raise_descriptor_limit();
	int r = work_set_threads();
	if (r < 0)
		error_set_errno(&e, r, "environment");
	if (r == 0)
		r = start_loop(&w, &e);
	if (r < 0) {
		log_error("spaced", "%s", e.message);
		return 1;
	}
	r = start_manager(config, &manager, &e);
	if (r == 0)
		r = serve(&w, config, manager, &e);
	uv_walk(&w.loop, close_handle, NULL);
	uv_run(&w.loop, UV_RUN_DEFAULT);
	uv_loop_close(&w.loop);
	if (r < 0)
		log_error("spaced", "%s", e.message);
	return r < 0 ? 1 : 0;
}
