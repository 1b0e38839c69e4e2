/* Small things a client says to the guest agent: paths, escapes, header parameters. */
#include <string.h>

#include "fuzz.h"
#include "guest/multipart.h"
#include "guest/path.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	char *text = malloc(size + 1);
	FUZZ_CHECK(text);
	if (size)
		memcpy(text, data, size);
	text[size] = '\0';
	char *decoded = malloc(size + 1);
	FUZZ_CHECK(decoded);
	ssize_t n = path_percent_decode(decoded, size + 1, text, size);
	FUZZ_CHECK(n < 0 || ((size_t)n <= size && strlen(decoded) == (size_t)n));
	(void)path_percent_decode(decoded, size / 2 + 1, text, size);
	static struct path p;
	struct error e = {0};
	if (path_resolve(&p, text, "/home/user", NULL, &e) == 0) {
		size_t length = strlen(p.text);
		FUZZ_CHECK(p.text[0] == '/' && length < PATH_BYTES_MAX && !strstr(p.text, "//") && !strstr(p.text, "/./"));
		FUZZ_CHECK(length == 1 || p.text[length - 1] != '/');
		FUZZ_CHECK(path_name(p.text) != NULL);
	} else {
		FUZZ_CHECK(e.code != ERROR_NONE && e.message[0]);
	}
	char shown[PATH_DISPLAY_BYTES];
	path_display(shown, text);
	FUZZ_CHECK(strlen(shown) < sizeof(shown) && !strpbrk(shown, "\r\n"));
	char value[32];
	(void)multipart_parameter(text, "name", value, sizeof(value));
	free(decoded);
	free(text);
	return 0;
}
