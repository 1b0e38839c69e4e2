#include "vmm/qemu_arguments.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <x86intrin.h>

#include "base/text.h"

#define ARGUMENT_BYTES 4096
#define TSC_MEASURE_US 20000

/* What QEMU's own seccomp filter takes away on top of the helper's confinement. */
#define SANDBOX "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"

/*
 * acpi: the guest finds its virtio devices by it (Debian's kernel takes none from the command line). pit, pic: nothing
 * needs them once the kernel is told the TSC's frequency, and their absence makes boot, start and state smaller.
 * isa-serial is added as a device of its own, with a character device we choose. No description of the state's format
 * and no section with the machine's configuration: what is saved must load as an incoming migration.
 */
#define MACHINE                                                                                                        \
	"microvm,acpi=on,rtc=on,pit=off,pic=off,isa-serial=off,auto-kernel-cmdline=off,x-option-roms=off,memory-backend="  \
	"ram,suppress-vmdesc=on,graphics=off"

/*
 * Generated code beyond this much is thrown away and made again. QEMU touches all of it sooner or later, so this is
 * what a long-lived sandbox costs besides its guest's memory (QEMU's own default is 1 GiB). With half of it, Python
 * programs were seen to spend up to a third more time on translating again.
 */
#define TRANSLATION_BUFFER_MIB 64

/*
 * What every guest kernel is told. A panic resets, by triple fault since there is no keyboard controller; the reset
 * ends the VMM after the panic device has told why. No speculation barriers inside the guest: they would guard the
 * guest from its own user, who is root in it; the host's protection does not depend on them. No random place for the
 * kernel: all sandboxes of a template would share it anyway, and the move leaves 18 MiB of touched memory behind.
 */
#define KERNEL_OPTIONS                                                                                                 \
	"console=ttyS0 reboot=t panic=-1 mitigations=off nokaslr random.trust_cpu=on no_timer_check cryptomgr.notests "    \
	"8250.nr_uarts=1 audit=0 apparmor=0 psi=0 quiet loglevel=4"

/*
 * The processor of emulated guests: all that TCG can do (up to AVX2) but for what makes emulation slow. With erms,
 * kernel and C library copy and clear memory by `rep movsb`, which is emulated byte by byte: without it touching fresh
 * memory was seen to be 3 to 4 times as fast, starting Python nearly twice. la57 makes every walk of the page tables
 * longer; smap makes each access of the kernel to a process's memory miss the software TLB. Nothing can use svm.
 */
#define EMULATED_CPU "max,erms=off,la57=off,smap=off,smep=off,umip=off,pku=off,svm=off"

/*
 * What kernels of emulated guests are told besides. Translated code belongs to the virtual address it was translated
 * at: with randomised addresses every exec would translate its program and libraries anew (50 ms rather than 20 ms for
 * /bin/true). The others do small things on hot paths to guard the guest's kernel from its own user, who is root in it.
 */
#define EMULATED_KERNEL_OPTIONS                                                                                        \
	"norandmaps init_on_alloc=0 randomize_kstack_offset=off hardened_usercopy=off lsm=landlock tsc=reliable"

static void append(struct qemu_arguments *a, const char *argument)
{
	if (a->count >= HOST_ARGUMENTS_MAX)
		a->failed = a->failed ? a->failed : -E2BIG;
	else
		a->list[a->count++] = argument;
}

static void append_format(struct qemu_arguments *a, const char *format, ...) PRINTF_LIKE(2, 3);
static void append_format(struct qemu_arguments *a, const char *format, ...)
{
	char *text = NULL;
	va_list arguments;
	int n;

	va_start(arguments, format);
	n = vasprintf(&text, format, arguments);
	va_end(arguments);
	if (n < 0 || n >= ARGUMENT_BYTES || a->owned_count >= ARRAY_SIZE(a->owned)) {
		if (n >= 0)
			free(text);
		a->failed = a->failed ? a->failed : n < 0 ? -ENOMEM : -E2BIG;
		return;
	}
	a->owned[a->owned_count++] = text;
	append(a, text);
}

/* Adds a descriptor and returns the number it will have in the VMM. */
static int append_fd(struct qemu_arguments *a, int fd)
{
	if (a->fd_count >= HOST_SANDBOX_FDS_MAX) {
		a->failed = a->failed ? a->failed : -E2BIG;
		return -1;
	}
	a->fds[a->fd_count++] = fd;
	return (int)a->fd_count + 2;
}

static int is_size(int fd, uint64_t bytes)
{
	struct stat st;

	return fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && (uint64_t)st.st_size == bytes;
}

static int check(const struct vmm_config *config, int incoming, struct error *e)
{
	if (config->memory_bytes < QEMU_MEMORY_BYTES_MIN || config->memory_bytes > QEMU_MEMORY_BYTES_MAX ||
	    config->memory_bytes % MIB)
		return error_set(e, ERROR_INVALID, "memory of a sandbox must be whole MiB, %llu to %llu, not %llu bytes",
		                 (unsigned long long)(QEMU_MEMORY_BYTES_MIN / MIB),
		                 (unsigned long long)(QEMU_MEMORY_BYTES_MAX / MIB), (unsigned long long)config->memory_bytes);
	if (config->vcpus < 1 || config->vcpus > QEMU_VCPUS_MAX)
		return error_set(e, ERROR_INVALID, "a sandbox has 1 to %d vCPUs, not %u", QEMU_VCPUS_MAX, config->vcpus);
	/* QEMU would grow an empty file and map a short one beyond its end. */
	if (!is_size(config->memory_fd, config->memory_bytes))
		return error_set(e, ERROR_DAMAGED, "the memory file is not %llu bytes long",
		                 (unsigned long long)config->memory_bytes);
	if (!incoming && (config->kernel_fd < 0 || config->initrd_fd < 0))
		return error_set(e, ERROR_INVALID, "a first boot needs kernel and initrd");
	return 0;
}

static void append_machine(struct qemu_arguments *a, const struct vmm_host *host, const struct vmm_config *config,
                           int memory_channel_fd)
{
	unsigned long long mib = config->memory_bytes / MIB;

	append(a, "-name");
	append_format(a, "%s", config->sandbox_id);
	append(a, "-nodefaults");
	append(a, "-no-user-config");
	append(a, "-display");
	append(a, "none");
	append(a, "-no-reboot");
	append(a, "-S");
	append(a, "-sandbox");
	append(a, SANDBOX);
	append(a, "-machine");
	append(a, MACHINE);
	append(a, "-global");
	append(a, "migration.send-configuration=off");
	append(a, "-accel");
	if (host->accel == VMM_ACCEL_KVM) {
		append(a, "kvm");
		append(a, "-cpu");
		append(a, "host");
	} else {
		append_format(a, "tcg,thread=multi,tb-size=%d", TRANSLATION_BUFFER_MIB);
		append(a, "-cpu");
		append(a, EMULATED_CPU);
	}
	append(a, "-smp");
	append_format(a, "%u", config->vcpus);
	append(a, "-m");
	append_format(a, "%lluM", mib);
	append(a, "-object");
	int memory = append_fd(a, config->memory_fd);
	if (memory_channel_fd >= 0)
		append_format(a, "memory-backend-file,id=ram,mem-path=/space/fd/%d+%d,share=off,size=%lluM", memory,
		              append_fd(a, memory_channel_fd), mib);
	else
		append_format(a, "memory-backend-file,id=ram,mem-path=/space/fd/%d,share=off,size=%lluM", memory, mib);
}

/*
 * The same devices in the same order for every sandbox, whatever the console is connected to, or state would not load.
 *
 * Flushes of the guest's disk end in the page cache: a sandbox is disposable and nothing of it counts before it is in
 * a snapshot, whose copy is synced in its own time. With them, stopping the vCPUs would wait for the host's disk.
 * The image needs no lock: one sandbox owns it, and a lock would lie on a descriptor that the daemon shares.
 */
static void append_devices(struct qemu_arguments *a, int disk_fd, int console_fd)
{
	int disk = append_fd(a, disk_fd);

	append(a, "-add-fd");
	append_format(a, "fd=%d,set=1", disk);
	append(a, "-blockdev");
	append(a, "driver=file,node-name=disk,filename=/dev/fdset/1,aio=threads,discard=unmap,locking=off,drop-cache=off,"
	          "cache.direct=off,cache.no-flush=on");
	append(a, "-chardev");
	if (console_fd >= 0) {
		append(a, "file,id=console,path=/dev/fdset/2");
		append(a, "-add-fd");
		append_format(a, "fd=%d,set=2", append_fd(a, console_fd));
	} else {
		append_format(a, "ringbuf,id=console,size=%d", (int)QEMU_CONSOLE_BYTES);
	}
	append(a, "-device");
	append(a, "isa-serial,chardev=console");
	append(a, "-device");
	append(a, "pvpanic");
	append(a, "-device");
	append(a, "virtio-blk-device,drive=disk,discard=on,write-cache=on");
	append(a, "-netdev");
	append(a, "tap,id=net,fd=@TAP@,vhost=off");
	append(a, "-device");
	/* Its neighbour is ours and knows it: nothing needs to be announced after a restore. */
	append(a, "virtio-net-device,netdev=net,guest_announce=off,mac=" HOST_GUEST_MAC);
}

static void append_control(struct qemu_arguments *a, int control_fd, const char *options)
{
	append(a, "-chardev");
	append_format(a, "socket,id=control,fd=%d%s", append_fd(a, control_fd), options);
	append(a, "-mon");
	append(a, "chardev=control,mode=control");
}

/*
 * Frequency of the time stamp counter, which an emulated guest sees unscaled. Without a PIT the guest's kernel has
 * nothing to measure it by; with one the measurement fails on a busy host and the kernel never gets a clock.
 */
static unsigned long tsc_khz(void)
{
	struct timespec from, to;
	uint64_t ticks, ns;

	clock_gettime(CLOCK_MONOTONIC_RAW, &from);
	ticks = __rdtsc();
	do {
		clock_gettime(CLOCK_MONOTONIC_RAW, &to);
		ns = (uint64_t)(to.tv_sec - from.tv_sec) * 1000000000 + (uint64_t)to.tv_nsec - (uint64_t)from.tv_nsec;
	} while (ns < TSC_MEASURE_US * 1000);
	ticks = __rdtsc() - ticks;
	return (unsigned long)(ticks * 1000000 / ns);
}

static void append_kernel(struct qemu_arguments *a, const struct vmm_host *host, const struct vmm_config *config)
{
	const char *own = config->kernel_command_line ? config->kernel_command_line : "";

	append(a, "-kernel");
	append_format(a, "/space/fd/%d", append_fd(a, config->kernel_fd));
	append(a, "-initrd");
	append_format(a, "/space/fd/%d", append_fd(a, config->initrd_fd));
	append(a, "-append");
	if (host->accel == VMM_ACCEL_TCG)
		append_format(a, KERNEL_OPTIONS " " EMULATED_KERNEL_OPTIONS " tsc_early_khz=%lu %s", tsc_khz(), own);
	else
		append_format(a, KERNEL_OPTIONS " %s", own);
}

static int finish(struct qemu_arguments *a, struct error *e)
{
	int r = a->failed;

	if (!r)
		return 0;
	qemu_arguments_free(a);
	return error_set_errno(e, r, "command line of the VMM");
}

int qemu_arguments_make(struct qemu_arguments *a, const struct vmm_host *host, const struct vmm_config *config,
                        int control_fd, int console_fd, int memory_channel_fd, int incoming, struct error *e)
{
	int r = check(config, incoming, e);

	memset(a, 0, sizeof(*a));
	if (r < 0)
		return r;
	append_machine(a, host, config, memory_channel_fd);
	append_devices(a, config->disk_fd, console_fd);
	append_control(a, control_fd, ",server=on,wait=off");
	if (incoming) {
		append(a, "-incoming");
		append(a, "defer");
	} else {
		append_kernel(a, host, config);
	}
	return finish(a, e);
}

int qemu_arguments_probe(struct qemu_arguments *a, int control_fd, struct error *e)
{
	memset(a, 0, sizeof(*a));
	append(a, "-machine");
	append(a, "none");
	append(a, "-nodefaults");
	append(a, "-no-user-config");
	append(a, "-display");
	append(a, "none");
	append_control(a, control_fd, "");
	return finish(a, e);
}

void qemu_arguments_free(struct qemu_arguments *a)
{
	for (size_t i = 0; i < a->owned_count; i++)
		free(a->owned[i]);
	memset(a, 0, sizeof(*a));
}
