"""The reaction to the loss of a worker: `Master.on_lost`.

The thread that drives the workers handles a loss when it needs the lost worker. It starts a replacement and restores
the kept tensors. Only then it raises `WorkerReplaced`, so that the interrupted step does not continue with tensors of
two different points in time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch

from allranks._base.errors import (
    AllranksError,
    ConfigError,
    JoinError,
    RemoteError,
    TimeoutError,
    UsageError,
    WorkerLost,
    WorkerReplaced,
)
from allranks.remote.master.connections import Connections
from allranks.remote.master.device_table import DeviceTable
from allranks.remote.master.snapshots import Kept, SnapshotLost
from allranks.remote.protocol.wire import LINKING

if TYPE_CHECKING:
    from allranks.remote.bootstrap.endpoint import WorkerConnection

__all__ = ["WorkerLossPolicy", "OnLost"]

OnLost = Literal["raise", "respawn"] | Callable[[int, int], None]

_MAX_ATTEMPTS = 5  # attempts to replace lost workers; one fails if another worker dies during it


class WorkerLossPolicy:
    """The policy for lost workers, and its execution.

    Attributes:
        kept: The kept objects, or None.
        action: The policy, as passed to `Master.on_lost`.
    """

    def __init__(
        self, connections: Connections, devices: DeviceTable, admit: Callable[[WorkerConnection], None]
    ) -> None:
        self.kept: Kept | None = None
        self.action: OnLost = "raise"
        self._connections = connections
        self._devices = devices
        self._admit = admit

    def set_action(self, action: OnLost) -> None:
        """Set the policy.

        Raises:
            UsageError: The action is unknown.
        """
        if action not in ("raise", "respawn") and not callable(action):
            raise UsageError(
                f"on_lost: expected 'raise', 'respawn' or a function of a rank and a snapshot number, not {action!r}"
            )
        self.action = action
        self._connections.recover = None if action == "raise" else self.recover

    def recover(self) -> WorkerLost | None:
        """Replace lost workers. Return the exception to raise, or None if no worker is lost.

        Raises:
            WorkerLost: The workers could not be replaced, or the kept tensors are lost.
        """
        connections = self._connections
        lost = {**connections.unrecovered, **connections.lost}
        if not lost or connections.closed:
            return None
        # Until the end of the restoration, other threads must not use the new workers, which lack the kept tensors.
        connections.unrecovered = lost
        # The restoration sends commands that a captured step must not contain.
        recorder, connections.recorder = connections.recorder, None
        try:
            with torch.no_grad():
                number = self._replace(lost)
        finally:
            connections.recorder = recorder
        # Not in the `finally`: if the replacement fails, the next use of these workers tries again.
        connections.unrecovered = {}
        if callable(self.action):
            for rank in sorted(lost):
                self.action(rank, number)
        rank = min(lost)
        why = lost[rank].partition("\n")[0]
        kept = f"the kept objects have the state of snapshot {number}" if number else "no objects were kept"
        return WorkerReplaced(f"{why}\n  A new worker has replaced it, and {kept}.", rank, number)

    def _replace(self, lost: dict[int, str]) -> int:
        connections, attempts = self._connections, 0
        while True:
            attempts += 1
            try:
                for rank in sorted(connections.lost):
                    self._admit(connections.workers.respawn(rank))
                number = self.restore()
            except SnapshotLost as nothing:
                # All workers are running, and nothing can be restored, so later uses must not try again.
                connections.unrecovered = {}
                raise WorkerLost(f"{next(iter(lost.values())).partition(chr(10))[0]}\n  {nothing}", min(lost)) from None
            except (WorkerLost, RemoteError, ConfigError, JoinError, TimeoutError, UsageError) as error:
                if attempts == _MAX_ATTEMPTS or not _is_retryable(error):
                    raise WorkerLost(_replacement_failed_text(lost, attempts, error), min(lost)) from error
            else:
                if not connections.lost:  # else a worker has died after its last command
                    return number
            lost.update(connections.lost)

    def restore(self) -> int:
        """Restore the kept objects after lost workers have been replaced. Return the snapshot's number, or 0."""
        self._devices.restore_groups()
        return self.kept.restore() if self.kept is not None else 0


def _is_retryable(error: AllranksError) -> bool:
    """Return whether a retry can succeed: probably another worker has died since the last attempt."""
    if isinstance(error, RemoteError):
        # A worker reports these operations as failed if the other end of a link has died.
        return error.operation in ("shelter", LINKING)
    return isinstance(error, WorkerLost | ConfigError)  # ConfigError: the new worker has exited during its start


def _replacement_failed_text(lost: dict[int, str], attempts: int, error: AllranksError) -> str:
    rank = min(lost)
    why = lost[rank].partition("\n")[0]
    times = f"{attempts} attempts" if attempts > 1 else "1 attempt"
    return f"{why}\n  It could not be replaced after {times}: {error}"
