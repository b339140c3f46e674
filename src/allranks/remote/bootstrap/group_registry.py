"""Native groups among any of a master and its workers, created at any time.

The members of a group find each other in a store that the master serves. Each process writes its identity there when
it connects. The members of a group exchange the records that its engine needs (``native.connect``) under the group's
name. Other processes take no part, so groups are independent of each other. If a member dies during the exchange, the
master writes this to the store, and the waiting members receive it immediately.
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
    """The outcome of an exchange: the records of all members, or the lost rank and the reason."""

    records: list[bytes] = []
    lost: int = -1
    why: str = ""


class GroupRegistry:
    """The view of one process of the groups.

    Args:
        store: The store that master and workers share.
        me: This process. Its rank is 0 on the master.
    """

    def __init__(self, store: Store, me: Member) -> None:
        self._store = store
        self._me = me
        self._groups: set[ProcessGroup] = set()

    def enter(self) -> None:
        """Publish the identity of this process. It replaces a previous process of the same rank."""
        self._store.set(f"member/{self._me.rank}", msgspec.msgpack.encode(self._me))

    def admit(self, rank: int) -> None:
        """Allow a new process to replace a lost one."""
        self._store.delete_key(f"lost/{rank}")

    def lose(self, rank: int, why: str) -> None:
        """Fail the groups that are being created with a lost process. Only the master calls this."""
        # Before the groups are listed. `_exchange` relies on this order.
        self._store.set(f"lost/{rank}", why)
        making = [key for key in self._store.list_keys() if key.startswith("making/")]
        for key, packed in zip(making, self._store.peek(making), strict=True):
            if packed is not None and rank in msgspec.msgpack.decode(packed):
                self._settle(f"group/{key.removeprefix('making/')}/verdict", _GroupVerdict(lost=rank, why=why))

    def make_group(self, name: str, ranks: Sequence[int], timeout_s: float) -> ProcessGroup:
        """Create a group. All its members call this, and no other process.

        Args:
            name: A name that no other group of the job has.
            ranks: The members, in the group's order.
            timeout_s: Time limit for the other members to join now, and for each call of the group, in seconds.

        Returns:
            The group. The caller closes it. It ends with the process at the latest.

        Raises:
            UsageError: The ranks are wrong.
            PeerLostError: A member died. ``rank`` is its number in the group.
            TimeoutError: A member did not join in time.

        Cost:
            A few milliseconds for two processes of a host.
        """
        ranks = list(ranks)
        if self._me.rank not in ranks or len(set(ranks)) < len(ranks):
            raise UsageError(f"group '{name}': ranks {ranks} must be distinct and include this rank ({self._me.rank})")
        keys = [f"member/{rank}" for rank in ranks]
        # Waits for members that have not published their identity yet.
        packed = self._store.multi_get(keys, timeout_s)
        members = [msgspec.msgpack.decode(one, type=Member) for one in packed]
        group_rank = ranks.index(self._me.rank)

        def exchange(record: bytes) -> list[bytes]:
            return self._exchange(name, ranks, group_rank, record, timeout_s)

        engine = make_engine("native", group_rank, members, exchange, name, timeout_s)
        made = ProcessGroup(engine, name, group_rank, members, timeout_s)
        self._groups.add(made)
        made.closing = lambda: self._groups.discard(made)
        return made

    def _exchange(
        self, name: str, ranks: Sequence[int], group_rank: int, record: bytes, timeout_s: float
    ) -> list[bytes]:
        store, place = self._store, f"group/{name}"
        records = [f"{place}/{number}" for number in range(len(ranks))]
        # The order matters. A rank lost after this write is found by `lose` under making/, and a rank lost before it is
        # found below under lost/.
        store.multi_set([f"making/{name}", records[group_rank]], [msgspec.msgpack.encode(ranks), record])
        for rank, why in zip(ranks, store.peek([f"lost/{rank}" for rank in ranks]), strict=True):
            if why is not None:
                self._settle(f"{place}/verdict", _GroupVerdict(lost=rank, why=why.decode()))
        # Only the last member publishes the records, when all of them have been written.
        if store.add(f"{place}/came", 1) == len(ranks):
            self._settle(f"{place}/verdict", _GroupVerdict([row or b"" for row in store.peek(records)]))
            store.delete_key(f"making/{name}")  # from here on, `lose` must not fail this group
        try:
            verdict = msgspec.msgpack.decode(store.get(f"{place}/verdict", timeout_s), type=_GroupVerdict)
        except TimeoutError:
            found = store.peek(records)
            missing = [rank for rank, row in zip(ranks, found, strict=True) if row is None]
            raise TimeoutError(
                f"group '{name}': {rank_list(missing)} did not join within {timeout_s:.1f} s (this is rank"
                f" {self._me.rank}).\n  Check whether a missing rank is stopped or busy with a long operation."
            ) from None
        if verdict.lost >= 0:
            raise PeerLostError(f"group '{name}': {verdict.why}", ranks.index(verdict.lost))
        # The last reader deletes the keys, which the other members need before.
        if store.add(f"{place}/read", 1) == len(ranks):
            for key in (*records, f"{place}/came", f"{place}/verdict", f"{place}/read"):
                store.delete_key(key)
        return verdict.records

    def _settle(self, key: str, verdict: _GroupVerdict) -> None:
        """Publish a verdict. Only the first verdict of a group counts."""
        self._store.compare_set(key, b"", msgspec.msgpack.encode(verdict))  # b"": only if the key does not exist

    def close(self) -> None:
        """Leave all groups, and close the store. Idempotent."""
        for made in tuple(self._groups):  # `closing` removes it from the set
            made.close()
        self._store.close()
