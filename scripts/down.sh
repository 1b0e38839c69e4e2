#!/bin/sh
# make down: stops spaced in order. Sessions are kept: running ones go on in their sandboxes and are taken up again by
# the next `make up`; with SUSPEND=1 they are suspended first, which frees their memory.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
# shellcheck source=scripts/common.sh
. "$here/scripts/common.sh"
stop_timeout_s=60
programs=$build/bin
[ -x "$programs/space" ] || programs=/usr/local/lib/space

say() {
	[ "${1:-}" = "" ] || [ "${quiet:-}" ] || echo "$1"
}
quiet=
[ "${1:-}" != --quiet ] || quiet=yes

pid=$(supervisor_pid)
if [ -z "$pid" ]; then
	say "spaced does not run"
	exit 0
fi
[ "$(id -u)" = 0 ] || die "make down wants root: spaced runs as a service."

if [ "${SUSPEND:-}" = 1 ]; then
	for id in $(space ls -q --state running --state paused); do
		space suspend "$id" >/dev/null && say "suspended $id"
	done
fi

if systemd_runs; then
	systemctl disable --quiet --now "$unit"
else
	kill -TERM "$pid"
	n=0
	while [ -d "/proc/$pid" ] && ! grep -q '^State:.[ZX]' "/proc/$pid/status" 2>/dev/null; do
		n=$((n + 1))
		[ "$n" -lt $((stop_timeout_s * 10)) ] || die "spaced (pid $pid) does not stop within $stop_timeout_s s"
		sleep 0.1
	done
	rm -f "$pid_file"
fi
say "spaced has stopped; sessions are kept in $data_dir (make up takes them up again)"
