"""The calls that an elastic program makes before its training loop, so that a process that takes a lost seat can make
them, too: the other ranks are past them, and will not come.

Each rank records what such calls gave it (`Recorder`). A process that takes its seat runs the program from the top, and
is given the same (`Replayer`), until it reaches the loop. There it gets the state of the training, and a connection.

What is large is not kept: its memory is filled with bits that are no number (all ones: NaN as a float), and it must be
part of the state that the loop brings, as the weights are that DistributedDataParallel broadcasts.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import torch

from allranks._base.errors import UsageError
from allranks._call.bytes import bytes_of
from allranks._call.callsite import where
from allranks._call.types import Stats
from allranks._call.work import Complete
from allranks._engines.base import Engine, never

if TYPE_CHECKING:
    from torch import Tensor

    from allranks import _core
    from allranks._call.types import PremulSum, ReduceOp
    from allranks._call.work import Work

__all__ = ["Entry", "Recorder", "Replayer", "brought_by_the_state", "decode", "encode"]

_SMALL = 64 << 10  # bytes of one tensor: larger ones of floats are not kept
_MOST = 4 << 20  # bytes of all entries of a rank
_MANY = 10_000  # calls: a program that makes so many has no loop of ours

_local = threading.local()


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """A call, and what it gave.

    Attributes:
        verb: its name.
        outputs: the bytes of each tensor that it wrote; the number of bytes of one that is not kept.
        sender: of a recv.
    """

    verb: str
    outputs: tuple[bytes | int, ...] = ()
    sender: int = -1


@contextlib.contextmanager
def brought_by_the_state() -> Iterator[None]:
    """What calls give meanwhile is not kept, as the state of the training has it."""
    _local.brought = True
    try:
        yield
    finally:
        _local.brought = False


def encode(entries: Sequence[Entry] | None) -> bytes:
    """What a process that takes the seat needs; None: it was too much to keep."""
    return msgspec.msgpack.encode(entries)


def decode(data: bytes) -> list[Entry] | None:
    return msgspec.msgpack.decode(data, type=list[Entry] | None)


def _kept(tensor: Tensor) -> bytes | int:
    if getattr(_local, "brought", False) or (tensor.nbytes > _SMALL and tensor.is_floating_point()):
        return tensor.nbytes
    return bytes_of(tensor.detach())


def _fill(tensor: Tensor, data: bytes | int) -> bool:
    """Writes what was kept. Returns whether it fits."""
    if (data if isinstance(data, int) else len(data)) != tensor.nbytes:
        return False
    if not tensor.nbytes:
        return True
    raw = b"\xff" * data if isinstance(data, int) else data
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(tensor.dtype)
    with torch.no_grad():
        tensor.copy_(flat.view(tensor.shape))
    return True


class _Calls(Engine):
    """Each verb as one function of its name, the tensors that it writes, and itself."""

    def _call(self, verb: str, written: Sequence[Tensor], call: Callable[[Engine], Any]) -> int:
        raise NotImplementedError

    def _work(self, async_op: bool, tensors: Sequence[Tensor]) -> Work | None:
        return Complete(list(tensors)) if async_op else None

    def all_reduce(self, tensor: Tensor, op: ReduceOp | PremulSum, async_op: bool) -> Work | None:
        self._call("all_reduce", [tensor], lambda engine: engine.all_reduce(tensor, op, False))
        return self._work(async_op, [tensor])

    def reduce(self, tensor: Tensor, root: int, op: ReduceOp | PremulSum, async_op: bool) -> Work | None:
        self._call("reduce", [tensor], lambda engine: engine.reduce(tensor, root, op, False))
        return self._work(async_op, [tensor])

    def broadcast(self, tensor: Tensor, root: int, async_op: bool) -> Work | None:
        self._call("broadcast", [tensor], lambda engine: engine.broadcast(tensor, root, False))
        return self._work(async_op, [tensor])

    def all_gather(self, outputs: Sequence[Tensor] | Tensor, tensor: Tensor, async_op: bool) -> Work | None:
        written = _listed(outputs)
        self._call("all_gather", written, lambda engine: engine.all_gather(outputs, tensor, False))
        return self._work(async_op, written)

    def gather(self, tensor: Tensor, outputs: Sequence[Tensor] | None, root: int, async_op: bool) -> Work | None:
        written = list(outputs or ())
        self._call("gather", written, lambda engine: engine.gather(tensor, outputs, root, False))
        return self._work(async_op, written)

    def scatter(self, tensor: Tensor, inputs: Sequence[Tensor] | None, root: int, async_op: bool) -> Work | None:
        self._call("scatter", [tensor], lambda engine: engine.scatter(tensor, inputs, root, False))
        return self._work(async_op, [tensor])

    def reduce_scatter(
        self, tensor: Tensor, inputs: Sequence[Tensor] | Tensor, op: ReduceOp | PremulSum, async_op: bool
    ) -> Work | None:
        self._call("reduce_scatter", [tensor], lambda engine: engine.reduce_scatter(tensor, inputs, op, False))
        return self._work(async_op, [tensor])

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], async_op: bool) -> Work | None:
        self._call("all_to_all", list(outputs), lambda engine: engine.all_to_all(outputs, inputs, False))
        return self._work(async_op, outputs)

    def barrier(self, async_op: bool) -> Work | None:
        self._call("barrier", [], lambda engine: engine.barrier(False))
        return self._work(async_op, [])

    def send(self, tensor: Tensor, to: int, tag: int, async_op: bool) -> Work | None:
        self._call("send", [], lambda engine: engine.send(tensor, to, tag, False))
        return self._work(async_op, [tensor])

    def recv(self, tensor: Tensor, source: int, tag: int) -> int:
        return self._call("recv", [tensor], lambda engine: engine.recv(tensor, source, tag))


def _listed(outputs: Sequence[Tensor] | Tensor) -> list[Tensor]:
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]  # type: ignore[list-item]


class Recorder(_Calls):
    """The engine of a group, with a record of what its calls give. ``engine`` is the group's afterwards.

    Attributes:
        entries: the record; None: there was too much to keep.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.name, self.device, self.highest_tag = engine.name, engine.device, engine.highest_tag
        self.entries: list[Entry] | None = []
        self._bytes = 0

    def _call(self, verb: str, written: Sequence[Tensor], call: Callable[[Engine], Any]) -> int:
        answer = call(self.engine)
        sender = answer if isinstance(answer, int) and verb == "recv" else -1
        if self.entries is not None:
            entry = Entry(verb, tuple(_kept(tensor) for tensor in written), sender)
            self._bytes += sum(len(data) for data in entry.outputs if isinstance(data, bytes))
            self.entries.append(entry)
            if self._bytes > _MOST or len(self.entries) > _MANY:
                self.entries = None
        return sender

    def send(self, tensor: Tensor, to: int, tag: int, async_op: bool) -> Work | None:
        if self.entries is not None:
            self.entries.append(Entry("send"))
        return self.engine.send(tensor, to, tag, async_op)  # a blocking one might never end

    def irecv(self, tensor: Tensor, source: int, tag: int) -> Work:
        self.entries = None  # what it gives is not known yet
        return self.engine.irecv(tensor, source, tag)

    def empty_shared(self, nbytes: int) -> Tensor:
        return self.engine.empty_shared(nbytes)

    def record_in(self, recorder: _core.Recorder, group: int) -> bool:
        return self.engine.record_in(recorder, group)

    def parts(self) -> Mapping[str, Engine]:
        return self.engine.parts()

    def last_numbers(self) -> Sequence[int] | None:
        return self.engine.last_numbers()

    def liveness(self, ranks: Sequence[int]) -> _core.Liveness | None:
        return self.engine.liveness(ranks)

    def lost(self) -> Sequence[int]:
        return self.engine.lost()

    def abort(self) -> None:
        self.engine.abort()

    def stats(self) -> Stats:
        return self.engine.stats()

    def close(self) -> None:
        self.engine.close()

    def abandon(self) -> None:
        self.engine.abandon()


class Replayer(_Calls):
    """What a process that takes a seat calls before it reaches the loop."""

    name = "native"

    def __init__(self, backend: str, entries: Sequence[Entry] | None) -> None:
        self.name = backend
        self.now = never
        self._entries = iter(entries or ())
        self._kept = entries is not None

    def _call(self, verb: str, written: Sequence[Tensor], call: Callable[[Engine], Any]) -> int:
        entry = next(self._entries, None)
        if entry is None or entry.verb != verb or len(entry.outputs) != len(written):
            self._refuse(verb, entry)
        if not all(_fill(tensor, data) for tensor, data in zip(written, entry.outputs, strict=True)):
            self._refuse(verb, entry)
        return entry.sender

    def _refuse(self, verb: str, entry: Entry | None) -> NoReturn:
        if not self._kept:
            why = "the calls before the loop gave the lost process more than is kept (4 MiB), or asynchronous messages"
        elif entry is None:
            why = "the lost process had made no such call before the loop"
        else:
            why = f"the lost process had called {entry.verb} here, or with other sizes"
        raise UsageError(
            f"{verb} at {where()}: this process takes a lost rank's place and is given what the calls of that rank gave"
            f" before the training loop, but {why}.\n  Make large or changing calls in a step of the loop; see"
            " docs/resilience.md"
        )

    def irecv(self, tensor: Tensor, source: int, tag: int) -> Work:
        self._refuse("irecv", None)

    def stats(self) -> Stats:
        return Stats(0, 0, 0.0, 0)

    def close(self) -> None:
        pass

    def abandon(self) -> None:
        pass
