"""`keep`: tensors on workers that are restored when another worker has replaced a lost one.

A snapshot is a command to each worker at the same point of the program. Each worker copies its kept tensors, and sends
the copy to its backup worker. The snapshot is complete when all backup workers have answered. The previous one is
dropped only then, so a complete snapshot exists at any time. At most one snapshot is in progress.

A restoration uses the newest snapshot of which every worker's part is on some running worker. All workers return to
it, including those that were not lost. The user guide is docs/master_worker.md.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from allranks._base.errors import RemoteError, UsageError, WorkerLost
from allranks.remote.master.connections import Connections, exclusive
from allranks.remote.master.device_table import DeviceTable
from allranks.remote.master.transfers import Transfers
from allranks.remote.protocol.wire import Command
from allranks.remote.torch_device.handle import DeviceTarget, Handle, make

__all__ = ["Kept", "SnapshotLost"]

_PLAIN = (int, float, complex, str, bytes, bool, type(None))


class SnapshotLost(WorkerLost):
    """A worker and its backup worker are lost, and the kept tensors with them."""


class _SnapshotTensor(NamedTuple):
    """A tensor on workers, as a snapshot contains it."""

    handle: Handle
    like: Handle  # a second handle for the same data: the state of the handle at the time of the snapshot


class _SnapshotRecord:
    """The master's record of one snapshot.

    Attributes:
        number: Its number, from 1 on.
        tensors: The kept tensors on workers.
        answers: The outstanding answers: the number of the request, and the worker.
    """

    def __init__(self, number: int, objects: Iterable[Any]) -> None:
        self.number = number
        self.tensors: list[_SnapshotTensor] = []
        self.answers: list[tuple[int, int]] = []
        self._master_copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # tensors of the master, and their copies
        self._grads: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._containers: list[tuple[Any, Any]] = []
        self._objects: list[tuple[Any, Any]] = []
        self._seen: set[int] = set()
        self._root_objects: list[Any] = list(objects)  # keeps the objects alive, so that no id in `_seen` is reused
        for each in self._root_objects:
            self._add(each, strict=True)

    def _add(self, obj: Any, strict: bool = False) -> None:
        if id(obj) in self._seen or isinstance(obj, _PLAIN):
            return
        self._seen.add(id(obj))
        if isinstance(obj, torch.Tensor):
            self._add_tensor(obj)
        elif isinstance(obj, torch.nn.Module):
            for module in obj.modules():
                self._add(module._parameters)
                self._add(module._buffers)
        elif isinstance(obj, torch.optim.Optimizer):
            self._add(obj.state)
            self._add(obj.param_groups)
        elif isinstance(obj, dict):
            self._containers.append((obj, dict(obj)))
            for each in list(obj.values()):
                self._add(each)
            for key in obj:
                if isinstance(key, torch.Tensor):  # as in `Optimizer.state`
                    self._add(key)
        elif isinstance(obj, list):
            self._containers.append((obj, list(obj)))
            for each in list(obj):
                self._add(each)
        elif isinstance(obj, tuple):
            for each in obj:
                self._add(each)
        elif strict:
            if not hasattr(obj, "state_dict") or not hasattr(obj, "load_state_dict"):
                raise UsageError(f"keep: expected modules, optimizers, tensors and dicts, not {type(obj).__name__}")
            # A state_dict may refer to containers of the object, which later steps change.
            self._objects.append((obj, copy.deepcopy(obj.state_dict())))

    def _add_tensor(self, tensor: torch.Tensor) -> None:
        if tensor.is_leaf:  # torch warns if `grad` of another tensor is read
            self._grads.append((tensor, tensor.grad))
            if tensor.grad is not None:
                self._add(tensor.grad)
        if not isinstance(tensor, Handle):
            self._master_copies.append((tensor, tensor.detach().clone()))
            return
        if tensor._sig.bits or tensor.is_inference():
            raise UsageError(
                "keep: a conjugated or negated view, or an inference tensor, cannot be kept.\n  Clone the tensor."
            )
        self.tensors.append(_SnapshotTensor(tensor, make(tensor._place, tensor._sig, tensor._ref, tensor._off)))

    def ranks(self) -> list[int]:
        """Return the workers that have kept tensors."""
        return sorted({rank for each in self.tensors for rank in each.like._place.ranks})

    def of(self, rank: int) -> list[_SnapshotTensor]:
        """Return the kept tensors on one worker."""
        return [each for each in self.tensors if rank in each.like._place.ranks]

    def restore(self) -> None:
        """Restore the master's objects. The data of the handles has already been restored on the workers."""
        for container, saved in self._containers:
            _refill(container, saved)
        with torch.no_grad():
            for tensor, _ in self._grads:
                # Removed here and set at the end: torch accepts a gradient only if its shape and device match the
                # tensor's.
                tensor.grad = None
            for handle, like in self.tensors:
                if handle._ref is not like._ref or handle._sig is not like._sig or handle._off != like._off:
                    handle.data = like
                else:
                    torch.autograd.graph.increment_version(handle)  # a backward of an earlier graph then fails
            for tensor, saved in self._master_copies:
                if tensor.shape == saved.shape:
                    tensor.copy_(saved)
                else:
                    tensor.data = saved.clone()  # a later restoration may need `was` again
            for tensor, grad in self._grads:
                tensor.grad = grad
        for obj, saved in self._objects:
            # A copy, because the object may adopt the containers, and a later restoration may need them again.
            obj.load_state_dict(copy.deepcopy(saved))


def _refill(container: Any, saved: Any) -> None:
    """Restore the items of a dict or list, if they differ from the recorded ones."""
    if isinstance(container, dict):
        if len(container) != len(saved) or any(
            current is not key or container[current] is not saved[key]
            for current, key in zip(container, saved, strict=True)
        ):
            container.clear()
            container.update(saved)
    elif len(container) != len(saved) or any(
        current is not recorded for current, recorded in zip(container, saved, strict=True)
    ):
        container[:] = saved


class Kept:
    """The objects that `keep` has received. `refresh` at the end of a step makes a snapshot of them.

    Attributes:
        snapshot: The number of the last snapshot that was started or restored; 0 for none.
    """

    def __init__(
        self, objects: Sequence[Any], connections: Connections, devices: DeviceTable, transfers: Transfers
    ) -> None:
        self.connections = connections
        self.snapshot = 0
        self.closed = False
        self._kept_objects = tuple(objects)
        self._devices = devices
        self._transfers = transfers
        self._last_number = 0
        self._complete: _SnapshotRecord | None = None
        self._in_progress: _SnapshotRecord | None = None
        # Snapshots of a single worker, which the master stores itself, by number.
        self._master_copies: dict[int, tuple[Any, list[bytes]]] = {}
        _SnapshotRecord(0, objects)  # raises if an object cannot be kept

    @exclusive
    def refresh(self) -> int:
        """Make a snapshot of all kept objects at this point of the program, and return its number.

        Workers copy and send when they reach the command. The call waits only for the previous snapshot, if that is not
        complete yet. Gradients are part of the tensors, and the state of each worker's random generator is part of the
        worker's snapshot.

        Raises:
            WorkerReplaced: A worker was lost, and the state is that of the previous snapshot (`Master.on_lost`).
            WorkerLost: A worker is lost.
            RemoteError: A kept tensor is the result of a failed operation. This snapshot or the previous one is
                dropped; the last complete one remains.
            UsageError: `close` was called.

        Cost:
            One command, and one per transfer, for each worker. A worker copies its kept tensors twice: in its memory
            and to its backup worker. The memory of the workers then contains the kept bytes four times: two snapshots,
            with two copies of each.
        """
        connections = self.connections
        if self.closed:
            raise UsageError("refresh: close() has been called on these kept objects.\n  Call keep() again.")
        connections.refuse_recording("the step makes a snapshot")
        connections.check_open()
        # A known loss is handled first, so that no snapshot is started that cannot become complete.
        for rank in connections.by_rank:
            connections.check_worker(rank)
        self._finish()
        self._last_number += 1
        record = _SnapshotRecord(self._last_number, self._kept_objects)
        for each in record.tensors:
            connections.check(each.like._place)
        # Before the commands are queued: if a worker is lost while they are, `restore` checks this snapshot, too.
        self._in_progress, self.snapshot = record, record.number
        complete = self._complete.number if self._complete is not None else 0
        ranks = record.ranks()
        for rank in ranks:
            ids = [each.like._ref.id for each in record.of(rank)]
            connections.command(
                self._devices.worker(rank), "snapshot", number=record.number, ids=ids, complete=complete
            )
        if len(connections.by_rank) == 1:
            record.answers = [(self._send_command(rank, "give", number=record.number, begin=0), rank) for rank in ranks]
            return record.number
        pairs = [(rank, self._backup_worker(rank)) for rank in ranks]
        # Pairs without a common worker first, because each transfer waits for the previous transfers of its two
        # workers.
        for rank, backup in sorted(pairs, key=lambda pair: pair[0] % 2):
            record.answers.append((self._send(rank, rank, backup, record.number, complete), backup))
        return record.number

    def close(self) -> None:
        """Stop keeping. The workers free the memory of the snapshots."""
        if self.closed:
            return
        self.closed = True
        self._complete = self._in_progress = None
        self._master_copies.clear()
        if not self.connections.closed:
            for rank in self.connections.ranks:
                self.connections.command(self._devices.worker(rank), "discard")

    @exclusive
    def restore(self) -> int:
        """Restore the newest snapshot that is complete on the workers, and return its number; 0 if none was started.

        Raises:
            SnapshotLost: No worker has a part of the snapshot.
            WorkerLost: A worker has died during the restoration. The caller can retry after it has been replaced.
        """
        if self.closed or (self._complete is None and self._in_progress is None):
            return 0
        self._transfers.leave_ended()
        holdings = {
            # Workers answer in the order of commands, so all queued snapshots have been made or have failed by then.
            rank: {(owner, number) for owner, number in self._request(rank, "holdings")}
            for rank in self.connections.by_rank
        }
        self._store_arrived_answers()
        # The newer one first: all of its parts may have arrived, although the answers have not been read.
        records = [each for each in (self._in_progress, self._complete) if each is not None]
        record = next((each for each in records if self._is_complete(each, holdings)), None)
        for each in records:
            for number, rank in each.answers:
                self.connections.take_answer(number, rank)  # no wait will read it
            each.answers.clear()
        if record is None:
            self._complete = self._in_progress = None
            raise SnapshotLost(self._loss_message(records[-1], holdings), 0)
        self._send_missing_parts(record, holdings)
        self._restore_tensors(record)
        # After the steps that may raise WorkerLost, so that a retry chooses among the same records. Before
        # `_copy_to_backups`, because the tensors are restored even if a backup worker dies during the copy.
        self._complete, self._in_progress, self.snapshot = record, None, record.number
        self._copy_to_backups(record, holdings)
        return record.number

    # Steps of a snapshot.

    def _finish(self) -> None:
        """Wait until the snapshot in progress is complete.

        Raises:
            RemoteError: A kept tensor is the result of a failed operation, or a worker has no memory for it.
        """
        record = self._in_progress
        if record is None:
            return
        error: RemoteError | None = None
        # An answered request is removed, so that a retry after an exception does not wait for it again.
        while record.answers:
            number, rank = record.answers[0]
            try:
                answer = self.connections.wait(number, rank, "keep")
                if answer is not None:
                    self._master_copies[record.number] = (answer[0], self._fetch_rest(rank, record.number, answer))
            except RemoteError as failed:
                error = error or failed  # continues, so that no answer of this snapshot stays unread
            record.answers.pop(0)
        self._in_progress = None  # also after an error: the last complete snapshot remains
        if error is not None:
            raise error
        self._complete = record
        self._master_copies = {number: each for number, each in self._master_copies.items() if number == record.number}

    def _fetch_rest(self, rank: int, number: int, answer: Any) -> list[bytes]:
        layout, *parts = answer
        while (begin := sum(map(len, parts))) < layout[2]:
            parts.append(
                self.connections.wait(self._send_command(rank, "give", number=number, begin=begin), rank, "keep")[1]
            )
        return list(parts)

    def _store_arrived_answers(self) -> None:
        """Store the snapshot that a single worker sent before it was lost, if it is complete."""
        if self._in_progress is not None and len(self.connections.by_rank) == 1:
            for number, rank in self._in_progress.answers:
                answer = self.connections.take_answer(number, rank)
                if answer is not None and answer.result is not None and len(answer.result[1]) == answer.result[0][2]:
                    self._master_copies[self._in_progress.number] = (answer.result[0], [answer.result[1]])

    def _backup_worker(self, rank: int) -> int:
        """Return the backup worker: the next worker on another host, or else the next worker."""
        workers = self.connections.by_rank
        candidates = [each for each in sorted(workers) if each > rank] + [
            each for each in sorted(workers) if each < rank
        ]
        on_other_hosts = [each for each in candidates if workers[each].host != workers[rank].host]
        return (on_other_hosts or candidates)[0]

    def _send(self, owner: int, sender: int, receiver: int, number: int, complete: int) -> int:
        """Make a worker send a snapshot to another worker. Return the number of the answer."""
        pair = (min(sender, receiver), max(sender, receiver))
        link = self._transfers.link(self._devices.worker(pair[0]), *pair)
        to, of = int(receiver > sender), int(sender > receiver)
        self.connections.command(self._devices.worker(sender), "hand", owner=owner, number=number, link=link, peer=to)
        return self._send_command(
            receiver, "shelter", owner=owner, number=number, link=link, peer=of, complete=complete
        )

    def _send_command(self, rank: int, name: str, /, **arguments: Any) -> int:
        number = self.connections.next_number()
        self.connections.put(self._devices.worker(rank), Command(name, number, arguments))
        return number

    def _request(self, rank: int, name: str, /, **arguments: Any) -> Any:
        return self.connections.request(self._devices.worker(rank), name, **arguments)

    # Steps of a restoration.

    def _is_complete(self, record: _SnapshotRecord, holdings: dict[int, set[tuple[int, int]]]) -> bool:
        found = set().union(*holdings.values())
        return all((rank, record.number) in found or record.number in self._master_copies for rank in record.ranks())

    def _loss_message(self, record: _SnapshotRecord, holdings: dict[int, set[tuple[int, int]]]) -> str:
        if self.snapshot <= 1:
            return (
                "The kept objects are lost: the first snapshot was not complete, or a worker and its backup worker are"
                " both lost.\n  Call mw.synchronize() after refresh() to wait for a snapshot."
            )
        found = set().union(*holdings.values())
        lost_ranks = [rank for rank in record.ranks() if (rank, record.number) not in found]
        pairs = [f"worker {rank} and its backup worker {self._backup_worker(rank)}" for rank in lost_ranks]
        lost_workers = " and ".join(pairs) if len(self.connections.by_rank) > 1 else "the worker"
        return (
            f"The kept objects are lost with {lost_workers}. New workers have been started, without the tensors.\n"
            "  Load a checkpoint, and keep its tensors."
        )

    def _send_missing_parts(self, record: _SnapshotRecord, holdings: dict[int, set[tuple[int, int]]]) -> None:
        """Send new workers their parts."""
        answers = []
        for rank in record.ranks():
            if (rank, record.number) in holdings[rank]:
                continue
            if (found := self._master_copies.get(record.number)) is not None:
                layout, parts = found
                begin = 0
                for part in parts:
                    arguments = {"number": record.number, "layout": layout, "begin": begin}
                    self.connections.put(self._devices.worker(rank), Command("accept", 0, arguments), part)
                    begin += len(part)
                continue
            holder = next(each for each, snapshots in holdings.items() if (rank, record.number) in snapshots)
            answers.append((self._send(rank, holder, rank, record.number, 0), rank))
        self._wait_for(answers)

    def _restore_tensors(self, record: _SnapshotRecord) -> None:
        """Restore the tensors on the workers, and let the handles refer to them."""
        places: dict[DeviceTarget, DeviceTarget] = {}
        refs: dict[int, Any] = {}
        new: list[_SnapshotTensor] = []
        for handle, like in record.tensors:
            place = places.setdefault(like._place, self._devices.successor(like._place))
            ref = like._ref
            if place is not like._place:
                if id(ref) not in refs:
                    (refs[id(ref)],) = self.connections.outbox.reserve(place.target, 1)
                ref = refs[id(ref)]
            new.append(_SnapshotTensor(handle, like if ref is like._ref else make(place, like._sig, ref, like._off)))
        answers = []
        for rank in record.ranks():
            both = [(old, now) for old, now in zip(record.tensors, new, strict=True) if rank in old.like._place.ranks]
            ids, outputs = [old.like._ref.id for old, _ in both], [now.like._ref.id for _, now in both]
            answers.append((self._send_command(rank, "restore", number=record.number, ids=ids, outputs=outputs), rank))
        self._wait_for(answers)
        record.tensors = new
        record.restore()

    def _copy_to_backups(self, record: _SnapshotRecord, holdings: dict[int, set[tuple[int, int]]]) -> None:
        """Send the parts to backup workers that do not have them, because they are new."""
        if len(self.connections.by_rank) == 1:
            return
        answers = []
        # Pairs without a common worker first, as in `refresh`.
        for rank in sorted(record.ranks(), key=lambda rank: rank % 2):
            backup = self._backup_worker(rank)
            if (rank, record.number) not in holdings[backup]:
                answers.append((self._send(rank, rank, backup, record.number, record.number), backup))
        self._wait_for(answers)

    def _wait_for(self, answers: list[tuple[int, int]]) -> None:
        for number, rank in answers:
            self.connections.wait(number, rank, "keep")
