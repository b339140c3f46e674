"""What a rank does at one moment: its calls under way, its groups, its process.

It travels from agents to the launcher. ``inspection`` finds it out.
"""

from __future__ import annotations

import msgspec

__all__ = ["CallState", "GroupState", "RankState", "Usage"]


class CallState(msgspec.Struct, frozen=True):
    """A call of a rank. Ranks are those of the world.

    Attributes:
        index: in the order of the rank's calls, from 1.
        title: such as ``all_reduce #42``, ``recv from rank 3``.
        verb: such as ``all_reduce``.
        group: the name of its group; with ``ranks`` it identifies the group.
        ranks: the members.
        number: of the group's collectives; 0 of a message.
        tag: of a message.
        dtype: such as ``float32``.
        count: elements.
        peer: the root, or the other side of a message; -1: none, or any.
        site: its line in the program; "" if it is not known.
        began: the time of its entry, in seconds of its host's monotonic clock.
        seconds: how long it took, or how long it has taken until now.
        met: all ranks have come.
        last: who came last; -1: not known.
        outcome: "" or how it failed.
        ended: it has ended.
        waits: the program waits for it, or has waited in vain.
    """

    index: int
    title: str
    verb: str
    group: str
    ranks: tuple[int, ...]
    number: int
    tag: int
    dtype: str
    count: int
    peer: int
    site: str
    began: float
    seconds: float
    met: bool
    last: int
    outcome: str
    ended: bool
    waits: bool


class GroupState(msgspec.Struct, frozen=True):
    """A group of a rank: its name, members, engine, and the number of the last collective that the rank has begun."""

    name: str
    ranks: tuple[int, ...]
    engine: str
    number: int
    open: bool


class Usage(msgspec.Struct, frozen=True):
    """What a rank has used until now: calls, their bytes, seconds in calls, CPU seconds; its resident memory, bytes.

    ``commands``: how many a worker has executed.
    """

    calls: int = 0
    bytes: int = 0
    in_calls: float = 0.0
    waiting: float = 0.0
    cpu: float = 0.0
    resident: int = 0
    commands: int = 0


class RankState(msgspec.Struct, frozen=True, tag=True):
    """What a rank does.

    Attributes:
        rank: its number.
        pid: its process.
        process: running, sleeping, stopped, being debugged, in uninterruptible sleep, or gone.
        at: when, in seconds of its host's monotonic clock.
        recorded: it records its calls: it has made a group.
        reads_stdin: it waits for input.
        calls: those under way, oldest first; the last one also if it has timed out.
        last: the last that has begun; None before the first.
        near: the line of the last call whose line is known; "" if none is.
        recent: the newest calls, oldest first, where they were asked for.
        groups: those that it has made.
        usage: what it has used.
        doing: of a worker: the operation that it executes; "" for none.
    """

    rank: int
    pid: int
    process: str
    at: float
    recorded: bool = False
    reads_stdin: bool = False
    calls: tuple[CallState, ...] = ()
    last: CallState | None = None
    near: str = ""
    recent: tuple[CallState, ...] = ()
    groups: tuple[GroupState, ...] = ()
    usage: Usage = Usage()
    doing: str = ""

    @property
    def waiting(self) -> CallState | None:
        """The oldest call that the program waits for."""
        return next((call for call in self.calls if call.waits), None)
