# bash completion for space(1). Verbs, options and their values come from the program itself (space __complete), so this
# file knows only which kind of word an argument is.

_space()
{
	local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD - 1]}
	local program=${COMP_WORDS[0]} globals=() words=() verb='' i skip=''
	COMPREPLY=()

	# Positional words between the program and the cursor; values of options are passed over.
	for ((i = 1; i < COMP_CWORD; i++)); do
		local word=${COMP_WORDS[i]}
		if [[ $skip ]]; then
			skip=''
		elif [[ $word == -- ]]; then
			COMPREPLY=()
			return
		elif [[ $word == --socket || $word == --url ]]; then
			globals+=("$word" "${COMP_WORDS[i + 1]}")
			skip=yes
		elif [[ $word == -* ]]; then
			[[ $verb && $word != *=* && $("$program" __complete values "$verb" -- "$word" 2>/dev/null) ]] && skip=yes
		else
			words+=("$word")
			if ((${#words[@]} == 1)); then
				verb=$word
			elif ((${#words[@]} == 2)) &&
				"$program" __complete subverbs "${words[0]}" 2>/dev/null | grep -qxF -- "$word"; then
				verb="${words[0]} $word"
			fi
		fi
	done

	_space_ask()
	{
		"$program" "${globals[@]}" __complete "$@" 2>/dev/null
	}

	if [[ $skip ]]; then
		case $prev in
		-t | --template) [[ $verb == exec ]] || mapfile -t COMPREPLY < <(compgen -W "$(_space_ask templates)" -- "$cur") ;;
		--at) mapfile -t COMPREPLY < <(compgen -W "$(_space_ask snapshots "${words[1]}")" -- "$cur") ;;
		--session) mapfile -t COMPREPLY < <(compgen -W "$(_space_ask sessions)" -- "$cur") ;;
		-s | --state)
			if [[ $verb == ls ]]; then
				mapfile -t COMPREPLY < <(compgen -W 'running paused suspended failed' -- "$cur")
			else
				mapfile -t COMPREPLY < <(compgen -A signal -- "$cur")
			fi
			;;
		--signal) mapfile -t COMPREPLY < <(compgen -A signal -- "$cur") ;;
		*) mapfile -t COMPREPLY < <(compgen -W "$(_space_ask values "$verb" -- "$prev" | grep -v '^=')" -- "$cur") ;;
		esac
		return
	fi
	if [[ $cur == -* ]]; then
		mapfile -t COMPREPLY < <(compgen -W "$(_space_ask options "$verb")" -- "$cur")
		return
	fi
	if [[ ! $verb ]]; then
		mapfile -t COMPREPLY < <(compgen -W "$(_space_ask verbs)" -- "$cur")
		return
	fi

	local count=${#words[@]}
	[[ $verb == *' '* ]] && ((count--))
	case $verb:$count in
	template:1 | key:1) mapfile -t COMPREPLY < <(compgen -W "$(_space_ask subverbs "$verb")" -- "$cur") ;;
	snapshot:1)
		mapfile -t COMPREPLY < <(compgen -W "$(_space_ask subverbs snapshot; _space_ask sessions)" -- "$cur")
		;;
	help:1) mapfile -t COMPREPLY < <(compgen -W "$(_space_ask verbs)" -- "$cur") ;;
	help:2) mapfile -t COMPREPLY < <(compgen -W "$(_space_ask subverbs "${words[1]}")" -- "$cur") ;;
	rewind:2 | 'snapshot rm':*)
		if ((count == 1)); then
			mapfile -t COMPREPLY < <(compgen -W "$(_space_ask sessions)" -- "$cur")
		else
			local session=${words[1]}
			[[ $verb == 'snapshot rm' ]] && session=${words[2]}
			mapfile -t COMPREPLY < <(compgen -W "$(_space_ask snapshots "$session")" -- "$cur")
		fi
		;;
	'template inspect':1 | 'template rm':*) mapfile -t COMPREPLY < <(compgen -W "$(_space_ask templates)" -- "$cur") ;;
	'key rm':*) mapfile -t COMPREPLY < <(compgen -W "$(_space_ask keys)" -- "$cur") ;;
	rm:* | pause:* | resume:* | suspend:* | wake:*)
		mapfile -t COMPREPLY < <(compgen -W "$(_space_ask sessions)" -- "$cur")
		;;
	exec:1 | shell:1 | attach:1 | ps:1 | kill:1 | port:1 | info:1 | update:1 | history:1 | branch:1 | rewind:1 | 'snapshot ls':1)
		mapfile -t COMPREPLY < <(compgen -W "$(_space_ask sessions)" -- "$cur")
		;;
	attach:2 | kill:*) mapfile -t COMPREPLY < <(compgen -W "$(_space_ask processes "${words[1]}")" -- "$cur") ;;
	cp:*)
		mapfile -t COMPREPLY < <(compgen -f -- "$cur")
		[[ $cur == */* || $cur == *:* ]] ||
			mapfile -t -O "${#COMPREPLY[@]}" COMPREPLY < <(compgen -S : -W "$(_space_ask sessions)" -- "$cur")
		compopt -o nospace -o filenames 2>/dev/null
		;;
	esac
}

complete -o default -F _space space
