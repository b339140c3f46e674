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

__all__ = ["Kept", "NothingLeft"]

_PLAIN = (int, float, complex, str, bytes, bool, type(None))


class NothingLeft(WorkerLost):
    """A worker and its backup worker are lost, and the kept tensors with them."""


class _SnapshotTensor(NamedTuple):
    """A tensor on workers, as a snapshot contains it."""

    handle: Handle
    like: Handle  # a second handle for the same data: the state of the handle at the time of the snapshot


class _Record:
    """The master's record of one snapshot.

    Attributes:
        number: Its number, from 1 on.
        tensors: The kept tensors on workers.
        answers: The outstanding answers: the number of the request, and the worker.
    """

    def __init__(self, number: int, things: Iterable[Any]) -> None:
        self.number = number
        self.tensors: list[_SnapshotTensor] = []
        self.answers: list[tuple[int, int]] = []
        self._here: list[tuple[torch.Tensor, torch.Tensor]] = []  # tensors of the master, and their copies
        self._grads: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._containers: list[tuple[Any, Any]] = []
        self._objects: list[tuple[Any, Any]] = []
        self._seen: set[int] = set()
        self._grown: list[Any] = list(things)  # keeps the objects alive, so that no id in `_seen` is reused
        for each in self._grown:
            self._add(each, strict=True)

    def _add(self, thing: Any, strict: bool = False) -> None:
        if id(thing) in self._seen or isinstance(thing, _PLAIN):
            return
        self._seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            self._add_tensor(thing)
        elif isinstance(thing, torch.nn.Module):
            for module in thing.modules():
                self._add(module._parameters)
                self._add(module._buffers)
        elif isinstance(thing, torch.optim.Optimizer):
            self._add(thing.state)
            self._add(thing.param_groups)
        elif isinstance(thing, dict):
            self._containers.append((thing, dict(thing)))
            for each in list(thing.values()):
                self._add(each)
            for key in thing:
                if isinstance(key, torch.Tensor):  # as in `Optimizer.state`
                    self._add(key)
        elif isinstance(thing, list):
            self._containers.append((thing, list(thing)))
            for each in list(thing):
                self._add(each)
        elif isinstance(thing, tuple):
            for each in thing:
                self._add(each)
        elif strict:
            if not hasattr(thing, "state_dict") or not hasattr(thing, "load_state_dict"):
                raise UsageError(f"keep: expected modules, optimizers, tensors and dicts, not {type(thing).__name__}")
            # A state_dict may refer to containers of the object, which later steps change.
            self._objects.append((thing, copy.deepcopy(thing.state_dict())))

    def _add_tensor(self, tensor: torch.Tensor) -> None:
        if tensor.is_leaf:  # torch warns if `grad` of another tensor is read
            self._grads.append((tensor, tensor.grad))
            if tensor.grad is not None:
                self._add(tensor.grad)
        if not isinstance(tensor, Handle):
            self._here.append((tensor, tensor.detach().clone()))
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
        for container, was in self._containers:
            _refill(container, was)
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
            for tensor, was in self._here:
                if tensor.shape == was.shape:
                    tensor.copy_(was)
                else:
                    tensor.data = was.clone()  # a later restoration may need `was` again
            for tensor, grad in self._grads:
                tensor.grad = grad
        for thing, was in self._objects:
            # A copy, because the object may adopt the containers, and a later restoration may need them again.
            thing.load_state_dict(copy.deepcopy(was))


def _refill(container: Any, was: Any) -> None:
    """Restore the items of a dict or list, if they differ from the recorded ones."""
    if isinstance(container, dict):
        if len(container) != len(was) or any(
            mine is not key or container[mine] is not was[key] for mine, key in zip(container, was, strict=True)
        ):
            container.clear()
            container.update(was)
    elif len(container) != len(was) or any(mine is not other for mine, other in zip(container, was, strict=True)):
        container[:] = was


class Kept:
    """The objects that `keep` has received. `refresh` at the end of a step makes a snapshot of them.

    Attributes:
        snapshot: The number of the last snapshot that was started or restored; 0 for none.
    """

    def __init__(
        self, things: Sequence[Any], connections: Connections, devices: DeviceTable, transfers: Transfers
    ) -> None:
        self.connections = connections
        self.snapshot = 0
        self.closed = False
        self._things = tuple(things)
        self._devices = devices
        self._transfers = transfers
        self._begun = 0
        self._complete: _Record | None = None
        self._running: _Record | None = None
        # Snapshots of a single worker, which the master stores itself, by number.
        self._here: dict[int, tuple[Any, list[bytes]]] = {}
        _Record(0, things)  # raises if an object cannot be kept

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
            raise UsageError("refresh: close() has been called on these kept objects")
        connections.refuse_recording("the step makes a snapshot")
        connections.check_open()
        # A known loss is handled first, so that no snapshot is started that cannot become complete.
        for rank in connections.by_rank:
            connections.check_worker(rank)
        self._finish()
        self._begun += 1
        record = _Record(self._begun, self._things)
        for each in record.tensors:
            connections.check(each.like._place)
        # Before the commands are queued: if a worker is lost while they are, `restore` checks this snapshot, too.
        self._running, self.snapshot = record, record.number
        complete = self._complete.number if self._complete is not None else 0
        ranks = record.ranks()
        for rank in ranks:
            ids = [each.like._ref.id for each in record.of(rank)]
            connections.command(
                self._devices.worker(rank), "snapshot", number=record.number, ids=ids, complete=complete
            )
        if len(connections.by_rank) == 1:
            record.answers = [(self._ask(rank, "give", number=record.number, begin=0), rank) for rank in ranks]
            return record.number
        pairs = [(rank, self._buddy(rank)) for rank in ranks]
        # Pairs without a common worker first, because each transfer waits for the previous transfers of its two
        # workers.
        for rank, buddy in sorted(pairs, key=lambda pair: pair[0] % 2):
            record.answers.append((self._send(rank, rank, buddy, record.number, complete), buddy))
        return record.number

    def close(self) -> None:
        """Stop keeping. The workers free the memory of the snapshots."""
        if self.closed:
            return
        self.closed = True
        self._complete = self._running = None
        self._here.clear()
        if not self.connections.closed:
            for rank in self.connections.ranks:
                self.connections.command(self._devices.worker(rank), "discard")

    @exclusive
    def restore(self) -> int:
        """Restore the newest snapshot that is complete on the workers, and return its number; 0 if none was started.

        Raises:
            NothingLeft: No worker has a part of the snapshot.
            WorkerLost: A worker has died during the restoration. The caller can retry after it has been replaced.
        """
        if self.closed or (self._complete is None and self._running is None):
            return 0
        self._transfers.leave_ended()
        holdings = {
            # Workers answer in the order of commands, so all queued snapshots have been made or have failed by then.
            rank: {(owner, number) for owner, number in self._request(rank, "holdings")}
            for rank in self.connections.by_rank
        }
        self._take_given()
        # The newer one first: all of its parts may have arrived, although the answers have not been read.
        records = [each for each in (self._running, self._complete) if each is not None]
        record = next((each for each in records if self._is_whole(each, holdings)), None)
        for each in records:
            for number, rank in each.answers:
                self.connections.take_answer(number, rank)  # no wait will read it
            each.answers.clear()
        if record is None:
            self._complete = self._running = None
            raise NothingLeft(self._what_is_left(records[-1], holdings), 0)
        self._return_parts(record, holdings)
        self._restore_tensors(record)
        # After the steps that may raise WorkerLost, so that a retry chooses among the same records. Before `_protect`,
        # because the tensors are restored even if a backup worker dies during the copy.
        self._complete, self._running, self.snapshot = record, None, record.number
        self._protect(record, holdings)
        return record.number

    # Steps of a snapshot.

    def _finish(self) -> None:
        """Wait until the snapshot in progress is complete.

        Raises:
            RemoteError: A kept tensor is the result of a failed operation, or a worker has no memory for it.
        """
        record = self._running
        if record is None:
            return
        error: RemoteError | None = None
        # An answered request is removed, so that a retry after an exception does not wait for it again.
        while record.answers:
            number, rank = record.answers[0]
            try:
                answer = self.connections.wait(number, rank, "keep")
                if answer is not None:
                    self._here[record.number] = (answer[0], self._fetch_rest(rank, record.number, answer))
            except RemoteError as failed:
                error = error or failed  # continues, so that no answer of this snapshot stays unread
            record.answers.pop(0)
        self._running = None  # also after an error: the last complete snapshot remains
        if error is not None:
            raise error
        self._complete = record
        self._here = {number: each for number, each in self._here.items() if number == record.number}

    def _fetch_rest(self, rank: int, number: int, answer: Any) -> list[bytes]:
        layout, *parts = answer
        while (begin := sum(map(len, parts))) < layout[2]:
            parts.append(self.connections.wait(self._ask(rank, "give", number=number, begin=begin), rank, "keep")[1])
        return list(parts)

    def _take_given(self) -> None:
        """Store the snapshot that a single worker sent before it was lost, if it is complete."""
        if self._running is not None and len(self.connections.by_rank) == 1:
            for number, rank in self._running.answers:
                answer = self.connections.take_answer(number, rank)
                if answer is not None and answer.result is not None and len(answer.result[1]) == answer.result[0][2]:
                    self._here[self._running.number] = (answer.result[0], [answer.result[1]])

    def _buddy(self, rank: int) -> int:
        """Return the backup worker: the next worker on another host, or else the next worker."""
        workers = self.connections.by_rank
        following = [each for each in sorted(workers) if each > rank] + [
            each for each in sorted(workers) if each < rank
        ]
        elsewhere = [each for each in following if workers[each].host != workers[rank].host]
        return (elsewhere or following)[0]

    def _send(self, owner: int, sender: int, receiver: int, number: int, complete: int) -> int:
        """Make a worker send a snapshot to another worker. Return the number of the answer."""
        pair = (min(sender, receiver), max(sender, receiver))
        link = self._transfers.link(self._devices.worker(pair[0]), *pair)
        to, of = int(receiver > sender), int(sender > receiver)
        self.connections.command(self._devices.worker(sender), "hand", owner=owner, number=number, link=link, peer=to)
        return self._ask(receiver, "shelter", owner=owner, number=number, link=link, peer=of, complete=complete)

    def _ask(self, rank: int, name: str, /, **arguments: Any) -> int:
        number = self.connections.next_number()
        self.connections.put(self._devices.worker(rank), Command(name, number, arguments))
        return number

    def _request(self, rank: int, name: str, /, **arguments: Any) -> Any:
        return self.connections.request(self._devices.worker(rank), name, **arguments)

    # Steps of a restoration.

    def _is_whole(self, record: _Record, holdings: dict[int, set[tuple[int, int]]]) -> bool:
        found = set().union(*holdings.values())
        return all((rank, record.number) in found or record.number in self._here for rank in record.ranks())

    def _what_is_left(self, record: _Record, holdings: dict[int, set[tuple[int, int]]]) -> str:
        if self.snapshot <= 1:
            return (
                "The kept objects are lost: the first snapshot was not complete, or a worker and its backup worker are"
                " both lost.\n  Call mw.synchronize() after refresh() to wait for a snapshot."
            )
        found = set().union(*holdings.values())
        gone = [rank for rank in record.ranks() if (rank, record.number) not in found]
        pairs = [f"worker {rank} and its backup worker {self._buddy(rank)}" for rank in gone]
        whose = " and ".join(pairs) if len(self.connections.by_rank) > 1 else "the worker"
        return (
            f"The kept objects are lost with {whose}. New workers have been started, without the tensors.\n"
            "  Load a checkpoint, and keep its tensors."
        )

    def _return_parts(self, record: _Record, holdings: dict[int, set[tuple[int, int]]]) -> None:
        """Send new workers their parts."""
        answers = []
        for rank in record.ranks():
            if (rank, record.number) in holdings[rank]:
                continue
            if (found := self._here.get(record.number)) is not None:
                layout, parts = found
                begin = 0
                for part in parts:
                    arguments = {"number": record.number, "layout": layout, "begin": begin}
                    self.connections.put(self._devices.worker(rank), Command("accept", 0, arguments), part)
                    begin += len(part)
                continue
            holder = next(each for each, has in holdings.items() if (rank, record.number) in has)
            answers.append((self._send(rank, holder, rank, record.number, 0), rank))
        self._wait_for(answers)

    def _restore_tensors(self, record: _Record) -> None:
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
            answers.append((self._ask(rank, "restore", number=record.number, ids=ids, outputs=outputs), rank))
        self._wait_for(answers)
        record.tensors = new
        record.restore()

    def _protect(self, record: _Record, holdings: dict[int, set[tuple[int, int]]]) -> None:
        """Send the parts to backup workers that do not have them, because they are new."""
        if len(self.connections.by_rank) == 1:
            return
        answers = []
        # Pairs without a common worker first, as in `refresh`.
        for rank in sorted(record.ranks(), key=lambda rank: rank % 2):
            buddy = self._buddy(rank)
            if (rank, record.number) not in holdings[buddy]:
                answers.append((self._send(rank, rank, buddy, record.number, record.number), buddy))
        self._wait_for(answers)

    def _wait_for(self, answers: list[tuple[int, int]]) -> None:
        for number, rank in answers:
            self.connections.wait(number, rank, "keep")
