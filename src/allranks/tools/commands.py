"""The commands of ``allranks``: the module and the summary of each.

The table contains only names, so that running one command does not import the others. The help prints each summary in
one line of 80 columns.
"""

from __future__ import annotations

__all__ = ["COMMANDS", "EXAMPLES"]

COMMANDS = {
    "run": ("allranks.launch.cli", "run a program as N processes, here or on other hosts"),
    "torchrun": ("allranks.launch.torchrun", "run a program, with torchrun's options"),
    "launch": ("allranks.launch.__main__", "run a program, with torch.distributed.launch's options"),
    "env": ("allranks.tools.env", "show what started this process, and the variables that show it"),
    "bench": ("allranks.tools.bench", "measure collectives"),
    "tune": ("allranks.tools.tune", "find the fastest settings on this host, for ALLRANKS_TUNING"),
    "submit": ("allranks.tools.submit", "write a job file for SLURM, PBS, LSF or Kubernetes"),
    "trace": ("allranks.tools.trace", "show what the ranks of a running job do and wait for"),
    "top": ("allranks.tools.top", "show calls, waiting, CPU and memory of a running job, repeatedly"),
    "watch": ("allranks.tools.watch", "run a command whose ranks report why they wait"),
    "checkpoint": ("allranks.tools.checkpoint", "list, verify, compare and convert checkpoints"),
    "doctor": ("allranks.tools.doctor", "check this host, or all hosts of a job"),
    "completion": ("allranks.tools.completion", "print the completion script for a shell"),
}

EXAMPLES = (
    ("allranks run -n 4 train.py", "train.py as 4 processes on this host"),
    ("allranks run -H node0:4,node1:4 train.py", "4 processes on each of two hosts, by ssh"),
    ("allranks submit --to slurm -N 2 -n 8 train.py > job.sh", "a job file for SLURM: 8 processes on 2 nodes"),
    ("allranks top", "what the ranks of the running job do"),
    ("allranks doctor", "problems on this host"),
)
