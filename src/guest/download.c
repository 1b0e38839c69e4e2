#include "guest/download.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <time.h>

#include "base/text.h"

/* Digits at *p into *ret; 0 or -1 if there are none or too many. */
static int parse_number(const char **p, uint64_t *ret)
{
	char digits[24];
	size_t n = strspn(*p, "0123456789");
	if (n == 0 || n >= sizeof(digits))
		return -1;
	memcpy(digits, *p, n);
	digits[n] = 0;
	*p += n;
	return text_parse_u64(digits, UINT64_MAX, ret) < 0 ? -1 : 0;
}

enum download_range download_parse_range(const char *range, uint64_t size, uint64_t *ret_from, uint64_t *ret_to)
{
	uint64_t from = 0, to = 0;
	if (!range || strncasecmp(range, "bytes=", 6) != 0)
		return DOWNLOAD_WHOLE;
	const char *p = range + 6 + strspn(range + 6, " \t");
	int is_suffix = *p == '-';
	if (is_suffix) {
		p++;
		if (parse_number(&p, &to) < 0)
			return DOWNLOAD_WHOLE;
	} else {
		if (parse_number(&p, &from) < 0 || *p++ != '-')
			return DOWNLOAD_WHOLE;
		to = UINT64_MAX;
		if (*p >= '0' && *p <= '9' && (parse_number(&p, &to) < 0 || to < from))
			return DOWNLOAD_WHOLE;
	}
	p += strspn(p, " \t");
	if (*p)
		return DOWNLOAD_WHOLE;
	if (is_suffix) {
		if (to == 0 || size == 0)
			return DOWNLOAD_UNSATISFIABLE;
		from = to >= size ? 0 : size - to;
		to = size - 1;
	}
	if (from >= size)
		return DOWNLOAD_UNSATISFIABLE;
	*ret_from = from;
	*ret_to = MIN(to, size - 1);
	return DOWNLOAD_PART;
}

/* A weight such as "0.5" in thousandths; 1000 for anything malformed. */
static int parse_weight(const char *text)
{
	if (text[0] != '0' && text[0] != '1')
		return 1000;
	int weight = text[0] == '1' ? 1000 : 0;
	if (text[0] == '0' && text[1] == '.')
		for (int i = 0, unit = 100; i < 3 && text[2 + i] >= '0' && text[2 + i] <= '9'; i++, unit /= 10)
			weight += (text[2 + i] - '0') * unit;
	return weight;
}

struct weights {
	int gzip, identity, any; /* -1: not named */
	int has_others;          /* codings that are not offered here, such as deflate or br */
};

static struct weights parse_accept(const char *accept)
{
	struct weights w = {.gzip = -1, .identity = -1, .any = -1};
	for (const char *p = accept; *p;) {
		p += strspn(p, " \t,");
		size_t size = strcspn(p, " \t,;");
		size_t item = strcspn(p, ",");
		const char *q = memchr(p, ';', item);
		int weight = 1000;
		if (q) {
			q += 1 + strspn(q + 1, " \t");
			if ((*q == 'q' || *q == 'Q') && q[1] == '=')
				weight = parse_weight(q + 2);
		}
		if ((size == 4 && strncasecmp(p, "gzip", 4) == 0) || (size == 6 && strncasecmp(p, "x-gzip", 6) == 0)) {
			w.gzip = weight;
		} else if (size == 8 && strncasecmp(p, "identity", 8) == 0) {
			w.identity = weight;
		} else if (size == 1 && *p == '*') {
			w.any = weight;
		} else if (size > 0) {
			w.has_others = 1;
		}
		p += item;
	}
	return w;
}

int download_identity_is_acceptable(const char *accept)
{
	struct weights w = parse_accept(accept ? accept : "");
	return w.identity > 0 || (w.identity < 0 && w.any != 0);
}

enum download_encoding download_negotiate(const char *accept)
{
	struct weights w = parse_accept(accept ? accept : "");
	int is_identity_fine = download_identity_is_acceptable(accept);
	int gzip = w.gzip >= 0 ? w.gzip : !is_identity_fine && w.any > 0 ? w.any : 0;
	if (gzip <= 0)
		return is_identity_fine ? DOWNLOAD_IDENTITY : DOWNLOAD_NOT_ACCEPTABLE;
	if (!is_identity_fine)
		return DOWNLOAD_GZIP;
	/* A client that lists every coding it knows does so by default and did not ask for one; only "gzip" was asked for.
	 */
	return gzip > MAX(w.identity, w.any) && !w.has_others ? DOWNLOAD_GZIP : DOWNLOAD_IDENTITY;
}

int download_disposition(struct buf *b, const char *name)
{
	static const char attribute_chars[] = "!#$&+-.^_`|~";
	int is_plain = 1;
	int r = buf_append_string(b, "inline; filename=\"");
	for (const char *p = name; *p && r == 0; p++) {
		int is_special = (unsigned char)*p < 0x20 || (unsigned char)*p >= 0x7f || *p == '"' || *p == '\\' || *p == '%';
		is_plain = is_plain && !is_special;
		r = buf_append(b, is_special ? "_" : p, 1);
	}
	if (r == 0)
		r = buf_append_string(b, "\"");
	if (is_plain || r < 0)
		return r;
	r = buf_append_string(b, "; filename*=UTF-8''");
	for (const char *p = name; *p && r == 0; p++) {
		unsigned char c = (unsigned char)*p;
		int is_alnum = (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z');
		r = is_alnum || strchr(attribute_chars, c) ? buf_append(b, p, 1) : buf_printf(b, "%%%02X", c);
	}
	return r;
}

const char *download_content_type(const char *name)
{
	static const struct {
		const char *ending, *type;
	} types[] = {
	    {".txt", "text/plain; charset=utf-8"},
	    {".log", "text/plain; charset=utf-8"},
	    {".md", "text/markdown; charset=utf-8"},
	    {".csv", "text/csv; charset=utf-8"},
	    {".html", "text/html; charset=utf-8"},
	    {".htm", "text/html; charset=utf-8"},
	    {".css", "text/css; charset=utf-8"},
	    {".js", "text/javascript; charset=utf-8"},
	    {".json", "application/json"},
	    {".xml", "application/xml"},
	    {".pdf", "application/pdf"},
	    {".png", "image/png"},
	    {".jpg", "image/jpeg"},
	    {".jpeg", "image/jpeg"},
	    {".gif", "image/gif"},
	    {".svg", "image/svg+xml"},
	    {".webp", "image/webp"},
	    {".mp3", "audio/mpeg"},
	    {".wav", "audio/wav"},
	    {".mp4", "video/mp4"},
	    {".webm", "video/webm"},
	    {".zip", "application/zip"},
	    {".wasm", "application/wasm"},
	};
	const char *dot = strrchr(name, '.');
	for (size_t i = 0; dot && i < ARRAY_SIZE(types); i++)
		if (strcasecmp(dot, types[i].ending) == 0)
			return types[i].type;
	return "application/octet-stream";
}

void download_etag(char to[DOWNLOAD_ETAG_BYTES], const struct stat *st)
{
	snprintf(to, DOWNLOAD_ETAG_BYTES, "\"%llx-%llx-%llx\"", (unsigned long long)st->st_ino,
	         (unsigned long long)st->st_size,
	         (unsigned long long)st->st_mtim.tv_sec * 1000000000ULL + (unsigned long long)st->st_mtim.tv_nsec);
}

void download_date(char to[DOWNLOAD_DATE_BYTES], time_t time)
{
	static const char days[7][4] = {"Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"};
	static const char months[12][4] = {"Jan", "Feb", "Mar", "Apr", "May", "Jun",
	                                   "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"};
	struct tm tm;
	if (!gmtime_r(&time, &tm) || tm.tm_year < 0 || tm.tm_year > 8099) {
		to[0] = 0;
		return;
	}
	snprintf(to, DOWNLOAD_DATE_BYTES, "%s, %02d %s %04d %02d:%02d:%02d GMT", days[tm.tm_wday], tm.tm_mday,
	         months[tm.tm_mon], tm.tm_year + 1900, tm.tm_hour, tm.tm_min, tm.tm_sec);
}

int download_etag_matches(const char *list, const char *etag, int is_strong)
{
	size_t size = strlen(etag);
	for (const char *p = list; *p;) {
		p += strspn(p, " \t,");
		if (*p == '*')
			return 1;
		int is_weak = p[0] == 'W' && p[1] == '/';
		if (is_weak)
			p += 2;
		size_t item = strcspn(p, ",");
		if (!(is_weak && is_strong) && item >= size && strncmp(p, etag, size) == 0)
			return 1;
		p += item;
	}
	return 0;
}
