#include "guest/multipart.h"

#include <errno.h>
#include <string.h>
#include <strings.h>

#include "base/text.h"
#include "guest/path.h"

#define SPECIALS "()<>@,;:\\\"/[]?="

static int is_token_char(char c)
{
	return (unsigned char)c > 0x20 && c != 0x7f && !strchr(SPECIALS, c);
}

/* Copies a quoted string that starts after its opening quote; *from ends up behind the closing one. Only quotes and
 * other specials can be escaped: clients on other systems send back slashes bare. */
static long copy_quoted(const char **from, char *to, size_t to_size)
{
	size_t n = 0;
	const char *p = *from;
	while (*p != '"') {
		if (*p == '\\' && p[1] && strchr(SPECIALS, p[1]))
			p++;
		if (*p == 0)
			return -EINVAL;
		if (n + 1 < to_size)
			to[n] = *p;
		n++;
		p++;
	}
	*from = p + 1;
	if (to_size == 0 || n >= to_size)
		return -ENAMETOOLONG;
	to[n] = 0;
	return (long)n;
}

static long copy_token(const char **from, char *to, size_t to_size)
{
	size_t n = strcspn(*from, "; \t");
	const char *start = *from;
	*from += n;
	if (to_size == 0 || n >= to_size)
		return -ENAMETOOLONG;
	memcpy(to, start, n);
	to[n] = 0;
	return (long)n;
}

long multipart_parameter(const char *value, const char *name, char *to, size_t to_size)
{
	const char *p = value + strcspn(value, ";");
	size_t name_size = strlen(name);
	while (*p == ';') {
		p++;
		p += strspn(p, " \t");
		const char *key = p;
		while (is_token_char(*p))
			p++;
		size_t key_size = (size_t)(p - key);
		p += strspn(p, " \t");
		if (*p != '=') {
			if (*p && *p != ';')
				return -EINVAL;
			continue;
		}
		p++;
		p += strspn(p, " \t");
		int is_wanted = key_size == name_size && strncasecmp(key, name, name_size) == 0;
		char ignored[1];
		long n;
		if (*p == '"') {
			p++;
			n = copy_quoted(&p, is_wanted ? to : ignored, is_wanted ? to_size : sizeof(ignored));
		} else {
			n = copy_token(&p, is_wanted ? to : ignored, is_wanted ? to_size : sizeof(ignored));
		}
		if (is_wanted || n == -EINVAL)
			return n;
		p += strspn(p, " \t");
		if (*p && *p != ';')
			return -EINVAL;
	}
	return -ENOENT;
}

int multipart_init(struct multipart *m, const char *content_type, struct error *e)
{
	m->state = MULTIPART_PREAMBLE;
	m->preamble_bytes = m->part_count = m->line_bytes = m->header_size = 0;
	m->error = NULL;
	char *boundary = m->delimiter + 4;
	long n = multipart_parameter(content_type, "boundary", boundary, MULTIPART_BOUNDARY_MAX + 1);
	if (n <= 0)
		return error_set(e, ERROR_INVALID,
		                 n == -ENAMETOOLONG ? "the multipart boundary is longer than %d bytes"
		                                    : "no multipart boundary (at most %d bytes) is given",
		                 MULTIPART_BOUNDARY_MAX);
	for (long i = 0; i < n; i++)
		if ((unsigned char)boundary[i] < 0x20 || (unsigned char)boundary[i] > 0x7e)
			return error_set(e, ERROR_INVALID, "the multipart boundary holds a control or non-ASCII byte");
	memcpy(m->delimiter, "\r\n--", 4);
	m->delimiter_size = (size_t)n + 4;
	/* The first delimiter may stand at the very start, where no line end comes before it. */
	m->matched = 2;
	return 0;
}

/* Browsers and HTTP libraries write names as the WHATWG form encoding says: quote, CR and LF as %22, %0D, %0A; some do
 * so with every control character. A per cent sign itself is not escaped, hence nothing else may be decoded. */
static void decode_form_escapes(char *text)
{
	char *to = text;
	for (const char *p = text; *p; p++) {
		char pair[3] = {p[0] == '%' ? p[1] : (char)0, p[1] ? p[2] : (char)0, 0};
		char c[2];
		if (pair[0] && pair[1] && (pair[0] == '0' || pair[0] == '1' || memcmp(pair, "22", 2) == 0)) {
			char escape[4] = {'%', pair[0], pair[1], 0};
			if (path_percent_decode(c, sizeof(c), escape, 3) == 1) {
				*to++ = c[0];
				p += 2;
				continue;
			}
		}
		*to++ = *p;
	}
	*to = 0;
}

/* RFC 5987: charset'language'percent-encoded. */
static int decode_extended(char *text)
{
	const char *quote = strchr(text, '\'');
	quote = quote ? strchr(quote + 1, '\'') : NULL;
	if (!quote || strncasecmp(text, "UTF-8'", 6) != 0)
		return -EINVAL;
	char decoded[MULTIPART_FILENAME_BYTES];
	ssize_t n = path_percent_decode(decoded, sizeof(decoded), quote + 1, strlen(quote + 1));
	if (n < 0)
		return (int)n;
	memcpy(text, decoded, (size_t)n + 1);
	return 0;
}

static int parse_disposition(struct multipart *m, const char *value)
{
	struct multipart_part *part = &m->part;
	long n = multipart_parameter(value, "name", part->name, sizeof(part->name));
	if (n < 0 && n != -ENOENT)
		return error_set(m->error, ERROR_INVALID, "multipart: bad field name in Content-Disposition");
	if (n == -ENOENT)
		part->name[0] = 0;
	/* An escaped path of full length is three times as long. */
	char extended[3 * MULTIPART_FILENAME_BYTES + 16];
	n = multipart_parameter(value, "filename*", extended, sizeof(extended));
	if (n >= 0) {
		int r = decode_extended(extended);
		if (r == 0)
			r = text_copy(part->filename, sizeof(part->filename), extended);
		n = r;
	} else if (n == -ENOENT) {
		n = multipart_parameter(value, "filename", part->filename, sizeof(part->filename));
		if (n == -ENOENT)
			return 0;
		if (n >= 0)
			decode_form_escapes(part->filename);
	}
	if (n == -ENAMETOOLONG)
		return error_set(m->error, ERROR_INVALID, "multipart: the file name is too long (ENAMETOOLONG)");
	if (n < 0)
		return error_set(m->error, ERROR_INVALID, "multipart: bad file name in Content-Disposition");
	part->has_filename = 1;
	return 0;
}

/* Header lines of one part, NUL-terminated, CRLF between them. */
static int parse_header(struct multipart *m)
{
	m->part.name[0] = m->part.filename[0] = 0;
	m->part.has_filename = 0;
	char *line = m->header;
	while (*line) {
		char *end = strstr(line, "\r\n");
		char *next = end ? end + 2 : line + strlen(line);
		if (end)
			*end = 0;
		char *colon = strchr(line, ':');
		if (!colon || colon == line)
			return error_set(m->error, ERROR_INVALID, "multipart: a header line of a part has no colon");
		*colon = 0;
		char *value = colon + 1 + strspn(colon + 1, " \t");
		if (strcasecmp(line, "content-disposition") == 0) {
			int r = parse_disposition(m, value);
			if (r < 0)
				return r;
		} else if (strcasecmp(line, "content-transfer-encoding") == 0 && strcasecmp(value, "binary") != 0 &&
		           strcasecmp(value, "8bit") != 0 && strcasecmp(value, "7bit") != 0) {
			return error_set(m->error, ERROR_INVALID, "multipart: this Content-Transfer-Encoding is not supported");
		}
		line = next;
	}
	return 0;
}

/* One byte of the line that follows a delimiter: "--" ends the body, blanks are padding, CRLF starts a part. */
static int feed_line(struct multipart *m, char c)
{
	if (m->line_bytes == 0 && (c == ' ' || c == '\t'))
		return 0;
	m->line[m->line_bytes++] = c;
	if (m->line_bytes < 2)
		return 0;
	m->line_bytes = 0;
	if (memcmp(m->line, "--", 2) == 0) {
		m->state = MULTIPART_EPILOGUE;
		return 0;
	}
	if (memcmp(m->line, "\r\n", 2) != 0)
		return error_set(m->error, ERROR_INVALID, "multipart: a boundary line goes on after the boundary");
	if (++m->part_count > MULTIPART_PARTS_MAX)
		return error_set(m->error, ERROR_TOO_LARGE, "multipart: more than %d parts", MULTIPART_PARTS_MAX);
	m->state = MULTIPART_HEADER;
	m->header_size = 0;
	return 0;
}

static int feed_header(struct multipart *m, char c, const struct multipart_callbacks *callbacks)
{
	if (m->header_size + 1 >= sizeof(m->header))
		return error_set(m->error, ERROR_TOO_LARGE, "multipart: the header of a part is longer than %d bytes",
		                 MULTIPART_HEADER_BYTES_MAX);
	if (c == 0)
		return error_set(m->error, ERROR_INVALID, "multipart: NUL byte in the header of a part");
	m->header[m->header_size++] = c;
	int is_empty = m->header_size == 2 && memcmp(m->header, "\r\n", 2) == 0;
	int is_end = m->header_size >= 4 && memcmp(m->header + m->header_size - 4, "\r\n\r\n", 4) == 0;
	if (!is_empty && !is_end)
		return 0;
	m->header[m->header_size - (is_empty ? 2 : 4)] = 0;
	int r = parse_header(m);
	if (r < 0)
		return r;
	m->state = MULTIPART_DATA;
	/* An empty part: its delimiter's CRLF is the one that ended the header only if there were no header lines, which
	 * RFC 2046 rules out; so matching starts afresh. */
	m->matched = 0;
	return callbacks->begin(callbacks->context, &m->part);
}

/* Looks for the delimiter. Gives data before it to the callback and returns the count of bytes consumed, or -errno. CR
 * stands only at the start of a delimiter, so after a mismatch nothing but that byte itself can start a new match. */
static ssize_t feed_data(struct multipart *m, const char *data, size_t size,
                         int (*emit)(void *context, const void *data, size_t size), void *context)
{
	size_t start = 0, i = 0;
	while (i < size) {
		if (m->matched == 0) {
			const char *cr = memchr(data + i, '\r', size - i);
			i = cr ? (size_t)(cr - data) : size;
			if (i == size)
				break;
			size_t left = size - i;
			if (left >= m->delimiter_size && memcmp(data + i, m->delimiter, m->delimiter_size) != 0) {
				i++;
				continue;
			}
			int r = i > start && emit ? emit(context, data + start, i - start) : 0;
			if (r < 0)
				return r;
			start = i + 1;
			m->matched = 1;
			i++;
			continue;
		}
		if (data[i] == m->delimiter[m->matched]) {
			i++;
			start = i;
			if (++m->matched == m->delimiter_size)
				return (ssize_t)i;
			continue;
		}
		/* In the preamble the first two bytes are assumed, not seen; emit is NULL there. */
		int r = emit ? emit(context, m->delimiter, m->matched) : 0;
		if (r < 0)
			return r;
		m->matched = 0;
	}
	if (m->matched == 0 && size > start && emit) {
		int r = emit(context, data + start, size - start);
		if (r < 0)
			return r;
	}
	return (ssize_t)size;
}

/* Consumes from data in the states that look for a delimiter. */
static ssize_t feed_until_delimiter(struct multipart *m, const char *data, size_t size,
                                    const struct multipart_callbacks *callbacks)
{
	int is_preamble = m->state == MULTIPART_PREAMBLE;
	ssize_t n = feed_data(m, data, size, is_preamble ? NULL : callbacks->data, callbacks->context);
	if (n < 0)
		return n;
	if (is_preamble && (m->preamble_bytes += (size_t)n) > MULTIPART_PREAMBLE_BYTES_MAX)
		return error_set(m->error, ERROR_INVALID, "multipart: no boundary in the first %d bytes",
		                 MULTIPART_PREAMBLE_BYTES_MAX);
	if (m->matched == m->delimiter_size) {
		m->matched = 0;
		m->line_bytes = 0;
		m->state = MULTIPART_LINE;
		int r = is_preamble ? 0 : callbacks->end(callbacks->context);
		if (r < 0)
			return r;
	}
	return n;
}

int multipart_feed(struct multipart *m, const void *data, size_t size, const struct multipart_callbacks *callbacks,
                   struct error *e)
{
	const char *p = data;
	m->error = e;
	while (size > 0) {
		ssize_t n = 1;
		switch (m->state) {
		case MULTIPART_PREAMBLE:
		case MULTIPART_DATA:
			n = feed_until_delimiter(m, p, size, callbacks);
			break;
		case MULTIPART_LINE: {
			int r = feed_line(m, *p);
			n = r < 0 ? r : 1;
			break;
		}
		case MULTIPART_HEADER: {
			int r = feed_header(m, *p, callbacks);
			n = r < 0 ? r : 1;
			break;
		}
		case MULTIPART_EPILOGUE:
			return 0;
		}
		if (n < 0)
			return (int)n;
		p += n;
		size -= (size_t)n;
	}
	return 0;
}

int multipart_finish(const struct multipart *m, struct error *e)
{
	if (m->state == MULTIPART_EPILOGUE)
		return 0;
	return error_set(e, ERROR_INVALID, "multipart: the body ends before its closing boundary");
}
