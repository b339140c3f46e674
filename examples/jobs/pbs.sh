#!/bin/bash
#PBS -N train
#PBS -l select=2:ncpus=4:mpiprocs=4
#PBS -l place=scatter
#PBS -l walltime=02:00:00
#PBS -j oe

set -e
cd /home/you/allranks
export VIRTUAL_ENV=/home/you/allranks/.venv
export PATH="$VIRTUAL_ENV/bin:$PATH"
exec timeout --foreground --preserve-status 7140 /home/you/allranks/.venv/bin/python -m allranks run --nproc-per-node 4 examples/digits/train.py
