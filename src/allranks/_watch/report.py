"""The text of a report and the file with all evidence. Pure, except for the write of the file."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from allranks._trace.diagnosis import Diagnosis, diagnose
from allranks._trace.state import CREATION, RankState
from allranks._watch.exchange import Peer, RankAnswer

__all__ = ["diagnose_answers", "report_lines", "write_report"]

_SHORTEST = 0.5  # waits shorter than this share of the reporting rank's wait are not part of its hang


def diagnose_answers(answers: Mapping[int, RankAnswer], reporter: int, age_s: float) -> Diagnosis:
    """Return the causes of the reporting rank's wait, without waits that have only just begun.

    Args:
        answers: The state of each rank.
        reporter: The rank that reports. Its own state is current.
        age_s: Seconds since the other ranks answered. Their waits have lasted that much longer.
    """
    own = answers[reporter].state.waiting
    shortest_s = own.seconds * _SHORTEST if own is not None else 0.0
    states = []
    for rank, answer in answers.items():
        more_s = 0.0 if rank == reporter else age_s
        calls = tuple(
            msgspec.structs.replace(call, seconds=call.seconds + more_s)
            for call in answer.state.calls
            if call.seconds + more_s >= shortest_s or not call.waits
        )
        states.append(msgspec.structs.replace(answer.state, calls=calls))
    found = diagnose(states)
    # A rank that reads standard input waits for its user, for example in a debugger.
    return replace(found, late=tuple(r for r in found.late if r not in found.states or not found.states[r].reads_stdin))


def report_lines(
    found: Diagnosis, answers: Mapping[int, RankAnswer], peers: Mapping[int, Peer], here: str
) -> list[str]:
    """Return the lines of a report. Empty if no rank waits for another one.

    Args:
        found: The causes.
        answers: The state of each rank.
        peers: The known ranks.
        here: Identity of the host of this rank.
    """
    hosts = {rank: peer.host for rank, peer in peers.items() if peer.machine != here}
    places = {rank: answers[rank].place for rank in found.late if rank in answers}
    lines = found.lines(hosts, places, {rank: _problem(answers.get(rank)) for rank in found.late})
    if not lines and (arrived := [wait for wait in found.waits.values() if not wait.awaited]):
        call = arrived[0].call
        lines = [
            f"all ranks have begun {call.title} ({call.site}), which does not end: the network between them or the"
            " backend is blocked"
        ]
    return lines


def _problem(answer: RankAnswer | None) -> str:
    return answer.problem if answer is not None else ""


def write_report(
    lines: Sequence[str], answers: Mapping[int, RankAnswer], native: Mapping[int, str], reporter: int, folder: str
) -> Path:
    """Write the report, and the calls and stacks of all ranks, into a new file.

    Args:
        lines: The lines of the report.
        answers: The state of each rank.
        native: Stacks with native code, by rank, as far as they are known.
        reporter: The rank that reports.
        folder: Folder of the file; "" for the folder of temporary files.

    Raises:
        OSError: The file cannot be written.
    """
    text = [f"allranks watch, rank {reporter}, {time.strftime('%Y-%m-%d %H:%M:%S')}", "", *lines]
    for rank, answer in sorted(answers.items()):
        text += ["", f"rank {rank}: pid {answer.state.pid}, process {answer.state.process}"]
        if answer.problem:
            text.append(f"  The rank {answer.problem}.")
        text += _calls("in progress", answer.state)
        text += [f"  {line}" for line in answer.stacks.splitlines()]
        if native.get(rank):
            text += ["  with native code (py-spy):", *(f"  {line}" for line in native[rank].splitlines())]
    path = Path(folder or tempfile.gettempdir()) / f"allranks-watch-{os.getpid()}-{time.time_ns() // 1_000_000}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(text) + "\n")
    return path


def _calls(title: str, state: RankState) -> list[str]:
    lines = [
        f"  {title} for {call.seconds:.1f} s: {call.title}{f' of group {call.group!r}' if call.group else ''},"
        f" {call.count} {call.dtype}, {call.site}"
        for call in state.calls
        if not call.group.startswith(CREATION)
    ]
    lines += [
        f"  ended: {call.title}{f' of group {call.group!r}' if call.group else ''}, {call.count} {call.dtype},"
        f" {call.site}"
        for call in state.recent[-10:]
    ]
    return lines
