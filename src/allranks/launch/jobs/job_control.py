"""The keys of a terminal, for a job on this host: Ctrl-Z stops the ranks with the launcher, and a rank can read."""

from __future__ import annotations

import signal

from allranks.launch.ranks.agent import Agent
from allranks.launch.ranks.terminal import Terminal, stop_this_group

__all__ = ["SIGNALS", "JobControl"]

SIGNALS = (signal.SIGTSTP, signal.SIGCHLD)


class JobControl:
    """Stops and continues the ranks, and lends the terminal to the rank that reads it.

    Args:
        agent: the ranks, started.
        terminal: None if no rank has one.
        rank: whose stdin it is.

    Attributes:
        borrower: the rank that has the terminal's keys; None while the launcher has them.
    """

    def __init__(self, agent: Agent, terminal: Terminal | None, rank: int | None) -> None:
        self._agent = agent
        self._terminal = terminal
        self._rank = rank
        self.borrower: int | None = None

    def take(self, number: int) -> str:
        """Takes one of ``SIGNALS``. Returns why the job cannot go on, or ""."""
        if number == signal.SIGTSTP:
            self._suspend(number)
        elif self._terminal is not None and self._rank is not None:
            stopped = self._agent.stopped_by(self._rank)
            if stopped == signal.SIGTSTP:
                self._suspend(stopped)
            elif stopped in (signal.SIGTTIN, signal.SIGTTOU):
                if self._lend():
                    self._agent.signal(signal.SIGCONT, [self._rank])
                elif not self._suspend(stopped):
                    return f"rank {self._rank} waits for a terminal that another job has"
        return ""

    def reclaim(self, restore: bool = False) -> None:
        """Takes the terminal back; with ``restore`` as it was, as the rank was killed."""
        if self._terminal is not None and self.borrower is not None:
            self._terminal.reclaim(self._agent.group_of(self.borrower), restore)
        self.borrower = None

    def _lend(self) -> bool:
        assert self._terminal is not None
        assert self._rank is not None
        if not self._terminal.lend(self._agent.group_of(self._rank)):
            return False
        self.borrower = self._rank
        return True

    def _suspend(self, number: int) -> bool:
        """Stops the ranks and the launcher. Returns once it is continued; False if it could not be stopped."""
        lent = self.borrower is not None
        self.reclaim()
        running = self._agent.running
        self._agent.signal(signal.SIGSTOP, running)  # SIGTSTP has no effect in a session of a rank's own
        stopped = stop_this_group(number)
        if lent:
            self._lend()
        if stopped or number == signal.SIGTSTP:
            self._agent.signal(signal.SIGCONT, running)
        return stopped
