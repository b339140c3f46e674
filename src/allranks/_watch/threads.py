"""The places of this process's threads: in which call of torch.distributed a thread is, or where else it is.

A thread that waits for a call has no Python frame below the line that called. Its innermost frame is then a function of
torch.distributed, or a line of the program such as ``work.wait()``. The kernel reports whether the thread runs.
"""

from __future__ import annotations

import linecache
import os
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from allranks._trace.kernel import KernelWait, kernel_wait
from allranks._trace.stacks import Frame, describe, is_own, place, torch_function

__all__ = ["ThreadPlace", "expression", "places", "render", "site"]

# Methods that wait for something else than a call of torch.distributed.
_ELSEWHERE = frozenset((
    "acquire", "get", "put", "join", "sleep", "result", "read", "readline", "readinto", "recv", "recv_into", "accept",
    "connect", "write", "flush", "fsync", "select", "poll", "input", "open", "communicate", "system", "run", "call",
))  # fmt: skip
_METHOD = re.compile(r"(\w+)\s*\(")
_ROOTS = ("group_src", "src", "group_dst", "dst")


@dataclass(frozen=True)
class ThreadPlace:
    """Where a thread is.

    Attributes:
        thread: The thread, as ``threading.get_ident`` returns it.
        name: Its name.
        main: It is the main thread.
        frames: Its frames, the innermost first.
        api: The function of torch.distributed that it executes, such as ``all_reduce``. "" if none.
        site: The line of the program: the innermost line of its own code.
        peer: The root, source or destination that was passed to ``api``, as a world rank or as a rank of ``group``;
            None if there is none.
        peer_of_group: ``peer`` is a rank of the group.
        group: The group that was passed to ``api``.
        expression: The source text that the innermost frame executes, such as ``work.wait()``. "" if unknown.
        waited: The object whose method the innermost frame executes, if it is a local variable; else None.
        kernel: The system call in which it is blocked.
    """

    thread: int
    name: str
    main: bool
    frames: tuple[Frame, ...]
    api: str
    site: str
    peer: int | None
    peer_of_group: bool
    group: Any
    expression: str
    waited: Any
    kernel: KernelWait

    @property
    def elsewhere(self) -> bool:
        """Whether the thread waits for something else than a call of torch.distributed, or executes Python code."""
        if self.api:
            return False
        if not self.frames or not self.kernel.call:  # it runs
            return True
        if not is_own(self.frames[0].file) and "torch" + os.sep not in self.frames[0].file:
            return True  # in Python's library or in another package: a lock, a queue, a file
        method = _METHOD.findall(self.expression)
        return (bool(method) and method[-1] in _ELSEWHERE) or self.kernel.call != "futex"


def places() -> list[ThreadPlace]:
    """Return the places of all threads that execute Python code, except those of allranks. The main thread is first."""
    main = threading.main_thread().ident
    known = {thread.ident: thread for thread in threading.enumerate()}
    found = []
    for ident, frame in sys._current_frames().items():
        thread = known.get(ident)
        name = thread.name if thread is not None else ""
        if name.startswith("allranks-"):
            continue
        found.append(_place(ident, name, ident == main, frame, (thread.native_id if thread is not None else None) or 0))
    return sorted(found, key=lambda each: not each.main)


def _place(ident: int, name: str, main: bool, frame: FrameType, native: int) -> ThreadPlace:
    chain = list(_chain(frame))
    frames = tuple(Frame(f.f_code.co_filename, str(f.f_lineno), f.f_code.co_name) for f in chain)
    function = torch_function(frames)
    api, peer, of_group, group = "", None, False, None
    if function is not None:
        api = frames[function].function
        given = chain[function].f_locals
        group = given.get("group")
        for word in _ROOTS:
            if isinstance(given.get(word), int):
                peer, of_group = given[word], word.startswith("group_")
                break
    text = expression(frame.f_code, frame.f_lasti)
    waited = frame.f_locals.get(text.partition(".")[0].strip()) if "." in text else None
    kernel = kernel_wait(os.getpid(), native) if native else KernelWait()
    return ThreadPlace(
        ident, name, main, frames, api, place(frames), peer, of_group, group, text, waited, kernel
    )  # fmt: skip


def _chain(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def expression(code: CodeType, position: int) -> str:
    """Return the source text of the instruction at a position of a function; "" if the source is not available.

    Before Python 3.11, which added exact positions, return the whole line.
    """
    line = site_line(code, position)
    text = linecache.getline(code.co_filename, line).strip()
    positions = getattr(code, "co_positions", None)
    if positions is None or not text:
        return text
    first, last, begin, end = list(positions())[position // 2]
    if first is None or first != last or begin is None or end is None:
        return text
    # Columns count bytes of UTF-8.
    return linecache.getline(code.co_filename, first).encode()[begin:end].decode(errors="replace")


def site_line(code: CodeType, position: int) -> int:
    """Return the line of the instruction at a position of a function."""
    return next((line or 0 for start, end, line in code.co_lines() if start <= position < end), 0)


def site(code: CodeType, position: int) -> str:
    """Return the place of the instruction at a position of a function, such as ``train.py:12 in step``."""
    return describe(code.co_filename, site_line(code, position), code.co_name)


def render(found: Sequence[ThreadPlace]) -> list[str]:
    """Return the stacks as lines of text."""
    lines = []
    for each in found:
        lines.append("main thread (most recent call first):" if each.main else f"thread {each.name or each.thread}:")
        lines += [str(frame) for frame in each.frames]
    return lines
