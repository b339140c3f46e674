"""Which failure is the cause, and how it is told. Pure: time comes in as an argument.

When one rank dies the others fail too, a moment later, in the middle of a collective. What helps is the first
failure that is not an echo of another. A rank says of its own failure whether it is one (``Report.echo``), but an
echo may be faster than its cause: a rank killed by the kernel needs a moment to be gone. So an echo alone is
believed only after ``SETTLE_S``.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from allranks._base.errors import rank_list
from allranks.launch.spec.messages import Report
from allranks.launch.voice import Voice

__all__ = ["SETTLE_S", "Blame", "Failure", "describe_failure", "describe_interrupt"]

SETTLE_S = 0.3


@dataclass(frozen=True)
class Failure:
    """One rank's failure.

    Attributes:
        rank: who.
        pid: its process.
        status: exit code, or minus the signal that killed it.
        at: when, on this host's monotonic clock.
        report: what the rank told of it, if it could.
        host: where it ran, where there are several hosts.
        lost: why its whole host is gone; "" if it is not.
    """

    rank: int
    pid: int
    status: int
    at: float
    report: Report | None = None
    host: str = ""
    lost: str = ""

    @property
    def echo(self) -> bool:
        """True if it only tells of another rank's failure."""
        return self.report is not None and self.report.echo

    @property
    def exit_code(self) -> int:
        """What a shell would call it."""
        return self.status if self.status >= 0 else 128 - self.status

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


class Blame:
    """Collects failures until the cause is clear."""

    def __init__(self) -> None:
        self.failures: dict[int, Failure] = {}

    def add(self, failure: Failure) -> None:
        """Takes a failure. A rank's own report comes before its exit, and is the one that counts."""
        self.failures.setdefault(failure.rank, failure)

    def settles_at(self) -> float | None:
        """When the cause is clear even if nothing more is heard; None if nothing has failed."""
        if not self.failures:
            return None
        first = min(failure.at for failure in self.failures.values())
        return first + SETTLE_S if all(failure.echo for failure in self.failures.values()) else first

    def cause(self) -> Failure:
        """The best candidate so far."""

        def key(failure: Failure) -> tuple[bool, bool, float]:
            # A killed process is noticed when it is gone, a moment after others may have noticed its silence.
            told = not failure.lost and (failure.status >= 0 or failure.report is not None)
            return failure.echo, told, failure.at

        return min(self.failures.values(), key=key)


def describe_failure(
    cause: Failure, failures: Sequence[Failure], tail: Sequence[bytes], voice: Voice, left: Sequence[int] = ()
) -> bytes:
    """The last words of a failed job.

    Args:
        cause: the failure that is to blame.
        failures: all that failed before the job was stopped.
        tail: the cause's last lines of output, if they have not been on the screen.
        voice: says it.
        left: who had exited with code 0, which may be what an echo tells of.
    """
    # No signal of the launcher's own comes before the cause.
    hint = " (often the kernel, out of memory)" if cause.status == -signal.SIGKILL else ""
    lines = [voice.line(f"{cause}{hint}").encode()]
    if cause.report is not None and cause.report.text:
        lines.append(cause.report.text.rstrip("\n").encode())
    lines += tail
    if cause.echo and left:
        lines.append(voice.line(f"{rank_list(left)} had already exited with code 0").encode())
    alike: dict[str, list[int]] = {}
    for failure in failures:
        if failure is not cause and not failure.echo:
            title = failure.report.title if failure.report is not None else ""
            alike.setdefault(title or str(failure).partition(") ")[2], []).append(failure.rank)
    if not voice.quiet:
        for title, ranks in alike.items():
            lines.append(voice.line(f"also failed: {rank_list(ranks)}: {title}").encode())
    return b"\n".join(lines)


def describe_interrupt(
    name: str, failures: Sequence[Failure], voice: Voice, unasked: Mapping[str, Sequence[int]] | None = None
) -> bytes:
    """The last words of a job that was stopped by a signal: where each rank was, which tells why it hung.

    Args:
        name: the signal's name.
        failures: what the ranks reported on their way out.
        voice: says it.
        unasked: place -> ranks that the signal ended before they could report anything.
    """
    lines = [voice.line(f"stopped by {name}").encode()]
    places = {place: list(ranks) for place, ranks in (unasked or {}).items()}
    for failure in failures:
        report = failure.report
        if report is not None and report.interrupted and report.where:
            places.setdefault(report.where, []).append(failure.rank)
        elif report is not None and report.text and not report.interrupted and not report.echo:
            lines.append(voice.line(str(failure)).encode())
            lines.append(report.text.rstrip("\n").encode())
    if not voice.quiet:
        lines += [voice.line(f"{rank_list(ranks)}: at {where}").encode() for where, ranks in places.items()]
    return b"\n".join(lines)
