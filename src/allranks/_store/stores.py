"""The stores: one interface with torch's names, for programs and for the package itself.

Every method sends a request and returns its reply, so a store class implements only one method, ``_execute``. This
module contains the stores without a connection. ``HashStore`` is in this process. ``PrefixStore`` gives each use of a
store separate keys. ``ForeignStore`` adapts the store of another library that a user passes to
``init_process_group(store=...)``. The client of a server is in ``client``, and the store in a file is in ``file``.

Source: the methods, their arguments and their results are those of torch.distributed.Store; tests/store compares them.
"""

from __future__ import annotations

import abc
import sys
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import msgspec

from allranks._base.errors import QueueEmptyError, StoreLostError, TimeoutError, UsageError
from allranks._base.forks import follow
from allranks._base.integers import integer_of
from allranks._base.timeouts import LONGEST_WAIT_S, seconds_of
from allranks._store.table import KeyTable
from allranks._store.wire import (
    Add,
    Append,
    CompareSet,
    Delete,
    FoundNames,
    FoundValues,
    Length,
    ListNames,
    Peek,
    Pop,
    Push,
    Reply,
    Request,
    RequestDone,
    RequestFailed,
    Set,
    SetMany,
    WaitForKeys,
    WaitTimedOut,
)

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ForeignStore", "HashStore", "PrefixStore", "Store", "UserToken"]

_ReplyT = TypeVar("_ReplyT", RequestDone, FoundValues, FoundNames)
Timeout = timedelta | float

DEFAULT_TIMEOUT_S = 300.0  # torch's default


class Store(abc.ABC):
    """A key-value store of small values, shared by the threads or processes that use it. Thread-safe.

    The base class of ``TCPStore``, ``FileStore``, ``HashStore`` and ``PrefixStore``. Keys are strings. Values are
    bytes; a string is encoded as UTF-8. A timeout is a timedelta or a number of seconds. The default is the timeout of
    the store, which is 300 s unless set. A wait without success raises TimeoutError, which names the keys.

    Example:
        >>> store = HashStore()
        >>> store.set("a", "1")
        >>> store.add("a", 2), store.get("a"), store.check(["a", "b"])
        (3, b'3', False)
    """

    timeout_s: float = DEFAULT_TIMEOUT_S

    @abc.abstractmethod
    def _execute(self, request: Request) -> Reply: ...

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} belongs to its process and cannot be pickled or copied.\n  {self._copy_advice()}"
        )

    def _copy_advice(self) -> str:
        """Return what the user should do instead of pickling the store."""
        return "Create a store in the other process."

    @property
    def timeout(self) -> timedelta:
        """The default timeout of ``get``, ``wait`` and similar methods."""
        return timedelta(seconds=self.timeout_s)

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the default timeout of ``get``, ``wait`` and similar methods.

        Args:
            timeout: A timedelta or seconds.

        Raises:
            UsageError: The timeout is neither a timedelta nor a number.
        """
        self.timeout_s = seconds_of(timeout, LONGEST_WAIT_S)

    def set(self, key: str, value: bytes | str) -> None:
        """Set a value, and wake the callers that wait for it."""
        self._reply(Set(_key(key), _value(value)), RequestDone)

    def get(self, key: str, timeout: Timeout | None = None) -> bytes:
        """Return a value. Wait until it is set.

        Raises:
            TimeoutError: The value was not set in time.
        """
        return self.multi_get([key], timeout)[0]

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        """Set several values with one request.

        Raises:
            UsageError: The numbers of keys and values differ.
        """
        if isinstance(values, str | bytes):
            raise UsageError(f"multi_set: values must be a list of values, not {values!r:.80}")
        self._reply(SetMany(_keys(keys), [_value(value) for value in values]), RequestDone)

    def multi_get(self, keys: Sequence[str], timeout: Timeout | None = None) -> list[bytes]:
        """Return several values. Wait until all are set.

        Raises:
            TimeoutError: Some values were not set in time; the message names their keys.
            UsageError: One of the keys was deleted before all were set.
        """
        values = self._reply(WaitForKeys(_keys(keys), self._patience(timeout), True), FoundValues).values
        if None in values:
            raise UsageError(
                f"{self}: {keys[values.index(None)]!r} was deleted while this call waited for the other keys.\n"
                "  Delete a key only after all processes have read it."
            )
        return values  # type: ignore[return-value]

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        """Wait until all keys are set (or are queues that are not empty).

        Raises:
            TimeoutError: Some keys were not set in time; the message names them.
        """
        self._reply(WaitForKeys(_keys(keys), self._patience(timeout), False), FoundValues)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are set (or are queues that are not empty)."""
        return isinstance(self._execute(WaitForKeys(_keys(keys), 0.0, False)), FoundValues)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter atomically, and return the sum. A counter starts at 0; ``get`` returns its decimal digits.

        Raises:
            UsageError: The current value is not an integer, or the sum does not fit into 64 bits.
        """
        number = integer_of(amount)
        if number is None or not -(1 << 63) <= number < 1 << 63:
            raise UsageError(f"add({key!r}): the amount must be a whole number of 64 bits, not {amount!r}")
        return self._reply(Add(_key(key), number), RequestDone).number

    def append(self, key: str, value: bytes | str) -> None:
        """Append bytes to a value. An absent value counts as empty."""
        self._reply(Append(_key(key), _value(value)), RequestDone)

    def compare_set(self, key: str, expected_value: bytes | str, desired_value: bytes | str) -> bytes:
        """Set a value if the current value equals ``expected_value``. Return the value that the key then has.

        An empty ``expected_value`` also matches an absent key. As in torch, if the key is absent and
        ``expected_value`` is not empty, the method returns ``expected_value``.
        """
        request = CompareSet(_key(key), _value(expected_value), _value(desired_value))
        return self._reply(request, FoundValues).values[0] or b""

    def delete_key(self, key: str) -> bool:
        """Remove a key. Return whether it was set."""
        return bool(self._reply(Delete(_key(key)), RequestDone).number)

    def num_keys(self) -> int:
        """Return the number of keys that are set."""
        return len(self.list_keys())

    def list_keys(self) -> list[str]:
        """Return the keys that are set."""
        return self._reply(ListNames(""), FoundNames).names

    def queue_push(self, key: str, value: bytes | str) -> None:
        """Append a value to a queue. Queues and values have separate namespaces."""
        self._reply(Push(_key(key), _value(value)), RequestDone)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Remove the first value of a queue, and return it. The caller that has waited longest receives the next value.

        In a ``FileStore``, waiting callers poll, so their order is not defined.

        Args:
            key: Name of the queue.
            block: If true, wait for a value.

        Raises:
            QueueEmptyError: The queue is empty, and ``block`` is false.
            TimeoutError: No value was pushed in time.
        """
        reply = self._execute(Pop(_key(key), self.timeout_s if block else 0.0))
        if isinstance(reply, WaitTimedOut) and not block:
            raise QueueEmptyError(f"{self}: queue {key!r} is empty")
        return self._checked(reply, FoundValues, self.timeout_s).values[0] or b""

    def queue_len(self, key: str) -> int:
        """Return the number of values in a queue."""
        return self._reply(Length(_key(key)), RequestDone).number

    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        """Wait until ``world_size`` callers have entered the barrier ``key``. Each key works once.

        Raises:
            TimeoutError: Not all callers entered in time.
        """
        # The names of the keys are those of torchelastic's barrier.
        if self.add(f"{key}/num_members", 1) == world_size:
            # One key releases all callers, so none of them polls the counter.
            self.set(f"{key}/last_member", b"")
        self.wait([f"{key}/last_member"], timeout)

    def has_extended_api(self) -> bool:
        """Return True: all stores of allranks have ``append``, ``multi_get`` and ``multi_set``."""
        return True

    def clone(self) -> Self:
        """Return another object for the same store, with a separate timeout. Threads do not need one."""
        # Without `__init__`, which would count as one more user, or start or join a server.
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def peek(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the current values without waiting, None for keys that are not set. Not in torch."""
        return self._reply(Peek(_keys(keys)), FoundValues).values

    def close(self) -> None:  # noqa: B027
        """Release the resources of this object. Not in torch, where the garbage collector releases them."""

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _patience(self, timeout: Timeout | None) -> float:
        return self.timeout_s if timeout is None else seconds_of(timeout, LONGEST_WAIT_S)

    def _reply(self, request: Request, kind: type[_ReplyT]) -> _ReplyT:
        return self._checked(self._execute(request), kind, getattr(request, "timeout_s", 0.0))

    def _checked(self, reply: Reply, kind: type[_ReplyT], waited_s: float) -> _ReplyT:
        match reply:
            case WaitTimedOut(missing):
                raise TimeoutError(
                    f"{self}: no process set {', '.join(map(repr, missing))} in {waited_s:.1f} s.\n"
                    "  The rank that sets it may be late or may have exited. Check its output.\n"
                    "  To wait longer, set init_process_group(timeout=...) or the timeout of the store."
                )
            case RequestFailed(text):
                raise UsageError(f"{self}: {text}")
        assert isinstance(reply, kind), reply
        return reply


class UserToken:
    """A token that the store and its clones share. Its finalizer runs when the last of them is garbage-collected."""


class HashStore(Store):
    """A store in the memory of this process, for its threads or for a job of one rank."""

    def __init__(self) -> None:
        self._table = KeyTable()
        self.abandon()
        follow(self)

    def abandon(self) -> None:
        """Replace the lock and the replies in a forked child, where no thread waits. The child's values are a copy."""
        # A pop of a thread of the parent would take the next value that the child pushes.
        self._table.remove_all_clients()
        self._changed = threading.Condition()
        self._replies: dict[Hashable, Reply] = {}

    def __str__(self) -> str:
        return "the store of this process"

    def _copy_advice(self) -> str:
        return "Only this process can read its values. For several processes, use a TCPStore or a FileStore."

    def _execute(self, request: Request) -> Reply:
        # A new identity for each request, so that threads that share the store wait separately.
        client = object()
        with self._changed:
            replies = self._table.handle(client, request, time.monotonic())
            try:
                while True:
                    # A thread also delivers the replies of other threads' waits that its request or `expire` has ended.
                    if replies:
                        self._replies.update(replies)
                        self._changed.notify_all()
                    if client in self._replies:
                        return self._replies[client]
                    deadline = self._table.next_deadline()
                    self._changed.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
                    replies = self._table.expire(time.monotonic())
            finally:
                # KeyboardInterrupt can end the wait. A pop that stays in the table would take a later value.
                self._table.remove_client(client)
                self._replies.pop(client, None)


class PrefixStore(Store):
    """A view of another store in which every key begins with a prefix and a slash.

    Args:
        prefix: The prefix of all keys.
        store: The underlying store, of allranks or with torch's methods. It stays open when the view is closed.
    """

    def __init__(self, prefix: str, store: Store) -> None:
        self.prefix = f"{_key(prefix)}/"
        self._store = store if isinstance(store, Store) else ForeignStore(store)
        self.timeout_s = self._store.timeout_s

    @property
    def underlying_store(self) -> Store:
        """The underlying store."""
        return self._store

    def __str__(self) -> str:
        return str(self._store)

    def _copy_advice(self) -> str:
        return f"{self._store._copy_advice()} Then create PrefixStore({self.prefix[:-1]!r}, ...) around that store."

    def num_keys(self) -> int:
        """Return the number of keys in the underlying store: as in torch, all keys, whatever their prefix."""
        return self._store.num_keys()

    def list_keys(self) -> list[str]:
        """Return the keys with the prefix that are set. The prefix is removed from them."""
        return [name.removeprefix(self.prefix) for name in super().list_keys()]

    def _execute(self, request: Request) -> Reply:
        match request:
            case ListNames(prefix):
                request = ListNames(self.prefix + prefix)
            case Peek(keys) | WaitForKeys(keys) | SetMany(keys):
                request = msgspec.structs.replace(request, keys=[self.prefix + key for key in keys])
            case _:
                request = msgspec.structs.replace(request, key=self.prefix + request.key)
        return self._store._execute(request)


class ForeignStore(Store):
    """An adapter for a user's store with torch's methods (set, get, add, check, wait)."""

    def __init__(self, store: Any) -> None:
        missing = [name for name in ("set", "get", "add", "check", "wait") if not callable(getattr(store, name, None))]
        if missing:
            raise UsageError(
                f"store={store!r} has no method {', '.join(missing)}. Expected a store such as torch's TCPStore."
            )
        self._store = store

    def __str__(self) -> str:
        return f"store={type(self._store).__name__}"

    def _execute(self, request: Request) -> Reply:
        try:
            return self._call(request)
        except RuntimeError as error:
            # Not imported: this module works without torch, and only a loaded torch can raise the error.
            torchs = getattr(sys.modules.get("torch.distributed"), "DistNetworkError", None)
            if torchs is None or not isinstance(error, torchs):
                raise
            raise StoreLostError(
                f"{self}: the connection broke: {str(error).partition(chr(10))[0]}.\n"
                "  Check the end of the output of the process that serves it."
            ) from error

    def _call(self, request: Request) -> Reply:
        match request:
            case Set(key, value):
                self._store.set(key, value)
            case SetMany(keys, values):
                for key, value in zip(keys, values, strict=True):
                    self._store.set(key, value)
            case Append(key, value):
                self._method("append")(key, value)
            case Add(key, amount):
                return RequestDone(int(self._store.add(key, amount)))
            case Delete(key):
                return RequestDone(int(self._method("delete_key")(key)))
            case CompareSet(key, expected, desired):
                return FoundValues([bytes(self._method("compare_set")(key, expected, desired))])
            case Peek(keys):
                # Checked first, because torch's `get` waits for an absent key.
                return FoundValues([bytes(self._store.get(key)) if self._store.check([key]) else None for key in keys])
            case ListNames(prefix):
                return FoundNames([key for key in self._method("list_keys")() if key.startswith(prefix)])
            case WaitForKeys(keys, timeout_s, values):
                if not self._wait(keys, timeout_s):
                    missing = [key for key in keys if not self._store.check([key])]
                    return WaitTimedOut((missing or keys)[:20])
                return FoundValues([bytes(self._store.get(key)) for key in keys] if values else [])
            case _:
                raise UsageError(
                    f"{self}: allranks cannot use the queues of another library's store.\n  Call the methods of"
                    " that store."
                )
        return RequestDone()

    def _wait(self, keys: list[str], timeout_s: float) -> bool:
        if timeout_s <= 0:  # in torch a timeout of 0 means forever
            return bool(self._store.check(keys))
        began = time.monotonic()
        try:
            self._store.wait(keys, timedelta(seconds=timeout_s))
        except (RuntimeError, OSError):  # torch raises DistStoreError, a RuntimeError, for all failures
            if time.monotonic() - began < timeout_s * 0.9:  # too early for a timeout: another failure
                raise
            return False
        return True

    def _method(self, name: str) -> Callable[..., Any]:
        method = getattr(self._store, name, None)
        if method is None:
            raise UsageError(
                f"{self} has no method {name}, which this call needs.\n  Use a store that has it, such as TCPStore."
            )
        return method  # type: ignore[no-any-return]


def _key(key: str) -> str:
    if not isinstance(key, str):
        raise UsageError(f"a store's key must be a string, not {key!r:.80}")
    return key


def _keys(keys: Sequence[str]) -> list[str]:
    if isinstance(keys, str | bytes):
        raise UsageError(f"keys must be a list of strings, not {keys!r:.80}")
    return [_key(key) for key in keys]


def _value(value: bytes | str) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if not isinstance(value, bytes | bytearray | memoryview):
        raise UsageError(f"a store's value must be bytes or a string, not {value!r:.80}")
    return bytes(value)
