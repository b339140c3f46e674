"""Selects the failure that caused all others. Pure: time is an argument.

When one rank dies the others fail too, a moment later, in the middle of a collective. The user needs the first failure
that is not an echo of another. A rank reports whether its own failure is an echo (``Report.echo``), but an echo may
arrive before its cause: a rank killed by the kernel needs a moment to be gone. So an echo alone is accepted only after
``SETTLE_S``.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from allranks._base.exit_codes import SIGNAL
from allranks.launch.spec.events import FailureReport

__all__ = ["SETTLE_S", "Failure", "RootCause"]

SETTLE_S = 0.3


@dataclass(frozen=True)
class Failure:
    """The failure of one rank.

    Attributes:
        rank: its number.
        pid: its process.
        status: exit code, or minus the signal that killed it.
        at: when, on this host's monotonic clock.
        report: what the rank reported about it, if it could.
        host: where it ran, if there are several hosts.
        lost: why its whole host is lost; "" if it is not.
    """

    rank: int
    pid: int
    status: int
    at: float
    report: FailureReport | None = None
    host: str = ""
    lost: str = ""

    @property
    def echo(self) -> bool:
        """True if it is only a consequence of another rank's failure."""
        return self.report is not None and self.report.echo

    @property
    def exit_code(self) -> int:
        """The status as a shell reports it."""
        return self.status if self.status >= 0 else SIGNAL - self.status

    def __str__(self) -> str:
        if self.lost:
            return self.lost
        who = f"rank {self.rank} ({f'host {self.host}, ' if self.host else ''}pid {self.pid})"
        if self.status >= 0:
            return f"{who} exited with code {self.status}"
        try:
            name = signal.Signals(-self.status).name
        except ValueError:  # real-time signals between SIGRTMIN and SIGRTMAX have no name
            name = f"signal {-self.status}"
        return f"{who} was killed by {name}"


class RootCause:
    """Collects failures until the cause is clear.

    Attributes:
        failures: the first failure of each rank.
    """

    def __init__(self) -> None:
        self.failures: dict[int, Failure] = {}

    def add(self, failure: Failure) -> None:
        """Adds a failure. A rank's own report comes before its exit, and is the one that counts."""
        self.failures.setdefault(failure.rank, failure)

    def settles_at(self) -> float | None:
        """When the cause is clear even if no other failure is reported; None if nothing has failed."""
        if not self.failures:
            return None
        first = min(failure.at for failure in self.failures.values())
        return first + SETTLE_S if all(failure.echo for failure in self.failures.values()) else first

    def select(self) -> Failure:
        """The most likely cause of those that were added."""

        def key(failure: Failure) -> tuple[bool, bool, float]:
            # A killed process is detected when it is gone, a moment after others may have detected its silence.
            reported = not failure.lost and (failure.status >= 0 or failure.report is not None)
            return failure.echo, reported, failure.at

        return min(self.failures.values(), key=key)
