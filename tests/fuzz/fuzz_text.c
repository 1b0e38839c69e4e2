/* Encoders and number readers of base: what they accept comes back the same. */
#include <stdio.h>
#include <string.h>

#include "base/config.h"
#include "base/text.h"
#include "fuzz.h"

static void check_base64(const char *text, size_t size)
{
	unsigned char *decoded = malloc(size / 4 * 3 + 3);
	FUZZ_CHECK(decoded);
	long n = text_base64_decode(decoded, text, size);
	if (n >= 0) {
		FUZZ_CHECK((size_t)n <= size / 4 * 3 + 2);
		char *encoded = malloc(text_base64_size((size_t)n));
		FUZZ_CHECK(encoded);
		size_t length = text_base64(encoded, decoded, (size_t)n);
		unsigned char *again = malloc(length / 4 * 3 + 3);
		FUZZ_CHECK(again && text_base64_decode(again, encoded, length) == n);
		FUZZ_CHECK(n == 0 || memcmp(again, decoded, (size_t)n) == 0);
		free(again);
		free(encoded);
	}
	free(decoded);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	char *copy = fuzz_copy(data, size);
	check_base64(copy, size);
	(void)text_is_utf8(copy, size);
	free(copy);
	char *text = malloc(size + 1);
	FUZZ_CHECK(text);
	if (size)
		memcpy(text, data, size);
	text[size] = '\0';
	uint64_t number = 0;
	char printed[32];
	if (text_parse_u64(text, UINT64_MAX, &number) == 0) {
		snprintf(printed, sizeof(printed), "%llu", (unsigned long long)number);
		FUZZ_CHECK(strcmp(printed, text + strspn(text, "0") - (number == 0 && *text == '0')) == 0 || text[0] == '0');
	}
	(void)text_parse_size(text, &number);
	(void)text_parse_duration(text, &number);
	FUZZ_CHECK(!id_is_valid(text, 's') || strlen(text) == ID_RANDOM_CHARS + 1);
	struct config config;
	struct error e = {0};
	config_defaults(&config);
	char *equals = strchr(text, '=');
	if (equals) {
		*equals = '\0';
		if (config_set(&config, text, equals + 1, &e) < 0)
			FUZZ_CHECK(e.code == ERROR_INVALID && e.message[0]);
	}
	free(text);
	return 0;
}
