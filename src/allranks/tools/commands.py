"""The commands of ``allranks``: where each is, and what it does. Names only, so that none is imported for another."""

from __future__ import annotations

__all__ = ["COMMANDS"]

COMMANDS = {
    "run": ("allranks.launch.cli", "run a program as N processes, here or on other hosts"),
    "torchrun": ("allranks.launch.torchrun", "the same with torchrun's options"),
    "launch": ("allranks.launch.__main__", "the same with torch.distributed.launch's options"),
    "env": ("allranks.tools.env", "show what started this process, and from which variables that follows"),
    "bench": ("allranks.tools.bench", "measure collectives"),
    "tune": ("allranks.tools.tune", "find what is fastest on this host, and write it down for ALLRANKS_TUNING"),
    "submit": ("allranks.tools.submit", "write a job file for SLURM, PBS, LSF or Kubernetes"),
    "trace": ("allranks.tools.trace", "show what the ranks of a running job do, and for whom they wait"),
    "top": ("allranks.tools.top", "show calls, waiting, CPU and memory of a running job's ranks, again and again"),
    "checkpoint": ("allranks.tools.checkpoint", "what is in checkpoints, whether they are whole, how two differ"),
    "doctor": ("allranks.tools.doctor", "check this host, or all hosts of a job"),
    "completion": ("allranks.tools.completion", "print the script that completes these commands in bash, zsh or fish"),
}
