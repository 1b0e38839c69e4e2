#include "base/fd.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

void space_cleanup_free(void *pointer_to_pointer)
{
	free(*(void **)pointer_to_pointer);
}

void space_cleanup_close(int *fd)
{
	if (*fd >= 0)
		close(*fd);
}

ssize_t fd_read_full(int fd, void *data, size_t size)
{
	size_t done = 0;
	while (done < size) {
		ssize_t n = read(fd, (char *)data + done, size - done);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return -errno;
		if (n == 0)
			break;
		done += (size_t)n;
	}
	return (ssize_t)done;
}

ssize_t fd_pread_full(int fd, void *data, size_t size, off_t offset)
{
	size_t done = 0;
	while (done < size) {
		ssize_t n = pread(fd, (char *)data + done, size - done, offset + (off_t)done);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return -errno;
		if (n == 0)
			break;
		done += (size_t)n;
	}
	return (ssize_t)done;
}

int fd_write_full(int fd, const void *data, size_t size)
{
	size_t done = 0;
	while (done < size) {
		ssize_t n = write(fd, (const char *)data + done, size - done);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return -errno;
		done += (size_t)n;
	}
	return 0;
}

int fd_pwrite_full(int fd, const void *data, size_t size, off_t offset)
{
	size_t done = 0;
	while (done < size) {
		ssize_t n = pwrite(fd, (const char *)data + done, size - done, offset + (off_t)done);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return -errno;
		done += (size_t)n;
	}
	return 0;
}

int fd_read_file(int dirfd, const char *path, size_t limit, char **ret_data, size_t *ret_size)
{
	CLEANUP_CLOSE int fd = openat(dirfd, path, O_RDONLY | O_CLOEXEC | O_NOCTTY);
	if (fd < 0)
		return -errno;
	size_t capacity = 4096;
	size_t size = 0;
	CLEANUP_FREE char *data = malloc(capacity + 1);
	if (!data)
		return -ENOMEM;
	for (;;) {
		ssize_t n = fd_read_full(fd, data + size, capacity - size);
		if (n < 0)
			return (int)n;
		size += (size_t)n;
		if (size > limit)
			return -EFBIG;
		if (size < capacity)
			break;
		capacity *= 2;
		char *larger = realloc(data, capacity + 1);
		if (!larger)
			return -ENOMEM;
		data = larger;
	}
	data[size] = '\0';
	*ret_data = TAKE_PTR(data);
	if (ret_size)
		*ret_size = size;
	return 0;
}

int fd_write_file_atomic(int dirfd, const char *path, const void *data, size_t size, unsigned mode)
{
	char temporary[4096];
	int n = snprintf(temporary, sizeof(temporary), "%s.tmp-%d", path, (int)getpid());
	if (n < 0 || (size_t)n >= sizeof(temporary))
		return -ENAMETOOLONG;
	CLEANUP_CLOSE int fd = openat(dirfd, temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, mode);
	if (fd < 0)
		return -errno;
	int r = fd_write_full(fd, data, size);
	if (r == 0 && fsync(fd) < 0)
		r = -errno;
	if (r == 0 && renameat(dirfd, temporary, dirfd, path) < 0)
		r = -errno;
	if (r < 0)
		unlinkat(dirfd, temporary, 0);
	return r;
}

int fd_send_message(int sock, const void *data, size_t size, const int *fds, size_t fd_count)
{
	union {
		char bytes[CMSG_SPACE(sizeof(int) * FD_PASS_MAX)];
		struct cmsghdr align;
	} control;
	struct iovec iov = {.iov_base = (void *)(uintptr_t)data, .iov_len = size};
	struct msghdr message = {.msg_iov = &iov, .msg_iovlen = 1};
	if (fd_count > FD_PASS_MAX)
		return -EINVAL;
	if (fd_count) {
		memset(&control, 0, sizeof(control));
		message.msg_control = control.bytes;
		message.msg_controllen = CMSG_SPACE(sizeof(int) * fd_count);
		struct cmsghdr *header = CMSG_FIRSTHDR(&message);
		header->cmsg_level = SOL_SOCKET;
		header->cmsg_type = SCM_RIGHTS;
		header->cmsg_len = CMSG_LEN(sizeof(int) * fd_count);
		memcpy(CMSG_DATA(header), fds, sizeof(int) * fd_count);
	}
	ssize_t n;
	do
		n = sendmsg(sock, &message, MSG_NOSIGNAL);
	while (n < 0 && errno == EINTR);
	if (n < 0)
		return -errno;
	return (size_t)n == size ? 0 : -EMSGSIZE;
}

ssize_t fd_receive_message(int sock, void *data, size_t size, int *fds, size_t fd_capacity, size_t *ret_fd_count)
{
	union {
		char bytes[CMSG_SPACE(sizeof(int) * FD_PASS_MAX)];
		struct cmsghdr align;
	} control;
	struct iovec iov = {.iov_base = data, .iov_len = size};
	struct msghdr message = {
	    .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof(control.bytes)};
	*ret_fd_count = 0;
	ssize_t n;
	do
		n = recvmsg(sock, &message, MSG_CMSG_CLOEXEC);
	while (n < 0 && errno == EINTR);
	if (n < 0)
		return -errno;
	int excess = 0;
	for (struct cmsghdr *header = CMSG_FIRSTHDR(&message); header; header = CMSG_NXTHDR(&message, header)) {
		if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS)
			continue;
		size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
		for (size_t i = 0; i < count; i++) {
			int fd;
			memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(fd));
			if (*ret_fd_count < fd_capacity) {
				fds[(*ret_fd_count)++] = fd;
			} else {
				close(fd);
				excess = 1;
			}
		}
	}
	if (excess || (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC))) {
		for (size_t i = 0; i < *ret_fd_count; i++)
			close(fds[i]);
		*ret_fd_count = 0;
		return -EMSGSIZE;
	}
	return n;
}

int fd_memfd(const char *name, size_t size)
{
	CLEANUP_CLOSE int fd = memfd_create(name, MFD_CLOEXEC);
	if (fd < 0)
		return -errno;
	if (ftruncate(fd, (off_t)size) < 0)
		return -errno;
	return TAKE_FD(fd);
}

int fd_set_nonblocking(int fd, int on)
{
	int flags = fcntl(fd, F_GETFL);
	if (flags < 0)
		return -errno;
	flags = on ? flags | O_NONBLOCK : flags & ~O_NONBLOCK;
	return fcntl(fd, F_SETFL, flags) < 0 ? -errno : 0;
}
