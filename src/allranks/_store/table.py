"""What a store knows: its values, and who waits for which.

Two dicts, of values and of queues, and a heap of deadlines. Neither sockets nor clocks: time comes in as an argument
and replies go out as a list, so that the server, ``HashStore`` and ``FileStore`` share it, and a test can drive it
through any history. What the values mean is torch's stores', see ``stores``.
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
"""What keys begin with that the stores themselves use: nobody sees them listed or counted."""


@dataclass
class _Parked:
    request: WaitForKeys | Pop
    missing: set[str]


class KeyTable:
    """The values of a store, and the readers that wait for some. Knows neither sockets nor clocks.

    Every method that can end a wait returns the replies that are now due, as (who, reply) pairs.
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._queues: dict[str, deque[bytes]] = {}  # none is empty
        self._parked: dict[Hashable, _Parked] = {}
        self._waiters: dict[str, dict[Hashable, None]] = {}  # in the order in which they came
        self._deadlines: list[tuple[float, int, Hashable, _Parked]] = []
        self._order = itertools.count()

    def handle(self, who: Hashable, request: Request, now: float) -> list[tuple[Hashable, Reply]]:
        """Carries out one request of ``who``, who must not have another one parked."""
        match request:
            case Set(key, value):
                return [(who, RequestDone()), *self._put(key, value)]
            case SetMany(keys, values):
                if len(keys) != len(values):
                    return [(who, RequestFailed(f"multi_set: {len(keys)} keys, but {len(values)} values"))]
                due = [self._put(key, value) for key, value in zip(keys, values, strict=True)]
                return [(who, RequestDone()), *itertools.chain.from_iterable(due)]
            case Add(key, amount):
                return self._add(who, key, amount)
            case Append(key, value):
                return [(who, RequestDone()), *self._put(key, self._values.get(key, b"") + value)]
            case ListNames(prefix):
                hidden = prefix + HIDDEN
                found = [key for key in self._values if key.startswith(prefix) and not key.startswith(hidden)]
                return [(who, FoundNames(found))]
            case Push(key, value):
                self._queues.setdefault(key, deque()).append(value)
                return [(who, RequestDone()), *self._arrived(key)]
            case Length(key):
                return [(who, RequestDone(len(self._queues.get(key, ()))))]
            case Peek(keys):
                return [(who, FoundValues([self._values.get(key) for key in keys]))]
            case Delete(key):
                return [(who, RequestDone(int(self._values.pop(key, None) is not None)))]
            case CompareSet(key, expected, desired):
                # torch's rule: an absent key counts as expected if b"" is; otherwise the caller gets its own
                # expectation back.
                current = self._values.get(key)
                if current == expected or (current is None and not expected):
                    return [(who, FoundValues([desired])), *self._put(key, desired)]
                return [(who, FoundValues([expected if current is None else current]))]
            case WaitForKeys(keys, _, values):
                return self._park(who, request, {key for key in keys if not self._is_there(key, values)}, now)
            case Pop(key):
                return self._park(who, request, set() if key in self._queues else {key}, now)

    def expire(self, now: float) -> list[tuple[Hashable, Reply]]:
        """Ends the waits whose time is over."""
        due: list[tuple[Hashable, Reply]] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, who, parked = heapq.heappop(self._deadlines)
            if self._parked.get(who) is parked:
                self.forget(who)
                due.append((who, WaitTimedOut(sorted(parked.missing)[:20])))
        return due

    def next_deadline(self) -> float | None:
        """When ``expire`` has something to do, at the earliest."""
        while self._deadlines and self._parked.get(self._deadlines[0][2]) is not self._deadlines[0][3]:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def waits(self, who: Hashable) -> bool:
        """Whether ``who`` has a request parked."""
        return who in self._parked

    def forget(self, who: Hashable) -> None:
        """Drops what ``who`` waits for."""
        parked = self._parked.pop(who, None)
        for key in parked.missing if parked else ():
            self._waiters[key].pop(who)
            if not self._waiters[key]:
                del self._waiters[key]

    def _add(self, who: Hashable, key: str, amount: int) -> list[tuple[Hashable, Reply]]:
        try:
            number = int(self._values.get(key) or b"0") + amount
        except ValueError:
            return [(who, RequestFailed(f"add({key!r}): its value is not a whole number"))]
        if not -(1 << 63) <= number < 1 << 63:
            return [(who, RequestFailed(f"add({key!r}): the sum {number} does not fit into 64 bits"))]
        return [(who, RequestDone(number)), *self._put(key, b"%d" % number)]

    def _put(self, key: str, value: bytes) -> list[tuple[Hashable, Reply]]:
        self._values[key] = value
        return self._arrived(key)

    def _is_there(self, key: str, as_value: bool) -> bool:
        return key in self._values or (not as_value and key in self._queues)

    def _arrived(self, key: str) -> list[tuple[Hashable, Reply]]:
        """Ends the waits that were for this key alone; what is in a queue, one of them takes."""
        due: list[tuple[Hashable, Reply]] = []
        for who in tuple(self._waiters.get(key, ())):
            parked = self._parked[who]
            request = parked.request
            if key in self._queues if isinstance(request, Pop) else self._is_there(key, request.values):
                del self._waiters[key][who]
                parked.missing.discard(key)
                if not parked.missing:
                    del self._parked[who]
                    due.append((who, self._found(request)))
        if not self._waiters.get(key, True):
            del self._waiters[key]
        return due

    def _park(
        self, who: Hashable, request: WaitForKeys | Pop, missing: set[str], now: float
    ) -> list[tuple[Hashable, Reply]]:
        if not missing:
            return [(who, self._found(request))]
        if request.timeout_s <= 0:
            return [(who, WaitTimedOut(sorted(missing)[:20]))]
        parked = self._parked[who] = _Parked(request, missing)
        for key in missing:
            self._waiters.setdefault(key, {})[who] = None
        heapq.heappush(self._deadlines, (now + request.timeout_s, next(self._order), who, parked))
        return []

    def _found(self, request: WaitForKeys | Pop) -> FoundValues:
        if isinstance(request, WaitForKeys):
            return FoundValues([self._values.get(key) for key in request.keys] if request.values else [])
        queue = self._queues[request.key]
        value = queue.popleft()
        if not queue:
            del self._queues[request.key]
        return FoundValues([value])
