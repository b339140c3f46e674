"""The calls of the ranks of a failed job: a summary for the terminal, and the full list in a file.

The file is in the folder of ``--logs``, or else in the user's state folder, which keeps the newest 10 files.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from allranks._trace import stacks
from allranks._trace.diagnosis import diagnose
from allranks._trace.state import CallState
from allranks.launch.policy.interface import Outcome

__all__ = ["describe_calls", "differ", "report", "write_report"]

_KEPT = 10  # newest files in the user's state folder
_SHORT = 3  # calls of a rank on the terminal


def describe_calls(outcome: Outcome, hosts: Sequence[str]) -> list[str]:
    """Return the lines for the terminal: the late ranks, or the last calls of a rank that could report nothing."""
    cause = outcome.cause
    if cause is None:
        return []
    if cause.report is None:
        state = next((state for state in outcome.states if state.rank == cause.rank), None)
        if state is None or not state.recent:
            return []
        return [f"last calls of rank {cause.rank}: {'; '.join(map(_call, state.recent[-_SHORT:]))}"]
    if not outcome.stacks:
        return []
    return diagnose(outcome.states).lines(dict(enumerate(hosts)), _places(outcome.stacks))


def differ(outcome: Outcome) -> bool:
    """Return whether ranks called different operations: the error names them, and the last calls show the reason."""
    report = outcome.cause.report if outcome.cause is not None else None
    return report is not None and report.title.startswith("allranks.MismatchError")


def report(outcome: Outcome, hosts: Sequence[str], command: str) -> str:
    """Return the full report: the state of each rank, its last calls, and the stacks, with equal stacks only once."""
    lines = [f"{time.strftime('%Y-%m-%d %H:%M:%S')} {command}", str(outcome.cause), "", *describe_calls(outcome, hosts)]
    for state in outcome.states:
        host = f" ({hosts[state.rank]})" if hosts else ""
        lines += ["", f"rank {state.rank}{host}, pid {state.pid}, {state.process}; its last calls:"]
        lines += [f"  {_call(call)}" for call in state.recent] or ["  none"]
    readable = {rank: text.decode(errors="replace") for rank, text in outcome.stacks.items()}
    for ranks, frames in stacks.render(readable):
        lines += ["", f"stacks of ranks {', '.join(map(str, ranks))}:", *frames]
    return "\n".join(lines) + "\n"


def write_report(text: str, folder: Path | None, environ: Mapping[str, str]) -> Path | None:
    """Write the report to a file. Return its path; None if it cannot be written.

    Args:
        text: the report.
        folder: folder of the log files; None if there is none.
        environ: contains the location of the user's state files.
    """
    try:
        if folder is not None:
            path = folder / "last_calls.txt"
        else:
            home = environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
            path = Path(home) / "allranks" / f"failed-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if folder is None:
            for old in sorted(path.parent.glob("failed-*.txt"))[:-_KEPT]:
                # Another job of the user may remove the same file simultaneously.
                old.unlink(missing_ok=True)
    except (OSError, RuntimeError):  # a full or read-only disk, or a user without a home: the summary was printed
        return None
    return path


def _call(call: CallState) -> str:
    site = f" ({call.site})" if call.site else ""
    if not call.ended:
        return f"{call.title}{site}, not finished after {_time(call.seconds)}"
    how = f"failed ({call.outcome}) after" if call.outcome else "took"
    last = f", rank {call.last} arrived last" if call.last >= 0 else ""
    return f"{call.title}{site} {how} {_time(call.seconds)}{last}"


def _time(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _places(texts: Mapping[int, bytes]) -> dict[int, str]:
    return {rank: stacks.main_place(text.decode(errors="replace")) for rank, text in texts.items()}
