/*
 * Logging for programs; library rooms return errors and never log.
 *
 * One line a record to stderr: "TIME LEVEL AREA: text". Under systemd (JOURNAL_STREAM set) the time is left out and a
 * syslog priority prefix is put in front. Values of credentials are never passed to it.
 */
#ifndef SPACE_BASE_LOG_H
#define SPACE_BASE_LOG_H

#include "base/macros.h"

enum log_level { LOG_LEVEL_ERROR, LOG_LEVEL_WARNING, LOG_LEVEL_INFO, LOG_LEVEL_DEBUG };

/* Sets the program-wide threshold from a name ("error" … "debug"); -EINVAL for another name. */
int log_set_level(const char *name);
void log_write(enum log_level level, const char *area, const char *format, ...) PRINTF_LIKE(3, 4);

#define log_error(area, ...) log_write(LOG_LEVEL_ERROR, area, __VA_ARGS__)
#define log_warning(area, ...) log_write(LOG_LEVEL_WARNING, area, __VA_ARGS__)
#define log_info(area, ...) log_write(LOG_LEVEL_INFO, area, __VA_ARGS__)
#define log_debug(area, ...) log_write(LOG_LEVEL_DEBUG, area, __VA_ARGS__)

#endif
