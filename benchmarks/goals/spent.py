"""The CPU time of a benchmark, which is subtracted from the CPU time of the host to find that of other processes."""

from __future__ import annotations

import resource

__all__ = ["spent_s"]


def spent_s() -> float:
    """Return the CPU time of this process, of its terminated and awaited children, and of their descendants."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)
