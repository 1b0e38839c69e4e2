/*
 * Preloaded into QEMU: opens of "/space/fd/N" give a duplicate of the inherited descriptor N.
 *
 * QEMU 7.2 opens the file behind guest memory for reading and writing even if it maps it privately, and takes kernel
 * and initrd by path only. With this library a VMM needs no path in its file system at all, and the memory file, which
 * other sandboxes map as well, reaches it through a read-only descriptor that no open() can widen: a VMM that its guest
 * has taken over cannot write to it. (A private mapping only asks for a readable descriptor.)
 *
 * "/space/fd/N+M" is descriptor N as well, and M is the end of a SEQPACKET socket pair through which other memory can
 * be put in its place later, once: a VMM that has started up with an empty file can so become any sandbox of its size
 * (spares, see session/spare.c). The message is one byte with a descriptor, the answer an errno as int32. Only the
 * writable private mapping of descriptor N is replaced, at its address, and only by a file of its size.
 *
 * Every open() the C library offers to programs is covered, since which one a program uses depends on how it was
 * compiled; anything else goes on to the C library.
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

#define PREFIX "/space/fd/"
#define FD_FIRST 3
#define FD_LAST 19

/* A decimal descriptor number at *path, which is moved behind it; -1 if there is none in range. */
static int parse_descriptor(const char **path)
{
	const char *p = *path;
	int n = 0;

	while (*p >= '0' && *p <= '9' && p - *path < 2)
		n = n * 10 + (*p++ - '0');
	*path = p;
	return n >= FD_FIRST && n <= FD_LAST ? n : -1;
}

/* The descriptor a path stands for, -1 if it is an ordinary one; *ret_channel is M or -1. */
static int descriptor_of(const char *path, int *ret_channel)
{
	int n;

	*ret_channel = -1;
	if (!path || strncmp(path, PREFIX, sizeof(PREFIX) - 1) != 0)
		return -1;
	path += sizeof(PREFIX) - 1;
	n = parse_descriptor(&path);
	if (n < 0 || !*path)
		return n;
	if (*path++ != '+')
		return -1;
	*ret_channel = parse_descriptor(&path);
	return *ret_channel < 0 || *path ? -1 : n;
}

/* The mapping of guest memory, and the descriptor it is made from while that is awaited. One thread starts QEMU up. */
static int memory_fd = -1;
static void *memory_address;
static size_t memory_size;
static int memory_flags;

/* The message is one byte, "m" or "r" (accessed at random), with the descriptor. */
static int receive_memory(int channel, char *ret_kind)
{
	struct iovec iov = {.iov_base = ret_kind, .iov_len = 1};
	union {
		char bytes[CMSG_SPACE(sizeof(int))];
		struct cmsghdr align;
	} control;
	struct msghdr message = {
	    .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof(control.bytes)};
	struct cmsghdr *header;
	ssize_t n;
	int fd;

	do
		n = recvmsg(channel, &message, MSG_CMSG_CLOEXEC);
	while (n < 0 && errno == EINTR);
	header = n == 1 ? CMSG_FIRSTHDR(&message) : NULL;
	if (!header || header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS ||
	    header->cmsg_len != CMSG_LEN(sizeof(int)))
		return -1;
	memcpy(&fd, CMSG_DATA(header), sizeof(fd));
	return fd;
}

static int32_t replace_memory(int fd, char kind)
{
	struct stat st;

	if (!memory_address)
		return ENXIO;
	if (fstat(fd, &st) < 0)
		return errno;
	if ((uint64_t)st.st_size != memory_size)
		return EINVAL;
	if (mmap(memory_address, memory_size, PROT_READ | PROT_WRITE, memory_flags | MAP_FIXED, fd, 0) == MAP_FAILED)
		return errno;
	return kind == 'r' && madvise(memory_address, memory_size, MADV_RANDOM) < 0 ? errno : 0;
}

static void *await_memory(void *argument)
{
	int channel = (int)(intptr_t)argument;
	char kind = 0;
	int fd = receive_memory(channel, &kind);

	if (fd >= 0) {
		int32_t answer = replace_memory(fd, kind);
		(void)send(channel, &answer, sizeof(answer), MSG_NOSIGNAL);
		close(fd);
	}
	close(channel);
	return NULL;
}

static int start_waiting(int channel)
{
	pthread_t thread;
	pthread_attr_t attributes;
	sigset_t all, before;
	int r;

	/* QEMU takes its signals on threads of its own choice. */
	sigfillset(&all);
	pthread_attr_init(&attributes);
	pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
	pthread_attr_setstacksize(&attributes, 64 * 1024);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	r = pthread_create(&thread, &attributes, await_memory, (void *)(intptr_t)channel);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	pthread_attr_destroy(&attributes);
	return -r;
}

static int duplicate(int fd)
{
	int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);

	if (copy >= 0)
		(void)lseek(copy, 0, SEEK_SET);
	return copy;
}

static int open_any(int dirfd, const char *path, int flags, mode_t mode)
{
	static int (*next)(int, const char *, int, ...);
	int channel;
	int fd = descriptor_of(path, &channel);

	if (fd >= 0) {
		fd = duplicate(fd);
		if (fd >= 0 && channel >= 0 && memory_fd < 0) {
			int r = start_waiting(channel);
			if (r < 0) {
				close(fd);
				errno = -r;
				return -1;
			}
			memory_fd = fd;
		}
		return fd;
	}
	if (!next)
		next = (int (*)(int, const char *, int, ...))dlsym(RTLD_NEXT, "openat64");
	if (!next) {
		errno = ENOSYS;
		return -1;
	}
	return next(dirfd, path, flags, mode);
}

#define MODE_OF(flags)                                                                                                 \
	({                                                                                                                 \
		mode_t mode_ = 0;                                                                                              \
		if ((flags) & (O_CREAT | __O_TMPFILE)) {                                                                       \
			va_list arguments_;                                                                                        \
			va_start(arguments_, flags);                                                                               \
			mode_ = va_arg(arguments_, mode_t);                                                                        \
			va_end(arguments_);                                                                                        \
		}                                                                                                              \
		mode_;                                                                                                         \
	})

/* The C library's headers declare the checked variants only under fortification. */
int __open_2(const char *path, int flags);
int __open64_2(const char *path, int flags);
int __openat_2(int dirfd, const char *path, int flags);
int __openat64_2(int dirfd, const char *path, int flags);

EXPORT int open(const char *path, int flags, ...)
{
	return open_any(AT_FDCWD, path, flags, MODE_OF(flags));
}

EXPORT int open64(const char *path, int flags, ...)
{
	return open_any(AT_FDCWD, path, flags, MODE_OF(flags));
}

EXPORT int openat(int dirfd, const char *path, int flags, ...)
{
	return open_any(dirfd, path, flags, MODE_OF(flags));
}

EXPORT int openat64(int dirfd, const char *path, int flags, ...)
{
	return open_any(dirfd, path, flags, MODE_OF(flags));
}

EXPORT int __open_2(const char *path, int flags)
{
	return open_any(AT_FDCWD, path, flags, 0);
}

EXPORT int __open64_2(const char *path, int flags)
{
	return open_any(AT_FDCWD, path, flags, 0);
}

EXPORT int __openat_2(int dirfd, const char *path, int flags)
{
	return open_any(dirfd, path, flags, 0);
}

EXPORT int __openat64_2(int dirfd, const char *path, int flags)
{
	return open_any(dirfd, path, flags, 0);
}

static FILE *fopen_any(const char *path, const char *mode)
{
	static FILE *(*next)(const char *, const char *);
	int channel;
	int fd = descriptor_of(path, &channel);

	if (fd >= 0) {
		int copy = duplicate(fd);
		FILE *file = copy >= 0 ? fdopen(copy, mode) : NULL;

		if (!file && copy >= 0)
			close(copy);
		return file;
	}
	if (!next)
		next = (FILE * (*)(const char *, const char *)) dlsym(RTLD_NEXT, "fopen64");
	if (!next) {
		errno = ENOSYS;
		return NULL;
	}
	return next(path, mode);
}

EXPORT FILE *fopen(const char *path, const char *mode)
{
	return fopen_any(path, mode);
}

EXPORT FILE *fopen64(const char *path, const char *mode)
{
	return fopen_any(path, mode);
}

static void *map_any(void *address, size_t size, int protection, int flags, int fd, off64_t offset)
{
	void *at = (void *)syscall(SYS_mmap, address, size, protection, flags, fd, offset);

	if (at != MAP_FAILED && fd >= 0 && fd == memory_fd && (flags & MAP_PRIVATE) && (protection & PROT_WRITE)) {
		memory_address = at;
		memory_size = size;
		memory_flags = flags & ~(MAP_FIXED | MAP_FIXED_NOREPLACE);
	}
	return at;
}

EXPORT void *mmap(void *address, size_t size, int protection, int flags, int fd, off_t offset)
{
	return map_any(address, size, protection, flags, fd, offset);
}

EXPORT void *mmap64(void *address, size_t size, int protection, int flags, int fd, off64_t offset)
{
	return map_any(address, size, protection, flags, fd, offset);
}
