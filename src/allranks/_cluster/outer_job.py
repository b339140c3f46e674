"""Jobs within jobs: a rank starts another distributed program, and the innermost launcher determines the rank.

All processes that a rank starts inherit the variables that ``allranks run`` sets in the rank's environment. Among them
are a shell, which does not start another job, and the processes of torchrun, mpirun, ``spawn`` or another
``allranks run``, which are not ranks of the outer job. Each rank's environment therefore has a seal. The seal contains
the pid of the rank, and the values that the variables of other launchers had at that time. If a process finds other
values, another launcher has started it since.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

from allranks._cluster.schedulers import SCHEDULERS

__all__ = ["SEAL", "begin_inner_job", "belongs", "leave_outer_job", "seal"]

SEAL = "ALLRANKS_SEAL"
"""Name of the variable that contains the seal."""

# Variables that are meaningless outside the job that has set them.
_OF_JOB = (
    SEAL,
    "ALLRANKS_STORE",
    "ALLRANKS_ELASTIC",
    "ALLRANKS_START",
    "ALLRANKS_REHEARSAL",
    "ALLRANKS_RECORD_MEMORY",
)
# Variables by which torchrun, and programs that start ranks manually, pass the rank to a process.
_RANK = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
# Variables by which MPI's launchers and schedulers pass the rank. PMIX_NAMESPACE, PMI_FD and SLURM_STEP_ID distinguish
# two jobs that have the same rank and size.
_TASK = tuple(
    sorted(
        {name for scheduler in SCHEDULERS for row in scheduler.tasks for name in (row.rank, row.size)}
        | {"PMIX_NAMESPACE", "PMI_FD", "SLURM_STEP_ID"}
    )
)
# Other variables that torchrun sets.
_LAYOUT = (
    *("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"),
)


def seal(environ: Mapping[str, str], pid: int) -> str:
    """Return the seal of a rank.

    Args:
        environ: Environment of the rank.
        pid: Pid of the rank, or of the program that starts it: a shell, a profiler.
    """
    return "|".join([str(pid), *_values(environ, _RANK), *_values(environ, _TASK)])


def belongs(environ: Mapping[str, str], rank: int = -1, size: int = -1) -> bool:
    """Return whether this process is a rank of the job of ``allranks run`` whose variables it has.

    Args:
        environ: The environment.
        rank: Rank that the program passes; -1 if none.
        size: World size that the program passes; -1 if none.
    """
    pid, *sealed = environ.get(SEAL, "").split("|")
    now = [*_values(environ, _RANK), *_values(environ, _TASK)]
    if pid == str(os.getpid()):
        # The process is the rank itself. It may set MASTER_ADDR and MASTER_PORT, as for a launcher that does not set
        # them, so only rank and size are compared.
        return now[:2] == sealed[:2]
    given = [text if number == -1 else str(number) for number, text in zip((rank, size), sealed[:2], strict=False)]
    return now == sealed and given == sealed[:2]


def leave_outer_job(environ: MutableMapping[str, str], rank: int = -1, size: int = -1) -> None:
    """Remove the variables of an outer job from the environment of a process that is not one of its ranks.

    Args:
        environ: The environment.
        rank: See ``belongs``.
        size: See ``belongs``.
    """
    if SEAL not in environ or belongs(environ, rank, size):
        return
    sealed = environ[SEAL].split("|")[1:]
    names = [*_OF_JOB]
    if _values(environ, _RANK) == sealed[: len(_RANK)] and _values(environ, _TASK) != sealed[len(_RANK) :]:
        names += [*_RANK, *_LAYOUT]  # an MPI launcher sets none of them, so these values are the outer job's
    for name in names:
        environ.pop(name, None)


def begin_inner_job(environ: MutableMapping[str, str]) -> None:
    """Remove all variables that make this process a rank of a job of ``allranks run``: it starts a job of its own."""
    leave_outer_job(environ)
    if SEAL in environ:
        for name in (*_OF_JOB, *_RANK, *_LAYOUT):
            environ.pop(name, None)


def _values(environ: Mapping[str, str], names: tuple[str, ...]) -> list[str]:
    # "|" separates the values in the seal.
    return [environ.get(name, "").replace("|", "") for name in names]
