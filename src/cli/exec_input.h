/* The input side of exec_stream.h: a thread that sends what the caller's `input` yields, then closes stdin. */
#ifndef SPACE_CLI_EXEC_INPUT_H
#define SPACE_CLI_EXEC_INPUT_H

#include "cli/exec_stream.h"

struct exec_input;

/* `on_failure` is called on the input thread when input cannot be delivered; exec_input_error() then tells why. */
int exec_input_new(const struct api *api, const struct exec_stream_request *request,
                   const struct exec_stream_handlers *handlers, void (*on_failure)(void *context), void *context,
                   struct exec_input **ret, struct error *e);
int exec_input_start(struct exec_input *input, uint64_t pid, struct error *e);
int exec_input_error(struct exec_input *input, struct error *e);
/* Stops the thread and waits for it. */
void exec_input_free(struct exec_input *input);

#endif
