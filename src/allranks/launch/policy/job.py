"""The rounds of a job as a pure state machine: whether it starts again after a round, and on how many hosts.

As ``round``, it has no clock and no process. ``jobs/local`` and ``jobs/spread`` perform its actions.
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
    """What is fixed for a job.

    Attributes:
        restarts: how often a round that failed is followed by another.
        least: the number of hosts without which no round starts.
        elastic: hosts may be lost, and may come, as long as there are ``least``.
    """

    restarts: int = 0
    least: int = 1
    elastic: bool = False

    def may_go_on_without(self, gone: int, hosts: int) -> bool:
        """Whether a round may start although some of the hosts are gone or unable."""
        return self.elastic and 0 < gone <= hosts - self.least


@dataclass(frozen=True)
class JobStarted:
    """The first event: the hosts are there."""


@dataclass(frozen=True)
class RoundEnded:
    """A round ended.

    Attributes:
        code: its exit code.
        failed: as in ``Round``.
        joined: as in ``Round``.
        hosts_lost: how many hosts were lost in it.
    """

    code: int
    failed: bool
    joined: bool = False
    hosts_lost: int = 0


@dataclass(frozen=True)
class HostsCounted:
    """Answers ``CountHosts`` and ``AwaitHosts``. ``may_grow``: lost hosts may come back, or others may come."""

    count: int
    may_grow: bool = False


@dataclass(frozen=True)
class HostsMissing:
    """``AwaitHosts`` has failed: too few hosts came in time."""


Event: TypeAlias = JobStarted | RoundEnded | HostsCounted | HostsMissing


@dataclass(frozen=True)
class StartRound:
    """Start the ranks. ``restart``: how often the job has been started again; ``left``: how often it still may be."""

    restart: int
    left: int


@dataclass(frozen=True)
class CountHosts:
    """Admit the hosts that came. Answered by ``HostsCounted``."""


@dataclass(frozen=True)
class AwaitHosts:
    """Too few hosts are left. Wait for others. Answered by ``HostsCounted`` or ``HostsMissing``."""

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
        rules: what is fixed.
        restart: how often it has been started again.
        left: how many restarts after failures are left.
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
    """Takes one event. Returns what is to be done; None after the end."""
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
        return True  # a lost host costs no restart
    if event.failed and state.left > 0 and (not event.hosts_lost or rules.elastic):
        state.left -= 1
        return True
    return event.joined


def _end(state: JobState) -> Action:
    state.ended = True
    return EndJob(state.code)
