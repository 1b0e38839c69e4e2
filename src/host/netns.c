#include "host/netns.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <net/if_arp.h>
#include <netinet/in.h>
#include <sched.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "host/client.h"

static void write_text(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY | O_CLOEXEC);
	if (fd < 0)
		return;
	ssize_t ignored = write(fd, text, strlen(text));
	(void)ignored;
	close(fd);
}

/* A kernel without IPv6 has no such files, which is as good. `default` comes first: the tap is made after it. */
static void disable_ipv6(void)
{
	write_text("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1");
	write_text("/proc/sys/net/ipv6/conf/all/disable_ipv6", "1");
}

static int hex_digit(char c)
{
	return c <= '9' ? c - '0' : (c | 0x20) - 'a' + 10;
}

static void set_mac(struct sockaddr *address, const char *text)
{
	address->sa_family = ARPHRD_ETHER;
	for (int i = 0; i < 6; i++)
		address->sa_data[i] = (char)(hex_digit(text[i * 3]) << 4 | hex_digit(text[i * 3 + 1]));
}

static void set_address(struct sockaddr *address, in_addr_t value)
{
	struct sockaddr_in in = {.sin_family = AF_INET, .sin_addr.s_addr = value};
	memcpy(address, &in, sizeof(in));
}

static struct ifreq interface(const char *name)
{
	struct ifreq request = {0};
	memcpy(request.ifr_name, name, strlen(name) + 1);
	return request;
}

static int interface_up(int sock, const char *name)
{
	struct ifreq request = interface(name);
	if (ioctl(sock, SIOCGIFFLAGS, &request) < 0)
		return -errno;
	request.ifr_flags |= IFF_UP | IFF_RUNNING;
	return ioctl(sock, SIOCSIFFLAGS, &request) < 0 ? -errno : 0;
}

static int configure_tap(int sock)
{
	struct ifreq request = interface(NETNS_TAP_NAME);
	set_mac(&request.ifr_hwaddr, HOST_GATEWAY_MAC);
	if (ioctl(sock, SIOCSIFHWADDR, &request) < 0)
		return -errno;
	request = interface(NETNS_TAP_NAME);
	set_address(&request.ifr_addr, inet_addr(HOST_GATEWAY_ADDRESS));
	if (ioctl(sock, SIOCSIFADDR, &request) < 0)
		return -errno;
	request = interface(NETNS_TAP_NAME);
	set_address(&request.ifr_netmask, htonl(UINT32_MAX << (32 - HOST_NETWORK_PREFIX)));
	if (ioctl(sock, SIOCSIFNETMASK, &request) < 0)
		return -errno;
	return interface_up(sock, NETNS_TAP_NAME);
}

/* Spares the first connection after a restore its ARP exchange with a guest whose caches are cold. */
static int pin_neighbour(int sock)
{
	struct arpreq request = {.arp_flags = ATF_PERM | ATF_COM};
	set_address(&request.arp_pa, inet_addr(HOST_GUEST_ADDRESS));
	set_mac(&request.arp_ha, HOST_GUEST_MAC);
	memcpy(request.arp_dev, NETNS_TAP_NAME, sizeof(NETNS_TAP_NAME));
	return ioctl(sock, SIOCSARP, &request) < 0 ? -errno : 0;
}

static int make_tap(void)
{
	CLEANUP_CLOSE int tap = open("/dev/net/tun", O_RDWR | O_CLOEXEC | O_NONBLOCK);
	if (tap < 0)
		return -errno;
	struct ifreq request = interface(NETNS_TAP_NAME);
	request.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR;
	if (ioctl(tap, TUNSETIFF, &request) < 0)
		return -errno;
	return TAKE_FD(tap);
}

int netns_configure(const char **ret_step)
{
	*ret_step = "socket";
	CLEANUP_CLOSE int sock = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	if (sock < 0)
		return -errno;
	disable_ipv6();
	*ret_step = "loopback interface";
	int r = interface_up(sock, "lo");
	if (r < 0)
		return r;
	*ret_step = "tap device (/dev/net/tun)";
	CLEANUP_CLOSE int tap = make_tap();
	if (tap < 0)
		return tap;
	*ret_step = "addresses of the tap";
	r = configure_tap(sock);
	if (r < 0)
		return r;
	*ret_step = "neighbour entry of the guest";
	r = pin_neighbour(sock);
	if (r < 0)
		return r;
	return TAKE_FD(tap);
}

int netns_sockets(int netns_fd, int home_fd, int *fds, size_t count, struct error *e)
{
	if (setns(netns_fd, CLONE_NEWNET) < 0)
		return error_set_errno(e, errno, "network namespace of the sandbox");
	int r = 0;
	size_t made = 0;
	while (made < count) {
		fds[made] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
		if (fds[made] < 0) {
			r = error_set_errno(e, errno, "socket in the sandbox's network");
			break;
		}
		made++;
	}
	if (setns(home_fd, CLONE_NEWNET) < 0)
		abort();
	if (r < 0)
		while (made)
			close(fds[--made]);
	return r;
}
