/* Aligned text tables for people. Cells are copied and made safe for the terminal. */
#ifndef SPACE_CLI_TABLE_H
#define SPACE_CLI_TABLE_H

#include <stdio.h>

#include "cli/output.h"

#define TABLE_COLUMNS_MAX 12
#define TABLE_CELL_BYTES 512

struct table;

/* Headers end with NULL; one that starts with '>' is right-aligned. Aborts the program when memory is exhausted. */
struct table *table_new(const char *first_header, ...) __attribute__((sentinel));
void table_free(struct table *table);
void table_row(struct table *table);
/* Fills the next cell of the current row. */
void table_cell(struct table *table, enum output_color color, const char *text);
void table_cellf(struct table *table, const char *format, ...) PRINTF_LIKE(2, 3);
/* `width` cuts lines to so many columns, 0 = never. */
void table_print(const struct table *table, FILE *to, size_t width);
/* Columns that a UTF-8 text takes on a terminal. */
size_t table_text_width(const char *text);

#endif
