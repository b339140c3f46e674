"""The number of threads that torch uses for computation, if several ranks share the CPUs of a host.

In each process, torch uses as many threads as it finds cores. The threads of several ranks then compete for the CPUs,
and wait for each other by spinning. On any engine, two ranks with two threads each on two CPUs make 90 rounds per
second of small matrix products and an all_reduce. With one thread each they make 3,400 (benchmarks/threads.py).
`allranks run` and torchrun set OMP_NUM_THREADS. For ranks of spawn, mpirun or srun, no launcher sets it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from allranks._call.callsite import warn
from allranks._cluster.host import cores, cpus_of, usable_cpus

if TYPE_CHECKING:
    from allranks._rendezvous.rendezvous import Member

__all__ = ["share_cpus"]

_log = logging.getLogger("allranks")


def share_cpus(rank: int, members: Sequence[Member]) -> None:
    """Lower torch's number of threads to this rank's share of the host's CPUs, unless the user has set the number.

    The user sets it with OMP_NUM_THREADS or `torch.set_num_threads`. If this is more than the CPUs, the first rank of
    the host prints a warning. Called when a world is created. It is not called for later groups, because results may
    depend on the number of threads. It is also not called for the groups of a master with its workers.
    """
    here = [member for member in members if member.machine == members[rank].machine]
    threads = torch.get_num_threads()
    if len(here) == 1 or threads == 1:
        return
    # Those of all ranks, by the affinity of their processes: srun and mpirun may bind each rank to its own CPUs.
    cpus = cpus_of(member.pid for member in here)
    if len(here) * threads <= cpus:
        return
    share = max(1, cpus // len(here))
    if not _is_chosen(threads):
        torch.set_num_threads(share)
        _log.info("%d ranks on %d CPUs: torch computes with %d threads, not %d", len(here), cpus, share, threads)
    # One warning per host. With PASSIVE, waiting threads sleep instead of spinning, so the loss is small.
    elif here[0].rank == members[rank].rank and os.environ.get("OMP_WAIT_POLICY", "").upper() != "PASSIVE":
        warn(
            f"{len(here)} ranks compute with {threads} threads each on {cpus} CPUs, and wait for each other's threads."
            f"\n  Set OMP_NUM_THREADS={share}, or at least OMP_WAIT_POLICY=PASSIVE, before torch is imported."
        )


def _is_chosen(threads: int) -> bool:
    """Return whether the user has set torch's number of threads: neither torch nor the launcher of an outer job has."""
    given = os.environ.get("OMP_NUM_THREADS")
    # Launchers set OMP_NUM_THREADS only.
    if os.environ.get("MKL_NUM_THREADS"):
        return True
    if given:
        # This rank may start ranks itself. The value from its own launcher is then the share of one rank of the outer
        # job.
        outer = os.environ.get("LOCAL_WORLD_SIZE", "")
        return not outer.isdigit() or given != str(max(1, usable_cpus() // max(1, int(outer))))
    # torch chooses the number of cores, or of CPUs. Any other number was set by the program.
    own = os.sched_getaffinity(0)
    return threads not in (len(own), cores(own))
