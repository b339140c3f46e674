"""`Master`: the interface of a program to its workers.

It has four parts, which other code calls directly:

- `connections`: commands and answers.
- `operators`: the calls with templates on workers.
- `transfers`: tensors that move.
- `devices`: the workers and groups that devices stand for.

This module contains the operations that concern several of them.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allranks._base.errors import UsageError, WorkerLost, rank_list, spans
from allranks._base.forks import follow
from allranks._trace import memory
from allranks.remote.master.connections import Connections, exclusive, has_ended
from allranks.remote.master.device_table import DeviceTable
from allranks.remote.master.functions import FutureWaiter, RemoteFunction
from allranks.remote.master.groups import Group
from allranks.remote.master.operator_cache import OperatorCache
from allranks.remote.master.snapshots import Kept, SnapshotLost
from allranks.remote.master.transfers import Transfers
from allranks.remote.master.worker_losses import OnLost, WorkerLossPolicy

if TYPE_CHECKING:
    from allranks.remote.bootstrap.endpoint import WorkerConnection
    from allranks.remote.bootstrap.workers import Workers
    from allranks.remote.torch_device.handle import DeviceTarget

__all__ = ["Master"]

_OFFERED = ("closed", "group", "keep", "lost", "on_lost", "ranks", "remote", "respawn", "shutdown", "synchronize")


class Master:
    """The interface of the process that drives the workers."""

    def __init__(self, workers: Workers, timeout_s: float) -> None:
        self.connections = Connections(workers, timeout_s, self._lose)
        self.devices = DeviceTable(self.connections, self)
        self.operators = OperatorCache(self.connections, self.devices)
        self.transfers = Transfers(self.connections, self.devices, self.operators)
        self.watch = FutureWaiter().watch
        self._losses = WorkerLossPolicy(self.connections, self.devices, self._admit)
        self._recorded_in: Path | None = None
        # Creates the record now, so that the master's waits are recorded from here on. If a file is requested, workers
        # record, too.
        memory.recorder(0, len(workers.connections) + 1, socket.gethostname())
        memory.followers.append(self.record)
        for worker in workers.connections:
            self._admit(worker)
        # Only after all workers are admitted, because `mark_lost` looks up the connection by rank.
        workers.on_lost = self.connections.mark_lost
        follow(self)

    @exclusive
    def group(self, ranks: Sequence[int]) -> Group:
        """Return one handle for several workers.

        Args:
            ranks: The ranks of the workers, each once.

        Raises:
            UsageError: A worker does not exist, or too many groups are in use.
            WorkerLost: One of them is lost.
        """
        self.connections.check_open()
        wanted, there = tuple(ranks), self.connections.by_rank
        if not wanted or len(set(wanted)) < len(wanted) or not set(wanted) <= set(there):
            raise UsageError(f"group: expected distinct ranks of workers, 1 to {max(there)}, not {list(ranks)}")
        place = self.devices.group(wanted)
        self.connections.check(place)
        self.transfers.leave_ended()
        # A loop may name the group only by its device, which does not keep it alive (docs/decisions/065).
        self.devices.keep(place)
        return Group(place)

    def remote(self, function: Callable[..., Any], on: Any = None) -> RemoteFunction:
        """Return a function that runs on workers. See `RemoteFunction`.

        Args:
            function: A function. cloudpickle pickles it and the objects that it refers to.
            on: ``"worker:2"``, 2, a group, or None: the place of its arguments.
        """
        return RemoteFunction(self, function, on)

    def synchronize(self, place: DeviceTarget | None = None) -> None:
        """Wait until all queued commands are done.

        Raises:
            RemoteError: An operation has failed that has not been reported yet.
        """
        connections = self.connections
        connections.refuse_recording("the step waits for the workers")
        connections.check_open()
        if place is None:
            place = self.devices.everyone()
        connections.check(place)
        # `everyone` omits lost workers, but with `on_lost` this call must replace them.
        if connections.recover is not None:
            for rank in connections.by_rank:
                connections.check_worker(rank)
        self.transfers.leave_ended()
        connections.synchronize(place)

    def respawn(self, rank: int, force: bool = False) -> None:
        """Start a new worker in place of a lost one.

        The tensors of the old worker are lost: its handles, and those of its groups, continue to raise `WorkerLost`.
        Kept objects (`keep`) are restored if no other worker is lost.

        Args:
            rank: The rank of the worker.
            force: Kill the worker if it is still running.

        Raises:
            UsageError: The worker does not exist or is still running, or no launcher is available to start another one.
            ConfigError: The new worker exited during its start.
            JoinError: The new worker did not connect in time.
            WorkerLost: The new worker is running, and the kept objects are lost.

        Cost:
            0.03 s, because it is forked from a process that has imported torch. An import of torch with ``allranks run
            --start spawn``, or if that process was killed.
        """
        connections = self.connections
        connections.check_open()
        if rank not in connections.by_rank:
            raise UsageError(f"respawn: worker {rank} does not exist; expected 1 to {max(connections.by_rank)}")
        # The process may have died without a report so far, so `has_ended` waits for up to 0.2 s.
        if rank not in self.lost and not force and not has_ended(connections.by_rank[rank].socket):
            raise UsageError(
                f"respawn: worker {rank} is running, and its tensors would be lost.\n"
                f"  To kill it, call respawn({rank}, force=True)."
            )
        if rank not in self.lost:
            # Before the process is killed, so that its handles report this reason and not signal 9.
            connections.mark_lost(rank, "respawn() replaces it")
        # Held throughout: commands of other threads would see half of the replacement (docs/decisions/131).
        with connections.lock, connections.without_recovery():
            self._admit(connections.workers.respawn(rank))
            if self._losses.kept is not None and not self.lost:
                try:
                    self._losses.restore()
                except SnapshotLost as nothing:
                    raise WorkerLost(str(nothing), rank) from None

    def on_lost(self, action: OnLost) -> None:
        """Set the reaction to the loss of a worker.

        Args:
            action: ``"raise"``, the default: raise `WorkerLost`, and the program calls `respawn`. ``"respawn"``: when
                the program next needs the worker, the master starts another in its place, restores kept objects
                (`keep`) on all workers, and raises `WorkerReplaced`. A function: the same, but the master calls it
                before it raises, with the rank and the number of the snapshot, 0 for none.

        Raises:
            UsageError: The action is unknown.
        """
        self._losses.set_action(action)

    @exclusive
    def keep(self, *things: Any) -> Kept:
        """Mark tensors that must outlive their workers. See `allranks.keep`."""
        self.connections.check_open()
        if (before := self._losses.kept) is not None and not before.closed:
            raise UsageError(
                "keep: other objects are already kept.\n"
                "  Pass all objects in one call, or call close() on the result of the previous call first."
            )
        made = self._losses.kept = Kept(things, self.connections, self.devices, self.transfers)
        return made

    @property
    def ranks(self) -> list[int]:
        """The ranks of the workers that are not lost."""
        return self.connections.ranks

    @property
    def lost(self) -> dict[int, str]:
        """The reasons why workers are lost, by rank."""
        return self.connections.lost

    @property
    def closed(self) -> bool:
        """Whether the workers have been shut down."""
        return self.connections.closed

    @exclusive
    def follow_flags(self) -> None:
        """Send the workers the flags of torch that have changed here.

        Calls are learned again, because flags may decide the shape or dtype of a result.
        """
        if changed := self.connections.read_flags():
            self.devices.use_state(self.connections.state)
            for rank in self.ranks:
                self.operators.invoke(self.devices.worker(rank), "flags", 0, [], [changed])

    def record(self, folder: Path) -> Callable[[], None]:
        """Make the workers record their commands in files in a folder. Return a function that stops this.

        Raises:
            UsageError: A worker cannot create its file.
        """
        self._recorded_in = folder
        try:
            for rank in self.ranks:
                self.connections.request(self.devices.worker(rank), "record", folder=str(folder))
        except BaseException:  # also Ctrl-C: workers that already record must stop
            self._end_record()
            raise
        return self._end_record

    @exclusive
    def _end_record(self) -> None:
        self._recorded_in = None
        for rank in [] if self.closed else self.ranks:
            self.connections.command(self.devices.worker(rank), "record", folder="")

    def shutdown(self) -> None:
        """Terminate the workers when they have executed all queued commands. Idempotent.

        Raises:
            RemoteError: An operation has failed that has not been reported yet.
        """
        if self.closed:
            return
        try:
            # No tensor is used after the shutdown, so a loss needs no replacement.
            with self.connections.without_recovery():
                self.synchronize(self.devices.everyone())
        finally:
            self.close()

    def close(self) -> None:
        """Terminate the workers immediately."""
        if self.closed:
            return
        memory.followers.remove(self.record)
        # The outbox first: it writes to the sockets that `workers` closes.
        self.connections.close()
        self.transfers.close()
        self.connections.workers.close()
        self.devices.close()

    def abandon(self) -> None:
        """Mark the master as closed. Used in a forked child, because the workers belong to the parent."""
        # Takes no lock: a thread that does not exist in the child may hold it (`_base.forks`).
        self.connections.closed = True
        self.devices.abandon()

    def _admit(self, worker: WorkerConnection) -> None:
        """Add a worker: one of the first workers, or the replacement of a lost one."""
        self.connections.admit(worker)
        # Before the first `invoke`, which would otherwise use a template that the new process does not have.
        self.operators.forget_worker(worker.rank)
        place = self.devices.admit(worker.rank)
        self.operators.invoke(place, "flags", 0, [], [self.connections.flags])
        self.connections.command(place, "seed", seed=self.connections.seed)
        if self._recorded_in is not None:
            self.connections.command(place, "record", folder=str(self._recorded_in))

    def _lose(self, rank: int, why: str) -> None:
        self.transfers.end(self.devices.mark_lost(rank, why))

    def __repr__(self) -> str:
        if self.closed:
            return "Master(shut down)"
        hosts: dict[str, list[int]] = {}
        for rank in self.ranks:
            hosts.setdefault(self.connections.by_rank[rank].host, []).append(rank)
        there = [
            f"{'worker' if len(ranks) == 1 else 'workers'} {spans(ranks, ', ')} on {host}"
            for host, ranks in hosts.items()
        ]
        gone = [f"{rank_list(sorted(self.lost))} lost"] if self.lost else []
        return f"Master({'; '.join(there + gone)})"

    def __dir__(self) -> list[str]:
        """The public attributes; the rest is internal to this package."""
        return sorted([*_OFFERED, *(each for each in object.__dir__(self) if each.startswith("_"))])

    def __enter__(self) -> Master:
        return self

    def __exit__(self, kind: Any, *exception: Any) -> None:
        if kind is None:
            self.shutdown()
        else:
            self.close()
