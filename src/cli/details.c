#include "cli/details.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/text.h"
#include "cli/output.h"

#define DEPTH_MAX 4

static void label_of(char *to, size_t size, const char *key)
{
	snprintf(to, size, "%s", key);
	/* The unit stands with the value. */
	if (text_ends_with(to, "_bytes"))
		to[strlen(to) - 6] = '\0';
	else if (text_ends_with(to, "_s"))
		to[strlen(to) - 2] = '\0';
	for (char *p = to; *p; p++)
		if (*p == '_')
			*p = ' ';
}

static void print_number(const char *key, json_int_t number)
{
	char size[32];
	if ((text_ends_with(key, "_bytes") || text_starts_with(key, "bytes_")) && number >= 0) {
		text_format_size(size, sizeof(size), (uint64_t)number);
		printf("%s", size);
	} else if (text_ends_with(key, "_s") && number == 0) {
		printf("none");
	} else if (text_ends_with(key, "_s")) {
		printf("%" JSON_INTEGER_FORMAT " s", number);
	} else {
		printf("%" JSON_INTEGER_FORMAT, number);
	}
}

/* "a, b, c" if all are strings; 0 if not. */
static int print_words(const json_t *array)
{
	char safe[256];
	size_t index;
	json_t *word;
	json_array_foreach(array, index, word)
	{
		if (!json_is_string(word))
			return 0;
	}
	json_array_foreach(array, index, word)
	{
		printf("%s%s", index ? ", " : "", output_safe(safe, sizeof(safe), json_string_value(word)));
	}
	if (!json_array_size(array))
		putchar('-');
	return 1;
}

static void print_value(const char *key, const json_t *value)
{
	char safe[1024];
	char age[64];
	/* A screen is looked at over shoulders; --json has them for programs. */
	if (json_is_string(value) && text_ends_with(key, "_token")) {
		printf("(with --json)");
	} else if (json_is_string(value)) {
		const char *text = json_string_value(value);
		if (strcmp(key, "state") == 0)
			printf("%s%s%s", output_color(stdout, output_state_color(text)), output_safe(safe, sizeof(safe), text),
			       output_color_end(stdout));
		else
			printf("%s", *text ? output_safe(safe, sizeof(safe), text) : "-");
		if (text_ends_with(key, "_at") && output_parse_time(text)) {
			output_age(age, sizeof(age), text);
			printf(" (%s)", age);
		}
	} else if (json_is_integer(value)) {
		print_number(key, json_integer_value(value));
	} else if (json_is_boolean(value)) {
		printf("%s", json_is_true(value) ? "yes" : "no");
	} else if (json_is_null(value)) {
		printf("-");
	} else if (!json_is_array(value) || !print_words(value)) {
		char *text = json_dumps(value, JSON_COMPACT | JSON_ENCODE_ANY);
		printf("%s", text ? output_safe(safe, sizeof(safe), text) : "?");
		free(text);
	}
	putchar('\n');
}

static void print_object(const json_t *object, int depth, size_t width)
{
	const char *key;
	json_t *value;
	char label[64];
	json_object_foreach((json_t *)(uintptr_t)object, key, value)
	{
		char safe[128];
		label_of(label, sizeof(label), output_safe(safe, sizeof(safe), key));
		printf("%*s%s%-*s%s", depth * 2, "", output_color(stdout, OUTPUT_DIM), (int)width - depth * 2, label,
		       output_color_end(stdout));
		if (json_is_object(value) && json_object_size(value) && depth < DEPTH_MAX) {
			putchar('\n');
			print_object(value, depth + 1, width);
		} else if (json_is_object(value)) {
			puts("-");
		} else {
			print_value(key, value);
		}
	}
}

void details_print(const json_t *object)
{
	size_t width = 12;
	const char *key;
	json_t *value;
	json_object_foreach((json_t *)(uintptr_t)object, key, value)
	{
		char label[64];
		label_of(label, sizeof(label), key);
		width = MAX(width, strlen(label));
	}
	print_object(object, 0, width + 2);
}
