"""The state of a rank at one moment: its calls in progress, its groups, its process.

Agents send it to the launcher. ``inspection`` determines it.
"""

from __future__ import annotations

import msgspec

from allranks._trace.kernel import KernelWait

__all__ = ["CREATION", "CallState", "GroupState", "RankState", "Usage"]


CREATION = "creation of "
"""Prefix of the group under which the creation of a group is reported: its ranks wait for each other, as in a call."""


class CallState(msgspec.Struct, frozen=True):
    """A call of a rank. Ranks are world ranks.

    Attributes:
        index: Number in the order of the rank's calls, from 1.
        title: Title such as ``all_reduce #42`` or ``recv from rank 3``.
        verb: Verb such as ``all_reduce``.
        group: Name of its group. Together with ``ranks`` it identifies the group.
        ranks: Members of the group.
        number: Number among the collectives of the group; 0 for a message.
        tag: Tag of a message.
        dtype: Data type such as ``float32``.
        count: Number of elements.
        peer: The root, or the other side of a message. -1: none, or any.
        site: Call site. "" if unknown.
        began: Time of entry, in seconds of its host's monotonic clock.
        seconds: Duration, or the time until now if the call has not ended.
        met: All ranks have arrived.
        last: Rank that arrived last. -1 if unknown.
        outcome: "" or how the call failed.
        ended: The call has ended.
        waits: The program waits for the call, or its wait has timed out.
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
    """A group of a rank: name, members, engine, and the number of the last collective that the rank has begun."""

    name: str
    ranks: tuple[int, ...]
    engine: str
    number: int
    open: bool


class Usage(msgspec.Struct, frozen=True):
    """The resources that a rank has used until now: calls, their bytes, seconds in calls, CPU seconds, resident bytes.

    ``waiting``: the part of the seconds in calls until all ranks had arrived. ``commands``: the number of commands that
    a worker has executed.
    """

    calls: int = 0
    bytes: int = 0
    in_calls: float = 0.0
    waiting: float = 0.0
    cpu: float = 0.0
    resident: int = 0
    commands: int = 0


class RankState(msgspec.Struct, frozen=True, tag=True):
    """The state of a rank.

    Attributes:
        rank: Number of the rank.
        pid: Pid of its process.
        process: State of its process: running, sleeping, stopped, being debugged, in uninterruptible sleep, or gone.
        at: When the state was determined, in seconds of its host's monotonic clock.
        recorded: The rank records its calls: it has created a group.
        kernel: The system call in which its main thread is blocked.
        calls: Calls in progress, oldest first. A last call that timed out is included.
        last: The last call that has begun. None before the first.
        near: Call site of the last call whose call site is known. "" if there is none.
        recent: The newest calls, oldest first, if they were requested.
        groups: Groups that the rank has created.
        usage: Resources that it has used.
        doing: Worker only: the operation that it executes. "" if none.
        notes: What it has found out about the job, one line each.
    """

    rank: int
    pid: int
    process: str
    at: float
    recorded: bool = False
    kernel: KernelWait = KernelWait()
    calls: tuple[CallState, ...] = ()
    last: CallState | None = None
    near: str = ""
    recent: tuple[CallState, ...] = ()
    groups: tuple[GroupState, ...] = ()
    usage: Usage = Usage()
    doing: str = ""
    notes: tuple[str, ...] = ()

    @property
    def waiting(self) -> CallState | None:
        """The oldest call for which the program waits."""
        return next((call for call in self.calls if call.waits), None)

    @property
    def reads_stdin(self) -> bool:
        """Whether the rank is blocked in a read of standard input: it waits for its user, for example in a debugger."""
        return self.kernel.call == "read" and self.kernel.descriptor == 0
