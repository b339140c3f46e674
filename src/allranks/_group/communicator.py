"""Communicator: the calls that the ranks of a group make together.

It makes each check that does not depend on the engine once, and passes the call on. Ranks are numbered within the group
here. The functions (`_api`) translate the ranks of the world.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, overload

from allranks._base.errors import TimeoutError, UsageError
from allranks._base.integers import integer_of
from allranks._base.timeouts import SHORTEST_S, seconds_of
from allranks._call.types import PremulSum, ReduceOp, as_reduce_op
from allranks._group.uneven import UnevenCollectives

if TYPE_CHECKING:
    from datetime import timedelta

    from torch import Tensor

    from allranks._call.types import Stats
    from allranks._call.work import Work

    Op: TypeAlias = ReduceOp | PremulSum

__all__ = ["Communicator"]


class Communicator(UnevenCollectives):
    """A group whose ranks call collectives and exchange messages."""

    @overload
    def all_reduce(self, tensor: Tensor, op: Op = ..., async_op: Literal[False] = ...) -> None: ...
    @overload
    def all_reduce(self, tensor: Tensor, op: Op = ..., async_op: Literal[True] = ...) -> Work: ...
    @overload
    def all_reduce(self, tensor: Tensor, op: Op = ..., async_op: bool = ...) -> Work | None: ...
    def all_reduce(
        self, tensor: Tensor, op: ReduceOp | PremulSum = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        """See :func:`allranks.all_reduce`."""
        # The fast path takes unchecked arguments. It returns False, and has done nothing, if one of them is unusual.
        if not async_op and self.now("all_reduce", tensor, None, op):
            return None
        work = self._begin("all_reduce", tensor, None, op) if async_op else None
        if work is not None:
            work.shown = (tensor,)
            return work
        engine = self._live()
        op = op if type(op) is ReduceOp else as_reduce_op(op)
        try:
            return _showing(engine.all_reduce(tensor, op, async_op), (tensor,))
        except UsageError:
            # Checked only after the error, so that ordinary calls do not pay for it.
            if not tensor.is_sparse:
                raise
        from allranks._group import sparse  # it combines dense calls, so it is not part of an engine

        return sparse.all_reduce(self, tensor, op, async_op)

    @overload
    def reduce(self, tensor: Tensor, dst: int, op: Op = ..., async_op: Literal[False] = ...) -> None: ...
    @overload
    def reduce(self, tensor: Tensor, dst: int, op: Op = ..., async_op: Literal[True] = ...) -> Work: ...
    @overload
    def reduce(self, tensor: Tensor, dst: int, op: Op = ..., async_op: bool = ...) -> Work | None: ...
    def reduce(
        self, tensor: Tensor, dst: int, op: ReduceOp | PremulSum = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        """See :func:`allranks.reduce`."""
        if not async_op and self.now("reduce", tensor, None, op, dst):
            return None
        work = self._begin("reduce", tensor, None, op, dst) if async_op else None
        if work is None:
            work = self._live().reduce(tensor, self._member("reduce", dst, "dst"), as_reduce_op(op), async_op)
        return _showing(work, (tensor,))

    @overload
    def broadcast(self, tensor: Tensor, src: int, async_op: Literal[False] = ...) -> None: ...
    @overload
    def broadcast(self, tensor: Tensor, src: int, async_op: Literal[True] = ...) -> Work: ...
    @overload
    def broadcast(self, tensor: Tensor, src: int, async_op: bool = ...) -> Work | None: ...
    def broadcast(self, tensor: Tensor, src: int, async_op: bool = False) -> Work | None:
        """See :func:`allranks.broadcast`."""
        if not async_op and self.now("broadcast", tensor, None, None, src):
            return None
        work = self._begin("broadcast", tensor, None, None, src) if async_op else None
        if work is None:
            work = self._live().broadcast(tensor, self._member("broadcast", src, "src"), async_op)
        return _showing(work, (tensor,))

    @overload
    def all_gather(
        self, outputs: Sequence[Tensor] | Tensor, tensor: Tensor, async_op: Literal[False] = ...
    ) -> None: ...
    @overload
    def all_gather(self, outputs: Sequence[Tensor] | Tensor, tensor: Tensor, async_op: Literal[True] = ...) -> Work: ...
    @overload
    def all_gather(self, outputs: Sequence[Tensor] | Tensor, tensor: Tensor, async_op: bool = ...) -> Work | None: ...
    def all_gather(self, outputs: Sequence[Tensor] | Tensor, tensor: Tensor, async_op: bool = False) -> Work | None:
        """See :func:`allranks.all_gather` (a list) and :func:`allranks.all_gather_single` (one tensor)."""
        if not async_op and self.now("all_gather", tensor, outputs):
            return None
        work = self._begin("all_gather", tensor, outputs) if async_op else None
        if work is None:
            work = self._live().all_gather(outputs, tensor, async_op)
        if isinstance(outputs, (list, tuple)):
            return _showing(work, outputs)
        whole = cast("Tensor", outputs)
        # The results have the form that gloo returns for CPU tensors and nccl for others.
        return _showing(work, partial(whole.chunk, self._size)) if whole.is_cpu else _showing(work, (whole,))

    @overload
    def gather(
        self, tensor: Tensor, outputs: Sequence[Tensor] | None, dst: int, async_op: Literal[False] = ...
    ) -> None: ...
    @overload
    def gather(
        self, tensor: Tensor, outputs: Sequence[Tensor] | None, dst: int, async_op: Literal[True] = ...
    ) -> Work: ...
    @overload
    def gather(
        self, tensor: Tensor, outputs: Sequence[Tensor] | None, dst: int, async_op: bool = ...
    ) -> Work | None: ...
    def gather(self, tensor: Tensor, outputs: Sequence[Tensor] | None, dst: int, async_op: bool = False) -> Work | None:
        """See :func:`allranks.gather`."""
        if not async_op and self.now("gather", tensor, outputs, None, dst):
            return None
        work = self._begin("gather", tensor, outputs, None, dst) if async_op else None
        if work is None:
            self._only_on("gather", outputs, self._member("gather", dst, "dst"), "gather_list", "dst")
            work = self._live().gather(tensor, outputs or None, dst, async_op)
        return _showing(work, outputs or ())

    @overload
    def scatter(
        self, tensor: Tensor, inputs: Sequence[Tensor] | None, src: int, async_op: Literal[False] = ...
    ) -> None: ...
    @overload
    def scatter(
        self, tensor: Tensor, inputs: Sequence[Tensor] | None, src: int, async_op: Literal[True] = ...
    ) -> Work: ...
    @overload
    def scatter(
        self, tensor: Tensor, inputs: Sequence[Tensor] | None, src: int, async_op: bool = ...
    ) -> Work | None: ...
    def scatter(self, tensor: Tensor, inputs: Sequence[Tensor] | None, src: int, async_op: bool = False) -> Work | None:
        """See :func:`allranks.scatter`."""
        if not async_op and self.now("scatter", tensor, inputs, None, src):
            return None
        work = self._begin("scatter", tensor, inputs, None, src) if async_op else None
        if work is None:
            self._only_on("scatter", inputs, self._member("scatter", src, "src"), "scatter_list", "src")
            work = self._live().scatter(tensor, inputs or None, src, async_op)
        return _showing(work, (tensor,))

    @overload
    def reduce_scatter(
        self, tensor: Tensor, inputs: Sequence[Tensor] | Tensor, op: Op = ..., async_op: Literal[False] = ...
    ) -> None: ...
    @overload
    def reduce_scatter(
        self, tensor: Tensor, inputs: Sequence[Tensor] | Tensor, op: Op = ..., async_op: Literal[True] = ...
    ) -> Work: ...
    @overload
    def reduce_scatter(
        self, tensor: Tensor, inputs: Sequence[Tensor] | Tensor, op: Op = ..., async_op: bool = ...
    ) -> Work | None: ...
    def reduce_scatter(
        self,
        tensor: Tensor,
        inputs: Sequence[Tensor] | Tensor,
        op: ReduceOp | PremulSum = ReduceOp.SUM,
        async_op: bool = False,
    ) -> Work | None:
        """See :func:`allranks.reduce_scatter` (a list) and :func:`allranks.reduce_scatter_single` (one tensor)."""
        if not async_op and self.now("reduce_scatter", tensor, inputs, op):
            return None
        work = self._begin("reduce_scatter", tensor, inputs, op) if async_op else None
        if work is None:
            work = self._live().reduce_scatter(tensor, inputs, as_reduce_op(op), async_op)
        return _showing(work, (tensor,))

    @overload
    def all_to_all(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], async_op: Literal[False] = ...
    ) -> None: ...
    @overload
    def all_to_all(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], async_op: Literal[True] = ...
    ) -> Work: ...
    @overload
    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], async_op: bool = ...) -> Work | None: ...
    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], async_op: bool = False) -> Work | None:
        """See :func:`allranks.all_to_all`."""
        for what, tensors in (("output", outputs), ("input", inputs)):
            if len(tensors) != self._size:
                raise UsageError(f"all_to_all: expected {self._size} {what} tensors, one per rank, not {len(tensors)}")
        return _showing(self._live().all_to_all(outputs, inputs, async_op), outputs)

    @overload
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = ...,
        input_split_sizes: Sequence[int] | None = ...,
        async_op: Literal[False] = ...,
    ) -> None: ...
    @overload
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = ...,
        input_split_sizes: Sequence[int] | None = ...,
        async_op: Literal[True] = ...,
    ) -> Work: ...
    @overload
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = ...,
        input_split_sizes: Sequence[int] | None = ...,
        async_op: bool = ...,
    ) -> Work | None: ...
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """See :func:`allranks.all_to_all_single`."""
        even = not output_split_sizes and not input_split_sizes
        if even and not async_op and self.now("all_to_all", input, output):
            return None
        work = self._begin("all_to_all", input, output) if even and async_op else None
        if work is None:
            outputs = self._split(output, output_split_sizes, "output")
            inputs = self._split(input, input_split_sizes, "input")
            work = self._live().all_to_all(outputs, inputs, async_op)
        return _showing(work, (output,))

    @overload
    def barrier(self, async_op: Literal[False] = ...) -> None: ...
    @overload
    def barrier(self, async_op: Literal[True] = ...) -> Work: ...
    @overload
    def barrier(self, async_op: bool = ...) -> Work | None: ...
    def barrier(self, async_op: bool = False) -> Work | None:
        """See :func:`allranks.barrier`."""
        if not async_op and self.now("barrier", None):
            return None
        work = self._begin("barrier", None) if async_op else None
        return self._live().barrier(async_op) if work is None else work

    def monitored_barrier(self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False) -> None:
        """See :func:`allranks.monitored_barrier`."""
        work = self.barrier(True)
        assert work is not None
        try:
            work.wait(None if timeout is None else max(seconds_of(timeout), SHORTEST_S))
        except TimeoutError as error:
            seconds = self.timeout_s if timeout is None else seconds_of(timeout)
            error.args = (f"{error}\n  {self._in_torchs_words(error.ranks, seconds, wait_all_ranks)}",)
            raise

    # Methods with the names of torch's own methods, for code that calls those. They take lists and return a Work.

    def allreduce(self, tensors: Sequence[Tensor] | Tensor, opts: Any = ReduceOp.SUM) -> Work:
        """``all_reduce`` of a tensor, or of a list of one tensor, with a reduce op or torch's AllreduceOptions."""
        work = self.all_reduce(_only(tensors, "allreduce"), getattr(opts, "reduceOp", opts), True)
        assert work is not None
        return work

    def allgather(
        self, output_tensors: Sequence[Sequence[Tensor]], input_tensors: Sequence[Tensor] | Tensor, opts: Any = None
    ) -> Work:
        """``all_gather`` of a tensor into a list, or with lists of one element each. ``opts`` has no effect here."""
        outputs: Any = (
            _only(output_tensors, "allgather") if isinstance(input_tensors, (list, tuple)) else output_tensors
        )
        work = self.all_gather(outputs, _only(input_tensors, "allgather"), True)
        assert work is not None
        return work

    def alltoall(self, output_tensors: Sequence[Tensor], input_tensors: Sequence[Tensor], opts: Any = None) -> Work:
        """``all_to_all``. ``opts`` has no effect here."""
        work = self.all_to_all(output_tensors, input_tensors, True)
        assert work is not None
        return work

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        """See :func:`allranks.send`."""
        self._live().send(tensor, self._other("send", dst, "dst"), _tag("send", tag), False)

    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> int:
        """See :func:`allranks.recv`."""
        return self._live().recv(tensor, self._source("recv", src), _tag("recv", tag))

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Work:
        """See :func:`allranks.isend`."""
        work = self._live().send(tensor, self._other("isend", dst, "dst"), _tag("isend", tag), True)
        assert work is not None
        return work

    def irecv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> Work:
        """See :func:`allranks.irecv`."""
        work = self._live().irecv(tensor, self._source("irecv", src), _tag("irecv", tag))
        work.shown = (tensor,)
        return work

    def empty_shared(self, nbytes: int) -> Tensor:
        """See :func:`allranks.empty_shared`. Returns bytes."""
        return self._live().empty_shared(nbytes)

    def stats(self) -> Stats:
        """See :class:`allranks.Stats`."""
        return self._live().stats()

    def _member(self, verb: str, rank: int, what: str) -> int:
        number = integer_of(rank)
        if number is None:
            raise TypeError(f"{verb}: {what} must be a rank, not {type(rank).__name__}")
        if not 0 <= number < self._size:
            raise UsageError(
                f"{verb}: {what}={number} is not a rank of group '{self.name}': expected 0 to {self._size - 1}"
            )
        return number

    def _other(self, verb: str, rank: int, what: str) -> int:
        number = self._member(verb, rank, what)
        if number == self._rank:
            raise UsageError(
                f"{verb}: {what}={number} is this rank itself: expected another rank of group '{self.name}'"
            )
        return number

    def _source(self, verb: str, src: int | None) -> int:
        if self._size == 1:
            raise UsageError(
                f"{verb}: no other rank can send, because group '{self.name}' has a single rank.\n"
                "  Start more ranks (`allranks run -n 2`), or pass a larger group."
            )
        return -1 if src is None else self._other(verb, src, "src")

    def _only_on(self, verb: str, tensors: Sequence[Tensor] | None, root: int, name: str, role: str) -> None:
        if root == self._rank and not tensors:
            raise UsageError(f"{verb}: {name} must be passed on the {role} rank ({root})")
        if root != self._rank and tensors:
            raise UsageError(f"{verb}: {name} must not be passed on rank {self._rank}: {role} is rank {root}")

    def _in_torchs_words(self, missing: Sequence[int], seconds: float, all_of_them: bool) -> str:
        """Return the text of torch's monitored_barrier, for programs that search for it."""
        if self._rank:
            return (
                f"Rank {self._rank} successfully reached monitoredBarrier, "
                "but received errors while waiting for send/recv from rank 0"
            )
        text = f"Rank 0 timed out in monitoredBarrier after {seconds * 1000:.0f} ms"
        named = ", ".join(map(str, missing if all_of_them else missing[:1]))
        return f"{text}: Rank{'s' if ',' in named else ''} {named} failed to pass monitoredBarrier" if named else text

    def _split(self, tensor: Tensor, sizes: Sequence[int] | None, what: str) -> list[Tensor]:
        """Return one slice of ``tensor`` per rank, along its first dimension."""
        if tensor.dim() == 0:
            raise UsageError(f"all_to_all_single: the {what} must have at least one dimension, not shape ()")
        rows = tensor.shape[0]
        if not sizes:
            if rows % self._size:
                raise UsageError(
                    f"all_to_all_single: the {rows} rows of the {what} cannot be split into {self._size} equal parts.\n"
                    f"  Pass {what}_split_sizes."
                )
            sizes = [rows // self._size] * self._size
        numbers = [number for size in sizes if (number := integer_of(size)) is not None]
        if len(numbers) < len(sizes):
            raise TypeError(f"all_to_all_single: {what}_split_sizes must be integers, not {list(sizes)!r}")
        if len(numbers) != self._size or sum(numbers) != rows or min(numbers) < 0:
            raise UsageError(
                f"all_to_all_single: {what}_split_sizes {numbers} must be {self._size} sizes that sum up to {rows}"
            )
        return [tensor[end - size : end] for size, end in zip(numbers, accumulate(numbers), strict=True)]


def _showing(work: Work | None, tensors: Sequence[Tensor] | Callable[[], Sequence[Tensor]]) -> Work | None:
    """Set the tensors that a work, if there is one, returns as its result."""
    if work is not None:
        work.shown = tensors
    return work


def _only(listed: Any, verb: str) -> Any:
    """Return the tensor, or the list, that torch's methods take in a list of one."""
    if not isinstance(listed, (list, tuple)):
        return listed
    if len(listed) != 1:
        raise UsageError(f"{verb}: expected a list of one tensor, not of {len(listed)}")
    return listed[0]


def _tag(verb: str, tag: int) -> int:
    number = integer_of(tag)
    if number is None:
        raise TypeError(f"{verb}: tag must be an integer, not {type(tag).__name__}")
    if not 0 <= number < 1 << 31:
        raise UsageError(f"{verb}: tag must be an integer from 0 to 2**31 - 1, not {number}")
    return number
