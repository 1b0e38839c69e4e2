#include "host/builder.h"

int builder_run(const struct config *config, struct sandbox_host *host, const struct host_image_spec *spec,
                int (*progress)(void *context, const char *line), int (*canceled)(void *context), void *context,
                struct error *e)
{
	return error_set(e, ERROR_UNSUPPORTED, "this helper was built without the image builder");
}
