"""``allranks run --rehearse``: checks on the first steps whether a program survives losses with the same bits.

Each run is a separate ``allranks run`` with the variable ALLRANKS_REHEARSAL, which State reads
(``resilience.rehearsal``). The first run is undisturbed. In each other run, ranks are killed in one phase of a step.
Every rank writes the digests of its state after each step, and this module compares them. It imports no torch.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from allranks._base.console import has_colours, interruptible, put
from allranks._base.exit_codes import STOPPED

__all__ = ["PHASES", "Start", "PhaseTable", "rehearse"]

PHASES = (
    "loading",
    "forward",
    "backward",
    "optimizer",
    "between optimizers",
    "after the step",
    "evaluation",
    "checkpoint",
)
"""The phases of a step in which ranks are killed, in their order."""

_ALWAYS = ("forward", "backward")  # an undisturbed run has no hooks that could detect these phases
_LEAST_S, _TIMES_AS_LONG = 120.0, 10.0  # seconds, factor; a disturbed run that exceeds both limits counts as hung
_LINES = 40  # the last lines of the output of a failed run are printed
_NAMES = 3  # a list of names is cut off after these

Start = Callable[[Sequence[str], Mapping[str, str], Path, float | None], int | None]
"""Runs a command with an environment, and writes its output to a file, for at most N seconds.

It returns the exit code; None if the command took longer, and was killed.
"""


@dataclass
class _Run:
    """Result of one job.

    Attributes:
        folder: folder of its files.
        error: the first line of the error; "" if it succeeded.
        seconds: its duration.
        records: records by step and rank.
        killed: rank and step of each loss.
        phases: the phases that occurred.
    """

    folder: Path
    error: str
    seconds: float
    records: dict[tuple[tuple[int, ...], int], dict[str, Any]] = field(default_factory=dict)
    killed: list[tuple[int, int]] = field(default_factory=list)
    phases: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for path in sorted(self.folder.glob("rank*.jsonl")):
            rank = int(path.name.removeprefix("rank").partition(".")[0])
            for each in map(json.loads, path.read_text().splitlines()):
                self.records[tuple(each["at"]), rank] = each
        self.killed = [tuple(json.loads(line)) for line in self._lines("killed")]
        self.phases = {*self._lines("phases"), *_ALWAYS}

    def _lines(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len({rank for _, rank in self.records})

    @property
    def steps(self) -> int:
        """The number of committed steps."""
        return len({at for at, _ in self.records})

    @property
    def output(self) -> str:
        """The output of the launcher and of the ranks."""
        return (self.folder / "output").read_text(errors="replace")


def rehearse(words: Sequence[str], phases: Sequence[str] = PHASES, start: Start | None = None) -> int:
    """Run the first steps of a program, undisturbed and with losses, and print whether the results are the same.

    Args:
        words: the command line of ``allranks run`` without ``--rehearse``.
        phases: phases in which ranks are killed.
        start: runs a command; a subprocess if None.

    Returns:
        The exit code: 0 if all phases that occur end with the same bits, 1 if one does not, 130 after Ctrl-C.
    """
    with tempfile.TemporaryDirectory(prefix="allranks-rehearsal-") as folder, interruptible(), _terminable():
        try:
            return _Rehearsal(words, Path(folder), start or _start).run(phases)
        except KeyboardInterrupt:
            put("allranks run: stopped\n")
            return STOPPED


class _Rehearsal:
    def __init__(self, words: Sequence[str], folder: Path, start: Start) -> None:
        self._command = [sys.executable, "-m", "allranks", "run", *words]
        self._folder = folder
        self._start = start
        self._again: _Run | None = None
        self._failed: _Run | None = None
        self._ignored = frozenset[str]()

    def run(self, phases: Sequence[str]) -> int:
        table = PhaseTable()
        first = self._run("")
        error = first.error or _unusable(first)
        table.add("undisturbed", "", f"error: {error}" if error else f"{first.steps} steps on {first.ranks} ranks")
        if error:
            _show_output(first)
            return 1
        bad = 0
        for phase in phases:
            killed, result = "", "does not occur"
            if phase in first.phases:
                run = self._run(phase, first)
                killed = ", ".join(f"rank {rank} (step {step})" for rank, step in run.killed)
                result = self._result(first, run)
            bad += result not in ("same bits", "does not occur")
            table.add(phase, killed, result)
        if self._ignored:
            names = ", ".join(sorted(name.removeprefix("variable ") for name in self._ignored)[:_NAMES])
            put(f"\nNot compared, because two undisturbed runs differ: {names}\n")
        if bad:
            many = f"{bad} of {len(phases)} phases do not produce the same bits"
            put(f"\n{many}. See docs/resilience.md#what-a-step-is\n")
        if self._failed is not None:
            _show_output(self._failed)
        return 1 if bad else 0

    def _result(self, first: _Run, run: _Run) -> str:
        if run.error:
            self._failed = self._failed or run
            return f"error: {run.error}"
        if not run.killed:
            return "does not occur"
        found = _difference(first, run, frozenset())
        if found is None:
            return "same bits"
        if self._again is None:  # run once, and only if values differ: it shows whether the losses are the reason
            self._again = self._run("", first)
        if self._again.error:
            return f"error: {self._again.error}"
        varying = _varying(first, self._again)
        if varying.trained:
            return f"DIFFERENT: {varying.trained[0]}, which also differs between two undisturbed runs"
        self._ignored |= varying.values
        found = _difference(first, run, varying.values)
        if found is None:
            return "same bits"
        name, at, rank = found
        local = _local_differences(first, run, at, varying.local)
        more = f" (declared as local and also different: {', '.join(local[:_NAMES])})" if local else ""
        return f"DIFFERENT: {name}, in step {first.records[at, rank]['step']} on rank {rank}{more}"

    def _run(self, phase: str, first: _Run | None = None) -> _Run:
        # A folder per run, so that the records of two runs do not mix.
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        wanted = json.dumps({"folder": str(folder), "phase": phase})
        errors = folder / "error.json"
        environ = {**os.environ, "ALLRANKS_REHEARSAL": wanted, "TORCHELASTIC_ERROR_FILE": str(errors)}
        limit_s = None if first is None else max(_LEAST_S, _TIMES_AS_LONG * first.seconds)
        began = time.monotonic()
        code = self._start(self._command, environ, folder / "output", limit_s)
        error = ""
        if code is None:
            error = f"the run did not finish within {limit_s:.0f} s"
        elif code:
            error = _first_line(errors, folder / "output") or f"exit code {code}"
        run = _Run(folder, error, time.monotonic() - began)
        if first is not None and not error and run.records.keys() < first.records.keys():
            last = max(first.records)
            if last not in run.records:
                run.error = f"the run stopped after {run.steps} of {first.steps} steps"
        return run


@dataclass(frozen=True)
class _Varying:
    """Names whose values differ between two undisturbed runs.

    Attributes:
        values: all such names that State covers; for example a variable that holds the wall time.
        trained: those that an optimizer trains. If there are any, the program is not deterministic.
        local: those that the program has declared as local.
    """

    values: frozenset[str]
    trained: list[str]
    local: frozenset[str]


def _varying(first: _Run, second: _Run) -> _Varying:
    values, local = set[str](), set[str]()
    for key in first.records.keys() & second.records.keys():
        values |= _differing(first.records[key]["digests"], second.records[key]["digests"])
        local |= _differing(first.records[key]["local"], second.records[key]["local"])
    trained = next(iter(first.records.values()))["trained"]
    return _Varying(frozenset(values), [name for name in trained if name in values], frozenset(local))


def _differing(a: Mapping[str, int], b: Mapping[str, int]) -> set[str]:
    return {name for name in a.keys() & b.keys() if a[name] != b[name]}


def _difference(first: _Run, run: _Run, ignored: frozenset[str]) -> tuple[str, tuple[int, ...], int] | None:
    """Return the first name that differs, its step, and the rank; None if the runs have the same bits."""
    for key in sorted(first.records.keys() & run.records.keys()):
        a, b = first.records[key]["digests"], run.records[key]["digests"]
        for name in a:  # in the order of the record, which has the likely cause first
            if name in b and a[name] != b[name] and name not in ignored:
                return name.removeprefix("variable "), *key
    return None


def _local_differences(first: _Run, run: _Run, at: tuple[int, ...], ignored: frozenset[str]) -> list[str]:
    """Return the declared names that differ in a step on some rank, in the order of the program."""
    names: dict[str, None] = {}
    for key in sorted(key for key in first.records.keys() & run.records.keys() if key[0] == at):
        a, b = first.records[key]["local"], run.records[key]["local"]
        names |= dict.fromkeys(name for name in a if name in _differing(a, b) - ignored)
    return list(names)


def _unusable(first: _Run) -> str:
    """Return why a run that succeeded cannot be rehearsed; "" if it can."""
    if not first.records:
        return "the program has run no step of allranks.resilience.State"
    if first.ranks < 2:
        return "a lost rank receives the state from another rank, so at least 2 ranks are required (-n 2)"
    return ""


def _first_line(errors: Path, output: Path) -> str:
    """Return the first line of the error of the rank that failed first, or of the launcher's last output."""
    try:
        text = str(json.loads(errors.read_text())["message"]["message"])
    except (OSError, ValueError, KeyError):
        # Indented lines continue an error message: they contain the action for the user.
        lines = [line for line in output.read_text(errors="replace").splitlines() if line[:2].strip()]
        text = lines[-1] if lines else ""
    return text.strip().partition("\n")[0].removeprefix("allranks run: error: ")


def _show_output(run: _Run) -> None:
    lines = run.output.splitlines()
    left_out = f" (the last {_LINES} of {len(lines)} lines)" if len(lines) > _LINES else ""
    put("\n".join([f"\nOutput of the first run that failed{left_out}:", *lines[-_LINES:]]) + "\n")


class PhaseTable:
    """Prints a table row by row, because each run takes some seconds. Colors on terminals only."""

    _WIDTHS = (20, 34)

    def __init__(self) -> None:
        self._print("phase", "killed", "result", "bold")

    def add(self, phase: str, killed: str, result: str) -> None:
        """Print a row."""
        good, absent = result == "same bits", result == "does not occur" or phase == "undisturbed"
        bad = result.startswith(("error", "DIFFERENT"))
        self._print(phase, killed, result, "bold red" if bad else "green" if good else "dim" if absent else "")

    def _print(self, phase: str, killed: str, result: str, style: str) -> None:
        before = f"{phase:{self._WIDTHS[0]}}{killed:{self._WIDTHS[1]}}  "
        if not has_colours(sys.stdout):
            put(f"{before}{result}\n")
            return
        from rich.console import Console  # a late import: other jobs do not need it
        from rich.text import Text

        shown = io.StringIO()
        Console(file=shown, highlight=False, force_terminal=True).print(
            Text.assemble(before, (result, style)), soft_wrap=True
        )
        put(shown.getvalue(), styled=True)


def _start(command: Sequence[str], environ: Mapping[str, str], output: Path, limit_s: float | None) -> int | None:
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=dict(environ)
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:  # also after Ctrl-C: SIGTERM lets the launcher stop its ranks; it is killed after 15 s
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(15.0)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM stop the current run, as Ctrl-C does: the run would continue without this process."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
