#include "cli/options.h"

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "base/text.h"

#define NAMES_MAX 128
#define WORD_MAX 64

static const struct options_entry *find_long(const struct options_entry *const *tables, const char *name, size_t size)
{
	for (; *tables; tables++)
		for (const struct options_entry *o = *tables; o->name; o++)
			if (strlen(o->name) == size && memcmp(o->name, name, size) == 0)
				return o;
	return NULL;
}

static const struct options_entry *find_letter(const struct options_entry *const *tables, char letter)
{
	for (; *tables; tables++)
		for (const struct options_entry *o = *tables; o->name; o++)
			if (o->letter == letter)
				return o;
	return NULL;
}

static size_t edit_distance(const char *a, const char *b)
{
	size_t rows[3][WORD_MAX + 1];
	size_t la = strlen(a);
	size_t lb = strlen(b);
	if (la > WORD_MAX || lb > WORD_MAX)
		return SIZE_MAX;
	for (size_t j = 0; j <= lb; j++)
		rows[0][j] = j;
	for (size_t i = 1; i <= la; i++) {
		size_t *now = rows[i % 3];
		const size_t *up = rows[(i + 2) % 3];
		const size_t *up2 = rows[(i + 1) % 3];
		now[0] = i;
		for (size_t j = 1; j <= lb; j++) {
			size_t best = up[j - 1] + (a[i - 1] != b[j - 1]);
			best = MIN(best, up[j] + 1);
			best = MIN(best, now[j - 1] + 1);
			/* two swapped letters are one slip of the fingers */
			if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
				best = MIN(best, up2[j - 2] + 1);
			now[j] = best;
		}
	}
	return rows[la % 3][lb];
}

const char *options_nearest(const char *word, const char *const *candidates, size_t count)
{
	const char *best = NULL;
	size_t best_distance = MAX(strlen(word) / 3, (size_t)1) + 1;
	for (size_t i = 0; i < count; i++) {
		size_t distance = edit_distance(word, candidates[i]);
		if (strlen(word) >= 3 && text_starts_with(candidates[i], word))
			distance = 1;
		if (distance < best_distance) {
			best = candidates[i];
			best_distance = distance;
		}
	}
	return best;
}

static int unknown_option(const struct options_entry *const *tables, const char *name, struct error *e)
{
	const char *names[NAMES_MAX];
	size_t count = 0;
	for (; *tables; tables++)
		for (const struct options_entry *o = *tables; o->name && count < NAMES_MAX; o++)
			names[count++] = o->name;
	const char *near = options_nearest(name, names, count);
	if (near)
		return error_set(e, ERROR_INVALID, "unknown option --%s; did you mean --%s?", name, near);
	return error_set(e, ERROR_INVALID, "unknown option --%s", name);
}

static int list_add(struct options_list *list, const char *value, struct error *e)
{
	if (list->count >= OPTIONS_LIST_MAX)
		return error_set(e, ERROR_TOO_LARGE, "an option was given more than %d times", OPTIONS_LIST_MAX);
	const char **grown = reallocarray(list->items, list->count + 1, sizeof(*grown));
	if (!grown)
		return error_set_errno(e, ENOMEM, "keeping an option");
	list->items = grown;
	list->items[list->count++] = value;
	return 0;
}

static int is_choice(const char *choices, const char *value)
{
	size_t size = strlen(value);
	for (const char *p = choices; *p;) {
		size_t length = strcspn(p, " ");
		if (length == size && memcmp(p, value, size) == 0)
			return 1;
		p += length;
		p += strspn(p, " ");
	}
	return 0;
}

static int store(const struct options_entry *o, const char *value, struct error *e)
{
	if (o->choices && !is_choice(o->choices, value))
		return error_set(e, ERROR_INVALID, "--%s: \"%s\" is not one of: %s", o->name, value, o->choices);
	struct options_number *number = o->target;
	int r = 0;
	switch (o->kind) {
	case OPTIONS_FLAG:
		*(int *)o->target = 1;
		return 0;
	case OPTIONS_STRING:
		*(const char **)o->target = value;
		return 0;
	case OPTIONS_LIST:
		return list_add(o->target, value, e);
	case OPTIONS_COUNT:
		r = text_parse_u64(value, INT64_MAX, &number->value);
		break;
	case OPTIONS_DURATION:
		r = text_parse_duration(value, &number->value);
		break;
	case OPTIONS_SIZE:
		r = text_parse_size(value, &number->value);
		break;
	}
	if (r < 0 || number->value > INT64_MAX)
		return error_set(e, ERROR_INVALID, "--%s: \"%s\" is not %s", o->name, value,
		                 o->kind == OPTIONS_COUNT      ? "a number"
		                 : o->kind == OPTIONS_DURATION ? "a duration (90, 90s, 5m, 2h, 7d)"
		                                               : "a size (512M, 4G)");
	number->is_set = 1;
	return 0;
}

/* "--name", "--name=value", "--name value". Returns how many words were used, or -errno. */
static int parse_long(const struct options_entry *const *tables, int left, char **argv, struct error *e)
{
	const char *name = argv[0] + 2;
	size_t size = strcspn(name, "=");
	const struct options_entry *o = find_long(tables, name, size);
	if (!o) {
		char copy[WORD_MAX * 2];
		snprintf(copy, sizeof(copy), "%.*s", (int)MIN(size, (size_t)100), name);
		return unknown_option(tables, copy, e);
	}
	int has_value = name[size] == '=';
	if (o->kind == OPTIONS_FLAG) {
		if (has_value)
			return error_set(e, ERROR_INVALID, "--%s takes no value", o->name);
		int r = store(o, NULL, e);
		return r < 0 ? r : 1;
	}
	if (!has_value && left < 2)
		return error_set(e, ERROR_INVALID, "--%s needs a value (%s)", o->name, o->argument);
	int r = store(o, has_value ? name + size + 1 : argv[1], e);
	return r < 0 ? r : has_value ? 1 : 2;
}

/* "-a", "-abc" for flags, "-xVALUE", "-x VALUE". */
static int parse_short(const struct options_entry *const *tables, int left, char **argv, struct error *e)
{
	for (const char *p = argv[0] + 1; *p; p++) {
		const struct options_entry *o = find_letter(tables, *p);
		if (!o)
			return error_set(e, ERROR_INVALID, "unknown option -%c", *p);
		if (o->kind == OPTIONS_FLAG) {
			int r = store(o, NULL, e);
			if (r < 0)
				return r;
			continue;
		}
		if (p[1]) {
			int r = store(o, p + 1, e);
			return r < 0 ? r : 1;
		}
		if (left < 2)
			return error_set(e, ERROR_INVALID, "-%c needs a value (%s)", *p, o->argument);
		int r = store(o, argv[1], e);
		return r < 0 ? r : 2;
	}
	return 1;
}

int options_parse(const struct options_entry *const *tables, size_t stop_after, int argc, char **argv,
                  struct options_result *ret, struct error *e)
{
	memset(ret, 0, sizeof(*ret));
	ret->positional = calloc((size_t)argc + 1, sizeof(*ret->positional));
	if (!ret->positional)
		return error_set_errno(e, ENOMEM, "reading the command line");
	int options_ended = 0;
	for (int i = 0; i < argc;) {
		char *word = argv[i];
		if (!options_ended && strcmp(word, "--") == 0) {
			options_ended = 1;
			i++;
			if (stop_after == SIZE_MAX)
				continue;
			ret->rest = argv + i;
			ret->rest_count = (size_t)(argc - i);
			ret->has_rest = 1;
			return 0;
		}
		if (!options_ended && word[0] == '-' && word[1]) {
			int used =
			    word[1] == '-' ? parse_long(tables, argc - i, argv + i, e) : parse_short(tables, argc - i, argv + i, e);
			if (used < 0)
				return used;
			i += used;
			continue;
		}
		if (stop_after != SIZE_MAX && ret->positional_count == stop_after) {
			ret->rest = argv + i;
			ret->rest_count = (size_t)(argc - i);
			ret->has_rest = 1;
			return 0;
		}
		ret->positional[ret->positional_count++] = word;
		i++;
	}
	return 0;
}
