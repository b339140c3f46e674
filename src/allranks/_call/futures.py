"""Futures of calls that are under way.

One thread learns of the ends of all calls that have a future. Another completes the futures, in the order in which the
calls have ended, and thereby runs their callbacks. A thread that waits for a future before that completes it itself: it
notices Ctrl-C, and a callback may wait for the future of a call that it has made. Where a callback takes long while
other futures are due, a further thread goes on with these. So there are two threads, and one more for each callback
that blocks.

The core reports the ends of its requests. Calls of other engines are polled, the less often the more there are.
"""

from __future__ import annotations

import enum
import functools
import itertools
import os
import sys
import threading
import time
from collections import deque
from typing import Any, Protocol

from allranks import _core

__all__ = ["Call", "End", "end_futures", "future_of"]

_ASK_S = 0.5e-3
_ASKING_SHARE = 10  # the thread naps so many times as long as it has asked
_LONG_S = 0.1  # after so long a callback does not hold up the others any more
_LEAVING_S = 2.0


class End(enum.Enum):
    """How the end of a call is noticed."""

    PAST = 0
    """It has ended."""
    TOLD = 1
    """The core reports it."""
    ASKED = 2
    """It must be asked."""


class Call(Protocol):
    """What has a future: a ``Work``."""

    def end(self, ticket: int) -> End:
        """How the end of the call is noticed; where the core reports it, by this ticket."""
        ...

    def is_completed(self) -> bool:
        """Whether it has ended."""
        ...

    def result(self) -> Any:
        """Waits; returns the call's tensors."""
        ...


class _Completer:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tickets = itertools.count(1)  # 0 only wakes the thread
        self._told: dict[int, Any] = {}
        self._asked: dict[int, Any] = {}
        self._due: deque[Any] = deque()
        self._some_due = threading.Condition(self._lock)
        self._watcher: threading.Thread | None = None
        self._runners: set[threading.Thread] = set()
        self._idle = 0
        self._ask_at = 0.0
        self._taken = 0  # futures that runners have begun with
        self._leave_by: float | None = None

    def add(self, future: Any) -> None:
        with self._lock:
            leaving = self._leave_by is not None
            if not leaving:
                ticket = next(self._tickets)
                self._told[ticket] = future
                if self._watcher is None:
                    self._watcher = threading.Thread(target=self._watch, name="allranks-futures", daemon=True)
                    self._watcher.start()
        if leaving:
            future.complete()
        elif future.work.end(ticket) is not End.TOLD:
            _core.add_completion(ticket)

    def end(self) -> None:
        deadline = time.monotonic() + _LEAVING_S
        with self._lock:
            self._leave_by = deadline
        _core.add_completion(0)
        if self._watcher is not None:
            self._watcher.join(_LEAVING_S)
        with self._lock:
            self._some_due.notify_all()
        for runner in tuple(self._runners):
            runner.join(max(0.0, deadline - time.monotonic()))

    def _watch(self) -> None:
        nap, taken, since = -1.0, 0, 0.0
        while True:
            self._look(_core.take_completions(nap))
            now = time.monotonic()
            with self._lock:
                nap = max(0.0, self._ask_at - now) if self._asked else -1.0
                if self._due:
                    if self._taken != taken or since == 0:
                        taken, since = self._taken, now
                    if self._idle:
                        self._some_due.notify()
                    elif not self._runners or now - since >= _LONG_S:
                        self._start_runner()
                        since = now
                    nap = _LONG_S if nap < 0 else min(nap, _LONG_S)
                else:
                    since = 0.0
                if self._leave_by is not None:
                    if now >= self._leave_by or not (self._told or self._asked or self._due):
                        return
                    nap = _ASK_S

    def _look(self, tickets: list[int]) -> None:
        """Finds out which calls have ended: of those with these tickets, and of those that must be asked."""
        found = [(ticket, self._told.pop(ticket)) for ticket in tickets if ticket in self._told]
        began = time.monotonic()
        asks = began >= self._ask_at
        for ticket, future in (*found, *self._asked.items()) if asks else found:
            end = future.work.end(ticket)
            with self._lock:
                self._asked.pop(ticket, None) if end is not End.ASKED else None
            if end is End.PAST:
                with self._lock:
                    self._due.append(future)
            elif end is End.TOLD:
                self._told[ticket] = future
            else:
                self._asked[ticket] = future
        if asks:
            now = time.monotonic()
            self._ask_at = now + max(_ASK_S, _ASKING_SHARE * (now - began))

    def _start_runner(self) -> None:
        runner = threading.Thread(target=self._run, name="allranks-callbacks", daemon=True)
        self._runners.add(runner)
        runner.start()

    def _run(self) -> None:
        while (due := self._take()) is not None:
            try:
                due.complete()
            except BaseException:  # noqa: BLE001 - a callback's, which nobody else sees
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
            del due

    def _take(self) -> Any:
        with self._lock:
            while not self._due:
                if self._idle or self._leave_by is not None:
                    self._runners.discard(threading.current_thread())
                    return None
                self._idle += 1
                self._some_due.wait()
                self._idle -= 1
            self._taken += 1
            return self._due.popleft()


_completer = _Completer()


@functools.cache
def _future_class() -> Any:
    import torch  # late: the launcher does without

    class CallFuture(torch.futures.Future):  # type: ignore[type-arg]
        """The future of a call: complete when the call has ended, or when somebody waits before."""

        def __init__(self, work: Call, devices: list[Any]) -> None:
            super().__init__(devices=devices)
            self.work = work
            self._claim = threading.Lock()  # held for ever by who completes it

        def complete(self) -> None:
            """Waits for the call, unless somebody else does or has."""
            if not self._claim.acquire(blocking=False):
                return
            try:
                tensors = self.work.result()
            except Exception as error:  # noqa: BLE001 - it is the future's to raise
                self.set_exception(error)
            except BaseException:  # Ctrl-C in who waits
                self._claim.release()
                _completer.add(self)
                raise
            else:
                self.set_result(tensors)

        def wait(self) -> Any:
            if not self.done():
                self.complete()
            return super().wait()

        def value(self) -> Any:
            # Who has waited for the work need not know of the thread that completes its future.
            if not self.done() and self.work.is_completed():
                self.wait()
            return super().value()

    return CallFuture


def future_of(work: Call, devices: list[Any]) -> Any:
    """A future of a call's result, or its error. ``devices``: GPUs on which these are."""
    future = _future_class()(work, devices)
    _completer.add(future)
    return future


def end_futures() -> None:
    """Completes what is left, at exit, and ends the threads: one that meets the end of the interpreter aborts it."""
    _completer.end()


def _renew() -> None:
    global _completer
    _core.renew_completions()
    _completer = _Completer()


# A forked child has none of these threads; its parent's calls are not completed there.
os.register_at_fork(after_in_child=_renew)
