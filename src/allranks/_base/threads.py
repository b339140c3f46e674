"""Threads of this package's own, which leave signals to the program.

A signal to a process goes to whichever of its threads looks first. Python's main thread alone acts on it, and sleeps
on, in ``time.sleep`` or a system call, where another thread was first: Ctrl-C would do nothing for long.
"""

from __future__ import annotations

import signal
import threading

__all__ = ["Daemon"]

_FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS}


class Daemon(threading.Thread):
    """A thread that serves, and ends with the process. What it starts in turn, processes too, has signals blocked."""

    def start(self) -> None:
        """Starts it; see ``threading.Thread``."""
        self.daemon = True
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _FAULTS)
        try:
            super().start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
