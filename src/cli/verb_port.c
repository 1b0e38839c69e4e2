#include <inttypes.h>
#include <string.h>

#include "base/text.h"
#include "cli/verbs.h"

static int with_token;

static const struct options_entry entries[] = {
    {0, "token", OPTIONS_FLAG, &with_token, NULL, "with the session's access token, for whoever gets the URL", NULL},
    {0},
};

/* The daemon says where its TCP port is; a client that came over TCP knows an address that works for it already. */
static int find_authority(const struct verb_call *call, char *domain, size_t domain_size, char *port, size_t port_size,
                          struct error *e)
{
	json_t *version;
	int r = api_call(call->api, "GET", "/v1/version", NULL, &version, e);
	if (r < 0)
		return r;
	const char *listen = output_text(version, "listen", output_text(version, "tcp", NULL));
	const char *address = api_is_local(call->api) ? listen : api_url(call->api);
	const char *colon = address ? strrchr(address, ':') : NULL;
	if (text_copy(domain, domain_size, output_text(version, "domain", "localhost")) < 0)
		r = error_set(e, ERROR_INTERNAL, "the server's domain is too long");
	else if (address && strcmp(address, "none") == 0)
		r = error_set(e, ERROR_UNSUPPORTED, "spaced has no TCP address (listen = none)");
	else if (!colon || text_copy(port, port_size, colon + 1) < 0)
		r = error_set(e, ERROR_UNSUPPORTED, "spaced does not say on which TCP port it listens");
	json_decref(version);
	return r;
}

static int run(struct verb_call *call)
{
	struct error e;
	uint64_t guest_port;
	char domain[256];
	char port[16];
	if (text_parse_u64(call->args[1], 65535, &guest_port) < 0 || guest_port == 0) {
		error_set(&e, ERROR_INVALID, "\"%s\" is no TCP port (1 to 65535)", call->args[1]);
		return output_error(&e, NULL, "port");
	}
	json_t *session;
	CLEANUP_FREE char *target = api_session_path(call->args[0], "");
	if (api_call(call->api, "GET", target, NULL, &session, &e) < 0)
		return verb_fail(call, &e, "session", "cannot find %s", call->args[0]);
	if (find_authority(call, domain, sizeof(domain), port, sizeof(port), &e) < 0) {
		json_decref(session);
		return verb_fail(call, &e, NULL, "cannot tell the URL");
	}
	char url[512];
	snprintf(url, sizeof(url), "http://%" PRIu64 "-%s.%s:%s", guest_port, output_text(session, "id", call->args[0]),
	         domain, port);
	const char *token = output_text(session, "access_token", NULL);
	size_t used = strlen(url);
	if (with_token && token)
		snprintf(url + used, sizeof(url) - used, "/?space_token=%s", token);
	json_decref(session);
	if (output.json) {
		json_t *answer = json_pack("{s:s, s:I}", "url", url, "port", (json_int_t)guest_port);
		output_json(answer);
		json_decref(answer);
	} else {
		puts(url);
	}
	return output_finish(0);
}

const struct verb verb_port = {
    .name = "port",
    .group = VERB_COMMANDS,
    .summary = "print the URL of a TCP port in a session",
    .arguments = "ID PORT",
    .description = "Ports are private: a request needs the session's access token (header X-Access-Token,\n"
                   "or --token here) or an API key (header X-API-Key).",
    .examples = "space exec -d web -- python3 -m http.server 8000\ncurl \"$(space port --token web 8000)\"",
    .options = entries,
    .args_min = 2,
    .args_max = 2,
    .run = run,
};
