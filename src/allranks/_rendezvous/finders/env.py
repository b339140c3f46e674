"""``env://``: the environment determines where the ranks meet. The first method that applies is used:

1. the launcher's store (``launcher``),
2. the variables of a scheduler or of MPI's launcher (``scheduler``), if MASTER_ADDR and MASTER_PORT are not set,
3. the store of torchrun's agent (``torchrun``),
4. MASTER_ADDR and MASTER_PORT, where rank 0 serves the store (``port``).
"""

from __future__ import annotations

from allranks._rendezvous.finders.interface import Finder, Method, Request
from allranks._rendezvous.finders.launcher import LauncherFinder
from allranks._rendezvous.finders.port import PortFinder
from allranks._rendezvous.finders.scheduler import find_by_context
from allranks._rendezvous.finders.torchrun import AgentFinder

__all__ = ["ENV", "find_by_env"]


def find_by_env(request: Request) -> Finder:
    """Return the finder that the environment selects."""
    job = request.read_job(by_env=True)
    if job.store:
        return LauncherFinder(request, job)
    if job.place is not None:
        return find_by_context(request, job, job.place)
    if job.agent:
        return AgentFinder(request, job)
    return PortFinder(request, job)


ENV = Method("env", "env://", find_by_env)
