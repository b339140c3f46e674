#!/bin/bash -l
# One task on each node starts the ranks there:
#
#   srun --nodes=2 --ntasks-per-node=1 --job-name=helloworld --time=00:01:00 bash slurm_multinode_helper.sh
#
# allranks run finds out by itself what this script does:
#
#   srun --nodes=2 --ntasks-per-node=1 --job-name=helloworld --time=00:01:00 allranks run --nproc-per-node 2 helloworld.py
#
# Source: a user's script for torch.distributed.launch; LAUNCHER=torch.distributed.launch makes it that again.

# list of hostnames
hosts=($(scontrol show hostnames))
# the first is where rank 0 is
master_addr=${hosts[0]}

# a port, from the last four digits of the job's number
key=$((SLURM_JOB_ID % 10000))
master_port=$((15000 + key))

python -m "${LAUNCHER:-allranks.launch}" --master_addr "$master_addr" \
                                         --master_port "$master_port" \
                                         --nnodes "$SLURM_NNODES" \
                                         --node_rank "$SLURM_NODEID" \
                                         --nproc_per_node "${NPROC:-2}" \
                                         "$(dirname "${BASH_SOURCE[0]}")/helloworld.py" "$@"
