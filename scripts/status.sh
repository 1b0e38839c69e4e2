#!/bin/sh
# make status: does spaced run, and what can it do here.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
# shellcheck source=scripts/common.sh
. "$here/scripts/common.sh"
programs=$build/bin
[ -x "$programs/space" ] || programs=/usr/local/lib/space
pid=$(supervisor_pid)
if [ -z "$pid" ]; then
	echo "spaced does not run (make up starts it)"
	exit 1
fi
echo "spaced runs, pid $pid"
space doctor
space ls
