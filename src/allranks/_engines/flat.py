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
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from allranks import _core
from allranks._base.errors import UsageError
from allranks._call.types import PremulSum, ReduceOp, is_integer
from allranks._call.work import Work
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
    not_reduced,
    not_taken,
)
from allranks._engines.operands import Operands
from allranks._engines.recording import Subject

if TYPE_CHECKING:
    pass
from allranks._engines.flat_calls import FlatCalls, FlatWork, Progress

__all__ = ["ON_BITS", "ON_BOOLS", "ON_NUMBERS", "FlatEngine", "FlatWork", "Progress", "as_bytes"]

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


class FlatEngine(FlatCalls):
    """Collectives and messages of an engine that takes flat tensors.

    An engine implements the ``begin_`` methods on flat tensors: of bytes, or of numbers if it reduces.

    Attributes:
        timeout_s: Seconds that a call waits for other ranks.
    """

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
        # A rank's own piece may be part of the output, as in a call in place. Then no copy is needed.
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
        # Before the copies, which are wasted if this raises.
        check_apart("all_to_all", outputs)
        given = torch.cat([as_bytes(operands.read(tensor)) for tensor in inputs])
        gets, gives = [tensor.nbytes for tensor in outputs], [tensor.nbytes for tensor in inputs]
        # New memory even for contiguous outputs: the engines take one flat tensor, see docs/decisions/025.
        into = given.new_empty(sum(gets))
        for tensor, part in zip(outputs, torch.split(into, gets), strict=True):
            operands.fill(tensor, part.view(tensor.dtype))
        # The engine uses them after this function returns.
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

    def _check(self, tensor: Tensor, verb: str) -> None:
        check_tensor(verb, tensor)
        if self.on_host:
            check_has_elements(verb, tensor, self.group_name, self.rank)
        if tensor.device.type != self.device and not self.on_host:
            raise UsageError(
                f"{verb} on group '{self.group_name}' (rank {self.rank}): the tensor is on {tensor.device}, "
                f"but the {self.name} engine supports only {self.device.upper()} tensors.\n"
                "  Move the tensor to this device, or create the group with a backend for "
                f"{tensor.device.type} tensors."
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
            raise not_reduced(
                f"{verb} on the {self.name} engine", tensor, op, lambda each: self.reduces(tensor.dtype, each)
            )
        return Operands(verb, factor, self.on_host), op

    def _op_on(self, operands: Operands, into: Tensor | None, tensor: Tensor, op: ReduceOp) -> ReduceOp:
        """Return the op on the `_numbers` of a tensor. Its result is written to ``into``."""
        if tensor.dtype is torch.bool:
            return ON_BOOLS[op]
        # Without an AVG of integers, the engine sums, and the core divides the sum and rounds toward zero as nccl does.
        if op is not ReduceOp.AVG or not is_integer(tensor.dtype) or self.averages_integers:
            return op
        # Ranks without a result, such as those in a reduce other than the root, have nothing to divide.
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
