#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=1
#SBATCH --time=02:00:00
#SBATCH --output=%x-%j.out
#SBATCH --signal=B:TERM@60
#SBATCH --no-kill

set -e
cd /home/you/allranks
export VIRTUAL_ENV=/home/you/allranks/.venv
export PATH="$VIRTUAL_ENV/bin:$PATH"
exec /home/you/allranks/.venv/bin/python -m allranks run --nproc-per-node 4 --elastic 4 --spares 1 examples/gpt/train.py --checkpoints out/gpt
