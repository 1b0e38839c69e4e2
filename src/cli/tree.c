#include "cli/tree.h"

#include <string.h>

#include "base/buf.h"
#include "base/text.h"
#include "cli/output.h"
#include "cli/table.h"

#define NONE SIZE_MAX
#define DEPTH_MAX 40 /* branches inside branches; deeper ones are drawn in the same column */

struct node {
	const json_t *snapshot;
	const char *id;
	size_t first_child; /* oldest first, linked by next_sibling */
	size_t last_child;
	size_t next_sibling;
	size_t parent;
	int leads_to_head;
	char *graph; /* what is drawn before the text */
};

struct tree {
	struct node *nodes;
	size_t count;
	size_t *order; /* the lines from top to bottom */
	size_t lines;
	size_t head;
	int utf8;
};

static size_t find(const struct tree *t, const char *id)
{
	for (size_t i = 0; id && i < t->count; i++)
		if (strcmp(t->nodes[i].id, id) == 0)
			return i;
	return NONE;
}

static void link_nodes(struct tree *t, const json_t *history)
{
	for (size_t i = 0; i < t->count; i++) {
		struct node *n = &t->nodes[i];
		n->parent = find(t, output_text(n->snapshot, "parent", NULL));
		/* A parent is older than its child; anything else would be a loop. */
		if (n->parent == NONE || n->parent >= i) {
			n->parent = NONE;
			continue;
		}
		struct node *p = &t->nodes[n->parent];
		if (p->first_child == NONE)
			p->first_child = i;
		else
			t->nodes[p->last_child].next_sibling = i;
		p->last_child = i;
	}
	t->head = find(t, output_text(history, "head", NULL));
	for (size_t i = t->head; i != NONE; i = t->nodes[i].parent)
		t->nodes[i].leads_to_head = 1;
}

static size_t trunk_of(const struct tree *t, const struct node *n)
{
	for (size_t c = n->first_child; c != NONE; c = t->nodes[c].next_sibling)
		if (t->nodes[c].leads_to_head)
			return c;
	return n->last_child;
}

/* Draws the line that begins at node `at`; `prefix` stands before everything but the first node, `first` before that.
 */
static void draw(struct tree *t, size_t at, const char *first, const char *prefix, int depth)
{
	const char *branch = t->utf8 ? "├─" : "|-";
	const char *pass = t->utf8 ? "│ " : "| ";
	const char *lead = first;
	for (; at != NONE; lead = prefix) {
		struct node *n = &t->nodes[at];
		const char *mark = at == t->head ? (t->utf8 ? "◉" : "@") : (t->utf8 ? "●" : "*");
		CLEANUP_BUF struct buf graph = {0};
		if (buf_printf(&graph, "%s%s", lead, mark) < 0)
			abort();
		n->graph = TAKE_PTR(graph.data);
		t->order[t->lines++] = at;
		size_t trunk = trunk_of(t, n);
		for (size_t c = n->first_child; c != NONE; c = t->nodes[c].next_sibling) {
			if (c == trunk)
				continue;
			CLEANUP_BUF struct buf side_first = {0};
			CLEANUP_BUF struct buf side = {0};
			int deep = depth < DEPTH_MAX;
			if (buf_printf(&side_first, "%s%s", prefix, branch) < 0 ||
			    buf_printf(&side, "%s%s", prefix, deep ? pass : "") < 0)
				abort();
			draw(t, c, side_first.data, side.data, depth + 1);
		}
		at = trunk;
	}
}

static void print_lines(const struct tree *t, FILE *to)
{
	size_t graph_width = 0;
	size_t id_width = 0;
	for (size_t i = 0; i < t->lines; i++) {
		graph_width = MAX(graph_width, table_text_width(t->nodes[t->order[i]].graph));
		id_width = MAX(id_width, strlen(t->nodes[t->order[i]].id));
	}
	for (size_t i = 0; i < t->lines; i++) {
		const struct node *n = &t->nodes[t->order[i]];
		char age[64];
		char size[32];
		char name[256];
		const json_t *stored = json_object_get(n->snapshot, "bytes_stored");
		const char *label = output_text(n->snapshot, "name", NULL);
		int is_head = t->order[i] == t->head;
		output_age(age, sizeof(age), output_text(n->snapshot, "created_at", NULL));
		text_format_size(size, sizeof(size), (uint64_t)json_integer_value(stored));
		fprintf(to, "%s%*s  %s%-*s%s  %-8s  %10s  %12s", n->graph, (int)(graph_width - table_text_width(n->graph)), "",
		        output_color(to, is_head ? OUTPUT_GREEN : OUTPUT_PLAIN), (int)id_width, n->id,
		        is_head ? output_color_end(to) : "", output_text(n->snapshot, "kind", "-"), size, age);
		if (label)
			fprintf(to, "  %s%s%s", output_color(to, OUTPUT_BOLD), output_safe(name, sizeof(name), label),
			        output_color_end(to));
		if (is_head)
			fprintf(to, "  %s<- head%s", output_color(to, OUTPUT_GREEN), output_color_end(to));
		const char *state = output_text(n->snapshot, "state", "ready");
		if (output_state_color(state) == OUTPUT_RED || strcmp(state, "changed") == 0)
			fprintf(to, "  %s%s%s", output_color(to, OUTPUT_RED), state, output_color_end(to));
		putc('\n', to);
	}
}

void tree_print(const json_t *history, int utf8, FILE *to)
{
	const json_t *snapshots = json_object_get(history, "snapshots");
	struct tree t = {.count = json_array_size(snapshots), .utf8 = utf8, .head = NONE};
	t.nodes = calloc(t.count + 1, sizeof(*t.nodes));
	t.order = calloc(t.count + 1, sizeof(*t.order));
	if (!t.nodes || !t.order)
		abort();
	for (size_t i = 0; i < t.count; i++) {
		struct node *n = &t.nodes[i];
		n->snapshot = json_array_get(snapshots, i);
		n->id = output_text(n->snapshot, "id", "?");
		n->first_child = n->last_child = n->next_sibling = n->parent = NONE;
	}
	link_nodes(&t, history);
	for (size_t i = 0; i < t.count; i++)
		if (t.nodes[i].parent == NONE)
			draw(&t, i, "", "", 0);
	print_lines(&t, to);
	for (size_t i = 0; i < t.count; i++)
		free(t.nodes[i].graph);
	free(t.nodes);
	free(t.order);
}
