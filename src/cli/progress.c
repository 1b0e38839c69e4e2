#include "cli/progress.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/text.h"
#include "cli/output.h"
#include "cli/table.h"
#include "cli/terminal.h"

#define PERIOD_MS 100
#define BAR_COLUMNS 24

void progress_start(struct progress *p, const char *label, uint64_t total, int enabled)
{
	memset(p, 0, sizeof(*p));
	p->label = label;
	p->total = total;
	p->enabled = enabled && output.terminal_err && !output.json;
	p->started_ms = time_monotonic_ms();
}

static void bar(char *to, size_t size, uint64_t done, uint64_t total)
{
	size_t filled = total ? (size_t)(MIN(done, total) * BAR_COLUMNS / total) : 0;
	size_t used = 0;
	for (size_t i = 0; i < BAR_COLUMNS && used + 4 < size; i++)
		used += (size_t)snprintf(to + used, size - used, "%s",
		                         i < filled ? (output.utf8 ? "█" : "#") : (output.utf8 ? "░" : "."));
}

static void draw(struct progress *p, uint64_t done, int final)
{
	char line[512];
	char graph[BAR_COLUMNS * 4];
	char size[32];
	char rate[32];
	char label[64];
	uint64_t elapsed_ms = MAX(time_monotonic_ms() - p->started_ms, UINT64_C(1));
	uint64_t per_s = done * 1000 / elapsed_ms;
	uint64_t eta_s = per_s && p->total > done ? (p->total - done) / per_s : 0;
	text_format_size(size, sizeof(size), done);
	text_format_size(rate, sizeof(rate), per_s);
	output_safe(label, sizeof(label), p->label);
	if (!p->total) {
		snprintf(line, sizeof(line), "%s  %s  %s/s", label, size, rate);
	} else {
		bar(graph, sizeof(graph), done, p->total);
		snprintf(line, sizeof(line), "%s  %3" PRIu64 " %%  %s  %s  %s/s", label,
		         MIN(done * 100 / p->total, (uint64_t)100), graph, size, rate);
	}
	size_t used = strlen(line);
	if (final)
		snprintf(line + used, sizeof(line) - used, "  in %" PRIu64 ".%" PRIu64 " s", elapsed_ms / 1000,
		         elapsed_ms / 100 % 10);
	else if (p->total)
		snprintf(line + used, sizeof(line) - used, "  %02" PRIu64 ":%02" PRIu64 " left", eta_s / 60, eta_s % 60);
	unsigned columns;
	unsigned rows;
	terminal_size(&columns, &rows);
	/* A line that wraps could not be drawn over. */
	if (table_text_width(line) < columns)
		fprintf(stderr, "\r%s\033[K", line);
	p->drawn = 1;
}

void progress_update(struct progress *p, uint64_t done)
{
	uint64_t now = time_monotonic_ms();
	if (!p->enabled || now - p->drawn_ms < PERIOD_MS)
		return;
	p->drawn_ms = now;
	draw(p, done, 0);
}

void progress_end(struct progress *p, uint64_t done, int failed)
{
	if (!p->enabled)
		return;
	if (failed && p->drawn) {
		fprintf(stderr, "\r\033[K");
	} else if (!failed) {
		draw(p, done, 1);
		fputc('\n', stderr);
	}
}
