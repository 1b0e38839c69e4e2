/* PID 1's work: the stage in the initrd, the machine's set-up, its end. */
#ifndef SPACE_GUEST_BOOT_H
#define SPACE_GUEST_BOOT_H

#include "base/error.h"

#define BOOT_DISK "/dev/vda"
#define BOOT_DISK_WAIT_MS 10000
#define BOOT_AGENT "/sbin/space-agent"
#define BOOT_MODULES "/modules"
#define BOOT_OPTION_BYTES 640

/* True in the initrd: its list of modules is there. */
int boot_is_initrd(void);
/* Loads modules, mounts the disk, switches to it and runs the agent there. Only returns on failure. */
int boot_initrd(struct error *e);
/* Mounts, limits, kernel settings, host name, network. What fails is logged and left out. */
void boot_machine(void);
/* True if this program runs the machine. */
int boot_is_guest(void);
/* Value of "name=value" on the kernel command line into `to`; 0 or -ENOENT. */
int boot_option(const char *name, char *to, size_t size);
/* Ends users' processes, syncs, turns the machine off. Does not return. */
void boot_poweroff(void) __attribute__((noreturn));

/* network.c: lo and eth0 with the constant addresses of every guest. */
#define NETWORK_INTERFACE "eth0"
#define NETWORK_ADDRESS "169.254.77.2"
#define NETWORK_MASK "255.255.255.252"
#define NETWORK_GATEWAY "169.254.77.1"
#define NETWORK_GATEWAY_MAC                                                                                            \
	{                                                                                                                  \
		0x06, 0x53, 0x50, 0x41, 0x00, 0x01                                                                             \
	}
int network_begin(struct error *e);

#endif
