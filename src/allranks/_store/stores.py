"""The interface of a store, and the kinds that need no connection.

``MemoryStore`` is a job of one rank; ``PrefixStore`` gives each use of a store keys of its own; ``ForeignStore``
is whatever a user hands to ``init_process_group(store=...)``. The kind that talks to a server is ``client``'s; it
shares ``AskingStore`` with ``MemoryStore``, so that both say the same.
"""

from __future__ import annotations

import abc
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

from allranks._errors import TimeoutError, UsageError
from allranks._store.table import KeyTable
from allranks._store.wire import (
    LONGEST_S,
    Add,
    CompareSet,
    Delete,
    Done,
    Failed,
    Found,
    Late,
    Peek,
    Reply,
    Request,
    Set,
    Wait,
)

__all__ = ["AskingStore", "ForeignStore", "MemoryStore", "PrefixStore", "Store"]

_ReplyT = TypeVar("_ReplyT", Done, Found)


class Store(abc.ABC):
    """Small values under names, seen by all ranks of a job. Thread-safe."""

    @abc.abstractmethod
    def set(self, key: str, value: bytes) -> None:
        """Sets a value, and wakes those who wait for it."""

    @abc.abstractmethod
    def get(self, key: str, timeout_s: float) -> bytes:
        """Returns a value; waits until it is set.

        Raises:
            TimeoutError: nobody set it in time.
        """

    @abc.abstractmethod
    def add(self, key: str, amount: int) -> int:
        """Adds to a counter, which starts at 0, in one step; returns the sum."""

    @abc.abstractmethod
    def check(self, keys: Sequence[str]) -> bool:
        """Says whether all keys are set."""

    @abc.abstractmethod
    def wait(self, keys: Sequence[str], timeout_s: float) -> None:
        """Waits until all keys are set.

        Raises:
            TimeoutError: some were not set in time; names them.
        """

    @abc.abstractmethod
    def delete(self, key: str) -> bool:
        """Removes a key; says whether it was there."""

    @abc.abstractmethod
    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Sets a value if it is ``expected`` (``b""`` also stands for absent); returns the value afterwards.

        As in torch: where the key is absent and ``expected`` is not ``b""``, returns ``expected``.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Gives back what this object holds."""

    def peek(self, keys: Sequence[str]) -> list[bytes | None]:
        """Returns the values that are set now, None for the others."""
        return [self.get(key, 1.0) if self.check([key]) else None for key in keys]

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class AskingStore(Store):
    """A store whose every method is one request and its reply."""

    @abc.abstractmethod
    def _ask(self, request: Request) -> Reply: ...

    @abc.abstractmethod
    def __str__(self) -> str: ...

    def _reply(self, request: Request, kind: type[_ReplyT]) -> _ReplyT:
        match self._ask(request):
            case Late(missing) if isinstance(request, Wait):
                names = ", ".join(map(repr, missing))
                raise TimeoutError(
                    f"{self}: nobody set {names} in {request.timeout_s:.1f} s.\n"
                    "  The rank that sets it may be late or gone: look at its output."
                    "    Longer: init_process_group(timeout=...)"
                )
            case Failed(text):
                raise UsageError(f"{self}: {text}")
            case reply:
                assert isinstance(reply, kind), reply
                return reply

    def set(self, key: str, value: bytes) -> None:
        self._reply(Set(key, value), Done)

    def get(self, key: str, timeout_s: float) -> bytes:
        value = self._reply(Wait([key], min(timeout_s, LONGEST_S), True), Found).values[0]
        assert value is not None
        return value

    def add(self, key: str, amount: int) -> int:
        return self._reply(Add(key, amount), Done).number

    def check(self, keys: Sequence[str]) -> bool:
        return isinstance(self._ask(Wait(list(keys), 0.0, False)), Found)

    def wait(self, keys: Sequence[str], timeout_s: float) -> None:
        self._reply(Wait(list(keys), min(timeout_s, LONGEST_S), False), Found)

    def delete(self, key: str) -> bool:
        return bool(self._reply(Delete(key), Done).number)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        return self._reply(CompareSet(key, expected, desired), Found).values[0] or b""

    def peek(self, keys: Sequence[str]) -> list[bytes | None]:
        return self._reply(Peek(list(keys)), Found).values


class MemoryStore(AskingStore):
    """A store inside this process, for a job of one rank."""

    def __init__(self) -> None:
        self._table = KeyTable()
        self._changed = threading.Condition()
        self._replies: dict[Hashable, Reply] = {}

    def __str__(self) -> str:
        return "the store of this process"

    def _ask(self, request: Request) -> Reply:
        who = object()
        with self._changed:
            due = self._table.handle(who, request, time.monotonic())
            try:
                while True:
                    if due:
                        self._replies.update(due)
                        self._changed.notify_all()
                    if who in self._replies:
                        return self._replies[who]
                    deadline = self._table.next_deadline()
                    self._changed.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
                    due = self._table.expire(time.monotonic())
            finally:
                self._table.forget(who)
                self._replies.pop(who, None)

    def close(self) -> None:
        """Nothing is held."""


class PrefixStore(Store):
    """A view of another store in which every key begins with a prefix."""

    def __init__(self, prefix: str, store: Store) -> None:
        self.prefix = prefix
        self.store = store

    def set(self, key: str, value: bytes) -> None:
        self.store.set(self.prefix + key, value)

    def get(self, key: str, timeout_s: float) -> bytes:
        return self.store.get(self.prefix + key, timeout_s)

    def add(self, key: str, amount: int) -> int:
        return self.store.add(self.prefix + key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        return self.store.check([self.prefix + key for key in keys])

    def wait(self, keys: Sequence[str], timeout_s: float) -> None:
        self.store.wait([self.prefix + key for key in keys], timeout_s)

    def delete(self, key: str) -> bool:
        return self.store.delete(self.prefix + key)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        return self.store.compare_set(self.prefix + key, expected, desired)

    def peek(self, keys: Sequence[str]) -> list[bytes | None]:
        return self.store.peek([self.prefix + key for key in keys])

    def close(self) -> None:
        """A view holds nothing; the store behind it stays open."""


class ForeignStore(Store):
    """A user's store with torch's methods (set, get, add, check, wait) behind our interface."""

    def __init__(self, store: Any) -> None:
        missing = [name for name in ("set", "get", "add", "check", "wait") if not callable(getattr(store, name, None))]
        if missing:
            raise UsageError(
                f"store={store!r} has no method {', '.join(missing)}. Expected one such as torch's TCPStore."
            )
        self._store = store

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def get(self, key: str, timeout_s: float) -> bytes:
        self.wait([key], timeout_s)
        return bytes(self._store.get(key))

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._store.check(list(keys)))

    def wait(self, keys: Sequence[str], timeout_s: float) -> None:
        began = time.monotonic()
        # In torch a timeout of 0 means for ever.
        limit = timedelta(seconds=min(max(timeout_s, 0.001), LONGEST_S))
        try:
            self._store.wait(list(keys), limit)
        except (RuntimeError, OSError) as error:  # torch raises DistStoreError, a RuntimeError, for all failures
            if time.monotonic() - began < limit.total_seconds() * 0.9:
                raise
            raise TimeoutError(
                f"store={type(self._store).__name__}: {', '.join(map(repr, keys[:20]))} not set in {timeout_s:.1f} s.\n"
                "  The rank that sets it may be late or gone: look at its output."
            ) from error

    def delete(self, key: str) -> bool:
        return bool(self._method("delete_key")(key))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        return bytes(self._method("compare_set")(key, expected, desired))

    def close(self) -> None:
        """The store is the user's; it stays open."""

    def _method(self, name: str) -> Callable[..., Any]:
        method = getattr(self._store, name, None)
        if method is None:
            raise UsageError(f"store={type(self._store).__name__} has no method {name}, which this call needs.")
        return method  # type: ignore[no-any-return]
