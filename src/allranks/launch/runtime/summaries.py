"""The last lines of a job that failed, was stopped by a signal, or was idle for too long."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence

from allranks._base.errors import rank_list
from allranks._trace import stacks
from allranks.launch.policy.interface import Outcome
from allranks.launch.policy.root_cause import Failure
from allranks.launch.reporter import Reporter

__all__ = ["describe_failure", "describe_idle", "describe_interrupt", "ranks_by_line"]


def ranks_by_line(texts: Mapping[int, bytes]) -> dict[str, list[int]]:
    """Return the source line that each rank's main thread executes: line -> ranks.

    Args:
        texts: the stacks, by rank.
    """
    places: dict[str, list[int]] = {}
    for rank, text in texts.items():
        if place := stacks.main_place(text.decode(errors="replace")):
            places.setdefault(place, []).append(rank)
    return places


def describe_failure(
    cause: Failure, failures: Sequence[Failure], tail: Sequence[bytes], reporter: Reporter, left: Sequence[int] = ()
) -> bytes:
    """Return the last lines of a failed job.

    Args:
        cause: the failure that caused the others.
        failures: all failures before the job was stopped.
        tail: the last lines of output of the rank that caused the failure, if they have not been on the screen.
        reporter: adds the prefix of the launcher's own lines.
        left: ranks that had exited with code 0, which may be the cause of an echo.
    """
    # The launcher sends no signal before the cause, so SIGKILL comes from elsewhere.
    hint = " (often the kernel, out of memory: check dmesg)" if cause.status == -signal.SIGKILL else ""
    lines = [reporter.line(f"{cause}{hint}").encode()]
    if cause.report is not None and cause.report.text:
        lines.append(cause.report.text.rstrip("\n").encode())
    lines += tail
    if cause.echo and left:
        lines.append(reporter.line(f"{rank_list(left)} had already exited with code 0").encode())
    alike: dict[str, list[int]] = {}
    for failure in failures:
        if failure is not cause and not failure.echo:
            title = failure.report.title if failure.report is not None else ""
            alike.setdefault(title or str(failure).partition(") ")[2], []).append(failure.rank)
    if not reporter.quiet:
        for title, ranks in alike.items():
            lines.append(reporter.line(f"also failed: {rank_list(ranks)}: {title}").encode())
    return b"\n".join(lines)


def describe_interrupt(
    name: str, failures: Sequence[Failure], reporter: Reporter, silent: Mapping[str, Sequence[int]] | None = None
) -> bytes:
    """Return the last lines of a job that was stopped by a signal: the line of each rank, which shows why it hung.

    Args:
        name: the signal's name.
        failures: reports of the ranks before they exited.
        reporter: adds the prefix of the launcher's own lines.
        silent: line -> ranks that the signal killed before they could report anything.
    """
    lines = [reporter.line(f"stopped by {name}").encode()]
    places = {place: list(ranks) for place, ranks in (silent or {}).items()}
    for failure in failures:
        report = failure.report
        if report is not None and report.interrupted and report.where:
            places.setdefault(report.where, []).append(failure.rank)
        elif report is not None and report.text and not report.interrupted and not report.echo:
            lines.append(reporter.line(str(failure)).encode())
            lines.append(report.text.rstrip("\n").encode())
    if not reporter.quiet:
        lines += [reporter.line(f"{rank_list(ranks)}: at {where}").encode() for where, ranks in places.items()]
    return b"\n".join(lines)


def describe_idle(outcome: Outcome, idle_s: float, reporter: Reporter) -> bytes:
    """Return the last lines of a job that was idle for too long: a summary, after all output of the ranks."""
    lines = [reporter.line(f"stopped because no rank had written anything for {idle_s:g} s")]
    for place, ranks in ranks_by_line(outcome.stacks).items():
        lines.append(reporter.line(f"{rank_list(ranks)}: at {place}"))
    return "\n".join(lines).encode()
