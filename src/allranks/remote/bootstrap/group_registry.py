"""Groups among any of a master and its workers, made at any time.

A group's members find each other in a store that the master serves: each writes who it is there
when it comes; the members of a group give each other what its engine needs (``native.connect``) under the group's
name. Nobody else takes part, so that groups are independent of each other. Where a member dies meanwhile the master
writes that there, and who waits for it gets that at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from allranks._base.errors import PeerLostError, TimeoutError, UsageError, rank_list
from allranks._engines import make_engine
from allranks._group.process_group import ProcessGroup
from allranks._rendezvous.rendezvous import Member
from allranks._store import Store

__all__ = ["GroupRegistry"]


class _GroupVerdict(msgspec.Struct, frozen=True):
    """How an exchange ended: all members' records, or who was lost and how."""

    records: list[bytes] = []
    lost: int = -1
    why: str = ""


class GroupRegistry:
    """What a process sees of it.

    Args:
        store: what master and workers share.
        me: this process; its rank is 0 on the master.
    """

    def __init__(self, store: Store, me: Member) -> None:
        self._store = store
        self._me = me
        self._groups: set[ProcessGroup] = set()

    def enter(self) -> None:
        """Tells the others who this process is, in place of the one before it that had its rank."""
        self._store.set(f"member/{self._me.rank}", msgspec.msgpack.encode(self._me))

    def admit(self, rank: int) -> None:
        """A new process may take a lost one's place."""
        self._store.delete_key(f"lost/{rank}")

    def lose(self, rank: int, why: str) -> None:
        """A process is gone: breaks the groups that are being made with it. For the master only."""
        self._store.set(f"lost/{rank}", why)
        making = [key for key in self._store.list_keys() if key.startswith("making/")]
        for key, packed in zip(making, self._store.peek(making), strict=True):
            if packed is not None and rank in msgspec.msgpack.decode(packed):
                self._settle(f"group/{key.removeprefix('making/')}/verdict", _GroupVerdict(lost=rank, why=why))

    def make_group(self, name: str, ranks: Sequence[int], timeout_s: float) -> ProcessGroup:
        """Makes a group. Called by its members only.

        Args:
            name: unlike that of any other group of the job.
            ranks: the members, in the group's order.
            timeout_s: how long to wait for the others now, and in each of the group's calls.

        Returns:
            The group, which the caller closes; at the latest it ends with the process.

        Raises:
            UsageError: wrong ranks.
            PeerLostError: a member died; ``rank`` is its number in the group.
            TimeoutError: a member did not come in time.

        Cost:
            a few milliseconds among two processes of a host.
        """
        ranks = list(ranks)
        if self._me.rank not in ranks or len(set(ranks)) < len(ranks):
            raise UsageError(f"group '{name}': ranks {ranks} must be different ones, and this one ({self._me.rank})")
        keys = [f"member/{rank}" for rank in ranks]
        packed = self._store.multi_get(keys, timeout_s)
        members = [msgspec.msgpack.decode(one, type=Member) for one in packed]
        mine = ranks.index(self._me.rank)

        def exchange(record: bytes) -> list[bytes]:
            return self._exchange(name, ranks, mine, record, timeout_s)

        engine = make_engine("native", mine, members, exchange, name, timeout_s)
        made = ProcessGroup(engine, name, mine, members, timeout_s)
        self._groups.add(made)
        made.closing = lambda: self._groups.discard(made)
        return made

    def _exchange(self, name: str, ranks: Sequence[int], mine: int, record: bytes, timeout_s: float) -> list[bytes]:
        store, place = self._store, f"group/{name}"
        records = [f"{place}/{number}" for number in range(len(ranks))]
        # In this order: whoever is lost from here on is looked for under making/, and before it under lost/.
        store.multi_set([f"making/{name}", records[mine]], [msgspec.msgpack.encode(ranks), record])
        for rank, why in zip(ranks, store.peek([f"lost/{rank}" for rank in ranks]), strict=True):
            if why is not None:
                self._settle(f"{place}/verdict", _GroupVerdict(lost=rank, why=why.decode()))
        if store.add(f"{place}/came", 1) == len(ranks):
            self._settle(f"{place}/verdict", _GroupVerdict([row or b"" for row in store.peek(records)]))
            store.delete_key(f"making/{name}")
        try:
            verdict = msgspec.msgpack.decode(store.get(f"{place}/verdict", timeout_s), type=_GroupVerdict)
        except TimeoutError:
            found = store.peek(records)
            missing = [rank for rank, row in zip(ranks, found, strict=True) if row is None]
            raise TimeoutError(
                f"group '{name}': {rank_list(missing)} did not come in {timeout_s:.1f} s to make it (this is rank"
                f" {self._me.rank}).\n  It may be busy with something long, or stopped."
            ) from None
        if verdict.lost >= 0:
            raise PeerLostError(f"group '{name}': {verdict.why}", ranks.index(verdict.lost))
        if store.add(f"{place}/read", 1) == len(ranks):
            for key in (*records, f"{place}/came", f"{place}/verdict", f"{place}/read"):
                store.delete_key(key)
        return verdict.records

    def _settle(self, key: str, verdict: _GroupVerdict) -> None:
        """The first verdict counts."""
        self._store.compare_set(key, b"", msgspec.msgpack.encode(verdict))

    def close(self) -> None:
        """Leaves all groups, and the store. Idempotent."""
        for made in tuple(self._groups):
            made.close()
        self._store.close()
