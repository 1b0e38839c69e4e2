/*
 * Preloaded into QEMU: opens of "/space/fd/N" give a duplicate of the inherited descriptor N.
 *
 * QEMU 7.2 opens the file behind guest memory for reading and writing even if it maps it privately, and takes kernel
 * and initrd by path only. With this library a VMM needs no path in its file system at all, and the memory file, which
 * other sandboxes map as well, reaches it through a read-only descriptor that no open() can widen: a VMM that its guest
 * has taken over cannot write to it. (A private mapping only asks for a readable descriptor.)
 *
 * Every open() the C library offers to programs is covered, since which one a program uses depends on how it was
 * compiled; anything else goes on to the C library.
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

#define PREFIX "/space/fd/"
#define FD_FIRST 3
#define FD_LAST 19

/* The descriptor a path stands for, -1 if it is an ordinary one. */
static int descriptor_of(const char *path)
{
	int n = 0;

	if (!path || strncmp(path, PREFIX, sizeof(PREFIX) - 1) != 0)
		return -1;
	path += sizeof(PREFIX) - 1;
	if (!*path || strlen(path) > 2)
		return -1;
	for (; *path; path++) {
		if (*path < '0' || *path > '9')
			return -1;
		n = n * 10 + (*path - '0');
	}
	return n >= FD_FIRST && n <= FD_LAST ? n : -1;
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
	int fd = descriptor_of(path);

	if (fd >= 0)
		return duplicate(fd);
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
	int fd = descriptor_of(path);

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
