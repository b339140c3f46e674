"""Tensors that move between the master and its workers, and among workers.

Small tensors travel on the connection of the master with the worker. Large tensors, and those between workers, travel
on native groups. A link is the number of such a group, which is created on first use.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from allranks._base.errors import AllranksError, PeerLostError, RemoteError
from allranks._call.bytes import in_huge_pages, view_of
from allranks.remote.master.connections import Connections, exclusive
from allranks.remote.master.device_table import DeviceTable, Link
from allranks.remote.master.operator_cache import OperatorCache
from allranks.remote.protocol import wire
from allranks.remote.protocol.signature import Signature, signature
from allranks.remote.protocol.wire import Command, Hold
from allranks.remote.torch_device.call_site import here
from allranks.remote.torch_device.dispatch import run
from allranks.remote.torch_device.handle import DeviceTarget, Handle, make, single

if TYPE_CHECKING:
    from allranks._group.process_group import ProcessGroup

__all__ = ["Transfers"]


class Transfers:
    """Moves tensors.

    Attributes:
        connections: The connections with the workers.
    """

    def __init__(self, connections: Connections, devices: DeviceTable, operators: OperatorCache) -> None:
        self.connections = connections
        self._devices = devices
        self._operators = operators
        self._groups: dict[int, ProcessGroup] = {}  # the groups that the master is in, by link
        self._turns: dict[int, threading.Lock] = {}  # held by the thread that uses this link
        self._made = 0

    # Between the master and workers.

    def upload(self, place: DeviceTarget, plain: torch.Tensor, non_blocking: bool = False) -> Handle:
        """Send a tensor of the master to a place. `non_blocking`: see `hold`."""
        connections = self.connections
        connections.refuse_recording("the step sends a tensor of the master to a worker")
        connections.check(place)
        wire.refuse_odd(plain, "the tensor")
        plain = plain.detach().resolve_conj().resolve_neg()  # only bytes are sent, without these bits
        dense = plain if _is_dense(plain.shape, plain.stride()) else plain.clone()
        sig = signature(dense.dtype, dense.shape, dense.stride())
        (ref,) = connections.outbox.reserve(place.target, 1)
        self.hold(place, ref, sig, dense, non_blocking)
        return make(place, sig, ref)

    def hold(
        self, place: DeviceTarget, ref: Any, sig: Signature, dense: torch.Tensor, non_blocking: bool = False
    ) -> None:
        """Send a tensor's data. Large data uses the native channel, which waits until the worker reaches the command.

        With `non_blocking` the data is copied into the worker's queue instead. The call then waits only if 1 GiB of
        such data is already queued for the worker. The worker may be busy, and the caller may change the tensor
        immediately.
        """
        non_blocking = non_blocking and dense.nbytes < wire.LARGEST
        # A link of the master has two ends, so a group receives large data as messages, too.
        if dense.nbytes > wire.LARGE and len(place.ranks) == 1 and not non_blocking:
            with self._turn(place) as link:
                self._start(place, link, "upload", outputs=[ref.id], meta=sig.meta, line=here(1))
                self._move(place, link, lambda group: group.send(_flat(dense), 1))
            return
        data = view_of(dense) if dense.numel() else None
        self.connections.put(place, Hold(ref.id, sig.meta), data, bulk=non_blocking)

    def item(self, x: Handle) -> Any:
        """Return the value of a tensor with one element."""
        self.connections.refuse_recording("the step fetches a value: .item(), or an if or while on a tensor")
        value = self.connections.request(single(x), "item", id=x._ref.id)
        return complex(*value) if isinstance(value, list) else value

    def fetch(self, x: Handle) -> torch.Tensor:
        """Return a tensor's data as a tensor of the master."""
        self.connections.refuse_recording("the step fetches a tensor")
        place = single(x)
        dense = _dense(x)
        sig = dense._sig
        nbytes = sig.shape.numel() * sig.dtype.itemsize
        if nbytes <= wire.SMALL:
            return _tensor(sig, self.connections.request(place, "fetch", id=dense._ref.id, link=0))
        # Page faults dominate the first write of new memory: 47 ms for 64 MB, 13 ms with huge pages (`in_huge_pages`).
        made = in_huge_pages(torch.empty_strided(sig.shape, sig.strides, dtype=sig.dtype, device="cpu"))
        with self._turn(place) as link:
            self._start(place, link, "fetch", id=dense._ref.id)
            self._move(place, link, lambda group: group.recv(_flat(made), 1))
        return made

    @contextlib.contextmanager
    def _turn(self, place: DeviceTarget) -> Iterator[int]:
        """Reserve the master's link with a worker for one thread: the data of two threads must not be mixed."""
        pair = (0, place.ranks[0])
        while True:
            link = self.link(place, *pair)
            with self._turns.setdefault(link, threading.Lock()):
                if place.links.get(pair) != link:
                    continue  # another thread has had an error on this link and dropped it
                if link not in self._groups:
                    with self._all_or_none(place, pair):
                        self._groups[link] = self._meet(_name(link, pair), pair)
                yield link
                return

    def _start(self, place: DeviceTarget, link: int, name: str, **arguments: Any) -> None:
        """Make a worker start to send or receive on a link after its answer.

        Raises:
            RemoteError: It cannot, and will not start.
        """
        (rank,) = place.ranks
        try:
            self.connections.request(place, name, link=link, **arguments)
        except AllranksError as error:
            # After a RemoteError the worker does not start, so the link stays usable. After other errors its state is
            # unknown.
            if not isinstance(error, RemoteError):
                self._unlink(place, (0, rank))
            raise
        except BaseException:  # Ctrl-C: the worker starts nevertheless, so the link cannot be reused
            self._unlink(place, (0, rank))
            raise

    def _move(self, place: DeviceTarget, link: int, move: Callable[[ProcessGroup], Any]) -> None:
        """Send or receive on a link with a worker.

        Raises:
            WorkerLost: The worker is lost.
        """
        (rank,) = place.ranks
        lost = self.connections.lost
        try:
            move(self._groups[link])
        except BaseException as error:  # also Ctrl-C: the two ends are no longer at the same position of the stream
            self._unlink(place, (0, rank))
            if isinstance(error, PeerLostError) or rank in lost:
                self.connections.mark_lost(rank)
                raise self.connections.loss_error(rank, lost[rank]) from None
            raise

    # Among workers.

    def copy(self, x: Handle, place: DeviceTarget) -> Handle:
        """Copy a tensor to another worker, or to all workers of a group, directly."""
        return self.copies([x], place)[0]

    def copies(self, tensors: Sequence[Handle], place: DeviceTarget) -> list[Handle]:
        """Copy tensors of one worker, with one command for each of the two workers."""
        source = single(tensors[0])
        self.connections.check(source)
        self.connections.check(place)
        tensors = [_dense(each) for each in tensors]
        (sender,) = source.ranks
        if place.ranks != (receiver := place.ranks[0],) or sender == receiver:  # a group, possibly of one worker
            return [self._spread(each, place) for each in tensors]
        # Sorted, so that copies in both directions use one link, which the target of the lower rank holds.
        pair = (min(sender, receiver), max(sender, receiver))
        meeting = self._devices.worker(pair[0])
        sigs = [each._sig for each in tensors]
        metas = tuple((sig.meta[0], tuple(sig.shape), sig.strides) for sig in sigs)
        # Send and receive must be adjacent in the order of all commands. Otherwise two copies could wait for each
        # other.
        with self.connections.lock, self._all_or_none(meeting, pair):
            link = self.link(meeting, *pair)
            self._operators.invoke(source, "send", link, tensors, [int(receiver > sender)])
            return self._operators.invoke(place, "recv", link, [], [int(sender > receiver), metas], sigs)

    @exclusive
    def _spread(self, x: Handle, place: DeviceTarget) -> Handle:
        connections = self.connections
        connections.refuse_recording("the step copies a tensor to a group")
        (sender,) = x._place.ranks
        (ref,) = connections.outbox.reserve(place.target, 1)
        ranks = place.ranks if sender in place.ranks else (sender, *place.ranks)
        link = self.link(place, *ranks) if len(ranks) > 1 else 0
        arguments = {"link": link, "root": ranks.index(sender), "id": x._ref.id, "meta": x._sig.meta, "line": here(1)}
        with self._all_or_none(place, ranks):
            for rank in ranks:
                outputs = [ref.id] if rank in place.ranks else []
                connections.command(
                    self._devices.worker(rank), "spread", outputs=outputs, sends=rank == sender, **arguments
                )
        return make(place, x._sig, ref)

    # Links.

    @exclusive
    def link(self, place: DeviceTarget, *ranks: int) -> int:
        """Return the number of a place's native group of these ranks. Create the group if it does not exist.

        The workers connect when they reach the command. If the master is one of the ranks, it connects in `_turn`.
        """
        if (number := place.links.get(ranks)) is not None:
            return number
        connections = self.connections
        for rank in ranks:
            if rank:
                connections.check(self._devices.worker(rank))
        connections.refuse_recording("workers create a new link", always=False)
        self.leave_ended()
        self._made += 1
        number = place.links[ranks] = self._made
        arguments = {
            "number": number,
            "name": _name(number, ranks),
            "ranks": list(ranks),
            "timeout_s": connections.timeout_s,
        }
        with self._all_or_none(place, ranks):
            for rank in ranks:
                if rank:
                    connections.put(self._devices.worker(rank), Command("group", 0, arguments))
        return number

    def _meet(self, name: str, ranks: tuple[int, ...]) -> ProcessGroup:
        connections = self.connections
        connections.outbox.flush()  # the worker connects when it has received its command
        try:
            return connections.workers.make_group(name, ranks, connections.timeout_s)
        except PeerLostError as error:
            connections.mark_lost(rank := ranks[error.rank])  # error.rank is the number in the group
            raise connections.loss_error(rank, connections.lost[rank]) from None

    @exclusive
    def leave_ended(self) -> None:
        """Make workers leave links that have ended, because their place is no longer used or a worker is lost."""
        while self._devices.ended_links:
            # Taken one by one, because finalizers in other threads may add links concurrently.
            ranks, number = self._devices.ended_links.pop()
            for rank in ranks:
                if rank and rank not in self.connections.lost:
                    self.connections.command(self._devices.worker(rank), "ungroup", number=number)

    def end(self, links: Iterable[Link]) -> None:
        """End links. Any thread may call this. The master's thread sends the commands to the workers later."""
        for ranks, number in links:
            if (group := self._groups.pop(number, None)) is not None:
                group.close()
            self._turns.pop(number, None)
            self._devices.ended_links.append((ranks, number))

    def close(self) -> None:
        """Close the groups that the master is in."""
        for group in self._groups.values():
            group.close()
        self._groups.clear()

    def _unlink(self, place: DeviceTarget, ranks: tuple[int, ...]) -> None:
        """Drop a link whose ends may be in different states. The next use creates another one."""
        number = place.links.pop(ranks, None)
        if number is not None:
            self.end([(ranks, number)])
            self.leave_ended()

    @contextlib.contextmanager
    def _all_or_none(self, place: DeviceTarget, ranks: tuple[int, ...]) -> Iterator[None]:
        """Drop a link if its commands do not reach all its workers, so that they do not use it again."""
        try:
            yield
        except BaseException:
            self._unlink(place, ranks)
            raise


def _name(link: int, ranks: tuple[int, ...]) -> str:
    # The number alone makes the name unique. The ranks are for messages, and their count is limited.
    return f"{'-'.join(map(str, ranks[:4]))}#{link}"


def _dense(x: Handle) -> Handle:
    """Return the tensor, or a copy of it without gaps in its memory."""
    if not x._sig.bits and _is_dense(x._sig.shape, x._sig.strides):
        return x
    return run(torch.ops.aten.clone.default, (x,), None)  # type: ignore[no-any-return]


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether a tensor's memory has no gaps and no overlaps."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _flat(dense: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor without gaps, in the order of its memory."""
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def _tensor(sig: Signature, data: bytes) -> torch.Tensor:
    made = torch.empty_strided(sig.shape, sig.strides, dtype=sig.dtype, device="cpu")
    if data:
        _flat(made).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return made
