"""The store on which the members of a group decide on the next generation after a loss.

This store outlives the rendezvous. It is the launcher's store, torchrun's store, or a store that the program created.
A store that rank 0 serves for the rendezvous does not outlive it. The connection opens on first use.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from allranks._base.errors import ConfigError, StoreLostError, TimeoutError
from allranks._base.system import reason
from allranks._cluster.outer_job import leave_outer_job
from allranks._elastic.membership_change import DetectLosses, LossDetector, LostMembers
from allranks._elastic.slot_table import ELASTIC, START, TABLE_KEY, SlotTable
from allranks._rendezvous.driver import drive
from allranks._rendezvous.finders.interface import Finder, NotYet
from allranks._rendezvous.finders.launcher import LauncherFinder
from allranks._rendezvous.join_protocol import Act, Answer, Lost, Member, Steps
from allranks._rendezvous.rendezvous import find_method, this_member
from allranks._store import PrefixStore, Store
from allranks._store.wire import FoundValues, Peek, WaitForKeys, WaitTimedOut

__all__ = ["MembershipStore"]

if TYPE_CHECKING:
    from allranks._rendezvous.meeting import JobMeeting

_T = TypeVar("_T")
_CONNECT_S = 10.0  # seconds to connect to the store


class MembershipStore:
    """A connection to the store for membership changes, and the identity of this process there.

    Attributes:
        prefix: Prefix of the keys of this world.
        me: This process.
        start: Number of processes that had its rank slot before it.
        launched: A launcher writes the table of rank slots.
        where: Name of the store in error messages.
    """

    def __init__(self, finder: Finder, me: Member, prefix: str, environ: Mapping[str, str] = os.environ) -> None:
        self._finder = finder
        self.launched = isinstance(finder, LauncherFinder) and environ.get(ELASTIC) == "1"
        # A replacement process does not have the prefixes of the earlier rendezvous, so all processes of an elastic job
        # use one fixed prefix.
        self.prefix = "allranks/elastic/" if self.launched else f"{prefix}after/"
        self.me = me
        self.start = int(environ.get(START, "0")) if self.launched else 0
        self._store: Store | None = None
        # Protects the lazy connection, which any thread may open or close.
        self._lock = threading.Lock()

    @classmethod
    def of(cls, meeting: JobMeeting) -> MembershipStore | None:
        """Return the membership store of a rendezvous, or None if its store closes with it."""
        return None if meeting.finder.fresh else cls(meeting.finder, meeting.me, meeting.prefix, meeting.environ)

    @classmethod
    def of_elastic_job(
        cls, init_method: str | None, *, timeout_s: float, store: object | None = None
    ) -> MembershipStore | None:
        """Return the membership store of an elastic job. None in any other job, whose ranks ``join``.

        Args:
            init_method: As for ``join``, like the other arguments.
            timeout_s: See ``join``.
            store: See ``join``.
        """
        # Before any variable is read: an enclosing job's variables would be taken for those of this job.
        leave_outer_job(os.environ)
        # A store or address of the program's own is not the launcher's, and does not outlive the ranks.
        if os.environ.get(ELASTIC) != "1" or store is not None or init_method not in (None, "env://"):
            return None
        finder = find_method(init_method, timeout_s)
        # More ranks may join later, so the addresses for other hosts are published even if there is one rank now.
        me = this_member(finder.job.rank, max(finder.job.world_size, 2))
        found = cls(finder, me, "")
        return found if found.launched else None

    @property
    def where(self) -> str:
        return self._finder.where or "the store"

    def drive(self, steps: Steps[_T], detect: LossDetector) -> _T:
        """Run a state machine of ``membership_change`` until it returns.

        Args:
            steps: The state machine.
            detect: Returns the losses that this process has detected itself.
        """

        def perform(act: Act | DetectLosses) -> Answer | LostMembers:
            if isinstance(act, DetectLosses):
                return detect(act.missing)
            try:
                return self._opened()._execute(act)  # type: ignore[arg-type]
            # Return the failure as an answer: the state machine decides whether it ends the job.
            except (StoreLostError, TimeoutError, NotYet, ConfigError) as error:
                if isinstance(act, WaitForKeys) and isinstance(error, TimeoutError):
                    # The wait is short. A busy store counts as lost only if another request fails.
                    return WaitTimedOut(act.keys)
                return Lost(reason(error.__cause__ or error), error)

        return drive(steps, perform)  # type: ignore[arg-type]

    def write(self, key: str, value: bytes) -> None:
        """Set a key under the prefix."""
        self._opened().set(self.prefix + key, value)

    def append(self, key: str, value: bytes) -> None:
        """Append bytes to the value of a key under the prefix."""
        self._opened().append(self.prefix + key, value)

    def read(self, key: str) -> bytes | None:
        """Return the value of a key under the prefix, or None if the key does not exist."""
        return self.peek([self.prefix + key])[0]

    def table(self) -> SlotTable | None:
        """Return the table of rank slots, or None if no launcher writes one."""
        found = self.peek([TABLE_KEY])[0] if self.launched else None
        return None if found is None else SlotTable.decode(found)

    def peek(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        """Return the current values of full keys, without the prefix."""
        found = self._opened()._execute(Peek(list(keys)))
        assert isinstance(found, FoundValues)
        return found.values

    def view(self, name: str, timeout_s: float) -> Store:
        """Return the keys under the prefix and a name as a store."""
        view = PrefixStore(f"{self.prefix}{name}", self._opened())
        view.timeout_s = timeout_s
        return view

    def identity(self) -> bytes:
        """Return 16 bytes that identify the store and prefix, equal on all processes. Return b"" if it is lost."""
        try:
            # The first process writes a random token and all others read it, so the token identifies the store.
            token = self.view("identity/", _CONNECT_S).compare_set("token", b"", os.urandom(16))
        except (StoreLostError, TimeoutError, NotYet, ConfigError):
            return b""  # no rank can decide on this store, which is the answer that the caller needs
        return hashlib.sha256(self.prefix.encode() + token).digest()[:16]

    def close(self) -> None:
        """Close the connection. Idempotent."""
        with self._lock:
            if self._store is not None:
                # Only disconnect: the store outlives this process, and other ranks use it.
                self._finder.disconnect()
            self._store = None

    def _opened(self) -> Store:
        with self._lock:
            if self._store is None:
                # A rendezvous has already opened its finder. The finder of `of_elastic_job` is new.
                if not hasattr(self._finder, "me"):
                    self._finder.open(self.me)
                self._store = self._finder.find_again(_CONNECT_S)
            return self._store
