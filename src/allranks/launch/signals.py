"""Signals to a process whose loop sleeps in a selector: each is passed to the loop, which a byte wakes up."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Set

__all__ = ["FORWARDED", "handled"]

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Those that stop a job."""


@contextlib.contextmanager
def handled(numbers: Iterable[int], receive: Callable[[int], object], wake: int, mask: Set[int]) -> Iterator[None]:
    """Has signals handled until the block is left.

    One that was ignored before stays so: nohup, a shell's background job. Outside of the main thread, where
    python allows no handlers, none is.

    Args:
        numbers: the signals. The caller has blocked them, so that none is lost before the handlers stand.
        receive: called with a signal's number, between any two instructions of python.
        wake: the descriptor that a byte is written to.
        mask: the signal mask to restore once the handlers stand.
    """
    if threading.current_thread() is not threading.main_thread():
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        yield
        return
    wakeup = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    chosen = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda number, frame: receive(number)) for number in chosen}
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
