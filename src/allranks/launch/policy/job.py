"""The rounds of a job as a pure state machine: whether it restarts after a round, and on how many hosts.

Like ``round``, it has no clock and no process. ``jobs/local`` and ``jobs/multi_host`` perform its actions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

__all__ = [
    "Action",
    "AwaitHosts",
    "CountHosts",
    "EndJob",
    "Event",
    "HostsCounted",
    "HostsMissing",
    "JobState",
    "JobRules",
    "JobStarted",
    "RoundEnded",
    "StartRound",
    "step",
]


@dataclass(frozen=True)
class JobRules:
    """Fixed parameters of a job.

    Attributes:
        restarts: how often a failed round is followed by another one.
        least: the number of hosts that a round requires.
        elastic: hosts may be lost, and may join, as long as ``least`` hosts are left.
        replaces: a restart may follow the loss of hosts, because spare hosts, or the lost hosts if they return, run
            their ranks.
    """

    restarts: int = 0
    least: int = 1
    elastic: bool = False
    replaces: bool = False

    def may_go_on_without(self, gone: int, hosts: int) -> bool:
        """Return whether a round may start although some hosts are lost or unable."""
        return self.elastic and 0 < gone <= hosts - self.least


@dataclass(frozen=True)
class JobStarted:
    """The first event: the hosts have joined."""


@dataclass(frozen=True)
class RoundEnded:
    """A round ended.

    Attributes:
        code: its exit code.
        failed: as in ``Round``.
        joined: as in ``Round``.
        hosts_lost: number of hosts that were lost in it.
    """

    code: int
    failed: bool
    joined: bool = False
    hosts_lost: int = 0


@dataclass(frozen=True)
class HostsCounted:
    """Answers ``CountHosts`` and ``AwaitHosts``. ``may_grow``: lost hosts may return, or other hosts may join."""

    count: int
    may_grow: bool = False


@dataclass(frozen=True)
class HostsMissing:
    """``AwaitHosts`` has failed: too few hosts joined in time."""


Event: TypeAlias = JobStarted | RoundEnded | HostsCounted | HostsMissing


@dataclass(frozen=True)
class StartRound:
    """Start the ranks. ``restart``: number of restarts so far; ``left``: number of restarts that remain."""

    restart: int
    left: int


@dataclass(frozen=True)
class CountHosts:
    """Admit the hosts that have joined. Answered by ``HostsCounted``."""


@dataclass(frozen=True)
class AwaitHosts:
    """Wait for other hosts, because too few are left. Answered by ``HostsCounted`` or ``HostsMissing``."""

    count: int


@dataclass(frozen=True)
class EndJob:
    """Release all agents. The last action."""

    code: int


Action: TypeAlias = StartRound | CountHosts | AwaitHosts | EndJob


@dataclass
class JobState:
    """The state of a job.

    Attributes:
        rules: its fixed parameters.
        restart: number of restarts so far.
        left: number of restarts after failures that remain.
        code: the exit code of the last round.
        ended: ``EndJob`` was returned.
    """

    rules: JobRules
    restart: int = 0
    left: int = field(init=False)
    code: int = 0
    ended: bool = False

    def __post_init__(self) -> None:
        self.left = self.rules.restarts


def step(state: JobState, event: Event) -> Action | None:
    """Process one event. Return the next action; None after the end."""
    if state.ended:
        return None
    match event:
        case JobStarted():
            return StartRound(0, state.left)
        case RoundEnded():
            state.code = event.code
            return CountHosts() if _goes_on(state, event) else _end(state)
        case HostsCounted(count, may_grow):
            if count >= max(1, state.rules.least):
                state.restart += 1
                return StartRound(state.restart, state.left)
            return AwaitHosts(count) if may_grow else _end(state)
        case HostsMissing():
            return _end(state)


def _goes_on(state: JobState, event: RoundEnded) -> bool:
    rules = state.rules
    if event.failed and event.hosts_lost and rules.elastic:
        return True  # a lost host uses up no restart
    # If nothing replaces a lost host, a restart would lack its ranks.
    if event.failed and state.left > 0 and (not event.hosts_lost or rules.elastic or rules.replaces):
        state.left -= 1
        return True
    # A round that was stopped for a new host uses up no restart.
    return event.joined


def _end(state: JobState) -> Action:
    state.ended = True
    return EndJob(state.code)
