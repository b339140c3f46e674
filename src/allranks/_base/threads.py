"""Threads of this package, which block signals and so leave them to the program.

The kernel delivers a signal for a process to any thread that does not block it. Only Python's main thread runs signal
handlers. If another thread receives the signal, the main thread continues to sleep in ``time.sleep`` or in a system
call, and Ctrl-C has no effect for a long time.
"""

from __future__ import annotations

import errno
import signal
import threading

__all__ = ["Daemon"]

_FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS}


class Daemon(threading.Thread):
    """A daemon thread with blocked signals. Threads and processes that it starts inherit the blocked signals."""

    def start(self) -> None:
        """Start it. See ``threading.Thread``.

        Raises:
            OSError: The system provides no more threads: a limit of processes (``ulimit -u``, pids.max), or no memory.
        """
        # A new thread inherits the signal mask of its creator. Faults stay unblocked, so that their handlers run, for
        # example faulthandler's.
        self.daemon = True
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _FAULTS)
        try:
            super().start()
        except RuntimeError as error:  # "can't start new thread", without the error number of pthread_create
            raise OSError(
                errno.ENOMEM,
                f"thread {self.name} cannot be started: no memory is left, or the limit of processes (`ulimit -u`,"
                " pids.max) is reached",
            ) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has finished. See ``threading.Thread``. Return immediately if it was not started."""
        if self.ident is not None:
            super().join(timeout)
