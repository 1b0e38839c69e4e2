/*
 * Calls the host helper from the command line, for tests and for looking at a broken host.
 *
 *   host-tool SOCKET start ID [-f FILE]… [-m MIB] [-p PRELOAD] [-P PROGRAM] -- ARGUMENT…   prints the pid
 *   host-tool SOCKET kill|output ID
 *   host-tool SOCKET list | storage | doctor
 *   host-tool SOCKET build AGENT DISK KERNEL INITRD SIZE [PACKAGE]…    prints progress
 *   host-tool SOCKET connect ID PORT       prints what became of a connection to the guest's address
 *   host-tool SOCKET sockets ID COUNT ROUNDS      median time in microseconds
 *   host-tool SOCKET cycle ROUNDS -- ARGUMENT…    median and worst times of start and kill, in microseconds
 *
 * Exit status 1 with "CODE: message" on stderr if a call fails.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/text.h"
#include "host/client.h"

#define ROUNDS_MAX 1000

static struct host_client *client;
static struct error e;

static int fail(void)
{
	fprintf(stderr, "%s: %s\n", error_code_name(e.code), e.message);
	return 1;
}

static int usage(void)
{
	fprintf(stderr, "usage: host-tool SOCKET COMMAND …; see the head of tests/tools/host-tool.c\n");
	return 2;
}

static unsigned number(const char *text)
{
	uint64_t value = 0;
	if (text_parse_u64(text, UINT32_MAX, &value) < 0)
		fprintf(stderr, "not a number: %s\n", text);
	return (unsigned)value;
}

static int compare(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a;
	uint64_t y = *(const uint64_t *)b;
	return x < y ? -1 : x > y;
}

static void print_times(const char *name, uint64_t *times, size_t count)
{
	qsort(times, count, sizeof(*times), compare);
	printf("%s p50 %" PRIu64 " max %" PRIu64 "\n", name, times[count / 2], times[count - 1]);
}

static int do_start(int argc, char **argv)
{
	int fds[HOST_SANDBOX_FDS_MAX + 4];
	struct host_sandbox_spec spec = {
	    .id = argv[0], .program = "qemu", .fds = fds, .memory_max_bytes = 512 * MIB, .pids_max = 64};
	int i = 1;
	for (; i + 1 < argc && strcmp(argv[i], "--") != 0; i += 2) {
		if (strcmp(argv[i], "-f") == 0) {
			fds[spec.fd_count] = open(argv[i + 1], O_RDWR | O_CLOEXEC);
			if (fds[spec.fd_count] < 0) {
				perror(argv[i + 1]);
				return 2;
			}
			spec.fd_count++;
		} else if (strcmp(argv[i], "-m") == 0) {
			spec.memory_max_bytes = number(argv[i + 1]) * MIB;
		} else if (strcmp(argv[i], "-p") == 0) {
			spec.preload_environment = argv[i + 1];
		} else if (strcmp(argv[i], "-P") == 0) {
			spec.program = argv[i + 1];
		} else {
			return usage();
		}
	}
	if (i >= argc)
		return usage();
	spec.arguments = (const char *const *)argv + i + 1;
	pid_t pid;
	int pidfd;
	if (host_sandbox_start(client, &spec, &pid, &pidfd, &e) < 0)
		return fail();
	printf("%d\n", (int)pid);
	return 0;
}

static int do_list(void)
{
	struct host_sandbox_info *list;
	size_t count;
	if (host_sandbox_list(client, &list, &count, &e) < 0)
		return fail();
	for (size_t i = 0; i < count; i++) {
		printf("%s pid %d alive %d pidfd %d exit %d %d\n", list[i].id, (int)list[i].pid, list[i].alive,
		       list[i].pidfd >= 0, list[i].exit_known, list[i].exit_status);
		if (list[i].pidfd >= 0)
			close(list[i].pidfd);
	}
	free(list);
	return 0;
}

static int do_connect(const char *id, const char *port)
{
	int fd;
	if (host_sandbox_sockets(client, id, &fd, 1, &e) < 0)
		return fail();
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)number(port))};
	inet_pton(AF_INET, HOST_GUEST_ADDRESS, &address.sin_addr);
	struct timeval wait = {.tv_sec = 1};
	setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &wait, sizeof(wait));
	int r = connect(fd, (struct sockaddr *)&address, sizeof(address));
	printf("%s\n", r == 0 ? "connected" : strerror(errno));
	close(fd);
	return 0;
}

static int do_sockets(const char *id, const char *count_text, const char *rounds_text)
{
	static uint64_t times[ROUNDS_MAX];
	int fds[16];
	unsigned count = number(count_text);
	unsigned rounds = MIN(number(rounds_text), ROUNDS_MAX);
	for (unsigned i = 0; i < rounds; i++) {
		uint64_t start = time_monotonic_us();
		if (host_sandbox_sockets(client, id, fds, count, &e) < 0)
			return fail();
		times[i] = time_monotonic_us() - start;
		for (unsigned k = 0; k < count; k++)
			close(fds[k]);
	}
	print_times("sockets", times, rounds);
	return 0;
}

static int do_cycle(const char *rounds_text, char **arguments)
{
	static uint64_t starts[ROUNDS_MAX];
	static uint64_t kills[ROUNDS_MAX];
	unsigned rounds = MIN(number(rounds_text), ROUNDS_MAX);
	for (unsigned i = 0; i < rounds; i++) {
		char id[ID_BYTES];
		pid_t pid;
		int pidfd;
		id_make(id, 'b');
		struct host_sandbox_spec spec = {.id = id,
		                                 .program = "qemu",
		                                 .arguments = (const char *const *)arguments,
		                                 .memory_max_bytes = 512 * MIB,
		                                 .cpu_percent = 100,
		                                 .pids_max = 64};
		uint64_t start = time_monotonic_us();
		if (host_sandbox_start(client, &spec, &pid, &pidfd, &e) < 0)
			return fail();
		starts[i] = time_monotonic_us() - start;
		close(pidfd);
		start = time_monotonic_us();
		if (host_sandbox_kill(client, id, &e) < 0)
			return fail();
		kills[i] = time_monotonic_us() - start;
	}
	print_times("start", starts, rounds);
	print_times("kill", kills, rounds);
	return 0;
}

static int do_storage(void)
{
	struct host_storage_info info;
	if (host_storage(client, &info, &e) < 0)
		return fail();
	printf("%s reflink %d loop %d %s\n", info.data_dir, info.reflink, info.loop_mounted, info.filesystem);
	return 0;
}

static int do_text(int (*call)(struct host_client *, char **, struct error *))
{
	char *text;
	if (call(client, &text, &e) < 0)
		return fail();
	fputs(text, stdout);
	free(text);
	return 0;
}

static int do_output(const char *id)
{
	char *text;
	if (host_sandbox_output(client, id, &text, &e) < 0)
		return fail();
	fputs(text, stdout);
	free(text);
	return 0;
}

static void print_line(void *context, const char *line)
{
	(void)context;
	printf("%s\n", line);
	fflush(stdout);
}

static int do_build(char **argv)
{
	int fds[4];
	uint64_t size;
	for (int i = 0; i < 4; i++) {
		fds[i] = open(argv[i], i ? O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC : O_RDONLY | O_CLOEXEC, 0600);
		if (fds[i] < 0) {
			perror(argv[i]);
			return 2;
		}
	}
	if (text_parse_size(argv[4], &size) < 0)
		return usage();
	struct host_image_spec spec = {.packages = (const char *const *)argv + 5,
	                               .size_bytes = size,
	                               .agent_fd = fds[0],
	                               .disk_fd = fds[1],
	                               .kernel_fd = fds[2],
	                               .initrd_fd = fds[3]};
	return host_image_build(client, &spec, print_line, NULL, &e) < 0 ? fail() : 0;
}

static int run(const char *command, int argc, char **argv)
{
	if (strcmp(command, "start") == 0 && argc >= 2)
		return do_start(argc, argv);
	if (strcmp(command, "kill") == 0 && argc == 1)
		return host_sandbox_kill(client, argv[0], &e) < 0 ? fail() : 0;
	if (strcmp(command, "output") == 0 && argc == 1)
		return do_output(argv[0]);
	if (strcmp(command, "list") == 0)
		return do_list();
	if (strcmp(command, "storage") == 0)
		return do_storage();
	if (strcmp(command, "doctor") == 0)
		return do_text(host_doctor);
	if (strcmp(command, "connect") == 0 && argc == 2)
		return do_connect(argv[0], argv[1]);
	if (strcmp(command, "sockets") == 0 && argc == 3)
		return do_sockets(argv[0], argv[1], argv[2]);
	if (strcmp(command, "build") == 0 && argc >= 5)
		return do_build(argv);
	if (strcmp(command, "cycle") == 0 && argc >= 2)
		return do_cycle(argv[0], argv + 2);
	return usage();
}

int main(int argc, char **argv)
{
	if (argc < 3)
		return usage();
	if (host_client_new(argv[1], &client, &e) < 0)
		return fail();
	int status = run(argv[2], argc - 3, argv + 3);
	host_client_free(client);
	return status;
}
