"""The interface of what runs the ranks of a round."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Protocol

from allranks.launch.spec.events import Event, RestartRank

__all__ = ["Agents"]


class Agents(Protocol):
    """Runs ranks, reports what happens to them, and executes commands.

    ``ranks/agent.Agent`` runs the ranks of this host. ``agents/agent_pool.AgentPool`` controls the agents of several
    hosts. The simulation of the tests is a third one.

    Attributes:
        wake: A byte written to this descriptor makes `poll` return.
    """

    wake: int

    @property
    def running(self) -> list[int]:
        """The ranks that have started and not exited, as far as is known."""
        ...

    @property
    def output_open(self) -> bool:
        """Whether a process may still write output: a rank, or a child process that has outlived its rank."""
        ...

    def poll(self, timeout_s: float | None) -> list[Event]:
        """Wait for events, for `wake`, for a watched descriptor, or for the time to pass."""
        ...

    def watch(self, fd: int) -> None:
        """Make `poll` return also if this descriptor is readable."""
        ...

    def unwatch(self, fd: int) -> None:
        """Undo `watch`."""
        ...

    def watch_writable(self, fds: Set[int]) -> None:
        """Make `poll` return also if one of these descriptors is writable, and none of the last call."""
        ...

    def read_output(self, on: bool) -> None:
        """Read the output of the ranks, or leave it in their pipes until the ranks wait."""
        ...

    def signal(self, number: int, ranks: list[int], alone: bool = False) -> None:
        """Send a signal to the process groups of these ranks; to their processes only if ``alone``."""
        ...

    def dump(self, ranks: list[int]) -> None:
        """Request the stacks of ranks. They arrive as ``Stacks``."""
        ...

    def inspect(self, ranks: list[int], recent: int = 0) -> None:
        """Request the state of ranks, with their last ``recent`` calls. It arrives as ``RankState``."""
        ...

    def restart(self, wanted: RestartRank) -> None:
        """Start a rank again. ``RankRestarted`` or the loss of the rank follows."""
        ...

    def start_elsewhere(self, lost: str, spare: str, starts: Mapping[int, int]) -> None:
        """Start ranks of a lost host on a spare one."""
        ...

    def answer(self, answer: bytes) -> None:
        """Answer the hosts that have requested the state of the ranks."""
        ...

    def resize(self, rows: int, columns: int) -> None:
        """Set the size of the terminals of all ranks."""
        ...

    def finish(self, patience_s: float) -> list[Event]:
        """Kill the rest of the ranks, and return the last events."""
        ...
