"""Groups that an elastic program creates before its training loop. They survive the loss of their members.

When a process has replaced a lost rank, the world has a new engine. These groups then get new engines, too, in the same
objects. Meshes and sharded models that use them stay valid. A replacement process runs the program from the top and
creates the same groups while the other ranks are already past that point. The ranks therefore connect these groups when
they enter the loop. Earlier calls on the groups are answered from the replay log, like those on the world
(`_elastic/replay`).

If ranks are renumbered, a group of some ranks has lost its meaning and is closed. Ranks that share a replica of the
model (``GroupHistory.replica``) are the exception. A group of ranks of one replica becomes the group of the same
positions of each replica. A group of the same positions of all replicas becomes that of the replicas that exist now.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from allranks import _engines
from allranks._base.errors import AbortedError, AllranksError, JoinError, PeerLostError, TimeoutError
from allranks._elastic.history import GroupHistory
from allranks._elastic.replay import ReplayEngine, unrecorded
from allranks._group.exchange import exchange_locally, gather_rows
from allranks._group.process_group import ProcessGroup

if TYPE_CHECKING:
    from allranks._engines.base import Engine

__all__ = ["EarlyGroups", "ElasticWorld", "early_groups_of"]

_KEY_BYTES = 16
_CONNECT_S = 5.0  # seconds; all members have exchanged records, and losses after that are detected earlier


@dataclass(frozen=True)
class _EarlyGroup:
    """A group created before the training loop.

    Attributes:
        group: The group.
        key: The same on all its members, and different from that of any other group.
        ranks: The ranks of its members in the world.
        backend: The name of its engine.
    """

    group: ProcessGroup
    key: bytes
    ranks: Sequence[int]
    backend: str

    def role(self, replica: int, count: int) -> tuple[str, tuple[int, ...]] | None:
        """Return the meaning of the group if replicas of this size join and leave.

        Args:
            replica: The number of ranks of one replica.
            count: The number of replicas when the group was created.

        Returns:
            Whether the group spans one replica or all replicas, and the positions of its members in a replica. None if
            it is neither.
        """
        if replica == 1 or count < 2:
            return None
        positions = tuple(dict.fromkeys(rank % replica for rank in self.ranks))
        if len({rank // replica for rank in self.ranks}) == 1:
            return "replica", positions
        if tuple(self.ranks) == tuple(row * replica + position for row in range(count) for position in positions):
            return "all", positions
        return None


class EarlyGroups:
    """The early groups of one world, in the order of their creation, which is the same on all ranks."""

    def __init__(self, world: ProcessGroup, history: GroupHistory, slots: Sequence[int]) -> None:
        """
        Args:
            world: The world.
            history: The group history of the world.
            slots: The rank slots of its ranks.
        """
        self._world = world
        self._history = history
        self._slots = list(slots)
        self._groups: list[_EarlyGroup] = []
        self._created_counts: Counter[tuple[object, ...]] = Counter()

    def __contains__(self, group: ProcessGroup) -> bool:
        # Compare by identity: a group keeps its object over all generations, while its engine and members change.
        return any(each.group is group for each in self._groups)

    @property
    def of_replicas(self) -> list[ProcessGroup]:
        """The groups that continue to exist if replicas of the model join or leave."""
        return [each.group for each in self._groups if self._role(each) is not None]

    @property
    def lacks_results(self) -> bool:
        """Whether the replay log lacks the result of a call, so that this process needs the state of another one."""
        return any(each.group._is_open and _replay(each).lacks_results for each in self._groups)

    def connect(self, parent: ProcessGroup, connect: Callable[[], Engine | None]) -> Engine | None:
        """Connect a new group through an existing group, or return None if this is not possible yet.

        It is not possible in a replacement process, nor if a rank is lost while the group connects. In the second case
        a replacement of that rank joins, and the group connects when the loop begins.
        """
        replay = parent.engine
        assert isinstance(replay, ReplayEngine)
        if replay.engine is None:
            return None
        try:
            with unrecorded():
                return connect()
        except (PeerLostError, AbortedError):
            return None
        except (JoinError, TimeoutError):
            # A loss can surface as a failed or timed-out connection. Without a loss, the error is a real one.
            if self._world.failed_ranks():
                return None
            raise

    def make(
        self, engine: Engine | None, ranks: Sequence[int], backend: str, name: str, timeout_s: float
    ) -> ProcessGroup:
        """Create a group.

        Args:
            engine: The engine that connects its members, or None if it is not connected yet.
            ranks: The ranks of its members in the world.
            backend: The name of its engine.
            name: The name of the group.
            timeout_s: The timeout of its calls, in seconds.
        """
        slots = tuple(self._slots[rank] for rank in ranks)
        # The key uses only values that a replacement process computes identically: rank slots and the creation order.
        self._created_counts[slots, backend] += 1
        identity = repr((slots, backend, self._created_counts[slots, backend])).encode()
        key = hashlib.blake2b(identity, digest_size=_KEY_BYTES).digest()
        membership, slot = self._history.membership, self._slots[self._world.rank()]
        # The log of this rank slot comes first. The other logs can contain results that it lacks.
        slots_read = [slot, *(other for other in slots if other != slot)]
        replay = ReplayEngine(
            backend,
            engine,
            lambda entry: membership.append(_log_key(slot, key), entry),
            partial(_raise_interrupted, name),
            # Read on demand: the logs of other ranks grow until the loop begins.
            lambda: [membership.read(_log_key(each, key)) or b"" for each in slots_read],
        )
        members = [self._world.members[rank] for rank in ranks]
        group = ProcessGroup(replay, name, list(ranks).index(self._world.rank()), members, timeout_s)
        early = _EarlyGroup(group, key, tuple(ranks), backend)
        if engine is not None:
            group.history = self._history_of(early, key, ranks)
        self._groups.append(early)
        return group

    def abort(self) -> None:
        """Abort the calls of these groups, on every rank."""
        for each in self._groups:
            if each.group._is_open:
                each.group.abort()

    def enter(self) -> None:
        """Enter the training loop after no rank was lost: calls go directly to the engines from now on."""
        for each in self._groups:
            if each.group._is_open:
                engine = _replay(each).engine
                assert engine is not None  # a rank that has not connected it has detected a loss
                each.group.use(engine)

    def renew(self) -> None:
        """Connect the groups in the present generation of the world. All its ranks call this.

        Raises:
            PeerLostError: A rank was lost during the call.
            AbortedError: Another rank has detected such a loss.
            TimeoutError: A rank did not arrive in time.
            JoinError: Members of a group could not connect.
        """
        open_groups = [each for each in self._groups if each.group._is_open]
        # With the same rank slots, lost ranks were only replaced, so every group keeps its members and its key.
        slots_unchanged = [slot for slot, _ in self._history.members] == self._slots
        present = (
            [(each.key, each.ranks) for each in open_groups]
            if slots_unchanged
            else self._present_keys_and_ranks(open_groups)
        )
        # A group is connected only if all its members have created it. Otherwise its members would wait for the others.
        keys_by_rank = _gather_keys(self._world, [key for key, ranks in present if ranks])
        self._groups, connected = [], []
        for each, (key, ranks) in zip(open_groups, present, strict=True):
            if ranks and all(key in keys_by_rank[rank] for rank in ranks):
                self._groups.append(each)
                connected.append((key, each, ranks))
            elif slots_unchanged:
                each.group._close_because(
                    "was closed when a rank was replaced, because not every member has created it.\n"
                    "  Create it on all its members, or in a step of the training loop."
                )
            else:
                each.group._close_because(
                    "was closed when the ranks were renumbered after a loss.\n  Create a new group of the remaining"
                    " ranks in a step of the training loop."
                )
        # After renumbering, members may have created them in different orders. Sorting by key makes the order the same.
        if not slots_unchanged:
            connected.sort(key=lambda each: each[0])
        for key, each, ranks in connected:
            self._reconnect(each, key, ranks)

    def _role(self, early: _EarlyGroup) -> tuple[str, tuple[int, ...]] | None:
        replica = self._history.replica
        return early.role(replica, len(self._slots) // replica)

    def _present_keys_and_ranks(self, groups: Sequence[_EarlyGroup]) -> list[tuple[bytes, Sequence[int]]]:
        """Return a key of each group, equal on its present members, and their ranks. No ranks: it lost its meaning."""
        replica, world = self._history.replica, self._world
        count, own_replica = world.size() // replica, world.rank() // replica
        counts: Counter[object] = Counter()
        keys_and_ranks: list[tuple[bytes, Sequence[int]]] = []
        for each in groups:
            role = self._role(each)
            if role is None:
                keys_and_ranks.append((each.key, ()))
                continue
            counts[role, each.backend] += 1
            identity = repr((role, each.backend, counts[role, each.backend])).encode()
            # The first len(role[1]) ranks are one row, that is, the positions in a replica. The other rows repeat them.
            rows = range(count) if role[0] == "all" else [own_replica]
            ranks = [row * replica + rank % replica for row in rows for rank in each.ranks[: len(role[1])]]
            keys_and_ranks.append((hashlib.blake2b(identity, digest_size=_KEY_BYTES).digest(), ranks))
        return keys_and_ranks

    def _reconnect(self, early: _EarlyGroup, key: bytes, ranks: Sequence[int]) -> None:
        world, ranks = self._world, list(ranks)
        rank, members = ranks.index(world.rank()), [world.members[r] for r in ranks]
        engine = _engines.make_engine(
            early.backend,
            rank,
            members,
            partial(exchange_locally, world, ranks),
            early.group.name,
            early.group.timeout_s,
            world.parent_of(ranks),
            connect_s=_CONNECT_S,
        )
        # If the connection fails, the group keeps its old engine, and the next `renew` connects it again.
        early.group._become(engine, rank, members)
        early.group.history = self._history_of(early, key, ranks)

    def _history_of(self, early: _EarlyGroup, key: bytes, ranks: Sequence[int]) -> GroupHistory:
        world, group = self._history, early.group
        members = [world.members[rank] for rank in ranks]
        # The generation excludes old proposals. The first rank distinguishes the replicas, whose groups share a key.
        prefix = f"{world.membership.prefix}group/{world.generation}.{key.hex()}.{ranks[0]}/"
        return GroupHistory(world.membership, prefix, early.backend, group.name, group.timeout_s, world.slot, members)


class ElasticWorld(ProcessGroup):
    """The world of an elastic job.

    Attributes:
        early: The groups created before the training loop.
    """

    early: EarlyGroups


def early_groups_of(world: ProcessGroup) -> EarlyGroups | None:
    """Return the groups created before the training loop of an elastic job, or None in any other job."""
    return world.early if isinstance(world, ElasticWorld) else None


def _replay(early: _EarlyGroup) -> ReplayEngine:
    engine = early.group.engine
    assert isinstance(engine, ReplayEngine)
    return engine


def _log_key(slot: int, key: bytes) -> str:
    return f"replay/{slot}/{key.hex()}"


def _raise_interrupted(name: str, replay: ReplayEngine) -> NoReturn:
    """Raise for a call before the loop that a loss has interrupted, or whose outcome is not known."""
    why = "has lost a rank" if replay.engine is not None else "is not connected yet, because a rank was lost"
    raise AllranksError(
        f"group '{name}' {why} before the training loop. Only calls on the world are repeated there.\n  Restart the"
        " job (automatic with allranks run --restarts), or call this group in a step of the loop."
    )


def _gather_keys(world: ProcessGroup, keys: Sequence[bytes]) -> list[set[bytes]]:
    """Return the keys that each rank of the world has passed, by rank."""
    # gather_rows needs rows of equal length, so exchange the numbers of keys first and pad to the largest one.
    counts = [int.from_bytes(row, "big") for row in gather_rows(world, len(keys).to_bytes(8, "big"))]
    if not max(counts):
        return [set() for _ in counts]
    rows = gather_rows(world, b"".join(keys).ljust(max(counts) * _KEY_BYTES, b"\0"))
    return [
        {row[offset : offset + _KEY_BYTES] for offset in range(0, count * _KEY_BYTES, _KEY_BYTES)}
        for count, row in zip(counts, rows, strict=True)
    ]
