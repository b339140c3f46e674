"""Threads of this package's own, which leave signals to the program.

A signal to a process goes to whichever of its threads looks first. Python's main thread alone acts on it, and sleeps
on, in ``time.sleep`` or a system call, where another thread was first: Ctrl-C would do nothing for long.
"""

from __future__ import annotations

import errno
import signal
import threading

__all__ = ["Daemon"]

_FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS}


class Daemon(threading.Thread):
    """A thread that serves, and ends with the process. What it starts in turn, processes too, has signals blocked."""

    def start(self) -> None:
        """Starts it; see ``threading.Thread``.

        Raises:
            OSError: there can be no more threads: a limit of processes (``ulimit -u``, pids.max), or no memory.
        """
        self.daemon = True
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _FAULTS)
        try:
            super().start()
        except RuntimeError as error:  # "can't start new thread": pthread_create's own error is not told
            raise OSError(errno.ENOMEM, f"thread {self.name} cannot be started") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def join(self, timeout: float | None = None) -> None:
        """Waits for its end; see ``threading.Thread``. Where it could not be started there is nothing to wait for."""
        if self.ident is not None:
            super().join(timeout)
