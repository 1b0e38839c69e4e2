/*
 * Fuzz harnesses: each file has LLVMFuzzerTestOneInput(), which libFuzzer or replay.c calls. A harness must accept any
 * bytes; besides not crashing it states what has to hold (FUZZ_CHECK), above all that a parser finds the same whether
 * its input comes whole or in pieces.
 */
#ifndef SPACE_TESTS_FUZZ_H
#define SPACE_TESTS_FUZZ_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define FUZZ_CHECK(condition)                                                                                          \
	do {                                                                                                               \
		if (!(condition)) {                                                                                            \
			fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition);                             \
			abort();                                                                                                   \
		}                                                                                                              \
	} while (0)

/* An exact copy on the heap, so that a read past its end is found; free() it. Never NULL. */
static inline void *fuzz_copy(const void *data, size_t size)
{
	unsigned char *copy = calloc(size ? size : 1, 1);
	if (!copy)
		abort();
	for (size_t i = 0; i < size; i++)
		copy[i] = ((const unsigned char *)data)[i];
	return copy;
}

/* A running checksum (FNV-1a), to compare what callbacks were given. */
static inline uint64_t fuzz_sum(uint64_t sum, const void *data, size_t size)
{
	for (size_t i = 0; i < size; i++)
		sum = (sum ^ ((const unsigned char *)data)[i]) * UINT64_C(0x100000001b3);
	return sum;
}

#endif
