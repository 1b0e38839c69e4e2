#include "cli/table.h"

#include <stdarg.h>
#include <string.h>
#include <wchar.h>

struct cell {
	char *text;
	enum output_color color;
};

struct table {
	const char *headers[TABLE_COLUMNS_MAX];
	int right[TABLE_COLUMNS_MAX];
	size_t columns;
	struct cell *cells; /* rows × columns */
	size_t rows;
	size_t next; /* column of the next cell */
};

struct table *table_new(const char *first_header, ...)
{
	struct table *t = calloc(1, sizeof(*t));
	if (!t)
		abort();
	va_list args;
	va_start(args, first_header);
	for (const char *h = first_header; h && t->columns < TABLE_COLUMNS_MAX; h = va_arg(args, const char *)) {
		t->right[t->columns] = *h == '>';
		t->headers[t->columns++] = h + (*h == '>');
	}
	va_end(args);
	return t;
}

void table_free(struct table *t)
{
	if (!t)
		return;
	for (size_t i = 0; i < t->rows * t->columns; i++)
		free(t->cells[i].text);
	free(t->cells);
	free(t);
}

void table_row(struct table *t)
{
	struct cell *grown = reallocarray(t->cells, (t->rows + 1) * t->columns, sizeof(*grown));
	if (!grown)
		abort();
	t->cells = grown;
	memset(t->cells + t->rows * t->columns, 0, t->columns * sizeof(*grown));
	t->rows++;
	t->next = 0;
}

void table_cell(struct table *t, enum output_color color, const char *text)
{
	char safe[TABLE_CELL_BYTES];
	if (t->next >= t->columns)
		return;
	struct cell *cell = &t->cells[(t->rows - 1) * t->columns + t->next++];
	cell->text = strdup(output_safe(safe, sizeof(safe), text && *text ? text : "-"));
	cell->color = color;
	if (!cell->text)
		abort();
}

void table_cellf(struct table *t, const char *format, ...)
{
	char text[TABLE_CELL_BYTES];
	va_list args;
	va_start(args, format);
	vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	table_cell(t, OUTPUT_PLAIN, text);
}

size_t table_text_width(const char *text)
{
	mbstate_t state = {0};
	size_t width = 0;
	size_t left = strlen(text);
	while (left) {
		wchar_t wide;
		size_t n = mbrtowc(&wide, text, left, &state);
		if (n == (size_t)-1 || n == (size_t)-2 || n == 0) {
			memset(&state, 0, sizeof(state));
			n = 1;
			width++;
		} else {
			int w = wcwidth(wide);
			width += w > 0 ? (size_t)w : 0;
		}
		text += n;
		left -= n;
	}
	return width;
}

/* Prints at most `room` columns of text and returns how many were used. */
static size_t print_cut(FILE *to, const char *text, size_t room)
{
	size_t width = table_text_width(text);
	if (width <= room) {
		fputs(text, to);
		return width;
	}
	mbstate_t state = {0};
	size_t used = 0;
	while (*text) {
		wchar_t wide;
		size_t n = mbrtowc(&wide, text, strlen(text), &state);
		int w = 1;
		if (n == (size_t)-1 || n == (size_t)-2) {
			memset(&state, 0, sizeof(state));
			n = 1;
		} else {
			w = MAX(wcwidth(wide), 0);
		}
		if (used + (size_t)w > room)
			break;
		fwrite(text, 1, n, to);
		text += n;
		used += (size_t)w;
	}
	return used;
}

static void print_line(const struct table *t, FILE *to, const size_t *widths, size_t limit, const struct cell *cells)
{
	size_t column = 0;
	for (size_t i = 0; i < t->columns; i++) {
		const char *text = cells ? (cells[i].text ? cells[i].text : "-") : t->headers[i];
		enum output_color color = cells ? cells[i].color : OUTPUT_BOLD;
		size_t pad = widths[i] - MIN(widths[i], table_text_width(text));
		size_t room = limit ? limit - MIN(limit, column) : SIZE_MAX;
		if (t->right[i]) {
			size_t n = MIN(pad, room);
			fprintf(to, "%*s", (int)n, "");
			column += n;
			room -= n;
		}
		if (color != OUTPUT_PLAIN)
			fputs(output_color(to, color), to);
		column += print_cut(to, text, room);
		if (color != OUTPUT_PLAIN)
			fputs(output_color_end(to), to);
		if (i + 1 < t->columns) {
			size_t gap = (t->right[i] ? 0 : pad) + 2;
			room = limit ? limit - MIN(limit, column) : SIZE_MAX;
			fprintf(to, "%*s", (int)MIN(gap, room), "");
			column += MIN(gap, room);
		}
	}
	putc('\n', to);
}

void table_print(const struct table *t, FILE *to, size_t width)
{
	size_t widths[TABLE_COLUMNS_MAX];
	for (size_t i = 0; i < t->columns; i++) {
		widths[i] = table_text_width(t->headers[i]);
		for (size_t row = 0; row < t->rows; row++) {
			const char *text = t->cells[row * t->columns + i].text;
			widths[i] = MAX(widths[i], text ? table_text_width(text) : 1);
		}
	}
	print_line(t, to, widths, width, NULL);
	for (size_t row = 0; row < t->rows; row++)
		print_line(t, to, widths, width, t->cells + row * t->columns);
}
