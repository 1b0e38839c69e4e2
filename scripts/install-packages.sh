#!/bin/sh
# Installs the Debian packages of packages.txt that have one of the given uses: install-packages.sh USE…
#
# One dpkg-query tells what is missing; with nothing missing no other command is run. Packages are asked for by name
# through apt-get only. An entry "a|b" is satisfied by either; the first one apt knows is installed.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
list=$here/packages.txt
[ $# -gt 0 ] || { echo "usage: install-packages.sh USE…" >&2; exit 2; }

# Prints the entries (name or alternatives) of the uses asked for.
entries() {
	awk -v uses="$*" '
		BEGIN { n = split(uses, list, " "); for (i = 1; i <= n; i++) want[list[i]] = 1 }
		/^[ \t]*(#|$)/ { next }
		{ m = split($2, use, ","); for (i = 1; i <= m; i++) if (use[i] in want) { print $1; next } }' "$list"
}

if ! command -v dpkg-query >/dev/null 2>&1; then
	echo "install-packages: this is not a Debian system; needed are:" >&2
	entries "$@" | sed 's/^/  /' >&2
	exit 1
fi

wanted=$(entries "$@")
# shellcheck disable=SC2086 # names are split on purpose
installed=$(dpkg-query -W -f '${Package} ${db:Status-Status}\n' $(echo "$wanted" | tr '|' ' ') 2>/dev/null |
	awk '$2 == "installed" { print $1 }') || true
missing=$(printf '%s\n' "$wanted" | awk -v have="$installed" '
	BEGIN { n = split(have, list, "\n"); for (i = 1; i <= n; i++) known[list[i]] = 1 }
	{ m = split($0, name, "|"); for (i = 1; i <= m; i++) if (name[i] in known) next; print }')
[ -n "$missing" ] || exit 0

if [ "$(id -u)" != 0 ]; then
	echo "install-packages: missing, and only root can install: $(echo "$missing" | tr '\n' ' ')" >&2
	exit 1
fi

# The first alternative that apt can install, empty if none.
choose() {
	for name in $(echo "$1" | tr '|' ' '); do
		if apt-cache policy "$name" 2>/dev/null | grep -q '^  Candidate: [^(]'; then
			echo "$name"
			return
		fi
	done
}

export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
trap 'rm -f "$log"' EXIT
apt_get() {
	apt-get -y -q -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 \
		-o Dpkg::Options::=--force-confold "$@" >"$log" 2>&1 </dev/null || {
		status=$?
		tail -n 25 "$log" >&2
		echo "install-packages: apt-get $1 failed (status $status)" >&2
		return "$status"
	}
}

pick() {
	names=
	unknown=
	for entry in $missing; do
		name=$(choose "$entry")
		if [ -n "$name" ]; then names="$names $name"; else unknown="$unknown $entry"; fi
	done
}

started=$(date +%s)
# Package lists may be absent on a fresh machine or older than the mirror.
pick
if [ -n "$unknown" ] || [ -z "$(find /var/lib/apt/lists -maxdepth 1 -name '*_Packages*' -mtime -1 2>/dev/null | head -n 1)" ]; then
	apt_get update
	pick
fi
if [ -n "$unknown" ]; then
	echo "install-packages: no package source offers:$unknown" >&2
	exit 1
fi
echo "installing:$names"
# shellcheck disable=SC2086
apt_get install --no-install-recommends $names
echo "installed $(echo "$names" | wc -w) packages in $(($(date +%s) - started)) s"
