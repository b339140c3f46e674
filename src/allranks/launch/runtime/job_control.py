"""The terminal of a job on this host: performs the decisions of ``policy/round`` about Ctrl-Z and the reading rank.

It lends the terminal to the reader, reclaims it, and stops the launcher's own process group.
"""

from __future__ import annotations

import signal

from allranks.launch.ranks.agent import Agent
from allranks.launch.ranks.terminal import Terminal, stop_this_group

__all__ = ["SIGNALS", "JobControl"]

# SIGTSTP is Ctrl-Z. SIGCHLD reports that the kernel has stopped the rank that reads the terminal.
SIGNALS = (signal.SIGTSTP, signal.SIGCHLD)


class JobControl:
    """Lends the terminal to the rank that reads it, and stops the launcher.

    Args:
        agent: the ranks, started.
        terminal: None if no rank has one.
        rank: the rank whose stdin is the terminal.

    Attributes:
        reader: the rank that may read the terminal; None if none may.
        borrower: the rank that receives the terminal's keys; None while the launcher receives them.
    """

    def __init__(self, agent: Agent, terminal: Terminal | None, rank: int | None) -> None:
        self._agent = agent
        self._terminal = terminal
        self.reader = rank if terminal is not None else None
        self.borrower: int | None = None

    def stopped_by(self) -> int | None:
        """Return the signal that has stopped the reader since the last call; None if none has."""
        return None if self.reader is None else self._agent.stopped_by(self.reader)

    def lend(self, rank: int) -> bool:
        """Give the keys to a rank. Return False if another job has the terminal."""
        assert self._terminal is not None
        if not self._terminal.lend(self._agent.group_of(rank)):
            return False
        self.borrower = rank
        return True

    def reclaim(self, restore: bool = False) -> None:
        """Take the terminal back. ``restore``: restore its modes, too, because the rank was killed."""
        if self._terminal is not None and self.borrower is not None:
            self._terminal.reclaim(self._agent.group_of(self.borrower), restore)
        self.borrower = None

    def stop_launcher(self, number: int) -> bool:
        """Stop this process. Return when it is continued; False if it could not be stopped."""
        return stop_this_group(number)
