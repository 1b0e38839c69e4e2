/*
 * Draws a session's timeline. A chain goes straight down, however long; only where a snapshot has several children do
 * the others hang off to the right. The child that leads to the head (else the newest) continues the line:
 *
 *   ● n1   first
 *   ├─● n2
 *   │ ● n3
 *   ● n4
 *   ◉ n5   head
 */
#ifndef SPACE_CLI_TREE_H
#define SPACE_CLI_TREE_H

#include <jansson.h>
#include <stdio.h>

/* `history` is {"head","snapshots":[{"id","parent",…}]}, oldest first. `utf8` 0 draws with ASCII. */
void tree_print(const json_t *history, int utf8, FILE *to);

#endif
