/*
 * Every guest has the same addresses on both sides of its tap, so that a snapshot fits anywhere. The gateway's entry in
 * the neighbour table is permanent: after a restore the first packet leaves without an ARP exchange.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <net/if_arp.h>
#include <net/route.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/text.h"
#include "guest/boot.h"

#define NETWORK_WAIT_MS 3000

static void set_in(struct sockaddr *to, const char *address)
{
	struct sockaddr_in in = {.sin_family = AF_INET};
	if (address)
		inet_pton(AF_INET, address, &in.sin_addr);
	memcpy(to, &in, sizeof(in));
}

static int set_up(int sock, const char *name)
{
	struct ifreq request = {0};
	text_copy(request.ifr_name, sizeof(request.ifr_name), name);
	if (ioctl(sock, SIOCGIFFLAGS, &request) < 0)
		return -errno;
	request.ifr_flags |= IFF_UP;
	return ioctl(sock, SIOCSIFFLAGS, &request) < 0 ? -errno : 0;
}

static int set_address(int sock, unsigned long what, const char *address)
{
	struct ifreq request = {0};
	text_copy(request.ifr_name, sizeof(request.ifr_name), NETWORK_INTERFACE);
	set_in(&request.ifr_addr, address);
	return ioctl(sock, what, &request) < 0 ? -errno : 0;
}

static int set_route(int sock)
{
	char name[] = NETWORK_INTERFACE;
	struct rtentry route = {.rt_flags = RTF_UP | RTF_GATEWAY, .rt_dev = name};
	set_in(&route.rt_dst, NULL);
	set_in(&route.rt_genmask, NULL);
	set_in(&route.rt_gateway, NETWORK_GATEWAY);
	return ioctl(sock, SIOCADDRT, &route) < 0 && errno != EEXIST ? -errno : 0;
}

static int set_neighbour(int sock)
{
	static const unsigned char mac[] = NETWORK_GATEWAY_MAC;
	struct arpreq request = {.arp_flags = ATF_PERM | ATF_COM};
	set_in(&request.arp_pa, NETWORK_GATEWAY);
	request.arp_ha.sa_family = ARPHRD_ETHER;
	memcpy(request.arp_ha.sa_data, mac, sizeof(mac));
	text_copy(request.arp_dev, sizeof(request.arp_dev), NETWORK_INTERFACE);
	return ioctl(sock, SIOCSARP, &request) < 0 ? -errno : 0;
}

/* No IPv6 leaves the machine; ::1 stays. */
static void disable_six(void)
{
	CLEANUP_CLOSE int fd = open("/proc/sys/net/ipv6/conf/" NETWORK_INTERFACE "/disable_ipv6", O_WRONLY | O_CLOEXEC);
	if (fd >= 0)
		fd_write_full(fd, "1", 1);
}

static int wait_for_interface(void)
{
	for (int waited = 0; if_nametoindex(NETWORK_INTERFACE) == 0; waited += 10) {
		if (waited >= NETWORK_WAIT_MS)
			return -ENODEV;
		usleep(10000);
	}
	return 0;
}

int network_begin(struct error *e)
{
	CLEANUP_CLOSE int sock = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	if (sock < 0)
		return error_set_errno(e, errno, "cannot make a socket");
	int r = set_up(sock, "lo");
	if (r < 0)
		return error_set_errno(e, r, "cannot bring lo up");
	r = wait_for_interface();
	if (r < 0)
		return error_set_errno(e, r, "there is no " NETWORK_INTERFACE);
	disable_six();
	r = set_address(sock, SIOCSIFADDR, NETWORK_ADDRESS);
	if (r == 0)
		r = set_address(sock, SIOCSIFNETMASK, NETWORK_MASK);
	if (r == 0)
		r = set_up(sock, NETWORK_INTERFACE);
	if (r < 0)
		return error_set_errno(e, r, "cannot set up " NETWORK_INTERFACE);
	r = set_route(sock);
	if (r == 0)
		r = set_neighbour(sock);
	return r < 0 ? error_set_errno(e, r, "cannot set the route to the gateway") : 0;
}
