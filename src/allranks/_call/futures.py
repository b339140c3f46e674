"""Futures of pending calls.

A watcher thread detects the completion of all calls that have a future. A runner thread completes the futures in the
order of the calls' completion, and so runs their callbacks. A thread that waits for a pending future completes it
itself. It therefore reacts to Ctrl-C, and a callback can wait for the future of a call that it has made. If a callback
blocks while other futures are due, another runner continues with these. The total is two threads, and one more for each
callback that blocks.

The core reports the completion of its requests. The watcher polls the calls of other engines, less often if there are
many.
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

_POLL_S = 0.5e-3  # shortest interval of polling
_POLLING_SHARE = 10  # the watcher sleeps this many times as long as it polled: polling takes at most 1/11 of its time
_LONG_S = 0.1  # a callback that runs longer than this no longer delays the other futures
_LEAVING_S = 2.0  # limit of the wait for pending calls at exit


class End(enum.Enum):
    """How the completion of a call is detected."""

    PAST = 0
    """The call is complete."""
    NOTIFIED = 1
    """The core reports the completion."""
    POLLED = 2
    """The watcher must poll the call."""


class Call(Protocol):
    """A call with a future: a ``Work``."""

    def end(self, ticket: int) -> End:
        """Return how the completion is detected. If the core reports it, it reports this ticket."""
        ...

    def is_completed(self) -> bool:
        """Return whether the call is complete."""
        ...

    def result(self) -> Any:
        """Wait for the call, and return its tensors."""
        ...


class _Completer:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tickets = itertools.count(1)  # ticket 0 only wakes the watcher
        self._notified: dict[int, Any] = {}
        self._polled: dict[int, Any] = {}
        self._due: deque[Any] = deque()
        self._some_due = threading.Condition(self._lock)
        self._watcher: threading.Thread | None = None
        self._runners: set[threading.Thread] = set()
        self._idle = 0
        self._poll_at = 0.0
        self._taken = 0  # number of futures that runners have started to complete
        self._leave_by: float | None = None

    def add(self, future: Any) -> None:
        with self._lock:
            leaving = self._leave_by is not None
            if not leaving:
                # Stored before `end` passes the ticket to the core, which may report it immediately.
                ticket = next(self._tickets)
                self._notified[ticket] = future
                if self._watcher is None:
                    # Not a `Daemon`, which blocks signals: what callbacks start would inherit that
                    # (docs/decisions/052).
                    self._watcher = threading.Thread(target=self._watch, name="allranks-futures", daemon=True)
                    self._watcher.start()
        if leaving:  # the watcher may have exited
            future.complete()
        elif future.work.end(ticket) is not End.NOTIFIED:
            _core.add_completion(ticket)  # wakes the watcher, which then completes or polls the call

    def end(self) -> None:
        deadline = time.monotonic() + _LEAVING_S
        with self._lock:
            # Set before the wake-up, so that the watcher sees it when it wakes.
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
                nap = max(0.0, self._poll_at - now) if self._polled else -1.0
                if self._due:
                    # Another runner starts only if none has taken a future for _LONG_S: all runners are blocked.
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
                    if now >= self._leave_by or not (self._notified or self._polled or self._due):
                        return
                    nap = _POLL_S

    def _look(self, tickets: list[int]) -> None:
        """Check the calls with these tickets and, if the next poll is due, the calls that must be polled."""
        found = [(ticket, self._notified.pop(ticket)) for ticket in tickets if ticket in self._notified]
        began = time.monotonic()
        asks = began >= self._poll_at
        for ticket, future in (*found, *self._polled.items()) if asks else found:
            # For calls of the core, this also requests the next notification.
            end = future.work.end(ticket)
            with self._lock:
                self._polled.pop(ticket, None) if end is not End.POLLED else None
            if end is End.PAST:
                with self._lock:
                    self._due.append(future)
            elif end is End.NOTIFIED:
                # Stored after the request: only this thread takes the reports, so none can arrive in between.
                self._notified[ticket] = future
            else:
                self._polled[ticket] = future
        if asks:
            now = time.monotonic()
            self._poll_at = now + max(_POLL_S, _POLLING_SHARE * (now - began))

    def _start_runner(self) -> None:
        runner = threading.Thread(target=self._run, name="allranks-callbacks", daemon=True)
        self._runners.add(runner)
        runner.start()

    def _run(self) -> None:
        while (due := self._take()) is not None:
            try:
                due.complete()
            except BaseException:  # noqa: BLE001 - the exception of a callback, which no caller receives
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
            del due  # otherwise the future and its tensors would stay alive until the next one

    def _take(self) -> Any:
        with self._lock:
            while not self._due:
                # One idle runner is enough. The others exit.
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
    import torch  # late: the launcher does not need it

    class CallFuture(torch.futures.Future):  # type: ignore[type-arg]
        """The future of a call. A runner completes it after the call, or a waiting thread does so earlier."""

        def __init__(self, work: Call, devices: list[Any]) -> None:
            super().__init__(devices=devices)
            self.work = work
            self._claim = threading.Lock()  # the thread that completes the future acquires it, and never releases it

        def complete(self) -> None:
            """Wait for the call, and complete the future. No effect if another thread does so or has done so."""
            # The claim is never waited for: its holder may be blocked in a callback.
            if not self._claim.acquire(blocking=False):
                return
            try:
                tensors = self.work.result()
            except Exception as error:  # noqa: BLE001 - the future raises it
                self.set_exception(error)
            except BaseException:  # Ctrl-C in a waiting thread: another thread completes the future
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
            # A caller that has waited for the work expects a value, although the runner may not have run yet.
            if not self.done() and self.work.is_completed():
                self.wait()
            return super().value()

    return CallFuture


def future_of(work: Call, devices: list[Any]) -> Any:
    """Return a future of a call's result or error. ``devices``: the GPUs of the result."""
    future = _future_class()(work, devices)
    _completer.add(future)
    return future


def end_futures() -> None:
    """Complete the remaining futures at exit, within 2 s, and stop the threads.

    A thread that still runs during the finalization of the interpreter can abort the process.
    """
    _completer.end()


def _renew() -> None:
    global _completer
    _core.renew_completions()
    _completer = _Completer()


# A forked child has none of these threads, and does not complete the calls of its parent.
os.register_at_fork(after_in_child=_renew)
