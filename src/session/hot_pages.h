/*
 * Which pages of its memory a guest of a template touches on its way from a restore to its first command.
 *
 * A restored VMM maps the memory file and faults its pages in one after the other. The file of a snapshot is a clone
 * whose pages are in no page cache, so a wake would wait for the disk a hundred times. The pages that it needs are much
 * the same for all guests of a template (kernel, agent, shell): they are found once, when the template is built, and
 * read in ahead of each restore. It is advice only: without it, or with a damaged one, restores are just slower.
 */
#ifndef SPACE_SESSION_HOT_PAGES_H
#define SPACE_SESSION_HOT_PAGES_H

#include "session/internal.h"

/* Restores the template once, runs a command in it, and keeps what that touched as `hot` in the template's folder. */
int hot_pages_record(struct session_manager *m, const struct store_template *template, struct error *e);
/* Starts reading those pages of a memory file of the template's guests, in the background; borrows `memory_fd` only for
 * the call. */
void hot_pages_prefetch(struct session_manager *m, const char *template_id, int memory_fd);

#endif
