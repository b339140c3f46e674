"""What an agent tells its launcher.

Typed and free of objects of this process, so that the same agent can later sit on another host and send them
over ssh. What they mean for the job is decided in ``supervise`` and ``blame``.
"""

from __future__ import annotations

import msgspec

__all__ = ["Event", "Exited", "Failed", "Output", "Report"]


class Report(msgspec.Struct, frozen=True):
    """How a python rank failed, told by the rank itself at the moment it happens.

    Attributes:
        code: the exit code that the interpreter will end with.
        title: the last line of the traceback, for example ``ValueError: boom``; "" for ``sys.exit(3)``.
        text: the formatted traceback; "" if there is none, or if the rank prints it by a hook of its own.
        where: the innermost line of the user's own code, for example ``train.py:12 in step``.
        echo: the failure only tells of another rank's: a ``PeerLostError`` or what came of one.
        interrupted: it is a KeyboardInterrupt.
        at: when, on the clock that all processes of a host share (``time.monotonic``).
    """

    code: int
    title: str = ""
    text: str = ""
    where: str = ""
    echo: bool = False
    interrupted: bool = False
    at: float = 0.0


class Output(msgspec.Struct, frozen=True, tag=True):
    """Bytes that a rank wrote. ``stream`` is 1 or 2; a rank with one channel for both says 1."""

    rank: int
    stream: int
    data: bytes


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A rank reported its failure. Its process is still on its way out."""

    rank: int
    pid: int
    report: Report


class Exited(msgspec.Struct, frozen=True, tag=True):
    """A rank's process is gone. ``status`` is its exit code, or minus the signal that killed it."""

    rank: int
    pid: int
    status: int


Event = Output | Failed | Exited
