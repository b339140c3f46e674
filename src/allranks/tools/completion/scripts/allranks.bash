# Completes allranks in bash. Written by python -m allranks.tools.completion from the commands' --help.

_allranks_command() {  # $kind and $words of what may stand where no option does
  case $1 in
    '') kind='' words='run torchrun launch env bench tune submit trace top checkpoint doctor completion help' ;;
    help) kind='' words='run torchrun launch env bench tune submit trace top checkpoint doctor completion' ;;
    'run') kind=program words='' ;;
    'torchrun') kind=program words='' ;;
    'launch') kind=program words='' ;;
    'env') kind='' words='' ;;
    'bench') kind=words words='all all_reduce reduce broadcast all_gather gather scatter reduce_scatter all_to_all barrier send overlap python small trace' ;;
    'tune') kind='' words='' ;;
    'submit') kind=program words='' ;;
    'trace') kind=command words='show timeline record flight' ;;
    'trace show') kind=any words='' ;;
    'trace timeline') kind=file words='' ;;
    'trace record') kind='' words='' ;;
    'trace flight') kind=file words='' ;;
    'top') kind=any words='' ;;
    'checkpoint') kind=command words='list show verify diff export merge' ;;
    'checkpoint list') kind=folder words='' ;;
    'checkpoint show') kind=file words='' ;;
    'checkpoint verify') kind=file words='' ;;
    'checkpoint diff') kind=file words='' ;;
    'checkpoint export') kind=file words='' ;;
    'checkpoint merge') kind=file words='' ;;
    'doctor') kind='' words='' ;;
    'completion') kind=words words='bash zsh fish' ;;
    *) kind='' words='' ;;
  esac
}

_allranks_options() {  # into $words
  case $1 in
    '') words='-h --help -V --version' ;;
    'run') words='-h --help -n --nproc --nproc-per-node -H --hosts --hostfile -N --node-rank --master-addr --rdzv-endpoint --rdzv-id --env --join-timeout -x --export --chdir --ssh --iface --dry-run -m --module --mode --start --threads --grace --instead-of-gloo --backend --stdin --elastic --restarts --respawns --spares --rehearse -q --quiet -v --verbose --show --timestamps --collapse --logs -t --tee -r --redirects --log-dir --local-ranks-filter --bind --one-gpu-per-rank --signals --notice-after --idle-timeout --trace --stats --metrics' ;;
    'torchrun') words='-h --help --nnodes --nproc-per-node --rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf --max-restarts --monitor-interval --start-method --event-log-handler --role --log-dir -r --redirects -t --tee --local-ranks-filter --duplicate-stdout-filters --duplicate-stderr-filters --node-rank --master-addr --master-port --local-addr --logs-specs --numa-binding --signals-to-handle --shutdown-timeout --standalone -m --module --no-python --run-path --virtual-local-rank' ;;
    'launch') words='-h --help --nnodes --nproc-per-node --rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf --max-restarts --monitor-interval --start-method --event-log-handler --role --log-dir -r --redirects -t --tee --local-ranks-filter --duplicate-stdout-filters --duplicate-stderr-filters --node-rank --master-addr --master-port --local-addr --logs-specs --numa-binding --signals-to-handle --shutdown-timeout --standalone -m --module --no-python --run-path --virtual-local-rank --use-env' ;;
    'env') words='-h --help --env --json' ;;
    'bench') words='-h --help -n --nproc -H --hosts --against --sizes --budget --dtype --op --apart --shared --json --plot' ;;
    'tune') words='-h --help -n --nproc -o --output --budget' ;;
    'submit') words='-h --help --to -N --nodes --nnodes -n --nproc --nproc-per-node --cpus --gpus --memory --time --partition --queue --account --project --name --image --namespace --chdir --elastic --respawns --spares --trace --file --now -q --quiet -m --module' ;;
    'trace') words='-h --help' ;;
    'trace show') words='-h --help --calls --json' ;;
    'trace timeline') words='-h --help -o --output --last --profiler --json' ;;
    'trace record') words='-h --help -o --output --last' ;;
    'trace flight') words='-h --help -o --output --json' ;;
    'top') words='-h --help -d --delay -n --count --json' ;;
    'checkpoint') words='-h --help' ;;
    'checkpoint list') words='-h --help --verify --json' ;;
    'checkpoint show') words='-h --help --step --rank --json' ;;
    'checkpoint verify') words='-h --help --all --step --json' ;;
    'checkpoint diff') words='-h --help --rank --json' ;;
    'checkpoint export') words='-h --help --force --step --rank --json' ;;
    'checkpoint merge') words='-h --help --into --step --json' ;;
    'doctor') words='-h --help -n --nproc --json --plot --timeout --megabytes' ;;
    'completion') words='-h --help' ;;
    *) words='' ;;
  esac
}

_allranks_value() {  # $kind and $words of what option $2 of command $1 takes
  kind='' words='' bare=''
  case "$1 $2" in
    'run -n' | 'run --nproc') kind=words words='auto gpu' ;;
    'run -np') kind=any words='' ;;
    'run --nproc-per-node') kind=words words='auto gpu' ;;
    'run --nproc_per_node') kind=words words='auto gpu' ;;
    'run -H' | 'run --hosts') kind=host words='' ;;
    'run --hostfile') kind=file words='' ;;
    'run -N') kind=any words='' ;;
    'run --nodes') kind=any words='' ;;
    'run --nnodes') kind=any words='' ;;
    'run --node-rank') kind=any words='' ;;
    'run --node_rank') kind=any words='' ;;
    'run --master-addr') kind=host words='' ;;
    'run --master_addr') kind=host words='' ;;
    'run --master-port') kind=any words='' ;;
    'run --master_port') kind=any words='' ;;
    'run --rdzv-endpoint') kind=host words='' ;;
    'run --rdzv_endpoint') kind=host words='' ;;
    'run --rdzv-backend') kind=any words='' ;;
    'run --rdzv_backend') kind=any words='' ;;
    'run --rdzv-id') kind=any words='' ;;
    'run --rdzv_id') kind=any words='' ;;
    'run --rdzv-conf') kind=any words='' ;;
    'run --rdzv_conf') kind=any words='' ;;
    'run --local-addr') kind=host words='' ;;
    'run --local_addr') kind=host words='' ;;
    'run --role') kind=any words='' ;;
    'run --env') kind=any words='' ;;
    'run --join-timeout') kind=any words='' ;;
    'run -x' | 'run --export') kind=any words='' ;;
    'run --chdir') kind=folder words='' ;;
    'run --wdir') kind=folder words='' ;;
    'run --ssh') kind=any words='' ;;
    'run --iface') kind=any words='' ;;
    'run --mode') kind=words words='group master' ;;
    'run --start') kind=words words='fork spawn' ;;
    'run --threads') kind=words words='auto' ;;
    'run --grace') kind=any words='' ;;
    'run --backend') kind=any words='' ;;
    'run --stdin') kind=words words='none' ;;
    'run --elastic') kind=any words='' ;;
    'run --restarts') kind=any words='' ;;
    'run --max-restarts' | 'run --max_restarts') kind=any words='' ;;
    'run --respawns') kind=any words='' ;;
    'run --spares') kind=any words='' ;;
    'run --show') kind=words words='0 all none' ;;
    'run --collapse') kind=words words='auto always never' ;;
    'run --logs') kind=folder words='' ;;
    'run -t' | 'run --tee') kind=any words='' ;;
    'run -r' | 'run --redirects') kind=any words='' ;;
    'run --log-dir') kind=folder words='' ;;
    'run --log_dir') kind=folder words='' ;;
    'run --local-ranks-filter') kind=any words='' ;;
    'run --local_ranks_filter') kind=any words='' ;;
    'run --bind') kind=words words='none core numa' ;;
    'run --signals') kind=any words='' ;;
    'run --notice-after') kind=any words='' ;;
    'run --idle-timeout') kind=any words='' ;;
    'run --trace') kind=folder words='' ;;
    'run --metrics') kind=file words='' ;;
    'run --monitor-interval') kind=any words='' ;;
    'run --monitor_interval') kind=any words='' ;;
    'run --start-method') kind=any words='' ;;
    'run --start_method') kind=any words='' ;;
    'torchrun --nnodes') kind=any words='' ;;
    'torchrun --nproc-per-node' | 'torchrun --nproc_per_node') kind=words words='auto cpu gpu' ;;
    'torchrun --rdzv-backend' | 'torchrun --rdzv_backend') kind=words words='c10d static' ;;
    'torchrun --rdzv-endpoint' | 'torchrun --rdzv_endpoint') kind=host words='' ;;
    'torchrun --rdzv-id' | 'torchrun --rdzv_id') kind=any words='' ;;
    'torchrun --rdzv-conf' | 'torchrun --rdzv_conf') kind=any words='' ;;
    'torchrun --max-restarts' | 'torchrun --max_restarts') kind=any words='' ;;
    'torchrun --monitor-interval' | 'torchrun --monitor_interval') kind=any words='' ;;
    'torchrun --start-method' | 'torchrun --start_method') kind=words words='spawn fork forkserver' ;;
    'torchrun --event-log-handler' | 'torchrun --event_log_handler') kind=any words='' ;;
    'torchrun --role') kind=any words='' ;;
    'torchrun --log-dir' | 'torchrun --log_dir') kind=folder words='' ;;
    'torchrun -r' | 'torchrun --redirects') kind=any words='' ;;
    'torchrun -t' | 'torchrun --tee') kind=any words='' ;;
    'torchrun --local-ranks-filter' | 'torchrun --local_ranks_filter') kind=any words='' ;;
    'torchrun --duplicate-stdout-filters' | 'torchrun --duplicate_stdout_filters') kind=any words='' ;;
    'torchrun --duplicate-stderr-filters' | 'torchrun --duplicate_stderr_filters') kind=any words='' ;;
    'torchrun --node-rank' | 'torchrun --node_rank') kind=any words='' ;;
    'torchrun --master-addr' | 'torchrun --master_addr') kind=host words='' ;;
    'torchrun --master-port' | 'torchrun --master_port') kind=any words='' ;;
    'torchrun --local-addr' | 'torchrun --local_addr') kind=host words='' ;;
    'torchrun --logs-specs' | 'torchrun --logs_specs') kind=any words='' ;;
    'torchrun --numa-binding' | 'torchrun --numa_binding') kind=words words='node socket exclusive core-complex' ;;
    'torchrun --signals-to-handle' | 'torchrun --signals_to_handle') kind=any words='' ;;
    'torchrun --shutdown-timeout' | 'torchrun --shutdown_timeout') kind=any words='' ;;
    'launch --nnodes') kind=any words='' ;;
    'launch --nproc-per-node' | 'launch --nproc_per_node') kind=words words='auto cpu gpu' ;;
    'launch --rdzv-backend' | 'launch --rdzv_backend') kind=words words='c10d static' ;;
    'launch --rdzv-endpoint' | 'launch --rdzv_endpoint') kind=host words='' ;;
    'launch --rdzv-id' | 'launch --rdzv_id') kind=any words='' ;;
    'launch --rdzv-conf' | 'launch --rdzv_conf') kind=any words='' ;;
    'launch --max-restarts' | 'launch --max_restarts') kind=any words='' ;;
    'launch --monitor-interval' | 'launch --monitor_interval') kind=any words='' ;;
    'launch --start-method' | 'launch --start_method') kind=words words='spawn fork forkserver' ;;
    'launch --event-log-handler' | 'launch --event_log_handler') kind=any words='' ;;
    'launch --role') kind=any words='' ;;
    'launch --log-dir' | 'launch --log_dir') kind=folder words='' ;;
    'launch -r' | 'launch --redirects') kind=any words='' ;;
    'launch -t' | 'launch --tee') kind=any words='' ;;
    'launch --local-ranks-filter' | 'launch --local_ranks_filter') kind=any words='' ;;
    'launch --duplicate-stdout-filters' | 'launch --duplicate_stdout_filters') kind=any words='' ;;
    'launch --duplicate-stderr-filters' | 'launch --duplicate_stderr_filters') kind=any words='' ;;
    'launch --node-rank' | 'launch --node_rank') kind=any words='' ;;
    'launch --master-addr' | 'launch --master_addr') kind=host words='' ;;
    'launch --master-port' | 'launch --master_port') kind=any words='' ;;
    'launch --local-addr' | 'launch --local_addr') kind=host words='' ;;
    'launch --logs-specs' | 'launch --logs_specs') kind=any words='' ;;
    'launch --numa-binding' | 'launch --numa_binding') kind=words words='node socket exclusive core-complex' ;;
    'launch --signals-to-handle' | 'launch --signals_to_handle') kind=any words='' ;;
    'launch --shutdown-timeout' | 'launch --shutdown_timeout') kind=any words='' ;;
    'env --env') kind=any words='' ;;
    'bench -n' | 'bench --nproc') kind=any words='' ;;
    'bench -H' | 'bench --hosts') kind=host words='' ;;
    'bench --against') kind=any words='' ;;
    'bench --sizes') kind=any words='' ;;
    'bench --budget') kind=any words='' ;;
    'bench --dtype') kind=words words='uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64' ;;
    'bench --op') kind=words words='SUM AVG PRODUCT MIN MAX' ;;
    'bench --json') kind=file words='' ;;
    'bench --plot') kind=file words='' ;;
    'tune -n' | 'tune --nproc') kind=any words='' ;;
    'tune -o' | 'tune --output') kind=file words='' ;;
    'tune --budget') kind=any words='' ;;
    'submit --to') kind=words words='lsf slurm k8s pbs' ;;
    'submit -N' | 'submit --nodes' | 'submit --nnodes') kind=any words='' ;;
    'submit -n' | 'submit --nproc') kind=any words='' ;;
    'submit --nproc-per-node') kind=any words='' ;;
    'submit --cpus') kind=any words='' ;;
    'submit --gpus') kind=any words='' ;;
    'submit --memory') kind=any words='' ;;
    'submit --time') kind=any words='' ;;
    'submit --partition' | 'submit --queue') kind=any words='' ;;
    'submit --account' | 'submit --project') kind=any words='' ;;
    'submit --name') kind=any words='' ;;
    'submit --image') kind=any words='' ;;
    'submit --namespace') kind=any words='' ;;
    'submit --chdir') kind=folder words='' ;;
    'submit --elastic') kind=any words='' ;;
    'submit --respawns') kind=any words='' ;;
    'submit --spares') kind=any words='' ;;
    'submit --trace') kind=folder words='' ;;
    'submit --file') kind=file words='' ;;
    'trace show --calls') kind=any words='' ;;
    'trace timeline -o' | 'trace timeline --output') kind=file words='' ;;
    'trace timeline --last') kind=any words='' ;;
    'trace timeline --profiler') kind=file words='' ;;
    'trace record -o' | 'trace record --output') kind=file words='' ;;
    'trace record --last') kind=any words='' ;;
    'trace flight -o' | 'trace flight --output') kind=folder words='' ;;
    'top -d' | 'top --delay') kind=any words='' ;;
    'top -n' | 'top --count') kind=any words='' ;;
    'checkpoint show --step') kind=any words='' ;;
    'checkpoint show --rank') kind=any words='' ;;
    'checkpoint verify --step') kind=any words='' ;;
    'checkpoint diff --rank') kind=any words='' ;;
    'checkpoint export --step') kind=any words='' ;;
    'checkpoint export --rank') kind=any words='' ;;
    'checkpoint merge --into') kind=folder words='' ;;
    'checkpoint merge --step') kind=any words='' ;;
    'doctor -n' | 'doctor --nproc') kind=any words='' ;;
    'doctor --json') kind=file words='' bare=yes ;;
    'doctor --plot') kind=file words='' ;;
    'doctor --timeout') kind=any words='' ;;
    'doctor --megabytes') kind=any words='' ;;
  esac
}
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
