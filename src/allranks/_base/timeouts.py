"""Timeouts in the forms that torch accepts: a timedelta or a number of seconds."""

from __future__ import annotations

from datetime import timedelta
from numbers import Real

from allranks._base.errors import UsageError

__all__ = ["LONGEST_WAIT_S", "SHORTEST_S", "seconds_of"]

LONGEST_WAIT_S = 2e6
"""The longest wait that epoll accepts (31 bits of milliseconds), in seconds: three weeks."""

SHORTEST_S = 1e-6
"""The limit of a wait that has expired, in seconds. `Work.wait` treats zero as the group's timeout, as torch does."""

_LONGEST_S = 1e8  # three years; clocks count nanoseconds in 64 bits


def seconds_of(timeout: timedelta | float, longest_s: float = _LONGEST_S) -> float:
    """Return the seconds of a timedelta or of a number of seconds, at most ``longest_s``.

    Raises:
        UsageError: The value is neither.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, timedelta | Real) or timeout != timeout:  # NaN
        raise UsageError(f"timeout must be a timedelta or a number of seconds, not {timeout!r}")
    return min(timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout), longest_s)
