"""The processor time of a benchmark, so that its conditions can say what others had."""

from __future__ import annotations

import resource

__all__ = ["spent_s"]


def spent_s() -> float:
    """Of this process and of those that it has waited for, and theirs."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)
