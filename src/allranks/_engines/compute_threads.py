"""How many threads torch computes with, where several ranks share the CPUs of a host.

torch computes with as many threads as it finds cores, in each process. Threads of several ranks then take the CPUs from
each other, and wait for each other by spinning: two ranks with two threads each on two CPUs make 90 rounds of small
matrix products and an all_reduce a second on any engine, and 3,400 with one thread each (benchmarks/threads.py).
`allranks run` and torchrun set OMP_NUM_THREADS. Nobody does for ranks of spawn, mpirun or srun.
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
    """Lowers torch's threads to this rank's share of the host's CPUs, unless the user has chosen their number.

    The user has, with OMP_NUM_THREADS or `torch.set_num_threads`. If that is more than the CPUs, the first rank of the
    host warns. Called where a world is made; not for later groups, as results may depend on the number of threads, nor
    for those of a master with its workers.
    """
    here = [member for member in members if member.machine == members[rank].machine]
    threads = torch.get_num_threads()
    if len(here) == 1 or threads == 1:
        return
    cpus = cpus_of(member.pid for member in here)
    if len(here) * threads <= cpus:
        return
    share = max(1, cpus // len(here))
    if not _is_chosen(threads):
        torch.set_num_threads(share)
        _log.info("%d ranks on %d CPUs: torch computes with %d threads, not %d", len(here), cpus, share, threads)
    elif here[0].rank == members[rank].rank and os.environ.get("OMP_WAIT_POLICY", "").upper() != "PASSIVE":
        warn(
            f"{len(here)} ranks compute with {threads} threads each on {cpus} CPUs, and wait for each other's threads."
            f" Set OMP_NUM_THREADS={share}, or at least OMP_WAIT_POLICY=PASSIVE, before torch is imported"
        )


def _is_chosen(threads: int) -> bool:
    """Whether somebody has decided how many threads torch uses here: not torch, and not an outer job's launcher."""
    given = os.environ.get("OMP_NUM_THREADS")
    if os.environ.get("MKL_NUM_THREADS"):
        return True
    if given:
        # Of a rank that starts ranks itself: what its launcher has given it is the share of one.
        outer = os.environ.get("LOCAL_WORLD_SIZE", "")
        return not outer.isdigit() or given != str(max(1, usable_cpus() // max(1, int(outer))))
    own = os.sched_getaffinity(0)
    return threads not in (len(own), cores(own))
