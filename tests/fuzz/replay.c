/*
 * Runs a harness over files and folders, without libFuzzer: each file as it is, cut at each of its first bytes, and
 * with single bytes changed. The changes follow from the file alone, so a failure comes again.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fd.h"
#include "fuzz.h"

#define FILE_BYTES_MAX ((size_t)(1024 * 1024))
#define CUTS_MAX 400
#define CHANGES_MAX 600

static unsigned long run_count;
static const char *current = "";

static void tell(int number)
{
	char text[512];
	int n = snprintf(text, sizeof(text), "signal %d while replaying %s, run %lu\n", number, current, run_count);
	ssize_t ignored = write(STDERR_FILENO, text, n > 0 ? (size_t)n : 0);
	(void)ignored;
	signal(number, SIG_DFL);
	raise(number);
}

static void run(const char *data, size_t size)
{
	uint8_t *copy = fuzz_copy(data, size);
	run_count++;
	LLVMFuzzerTestOneInput(copy, size);
	free(copy);
}

static void replay_variants(char *data, size_t size)
{
	static const unsigned char values[] = {0, 0xff, '\r', '\n', ' ', ':', '"', '9', '{', '=', '%', '/', '-', ';'};
	run(data, size);
	for (size_t cut = 0; cut < size && cut < CUTS_MAX; cut++)
		run(data, cut);
	size_t step = size > CHANGES_MAX ? size / CHANGES_MAX : 1;
	for (size_t at = 0; at < size; at += step) {
		char former = data[at];
		data[at] = (char)values[at % sizeof(values)];
		run(data, size);
		data[at] = (char)(former ^ (1 << at % 8));
		run(data, size);
		data[at] = former;
	}
}

static int replay(int dir, const char *name)
{
	struct stat st;
	if (fstatat(dir, name, &st, 0) < 0) {
		fprintf(stderr, "%s: %s\n", name, strerror(errno));
		return -1;
	}
	if (S_ISDIR(st.st_mode)) {
		int fd = openat(dir, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
		DIR *folder = fd < 0 ? NULL : fdopendir(fd);
		int r = folder ? 0 : -1;
		for (struct dirent *entry; r == 0 && (entry = readdir(folder));)
			if (entry->d_name[0] != '.')
				r = replay(dirfd(folder), entry->d_name);
		if (folder)
			closedir(folder);
		return r;
	}
	char *data;
	size_t size;
	current = name;
	int r = fd_read_file(dir, name, FILE_BYTES_MAX, &data, &size);
	if (r < 0) {
		fprintf(stderr, "%s: %s\n", name, strerror(-r));
		return -1;
	}
	replay_variants(data, size);
	free(data);
	return 0;
}

int main(int argc, char **argv)
{
	signal(SIGABRT, tell);
	signal(SIGPIPE, SIG_IGN);
	for (int i = 1; i < argc; i++)
		if (replay(AT_FDCWD, argv[i]) < 0)
			return 1;
	printf("%lu runs\n", run_count);
	return run_count ? 0 : 1;
}
