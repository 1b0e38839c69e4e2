/* One line on stderr that shows how far a copy is; silent when stderr is no terminal. */
#ifndef SPACE_CLI_PROGRESS_H
#define SPACE_CLI_PROGRESS_H

#include "base/macros.h"

struct progress {
	const char *label;
	uint64_t total; /* bytes; 0 = not known */
	uint64_t started_ms;
	uint64_t drawn_ms;
	int enabled;
	int drawn;
};

void progress_start(struct progress *progress, const char *label, uint64_t total, int enabled);
/* Draws at most ten times a second. */
void progress_update(struct progress *progress, uint64_t done);
/* Draws the final state and ends the line, or clears it when the copy failed. */
void progress_end(struct progress *progress, uint64_t done, int failed);

#endif
