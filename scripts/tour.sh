#!/bin/sh
# The tour of the main job, through the command line client: each step shows its command, its answer and its time.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
# shellcheck source=scripts/common.sh
. "$here/scripts/common.sh"
programs=${SPACE_PROGRAMS:-$build/bin}
[ -x "$programs/space" ] || die "$programs/space is missing; run make up"

total_start=$(now_ms)
session=
branch=
tidy() {
	for id in $session $branch; do space rm "$id" >/dev/null 2>&1 || true; done
}
trap tidy EXIT
trap 'exit 130' INT TERM HUP PIPE

# show WHAT WORD…: runs space WORD…, prints command, answer and time; the answer stays in $answer.
show() {
	what=$1
	shift
	shown=
	for word in "$@"; do
		case $word in
		*[!A-Za-z0-9_./:=@%+-]* | '') shown="$shown '$word'" ;;
		*) shown="$shown $word" ;;
		esac
	done
	start=$(now_ms)
	status=0
	answer=$(space "$@" 2>&1) || status=$?
	took=$(seconds $(($(now_ms) - start)))
	printf '  %s%-44s%s %s%9s%s\n' "$bold" "$what" "$plain" "$green" "$took" "$plain"
	printf '      %s$ space%s%s\n' "$dim" "$shown" "$plain"
	[ -z "$answer" ] || printf '%s\n' "$answer" | sed 's/^/      /'
	[ "$status" = 0 ] || die "  that failed with status $status"
}

counter='i=0; while :; do i=$((i+1)); echo $i > count; sleep 0.1; done'

echo "${bold}A tour of the main job${plain}"
show "create a session" create --label purpose=tour
session=$answer
show "run code in it" exec "$session" -- python3 -c 'print(6 * 7)'
show "leave a program running" exec "$session" -- sh -c "echo one > note; ($counter) & sleep 0.5"
show "pause it" pause "$session"
show "resume it" resume "$session"
show "take a snapshot" snapshot "$session" --name first
show "change something" exec "$session" -- sh -c 'echo two >> note; echo "counter at $(cat count)"'
show "suspend: the sandbox is gone, the work is not" suspend "$session"
show "wake: the program goes on counting" wake "$session"
show "look at it" exec "$session" -- sh -c 'sleep 0.3; echo "counter at $(cat count)"'
show "branch: a second session from this instant" branch "$session"
branch=$answer
show "which goes its own way" exec "$branch" -- sh -c 'echo three >> note; tr "\n" " " < note'
show "its timeline" history "$session"
show "rewind to the first snapshot" rewind "$session" first
show "the note is as it was" exec "$session" -- cat note
show "remove both" rm "$session" "$branch"
session=
branch=
echo
echo "${bold}Done in $(seconds $(($(now_ms) - total_start))).${plain} spaced goes on running; type next:"
command=$programs/space
for folder in /usr/local/bin /usr/bin; do [ ! -x "$folder/space" ] || command=space; done
next() {
	printf '  %-60s %s\n' "$1" "$2"
}
next "$command run -- python3 -c 'print(\"hello\")'" "a session for one command"
next "$command create" "prints the id of a new session"
next "$command shell ID" "a terminal in it"
next "$command help" "everything else"
next "make down" "stop spaced, keep the sessions"
