/* space: the command-line client. Finds the verb, parses its words, runs it; everything else is in the verbs' files. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "base/text.h"
#include "cli/verb.h"

static int help_wanted;
static int version_wanted;
static const char *socket_path;
static const char *server_url;

const struct options_entry verb_global_options[] = {
    {0, "json", OPTIONS_FLAG, &output.json, NULL, "machine-readable output", NULL},
    {0, "socket", OPTIONS_STRING, &socket_path, "PATH", "talk to spaced on this unix socket", NULL},
    {0, "url", OPTIONS_STRING, &server_url, "URL", "talk to spaced at http://HOST:PORT", NULL},
    {'h', "help", OPTIONS_FLAG, &help_wanted, NULL, "show this text", NULL},
    {0},
};

static const struct options_entry main_options[] = {
    {'V', "version", OPTIONS_FLAG, &version_wanted, NULL, "show the version", NULL},
    {0},
};

static int usage_error(const struct verb *verb, const struct error *e)
{
	char hint[128];
	snprintf(hint, sizeof(hint), "space help%s%s", verb ? " " : "", verb ? verb->name : "");
	return output_error(e, hint, "%s", verb ? verb->name : "usage");
}

static int unknown_verb(const char *first, const char *second)
{
	struct error e;
	char both[128];
	snprintf(both, sizeof(both), "%.60s %.60s", first, second ? second : "");
	const char *near = second ? verb_nearest(both) : NULL;
	if (!near)
		near = verb_nearest(first);
	if (near)
		error_set(&e, ERROR_INVALID, "unknown verb \"%s\"; did you mean \"%s\"?", first, near);
	else
		error_set(&e, ERROR_INVALID, "unknown verb \"%s\"", first);
	return usage_error(NULL, &e);
}

/* "template" alone, or with a word that is none of its sub-verbs. */
static int is_family(const char *word)
{
	size_t size = strlen(word);
	for (size_t i = 0; verb_table[i]; i++)
		if (strncmp(verb_table[i]->name, word, size) == 0 && verb_table[i]->name[size] == ' ')
			return 1;
	return 0;
}

static int family_error(const char *word, const char *sub)
{
	struct error e;
	char names[256] = "";
	size_t used = 0;
	size_t size = strlen(word);
	for (size_t i = 0; verb_table[i]; i++)
		if (strncmp(verb_table[i]->name, word, size) == 0 && verb_table[i]->name[size] == ' ' && used < sizeof(names))
			used += (size_t)snprintf(names + used, sizeof(names) - used, "%s%s", used ? ", " : "",
			                         verb_table[i]->name + size + 1);
	if (sub)
		error_set(&e, ERROR_INVALID, "there is no \"%s %s\"; there are: %s", word, sub, names);
	else
		error_set(&e, ERROR_INVALID, "%s needs one of: %s", word, names);
	return usage_error(NULL, &e);
}

/* Takes one or two words. Returns how many, 0 if there is no such verb. */
static size_t find_verb(char **words, size_t count, const struct verb **ret)
{
	char both[128];
	if (count > 1 && text_format(both, sizeof(both), "%s %s", words[0], words[1]) == 0 && (*ret = verb_find(both)))
		return 2;
	return (*ret = verb_find(words[0])) ? 1 : 0;
}

static int check_counts(const struct verb *verb, const struct options_result *parsed, struct error *e)
{
	size_t count = parsed->positional_count;
	if (count < verb->args_min)
		return error_set(e, ERROR_INVALID, "needs %s%s; usage: space %s %s", count ? "more than: " : "arguments",
		                 count ? parsed->positional[count - 1] : "", verb->name, verb->arguments);
	if (count > verb->args_max)
		return error_set(e, ERROR_INVALID, "\"%s\" is one argument too many; usage: space %s %s",
		                 parsed->positional[verb->args_max], verb->name, verb->arguments);
	return 0;
}

static int run_verb(const struct verb *verb, int argc, char **argv)
{
	static const struct options_entry none[] = {{0}};
	const struct options_entry *tables[] = {verb->options ? verb->options : none, verb_global_options, NULL};
	struct options_result parsed = {0};
	struct error e;
	struct verb_call call = {.verb = verb};
	int status;
	if (verb->is_raw) {
		call.rest = (const char *const *)argv;
		call.rest_count = (size_t)argc;
		return verb->run(&call);
	}
	int r = options_parse(tables, verb->takes_command ? verb->args_max : SIZE_MAX, argc, argv, &parsed, &e);
	if (r == 0 && help_wanted) {
		verb_print_help(verb, stdout);
		status = output_finish(0);
	} else if (r < 0 || check_counts(verb, &parsed, &e) < 0) {
		status = usage_error(verb, &e);
	} else if (api_new(socket_path, server_url, NULL, &call.api, &e) < 0) {
		status = output_error(&e, NULL, "cannot tell where spaced is");
	} else {
		call.args = parsed.positional;
		call.arg_count = parsed.positional_count;
		call.rest = parsed.has_rest ? (const char *const *)parsed.rest : NULL;
		call.rest_count = parsed.rest_count;
		status = verb->run(&call);
	}
	api_free(call.api);
	free(parsed.positional);
	return status;
}

/* A standard descriptor that is closed would be given to the next socket, which then got somebody's output. Read-only,
 * so that writing to a closed stdout still fails. */
static void fill_standard_descriptors(void)
{
	int fd;
	do
		fd = open("/dev/null", O_RDONLY);
	while (fd >= 0 && fd <= STDERR_FILENO);
	if (fd >= 0)
		close(fd);
}

int main(int argc, char **argv)
{
	const struct options_entry *tables[] = {main_options, verb_global_options, NULL};
	struct options_result parsed = {0};
	struct error e;
	/* A closed pipe is an error of write(), with a message and an exit status. */
	signal(SIGPIPE, SIG_IGN);
	fill_standard_descriptors();
	output_setup();
	int r = options_parse(tables, 0, argc - 1, argv + 1, &parsed, &e);
	free(parsed.positional);
	if (r < 0)
		return usage_error(NULL, &e);
	char **words = parsed.rest;
	size_t count = parsed.rest_count;
	char help_word[] = "help";
	char version_word[] = "version";
	char *substitute[3] = {help_wanted || !version_wanted ? help_word : version_word, count ? words[0] : NULL, NULL};
	if (help_wanted || version_wanted || !count) {
		words = substitute;
		count = 1 + (help_wanted && count ? 1 : 0);
		help_wanted = 0;
	}
	const struct verb *verb;
	size_t used = find_verb(words, count, &verb);
	if (used)
		return run_verb(verb, (int)(count - used), words + used);
	if (is_family(words[0]))
		return family_error(words[0], count > 1 && words[1][0] != '-' ? words[1] : NULL);
	return unknown_verb(words[0], count > 1 ? words[1] : NULL);
}
