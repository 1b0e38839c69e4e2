#!/bin/sh
# Installs what the build folder holds, or removes it: install.sh [--remove]; honours DESTDIR, PREFIX, BUILD.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
build=${BUILD:-build}
prefix=${PREFIX:-/usr/local}
root=${DESTDIR:-}
cd "$here"

programs="space spaced space-helper space-agent libspace-vmm-shim.so"
bindir=$prefix/lib/space
unitdir=/lib/systemd/system
[ "$prefix" = /usr ] || unitdir=/etc/systemd/system

if [ "${1:-}" = --remove ]; then
	for name in $programs; do rm -f "$root$bindir/$name"; done
	rm -f "$root$prefix/bin/space" "$root$prefix/sbin/spaced" "$root$unitdir/spaced.service"
	rm -f "$root$prefix/share/bash-completion/completions/space"
	for page in man/*.[158]; do
		[ ! -e "$page" ] || rm -f "$root$prefix/share/man/man${page##*.}/${page##*/}"
	done
	rm -rf "$root$prefix/share/doc/space"
	[ ! -d "$root$bindir" ] || rmdir "$root$bindir" 2>/dev/null || true
	echo "removed from $root$prefix; data and /etc/space are kept"
	exit 0
fi

# The programs of one version lie together, so that spaced finds its helper and agent beside itself.
for name in $programs; do
	[ -f "$build/bin/$name" ] || { echo "install: $build/bin/$name is missing; run make build" >&2; exit 1; }
	install -D -m 0755 "$build/bin/$name" "$root$bindir/$name"
done
install -d "$root$prefix/bin" "$root$prefix/sbin"
ln -sf ../lib/space/space "$root$prefix/bin/space"
ln -sf ../lib/space/spaced "$root$prefix/sbin/spaced"
for page in man/*.[158]; do
	[ ! -e "$page" ] || install -D -m 0644 "$page" "$root$prefix/share/man/man${page##*.}/${page##*/}"
done
for file in README.md LICENSE docs/*.md docs/openapi.yaml; do
	[ ! -e "$file" ] || install -D -m 0644 "$file" "$root$prefix/share/doc/space/${file##*/}"
done
[ ! -e completions/space.bash ] ||
	install -D -m 0644 completions/space.bash "$root$prefix/share/bash-completion/completions/space"
install -d "$root$unitdir"
sed "s|@bindir@|$bindir|" packaging/spaced.service.in >"$root$unitdir/spaced.service"
if [ ! -e "$root/etc/space/space.conf" ]; then
	install -D -m 0640 config/space.conf "$root/etc/space/space.conf"
fi
echo "installed into $root$prefix"
