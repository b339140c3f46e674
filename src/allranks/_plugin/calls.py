"""torch's calls on a group of allranks, as torch's C++ passes them to a backend: lists of tensors, and options.

torch's lists contain one tensor for each device of a process, which is nearly always one. allranks accepts several
tensors wherever gloo does. These calls complete before they return. So does every call whose options contain
``asyncOp = False``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from allranks._base.errors import (
    AllranksError,
    MismatchError,
    NotInitializedError,
    PeerLostError,
    TimeoutError,
    UsageError,
)
from allranks._base.timeouts import SHORTEST_S, seconds_of
from allranks._call.debug import DebugLevel, get_debug_level
from allranks._call.types import PremulSum, ReduceOp, premul_sum
from allranks._call.work import CallWithTimeout, Complete, Together, Work
from allranks._engines.checks import check_apart
from allranks._engines.operands import different
from allranks._plugin.work import DONE, TorchWork

if TYPE_CHECKING:
    from allranks._core import Started
    from allranks._group.process_group import ProcessGroup

__all__ = ["OPS", "Calls", "tensors_in"]

_c10d: Any = torch.distributed
_NOW = timedelta(0)
_GLOOS = "\n  gloo's message: "
_LOST = "Connection closed by peer"
_KINDS = _c10d.ReduceOp.RedOpType
OPS = {_c10d.ReduceOp(getattr(_KINDS, op.name)): op for op in ReduceOp if op is not ReduceOp.PREMUL_SUM}
"""allranks's ops by torch's ops, without PREMUL_SUM, which has a factor."""

_BY_HASH = {hash(kind): op for kind, op in OPS.items()}  # comparing torch's ops takes longer than a small call
# A hash identifies an op only if no two ops share one, and no PREMUL_SUM has one of them.
assert len(_BY_HASH) == len(OPS)
assert hash(_c10d._make_nccl_premul_sum(2.0)) not in _BY_HASH
_LOCALLY: dict[ReduceOp, Callable[[Tensor, Tensor], Any]] = {
    ReduceOp.SUM: Tensor.add_,
    ReduceOp.AVG: Tensor.add_,  # gloo divides by the number of ranks, also for several tensors
    ReduceOp.PRODUCT: Tensor.mul_,
    ReduceOp.MIN: lambda a, b: torch.minimum(a, b, out=a),
    ReduceOp.MAX: lambda a, b: torch.maximum(a, b, out=a),
    ReduceOp.BAND: Tensor.bitwise_and_,
    ReduceOp.BOR: Tensor.bitwise_or_,
    ReduceOp.BXOR: Tensor.bitwise_xor_,
}


class Calls:
    """The calls of a group. Each method takes the arguments of the method with the same name of a torch backend.

    Attributes:
        group: The group of allranks.
        count: Number of collectives that were called.
        coalesced: Works of calls that must complete as one, while torch coalesces calls.
        failure: The first error that broke the group on this rank, or None.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.count = 0
        self.coalesced: list[Work] | None = None
        self.failure: AllranksError | None = None
        # A collective then completes before it returns, so that a mismatch is raised by the call. On gloo, torch's
        # wrapper also compares the calls of all ranks before it starts a collective.
        self._detail = get_debug_level() is DebugLevel.DETAIL

    def restart(self) -> None:
        """Reset the record of calls and failures, because the group has other members."""
        self.count, self.coalesced, self.failure = 0, None, None

    def note(self, error: AllranksError, words: str = "") -> None:
        """Record the error if it means that the group is broken. ``words`` is gloo's text for a timeout."""
        if isinstance(error, TimeoutError):
            late = self.group.rank() in error.ranks
            _add(error, _LOST if late else words or _timed_out(self.group.timeout_s))
        elif isinstance(error, PeerLostError):
            _add(error, _LOST)
        if self.failure is None and not isinstance(error, UsageError):
            self.failure = error

    def started(self, call: Started) -> TorchWork:
        """Return the Work of an asynchronous call that the core has parsed and started."""
        work = TorchWork.begun(call, self)
        if self.coalesced is not None:
            self.coalesced.append(work._work)
        return work

    def allreduce(self, tensors: Sequence[Tensor], opts: Any) -> TorchWork:
        if len(tensors) == 1:
            return self._call(opts, self.group.all_reduce, tensors[0], _op(opts))
        _check_alike("allreduce", tensors)
        _check_distinct("allreduce", tensors)
        op = _op(opts)
        if not isinstance(op, ReduceOp):
            raise UsageError(f"allreduce: PREMUL_SUM supports only a list of one tensor, not of {len(tensors)}")
        first, *others = tensors
        # As in gloo, each tensor of the process is an operand of its own.
        for other in others:
            _LOCALLY[op](first, other)
        self._call_now(opts, self.group.all_reduce, first, op)
        return _copied(first, others)

    allreduce_sparse = allreduce

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any) -> TorchWork:
        _check_coalesced(tensors)
        _check_distinct("allreduce_coalesced", tensors)
        op, reduce, seen = _op(opts), self.group.all_reduce, set()
        apart = []
        for tensor in tensors:  # if a tensor is listed twice, each entry is reduced from its original value
            apart.append(tensor.clone() if id(tensor) in seen else tensor)
            seen.add(id(tensor))
        return self._calls_of(opts, [lambda t=tensor: reduce(t, op, True) for tensor in apart])  # type: ignore[misc]

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> TorchWork:
        _check_root("reduce", opts, tensors)
        return self._call(opts, self.group.reduce, _only("reduce", "tensor list", tensors), opts.rootRank, _op(opts))

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> TorchWork:
        root, which = opts.rootRank, opts.rootTensor
        if which or len(tensors) != 1:
            _check_root("broadcast", opts, tensors)
            _check_alike("broadcast", tensors)
        if len(tensors) == 1:
            return self._call(opts, self.group.broadcast, tensors[0], root)
        _check_distinct("broadcast", tensors)
        others = list(tensors)
        moved = others.pop(which)
        self._call_now(opts, self.group.broadcast, moved, root)
        return _copied(moved, others)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> TorchWork:
        if len(inputs) == 1 == len(outputs):
            return self._call(opts, self.group.all_gather, outputs[0], inputs[0])
        if not inputs:
            raise UsageError("allgather: requires non-empty input tensor list")
        if len(inputs) != len(outputs):
            raise UsageError("allgather: requires input/output tensor lists to have the same length")
        if any(len(row) != len(inputs) * self.group.size() for row in outputs):
            raise UsageError(f"allgather: invalid output tensor list: not of {len(inputs) * self.group.size()} tensors")
        results = list(tensors_in(outputs))
        _check_alike("allgather", [*inputs, *results])
        check_apart("allgather", results)
        for i, tensor in enumerate(inputs):
            # gloo orders the results by rank, and within a rank by input.
            self._call_now(opts, self.group.all_gather, outputs[0][i :: len(inputs)], tensor)
        for row in outputs[1:]:
            for output, gathered in zip(row, outputs[0], strict=True):
                output.copy_(gathered)
        return TorchWork.of(Complete([list(row) for row in outputs]))  # type: ignore[misc]  # like gloo's future

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any) -> TorchWork:
        return self._call(opts, self.group.all_gather, output, input)

    _allgather_base = all_gather_single

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any
    ) -> TorchWork:
        """Gather into ``outputs[r][i]`` the tensor that rank r passes as ``inputs[i]``."""
        if len(outputs) != self.group.size():
            raise UsageError(f"allgather_coalesced: output lists should be equal to world size, not {len(outputs)}")
        for row in outputs:
            _check_lengths("allgather_coalesced", row, inputs)
            for index, (output, given) in enumerate(zip(row, inputs, strict=True)):
                if output.dtype != given.dtype:
                    raise UsageError(f"allgather_coalesced: invalid tensor type at index {index}: {output.dtype}")
                if output.shape != given.shape:
                    raise UsageError(
                        f"allgather_coalesced: invalid size of output tensor at index {index}: {list(output.shape)}, "
                        f"not {list(given.shape)}"
                    )
        return self.all_gather_single_coalesced(list(zip(*outputs, strict=True)), inputs, opts)

    def all_gather_single_coalesced(self, outputs: Sequence[Any], inputs: Sequence[Tensor], opts: Any) -> TorchWork:
        gather = self.group.all_gather
        _check_lengths("all_gather_single_coalesced", outputs, inputs)
        check_apart("all_gather_single_coalesced", list(tensors_in(outputs)))
        pairs = zip(outputs, inputs, strict=True)
        return self._calls_of(opts, [lambda o=o, i=i: gather(o, i, True) for o, i in pairs])  # type: ignore[misc]

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> TorchWork:
        _check_root("gather", opts)
        tensor = _only("gather", "input tensor list", inputs)
        gathered = self._of_root("gather", "output", outputs, opts)
        return self._call(opts, self.group.gather, tensor, gathered, opts.rootRank)

    def gather_single(self, output: Tensor, input: Tensor, opts: Any) -> TorchWork:
        rows = list(output.view(self.group.size(), *input.shape)) if opts.rootRank == self.group.rank() else None
        return self._call(opts, self.group.gather, input, rows, opts.rootRank)

    gather_into_tensor = gather_single

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> TorchWork:
        _check_root("scatter", opts)
        tensor = _only("scatter", "output tensor list", outputs)
        scattered = self._of_root("scatter", "input", inputs, opts)
        return self._call(opts, self.group.scatter, tensor, scattered, opts.rootRank)

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> TorchWork:
        tensor = _only("reduce_scatter", "output tensor list", outputs)
        given = _only("reduce_scatter", "input list", inputs)
        # As in gloo, each rank's part may have a different size.
        same_size = len({each.numel() for each in given}) == 1
        verb = self.group.reduce_scatter if same_size else self.group.reduce_scatter_v
        return self._call(opts, verb, tensor, given, _op(opts))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> TorchWork:
        return self._call(opts, self.group.reduce_scatter, output, input, _op(opts))

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Any], opts: Any) -> TorchWork:
        op, scatter = _op(opts), self.group.reduce_scatter
        _check_lengths("reduce_scatter_single_coalesced", outputs, inputs)
        check_apart("reduce_scatter_single_coalesced", outputs)
        pairs = zip(outputs, inputs, strict=True)
        return self._calls_of(opts, [lambda o=o, i=i: scatter(o, i, op, True) for o, i in pairs])  # type: ignore[misc]

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any) -> TorchWork:
        return self._call(opts, self.group.all_to_all, outputs, inputs)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], opts: Any
    ) -> TorchWork:
        return self._call(opts, self.group.all_to_all_single, output, input, output_splits, input_splits)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any) -> TorchWork:
        return self._call(opts, self.group.barrier)

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int) -> TorchWork:
        return self._message(self.group.isend, _only("send", "tensor list", tensors), dst, tag)

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int) -> TorchWork:
        return self._message(self.group.irecv, _only("recv", "tensor list", tensors), src, tag)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> TorchWork:
        return self._message(self.group.irecv, _only("recv_anysource", "tensor list", tensors), None, tag)

    # --- coalesced calls ---

    def start_coalescing(self) -> None:
        self.coalesced = []

    def end_coalescing(self) -> TorchWork:
        works, self.coalesced = self.coalesced or [], None
        return TorchWork.of(Together(works), self.note)

    # --- execution of calls ---

    def _call(self, opts: Any, verb: Callable[..., Work | None], *args: Any) -> TorchWork:
        self.count += 1
        try:
            # torch passes a negative timeout if the call has none of its own.
            if opts.timeout >= _NOW:
                return self._limited(opts, verb(*args, async_op=True), opts.timeout)
            if not opts.asyncOp:
                verb(*args)
                return DONE
            work = verb(*args, async_op=True)
            return DONE if work is None else self._begun(work)
        except AllranksError as error:
            self.annotate(error, (*args, opts))
            raise

    def annotate(self, error: AllranksError, given: Sequence[Any]) -> None:
        """Add gloo's text to the error of a collective, and record the error. ``given`` ends with the options."""
        if isinstance(error, NotInitializedError):
            return
        *args, opts = given
        words = ""
        if isinstance(error, UsageError):
            _add(error, _in_gloos_words(self.group.size(), opts, args))
        elif self._detail and isinstance(error, MismatchError):
            _add(error, _differs(self.count, self.group.rank(), opts, args))
        elif isinstance(error, TimeoutError):
            limit_s = opts.timeout.total_seconds() if opts.timeout >= _NOW else self.group.timeout_s
            words = _monitored(self.group.rank(), error.ranks, limit_s) if self._detail else _timed_out(limit_s)
        self.note(error, words)

    def _call_now(self, opts: Any, verb: Callable[..., Work | None], *args: Any) -> None:
        self.count += 1
        try:
            work = verb(*args, async_op=True)
            if work is not None:
                work.wait(max(seconds_of(opts.timeout), SHORTEST_S) if opts.timeout >= _NOW else None)
        except AllranksError as error:
            self.annotate(error, (*args, opts))
            raise

    def _calls_of(self, opts: Any, calls: Sequence[Callable[[], Work | None]]) -> TorchWork:
        self.count += 1
        try:
            together = Together([work for work in [call() for call in calls] if work is not None])
            if opts.timeout >= _NOW:
                return self._limited(opts, together, opts.timeout)
            if opts.asyncOp:
                return self._begun(together)
            together.wait()
            return DONE
        except AllranksError as error:
            self.annotate(error, (opts,))
            raise

    def _limited(self, opts: Any, work: Work | None, limit: timedelta) -> TorchWork:
        if work is None:
            return DONE
        if opts.asyncOp:
            return self._begun(CallWithTimeout(work, seconds_of(limit)), _timed_out(limit.total_seconds()))
        work.wait(max(seconds_of(limit), SHORTEST_S))
        return DONE

    def _begun(self, work: Work, words: str = "") -> TorchWork:
        """Return the Work of an asynchronous collective. ``words`` is gloo's text if it times out."""
        if self._detail:
            work.wait()
        return self._started(work, words)

    def _message(self, verb: Callable[..., Work], *args: Any) -> TorchWork:
        try:
            return self._started(verb(*args))
        except AllranksError as error:
            self.note(error)
            raise

    def _started(self, work: Work, words: str = "") -> TorchWork:
        if self.coalesced is not None:
            self.coalesced.append(work)
        return TorchWork.of(work, partial(self.note, words=words) if words else self.note)

    def _of_root(self, verb: str, what: str, lists: Sequence[Sequence[Tensor]], opts: Any) -> Sequence[Tensor] | None:
        """Return the list that only the root passes."""
        if opts.rootRank != self.group.rank():
            if lists:
                raise UsageError(f"{verb}: requires empty {what} on non-root")
            return None
        given = _only(verb, f"{what} list", lists)
        if len(given) != self.group.size():
            raise UsageError(
                f"{verb}: Incorrect {what} list size {len(given)}. {what.capitalize()} list size should be "
                f"{self.group.size()}, same as the number of ranks"
            )
        return given  # type: ignore[no-any-return]


def tensors_in(values: Sequence[Any]) -> Iterator[Tensor]:
    """Yield the tensors in nested lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def _copied(source: Tensor, others: Sequence[Tensor]) -> TorchWork:
    for other in others:
        other.copy_(source)
    return TorchWork.of(Complete([source, *others]))


def _only(verb: str, what: str, listed: Sequence[Any]) -> Any:
    """Return the only element of a list. torch's methods take a list here."""
    if len(listed) != 1:
        raise UsageError(f"{verb}: requires a single-element {what}, not one of {len(listed)}")
    return listed[0]


def _check_root(verb: str, opts: Any, tensors: Sequence[Tensor] | None = None) -> None:
    if opts.rootRank < 0:
        raise UsageError(f"{verb}: invalid root rank: {opts.rootRank}")
    if tensors is not None and not 0 <= opts.rootTensor < len(tensors):
        raise UsageError(f"{verb}: invalid root tensor: {opts.rootTensor} of {len(tensors)}")


def _check_coalesced(tensors: Sequence[Tensor]) -> None:
    if not tensors:
        raise UsageError("allreduce_coalesced: requires non-empty tensor list")
    first = tensors[0]
    for index, tensor in enumerate(tensors):
        if tensor.layout != first.layout:
            raise UsageError(f"allreduce_coalesced: invalid tensor layout at index {index}: {tensor.layout}")
        if tensor.dtype != first.dtype:
            raise UsageError(
                f"allreduce_coalesced: tensors must all have the same type: {tensor.dtype} beside {first.dtype}"
            )
    if first.layout != torch.strided:
        raise UsageError(f"allreduce_coalesced: unsupported layout: {first.layout}")


def _in_gloos_words(size: int, opts: Any, args: Sequence[Any]) -> str:
    """Return the text of gloo's error for these arguments, for programs that match it. "" if gloo accepts them."""
    root, op = getattr(opts, "rootRank", 0), getattr(opts, "reduceOp", None)
    if not 0 <= root < size:
        return f"invalid root rank: {root}"
    if any(isinstance(given, (list, tuple)) and len(given) != size for given in args):
        return f"invalid output tensor list: not of {size} tensors"
    tensors = list(tensors_in(args))
    if len({tensor.dtype for tensor in tensors}) > 1:
        return "invalid tensor type: they differ"
    if any(tensor.layout != torch.strided for tensor in tensors) and op not in (None, _KINDS.SUM):
        return "unsupported reduction operation"
    if len({tensor.shape for tensor in tensors}) > 1:
        return "invalid tensor size: they differ"
    return ""


def _add(error: AllranksError, words: str) -> None:
    """Add gloo's text to an error, for programs that match it. A later call may raise the same error again."""
    if words and _GLOOS not in str(error):
        error.args = (f"{error}{_GLOOS}{words}",)


def _timed_out(limit_s: float) -> str:
    return f"Timed out waiting {limit_s * 1000:.0f}ms for recv operation to complete"


def _monitored(rank: int, missing: Sequence[int], limit_s: float) -> str:
    """Return the text of torch's wrapper of gloo, which makes a monitored barrier before each collective."""
    if rank != 0:
        return "Please check rank 0 logs for faulty rank"
    return f"Ranks {', '.join(map(str, missing))} failed to pass monitoredBarrier in {limit_s * 1000:.0f} ms"


def _differs(number: int, rank: int, opts: Any, args: Sequence[Any]) -> str:
    """Return the text of torch's wrapper of gloo if the calls of the ranks differ, with the call of this rank."""
    name = type(opts).__name__.removesuffix("Options")
    name = name.replace("ReduceScatter", "Reduce_Scatter").replace("Coalesced", "_Coalesced").upper()
    tensor = next(tensors_in(args), None)
    kind = "" if tensor is None else tensor.type().rpartition(".")[2].removesuffix("Tensor")
    operand = (
        ""
        if tensor is None
        else f", TensorShape={list(tensor.shape)}, TensorDtypes={kind}, TensorDeviceTypes={tensor.device.type}"
    )
    return (
        f"Detected mismatch between collectives on ranks. Rank {rank} is running collective: CollectiveFingerPrint("
        f"SequenceNumber={number}, OpType={name}{operand}). Collectives differ in the following aspects: see above"
    )


def _check_distinct(verb: str, tensors: Sequence[Tensor]) -> None:
    """Raise if tensors share memory. The same tensor may be listed several times."""
    check_apart(verb, different(tensors))


def _check_lengths(verb: str, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
    if len(outputs) != len(inputs):
        raise UsageError(f"{verb}: expected {len(inputs)} outputs, one for each input, not {len(outputs)}")


def _check_alike(verb: str, tensors: Sequence[Tensor]) -> None:
    if not tensors:
        raise UsageError(f"{verb}: requires non-empty tensor list")
    first = tensors[0]
    for tensor in tensors[1:]:
        for what, a, b in (
            ("layout", first.layout, tensor.layout),
            ("type", first.dtype, tensor.dtype),
            ("size", first.shape, tensor.shape),
        ):
            if a != b:
                raise UsageError(f"{verb}: invalid tensor {what}: {b} beside {a}")


def _op(opts: Any) -> ReduceOp | PremulSum:
    given = opts.reduceOp
    op = _BY_HASH.get(hash(given))
    if op is None:
        return premul_sum(given.__getstate__()[1])  # the factor; it has its own attribute only in torch 2.11 and later
    return op
