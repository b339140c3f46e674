"""The store of torch's backends in an elastic job: it is in the launcher's store, which outlives the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from allranks._engines.c10d.store import GroupStore

if TYPE_CHECKING:
    from allranks._elastic.membership_store import MembershipStore
    from allranks._store import Store

__all__ = ["ElasticStore"]


class ElasticStore(GroupStore):
    """The same store within the launcher's store, which outlives the ranks of an elastic job."""

    def __init__(self, membership: MembershipStore, timeout_s: float) -> None:
        super().__init__(1, (), timeout_s)  # rank 1, so that it does not serve
        self._membership = membership

    @property
    def _client(self) -> Store:
        return self._membership.view("torch", self._timeout_s)

    def close(self, linger_s: float = 0.0) -> None:
        """Do nothing: the launcher's store stays open."""
