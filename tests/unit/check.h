/* Assertions of unit tests: a failed one prints what was compared and ends the program. */
#ifndef SPACE_TESTS_CHECK_H
#define SPACE_TESTS_CHECK_H

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                                                               \
	do {                                                                                                               \
		if (!(condition)) {                                                                                            \
			fprintf(stderr, "%s:%d: %s: not true: %s\n", __FILE__, __LINE__, __func__, #condition);                    \
			exit(1);                                                                                                   \
		}                                                                                                              \
	} while (0)

#define CHECK_INT(got, want)                                                                                           \
	do {                                                                                                               \
		intmax_t got_ = (intmax_t)(got);                                                                               \
		intmax_t want_ = (intmax_t)(want);                                                                             \
		if (got_ != want_) {                                                                                           \
			fprintf(stderr, "%s:%d: %s: %s is %" PRIdMAX ", not %" PRIdMAX "\n", __FILE__, __LINE__, __func__, #got,   \
			        got_, want_);                                                                                      \
			exit(1);                                                                                                   \
		}                                                                                                              \
	} while (0)

#define CHECK_STR(got, want)                                                                                           \
	do {                                                                                                               \
		const char *got_ = (got);                                                                                      \
		const char *want_ = (want);                                                                                    \
		if (!got_ || strcmp(got_, want_) != 0) {                                                                       \
			fprintf(stderr, "%s:%d: %s: %s is \"%s\", not \"%s\"\n", __FILE__, __LINE__, __func__, #got,               \
			        got_ ? got_ : "(null)", want_);                                                                    \
			exit(1);                                                                                                   \
		}                                                                                                              \
	} while (0)

#endif
