#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/text.h"
#include "vmm/qemu_arguments.h"
#include "vmm/qmp.h"
#include "vmm/vmm.h"

#define PROBE_TIMEOUT_MS 20000
#define PROBE_MEMORY_BYTES (512 * MIB)
#define PROBE_PIDS 32
#define CPUINFO_BYTES_MAX ((size_t)(4 * MIB))

/*
 * The flags of the first processor. /dev/kvm alone is not enough: some hosts offer one that only runs guests made for
 * it, on which an ordinary kernel never finishes booting.
 */
static int has_flag(const char *cpuinfo, const char *flag)
{
	const char *line = strstr(cpuinfo, "\nflags");
	const char *end = line ? strchr(line + 1, '\n') : NULL;
	size_t size = strlen(flag);

	for (const char *at = line; at && (at = strstr(at, flag)) && (!end || at < end); at += size)
		if ((at[-1] == ' ' || at[-1] == '\t') && (at[size] == ' ' || at[size] == '\n'))
			return 1;
	return 0;
}

static enum vmm_accel choose_accel(const char **ret_reason)
{
	CLEANUP_FREE char *cpuinfo = NULL;
	size_t size;

	if (access("/dev/kvm", F_OK) != 0) {
		*ret_reason = "this host has no /dev/kvm";
		return VMM_ACCEL_TCG;
	}
	if (fd_read_file(AT_FDCWD, "/proc/cpuinfo", CPUINFO_BYTES_MAX, &cpuinfo, &size) < 0 ||
	    (!has_flag(cpuinfo, "vmx") && !has_flag(cpuinfo, "svm"))) {
		*ret_reason = "/dev/kvm exists but the processor offers neither vmx nor svm, so an ordinary kernel cannot run";
		return VMM_ACCEL_TCG;
	}
	*ret_reason = "/dev/kvm exists and the processor offers vmx or svm";
	return VMM_ACCEL_KVM;
}

/* Starts the engine the way sandboxes are started and asks it for its version: the one answer that cannot be wrong. */
static int ask_version(struct host_client *helper, char *to, size_t size, struct error *e)
{
	CLEANUP_CLOSE int theirs = -1;
	CLEANUP_CLOSE int pidfd = -1;
	struct qemu_arguments a;
	struct host_sandbox_spec spec;
	char id[ID_BYTES];
	struct qmp qmp;
	int ends[2], r;
	pid_t pid;

	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) < 0)
		return error_set_errno(e, errno, "socketpair");
	theirs = ends[1];
	qmp_init(&qmp);
	qmp.fd = ends[0];
	r = qemu_arguments_probe(&a, theirs, e);
	if (r == 0) {
		id_make(id, 'b');
		spec = (struct host_sandbox_spec){.id = id,
		                                  .program = "qemu",
		                                  .arguments = a.list,
		                                  .fds = a.fds,
		                                  .fd_count = a.fd_count,
		                                  .memory_max_bytes = PROBE_MEMORY_BYTES,
		                                  .pids_max = PROBE_PIDS,
		                                  .preload_environment = "vmm-shim"};
		r = host_sandbox_start(helper, &spec, &pid, &pidfd, e);
		qemu_arguments_free(&a);
		if (r == 0) {
			r = qmp_attach(&qmp, qmp.fd, pidfd, PROBE_TIMEOUT_MS, e);
			if (r == 0)
				r = text_copy(to, size, qmp.version);
			(void)host_sandbox_kill(helper, id, NULL);
		}
	}
	qmp_close(&qmp);
	return r;
}

int vmm_probe(struct host_client *helper, struct vmm_host *ret, char *why, size_t why_size, struct error *e)
{
	const char *reason;
	int r;

	memset(ret, 0, sizeof(*ret));
	ret->helper = helper;
	(void)text_copy(ret->engine, sizeof(ret->engine), "qemu");
	ret->accel = choose_accel(&reason);
	r = ask_version(helper, ret->program_version, sizeof(ret->program_version), e);
	if (r < 0)
		return error_prefix(e, "start QEMU to learn its version");
	(void)text_format(ret->version, sizeof(ret->version), "%s-m%d", ret->program_version, QEMU_MACHINE_REVISION);
	if (why && why_size)
		(void)snprintf(why, why_size, "QEMU %s with %s: %s", ret->program_version,
		               ret->accel == VMM_ACCEL_KVM ? "KVM" : "TCG (translation, no hardware virtualisation)", reason);
	return 0;
}
