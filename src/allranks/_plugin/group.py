"""torch's ProcessGroup around ours: its verbs, with the arguments that torch's Python and C++ pass.

torch's lists hold one tensor for each device of a process; here there is one. A blocking call (``opts.asyncOp`` is
False) is carried out before it returns.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._pytree import tree_map_only

from allranks._errors import UsageError
from allranks._plugin import NAME
from allranks._plugin.work import DONE, TorchWork
from allranks._types import PremulSum, ReduceOp, as_reduce_op, premul_sum
from allranks._work import Together, Work

if TYPE_CHECKING:
    from allranks._group import ProcessGroup

__all__ = ["TorchGroup", "TorchGroupByDevice"]

_c10d: Any = torch.distributed
_Backend: Any = torch._C._distributed_c10d.Backend
_Event: Any = torch._C._profiler._RecordFunctionFast  # a span for torch's profiler: next to nothing where it is off
_SUM = _c10d.ReduceOp.SUM
_OPS = {getattr(_c10d.ReduceOp.RedOpType, op.name): op for op in ReduceOp}


class _Named(_Backend):  # type: ignore[misc]
    """What torch's C++ asks for a name; it does nothing else."""

    def getBackendName(self) -> str:
        return NAME


class TorchGroup(_c10d.ProcessGroup):  # type: ignore[misc]
    """A group of ours as torch's C++ and Python know one.

    Attributes:
        allranks_group: ours.
    """

    _name = _desc = ""

    def __init__(self, group: ProcessGroup, backend: str, leave: Callable[[ProcessGroup], None]) -> None:
        """``leave`` is called when torch destroys the group."""
        super().__init__(group.rank(), group.size())
        self.allranks_group = group
        self._backend = backend
        self._leave = leave
        self._coalesced: list[Work] | None = None
        self._calls = 0
        self.options = SimpleNamespace(_timeout=timedelta(seconds=group.timeout_s))
        if hasattr(torch._C._distributed_c10d._DistributedBackendOptions, "process_group"):
            # torch from 2.15 on asks the backends of a group for its name, even of one that is made in Python.
            self._named = _Named(group.rank(), group.size())
            self._register_backend(torch.device("cpu"), self.BackendType.CUSTOM, self._named)
            self._set_default_backend(self.BackendType.CUSTOM)

    # --- collectives ---

    def allreduce(self, tensors: Any, opts: Any = _SUM) -> TorchWork:
        return self._call(opts, self.allranks_group.all_reduce, _only(tensors), _op(opts))

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any) -> TorchWork:
        op = _op(opts)
        return self._calls_of(opts, [_given(self.allranks_group.all_reduce, tensor, op, True) for tensor in tensors])

    def reduce(self, tensors: Any, opts: Any) -> TorchWork:
        return self._call(opts, self.allranks_group.reduce, _only(tensors), opts.rootRank, _op(opts))

    def broadcast(self, tensors: Any, opts: Any) -> TorchWork:
        return self._call(opts, self.allranks_group.broadcast, _only(tensors), opts.rootRank)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> TorchWork:
        return self._call(opts, self.allranks_group.all_gather, _only(outputs), _only(inputs))

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> TorchWork:
        return self._call(opts, self.allranks_group.all_gather, output, input)

    _allgather_base = all_gather_single

    def allgather_coalesced(self, outputs: Any, inputs: Sequence[Tensor], opts: Any = None) -> TorchWork:
        """``outputs[r][i]`` is what rank r gives as ``inputs[i]``."""
        each = [[row[i] for row in outputs] for i in range(len(inputs))]
        gather = self.allranks_group.all_gather
        return self._calls_of(opts, [_given(gather, o, i, True) for o, i in zip(each, inputs, strict=True)])

    def all_gather_single_coalesced(self, outputs: Any, inputs: Sequence[Tensor], opts: Any = None) -> TorchWork:
        gather = self.allranks_group.all_gather
        return self._calls_of(opts, [_given(gather, o, i, True) for o, i in zip(outputs, inputs, strict=True)])

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> TorchWork:
        gathered = _only(outputs) if outputs else None
        return self._call(opts, self.allranks_group.gather, _only(inputs), gathered, opts.rootRank)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> TorchWork:
        scattered = _only(inputs) if inputs else None
        return self._call(opts, self.allranks_group.scatter, _only(outputs), scattered, opts.rootRank)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> TorchWork:
        return self._call(opts, self.allranks_group.reduce_scatter, _only(outputs), _only(inputs), _op(opts))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> TorchWork:
        return self._call(opts, self.allranks_group.reduce_scatter, output, input, _op(opts))

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Sequence[Tensor], opts: Any) -> TorchWork:
        op, scatter = _op(opts), self.allranks_group.reduce_scatter
        return self._calls_of(opts, [_given(scatter, o, i, op, True) for o, i in zip(outputs, inputs, strict=True)])

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> TorchWork:
        return self._call(opts, self.allranks_group.all_to_all, outputs, inputs)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> TorchWork:
        return self._call(opts, self.allranks_group.all_to_all_single, output, input, output_splits, input_splits)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> TorchWork:
        limit = getattr(opts, "timeout", None)
        if limit is None or limit <= timedelta(0):  # unset
            return self._call(opts, self.allranks_group.barrier)
        work = self.allranks_group.barrier(True)
        assert work is not None
        if opts.asyncOp:
            return TorchWork(work)
        work.wait(limit)
        return DONE

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        self.allranks_group.monitored_barrier(timeout, wait_all_ranks)

    # --- messages ---

    def send(self, tensors: Any, dst: int, tag: int = 0) -> TorchWork:
        with _Event(f"{self._backend}:send", tensors):
            return self._started(_given(self.allranks_group.isend, _only(tensors), dst, tag))

    def recv(self, tensors: Any, src: int, tag: int = 0) -> TorchWork:
        with _Event(f"{self._backend}:recv", tensors):
            return self._started(_given(self.allranks_group.irecv, _only(tensors), src, tag))

    def recv_anysource(self, tensors: Any, tag: int = 0) -> TorchWork:
        with _Event(f"{self._backend}:recvAnySource", tensors):
            return self._started(_given(self.allranks_group.irecv, _only(tensors), None, tag))

    # --- what torch wants to know of a group ---

    def getBackendName(self) -> str:
        return NAME  # C++ would look for the inside of a backend of another name

    def name(self) -> str:
        return self._backend

    _get_backend_name = name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    setGroupName = _set_group_name

    def getGroupName(self) -> str:
        return self._name

    group_name = property(getGroupName)

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    setGroupDesc = _set_group_desc

    def getGroupDesc(self) -> str:
        return self._desc

    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return [torch.device("cpu"), *([torch.device(here.type)] if here else [])]

    def _get_backend(self, device: torch.device | str) -> TorchGroup:
        return self  # the native engine moves tensors of any device

    supports_coalescing = True
    supports_splitting = False
    supports_shrinking = False
    supports_time_estimate = False
    supports_tensor_alloc = False

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device | None = None) -> TorchWork:
        works, self._coalesced = self._coalesced or [], None
        return TorchWork(Together(works))

    def _get_sequence_number_for_group(self) -> int:
        return self._calls

    def set_timeout(self, timeout: timedelta) -> None:
        warnings.warn(f"the timeout of a group on {NAME} is given when it is made, and stays", stacklevel=3)

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Ours are compared in every call."""

    # --- its end ---

    def shutdown(self) -> None:
        self._leave(self.allranks_group)

    abort = shutdown

    # --- calls ---

    def _call(self, opts: Any, verb: Callable[..., Work | None], *args: Any) -> TorchWork:
        """Calls ``verb``: now, or asynchronously, which is what torch's C++ means that gives no options."""
        self._calls += 1
        with _Event(f"{self._backend}:{verb.__name__}", args[:2]):
            if getattr(opts, "asyncOp", True):
                work = _given(verb, *args, async_op=True)
                return DONE if work is None else self._started(work)
            _given(verb, *args)
        return DONE

    def _calls_of(self, opts: Any, works: Sequence[Work | None]) -> TorchWork:
        self._calls += 1
        together = Together([work for work in works if work is not None])
        if getattr(opts, "asyncOp", True):
            return self._started(together)
        together.wait()
        return DONE

    def _started(self, work: Work) -> TorchWork:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return TorchWork(work)


class TorchGroupByDevice(TorchGroup):
    """Such a group that has torch's own backends for devices other than the CPU, as ``cpu:allranks,cuda:nccl`` asks.

    For torch before 2.15, where a group made in Python takes the place of all backends.
    """

    def __init__(self, group: ProcessGroup, backend: str, leave: Callable[[ProcessGroup], None], others: Any) -> None:
        """``others`` is a group of torch's with those backends."""
        super().__init__(group, backend, leave)
        self._others = others

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *self._others._device_types]

    def _get_backend(self, device: torch.device | str) -> Any:
        return self if torch.device(device).type == "cpu" else self._others._get_backend(torch.device(device))

    def shutdown(self) -> None:
        self._others.shutdown()
        super().shutdown()

    def abort(self) -> None:
        self._others.abort()
        super().abort()

    def barrier(self, opts: Any = None) -> Any:
        if opts is not None and opts.device is not None and opts.device.type != "cpu":
            return self._others.barrier(opts)
        return super().barrier(opts)


def _on_device(verb: str) -> Callable[..., Any]:
    ours = getattr(TorchGroup, verb)

    def call(self: TorchGroupByDevice, *args: Any, **named: Any) -> Any:
        first = next(_tensors((*args, *named.values())), None)
        if first is None or first.device.type == "cpu":
            return ours(self, *args, **named)
        return getattr(self._others, verb)(*args, **named)

    return call


for _verb in (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "gather", "scatter", "alltoall", "send", "recv"),
    *("allgather", "all_gather_single", "_allgather_base", "allgather_coalesced", "all_gather_single_coalesced"),
    *("reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base", "reduce_scatter_single_coalesced"),
    *("allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced", "all_to_all_single", "alltoall_base"),
    "recv_anysource",
):
    setattr(TorchGroupByDevice, _verb, _on_device(_verb))


# torch.compile looks into every function that runs, and finds nothing here that it could make faster.
_eval_frame: Any = torch._C._dynamo.eval_frame
_SKIP = _eval_frame._FrameExecStrategy(*[_eval_frame._FrameAction.SKIP] * 2)
for _class in (TorchGroup, TorchGroupByDevice, TorchWork):
    for _method in filter(inspect.isfunction, vars(_class).values()):
        _eval_frame.set_code_exec_strategy(_method.__code__, _SKIP)


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _given(verb: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Calls ``verb``. What functional collectives return has no memory of its own: it is waited for then."""
    try:
        return verb(*args, **named)
    except UsageError:
        if not any(isinstance(tensor, AsyncCollectiveTensor) for tensor in _tensors(args)):
            raise
    return verb(*tree_map_only(AsyncCollectiveTensor, AsyncCollectiveTensor.trigger_wait, args), **named)


def _only(listed: Any) -> Any:
    """The one thing in a list of torch's."""
    if not isinstance(listed, (list, tuple)):
        return listed
    if len(listed) != 1:
        raise UsageError(f"expected a list of one, not of {len(listed)}: a process has one tensor in a call")
    return listed[0]


def _op(opts: Any) -> ReduceOp | PremulSum:
    op = getattr(opts, "reduceOp", opts)
    kind = getattr(op, "op", op)
    if kind == _c10d.ReduceOp.RedOpType.PREMUL_SUM:
        return premul_sum(op.factor)
    return _OPS[kind] if kind in _OPS else as_reduce_op(kind)
