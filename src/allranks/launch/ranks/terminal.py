"""The controlling terminal of the launcher, which one process group may read: the launcher's, or a rank's.

A rank whose stdin is the terminal has its own process group in the launcher's session, like a shell's job in the
shell's session. When it reads, or changes the terminal's modes, the kernel stops it (SIGTTIN, SIGTTOU), and the
launcher lends it the terminal. From then on the rank receives the keys: Ctrl-C interrupts only this rank, and a
debugger continues.

Source: the GNU C library's manual, "Implementing a Job Control Shell"; termios(3), credentials(7).
"""

from __future__ import annotations

import contextlib
import os
import signal
import termios
from collections.abc import Iterator
from typing import Any

__all__ = ["Terminal", "stop_this_group"]


class Terminal:
    """The terminal that is both stdin and this process's controlling terminal."""

    def __init__(self) -> None:
        self._group = os.getpgrp()
        self._modes: list[Any] = termios.tcgetattr(0)

    @classmethod
    def of_this_process(cls) -> Terminal | None:
        """Return the terminal; None if stdin is a pipe, a file, or a terminal that controls other processes."""
        try:
            os.tcgetpgrp(0)
        except OSError:
            return None
        return cls()

    def lend(self, group: int) -> bool:
        """Make a process group the foreground group. Return False if another job has the terminal."""
        with _unstopped():
            # Another job of the shell is in the foreground, for example after ``bg``; it keeps the terminal.
            if os.tcgetpgrp(0) not in (self._group, group):
                return False
            os.tcsetpgrp(0, group)
            return True

    def reclaim(self, group: int, restore: bool = False) -> bool:
        """Take the terminal back. Return False if this group did not have it.

        Args:
            group: the group that has it.
            restore: the group was killed and may have left the terminal without echo.
        """
        with contextlib.suppress(OSError), _unstopped():  # the terminal may have been hung up
            if os.tcgetpgrp(0) == group:
                os.tcsetpgrp(0, self._group)
                if restore:
                    termios.tcsetattr(0, termios.TCSADRAIN, self._modes)
                return True
        return False


@contextlib.contextmanager
def _unstopped() -> Iterator[None]:
    """Let a process that does not have the terminal change it. Without this, the kernel would stop the process."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTTOU,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stop_this_group(number: int) -> bool:
    """Stop this process group by a signal, until it is continued.

    Returns:
        False if it did not stop: no process could continue it (an orphaned group, like a container's first process).
    """
    # Only the default action stops a process.
    handler = signal.signal(number, signal.SIG_DFL)
    # A blocked SIGCONT still continues the process, and stays pending as the proof that it was stopped.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGCONT,))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (number,))
    try:
        os.killpg(os.getpgrp(), number)
        if continued := signal.SIGCONT in signal.sigpending():
            # Consumed here, so that it does not reach the program when the mask is restored.
            signal.sigwait((signal.SIGCONT,))
        return continued
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(number, handler)
