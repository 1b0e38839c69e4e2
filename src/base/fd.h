/* Descriptors: whole reads and writes, passing over unix sockets, memory files. All descriptors made here are CLOEXEC.
 */
#ifndef SPACE_BASE_FD_H
#define SPACE_BASE_FD_H

#include <sys/types.h>

#include "base/macros.h"

#define FD_PASS_MAX 16

/* Reads until `size` bytes or end of file; returns the count (short only at end of file) or -errno. */
ssize_t fd_read_full(int fd, void *data, size_t size);
ssize_t fd_pread_full(int fd, void *data, size_t size, off_t offset);
/* Writes all bytes. 0 or -errno. SIGPIPE is the caller's concern (use MSG_NOSIGNAL on sockets or ignore it). */
int fd_write_full(int fd, const void *data, size_t size);
int fd_pwrite_full(int fd, const void *data, size_t size, off_t offset);
/* Reads a whole file into a new NUL-terminated heap buffer (free it), at most `limit` bytes (-EFBIG). */
int fd_read_file(int dirfd, const char *path, size_t limit, char **ret_data, size_t *ret_size);
/* Creates or replaces `path` by way of a temporary name, synced before the rename. */
int fd_write_file_atomic(int dirfd, const char *path, const void *data, size_t size, unsigned mode);
/* Sends one message of a SEQPACKET (or STREAM) unix socket with up to FD_PASS_MAX descriptors (not closed). */
int fd_send_message(int sock, const void *data, size_t size, const int *fds, size_t fd_count);
/* Receives one message; descriptors are CLOEXEC and the caller's. Returns its size, 0 at end of file, -errno.
 * -EMSGSIZE if it did not fit (all descriptors are closed then). *ret_fd_count is set in any case. */
ssize_t fd_receive_message(int sock, void *data, size_t size, int *fds, size_t fd_capacity, size_t *ret_fd_count);
/* An anonymous memory file of `size` bytes. */
int fd_memfd(const char *name, size_t size);
int fd_set_nonblocking(int fd, int on);

#endif
