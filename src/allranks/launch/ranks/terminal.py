"""The controlling terminal of the launcher, which one process group at a time may read: the launcher's, or a rank's.

A rank whose stdin is the terminal has a process group of its own in the launcher's session, as a shell's job has in
the shell's. When it reads, or changes the terminal's modes, the kernel stops it (SIGTTIN, SIGTTOU), and the launcher
lends it the terminal. From then on the keys are the rank's: Ctrl-C interrupts it alone, and a debugger goes on.

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
        """None where stdin is something else: a pipe, a file, a terminal that controls other processes."""
        try:
            os.tcgetpgrp(0)
        except OSError:
            return None
        return cls()

    def lend(self, group: int) -> bool:
        """Makes a process group the one that may read. False if another job has the terminal."""
        with _unstopped():
            if os.tcgetpgrp(0) not in (self._group, group):
                return False
            os.tcsetpgrp(0, group)
            return True

    def reclaim(self, group: int, restore: bool = False) -> bool:
        """Takes the terminal back. False if it has not been this group's.

        Args:
            group: who has it.
            restore: the group was killed and may have left the terminal without echo.
        """
        with contextlib.suppress(OSError), _unstopped():  # it may have been hung up
            if os.tcgetpgrp(0) == group:
                os.tcsetpgrp(0, self._group)
                if restore:
                    termios.tcsetattr(0, termios.TCSADRAIN, self._modes)
                return True
        return False


@contextlib.contextmanager
def _unstopped() -> Iterator[None]:
    """Lets a process that does not have the terminal change it, for which the kernel would stop it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTTOU,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stop_this_group(number: int) -> bool:
    """Stops this process group by a signal, until it is continued.

    Returns:
        False if it did not stop: no process could continue it (an orphaned group, as a container's first process).
    """
    handler = signal.signal(number, signal.SIG_DFL)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGCONT,))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (number,))
    try:
        os.killpg(os.getpgrp(), number)
        if continued := signal.SIGCONT in signal.sigpending():
            signal.sigwait((signal.SIGCONT,))
        return continued
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(number, handler)
