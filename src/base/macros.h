/* Compiler attributes and ownership helpers that every room may use. */
#ifndef SPACE_BASE_MACROS_H
#define SPACE_BASE_MACROS_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#define PRINTF_LIKE(fmt, args) __attribute__((format(printf, fmt, args)))
#define UNUSED __attribute__((unused))
#define MUST_CHECK __attribute__((warn_unused_result))

#define ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))
/* <sys/param.h>, which libuv includes, has the same two. */
#ifndef MIN
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
#endif

#define KIB UINT64_C(1024)
#define MIB (KIB * 1024)
#define GIB (MIB * 1024)

/* Frees a heap pointer when its variable leaves scope. */
#define CLEANUP_FREE __attribute__((cleanup(space_cleanup_free)))
/* Closes a descriptor (if >= 0) when its variable leaves scope. */
#define CLEANUP_CLOSE __attribute__((cleanup(space_cleanup_close)))

void space_cleanup_free(void *pointer_to_pointer);
void space_cleanup_close(int *fd);

/* Hand an owned pointer or descriptor over to somebody else: yields the value and disarms the cleanup.
 * The argument is evaluated once. */
#define TAKE_PTR(p)                                                                                                    \
	({                                                                                                                 \
		__typeof__(p) *from_ = &(p);                                                                                   \
		__typeof__(p) taken_ = *from_;                                                                                 \
		*from_ = NULL;                                                                                                 \
		taken_;                                                                                                        \
	})
#define TAKE_FD(fd)                                                                                                    \
	({                                                                                                                 \
		int *from_ = &(fd);                                                                                            \
		int taken_ = *from_;                                                                                           \
		*from_ = -1;                                                                                                   \
		taken_;                                                                                                        \
	})

#endif
