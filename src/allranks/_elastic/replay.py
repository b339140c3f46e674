"""The replay log of the calls that an elastic program makes before its training loop, so that they survive losses.

Each rank records the results of these calls. A process that takes a lost rank's slot runs the program from the top,
while the others are already past these calls, and receives the recorded results. If a loss interrupts a call before the
loop, a replacement process reaches the same call, and all ranks make it again. A rank that did not get its result
receives that of another rank. Large results are not kept. Their memory is filled with ones in all bits (NaN as a
float). They must be part of the state that the loop restores, like the weights that DistributedDataParallel broadcasts.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import torch

from allranks._base.errors import AbortedError, PeerLostError, TimeoutError, UsageError
from allranks._base.verbs import names
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

__all__ = ["LOSSES", "ReplayEngine", "included_in_state", "unrecorded"]

LOSSES = (PeerLostError, AbortedError, TimeoutError)
"""The errors of calls that a loss has interrupted."""

_MAX_FLOAT_BYTES = 64 << 10  # bytes of one tensor: larger tensors of floats are not kept
_MAX_LOG_BYTES = 4 << 20  # bytes of all entries of a rank
_MAX_CALLS = 10_000  # calls: a program with more calls before the loop does not use allranks's training loop

_SAME_ON_ALL_RANKS = names(alike=True)
_LENGTH = struct.Struct("!I")

# Per thread: a call of another thread must be recorded while this thread makes an internal call.
_local = threading.local()


class LoggedCall(msgspec.Struct, frozen=True, array_like=True):
    """A call and its results.

    Attributes:
        verb: The name of the call.
        outputs: The bytes of each tensor that it wrote, or the number of bytes of a tensor that is not kept.
        sender: The sender of a recv.
    """

    verb: str
    outputs: tuple[bytes | int, ...] = ()
    sender: int = -1


@contextlib.contextmanager
def included_in_state() -> Iterator[None]:
    """Do not keep the results of calls in this context, because the training state contains them."""
    before, _local.included = getattr(_local, "included", False), True
    try:
        yield
    finally:
        _local.included = before  # contexts may be nested


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Treat calls in this context as internal: they are not recorded, and a loss aborts them."""
    before, _local.unrecorded = getattr(_local, "unrecorded", False), True
    try:
        yield
    finally:
        _local.unrecorded = before  # contexts may be nested


def encode(entry: LoggedCall | None) -> bytes:
    """Return an entry to append to a log. None: the results are too large to keep, and no entry follows."""
    data = msgspec.msgpack.encode(entry)
    return _LENGTH.pack(len(data)) + data


def decode(record: bytes) -> list[LoggedCall | None]:
    """Return the entries of a log."""
    entries, offset = [], 0
    while offset < len(record):
        (length,) = _LENGTH.unpack_from(record, offset)
        offset += _LENGTH.size + length
        entries.append(msgspec.msgpack.decode(record[offset - length : offset], type=LoggedCall | None))
    return entries


def _recorded_output(tensor: Tensor) -> bytes | int:
    if getattr(_local, "included", False) or (tensor.nbytes > _MAX_FLOAT_BYTES and tensor.is_floating_point()):
        return tensor.nbytes
    return bytes_of(tensor.detach())


def _fill(tensor: Tensor, data: bytes | int) -> bool:
    """Write a kept result to a tensor. Return whether it fits."""
    # A different size means that the program does not repeat the recorded calls.
    if (data if isinstance(data, int) else len(data)) != tensor.nbytes:
        return False
    if not tensor.nbytes:
        return True
    # All bits set are NaN as a float, which exposes a program that uses the values before the state arrives.
    raw = b"\xff" * data if isinstance(data, int) else data
    # bytearray, because torch.frombuffer warns about read-only memory.
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(tensor.dtype)
    with torch.no_grad():
        tensor.copy_(flat.view(tensor.shape))
    return True


class ReplayEngine(Engine):
    """The engine in front of a group's own engine until the loop begins.

    Attributes:
        engine: The engine of the group. None in a process that is not connected yet.
        calls: The number of calls that were made.
        lacks_results: A result was not kept, so this process needs the state of another process.
    """

    def __init__(
        self,
        backend: str,
        engine: Engine | None,
        append: Callable[[bytes], None],
        renew: Callable[[ReplayEngine], tuple[Engine, int]],
        read: Callable[[], Sequence[bytes]],
    ) -> None:
        """
        Args:
            backend: The name of the engine.
            engine: The engine. None: calls receive the recorded results.
            append: Appends bytes to the log of this rank.
            renew: Connects a new engine after a loss, or the first one. Returns it, and the highest number of calls
                that any rank has made.
            read: Returns the logs: that of this rank slot, then those of the others.
        """
        self.name = backend
        # Disable the fast path, which would pass calls to the engine without recording them.
        self.now = never
        self.engine = engine
        self.calls = 0
        self.lacks_results = False
        self._append = append
        self._renew = renew
        self._read = read
        self._records = [decode(record) for record in read()] if engine is None else []
        # The number of calls that some rank has made, as known after a loss: these calls are replayed, not made.
        self._calls_to_replay = 0
        self._predecessor_calls = len(self._records[0]) if self._records else 0  # entries in the log of this rank slot
        # A None entry ends a log: the predecessor recorded nothing after it, so this process cannot either.
        self._is_recording = not (self._records and self._records[0] and self._records[0][-1] is None)
        self._bytes = 0

    def _call(self, verb: str, written: Sequence[Tensor], call: Callable[[Engine], Any]) -> int:
        if getattr(_local, "unrecorded", False):
            assert self.engine is not None
            result = call(self.engine)
            return result if isinstance(result, int) else -1
        if self.engine is None or self.calls < self._calls_to_replay:
            entry = self._find_entry()
            # A connected process must replay this call, because the other ranks do not make it again.
            if entry is not None or self.engine is not None:
                self._replay_entry(verb, entry, written)
                assert entry is not None
                self._add(entry)
                return entry.sender
            # An unconnected process has used up the recorded calls, so it has caught up with the other ranks.
            self._connect()
            # Again from the top: after the reconnection, another rank may have the result of this call.
            return self._call(verb, written, call)
        # The engine may have written part of the results before a loss. The call is repeated on the original values.
        before = [tensor.detach().clone() for tensor in written]
        assert self.engine is not None
        try:
            result = call(self.engine)
        except LOSSES:
            with torch.no_grad():
                for tensor, copy in zip(written, before, strict=True):
                    tensor.copy_(copy)
            self._connect()
            # All ranks repeat the call, or receive the result of a rank that has completed it.
            return self._call(verb, written, call)
        sender = result if isinstance(result, int) and verb == "recv" else -1
        self._add(
            LoggedCall(verb, tuple(_recorded_output(tensor) for tensor in written), sender)
            if self._is_recording
            else None
        )
        return sender

    def _connect(self) -> None:
        self.engine, self._calls_to_replay = self._renew(self)
        # Read the logs after the connection: the proposals of all ranks have followed their last append.
        self._records = [decode(record) for record in self._read()]

    def _add(self, entry: LoggedCall | None) -> None:
        self.calls += 1
        # The predecessor's entries are in the same log. Appending them again would shift the later ones.
        if not self._is_recording or self.calls <= self._predecessor_calls:
            return
        if entry is not None:
            self._bytes += sum(len(data) for data in entry.outputs if isinstance(data, bytes))
        if self._bytes > _MAX_LOG_BYTES or self.calls > _MAX_CALLS:
            entry = None
        self._is_recording = entry is not None
        self._append(encode(entry))

    def _find_entry(self) -> LoggedCall | None:
        own, *others = self._records
        if self.calls < len(own):
            return own[self.calls]
        # Another rank has the result of a call that a loss has interrupted on this rank.
        found = [record[self.calls] for record in others if self.calls < len(record)]
        # Only calls whose result is the same on all ranks can be answered from the log of another rank.
        return next((entry for entry in found if entry is not None and entry.verb in _SAME_ON_ALL_RANKS), None)

    def _replay_entry(self, verb: str, entry: LoggedCall | None, written: Sequence[Tensor]) -> None:
        fits = entry is not None and entry.verb == verb and len(entry.outputs) == len(written)
        if fits and entry is not None:
            fits = all(_fill(tensor, data) for tensor, data in zip(written, entry.outputs, strict=True))
        if not fits or entry is None:
            self._raise_unreplayable(verb, entry)
        self.lacks_results |= any(isinstance(data, int) for data in entry.outputs)

    def _raise_unreplayable(self, verb: str, entry: LoggedCall | None) -> NoReturn:
        if entry is not None:
            why = f"the lost process called {entry.verb} here, or used other sizes"
        elif not self._is_recording:
            why = "the calls before the loop returned more data than is recorded (4 MiB), or are asynchronous messages"
        else:
            why = "the result of this call on the lost rank is not known"
        raise UsageError(
            f"{verb} at {where()}: this process replaces a lost rank and repeats that rank's calls before the training"
            f" loop from recorded results, but {why}.\n  Move large calls, and calls that differ between runs, into a"
            " step of the loop; see docs/resilience.md."
        )

    def _connected_engine(self, verb: str) -> Engine:
        if self.engine is None:
            self._raise_unreplayable(verb, None)
        return self.engine

    def _work(self, async_op: bool, tensors: Sequence[Tensor]) -> Work | None:
        # The call has already completed, because its result must be recorded before the next call.
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
        if async_op:  # a blocking send might never complete here
            self._stop_recording()
            return self._connected_engine("isend").send(tensor, to, tag, True)
        self._call("send", [], lambda engine: engine.send(tensor, to, tag, False))
        return None

    def recv(self, tensor: Tensor, source: int, tag: int) -> int:
        return self._call("recv", [tensor], lambda engine: engine.recv(tensor, source, tag))

    def irecv(self, tensor: Tensor, source: int, tag: int) -> Work:
        engine = self._connected_engine("irecv")
        self._stop_recording()
        return engine.irecv(tensor, source, tag)

    def _stop_recording(self) -> None:
        if self._is_recording:
            self._is_recording = False
            # A marker in the log, so that a replacement process reports the reason instead of a missing entry.
            self._append(encode(None))

    def empty_shared(self, nbytes: int) -> Tensor:
        return super().empty_shared(nbytes)  # ranks that connect later would not have shared memory

    def record_in(self, recorder: _core.Recorder, group: int) -> bool:
        return self.engine is not None and self.engine.record_in(recorder, group)

    def parts(self) -> Mapping[str, Engine]:
        return {self.device: self} if self.engine is None else self.engine.parts()

    def last_numbers(self) -> Sequence[int] | None:
        return None if self.engine is None else self.engine.last_numbers()

    def liveness(self, ranks: Sequence[int]) -> _core.Liveness | None:
        return None if self.engine is None else self.engine.liveness(ranks)

    def lost(self) -> Sequence[int]:
        return () if self.engine is None else self.engine.lost()

    def find_gone(self, ranks: Sequence[int]) -> Sequence[int]:
        return () if self.engine is None else self.engine.find_gone(ranks)

    def set_timeout(self, timeout_s: float) -> None:
        if self.engine is not None:  # a later engine gets the timeout of the group's history
            self.engine.set_timeout(timeout_s)

    def abort(self) -> None:
        if self.engine is not None:
            self.engine.abort()

    def stats(self) -> Stats:
        return Stats(0, 0, 0.0, 0) if self.engine is None else self.engine.stats()

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()

    def abandon(self) -> None:
        if self.engine is not None:
            self.engine.abandon()


def _listed(outputs: Sequence[Tensor] | Tensor) -> list[Tensor]:
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]  # type: ignore[list-item]
