#!/bin/bash
#BSUB -J train
#BSUB -n 8
#BSUB -R "span[ptile=4]"
#BSUB -W 2:00
#BSUB -wa TERM
#BSUB -wt 1
#BSUB -o %J.out

set -e
cd /home/you/allranks
export VIRTUAL_ENV=/home/you/allranks/.venv
export PATH="$VIRTUAL_ENV/bin:$PATH"
exec /home/you/allranks/.venv/bin/python -m allranks run --nproc-per-node 4 examples/digits/train.py
