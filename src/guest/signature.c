/*
 * Who may use /files: everybody while no access token is set, the holder of the token, or of a signed link.
 *
 * A v1 signature is "v1_" and the unpadded base64 of SHA-256(path ":" operation ":" user ":" token [":" expiry]), over
 * path and user exactly as they stand in the query (decoded) and the expiry in Unix seconds. It binds path, operation,
 * user, expiry and, through the token, the session. Expiry is measured by the host's time: setting the guest's clock
 * back does not prolong a link.
 */
#include <errno.h>
#include <sodium.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/text.h"
#include "guest/request.h"

#define SIGNATURE_PREFIX "v1_"
#define SIGNATURE_BYTES 64

/* Realtime minus CLOCK_BOOTTIME when the host told the time; 0 if it never did. */
static atomic_llong host_offset_ns;

static int64_t boottime_ns(void)
{
	struct timespec ts;
	clock_gettime(CLOCK_BOOTTIME, &ts);
	return (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
}

void agent_note_host_time(uint64_t realtime_ns)
{
	if (realtime_ns <= INT64_MAX)
		atomic_store(&host_offset_ns, (int64_t)realtime_ns - boottime_ns());
}

uint64_t agent_host_time_ms(void)
{
	int64_t offset = atomic_load(&host_offset_ns);
	return offset ? (uint64_t)((boottime_ns() + offset) / 1000000) : time_realtime_ms();
}

static void hash_field(crypto_hash_sha256_state *state, const char *text, int is_last)
{
	crypto_hash_sha256_update(state, (const unsigned char *)text, strlen(text));
	if (!is_last)
		crypto_hash_sha256_update(state, (const unsigned char *)":", 1);
}

static void make_signature(char to[SIGNATURE_BYTES], const char *path, const char *operation, const char *user,
                           const char *token, const char *expiry)
{
	crypto_hash_sha256_state state;
	unsigned char digest[crypto_hash_sha256_BYTES];
	crypto_hash_sha256_init(&state);
	hash_field(&state, path, 0);
	hash_field(&state, operation, 0);
	hash_field(&state, user, 0);
	hash_field(&state, token, !expiry);
	if (expiry)
		hash_field(&state, expiry, 1);
	crypto_hash_sha256_final(&state, digest);
	memcpy(to, SIGNATURE_PREFIX, sizeof(SIGNATURE_PREFIX));
	size_t n = text_base64(to + sizeof(SIGNATURE_PREFIX) - 1, digest, sizeof(digest)) + sizeof(SIGNATURE_PREFIX) - 1;
	while (n > 0 && to[n - 1] == '=')
		to[--n] = 0;
	explicit_bzero(&state, sizeof(state));
}

static int check_link(const struct request *r, const char *path, const char *operation, const char *user,
                      const char *token, struct error *e)
{
	CLEANUP_FREE char *signature = NULL, *expiry = NULL;
	int q = request_query(r, "signature", &signature);
	if (q == -ENOENT)
		return error_set(e, ERROR_UNAUTHENTICATED, "an access token or a signature is needed");
	int x = request_query(r, "signature_expiration", &expiry);
	/* The number is hashed as it was sent: only the canonical form of it can match. */
	uint64_t until = 0;
	if (q < 0 || (x < 0 && x != -ENOENT) || (x == 0 && text_parse_u64(expiry, INT64_MAX, &until) < 0))
		return error_set(e, ERROR_UNAUTHENTICATED, "invalid signature");
	char expected[SIGNATURE_BYTES];
	make_signature(expected, path, operation, user, token, expiry);
	int is_equal = text_equal_secret(expected, signature);
	explicit_bzero(expected, sizeof(expected));
	if (!is_equal)
		return error_set(e, ERROR_UNAUTHENTICATED, "invalid signature");
	/* A lifetime of 0 s has run out at once. */
	if (expiry && until <= agent_host_time_ms() / 1000)
		return error_set(e, ERROR_UNAUTHENTICATED, "signature_expired: the signed link has run out");
	return 0;
}

int agent_check_signature(const struct request *r, const char *path, const char *operation, const char *user,
                          struct error *e)
{
	char *token = agent_access_token();
	if (!token)
		return 0;
	const char *sent = request_header(r, "x-access-token");
	int q;
	if (sent && sent[0])
		q = text_equal_secret(sent, token) ? 0 : error_set(e, ERROR_UNAUTHENTICATED, "the access token does not match");
	else
		q = check_link(r, path, operation, user, token, e);
	explicit_bzero(token, strlen(token));
	free(token);
	return q;
}
