#!/bin/sh
# Configures (once) and builds, then collects the programs: build.sh DIR [MESON OPTION…]
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
dir=${1:-build}
[ $# -eq 0 ] || shift
cd "$here"
if [ ! -f "$dir/build.ninja" ]; then
	rm -rf "$dir"
	meson setup "$dir" "$@" >/dev/null || { tail -n 30 "$dir/meson-logs/meson-log.txt" >&2; exit 1; }
fi
ninja -C "$dir" ${NINJA_TARGETS:-} >"$dir/build.log" 2>&1 || {
	grep -E -A 6 '^FAILED|error:|warning:|undefined reference' "$dir/build.log" | head -n 60 >&2
	echo "build: failed, all of it is in $dir/build.log" >&2
	exit 1
}

# Programs lie in the folder of their room; users and scripts find them in one place. Replaced by renaming, since a
# running program cannot be written to.
mkdir -p "$dir/bin"
for name in space spaced space-helper space-agent libspace-vmm-shim.so; do
	found=$(find "$dir/src" -type f -name "$name" -print -quit)
	[ -n "$found" ] || continue
	if ! cmp -s "$found" "$dir/bin/$name"; then
		cp -p "$found" "$dir/bin/.$name.new"
		mv -f "$dir/bin/.$name.new" "$dir/bin/$name"
	fi
done
