#include "base/log.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/text.h"

static enum log_level threshold = LOG_LEVEL_INFO;
static const char *const names[] = {"error", "warning", "info", "debug"};

int log_set_level(const char *name)
{
	for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
		if (strcmp(names[i], name) == 0) {
			threshold = (enum log_level)i;
			return 0;
		}
	}
	return -EINVAL;
}

void log_write(enum log_level level, const char *area, const char *format, ...)
{
	static const int priorities[] = {3, 4, 6, 7};
	if (level > threshold)
		return;
	char line[1024];
	int used;
	if (getenv("JOURNAL_STREAM")) {
		used = snprintf(line, sizeof(line), "<%d>%s: ", priorities[level], area);
	} else {
		char now[32];
		time_format_rfc3339(now, sizeof(now), time_realtime_ms());
		used = snprintf(line, sizeof(line), "%s %-7s %s: ", now, names[level], area);
	}
	va_list args;
	va_start(args, format);
	int more = vsnprintf(line + used, sizeof(line) - (size_t)used - 1, format, args);
	va_end(args);
	size_t size = MIN((size_t)(used + MAX(more, 0)), sizeof(line) - 2);
	for (size_t i = 0; i < size; i++)
		if ((unsigned char)line[i] < 32 || line[i] == 127)
			line[i] = ' ';
	line[size++] = '\n';
	/* One write a record, so that lines of several processes do not mix; a full or closed stderr is not our problem. */
	ssize_t ignored = write(STDERR_FILENO, line, size);
	(void)ignored;
}
