#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fd.h"
#include "check.h"

static int open_count(void)
{
	int count = 0;
	for (int fd = 0; fd < 1024; fd++)
		if (fcntl(fd, F_GETFD) >= 0)
			count++;
	return count;
}

static void *dribble(void *argument)
{
	int fd = *(int *)argument;
	for (int i = 0; i < 5; i++) {
		usleep(2000);
		CHECK_INT(write(fd, "12345", 5), 5);
	}
	close(fd);
	return NULL;
}

static void test_reads_are_whole(void)
{
	int pipes[2];
	pthread_t thread;
	char data[64];
	CHECK_INT(pipe2(pipes, O_CLOEXEC), 0);
	CHECK_INT(pthread_create(&thread, NULL, dribble, &pipes[1]), 0);
	CHECK_INT(fd_read_full(pipes[0], data, 20), 20);
	CHECK_INT(fd_read_full(pipes[0], data, 20), 5);
	CHECK_INT(fd_read_full(pipes[0], data, 20), 0);
	pthread_join(thread, NULL);
	close(pipes[0]);
	CHECK_INT(fd_read_full(-1, data, 1), -EBADF);
}

static void test_files(void)
{
	char folder[] = "/tmp/space-unit-XXXXXX";
	CHECK(mkdtemp(folder));
	CLEANUP_CLOSE int dir = open(folder, O_DIRECTORY | O_RDONLY | O_CLOEXEC);
	char *data;
	size_t size;
	CHECK_INT(fd_read_file(dir, "f", 100, &data, &size), -ENOENT);
	CHECK_INT(fd_write_file_atomic(dir, "f", "one\0two", 7, 0640), 0);
	struct stat st;
	CHECK_INT(fstatat(dir, "f", &st, 0), 0);
	CHECK_INT(st.st_mode & 0777, 0640);
	CHECK_INT(fd_read_file(dir, "f", 7, &data, &size), 0);
	CHECK_INT(size, 7);
	CHECK(memcmp(data, "one\0two", 8) == 0);
	free(data);
	CHECK_INT(fd_read_file(dir, "f", 6, &data, &size), -EFBIG);
	CHECK_INT(fd_write_file_atomic(dir, "f", "", 0, 0640), 0);
	CHECK_INT(fd_read_file(dir, "f", 6, &data, NULL), 0);
	CHECK_STR(data, "");
	free(data);
	CHECK_INT(fd_write_file_atomic(dir, "missing/f", "x", 1, 0640), -ENOENT);
	CHECK_INT(symlinkat("/etc/passwd", dir, "link"), 0);
	CHECK_INT(fd_write_file_atomic(dir, "link", "x", 1, 0600), 0); /* replaces the link, not its target */
	CHECK_INT(fstatat(dir, "link", &st, AT_SYMLINK_NOFOLLOW), 0);
	CHECK(S_ISREG(st.st_mode));
	unlinkat(dir, "f", 0);
	unlinkat(dir, "link", 0);
	CHECK_INT(rmdir(folder), 0); /* no temporary file is left */
}

static void test_descriptors_travel(void)
{
	int pair[2];
	int before = open_count();
	CHECK_INT(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
	int mem = fd_memfd("unit", 4096);
	CHECK(mem >= 0);
	CHECK(fcntl(mem, F_GETFD) & FD_CLOEXEC);
	int out[4];
	size_t count;
	char data[16];
	CHECK_INT(fd_send_message(pair[0], "hi", 2, (int[]){mem, mem}, 2), 0);
	CHECK_INT(fd_receive_message(pair[1], data, sizeof(data), out, 4, &count), 2);
	CHECK_INT(count, 2);
	CHECK(fcntl(out[0], F_GETFD) & FD_CLOEXEC);
	close(out[0]);
	close(out[1]);
	/* More descriptors than asked for, and a message that does not fit: refused, nothing leaks. */
	int now = open_count();
	CHECK_INT(fd_send_message(pair[0], "hi", 2, (int[]){mem, mem}, 2), 0);
	CHECK_INT(fd_receive_message(pair[1], data, sizeof(data), out, 1, &count), -EMSGSIZE);
	CHECK_INT(count, 0);
	CHECK_INT(fd_send_message(pair[0], "0123456789abcdef0", 17, &mem, 1), 0);
	CHECK_INT(fd_receive_message(pair[1], data, sizeof(data), out, 4, &count), -EMSGSIZE);
	CHECK_INT(open_count(), now);
	CHECK_INT(fd_send_message(pair[0], "x", 1, out, FD_PASS_MAX + 1), -EINVAL);
	close(pair[0]);
	CHECK_INT(fd_receive_message(pair[1], data, sizeof(data), out, 4, &count), 0);
	close(pair[1]);
	close(mem);
	CHECK_INT(open_count(), before);
}

static void test_broken_pipe_is_an_error(void)
{
	int pair[2];
	CHECK_INT(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
	close(pair[1]);
	CHECK_INT(fd_send_message(pair[0], "x", 1, NULL, 0), -EPIPE);
	CHECK_INT(fd_set_nonblocking(pair[0], 1), 0);
	CHECK(fcntl(pair[0], F_GETFL) & O_NONBLOCK);
	CHECK_INT(fd_set_nonblocking(pair[0], 0), 0);
	CHECK(!(fcntl(pair[0], F_GETFL) & O_NONBLOCK));
	close(pair[0]);
}

int main(void)
{
	test_reads_are_whole();
	test_files();
	test_descriptors_travel();
	test_broken_pipe_is_an_error();
	return 0;
}
