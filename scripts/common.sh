# shellcheck shell=sh
# Shared by the front-door scripts; sourced. Wants: $here (root of the tree).

build=${BUILD:-build}
case $build in /*) ;; *) build=$here/$build ;; esac
data_dir=${SPACE_DATA_DIR:-/var/lib/space}
runtime_dir=${SPACE_RUNTIME_DIR:-/run/space}
instance=${SPACE_INSTANCE:-space}
pid_file=$runtime_dir/spaced.pid
log_dir=${SPACE_LOG_DIR:-/var/log/space}
log_file=$log_dir/spaced.log
unit=spaced.service

# Colours only where a person looks.
if [ -t 1 ] && [ -z "${NO_COLOR:-}" ]; then
	bold=$(printf '\033[1m') dim=$(printf '\033[2m') red=$(printf '\033[31m') green=$(printf '\033[32m')
	plain=$(printf '\033[0m')
else
	bold='' dim='' red='' green='' plain=''
fi

die() {
	echo "${red}$1${plain}" >&2
	exit 1
}

now_ms() {
	# date's nanoseconds are everywhere on Debian
	echo $(($(date +%s%N) / 1000000))
}

# "1.23 s" from milliseconds
seconds() {
	printf '%d.%02d s' $(($1 / 1000)) $(($1 % 1000 / 10))
}

# step TEXT COMMAND…: runs it, shows the text with the time it took; output is only shown when it fails.
step() {
	step_text=$1
	shift
	step_log=$(mktemp)
	step_start=$(now_ms)
	ticker=
	if [ -t 1 ]; then
		(
			trap 'exit 0' TERM
			n=0
			while :; do
				printf '\r  %-46s %s%d s%s ' "$step_text" "$dim" "$n" "$plain"
				sleep 1
				n=$((n + 1))
			done
		) &
		ticker=$!
	fi
	step_status=0
	"$@" >"$step_log" 2>&1 </dev/null || step_status=$?
	if [ -n "$ticker" ]; then
		kill "$ticker" 2>/dev/null || true
		wait "$ticker" 2>/dev/null || true
		printf '\r'
	fi
	step_took=$(seconds $(($(now_ms) - step_start)))
	if [ "$step_status" = 0 ]; then
		printf '  %-46s %s%s%s\n' "$step_text" "$green" "$step_took" "$plain"
		rm -f "$step_log"
		return 0
	fi
	printf '  %-46s %sfailed after %s%s\n' "$step_text" "$red" "$step_took" "$plain"
	tail -n 40 "$step_log" >&2
	rm -f "$step_log"
	exit 1
}

systemd_runs() {
	command -v systemctl >/dev/null 2>&1 || return 1
	[ -d /run/systemd/system ] || return 1
	case $(systemctl is-system-running 2>/dev/null) in
	running | degraded | starting | initializing | maintenance) return 0 ;;
	esac
	return 1
}

# The pid of the running supervisor that `make up` started, or nothing.
supervisor_pid() {
	if systemd_runs; then
		pid=$(systemctl show -p MainPID --value "$unit" 2>/dev/null || true)
		[ "${pid:-0}" = 0 ] || echo "$pid"
		return 0
	fi
	[ -r "$pid_file" ] || return 0
	pid=$(cat "$pid_file")
	case $pid in '' | *[!0-9]*) return 0 ;; esac
	# A number may have been given to another process since.
	if [ "$(basename "$(readlink "/proc/$pid/exe" 2>/dev/null | sed 's/ (deleted)$//')" 2>/dev/null)" = spaced ]; then
		echo "$pid"
	fi
	return 0
}

space() {
	SPACE_SOCKET=$runtime_dir/space.sock "$programs/space" "$@"
}

healthy() {
	[ -S "$runtime_dir/space.sock" ] && space ls --json >/dev/null 2>&1
}
