"""Common base of the engines that transfer flat tensors: those inside torch (`c10d`) and MPI (`mpi`).

This module makes the tensors of a call flat and contiguous. Data that is only transferred travels as bytes. These
engines therefore accept every dtype and layout that the native engine accepts, and each verb has one implementation. An
op that an engine cannot reduce is an error before any data is sent; docs/engines.md has the table. An engine begins a
call on these tensors (``begin_...``), reports its end (`Progress`), and translates its failures to allranks's errors
(``explain``).

In debug mode, the ranks compare their calls before each call, because these engines do not. If another rank uses other
sizes, gloo terminates the process, and MPI writes to memory outside of the tensor.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from allranks import _core
from allranks._base.errors import AllranksError, MismatchError, PeerLostError, TimeoutError, UsageError, rank_list
from allranks._base.forks import forks, refusal
from allranks._base.timeouts import seconds_of
from allranks._call.callsite import site
from allranks._call.debug import DebugLevel, get_debug_level
from allranks._call.types import PremulSum, ReduceOp, Stats, is_integer
from allranks._call.work import Work
from allranks._engines.base import Engine
from allranks._engines.checks import (
    CODES,
    check_apart,
    check_has_elements,
    check_own_piece,
    check_pieces,
    check_same_dtype,
    check_storage,
    check_tensor,
    factor_of,
    not_taken,
)
from allranks._engines.operands import Operands, OperandsWork
from allranks._engines.presence import Presence
from allranks._engines.recording import EngineRecording, Subject

if TYPE_CHECKING:
    from allranks._rendezvous.rendezvous import Member

__all__ = ["ON_BITS", "ON_BOOLS", "ON_NUMBERS", "FlatEngine", "FlatWork", "Progress", "as_bytes"]

_SLICE_S = 0.1  # seconds; a wait inside an engine may not notice signals, so Ctrl-C is checked at this interval
_MANY_PENDING = 64  # number of pending works from which on each call checks which of them have finished without a wait
_TEXT_BYTES = 80  # size of the description of a call, in debug mode

ON_NUMBERS = (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)
ON_BITS = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
ON_BOOLS = {
    ReduceOp.SUM: ReduceOp.MAX,
    ReduceOp.MAX: ReduceOp.MAX,
    ReduceOp.BOR: ReduceOp.MAX,
    ReduceOp.PRODUCT: ReduceOp.MIN,
    ReduceOp.MIN: ReduceOp.MIN,
    ReduceOp.BAND: ReduceOp.MIN,
    ReduceOp.BXOR: ReduceOp.BXOR,
}
"""The op on bytes of 0 and 1 that is equivalent to an op on bools."""


class Progress(abc.ABC):
    """A call that an engine has begun.

    Attributes:
        asked_cheaply: ``done`` is inexpensive, so it may be called for calls for which no thread waits.
    """

    asked_cheaply = True

    @abc.abstractmethod
    def done(self) -> bool:
        """Return whether it has ended, successfully or not. Does not wait."""

    @abc.abstractmethod
    def wait(self, seconds: float) -> bool:
        """Wait for at most this time. Return whether the call has ended. Raises the engine's error."""

    @abc.abstractmethod
    def source(self) -> int:
        """Return the sender of a message that has arrived."""


class FlatEngine(Engine):
    """Collectives and messages of an engine that takes flat tensors.

    Attributes:
        rank: The rank of this process in the group.
        members: The members of the group, by rank.
        group_name: The name of the group for error messages.
        timeout_s: Seconds that a call waits for other ranks.
        on_host: It can access host memory only. Tensors of other devices are copied to the host and back.
        averages_integers: It implements AVG of integers itself. Otherwise their sums are divided here.
        queues: Waiting for a call only makes the device's stream wait, so the call ends later.
    """

    on_host = False
    averages_integers = False
    queues = False

    def __init__(self, name: str, rank: int, members: Sequence[Member], group_name: str, timeout_s: float) -> None:
        self.name = name
        self.rank = rank
        self.members = members
        self.group_name = group_name
        self.timeout_s = timeout_s
        # Works whose tensors the engine may still use, although the caller may have dropped all of them. A work is
        # added before the engine receives its tensors, so that an exception in between cannot release a tensor.
        self._pending: set[FlatWork] = set()
        self._presence: Presence | None = None
        self._stats = Stats(0, 0, 0.0, 0)
        self._recording: EngineRecording | None = None
        self._forks = forks()
        self._debug = get_debug_level() is DebugLevel.DETAIL

    # --- Operations of an engine on flat tensors: of bytes, or of numbers if it reduces ---

    @abc.abstractmethod
    def reduces(self, dtype: torch.dtype, op: ReduceOp) -> bool:
        """Return whether the engine implements the reduce op for the dtype."""

    @abc.abstractmethod
    def begin_all_reduce(self, flat: Tensor, op: ReduceOp) -> Progress: ...

    @abc.abstractmethod
    def begin_reduce(self, flat: Tensor, root: int, op: ReduceOp) -> Progress:
        """Begin a reduce. ``flat`` does not change on ranks other than ``root``."""

    @abc.abstractmethod
    def begin_broadcast(self, flat: Tensor, root: int) -> Progress: ...

    @abc.abstractmethod
    def begin_all_gather(self, into: Tensor, given: Tensor) -> Progress: ...

    @abc.abstractmethod
    def begin_gather(self, into: Tensor | None, given: Tensor, root: int) -> Progress: ...

    @abc.abstractmethod
    def begin_scatter(self, into: Tensor, given: Tensor | None, root: int) -> Progress: ...

    @abc.abstractmethod
    def begin_reduce_scatter(self, into: Tensor, given: Tensor, op: ReduceOp) -> Progress: ...

    @abc.abstractmethod
    def begin_all_to_all(self, into: Tensor, given: Tensor, gets: list[int], gives: list[int]) -> Progress:
        """Begin an all_to_all. ``gets`` and ``gives``: the number of bytes from and to each rank."""

    @abc.abstractmethod
    def begin_barrier(self) -> Progress: ...

    @abc.abstractmethod
    def begin_send(self, given: Tensor, to: int, tag: int) -> Progress: ...

    @abc.abstractmethod
    def begin_recv(self, into: Tensor, source: int, tag: int) -> Progress: ...

    # --- Optional operations of an engine ---

    def explain(self, error: BaseException, verb: str) -> NoReturn:
        """Raise allranks's error for an error of the engine. An AllranksError gets the name of the call."""
        here = self.here(verb)
        if isinstance(error, PeerLostError):
            raise PeerLostError(f"{here}: {error}", error.rank) from error
        if isinstance(error, AllranksError):
            raise type(error)(f"{here}: {error}") from error
        raise AllranksError(f"{here}: {self.name}: {error}") from error

    def leave_running(self, work: FlatWork) -> None:
        """Take over an asynchronous call that has begun. Perhaps no thread will wait for it."""

    def give_up(self, work: FlatWork) -> None:
        """Handle a blocking call that an exception has left. The engine may still use its tensors."""

    # --- verbs ---

    def all_reduce(self, tensor: Tensor, op: ReduceOp | PremulSum, async_op: bool) -> Work | None:
        operands, op = self._reducing(tensor, op, "all_reduce")
        flat = _numbers(operands.update(tensor))
        on = self._op_on(operands, flat, tensor, op)
        return self._call(operands, tensor.nbytes, async_op, _on(tensor, op), self.begin_all_reduce, flat, on)

    def reduce(self, tensor: Tensor, root: int, op: ReduceOp | PremulSum, async_op: bool) -> Work | None:
        operands, op = self._reducing(tensor, op, "reduce")
        flat = _numbers(operands.update(tensor) if root == self.rank else operands.read(tensor))
        on = self._op_on(operands, flat if root == self.rank else None, tensor, op)
        return self._call(operands, tensor.nbytes, async_op, _on(tensor, op, root), self.begin_reduce, flat, root, on)

    def broadcast(self, tensor: Tensor, root: int, async_op: bool) -> Work | None:
        operands = self._moving(tensor, "broadcast")
        flat = as_bytes(operands.read(tensor) if root == self.rank else operands.write(tensor))
        subject = _on(tensor, None, root)
        return self._call(operands, tensor.nbytes, async_op, subject, self.begin_broadcast, flat, root)

    def all_gather(self, outputs: Sequence[Tensor] | Tensor, tensor: Tensor, async_op: bool) -> Work | None:
        if not isinstance(outputs, Tensor) and len({t.numel() for t in outputs if isinstance(t, Tensor)}) > 1:
            return self.all_to_all(outputs, [tensor] * len(self.members), async_op)  # tensors of different sizes
        operands = self._moving(tensor, "all_gather")
        results = self._filled(operands, outputs, tensor)
        given, into = as_bytes(operands.read(tensor, (results,), self.rank)), as_bytes(results)
        return self._call(operands, tensor.nbytes, async_op, _on(tensor), self.begin_all_gather, into, given)

    def gather(self, tensor: Tensor, outputs: Sequence[Tensor] | None, root: int, async_op: bool) -> Work | None:
        operands = self._moving(tensor, "gather")
        given = as_bytes(operands.read(tensor))
        into = None if outputs is None else as_bytes(self._filled(operands, outputs, tensor))
        subject = _on(tensor, None, root)
        return self._call(operands, tensor.nbytes, async_op, subject, self.begin_gather, into, given, root)

    def scatter(self, tensor: Tensor, inputs: Sequence[Tensor] | None, root: int, async_op: bool) -> Work | None:
        operands = self._moving(tensor, "scatter")
        given = None if inputs is None else as_bytes(self._joined(operands, inputs, tensor))
        into = as_bytes(operands.write(tensor))
        subject = _on(tensor, None, root)
        return self._call(operands, tensor.nbytes, async_op, subject, self.begin_scatter, into, given, root)

    def reduce_scatter(
        self, tensor: Tensor, inputs: Sequence[Tensor] | Tensor, op: ReduceOp | PremulSum, async_op: bool
    ) -> Work | None:
        operands, op = self._reducing(tensor, op, "reduce_scatter")
        result = operands.write(tensor)
        given = _numbers(self._joined(operands, inputs, tensor, (result,)))
        into = _numbers(result)
        on = self._op_on(operands, into, tensor, op)
        return self._call(operands, given.nbytes, async_op, _on(tensor, op), self.begin_reduce_scatter, into, given, on)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], async_op: bool) -> Work | None:
        for tensor in (*inputs, *outputs):
            self._check(tensor, "all_to_all")
            check_same_dtype("all_to_all", inputs[0], tensor)
        check_own_piece("all_to_all", outputs[self.rank], inputs[self.rank], self.rank)
        operands = self._moving(inputs[0], "all_to_all")
        check_apart("all_to_all", outputs)
        given = torch.cat([as_bytes(operands.read(tensor)) for tensor in inputs])
        gets, gives = [tensor.nbytes for tensor in outputs], [tensor.nbytes for tensor in inputs]
        into = given.new_empty(sum(gets))
        for tensor, part in zip(outputs, torch.split(into, gets), strict=True):
            operands.fill(tensor, part.view(tensor.dtype))
        operands.keep += [given, into]
        subject = Subject(inputs[0].dtype)
        return self._call(operands, given.nbytes, async_op, subject, self.begin_all_to_all, into, given, gets, gives)

    def barrier(self, async_op: bool) -> Work | None:
        return self._call(Operands("barrier"), 0, async_op, Subject(), self.begin_barrier)

    def send(self, tensor: Tensor, to: int, tag: int, async_op: bool) -> Work | None:
        operands = self._moving(tensor, "send")
        given = as_bytes(operands.read(tensor))
        subject = _on(tensor, None, to, tag)
        return self._call(operands, tensor.nbytes, async_op, subject, self.begin_send, given, to, tag)

    def recv(self, tensor: Tensor, source: int, tag: int) -> int:
        work = self._receiving(tensor, source, tag, False)
        self._wait(work)
        return work.source_rank()

    def irecv(self, tensor: Tensor, source: int, tag: int) -> Work:
        work = self._receiving(tensor, source, tag, True)
        self.leave_running(work)
        return work

    def _receiving(self, tensor: Tensor, source: int, tag: int, async_op: bool) -> FlatWork:
        operands = self._moving(tensor, "recv")
        into = as_bytes(operands.write(tensor))
        subject = _on(tensor, None, source, tag)
        return self._started(operands, tensor.nbytes, async_op, subject, self.begin_recv, into, source, tag)

    def record_in(self, recorder: _core.Recorder, group: int) -> bool:
        self._recording = EngineRecording(recorder, group)
        return True

    def stats(self) -> Stats:
        return self._stats

    # --- tensors ---

    def _check(self, tensor: Tensor, verb: str) -> None:
        check_tensor(verb, tensor)
        if self.on_host:
            check_has_elements(verb, tensor, self.group_name, self.rank)
        if tensor.device.type != self.device and not self.on_host:
            raise UsageError(
                f"{verb} on group '{self.group_name}' (rank {self.rank}): the tensor is on {tensor.device}, "
                f"but the {self.name} engine moves {self.device.upper()} tensors"
            )
        if tensor.layout is not torch.strided:
            raise not_taken(verb, tensor)
        check_storage(verb, tensor)

    def _moving(self, tensor: Tensor, verb: str) -> Operands:
        self._check(tensor, verb)
        return Operands(verb, on_host=self.on_host)

    def _reducing(self, tensor: Tensor, op: ReduceOp | PremulSum, verb: str) -> tuple[Operands, ReduceOp]:
        """Return the call's operands, multiplied as ``op`` requires, and the op that remains."""
        self._check(tensor, verb)
        factor = factor_of(verb, op)
        op = ReduceOp.SUM if isinstance(op, PremulSum) else op
        if not self.reduces(tensor.dtype, op):
            raise UsageError(f"{verb} on the {self.name} engine does not support {op.name} of {tensor.dtype} tensors")
        return Operands(verb, factor, self.on_host), op

    def _op_on(self, operands: Operands, into: Tensor | None, tensor: Tensor, op: ReduceOp) -> ReduceOp:
        """Return the op on the `_numbers` of a tensor. Its result is written to ``into``."""
        if tensor.dtype is torch.bool:
            return ON_BOOLS[op]
        if op is not ReduceOp.AVG or not is_integer(tensor.dtype) or self.averages_integers:
            return op
        if into is not None:
            about = into.data_ptr(), into.numel(), CODES[into.dtype], len(self.members)
            operands.then = partial(_core.divide, *about)
        return ReduceOp.SUM

    def _joined(
        self, operands: Operands, pieces: Sequence[Tensor] | Tensor, like: Tensor, results: Sequence[Tensor] = ()
    ) -> Tensor:
        """Return one tensor with the tensors of all ranks in order, which is read while ``results`` are written."""
        check_pieces(operands.verb, pieces, like, len(self.members), self._check)
        if isinstance(pieces, Tensor):
            return operands.read(pieces, results, self.rank).detach()
        joined = torch.cat([_flat(operands.read(piece)) for piece in pieces])
        operands.keep.append(joined)
        return joined

    def _filled(self, operands: Operands, pieces: Sequence[Tensor] | Tensor, like: Tensor) -> Tensor:
        """Return one tensor with room for the tensors of all ranks in order, which is written."""
        check_pieces(operands.verb, pieces, like, len(self.members), self._check)
        if isinstance(pieces, Tensor):
            return operands.write(pieces)
        check_apart(operands.verb, pieces)
        whole = like.detach().new_empty(len(pieces), like.numel(), device="cpu" if self.on_host else None)
        for row, piece in zip(whole, pieces, strict=True):
            operands.fill(piece, row)
        operands.keep.append(whole)
        return whole

    # --- calls ---

    def _call(
        self,
        operands: Operands,
        nbytes: int,
        async_op: bool,
        subject: Subject,
        begin: Callable[..., Progress],
        *args: Any,
    ) -> Work | None:
        work = self._started(operands, nbytes, async_op, subject, begin, *args)
        if async_op:
            self.leave_running(work)
            return work
        self._wait(work)
        return None

    def _wait(self, work: FlatWork) -> None:
        try:
            work.wait()
        except BaseException:
            self.give_up(work)
            work.end_record(False)
            raise

    def _started(
        self,
        operands: Operands,
        nbytes: int,
        async_op: bool,
        subject: Subject,
        begin: Callable[..., Progress],
        *args: Any,
    ) -> FlatWork:
        """Begin a call and record it."""
        if len(self._pending) > _MANY_PENDING:
            for other in tuple(self._pending):
                other.is_completed()
        work = FlatWork(self, operands, nbytes)
        unwaited = async_op or self.queues
        if self._recording is not None:
            work.record_as(self._recording, self._recording.begin(operands.verb, subject, nbytes, unwaited))
        try:
            if self._debug and operands.verb not in ("send", "recv"):
                self._compare(operands.verb, subject)
            self._launched(work, begin, *args)
        except BaseException:
            work.end_record(False)
            raise
        if unwaited:
            work.watch()
        return work

    def _launched(self, work: FlatWork, begin: Callable[..., Progress], *args: Any) -> FlatWork:
        self._pending.add(work)
        try:
            work.progress = begin(*args)
        except Exception as error:
            self._pending.discard(work)
            ours = isinstance(error, AllranksError) and not isinstance(error, PeerLostError)
            if ours or not isinstance(error, RuntimeError | OSError):
                raise
            self.explain(error, work.verb)
        except BaseException:  # Ctrl-C: it is unknown whether the engine has begun the call
            self.give_up(work)
            raise
        return work

    def _compare(self, verb: str, subject: Subject) -> None:
        """Raise if the ranks are about to make different calls."""
        numel, op = subject.numel, subject.op
        text = verb if numel is None else f"{verb} of {numel} x {str(subject.dtype).removeprefix('torch.')}"
        if op is not None:
            text += f", {op.name}"
        if subject.peer >= 0:
            text += f", root {subject.peer}"
        mine = torch.tensor(list(text.encode().ljust(_TEXT_BYTES)), dtype=torch.uint8, device=self.device)
        everyones = mine.new_empty(len(self.members), _TEXT_BYTES)
        comparing = Operands(verb)
        comparing.keep += [mine, everyones]
        self._wait(self._launched(FlatWork(self, comparing, 0), self.begin_all_gather, everyones.view(-1), mine))
        calls = [bytes(row).decode().rstrip() for row in everyones.tolist()]
        if len(set(calls)) > 1:
            ranks = {call: [rank for rank, other in enumerate(calls) if other == call] for call in calls}
            raise MismatchError(
                f"call on group '{self.group_name}': "
                + "; ".join(f"{rank_list(by)} called {call}" for call, by in ranks.items())
                + ". No tensor was changed."
            )

    def ended(self, work: FlatWork) -> None:
        """Remove a work that has ended, successfully or not. Called by the work."""
        if work in self._pending:
            self._pending.discard(work)
            self._count(work.nbytes, work.began)

    def _count(self, nbytes: int, began: float) -> None:
        calls, total, seconds, shared = self._stats
        self._stats = Stats(calls + 1, total + nbytes, seconds + time.monotonic() - began, shared)

    def check_process(self, verb: str) -> None:
        """Raise in a forked child, in which no call can be waited for."""
        if self._forks != forks():
            raise refusal(f"{verb} on group '{self.group_name}': the group")

    def here(self, verb: str) -> str:
        """Return the beginning of error messages."""
        return f"{verb} on group '{self.group_name}' (rank {self.rank} of {len(self.members)})"

    def _who(self, rank: int) -> str:
        return f"rank {rank} ({self.members[rank].host}, pid {self.members[rank].pid})"


class FlatWork(OperandsWork):
    """An asynchronous call of a flat engine."""

    def __init__(self, engine: FlatEngine, operands: Operands, nbytes: int) -> None:
        super().__init__(operands)
        self.began = time.monotonic()
        self.nbytes = nbytes
        self.progress: Progress | None = None  # None until the engine has begun the call
        self._engine = engine
        self._recording: EngineRecording | None = None
        self._record: _core.OtherCall | None = None  # until its end is recorded
        self._awaited = False  # whether the record contains a wait

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        if self._error is not None:
            raise self._error
        if self._finished:
            return True
        verb = self._operands.verb
        self._engine.check_process(verb)
        limit_s = max(seconds_of(timeout), 0.0) if timeout else None
        deadline = None if limit_s is None else time.monotonic() + limit_s
        while not self._ended_within(_SLICE_S if deadline is None else min(_SLICE_S, deadline - time.monotonic())):
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(
                    f"{self._engine.here(verb)}: has not completed after {limit_s:.1f} s.\n"
                    "  The call goes on: wait() may be called again."
                )
            self._record_wait()
        if not self._engine.queues:
            self.end_record(True)
        self._finish()
        self._engine.ended(self)
        return True

    def _ended_within(self, seconds: float) -> bool:
        assert self.progress is not None
        try:
            return self.progress.wait(seconds)
        except (RuntimeError, OSError) as error:
            self.end_record(False)
            self._engine.ended(self)
            try:
                self._engine.explain(error, self._operands.verb)
            except AllranksError as explained:
                self._error = explained
                raise

    def record_as(self, recording: EngineRecording, call: _core.OtherCall) -> None:
        """Set the record in which the work records its end."""
        self._recording, self._record = recording, call

    def watch(self) -> None:
        """Let the recorder check for the end of a call for which perhaps no thread will wait."""
        assert self.progress is not None
        if self._recording is not None and self.progress.asked_cheaply:
            self._recording.watch(self)

    def end_record(self, succeeded: bool) -> None:
        """Record that the call has ended. Idempotent."""
        record, self._record = self._record, None
        if record is not None and self._recording is not None:
            record.end(succeeded)
            self._recording.ended(self)

    def has_ended(self) -> bool:
        """Return whether the call has ended, if this check is inexpensive. Records the end."""
        assert self.progress is not None
        if not self._engine.queues:
            return self.is_completed()
        if not self.progress.done():
            return False
        self.end_record(True)
        return True

    def _record_wait(self) -> None:
        """Record that the program waits, and at which call site."""
        if self._record is not None and not self._awaited:
            self._awaited = True
            self._record.set_awaited(site())

    def source_rank(self) -> int:
        assert self.progress is not None
        return self.progress.source()

    def done(self) -> bool:
        """Return whether it has ended: the engine no longer uses the tensors, or the call has failed."""
        return self._error is not None or (self.progress is not None and self.progress.done())


def _on(tensor: Tensor, op: ReduceOp | None = None, peer: int = -1, tag: int = 0) -> Subject:
    return Subject(tensor.dtype, tensor.numel(), op, peer, tag)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor."""
    return _flat(tensor).view(torch.uint8)


def _numbers(tensor: Tensor) -> Tensor:
    """Return the tensor that is reduced instead: flat, bools as bytes, complex numbers as pairs."""
    flat = _flat(tensor)
    if flat.is_complex():
        return torch.view_as_real(flat).view(-1)
    return flat.view(torch.uint8) if flat.dtype is torch.bool else flat


def _flat(tensor: Tensor) -> Tensor:
    """Return a one-dimensional view. A dimension of size 1 may have any stride, which view would keep."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))
