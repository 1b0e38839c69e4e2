#include "cli/output.h"

#include <errno.h>
#include <inttypes.h>
#include <langinfo.h>
#include <locale.h>
#include <stdarg.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/text.h"

struct output_settings output;

void output_setup(void)
{
	setlocale(LC_CTYPE, "");
	output.utf8 = strcmp(nl_langinfo(CODESET), "UTF-8") == 0;
	output.terminal_out = isatty(STDOUT_FILENO) == 1;
	output.terminal_err = isatty(STDERR_FILENO) == 1;
	const char *none = getenv("NO_COLOR");
	const char *term = getenv("TERM");
	int allowed = !(none && *none) && !(term && strcmp(term, "dumb") == 0);
	output.color_out = allowed && output.terminal_out;
	output.color_err = allowed && output.terminal_err;
}

const char *output_color(FILE *stream, enum output_color color)
{
	static const char *const codes[] = {
	    [OUTPUT_PLAIN] = "",        [OUTPUT_BOLD] = "\033[1m",   [OUTPUT_DIM] = "\033[2m",
	    [OUTPUT_RED] = "\033[31m",  [OUTPUT_GREEN] = "\033[32m", [OUTPUT_YELLOW] = "\033[33m",
	    [OUTPUT_BLUE] = "\033[34m",
	};
	return (stream == stderr ? output.color_err : output.color_out) ? codes[color] : "";
}

const char *output_color_end(FILE *stream)
{
	return (stream == stderr ? output.color_err : output.color_out) ? "\033[0m" : "";
}

enum output_color output_state_color(const char *state)
{
	if (strcmp(state, "running") == 0 || strcmp(state, "ready") == 0 || strcmp(state, "ok") == 0)
		return OUTPUT_GREEN;
	if (strcmp(state, "paused") == 0 || strcmp(state, "warning") == 0 || strcmp(state, "warn") == 0)
		return OUTPUT_YELLOW;
	if (strcmp(state, "suspended") == 0)
		return OUTPUT_BLUE;
	if (strcmp(state, "failed") == 0 || strcmp(state, "fail") == 0 || strcmp(state, "error") == 0 ||
	    strcmp(state, "damaged") == 0)
		return OUTPUT_RED;
	return OUTPUT_PLAIN;
}

int output_error(const struct error *e, const char *hint, const char *what, ...)
{
	char text[1024];
	char safe[ERROR_MESSAGE_BYTES + 64];
	va_list args;
	va_start(args, what);
	vsnprintf(text, sizeof(text), what, args);
	va_end(args);
	fflush(stdout);
	output_safe(safe, sizeof(safe), e->message);
	if (output.json) {
		json_t *line = json_pack("{s:{s:s, s:s, s:s*, s:s*}}", "error", "code", error_code_name(e->code), "message",
		                         e->message, "what", text, "hint", hint);
		char *dump = line ? json_dumps(line, JSON_COMPACT) : NULL;
		if (dump)
			fprintf(stderr, "%s\n", dump);
		free(dump);
		json_decref(line);
	} else {
		fprintf(stderr, "%sspace: %s: %s%s\n", output_color(stderr, OUTPUT_RED), text, safe, output_color_end(stderr));
		if (hint)
			fprintf(stderr, "%shint: %s%s\n", output_color(stderr, OUTPUT_DIM), hint, output_color_end(stderr));
	}
	return error_code_exit_status(e->code);
}

void output_note(const char *format, ...)
{
	char text[1024];
	char safe[1100];
	va_list args;
	va_start(args, format);
	vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	fprintf(stderr, "space: %s\n", output_safe(safe, sizeof(safe), text));
}

static void dump(const json_t *value, size_t flags)
{
	char *text = json_dumps(value, flags | JSON_ENCODE_ANY);
	if (!text)
		return;
	fputs(text, stdout);
	putchar('\n');
	free(text);
}

void output_json(const json_t *value)
{
	dump(value, output.terminal_out ? JSON_INDENT(2) : JSON_COMPACT);
}

void output_json_line(const json_t *value)
{
	dump(value, JSON_COMPACT);
	fflush(stdout);
}

const char *output_safe(char *to, size_t size, const char *text)
{
	size_t used = 0;
	for (const unsigned char *p = (const unsigned char *)text; *p && used + 5 < size; p++) {
		/* C0 controls, DEL, and the C1 controls in their UTF-8 form (0xc2 0x80 … 0xc2 0x9f) */
		int control = *p < 0x20 || *p == 0x7f || (*p == 0xc2 && p[1] >= 0x80 && p[1] < 0xa0);
		if (!control) {
			to[used++] = (char)*p;
			continue;
		}
		used += (size_t)snprintf(to + used, size - used, "\\x%02x", *p);
		if (*p == 0xc2) {
			p++;
			if (used + 5 < size)
				used += (size_t)snprintf(to + used, size - used, "\\x%02x", *p);
		}
	}
	if (size)
		to[used] = '\0';
	return to;
}

const char *output_text(const json_t *object, const char *key, const char *otherwise)
{
	const char *text = json_string_value(json_object_get(object, key));
	return text && *text ? text : otherwise;
}

int output_finish(int status)
{
	if (fflush(stdout) == 0 && !ferror(stdout))
		return status;
	if (errno == EPIPE)
		return status ? status : 128 + 13;
	struct error e;
	error_set_errno(&e, errno ? errno : EIO, "standard output");
	return output_error(&e, NULL, "cannot write the result");
}

uint64_t output_parse_time(const char *rfc3339)
{
	struct tm tm = {0};
	const char *end = rfc3339 ? strptime(rfc3339, "%Y-%m-%dT%H:%M:%S", &tm) : NULL;
	if (!end)
		return 0;
	unsigned ms = 0;
	if (*end == '.') {
		unsigned scale = 100;
		for (end++; *end >= '0' && *end <= '9'; end++, scale /= 10)
			ms += (unsigned)(*end - '0') * scale;
	}
	time_t seconds = timegm(&tm);
	return seconds < 0 ? 0 : (uint64_t)seconds * 1000 + ms;
}

void output_age(char *to, size_t size, const char *rfc3339)
{
	uint64_t then = output_parse_time(rfc3339);
	uint64_t now = time_realtime_ms();
	if (!then) {
		snprintf(to, size, "-");
		return;
	}
	const char *suffix = then <= now ? " ago" : "";
	const char *prefix = then <= now ? "" : "in ";
	uint64_t s = (then <= now ? now - then : then - now) / 1000;
	if (s < 60)
		snprintf(to, size, "%s%" PRIu64 " s%s", prefix, s, suffix);
	else if (s < 3600)
		snprintf(to, size, "%s%" PRIu64 " min%s", prefix, s / 60, suffix);
	else if (s < 48 * 3600)
		snprintf(to, size, "%s%" PRIu64 " h%s", prefix, s / 3600, suffix);
	else
		snprintf(to, size, "%s%" PRIu64 " d%s", prefix, s / 86400, suffix);
}
