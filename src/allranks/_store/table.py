"""The state of a store: its values, and the clients that wait for keys.

It consists of a dict of values, a dict of queues, and a heap of deadlines. It uses neither sockets nor clocks. The time
is an argument, and the replies are a return value. The server, ``HashStore`` and ``FileStore`` therefore share it, and
a test can replay any history. The values have the semantics of torch's stores, see ``stores``.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

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

__all__ = ["HIDDEN", "KeyTable"]

HIDDEN = "\0"
"""Prefix of the keys that the stores themselves use. Listings and counts omit these keys."""


@dataclass
class _WaitingRequest:
    request: WaitForKeys | Pop
    missing: set[str]


class KeyTable:
    """The values of a store, and the waiting requests. It uses neither sockets nor clocks.

    A client is any hashable object. Every method that can end a wait returns the replies that are due, as pairs
    (client, reply).
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._queues: dict[str, deque[bytes]] = {}  # a queue is removed when it becomes empty
        self._waiting: dict[Hashable, _WaitingRequest] = {}
        self._waiters: dict[str, dict[Hashable, None]] = {}  # in the order of arrival
        self._deadlines: list[tuple[float, int, Hashable, _WaitingRequest]] = []
        self._order = itertools.count()  # breaks ties of deadlines, because clients cannot be compared

    def handle(self, client: Hashable, request: Request, now: float) -> list[tuple[Hashable, Reply]]:
        """Execute one request of a client, which must not have another waiting request."""
        match request:
            case Set(key, value):
                return [(client, RequestDone()), *self._put(key, value)]
            case SetMany(keys, values):
                if len(keys) != len(values):
                    return [(client, RequestFailed(f"multi_set: {len(keys)} keys, but {len(values)} values"))]
                replies = [self._put(key, value) for key, value in zip(keys, values, strict=True)]
                return [(client, RequestDone()), *itertools.chain.from_iterable(replies)]
            case Add(key, amount):
                return self._add(client, key, amount)
            case Append(key, value):
                return [(client, RequestDone()), *self._put(key, self._values.get(key, b"") + value)]
            case ListNames(prefix):
                hidden = prefix + HIDDEN
                found = [key for key in self._values if key.startswith(prefix) and not key.startswith(hidden)]
                return [(client, FoundNames(found))]
            case Push(key, value):
                self._queues.setdefault(key, deque()).append(value)
                return [(client, RequestDone()), *self._end_waits(key)]
            case Length(key):
                return [(client, RequestDone(len(self._queues.get(key, ()))))]
            case Peek(keys):
                return [(client, FoundValues([self._values.get(key) for key in keys]))]
            case Delete(key):
                return [(client, RequestDone(int(self._values.pop(key, None) is not None)))]
            case CompareSet(key, expected, desired):
                # torch's rule: an absent key matches if b"" is expected. Otherwise the caller receives its own
                # expected value.
                current = self._values.get(key)
                if current == expected or (current is None and not expected):
                    return [(client, FoundValues([desired])), *self._put(key, desired)]
                return [(client, FoundValues([expected if current is None else current]))]
            case WaitForKeys(keys, _, values):
                return self._answer_or_wait(
                    client, request, {key for key in keys if not self._exists(key, values)}, now
                )
            case Pop(key):
                return self._answer_or_wait(client, request, set() if key in self._queues else {key}, now)

    def expire(self, now: float) -> list[tuple[Hashable, Reply]]:
        """End the waits whose timeout has expired."""
        replies: list[tuple[Hashable, Reply]] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, client, waiting = heapq.heappop(self._deadlines)
            if self._waiting.get(client) is waiting:  # entries of requests that have ended stay in the heap
                self.remove_client(client)
                # At most 20 names: they are for an error message, and a request can wait for thousands of keys.
                replies.append((client, WaitTimedOut(sorted(waiting.missing)[:20])))
        return replies

    def next_deadline(self) -> float | None:
        """Return the earliest time at which a wait expires, or None."""
        while self._deadlines and self._waiting.get(self._deadlines[0][2]) is not self._deadlines[0][3]:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def is_waiting(self, client: Hashable) -> bool:
        """Return whether a client has a waiting request."""
        return client in self._waiting

    def remove_client(self, client: Hashable) -> None:
        """Drop the waiting request of a client."""
        waiting = self._waiting.pop(client, None)
        for key in waiting.missing if waiting else ():
            self._waiters[key].pop(client)
            if not self._waiters[key]:
                del self._waiters[key]

    def remove_all_clients(self) -> None:
        """Drop all waiting requests."""
        for client in tuple(self._waiting):
            self.remove_client(client)

    def _add(self, client: Hashable, key: str, amount: int) -> list[tuple[Hashable, Reply]]:
        try:
            number = int(self._values.get(key) or b"0") + amount
        except ValueError:
            why = f"add({key!r}): its value is not a whole number, but {self._values[key]!r:.80}"
            return [(client, RequestFailed(why))]
        # torch's counters are 64-bit integers.
        if not -(1 << 63) <= number < 1 << 63:
            return [(client, RequestFailed(f"add({key!r}): the sum {number} does not fit into 64 bits"))]
        return [(client, RequestDone(number)), *self._put(key, b"%d" % number)]

    def _put(self, key: str, value: bytes) -> list[tuple[Hashable, Reply]]:
        self._values[key] = value
        return self._end_waits(key)

    def _exists(self, key: str, as_value: bool) -> bool:
        return key in self._values or (not as_value and key in self._queues)

    def _end_waits(self, key: str) -> list[tuple[Hashable, Reply]]:
        """End the waits that lacked only this key. Each value of a queue goes to one waiting ``Pop``."""
        replies: list[tuple[Hashable, Reply]] = []
        for client in tuple(self._waiters.get(key, ())):
            waiting = self._waiting[client]
            request = waiting.request
            # Checked for each waiter, because the previous one may have taken the last value of the queue.
            if key in self._queues if isinstance(request, Pop) else self._exists(key, request.values):
                del self._waiters[key][client]
                waiting.missing.discard(key)
                if not waiting.missing:
                    del self._waiting[client]
                    replies.append((client, self._found(request)))
        if not self._waiters.get(key, True):
            del self._waiters[key]
        return replies

    def _answer_or_wait(
        self, client: Hashable, request: WaitForKeys | Pop, missing: set[str], now: float
    ) -> list[tuple[Hashable, Reply]]:
        if not missing:
            return [(client, self._found(request))]
        if request.timeout_s <= 0:
            return [(client, WaitTimedOut(sorted(missing)[:20]))]
        waiting = self._waiting[client] = _WaitingRequest(request, missing)
        for key in missing:
            self._waiters.setdefault(key, {})[client] = None
        heapq.heappush(self._deadlines, (now + request.timeout_s, next(self._order), client, waiting))
        return []

    def _found(self, request: WaitForKeys | Pop) -> FoundValues:
        if isinstance(request, WaitForKeys):
            return FoundValues([self._values.get(key) for key in request.keys] if request.values else [])
        queue = self._queues[request.key]
        value = queue.popleft()
        if not queue:
            del self._queues[request.key]
        return FoundValues([value])
