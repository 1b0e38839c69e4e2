#!/bin/sh
# make up: from a bare Debian machine to a running daemon with a default template, then a tour.
#
# Every step is skipped when it has been done, so a second run takes seconds. The daemon runs as a systemd service where
# systemd runs, else as a process of its own session with a pid file; either way it is not tied to this terminal.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
# shellcheck source=scripts/common.sh
. "$here/scripts/common.sh"
started=$(now_ms)
health_timeout_s=60

[ "$(id -u)" = 0 ] || die "make up wants root: it installs packages, makes the user \"space\" and starts a daemon."

make_user() {
	getent group space >/dev/null || groupadd --system space
	getent passwd space >/dev/null ||
		useradd --system --gid space --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin space
}

# The daemon's user and the VMMs' users have to reach the programs; a tree below a closed home folder is copied out.
choose_programs() {
	programs=$build/bin
	folder=$programs
	while [ "$folder" != / ]; do
		case $(stat -c %A "$folder") in
		?????????[xt]) ;;
		*)
			programs=/usr/local/lib/space
			mkdir -p "$programs"
			for name in space spaced space-helper space-agent libspace-vmm-shim.so; do
				cmp -s "$build/bin/$name" "$programs/$name" && continue
				cp -p "$build/bin/$name" "$programs/.$name.new"
				mv -f "$programs/.$name.new" "$programs/$name"
			done
			return
			;;
		esac
		folder=$(dirname "$folder")
	done
}

sum_of() {
	cat "$@" | sha256sum | cut -c 1-64
}

start_with_systemd() {
	new=$(sed "s|@bindir@|$programs|" "$here/packaging/spaced.service.in")
	target=/etc/systemd/system/$unit
	if [ "$(cat "$target" 2>/dev/null)" != "$new" ]; then
		printf '%s\n' "$new" >"$target"
		systemctl daemon-reload
	fi
	systemctl enable --quiet "$unit"
	systemctl restart "$unit"
}

start_alone() {
	mkdir -p "$log_dir" "$runtime_dir"
	chmod 0755 "$runtime_dir"
	# One old log is kept; the daemon itself writes little.
	if [ -s "$log_file" ] && [ "$(stat -c %s "$log_file")" -gt 16777216 ]; then
		mv -f "$log_file" "$log_file.1"
	fi
	setsid "$programs/spaced" </dev/null >>"$log_file" 2>&1 &
	echo $! >"$pid_file"
}

start_daemon() {
	if systemd_runs; then start_with_systemd; else start_alone; fi
	n=0
	until healthy; do
		n=$((n + 1))
		[ "$n" -lt $((health_timeout_s * 10)) ] || {
			echo "spaced does not answer on $runtime_dir/space.sock after $health_timeout_s s; its last lines:"
			if systemd_runs; then journalctl -u "$unit" -n 25 --no-pager; else tail -n 25 "$log_file"; fi
			return 1
		}
		if ! systemd_runs && [ -z "$(supervisor_pid)" ]; then
			echo "spaced ended at once; its last lines in $log_file:"
			tail -n 25 "$log_file"
			return 1
		fi
		sleep 0.1
	done
	sum_of "$programs"/spac* "$programs"/lib* >"$runtime_dir/programs.sum"
}

stop_for_upgrade() {
	BUILD=$build "$here/scripts/down.sh" --quiet
}

build_template() {
	echo "  default template (Debian root file system, first boot, memory snapshot):"
	template_start=$(now_ms)
	space template build default 2>&1 | sed 's/^/      /' || true
	space template inspect default >/dev/null 2>&1 || die "  the default template could not be built"
	sum_of "$programs/space-agent" >"$data_dir/.default-agent" || true
	printf '  %-46s %s%s%s\n' "default template" "$green" "$(seconds $(($(now_ms) - template_start)))" "$plain"
}

echo "${bold}SPACE: making this machine ready${plain}"
step "packages" "$here/scripts/install-packages.sh" build run
if [ -f "$build/build.ninja" ]; then what="build (what changed)"; else what="build (all of it)"; fi
step "$what" "$here/scripts/build.sh" "$build"
step "user and group \"space\"" make_user
choose_programs

upgrade=
if [ -n "$(supervisor_pid)" ] && healthy; then
	if [ "$(sum_of "$programs"/spac* "$programs"/lib*)" != "$(cat "$runtime_dir/programs.sum" 2>/dev/null)" ]; then
		step "stop the older spaced (sessions go on)" stop_for_upgrade
		upgrade=yes
	fi
fi
if [ -z "$(supervisor_pid)" ] || ! healthy; then
	step "start spaced${upgrade:+ anew}" start_daemon
else
	printf '  %-46s %s\n' "spaced" "runs already"
fi

if ! space template inspect default >/dev/null 2>&1; then
	build_template
elif [ -r "$data_dir/.default-agent" ] &&
	[ "$(sum_of "$programs/space-agent")" != "$(cat "$data_dir/.default-agent")" ]; then
	echo "  the guest agent has changed since the default template was built"
	build_template
elif ! space --json doctor 2>/dev/null | grep -q '"name":"default template","status":"ok"'; then
	echo "  the engine has changed since the default template was built"
	build_template
else
	printf '  %-46s %s\n' "default template" "is there"
fi

printf '%sready after %s%s\n\n' "$bold" "$(seconds $(($(now_ms) - started)))" "$plain"
SPACE_PROGRAMS=$programs exec "$here/scripts/tour.sh"
