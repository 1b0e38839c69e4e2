#include "guest/process_event.h"

#include <ctype.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "base/text.h"
#include "guest/connect.h"

char *process_event_raw(char *buffer)
{
	return buffer + PROCESS_EVENT_FRONT_BYTES + PROCESS_EVENT_TEXT_BYTES - PROCESS_EVENT_RAW_BYTES;
}

static int send_plain(struct connection *c, const char *data, size_t size)
{
	int r = c->out.size ? connection_flush(c) : c->failure;
	while (r == 0 && size) {
		ssize_t n = send(c->fd, data, size, MSG_NOSIGNAL);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0) {
			r = c->failure = -errno;
			break;
		}
		data += n;
		size -= (size_t)n;
	}
	return r;
}

/*
 * In place: the raw bytes stand at the end of the text's room and their encoding is written from its front. The writer
 * starts a third of the size ahead and gains one byte on the reader with every three read, so it never passes it.
 */
int process_event_send_data(struct request *r, char *buffer, size_t size, const char *stream, uint64_t offset,
                            size_t collect)
{
	static const char tail[] = "\"}}}";
	struct connection *c = r->connection;
	char head[96];
	char frame[32];
	char *text = buffer + PROCESS_EVENT_FRONT_BYTES;
	size_t text_size = text_base64(text, process_event_raw(buffer), size);
	int head_size = snprintf(head, sizeof(head), "{\"event\":{\"data\":{\"offset\":%llu,\"%s\":\"",
	                         (unsigned long long)offset, stream);
	char *end = text + text_size;
	memcpy(end, tail, sizeof(tail) - 1);
	end += sizeof(tail) - 1;
	char *json = text - head_size;
	memcpy(json, head, (size_t)head_size);
	size_t json_size = (size_t)(end - json);
	if (c->out.size + json_size < collect)
		return connect_stream_queue(r, json, json_size);
	char *start = json - CONNECT_ENVELOPE_BYTES;
	start[0] = 0;
	start[1] = (char)(json_size >> 24);
	start[2] = (char)(json_size >> 16);
	start[3] = (char)(json_size >> 8);
	start[4] = (char)json_size;
	if (c->is_chunked) {
		int n = snprintf(frame, sizeof(frame), "%zx\r\n", json_size + CONNECT_ENVELOPE_BYTES);
		start -= n;
		memcpy(start, frame, (size_t)n);
		memcpy(end, "\r\n", 2);
		end += 2;
	}
	return send_plain(c, start, (size_t)(end - start));
}

int process_event_queue_start(struct request *r, const struct process *p)
{
	char text[64];
	int n = snprintf(text, sizeof(text), "{\"event\":{\"start\":{\"pid\":%d}}}", (int)p->pid);
	return connect_stream_queue(r, text, (size_t)n);
}

int process_event_queue_gap(struct request *r, uint64_t from, uint64_t to)
{
	char text[128];
	int n = snprintf(text, sizeof(text), "{\"event\":{\"gap\":{\"from\":%llu,\"to\":%llu}}}", (unsigned long long)from,
	                 (unsigned long long)to);
	return connect_stream_queue(r, text, (size_t)n);
}

struct outcome {
	int exit_code; /* -1 for a signal, as envd says it */
	int exited;
	int signal;
	char signal_name[24];
	char status[64];
};

static void read_outcome(int wait_status, struct outcome *o)
{
	memset(o, 0, sizeof(*o));
	if (WIFEXITED(wait_status)) {
		o->exited = 1;
		o->exit_code = WEXITSTATUS(wait_status);
		snprintf(o->status, sizeof(o->status), "exit status %d", o->exit_code);
		return;
	}
	o->exit_code = -1;
	o->signal = WTERMSIG(wait_status);
	const char *name = sigabbrev_np(o->signal);
	const char *words = sigdescr_np(o->signal);
	if (name)
		snprintf(o->signal_name, sizeof(o->signal_name), "SIG%s", name);
	else
		snprintf(o->signal_name, sizeof(o->signal_name), "SIGRT%d", o->signal - SIGRTMIN);
	snprintf(o->status, sizeof(o->status), "signal: %s%s", words ? words : o->signal_name,
	         WCOREDUMP(wait_status) ? " (core dumped)" : "");
	if (words)
		o->status[8] = (char)tolower((unsigned char)o->status[8]);
}

int process_event_queue_end(struct request *r, struct process *p)
{
	struct outcome o;
	char text[512];
	char failure[128] = "";
	read_outcome(p->wait_status, &o);
	if (!o.exited || o.exit_code != 0)
		snprintf(failure, sizeof(failure), ",\"error\":\"%s\"", o.status);
	int n = snprintf(text, sizeof(text),
	                 "{\"event\":{\"end\":{\"exitCode\":%d,\"exited\":%s,\"status\":\"%s\"%s,\"signal\":%d,"
	                 "\"signalName\":\"%s\"}}}",
	                 o.exit_code, o.exited ? "true" : "false", o.status, failure, o.signal, o.signal_name);
	return connect_stream_queue(r, text, (size_t)n);
}

json_t *process_event_describe(struct process *p, int all)
{
	struct outcome o;
	char started[32];
	pthread_mutex_lock(&p->lock);
	int ended = p->is_ended;
	int status = p->wait_status;
	json_t *config = json_incref(p->config);
	pthread_mutex_unlock(&p->lock);
	json_t *entry = NULL;
	if (all || !ended) {
		time_format_rfc3339(started, sizeof(started), p->started_realtime_ms);
		entry = json_pack("{s:O,s:i,s:b,s:s}", "config", config, "pid", (int)p->pid, "running", !ended, "startedAt",
		                  started);
		if (entry && p->tag)
			json_object_set_new(entry, "tag", json_string(p->tag));
		if (entry && ended) {
			read_outcome(status, &o);
			json_object_set_new(entry, "exitCode", json_integer(o.exit_code));
			json_object_set_new(entry, "signal", json_integer(o.signal));
		}
	}
	json_decref(config);
	return entry;
}
