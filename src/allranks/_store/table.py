"""What a store knows: its values, and who waits for which.

A dict, and a heap of deadlines. Neither sockets nor clocks: time comes in as an argument and replies go out as a
list, so that the server and ``MemoryStore`` share it, and a test can drive it through any history.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable
from dataclasses import dataclass

from allranks._store.wire import (
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

__all__ = ["KeyTable"]


@dataclass
class _Parked:
    request: Wait
    missing: set[str]


class KeyTable:
    """The values of a store, and the readers that wait for some. Knows neither sockets nor clocks.

    Every method that can end a wait returns the replies that are now due, as (who, reply) pairs.
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._parked: dict[Hashable, _Parked] = {}
        self._waiters: dict[str, set[Hashable]] = {}
        self._deadlines: list[tuple[float, int, Hashable, _Parked]] = []
        self._order = itertools.count()

    def handle(self, who: Hashable, request: Request, now: float) -> list[tuple[Hashable, Reply]]:
        """Carries out one request of ``who``, who must not have another one parked."""
        match request:
            case Set(key, value):
                return [(who, Done()), *self._put(key, value)]
            case Add(key, amount):
                try:
                    number = int(self._values.get(key, b"0")) + amount
                except ValueError:
                    return [(who, Failed(f"add({key!r}): its value is not a whole number"))]
                return [(who, Done(number)), *self._put(key, b"%d" % number)]
            case Peek(keys):
                return [(who, Found([self._values.get(key) for key in keys]))]
            case Delete(key):
                return [(who, Done(int(self._values.pop(key, None) is not None)))]
            case CompareSet(key, expected, desired):
                # torch's rule: an absent key counts as expected if b"" is; otherwise the caller gets its own
                # expectation back.
                current = self._values.get(key)
                if current == expected or (current is None and not expected):
                    return [(who, Found([desired])), *self._put(key, desired)]
                return [(who, Found([expected if current is None else current]))]
            case Wait():
                return self._park(who, request, now)

    def expire(self, now: float) -> list[tuple[Hashable, Reply]]:
        """Ends the waits whose time is over."""
        due: list[tuple[Hashable, Reply]] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, who, parked = heapq.heappop(self._deadlines)
            if self._parked.get(who) is parked:
                self.forget(who)
                due.append((who, Late(sorted(parked.missing)[:20])))
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
            self._waiters[key].discard(who)
            if not self._waiters[key]:
                del self._waiters[key]

    def _put(self, key: str, value: bytes) -> list[tuple[Hashable, Reply]]:
        self._values[key] = value
        due: list[tuple[Hashable, Reply]] = []
        for who in self._waiters.pop(key, ()):
            parked = self._parked[who]
            parked.missing.discard(key)
            if not parked.missing:
                del self._parked[who]
                due.append((who, self._found(parked.request)))
        return due

    def _park(self, who: Hashable, request: Wait, now: float) -> list[tuple[Hashable, Reply]]:
        missing = {key for key in request.keys if key not in self._values}
        if not missing:
            return [(who, self._found(request))]
        if request.timeout_s <= 0:
            return [(who, Late(sorted(missing)[:20]))]
        parked = self._parked[who] = _Parked(request, missing)
        for key in missing:
            self._waiters.setdefault(key, set()).add(who)
        heapq.heappush(self._deadlines, (now + request.timeout_s, next(self._order), who, parked))
        return []

    def _found(self, request: Wait) -> Found:
        return Found([self._values.get(key) for key in request.keys] if request.values else [])
