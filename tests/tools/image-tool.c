/*
 * Builds an image without a helper, as root:
 *
 *   image-tool AGENT OUTPUT_DIR WORK_DIR [SUITE|-] [PACKAGE…]     writes OUTPUT_DIR/{disk,kernel,initrd}
 *
 * Exit status 1 with "CODE: message" on stderr if it fails.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>

#include "base/text.h"
#include "image/image.h"

static uint64_t begin_ms;

static int on_line(void *context, const char *line)
{
	printf("%7.1f s  %s\n", (double)(time_monotonic_ms() - begin_ms) / 1000, line);
	fflush(stdout);
	return 0;
}

static int output(const char *dir, const char *name, struct error *e)
{
	char path[512];
	int fd;

	if (text_format(path, sizeof(path), "%s/%s", dir, name) < 0)
		return error_set(e, ERROR_INVALID, "%s is too long", dir);
	fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
	return fd < 0 ? error_set_errno(e, errno, "open %s", path) : fd;
}

int main(int argc, char **argv)
{
	struct image_spec spec = {.size_bytes = IMAGE_SIZE_DEFAULT};
	struct error e = {0};

	if (argc < 4) {
		fprintf(stderr, "usage: image-tool AGENT OUTPUT_DIR WORK_DIR [SUITE|-] [PACKAGE…]\n");
		return 2;
	}
	begin_ms = time_monotonic_ms();
	spec.work_dir = argv[3];
	spec.suite = argc > 4 && strcmp(argv[4], "-") != 0 ? argv[4] : NULL;
	spec.packages = argc > 5 ? (const char *const *)(argv + 5) : NULL;
	spec.agent_fd = open(argv[1], O_RDONLY | O_CLOEXEC);
	if (spec.agent_fd < 0)
		error_set_errno(&e, errno, "open %s", argv[1]);
	if (spec.agent_fd < 0 || (spec.disk_fd = output(argv[2], "disk", &e)) < 0 ||
	    (spec.kernel_fd = output(argv[2], "kernel", &e)) < 0 || (spec.initrd_fd = output(argv[2], "initrd", &e)) < 0 ||
	    image_build(&spec, on_line, NULL, &e) < 0) {
		fprintf(stderr, "%s: %s\n", error_code_name(e.code), e.message);
		return 1;
	}
	return 0;
}
