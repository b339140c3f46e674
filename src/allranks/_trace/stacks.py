"""The stacks of a rank's threads, written by ``faulthandler`` from a signal handler. This module performs no I/O.

A rank that hangs in C++ code executes no Python code any more. However, it still receives signals, and ``faulthandler``
writes the stacks without the help of the interpreter. The output is text for people. This module parses it, so that
ranks whose stacks are equal are reported together.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["DUMP", "Frame", "describe", "is_own", "main_place", "parse", "place", "render", "torch_function"]

DUMP = signal.SIGRTMAX - 2
"""The signal that requests stacks. SIGUSR1 and SIGUSR2 are left to the program; few programs use this one."""

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STDLIB = os.path.dirname(os.__file__) + os.sep
_RANK = os.path.join(_PACKAGE, "launch", "ranks", "rank.py")
_THREAD = re.compile(r"(?:Current thread|Thread) 0x[0-9a-f]+(?: \[(.*)\])? \(most recent call first\):")
_FRAME = re.compile(r'  File "(.*)", line (\S+) in (.*)')


@dataclass(frozen=True)
class Frame:
    """A line of a stack: file, line number and function; or any other text of the output."""

    file: str
    line: str
    function: str

    def __str__(self) -> str:
        return f'  File "{self.file}", line {self.line} in {self.function}' if self.file else self.function


def is_own(file: str) -> bool:
    """Return whether a file belongs to the program: not to Python, a library or allranks."""
    return "site-packages" not in file and not file.startswith((_STDLIB, _PACKAGE, "<"))  # "<": from a string


def describe(file: str, line: object, function: str) -> str:
    """Return the description of a place: ``train.py:12 in step``."""
    return f"{file.removeprefix(os.getcwd() + os.sep)}:{line} in {function}"


def parse(text: str) -> list[tuple[str, list[Frame]]]:
    """Parse the output of one rank.

    Returns:
        Name and frames of each thread, the innermost frame first; the main thread before all others. Frames between the
        interpreter and the program are left out.
    """
    threads: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        if head := _THREAD.fullmatch(line):
            threads.append((head[1] or "", []))
        elif threads and line.strip():
            frame = _FRAME.fullmatch(line)
            threads[-1][1].append(Frame(*frame.groups()) if frame else Frame("", "", line))
    threads.reverse()  # the interpreter lists the youngest thread first, so the main thread comes last
    for number, (name, frames) in enumerate(threads):
        launcher = next((n for n, frame in enumerate(frames) if frame.file == _RANK), len(frames))
        # With python -m, frames of runpy are between the launcher and the program.
        while launcher < len(frames) and launcher and "runpy" in frames[launcher - 1].file:
            launcher -= 1
        del frames[launcher:]
        threads[number] = "main thread" if number == 0 else f"thread {name or number}", frames
    return threads


def main_place(text: str) -> str:
    """Return the place of the main thread; see ``place``. "" if the text has no frame with a file."""
    return place([frame for _, frames in parse(text)[:1] for frame in frames if frame.file])


def place(frames: Sequence[Frame]) -> str:
    """Return the innermost line of the program's own code in a stack, and what the libraries below it do, if known.

    Args:
        frames: The frames of a thread that have a file, the innermost first. If none is the program's own, the
            innermost frame is returned.
    """
    own = next((number for number, frame in enumerate(frames) if is_own(frame.file)), 0)
    if not frames:
        return ""
    files = " ".join(frame.file for frame in frames[:own])
    activity = next((phrase for part, phrase in _ACTIVITIES if part in files), "")
    return describe(frames[own].file, frames[own].line, frames[own].function) + (f" ({activity})" if activity else "")


def torch_function(frames: Sequence[Frame]) -> int | None:
    """Return the place, in a stack, of the function of torch.distributed that the program has called; None if none.

    Args:
        frames: The frames of a thread, the innermost first. ``all_gather_object`` calls ``all_gather``: the outer
            function is returned.
    """
    own = next((number for number, frame in enumerate(frames) if is_own(frame.file)), len(frames))
    found = [
        number
        for number, frame in enumerate(frames[:own])
        if frame.file.endswith(_TORCH_FUNCTIONS) and frame.function not in _DECORATORS
    ]
    return found[-1] if found else None


# The files with the functions of torch.distributed, and the decorators of these functions.
_TORCH_FUNCTIONS = ("/distributed/distributed_c10d.py", "/distributed/_functional_collectives.py")
_DECORATORS = frozenset(("wrapper", "_wrapper", "inner"))

# What a thread does whose stack contains a file with such a path. The first that matches is the most specific one.
_ACTIVITIES = (
    ("torch/utils/data/", "waiting for its data loader"),
    ("torch/_inductor/", "compiling"),
    ("torch/_dynamo/", "compiling"),
    ("torch/distributed/checkpoint/", "in a checkpoint"),
    ("/subprocess.py", "waiting for a child process"),
    ("/multiprocessing/", "waiting for a child process"),
)


def render(texts: Mapping[int, str]) -> list[tuple[list[int], list[str]]]:
    """Return the stacks to print, with equal stacks grouped.

    Args:
        texts: Output of each rank, by rank.

    Returns:
        Ranks whose threads all have the same stacks, and the lines of these stacks. Service threads of allranks are
        left out.
    """
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank, text in sorted(texts.items()):
        lines = []
        threads = parse(text)
        for name, frames in [*threads[:1], *(thread for thread in threads[1:] if not _serves_us(thread[1]))]:
            lines += [f"{name} (most recent call first):", *(str(frame) for frame in frames)]
        alike.setdefault(tuple(lines), []).append(rank)
    return [(ranks, list(lines)) for lines, ranks in alike.items()]


def _serves_us(frames: list[Frame]) -> bool:
    files = [frame.file for frame in frames]
    return any(file.startswith(_PACKAGE) for file in files) and not any(file and is_own(file) for file in files)
