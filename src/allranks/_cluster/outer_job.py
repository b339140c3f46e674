"""Jobs within jobs: a rank starts a distributed program of its own, and the innermost launcher counts.

What ``allranks run`` sets in a rank's environment is inherited by all that the rank starts: by a shell in between,
which is no job of its own, and by the processes of torchrun, mpirun, ``spawn`` or another ``allranks run``, which are
not ranks of the outer job. So each rank's environment has a seal: the process that is the rank, and the variables by
which other launchers tell their processes who they are, as they were then. A process that finds other values than those
has been started by another launcher since.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

from allranks._cluster.schedulers import SCHEDULERS

__all__ = ["SEAL", "begin_inner_job", "belongs", "leave_outer_job", "seal"]

SEAL = "ALLRANKS_SEAL"
"""The variable with the seal."""

# What means nothing outside the job that has set it.
_OF_JOB = (
    SEAL,
    "ALLRANKS_STORE",
    "ALLRANKS_ELASTIC",
    "ALLRANKS_START",
    "ALLRANKS_REHEARSAL",
    "ALLRANKS_RECORD_MEMORY",
)
# As torchrun, and programs that start ranks by hand, tell a process who it is.
_RANK = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
# As MPI's launchers and schedulers do, with what tells two of their jobs with the same numbers apart.
_TASK = tuple(
    sorted(
        {name for scheduler in SCHEDULERS for row in scheduler.tasks for name in (row.rank, row.size)}
        | {"PMIX_NAMESPACE", "PMI_FD", "SLURM_STEP_ID"}
    )
)
# What torchrun sets besides.
_LAYOUT = (
    *("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"),
)


def seal(environ: Mapping[str, str], pid: int) -> str:
    """The seal of a rank.

    Args:
        environ: the rank's environment.
        pid: of its process, or of what it is started by: a shell, a profiler.
    """
    return "|".join([str(pid), *_values(environ, _RANK), *_values(environ, _TASK)])


def belongs(environ: Mapping[str, str], rank: int = -1, size: int = -1) -> bool:
    """Whether this process is a rank of the job of ``allranks run`` whose variables it has.

    Args:
        environ: the environment.
        rank: that the program gives itself; -1: none.
        size: the number of processes that it gives; -1: none.
    """
    pid, *sealed = environ.get(SEAL, "").split("|")
    now = [*_values(environ, _RANK), *_values(environ, _TASK)]
    if pid == str(os.getpid()):
        # A script may say where rank 0 is, as for a launcher that does not.
        return now[:2] == sealed[:2]
    given = [text if number == -1 else str(number) for number, text in zip((rank, size), sealed[:2], strict=False)]
    return now == sealed and given == sealed[:2]


def leave_outer_job(environ: MutableMapping[str, str], rank: int = -1, size: int = -1) -> None:
    """Remove what an outer job has set, from the environment of a process that is none of its ranks.

    Args:
        environ: the environment.
        rank: as for ``belongs``.
        size: as for ``belongs``.
    """
    if SEAL not in environ or belongs(environ, rank, size):
        return
    sealed = environ[SEAL].split("|")[1:]
    names = [*_OF_JOB]
    if _values(environ, _RANK) == sealed[: len(_RANK)] and _values(environ, _TASK) != sealed[len(_RANK) :]:
        names += [*_RANK, *_LAYOUT]  # MPI's launcher sets none of them
    for name in names:
        environ.pop(name, None)


def begin_inner_job(environ: MutableMapping[str, str]) -> None:
    """Remove all that says that this process is a rank of a job of ``allranks run``: it starts a job of its own."""
    leave_outer_job(environ)
    if SEAL in environ:
        for name in (*_OF_JOB, *_RANK, *_LAYOUT):
            environ.pop(name, None)


def _values(environ: Mapping[str, str], names: tuple[str, ...]) -> list[str]:
    return [environ.get(name, "").replace("|", "") for name in names]
