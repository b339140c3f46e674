"""The members of a group, the rank of this process among them, and the engine that connects them.

`Communicator` adds the calls that the ranks make together. `ProcessGroup` adds recovery, reconfiguration and plans. The
code in `_elastic` uses these base classes, and `ProcessGroup` uses that code.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from allranks._base.errors import NotInitializedError
from allranks._base.forks import follow, forks, refusal
from allranks._cluster.env import notice_seconds
from allranks._engines.base import Parent, never, not_begun
from allranks._trace import memory
from allranks._trace.watcher import WatchedPeer, unwatch, watch

if TYPE_CHECKING:
    from allranks._core import Planned
    from allranks._elastic.history import GroupHistory
    from allranks._elastic.membership_change import Decision
    from allranks._engines.base import Engine
    from allranks._rendezvous.rendezvous import Member

__all__ = ["BaseGroup"]


class BaseGroup:
    """The members of a group and its engine.

    Attributes:
        name: The name of the group in error messages.
        members: The members, by rank in this group. ``members[i].rank`` is the rank in the world.
        ranks: The ranks of the members in the world, by rank in this group.
        in_world_order: Every rank has the same number here and in the world.
        timeout_s: Seconds that a call waits for other ranks.
        before_close: Called before the group closes, unless it is lost. It stops everything that still needs the group.
        closing: Called when the group closes.
        history: Its generations. None if its ranks cannot decide on the next generation after a loss.
        entered: The decision by which this process joined ranks that were already in their training loop, else None.
        renewed: Called when the group has a new engine after a loss.
        reconfigured: Its members are those of its last reconfiguration.
        is_world: Its ranks are those of the world.
        recreated_on_close: Its owner creates a new group when this one is closed.
        now: The fast path of its engine (see ``Engine.now``).
        record_numbers: The numbers of the group in the record of this process's calls, one for each of its engines.
    """

    def __init__(self, engine: Engine, name: str, rank: int, members: Sequence[Member], timeout_s: float) -> None:
        self.name = name
        self.members = tuple(members)
        self.ranks = tuple(member.rank for member in members)
        self.timeout_s = timeout_s
        self.in_world_order = self.ranks == tuple(range(len(self.ranks)))
        self._rank = rank
        self._size = len(self.ranks)
        self._engine: Engine | None = engine
        # Weak: the program keeps its plans. The group only notifies those that still exist.
        self._plans: weakref.WeakSet[Planned] = weakref.WeakSet()
        self._shorten(engine)
        self.before_close: Callable[[], None] | None = None
        self.closing: Callable[[], None] | None = None
        self.history: GroupHistory | None = None
        self.entered: Decision | None = None
        self.is_world = self.recreated_on_close = self.reconfigured = False
        self.renewed: Callable[[], None] | None = None
        self._closed_why = "was destroyed by destroy_process_group.\n  Make the call earlier, or create a new group."
        self._forks = forks()
        self._record(engine, rank)
        # Last: a forked child calls `abandon`, which needs all attributes.
        follow(self)

    def __repr__(self) -> str:
        engine = self._engine.name if self._engine else "destroyed"
        return f"<ProcessGroup {self.name!r}: rank {self._rank} of {self._size}, {engine}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"process group '{self.name}' belongs to its process and cannot be pickled or copied.\n"
            f"  Pass its ranks, {list(self.ranks)}, and call new_group in the other process."
        )

    def _record(self, engine: Engine, rank: int) -> None:
        """Register the group with the recorder. Each engine counts its own calls, so each is recorded as a group."""
        self._recorded: list[Callable[[], None]] = []
        self.record_numbers: list[int] = []
        me = self.members[rank]
        recorder = memory.recorder(me.rank, len(self.members), me.host)
        if recorder is None:
            return
        for device, part in engine.parts().items():
            name = f"{self.name} on {device}" if self._recorded else self.name
            number = recorder.add_group(name, part.name, rank, self.ranks)
            part.record_in(recorder, number)
            self.record_numbers.append(number)
            self._recorded.append(partial(recorder.close_group, number))
        machine = self.members[rank].machine
        watch(
            self,
            me.rank,
            lambda: [WatchedPeer(m.rank, m.pid, m.host, m.machine == machine) for m in self.members],
            notice_seconds(os.environ),
        )

    def last_numbers(self) -> Sequence[int] | None:
        """Return the number of the last collective that each rank has begun, as known here. None: unknown."""
        return self._engine.last_numbers() if self._engine is not None and not self.inherited else None

    def rank(self) -> int:
        """Return the rank of this process, 0 to size - 1."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self._size

    @property
    def backend(self) -> str:
        """The name of the engine."""
        return self._existing().name

    @property
    def device(self) -> str:
        """The type of device whose tensors the group can always transfer."""
        return self._live().device

    @property
    def highest_tag(self) -> int:
        """The highest tag of a message that the group can send."""
        return self._live().highest_tag

    # After a loss. See docs/resilience.md.

    def failed_ranks(self) -> list[int]:
        """Return the ranks that this process has detected as lost: dead, unreachable, or no longer in the group.

        The ranks of one host detect a death within some milliseconds. Ranks of other hosts detect it when they make a
        call, or by the heartbeats between hosts. The result can differ between ranks. The results of ``agree`` and
        ``shrink`` cannot.

        Cost:
            One system call for each rank of this host.
        """
        return list(self._live().lost())

    def abort(self) -> None:
        """Abort all calls of the group, on every rank: the pending calls immediately, and all later calls.

        They raise AbortedError. Afterwards only ``shrink`` can be called on the group. On gloo, the other ranks detect
        that this rank has left. On nccl, only the calls of this rank end, so each rank must call it.

        Raises:
            UsageError: The engine does not support it (mpi).
        """
        self._live().abort()

    @property
    def engine(self) -> Engine:
        """The engine that transfers the group's tensors."""
        return self._existing()

    def meet_again(self, members: Sequence[Member], engine: Engine) -> None:
        """Set the members and register a new engine. The ranks are the same, but some are other processes now."""
        for close in self._recorded:
            close()
        unwatch(self)
        self.members = tuple(members)
        self._record(engine, self._rank)

    def use(self, engine: Engine) -> None:
        """Send calls to this engine from now on. The present engine was a `ReplayEngine` in front of it."""
        self._engine = engine
        self._shorten(engine)

    def renumber_as_world(self) -> None:
        """Make the ranks of this group the ranks of the world."""
        members = [msgspec.structs.replace(m, rank=r, world_size=self._size) for r, m in enumerate(self.members)]
        self.members = tuple(members)
        self.ranks = tuple(range(self._size))
        self.in_world_order = True

    def _become(self, engine: Engine, rank: int, members: Sequence[Member]) -> None:
        """Put a new engine, rank and members into this object. The old engine is closed."""
        old = self._engine
        # Remove the fast path first, so that no call uses an engine that is being closed.
        self._shorten(None)
        if old is not None:
            # The old engine leaves before the new one is recorded, so its last calls still belong to the old members.
            old.close()
            unwatch(self)
            for close in self._recorded:
                close()
        self.members = tuple(members)
        self.ranks = tuple(member.rank for member in members)
        self.in_world_order = self.ranks == tuple(range(len(self.ranks)))
        self._rank = rank
        self._size = len(self.ranks)
        self._engine = engine
        self._shorten(engine)
        self._record(engine, rank)
        # Last: torch's wrapper reads the new rank and size.
        if self.renewed is not None:
            self.renewed()

    def parent_of(self, ranks: Sequence[int]) -> Parent:
        """Return this group as the parent through which a group of these ranks of the world is created."""
        return Parent(self._live(), [self.ranks.index(rank) for rank in ranks])

    @property
    def _is_open(self) -> bool:
        return self._engine is not None

    def _close_because(self, why: str) -> None:
        """Leave the group. Later calls raise an error with this reason."""
        if self._is_open:
            self._closed_why = why
        # It would make calls on the group, which is lost.
        self.before_close = None
        self.close()

    def close(self) -> None:
        """Leave the group. Later calls raise. Idempotent."""
        if self._engine is not None:
            if self.before_close is not None and not self.inherited:
                self.before_close()
            # Closing a forked child's copy must not affect the parent's group.
            if not self.inherited:
                self._engine.close()
                unwatch(self)
                for close in self._recorded:
                    close()
            self._engine = None
            self._shorten(None)
            if self.closing is not None:
                self.closing()

    @property
    def closed(self) -> bool:
        """Whether this rank has left the group."""
        return self._engine is None

    @property
    def inherited(self) -> bool:
        """Whether this process is a forked child and the group belongs to its parent."""
        return self._forks != forks()

    def abandon(self) -> None:
        """Release the group in a forked child, in which only the attributes of the group can be read."""
        self._shorten(None)
        if self._engine is not None:
            self._engine.abandon()

    def _tell(self, plan: Planned) -> None:
        """Register a plan, which the group notifies when its engine is replaced or closed."""
        self._plans.add(plan)

    def _prepare(self, verb: str, given: Mapping[str, Any]) -> Callable[[], bool] | None:
        """Return a callable that makes a blocking call with these arguments; see ``Engine.prepare``."""
        engine = self._engine
        if (
            engine is None
            # The fast path takes one tensor that is split evenly, not a list.
            or verb == "all_to_all"
            or any(given.get(f"{what}_split_sizes") for what in ("input", "output"))
        ):
            return None
        tensor = given.get("tensor", given.get("input"))
        pieces = next((given[name] for name in ("outputs", "inputs", "output") if name in given), None)
        return engine.prepare(verb, tensor, pieces, given.get("op"), given.get("dst", given.get("src", -1)))

    def _shorten(self, engine: Engine | None) -> None:
        """Use the fast paths of this engine from now on. None: there are none."""
        self.now = never if engine is None else engine.now
        self._begin = not_begun if engine is None else engine.begin
        for plan in [*self._plans]:
            plan._set(None)  # the prepared call of the old engine

    def _live(self) -> Engine:
        if self.inherited:
            raise refusal(f"process group '{self.name}'")
        return self._existing()

    def _existing(self) -> Engine:
        if self._engine is None:
            raise NotInitializedError(f"process group '{self.name}' {self._closed_why}")
        return self._engine
