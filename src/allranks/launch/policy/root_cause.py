"""Selects the failure that caused all others. Pure: time is an argument.

When one rank dies, the other ranks fail a moment later, in the middle of a collective. The user needs the first failure
that is not an echo of another. A rank reports whether its own failure is an echo (``FailureReport.echo``). An echo may
arrive before its cause, because a rank that the kernel kills needs a moment to exit. Therefore an echo alone is
accepted only after ``SETTLE_S``.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from allranks._base.exit_codes import SIGNAL
from allranks.launch.spec.events import FailureReport

__all__ = ["consequence", "SETTLE_S", "Failure", "RootCause"]

SETTLE_S = 0.3  # seconds; a killed rank is seen only when its process has exited, after its peers have failed


@dataclass(frozen=True)
class Failure:
    """The failure of one rank.

    Attributes:
        rank: its number.
        pid: its process.
        status: exit code, or the negative number of the signal that killed it.
        at: time of the failure, on this host's monotonic clock.
        report: the rank's own report, if it could send one.
        host: its host, if there are several hosts.
        lost: the reason why its whole host is lost; "" if it is not.
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
        """True if this is only a consequence of another rank's failure."""
        return self.report is not None and self.report.echo

    @property
    def exit_code(self) -> int:
        """The status as a shell reports it."""
        return self.status if self.status >= 0 else SIGNAL - self.status

    def __str__(self) -> str:
        if self.lost:
            return self.lost
        rank_text = f"rank {self.rank} ({f'host {self.host}, ' if self.host else ''}pid {self.pid})"
        if self.status >= 0:
            return f"{rank_text} exited with code {self.status}"
        try:
            name = signal.Signals(-self.status).name
        except ValueError:  # real-time signals between SIGRTMIN and SIGRTMAX have no name
            name = f"signal {-self.status}"
        return f"{rank_text} was killed by {name}"


class RootCause:
    """Collects failures until the cause is clear.

    Attributes:
        failures: the first failure of each rank.
    """

    def __init__(self) -> None:
        self.failures: dict[int, Failure] = {}

    def add(self, failure: Failure) -> None:
        """Add a failure. A rank's own report arrives before its exit, and takes precedence."""
        self.failures.setdefault(failure.rank, failure)

    def settles_at(self) -> float | None:
        """Return the time when the cause is clear even without a further report; None if nothing has failed."""
        if not self.failures:
            return None
        first = min(failure.at for failure in self.failures.values())
        return first + SETTLE_S if all(failure.echo for failure in self.failures.values()) else first

    def select(self) -> Failure:
        """Return the most likely cause among the added failures."""

        def key(failure: Failure) -> tuple[bool, bool, float]:
            # A killed process is detected when it has exited. Other ranks may have detected its silence a moment
            # earlier.
            reported = not failure.lost and (failure.status >= 0 or failure.report is not None)
            return failure.echo, reported, failure.at

        return min(self.failures.values(), key=key)


def consequence(why: str, what: str) -> str:
    """Return a reason with its consequence. The advice below the first line of the reason stays at the end."""
    first, newline, advice = why.partition("\n")
    return f"{first.removesuffix('.')}; {what}{newline}{advice}"
