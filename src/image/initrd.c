/*
 * The initrd: an archive in cpio's "newc" format (Documentation/driver-api/early-userspace/buffer-format.rst of the
 * kernel) with the agent as /init and the modules it loads, in the order of /modules/order. Not compressed: unpacking
 * costs an emulated processor more than reading.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/text.h"
#include "image/build.h"

#define MODULES_MAX 64
#define FILE_BYTES_MAX ((size_t)(32 * MIB))
#define LIST_BYTES_MAX ((size_t)(4 * MIB))
#define UNPACK_TIMEOUT_S 60

struct archive {
	struct buf data;
	unsigned inode;
};

static int pad(struct archive *a)
{
	static const char zeros[4] = "";

	return buf_append(&a->data, zeros, (4 - a->data.size % 4) % 4);
}

static int append_entry(struct archive *a, const char *name, mode_t mode, dev_t device, const void *data, size_t size,
                        struct error *e)
{
	unsigned name_size = (unsigned)strlen(name) + 1;
	int r = buf_printf(&a->data, "070701%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X", ++a->inode,
	                   (unsigned)mode, 0U, 0U, S_ISDIR(mode) ? 2U : 1U, (unsigned)IMAGE_EPOCH, (unsigned)size, 0U, 0U,
	                   major(device), minor(device), name_size, 0U);

	if (r == 0)
		r = buf_append(&a->data, name, name_size);
	if (r == 0)
		r = pad(a);
	if (r == 0 && size)
		r = buf_append(&a->data, data, size);
	if (r == 0)
		r = pad(a);
	return r < 0 ? error_set(e, ERROR_EXHAUSTED, "out of memory for the initrd") : 0;
}

/* Modules in the order of loading, as paths below b->modules. */
struct load_order {
	char *paths[MODULES_MAX];
	size_t count;
};

/* "kernel/…/virtio_blk.ko.xz" is "virtio_blk"; names use - and _ alike. */
static int is_module(const char *path, size_t size, const char *name)
{
	const char *slash = memrchr(path, '/', size);
	size_t length = strlen(name);

	if (slash) {
		size -= (size_t)(slash + 1 - path);
		path = slash + 1;
	}
	if (size < length + 3 || strncmp(path + length, ".ko", 3) != 0)
		return 0;
	for (size_t i = 0; i < length; i++)
		if (path[i] != name[i] && !(strchr("-_", path[i]) && strchr("-_", name[i])))
			return 0;
	return 1;
}

static int order_add(struct load_order *order, const char *path, size_t size, struct error *e)
{
	for (size_t i = 0; i < order->count; i++)
		if (strlen(order->paths[i]) == size && memcmp(order->paths[i], path, size) == 0)
			return 0;
	if (order->count >= MODULES_MAX)
		return error_set(e, ERROR_TOO_LARGE, "more than %d modules in the initrd", MODULES_MAX);
	order->paths[order->count] = strndup(path, size);
	if (!order->paths[order->count])
		return error_set(e, ERROR_EXHAUSTED, "out of memory");
	order->count++;
	return 0;
}

/* A line of modules.dep: "MODULE: NEEDED…", what is needed first comes last. */
static int order_add_line(struct load_order *order, const char *line, size_t module_size, struct error *e)
{
	const char *end = strchrnul(line, '\n');
	const char *start = line + module_size + 1;

	while (end > start) {
		const char *word = end;

		while (word > start && word[-1] != ' ')
			word--;
		if (end > word) {
			int r = order_add(order, word, (size_t)(end - word), e);
			if (r < 0)
				return r;
		}
		end = word > start ? word - 1 : start;
	}
	return order_add(order, line, module_size, e);
}

static int order_add_module(struct load_order *order, const char *dependencies, const char *builtin, const char *name,
                            int required, struct error *e)
{
	for (const char *line = dependencies; *line; line = strchrnul(line, '\n') + 1) {
		size_t size = strcspn(line, ":\n");

		if (line[size] == ':' && is_module(line, size, name))
			return order_add_line(order, line, size, e);
		if (!*strchrnul(line, '\n'))
			break;
	}
	for (const char *line = builtin; *line; line += strspn(line, "\n")) {
		size_t size = strcspn(line, "\n");

		if (is_module(line, size, name))
			return 0;
		line += size;
	}
	return required ? error_set(e, ERROR_UNSUPPORTED, "the kernel package has no module %s", name) : 0;
}

static int find_order(struct image_build *b, struct load_order *order, struct error *e)
{
	static const struct {
		const char *name;
		int required;
	} wanted[] = {{"virtio_mmio", 1}, {"virtio_blk", 1}, {"virtio_net", 1}, {"pvpanic-mmio", 0}};
	CLEANUP_CLOSE int dir = open(b->modules, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	CLEANUP_FREE char *dependencies = NULL;
	CLEANUP_FREE char *builtin = NULL;
	size_t size;
	int r = dir < 0 ? -errno : fd_read_file(dir, "modules.dep", LIST_BYTES_MAX, &dependencies, &size);

	if (r >= 0)
		r = fd_read_file(dir, "modules.builtin", LIST_BYTES_MAX, &builtin, &size);
	if (r < 0)
		return error_set_errno(e, r, "read the list of modules");
	for (size_t i = 0; i < ARRAY_SIZE(wanted); i++) {
		r = order_add_module(order, dependencies, builtin, wanted[i].name, wanted[i].required, e);
		if (r < 0)
			return r;
	}
	return 0;
}

/* The agent loads plain modules only. */
static int read_module(struct image_build *b, const char *relative, struct buf *ret, struct error *e)
{
	static const struct {
		const char *suffix;
		const char *program;
	} packers[] = {{".ko.xz", "xz"}, {".ko.zst", "zstd"}, {".ko.gz", "gzip"}};
	CLEANUP_FREE char *data = NULL;
	char path[IMAGE_PATH_BYTES];
	size_t size;
	int r = build_path(path, sizeof(path), e, "%s/%s", b->modules, relative);

	if (r < 0)
		return r;
	for (size_t i = 0; i < ARRAY_SIZE(packers); i++) {
		const char *const argv[] = {packers[i].program, "-dc", path, NULL};

		if (text_ends_with(relative, packers[i].suffix))
			return build_run(b, argv, NULL, UNPACK_TIMEOUT_S, ret, e);
	}
	r = fd_read_file(AT_FDCWD, path, FILE_BYTES_MAX, &data, &size);
	if (r >= 0)
		r = buf_append(ret, data, size);
	return r < 0 ? error_set_errno(e, r, "read %s", path) : 0;
}

static int append_modules(struct image_build *b, struct archive *a, const struct load_order *order, struct error *e)
{
	CLEANUP_BUF struct buf list = {.limit = LIST_BYTES_MAX};
	int r = 0;

	for (size_t i = 0; r == 0 && i < order->count; i++) {
		CLEANUP_BUF struct buf module = {.limit = FILE_BYTES_MAX};
		const char *base = strrchr(order->paths[i], '/');
		char name[256], path[272];

		base = base ? base + 1 : order->paths[i];
		if (text_format(name, sizeof(name), "%.*s.ko", (int)(strstr(base, ".ko") - base), base) < 0 ||
		    text_format(path, sizeof(path), "modules/%s", name) < 0)
			return error_set(e, ERROR_INVALID, "the name of module %s is too long", base);
		r = read_module(b, order->paths[i], &module, e);
		if (r == 0)
			r = append_entry(a, path, S_IFREG | 0644, 0, module.data, module.size, e);
		if (r == 0 && buf_printf(&list, "%s\n", name) < 0)
			r = error_set(e, ERROR_EXHAUSTED, "out of memory");
	}
	return r < 0 ? r : append_entry(a, "modules/order", S_IFREG | 0644, 0, list.data, list.size, e);
}

static int append_agent(struct image_build *b, struct archive *a, struct error *e)
{
	CLEANUP_FREE char *data = NULL;
	struct stat st;
	ssize_t n;

	if (fstat(b->spec->agent_fd, &st) < 0)
		return error_set_errno(e, errno, "guest agent");
	if (st.st_size <= 0 || (size_t)st.st_size > FILE_BYTES_MAX)
		return error_set(e, ERROR_INVALID, "a guest agent of %lld bytes cannot be right", (long long)st.st_size);
	data = malloc((size_t)st.st_size);
	if (!data)
		return error_set(e, ERROR_EXHAUSTED, "out of memory");
	n = fd_pread_full(b->spec->agent_fd, data, (size_t)st.st_size, 0);
	if (n != st.st_size)
		return error_set(e, ERROR_INTERNAL, "the guest agent could not be read");
	return append_entry(a, "init", S_IFREG | 0755, 0, data, (size_t)n, e);
}

static int append_all(struct image_build *b, struct archive *a, const struct load_order *order, struct error *e)
{
	static const char *const folders[] = {"dev", "modules", "proc", "root", "sys"};
	int r = 0;

	for (size_t i = 0; r == 0 && i < ARRAY_SIZE(folders); i++)
		r = append_entry(a, folders[i], S_IFDIR | 0755, 0, NULL, 0, e);
	if (r == 0)
		r = append_entry(a, "dev/console", S_IFCHR | 0600, makedev(5, 1), NULL, 0, e);
	if (r == 0)
		r = append_agent(b, a, e);
	if (r == 0)
		r = append_modules(b, a, order, e);
	return r < 0 ? r : append_entry(a, "TRAILER!!!", 0, 0, NULL, 0, e);
}

int initrd_write(struct image_build *b, struct error *e)
{
	struct archive a = {.inode = 0};
	struct load_order order = {.count = 0};
	int r = find_order(b, &order, e);

	if (r == 0)
		r = append_all(b, &a, &order, e);
	if (r == 0 && (ftruncate(b->spec->initrd_fd, 0) < 0))
		r = error_set_errno(e, errno, "write the initrd");
	if (r == 0 && (r = fd_pwrite_full(b->spec->initrd_fd, a.data.data, a.data.size, 0)) < 0)
		r = error_set_errno(e, r, "write the initrd");
	for (size_t i = 0; i < order.count; i++)
		free(order.paths[i]);
	buf_free(&a.data);
	return r < 0 ? error_prefix(e, "make the initrd") : 0;
}
