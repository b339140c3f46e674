# bash splits words at = and :, so the line is read anew. Quotes before the cursor are not interpreted.
_allranks_fill() {  # what begins with $1, of the kind in $kind and of $words
  local found=()
  if [[ -n $words ]]; then mapfile -t found < <(compgen -W "$words" -- "$1"); fi
  COMPREPLY+=("${found[@]}")
  found=()
  case $kind in
    file) compopt -o filenames; mapfile -t found < <(compgen -f -- "$1") ;;
    folder) compopt -o filenames; mapfile -t found < <(compgen -d -- "$1") ;;
    host) mapfile -t found < <(compgen -A hostname -- "$1") ;;
  esac
  COMPREPLY+=("${found[@]}")
}

_allranks() {
  local line=() word option='' command='' program='' kind='' words='' bare=''
  local text=${COMP_LINE:0:COMP_POINT}
  read -ra line <<<"$text"
  if [[ $text == *[[:space:]] ]]; then line+=(''); fi
  local current=${line[-1]}
  COMPREPLY=()
  for word in "${line[@]:1:${#line[@]}-2}"; do
    if [[ -n $option ]]; then
      option=''
    elif [[ $word == -- ]]; then
      program=yes
    elif [[ $word == -* ]]; then
      _allranks_value "$command" "$word"
      if [[ -n $kind && -z $bare ]]; then option=$word; fi
    else
      _allranks_command "$command"
      if [[ " $words " == *" $word "* ]]; then
        command="${command:+$command }$word"
      elif [[ $kind == program ]]; then
        program=yes
      fi
    fi
    if [[ -n $program ]]; then kind=file words='' && _allranks_fill "$current" && return; fi
  done
  if [[ -n $option ]]; then
    _allranks_value "$command" "$option"
    _allranks_fill "$current"
  elif [[ $current == --*=* ]]; then
    _allranks_value "$command" "${current%%=*}"
    _allranks_fill "${current#*=}"
  elif [[ $current == -* ]]; then
    kind='' && _allranks_options "$command" && _allranks_fill "$current"
  else
    _allranks_command "$command"
    if [[ $kind == program ]]; then kind=file; fi
    _allranks_fill "$current"
  fi
}

complete -F _allranks allranks
