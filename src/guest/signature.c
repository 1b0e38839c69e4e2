/*
 * Who may use /files: everybody while no access token is set, the holder of the token, or of a signed link.
 *
 * A v1 signature is "v1_" and the unpadded base64 of SHA-256(path ":" operation ":" user ":" token [":" expiry]), over
 * path and user exactly as they stand in the query (decoded) and the expiry in Unix seconds. It binds path, operation,
 * user, expiry and, through the token, the session.
 */
#include <errno.h>
#include <sodium.h>
#include <stdio.h>
#include <string.h>

#include "base/text.h"
#include "guest/request.h"

#define SIGNATURE_PREFIX "v1_"
#define SIGNATURE_BYTES 64

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
	if (expiry && until <= time_realtime_ms() / 1000)
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
