"""The store on which the members of a group decide who goes on after a loss: one that outlives the meeting.

That is the launcher's, torchrun's, or one that the program has made. A store that rank 0 serves for the meeting does
not outlive it. The connection is made when it is first needed.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Mapping, Sequence
from typing import TypeVar

from allranks._base.errors import ConfigError, StoreLostError, TimeoutError
from allranks._base.system import reason
from allranks._rendezvous.driver import drive
from allranks._rendezvous.finders.interface import Finder, NotYet
from allranks._rendezvous.finders.launcher import LauncherFinder
from allranks._rendezvous.join_protocol import Act, Answer, Lost, Member, Steps
from allranks._rendezvous.seats import ELASTIC, START, TABLE_KEY, SeatTable
from allranks._rendezvous.succession import Look, See, Sighting
from allranks._store import PrefixStore, Store
from allranks._store.wire import FoundValues, Peek, WaitForKeys, WaitTimedOut

__all__ = ["Board"]

_T = TypeVar("_T")
_CONNECT_S = 10.0


class Board:
    """A connection to the store, and what this process is there.

    Attributes:
        prefix: of the keys of this world.
        me: this process.
        start: how many processes had its seat before it.
        launched: a launcher writes the table of seats.
        where: what errors call the store.
    """

    def __init__(self, finder: Finder, me: Member, prefix: str, environ: Mapping[str, str] = os.environ) -> None:
        self._finder = finder
        self.launched = isinstance(finder, LauncherFinder) and environ.get(ELASTIC) == "1"
        # A process that takes a seat knows nothing of the meetings that were there before.
        self.prefix = "allranks/elastic/" if self.launched else f"{prefix}after/"
        self.me = me
        self.start = int(environ.get(START, "0")) if self.launched else 0
        self._store: Store | None = None
        self._lock = threading.Lock()

    @classmethod
    def of(cls, finder: Finder, me: Member, prefix: str, environ: Mapping[str, str]) -> Board | None:
        """That of a meeting; None where its store ends with it."""
        return None if finder.fresh else cls(finder, me, prefix, environ)

    @property
    def where(self) -> str:
        return self._finder.where or "the store"

    def drive(self, steps: Steps[_T], look: See) -> _T:
        """Runs a state machine of ``succession`` to its end.

        Args:
            steps: the machine.
            look: what this process sees of the others.
        """

        def perform(act: Act | Look) -> Answer | Sighting:
            if isinstance(act, Look):
                return look(act.missing)
            try:
                return self._opened()._ask(act)  # type: ignore[arg-type]
            except (StoreLostError, TimeoutError, NotYet, ConfigError) as error:
                if isinstance(act, WaitForKeys) and isinstance(error, TimeoutError):
                    return WaitTimedOut(
                        act.keys
                    )  # a wait is short: a busy launcher is lost when it answers no other request
                return Lost(reason(error.__cause__ or error), error)

        return drive(steps, perform)  # type: ignore[arg-type]

    def write(self, key: str, value: bytes) -> None:
        """Sets a key under the prefix."""
        self._opened().set(self.prefix + key, value)

    def append(self, key: str, value: bytes) -> None:
        """Puts bytes behind the value of a key under the prefix."""
        self._opened().append(self.prefix + key, value)

    def read(self, key: str) -> bytes | None:
        """The value of a key under the prefix; None if there is none."""
        return self.peek([self.prefix + key])[0]

    def table(self) -> SeatTable | None:
        """The table of seats; None where no launcher writes one."""
        found = self.peek([TABLE_KEY])[0] if self.launched else None
        return None if found is None else SeatTable.decode(found)

    def peek(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        """The values of whole keys, as they are now."""
        found = self._opened()._ask(Peek(list(keys)))
        assert isinstance(found, FoundValues)
        return found.values

    def view(self, name: str, timeout_s: float) -> Store:
        """The keys under the prefix and a name, as a store."""
        view = PrefixStore(f"{self.prefix}{name}", self._opened())
        view.timeout_s = timeout_s
        return view

    def identity(self) -> bytes:
        """16 bytes that are the same for all processes whose board is on the same store; b"" if it is gone."""
        try:
            token = self.view("identity/", _CONNECT_S).compare_set("token", b"", os.urandom(16))
        except (StoreLostError, TimeoutError, NotYet, ConfigError):
            return b""  # nobody can decide on it, which is what is asked
        return hashlib.sha256(self.prefix.encode() + token).digest()[:16]

    def close(self) -> None:
        """Ends the connection. Idempotent."""
        with self._lock:
            if self._store is not None:
                self._finder.disconnect()
            self._store = None

    def _opened(self) -> Store:
        with self._lock:
            if self._store is None:
                if not hasattr(self._finder, "me"):
                    self._finder.open(self.me)
                self._store = self._finder.find_again(_CONNECT_S)
            return self._store
