#compdef allranks
# Completes allranks in zsh. Written by python -m allranks.tools.completion from the commands' --help.

_allranks_run() {
  _arguments -s -S -A '-*' \
    '(-h --help)'{-h,--help}'[show this help message and exit]' \
    '(-n --nproc)'{-n+,--nproc=}'[number of ranks; auto\: one per CPU; gpu\: one per GPU (default 1)]:N|auto|gpu:(auto gpu)' \
    '!-np+:NPROC: ' \
    '--nproc-per-node=[ranks on each host]:N|auto|gpu:(auto gpu)' \
    '!--nproc_per_node=:N|auto|gpu:(auto gpu)' \
    '(-H --hosts)'{-H+,--hosts=}'[run on these hosts by ssh, at most N ranks on each]:HOST\[\:N\],...:_hosts' \
    '--hostfile=[like --hosts, from a file\: one host per line, with slots=N]:FILE:_files' \
    '-N+[number of hosts; MIN\:MAX\: continue with fewer, and add hosts that return]:MIN\[\:MAX\]: ' \
    '!--nodes=:MIN\[\:MAX\]: ' \
    '!--nnodes=:MIN\[\:MAX\]: ' \
    '--node-rank=[number of this host, if you start the same command on each host]:I: ' \
    '!--node_rank=:I: ' \
    '--master-addr=[address of host 0, if you start the command on each host]:HOST\[\:PORT\]:_hosts' \
    '!--master_addr=:HOST\[\:PORT\]:_hosts' \
    '!--master-port=:PORT: ' \
    '!--master_port=:PORT: ' \
    '--rdzv-endpoint=[like --master-addr, but hosts need no --node-rank]:HOST\[\:PORT\]:_hosts' \
    '!--rdzv_endpoint=:HOST\[\:PORT\]:_hosts' \
    '!--rdzv-backend=:NAME: ' \
    '!--rdzv_backend=:NAME: ' \
    '--rdzv-id=[name of the job, the same on all hosts]:NAME: ' \
    '!--rdzv_id=:NAME: ' \
    '!--rdzv-conf=:KEY=VALUE,...: ' \
    '!--rdzv_conf=:KEY=VALUE,...: ' \
    '!--local-addr=:HOST:_hosts' \
    '!--local_addr=:HOST:_hosts' \
    '!--role=:ROLE: ' \
    '--env=[scheduler or launcher that started this process\: auto, local, ssh, torchrun, mpi, lsf, flux, slurm, k8s, sagemaker, pbs, sge]:KIND: ' \
    '--join-timeout=[time to wait for hosts (default 5m)]:TIME: ' \
    '(-x --export)'{-x+,--export=}'[set a variable on other hosts, or all variables that match a pattern such as WANDB_*]:VAR\[=V\]: ' \
    '--chdir=[working directory]:DIR:_files -/' \
    '!--wdir=:DIR:_files -/' \
    '--ssh=[command to use instead of ssh, for example '\''ssh -i key'\'']:COMMAND: ' \
    '--iface=[interfaces or networks for the traffic between hosts]:NAME|CIDR: ' \
    '--dry-run[print which ranks would run on which hosts, and start nothing]' \
    '(-m --module)'{-m,--module}'[run a python module, as python -m does]' \
    '--mode=[master\: only rank 0 runs the program and drives the others with init_master_worker (default group)]:{group,master}:(group master)' \
    '--start=[fork ranks from a process that has imported torch, or start fresh interpreters (default fork)]:{fork,spawn}:(fork spawn)' \
    '--threads=[OMP_NUM_THREADS per rank, or auto\: CPUs / ranks (default auto)]:N|auto:(auto)' \
    '--grace=[time between SIGTERM and SIGKILL (default 10s)]:TIME: ' \
    '--instead-of-gloo[replace gloo groups of torch.distributed by allranks groups, in an unchanged program]' \
    '--backend=[default backend of init_process_group(), for example native, gloo or cpu\:gloo,cuda\:nccl]:NAME: ' \
    '--stdin=[rank that receives stdin, or none; other ranks read end-of-file (default\: a single rank, or the master)]:RANK|none:(none)' \
    '--elastic=[continue after the loss of ranks while at least MIN are left (see docs/resilience.md)]:MIN\[\:MAX\]: ' \
    '--restarts=[restart the job if a rank fails, up to K times (default 0)]:K: ' \
    '!--max-restarts=:K: ' \
    '!--max_restarts=:K: ' \
    '--respawns=[with --elastic\: restart each lost rank, up to K times (default 3; 0\: continue without it)]:K: ' \
    '--spares=[with --elastic on several hosts\: keep the last N hosts as spares for the ranks of a lost host]:N: ' \
    '--rehearse[with --elastic\: kill ranks in each phase of the first steps, and print whether the result is the same]' \
    '(-q --quiet)'{-q,--quiet}'[of the launcher'\''s messages, print only the cause of a failure]' \
    '(-v --verbose)'{-v,--verbose}'[print each step of the launcher with its time]' \
    '--show=[ranks whose output is printed; 0\: rank 0 only, without prefix (default all)]:{0,all,none}:(0 all none)' \
    '--timestamps[print the time before each line, on the screen and in files]' \
    '--collapse=[print a line only once if several ranks write it at the same time (default auto\: from 8 ranks on)]:{auto,always,never}:(auto always never)' \
    '--logs=[also write each rank'\''s output to DIR/rankN.log]:DIR:_files -/' \
    '(-t --tee)'{-t+,--tee=}'[write streams also to files under --log-dir\: 1 stdout, 2 stderr, 3 both; or 0\:3,10\:1 by local rank]:STREAMS: ' \
    '(-r --redirects)'{-r+,--redirects=}'[write streams only to files under --log-dir\: 1 stdout, 2 stderr, 3 both; or 0\:3,10\:1 by local rank]:STREAMS: ' \
    '--log-dir=[folder for -t and -r\: DIR/<run>_<random>/attempt_0/<local rank>/stdout.log, stderr.log]:DIR:_files -/' \
    '!--log_dir=:DIR:_files -/' \
    '--local-ranks-filter=[print the output of these local ranks only]:0,1,...: ' \
    '!--local_ranks_filter=:0,1,...: ' \
    '--bind=[core\: bind each rank to its own cores; numa\: to a NUMA node, its GPU'\''s if it has one (default none)]:{none,core,numa}:(none core numa)' \
    '--one-gpu-per-rank[make only one GPU visible to each rank, with CUDA_VISIBLE_DEVICES]' \
    '--signals=[signals to forward to the ranks, without stopping the job (default USR1,USR2; none\: no signals)]:NAMES: ' \
    '--notice-after=[time that a rank may wait in one call before the missing ranks and their source lines are printed; 0\: never (default 10s)]:TIME: ' \
    '--idle-timeout=[if no rank writes anything for this time, print all stacks, stop and exit with 124]:TIME: ' \
    '--trace=[record all calls of all ranks in DIR/rank-N.trace; show them with allranks trace timeline DIR]:DIR:_files -/' \
    '--stats[at the end, print the duration of the calls per verb, and the ranks that arrived last]' \
    '--metrics=[write these statistics every 10 s in Prometheus'\'' text format, for node_exporter'\''s textfile collector]:FILE:_files' \
    '!--use-env' \
    '!--use_env' \
    '!--standalone' \
    '!--monitor-interval=:MONITOR_INTERVAL: ' \
    '!--monitor_interval=:MONITOR_INTERVAL: ' \
    '!--start-method=:START_METHOD: ' \
    '!--start_method=:START_METHOD: ' \
    '!--no-python' \
    '!--no_python' \
    '!--run-path' \
    '!--run_path' \
    '1:program:_files' \
    '*:argument:_files'
}

_allranks_torchrun() {
  _arguments -s -S -A '-*' \
    '(-h --help)'{-h,--help}'[show this help message and exit]' \
    '--nnodes=[number of hosts on which this command is started]:N|MIN\:MAX: ' \
    '--nproc-per-node=[ranks on this host]:N|auto|cpu|gpu:(auto cpu gpu)' \
    '!--nproc_per_node=[ranks on this host]:N|auto|cpu|gpu:(auto cpu gpu)' \
    '--rdzv-backend=[c10d\: hosts are numbered as they join; static\: by --node-rank]:c10d|static:(c10d static)' \
    '!--rdzv_backend=[c10d\: hosts are numbered as they join; static\: by --node-rank]:c10d|static:(c10d static)' \
    '--rdzv-endpoint=[the host of the rendezvous]:HOST\[\:PORT\]:_hosts' \
    '!--rdzv_endpoint=[the host of the rendezvous]:HOST\[\:PORT\]:_hosts' \
    '--rdzv-id=[name of the job, the same on all hosts]:NAME: ' \
    '!--rdzv_id=[name of the job, the same on all hosts]:NAME: ' \
    '--rdzv-conf=[join_timeout, timeout, last_call_timeout, is_host]:KEY=VALUE,...: ' \
    '!--rdzv_conf=[join_timeout, timeout, last_call_timeout, is_host]:KEY=VALUE,...: ' \
    '--max-restarts=[restart the ranks if one fails, up to K times]:K: ' \
    '!--max_restarts=[restart the ranks if one fails, up to K times]:K: ' \
    '--monitor-interval=[accepted, without effect]:SECONDS: ' \
    '!--monitor_interval=[accepted, without effect]:SECONDS: ' \
    '--start-method=[accepted, without effect]:METHOD:(spawn fork forkserver)' \
    '!--start_method=[accepted, without effect]:METHOD:(spawn fork forkserver)' \
    '--event-log-handler=[null only]:NAME: ' \
    '!--event_log_handler=[null only]:NAME: ' \
    '--role=[ROLE_NAME of the ranks]:NAME: ' \
    '--log-dir=[folder for -r and -t]:DIR:_files -/' \
    '!--log_dir=[folder for -r and -t]:DIR:_files -/' \
    '(-r --redirects)'{-r+,--redirects=}'[write to files only\: 1 stdout, 2 stderr, 3 both, or 0\:3,1\:1]:STREAMS: ' \
    '(-t --tee)'{-t+,--tee=}'[also write to files]:STREAMS: ' \
    '--local-ranks-filter=[show these local ranks only]:0,1,...: ' \
    '!--local_ranks_filter=[show these local ranks only]:0,1,...: ' \
    '--duplicate-stdout-filters=[not supported]:WORDS: ' \
    '!--duplicate_stdout_filters=[not supported]:WORDS: ' \
    '--duplicate-stderr-filters=[not supported]:WORDS: ' \
    '!--duplicate_stderr_filters=[not supported]:WORDS: ' \
    '--node-rank=[number of this host (default\: hosts are numbered as they join)]:I: ' \
    '!--node_rank=[number of this host (default\: hosts are numbered as they join)]:I: ' \
    '--master-addr=[host 0]:HOST:_hosts' \
    '!--master_addr=[host 0]:HOST:_hosts' \
    '--master-port=[port on host 0]:PORT: ' \
    '!--master_port=[port on host 0]:PORT: ' \
    '--local-addr=[address of this host for the other hosts]:HOST:_hosts' \
    '!--local_addr=[address of this host for the other hosts]:HOST:_hosts' \
    '--logs-specs=[not supported]:NAME: ' \
    '!--logs_specs=[not supported]:NAME: ' \
    '--numa-binding=[bind ranks to CPUs]:MODE:(node socket exclusive core-complex)' \
    '!--numa_binding=[bind ranks to CPUs]:MODE:(node socket exclusive core-complex)' \
    '--signals-to-handle=[signals to forward to the ranks]:NAMES: ' \
    '!--signals_to_handle=[signals to forward to the ranks]:NAMES: ' \
    '--shutdown-timeout=[seconds between SIGTERM and SIGKILL (default 30)]:SECONDS: ' \
    '!--shutdown_timeout=[seconds between SIGTERM and SIGKILL (default 30)]:SECONDS: ' \
    '--standalone[run the job on this host only]' \
    '(-m --module)'{-m,--module}'[run a python module, as python -m does]' \
    '--no-python[run a command]' \
    '!--no_python[run a command]' \
    '--run-path[accepted, without effect]' \
    '!--run_path[accepted, without effect]' \
    '--virtual-local-rank[make one GPU visible to each rank, with local rank 0]' \
    '!--virtual_local_rank[make one GPU visible to each rank, with local rank 0]' \
    '1:program:_files' \
    '*:argument:_files'
}

_allranks_launch() {
  _arguments -s -S -A '-*' \
    '(-h --help)'{-h,--help}'[show this help message and exit]' \
    '--nnodes=[number of hosts on which this command is started]:N|MIN\:MAX: ' \
    '--nproc-per-node=[ranks on this host]:N|auto|cpu|gpu:(auto cpu gpu)' \
    '!--nproc_per_node=[ranks on this host]:N|auto|cpu|gpu:(auto cpu gpu)' \
    '--rdzv-backend=[c10d\: hosts are numbered as they join; static\: by --node-rank]:c10d|static:(c10d static)' \
    '!--rdzv_backend=[c10d\: hosts are numbered as they join; static\: by --node-rank]:c10d|static:(c10d static)' \
    '--rdzv-endpoint=[the host of the rendezvous]:HOST\[\:PORT\]:_hosts' \
    '!--rdzv_endpoint=[the host of the rendezvous]:HOST\[\:PORT\]:_hosts' \
    '--rdzv-id=[name of the job, the same on all hosts]:NAME: ' \
    '!--rdzv_id=[name of the job, the same on all hosts]:NAME: ' \
    '--rdzv-conf=[join_timeout, timeout, last_call_timeout, is_host]:KEY=VALUE,...: ' \
    '!--rdzv_conf=[join_timeout, timeout, last_call_timeout, is_host]:KEY=VALUE,...: ' \
    '--max-restarts=[restart the ranks if one fails, up to K times]:K: ' \
    '!--max_restarts=[restart the ranks if one fails, up to K times]:K: ' \
    '--monitor-interval=[accepted, without effect]:SECONDS: ' \
    '!--monitor_interval=[accepted, without effect]:SECONDS: ' \
    '--start-method=[accepted, without effect]:METHOD:(spawn fork forkserver)' \
    '!--start_method=[accepted, without effect]:METHOD:(spawn fork forkserver)' \
    '--event-log-handler=[null only]:NAME: ' \
    '!--event_log_handler=[null only]:NAME: ' \
    '--role=[ROLE_NAME of the ranks]:NAME: ' \
    '--log-dir=[folder for -r and -t]:DIR:_files -/' \
    '!--log_dir=[folder for -r and -t]:DIR:_files -/' \
    '(-r --redirects)'{-r+,--redirects=}'[write to files only\: 1 stdout, 2 stderr, 3 both, or 0\:3,1\:1]:STREAMS: ' \
    '(-t --tee)'{-t+,--tee=}'[also write to files]:STREAMS: ' \
    '--local-ranks-filter=[show these local ranks only]:0,1,...: ' \
    '!--local_ranks_filter=[show these local ranks only]:0,1,...: ' \
    '--duplicate-stdout-filters=[not supported]:WORDS: ' \
    '!--duplicate_stdout_filters=[not supported]:WORDS: ' \
    '--duplicate-stderr-filters=[not supported]:WORDS: ' \
    '!--duplicate_stderr_filters=[not supported]:WORDS: ' \
    '--node-rank=[number of this host (default\: hosts are numbered as they join)]:I: ' \
    '!--node_rank=[number of this host (default\: hosts are numbered as they join)]:I: ' \
    '--master-addr=[host 0]:HOST:_hosts' \
    '!--master_addr=[host 0]:HOST:_hosts' \
    '--master-port=[port on host 0]:PORT: ' \
    '!--master_port=[port on host 0]:PORT: ' \
    '--local-addr=[address of this host for the other hosts]:HOST:_hosts' \
    '!--local_addr=[address of this host for the other hosts]:HOST:_hosts' \
    '--logs-specs=[not supported]:NAME: ' \
    '!--logs_specs=[not supported]:NAME: ' \
    '--numa-binding=[bind ranks to CPUs]:MODE:(node socket exclusive core-complex)' \
    '!--numa_binding=[bind ranks to CPUs]:MODE:(node socket exclusive core-complex)' \
    '--signals-to-handle=[signals to forward to the ranks]:NAMES: ' \
    '!--signals_to_handle=[signals to forward to the ranks]:NAMES: ' \
    '--shutdown-timeout=[seconds between SIGTERM and SIGKILL (default 30)]:SECONDS: ' \
    '!--shutdown_timeout=[seconds between SIGTERM and SIGKILL (default 30)]:SECONDS: ' \
    '--standalone[run the job on this host only]' \
    '(-m --module)'{-m,--module}'[run a python module, as python -m does]' \
    '--no-python[run a command]' \
    '!--no_python[run a command]' \
    '--run-path[accepted, without effect]' \
    '!--run_path[accepted, without effect]' \
    '--virtual-local-rank[make one GPU visible to each rank, with local rank 0]' \
    '!--virtual_local_rank[make one GPU visible to each rank, with local rank 0]' \
    '--use-env[do not pass --local-rank=I; LOCAL_RANK is set]' \
    '!--use_env[do not pass --local-rank=I; LOCAL_RANK is set]' \
    '1:program:_files' \
    '*:argument:_files'
}

_allranks_env() {
  _arguments -s -S -A '-*' \
    '(-h --help)'{-h,--help}'[show this help message and exit]' \
    '--env=[look for this only (as ALLRANKS_ENV)\: auto, local, ssh, torchrun, mpi, lsf, flux, slurm, k8s, sagemaker, pbs, sge]:KIND: ' \
    '--json[for programs]'
}

_allranks_bench() {
  _arguments -s -S -A '-*' \
    '(-h --help)'{-h,--help}'[show this help message and exit]' \
    '(-n --nproc)'{-n+,--nproc=}'[ranks on this host (default 2; of python 1)]:N: ' \
    '(-H --hosts)'{-H+,--hosts=}'[with mpi\: where mpirun starts how many of the ranks]:HOST\:N,...:_hosts' \
    '--against=[what to compare with, of gloo, mpi]:PEERS: ' \
    '--sizes=[bytes; A..B stands for the sizes from A to B, each 4 times the last (default 4,64,1K..64M; of overlap 16M; of small 4,64,1K)]:LIST: ' \
    '--budget=[seconds for each cell (default 1)]:S: ' \
    '--dtype=[default float32]:T:(uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64)' \
    '--op=[of what reduces (default SUM)]:{SUM,AVG,PRODUCT,MIN,MAX}:(SUM AVG PRODUCT MIN MAX)' \
    '--apart[a barrier before each call, outside its time]' \
    '--shared[our tensors lie in shared memory (empty_shared)]' \
    '--json=[write the figures]:FILE:_files' \
    '--plot=[draw them (needs matplotlib)]:FILE:_files' \
    '1:VERB:(all all_reduce reduce broadcast all_gather gather scatter reduce_scatter all_to_all barrier send overlap python small trace)'
}

_allranks_tune() {
  _arguments -s -S -A '-*' \
    '(-h --help)'{-h,--help}'[show this help message and exit]' \
    '(-n --nproc)'{-n+,--nproc=}'[ranks; default\: four on each CPU, up to 64]:N: ' \
    '(-o --output)'{-o+,--output=}'[default\: tuning.json]:FILE:_files' \
    '--budget=[for each number of ranks and size; default\: 0.3]:SECONDS: '
}

_allranks_submit() {
  _arguments -s -S -A '-*' \
    '(-h --help)'{-h,--help}'[show this help message and exit]' \
    '--to=[sbatch'\''s, qsub'\''s or bsub'\''s file, or Kubernetes'\'' manifest]:{lsf,slurm,k8s,pbs}:(lsf slurm k8s pbs)' \
    '(-N --nodes --nnodes)'{-N+,--nodes=,--nnodes=}'[hosts (default 1)]:N: ' \
    '(-n --nproc)'{-n+,--nproc=}'[ranks in all, as many on each host]:N: ' \
    '--nproc-per-node=[ranks on each host (default\: its GPUs, or 1)]:N: ' \
    '--cpus=[CPUs for each rank (default 1)]:N: ' \
    '--gpus=[GPUs on each host (default 0)]:N: ' \
    '--memory=[memory on each host\: 500M, 64G]:SIZE: ' \
    '--time=[how long at most\: 90m, 2h, 1\:30\:00, 1-12\:00\:00]:T: ' \
    '(--partition --queue)'{--partition=,--queue=}'[partition or queue]:NAME: ' \
    '(--account --project)'{--account=,--project=}'[account or project]:NAME: ' \
    '--name=[the job'\''s (default\: the script'\''s; k8s\: and a random suffix)]:NAME: ' \
    '--image=[k8s\: the container'\''s image, with python, torch, allranks and the script]:IMAGE: ' \
    '--namespace=[k8s\: where it runs]:NAMESPACE: ' \
    '--chdir=[where it runs (default\: here; k8s\: as the image sets it)]:DIR:_files -/' \
    '--elastic=[continue after the loss of ranks while at least MIN are left (see docs/resilience.md)]:MIN\[\:MAX\]: ' \
    '--respawns=[with --elastic\: restart each lost rank, up to K times (default 3; 0\: continue without it)]:K: ' \
    '--spares=[with --elastic on several hosts\: keep the last N hosts as spares for the ranks of a lost host]:N: ' \
    '--trace=[record all calls of all ranks there, as allranks run does]:DIR:_files -/' \
    '--file=[write the file there]:PATH:_files' \
    '--now[submit it\: sbatch, qsub, bsub, kubectl create]' \
    '(-q --quiet)'{-q,--quiet}'[with --now\: print the job'\''s id only]' \
    '(-m --module)'{-m,--module}'[run a python module, as python -m does]' \
    '1:program:_files' \
    '*:argument:_files'
}

_allranks_trace() {
  local context state state_descr line curcontext=$curcontext
  typeset -A opt_args
  _arguments -C -s -A '-*' \
    '(-h --help)'{-h,--help}'[show this help message and exit]' \
    '1:command:->command' \
    '*::argument:->argument'
  case $state in
    command)
      local -a commands=(
        'show:shows what each rank of a running job does, for how long, and for whom it waits'
        'timeline:puts the calls of all ranks on one clock, and draws them'
        'record:runs a program as allranks run does, and writes the timeline of its calls when it has ended'
        'flight:writes the calls of each rank in the format of torch'\''s Flight Recorder'
      )
      _describe command commands
      ;;
    argument)
      if (( $+functions[_allranks_trace_$words[1]] )); then _allranks_trace_$words[1]; fi
      ;;
  esac
}

_allranks_trace_show() {
  _arguments -s -S -A '-*' \
    '(-h --help)'{-h,--help}'[show this help message and exit]' \
    '--calls=[also the N newest calls of each rank]:N: ' \
    '--json[all that is known, as JSON]' \
    '1:JOB: '
}

_allranks_trace_timeline() {
  _arguments -s -S -A '-*' \
    '(-h --help)'{-h,--help}'[show this help message and exit]' \
    '(-o --output)'{-o+,--output=}'[what to write\: *.json or *.json.gz\: for Perfetto; *.html\: a page for a browser; *.png, *.svg, *.pdf\: a picture]:FILE:_files' \
    '--last=[only the last so much time\: 30, 5m]:TIME: ' \
    '--profiler=[traces of torch.profiler of the same ranks (export_chrome_trace); they become part of the *.json]:FILE:_files' \
    '--json[print the summary as JSON]' \
    '*:PATH:_files'
}

_allranks_trace_record() {
  _arguments -s -S -A '-*' \
    '(-h --help)'{-h,--help}'[show this help message and exit]' \
    '(-o --output)'{-o+,--output=}'[what to write\: *.json or *.json.gz\: for Perfetto; *.html\: a page for a browser; *.png, *.svg, *.pdf\: a picture]:FILE:_files' \
    '--last=[only the last so much time\: 30, 5m]:TIME: '
}

_allranks_trace_flight() {
  _arguments -s -S -A '-*' \
    '(-h --help)'{-h,--help}'[show this help message and exit]' \
    '(-o --output)'{-o+,--output=}'[where to write; it has no other files]:FOLDER:_files -/' \
    '--json[print what was written as JSON]' \
    '*:PATH:_files'
}

_allranks_top() {
  _arguments -s -S -A '-*' \
    '(-h --help)'{-h,--help}'[show this help message and exit]' \
    '(-d --delay)'{-d+,--delay=}'[seconds between two looks (default 2)]:S: ' \
    '(-n --count)'{-n+,--count=}'[end after so many looks]:N: ' \
    '--json[a line of JSON for each look]' \
    '1:JOB: '
}

_allranks_checkpoint() {
  local context state state_descr line curcontext=$curcontext
  typeset -A opt_args
  _arguments -C -s -A '-*' \
    '(-h --help)'{-h,--help}'[show this help message and exit]' \
    '1:command:->command' \
    '*::argument:->argument'
  case $state in
    command)
      local -a commands=(
        'list:list the checkpoints in a folder'
        'show:show the writers and the contents of a checkpoint'
        'verify:read every byte, and report damage'
        'diff:show the differences between two checkpoints'
        'export:export one file: safetensors, or a file for torch.load'
        'merge:merge the shares of several hosts into one checkpoint'
      )
      _describe command commands
      ;;
    argument)
      if (( $+functions[_allranks_checkpoint_$words[1]] )); then _allranks_checkpoint_$words[1]; fi
      ;;
  esac
}

_allranks_checkpoint_list() {
  _arguments -s -S -A '-*' \
    '(-h --help)'{-h,--help}'[show this help message and exit]' \
    '--verify[read every byte to find damage]' \
    '--json[print JSON]' \
    '1:FOLDER:_files -/'
}

_allranks_checkpoint_show() {
  _arguments -s -S -A '-*' \
    '(-h --help)'{-h,--help}'[show this help message and exit]' \
    '--step=[step to use in a folder (default\: the newest)]:N: ' \
    '--rank=[show the tensors and values of this rank (default\: all tensors, and the values of rank 0)]:R: ' \
    '--json[print JSON]' \
    '*:PATH:_files'
}

_allranks_checkpoint_verify() {
  _arguments -s -S -A '-*' \
    '(-h --help)'{-h,--help}'[show this help message and exit]' \
    '--all[verify all checkpoints in the folder]' \
    '--step=[step to use in a folder (default\: the newest)]:N: ' \
    '--json[print JSON]' \
    '*:PATH:_files'
}

_allranks_checkpoint_diff() {
  _arguments -s -S -A '-*' \
    '(-h --help)'{-h,--help}'[show this help message and exit]' \
    '--rank=[rank whose state is used (default\: 0)]:R: ' \
    '--json[print JSON]' \
    '1:PATH:_files' \
    '2:PATH:_files'
}

_allranks_checkpoint_export() {
  _arguments -s -S -A '-*' \
    '(-h --help)'{-h,--help}'[show this help message and exit]' \
    '--force[overwrite an existing file]' \
    '--step=[step to use in a folder (default\: the newest)]:N: ' \
    '--rank=[rank whose state is used (default\: 0)]:R: ' \
    '--json[print JSON]' \
    '1:PATH:_files' \
    '2:FILE:_files'
}

_allranks_checkpoint_merge() {
  _arguments -s -S -A '-*' \
    '(-h --help)'{-h,--help}'[show this help message and exit]' \
    '--into=[folder of checkpoints that receives the result]:FOLDER:_files -/' \
    '--step=[step to use in a folder (default\: the newest)]:N: ' \
    '--json[print JSON]' \
    '*:PATH:_files'
}

_allranks_doctor() {
  _arguments -s -S -A '-*' \
    '(-h --help)'{-h,--help}'[show this help message and exit]' \
    '(-n --nproc)'{-n+,--nproc=}'[start N ranks on this host, and check them]:N: ' \
    '--json=[write the report as JSON; to stdout]::FILE:_files' \
    '--plot=[draw latency and bandwidth of all pairs (needs matplotlib)]:FILE:_files' \
    '--timeout=[how long ranks wait for each other (default 30)]:S: ' \
    '--megabytes=[messages that measure bandwidth (default 16)]:M: '
}

_allranks_completion() {
  _arguments -s -S -A '-*' \
    '(-h --help)'{-h,--help}'[show this help message and exit]' \
    '1:{bash,zsh,fish}:(bash zsh fish)'
}

_allranks_help() { _arguments '1:command:(run torchrun launch env bench tune submit trace top checkpoint doctor completion)' }

_allranks() {
  local context state state_descr line curcontext=$curcontext
  typeset -A opt_args
  _arguments -C -s -A '-*' \
    '(-h --help)'{-h,--help}'[print help]' \
    '(-V --version)'{-V,--version}'[print the version]' \
    '1:command:->command' \
    '*::argument:->argument'
  case $state in
    command)
      local -a commands=(
        'run:run a program as N processes, here or on other hosts'
        'torchrun:the same with torchrun'\''s options'
        'launch:the same with torch.distributed.launch'\''s options'
        'env:show what started this process, and the variables behind that'
        'bench:measure collectives'
        'tune:find what is fastest on this host, for ALLRANKS_TUNING'
        'submit:write a job file for SLURM, PBS, LSF or Kubernetes'
        'trace:show what the ranks of a running job do, and for whom they wait'
        'top:show calls, waiting, CPU and memory of a running job, repeatedly'
        'checkpoint:what is in checkpoints, whether they are whole, how two differ'
        'doctor:check this host, or all hosts of a job'
        'completion:print the script that completes these commands in a shell'
        'help:print the help of a command'
      )
      _describe command commands
      ;;
    argument)
      if (( $+functions[_allranks_$words[1]] )); then _allranks_$words[1]; fi
      ;;
  esac
}

if [[ $funcstack[1] == _allranks ]]; then
  _allranks "$@"
else
  compdef _allranks allranks
fi
