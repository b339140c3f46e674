"""Signals for a process whose loop sleeps in a selector: each is passed to the loop, and a byte wakes the loop."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Set

__all__ = ["FORWARDED", "handled"]

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that stop a job."""


@contextlib.contextmanager
def handled(numbers: Iterable[int], receive: Callable[[int], object], wake: int, mask: Set[int]) -> Iterator[None]:
    """Handle signals until the block is left.

    A signal that was ignored stays ignored: nohup, a shell's background job. Outside of the main thread, python allows
    no handlers, so no signal is handled.

    Args:
        numbers: the signals. The caller has blocked them, so that none is lost before the handlers are installed.
        receive: called with the number of a signal, between any two instructions of python.
        wake: the descriptor to which a byte is written.
        mask: the signal mask to restore after the handlers are installed.
    """
    if threading.current_thread() is not threading.main_thread():
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        yield
        return
    # A full pipe wakes the loop as well, so a byte that does not fit is not missed.
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
