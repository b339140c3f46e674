"""torch's operators (``torch.ops.c10d``) on groups of allranks, for code that observes or calls operators.

Dispatch modes (CommDebugMode), profilers, tensor subclasses and tracing observe a call only as an operator. torch's
kernels for the operators call a backend in C++. In torch 2.15 and later, this backend can be in Python
(``make_backend``) for nearly all operators. Earlier versions do not support this. For them, ``install`` registers a
kernel before each of torch's kernels, which forwards calls for other groups. Its dispatch key, BackendSelect, comes
after all observers, and no other kernel uses it for these operators.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

from allranks._base.errors import UsageError
from allranks._call.work import Together
from allranks._plugin.work import TorchWork

if TYPE_CHECKING:
    from allranks._plugin.calls import Calls

__all__ = ["BACKENDS_IN_PYTHON", "Operator", "install", "make_backend"]

_torch: Any = torch
_c10d: Any = torch.distributed
_C: Any = torch._C._distributed_c10d
_Event: Any = torch._C._profiler._RecordFunctionFast
_AFTER = _torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

BACKENDS_IN_PYTHON: bool = hasattr(_C._DistributedBackendOptions, "process_group")

# By operator: the method of Calls, and its type of options.
_OPERATORS: dict[str, tuple[str, Any]] = {
    "_allgather_base_": ("all_gather_single", _C.AllgatherOptions),
    "_reduce_scatter_base_": ("reduce_scatter_single", _C.ReduceScatterOptions),
    "allgather_": ("allgather", _C.AllgatherOptions),
    "allgather_coalesced_": ("allgather_coalesced", _C.AllgatherOptions),
    "allgather_into_tensor_coalesced_": ("all_gather_single_coalesced", _C.AllgatherOptions),
    "allreduce_": ("allreduce", _C.AllreduceOptions),
    "allreduce_coalesced_": ("allreduce_coalesced", _C.AllreduceCoalescedOptions),
    "alltoall_": ("alltoall", _C.AllToAllOptions),
    "alltoall_base_": ("all_to_all_single", _C.AllToAllOptions),
    "barrier": ("barrier", _C.BarrierOptions),
    "broadcast_": ("broadcast", _C.BroadcastOptions),
    "gather_": ("gather", _C.GatherOptions),
    "gather_into_tensor_": ("gather_single", _C.GatherOptions),
    "recv_": ("recv", None),
    "recv_any_source_": ("recv_anysource", None),
    "reduce_": ("reduce", _C.ReduceOptions),
    "reduce_scatter_": ("reduce_scatter", _C.ReduceScatterOptions),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter_single_coalesced", _C.ReduceScatterOptions),
    "scatter_": ("scatter", _C.ScatterOptions),
    "send": ("send", None),
}
_NOT_IN_PYTHON = ("gather_into_tensor_",)  # operators that torch never forwards to a backend in Python
_FIELDS = {
    "reduce_op": "reduceOp",
    "root_rank": "rootRank",
    "root_tensor": "rootTensor",
    "async_op": "asyncOp",
    "timeout": "timeout",
}
_UNUSED = ("process_group", "sparse_indices", "device_ids", "tensor")

# The names of gloo's spans in a profile, by method.
_SPANS = {
    "all_gather_single": "_all_gather_base",
    "all_gather_single_coalesced": "all_gather",
    "all_to_all_single": "all_to_all",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "alltoall": "all_to_all",
    "recv_anysource": "recvAnySource",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "_reduce_scatter_base",
}


class _OpenOperators(threading.local):
    def __init__(self) -> None:
        self.operators: list[Operator] = []


_open = _OpenOperators()


class Operator:
    """An operator that a method of TorchGroup calls.

    C++ returns the Work of a call as an object of its own type. The method returns the original Work instead.
    """

    def __init__(self, *given: Any) -> None:
        """Store the arguments of the method, ``given``."""
        self.given = given
        self.works: list[TorchWork] = []

    def __enter__(self) -> Operator:
        _open.operators.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _open.operators.remove(self)

    @staticmethod
    def is_open() -> bool:
        """Return whether this thread is inside an operator."""
        return bool(_open.operators)

    def work(self, returned: Any) -> Any:
        """Return the Work of the call. ``returned`` is the Work from C++."""
        if not self.works:
            return returned  # an observer has not forwarded the call
        return self.works[0] if len(self.works) == 1 else TorchWork.of(Together([work._work for work in self.works]))


def _carry_out(calls: Calls, backend: str, method: str, *args: Any) -> TorchWork:
    event = _Event(f"{backend}:{_SPANS.get(method, method)}", args[:2])
    event.__enter__()
    try:
        work: TorchWork = getattr(calls, method)(*args)
    finally:
        # The last reference ends the span. __exit__ raises if a profiler of all threads has started during the call.
        del event
    # The innermost operator: observers may call further operators within one.
    if _open.operators:
        _open.operators[-1].works.append(work)
    return work


# --- torch 2.15 and later: a backend in Python ---


def make_backend(calls: Calls, backend: str, name: str, group: Callable[[], Any]) -> Any:
    """Create the backend that torch's kernels call.

    Args:
        calls: The calls of the group.
        backend: Name in profiles.
        name: Name for torch's C++.
        group: Returns torch's group to which the backend belongs.
    """
    return _backend_class()(calls, backend, name, group)


@cache
def _backend_class() -> type:
    base = _C.Backend

    class OperatorBackend(base):  # type: ignore[misc, valid-type]
        def __init__(self, calls: Calls, backend: str, name: str, group: Callable[[], Any]) -> None:
            super().__init__(calls.group.rank(), calls.group.size())
            self._calls, self._backend, self._name, self._group = calls, backend, name, group

        def getBackendName(self) -> str:
            return self._name

        @property
        def options(self) -> Any:
            raise UsageError(f"torch cannot create a group on {self._name} from other groups.\n  Call new_group.")

    def method(name: str) -> Callable[..., TorchWork]:
        return lambda self, *args: _carry_out(self._calls, self._backend, name, *args)

    def of_group(name: str) -> Callable[..., Any]:
        return lambda self, *args: getattr(self._group(), name)(*args)

    for name in ("allreduce_sparse", *(name for name, _ in _OPERATORS.values())):
        setattr(OperatorBackend, name, method(name))
    for name in ("rank", "size", "get_reconfigure_handle", "reconfigure", "abort", "get_error"):
        setattr(OperatorBackend, name, of_group(name))
    for name in filter(lambda name: name.startswith("supports_"), dir(base)):
        setattr(OperatorBackend, name, False)  # torch's own properties would query this class recursively
    OperatorBackend.supports_reconfigure = True
    return OperatorBackend


# --- kernels before torch's kernels ---


@cache
def install(ours: type) -> Any:
    """Make operators work on groups of the class ``ours``. Return the libraries that keep the kernels registered."""
    library = _torch.library.Library("c10d", "IMPL")
    for name in filter(partial(hasattr, torch.ops.c10d), _NOT_IN_PYTHON if BACKENDS_IN_PYTHON else _OPERATORS):
        kernel = _kernel(getattr(torch.ops.c10d, name).default, ours, *_OPERATORS[name])
        library.impl(name, kernel, "BackendSelect", with_keyset=True)
    monitored = torch.ops.c10d.monitored_barrier_.default

    def monitored_barrier(keys: Any, tensor: Any, group: Any, devices: Any, milliseconds: int, every: bool) -> None:
        calls = _calls_of(ours, group, (tensor,))
        if calls is None:
            monitored.redispatch(keys & _AFTER, tensor, group, devices, milliseconds, every)
        else:
            calls.group.monitored_barrier(timedelta(milliseconds=milliseconds), every)

    library.impl("monitored_barrier_", monitored_barrier, "BackendSelect", with_keyset=True)
    return library, None if BACKENDS_IN_PYTHON else _install_batches(ours)


def _install_batches(ours: type) -> Any:
    """Register a kernel for compiled messages, because torch's kernel first queries a backend in C++."""
    functional = torch.ops._c10d_functional
    if not hasattr(functional, "batch_p2p_ops"):
        return None
    library = _torch.library.Library("_c10d_functional", "IMPL")
    batch = functional.batch_p2p_ops.default

    def batch_p2p_ops(keys: Any, verbs: Any, peers: Any, tags: Any, tensors: Any, name: str) -> Any:
        # Only groups of allranks get this kernel. Others continue with torch's, after this dispatch key.
        if not isinstance(_c10d.distributed_c10d._resolve_process_group(name), ours):
            return batch.redispatch(keys & _AFTER, verbs, peers, tags, tensors, name)
        each = zip(verbs, tensors, peers, tags, strict=True)
        return [getattr(functional, verb)(tensor, peer, tag, name) for verb, tensor, peer, tag in each]

    library.impl("batch_p2p_ops", batch_p2p_ops, "BackendSelect", with_keyset=True)
    return library


def _kernel(operator: Any, ours: type, method: str, options: Any) -> Callable[..., Any]:
    names = [argument.name for argument in operator._schema.arguments]
    where = names.index("process_group")
    with_tensors = len(operator._schema.returns) == 2

    def kernel(keys: Any, *args: Any) -> Any:
        calls = _calls_of(ours, args[where], args)
        # A kernel for all groups of the process: calls of other groups continue after this key, or they would loop.
        if calls is None:
            return operator.redispatch(keys & _AFTER, *args)
        operands, opts = [], None if options is None else options()
        for name, value in zip(names, args, strict=False):  # args lacks trailing arguments with default values
            if name in _FIELDS:
                setattr(opts, _FIELDS[name], _field(name, value))
            elif name not in _UNUSED:
                operands.append(value)
        group = _c10d.ProcessGroup.unbox(args[where])
        work = _carry_out(calls, group.name(), method, *operands, *([] if opts is None else [opts]))
        # C++ keeps only a Work that a Python method of a group has returned, so the Work passes through one.
        boxed = _held(work).boxed()
        return (args[0], boxed) if with_tensors else boxed

    return kernel


def _calls_of(ours: Any, boxed: Any, args: tuple[Any, ...]) -> Calls | None:
    group = _c10d.ProcessGroup.unbox(boxed)
    return group._calls_for(args) if isinstance(group, ours) else None


def _field(name: str, value: Any) -> Any:
    if name == "timeout":
        return timedelta(milliseconds=value)
    return _reduce_op(value) if name == "reduce_op" else value


def _reduce_op(boxed: Any) -> Any:
    kind = _c10d.ReduceOp.RedOpType(boxed.op())
    if kind != _c10d.ReduceOp.RedOpType.PREMUL_SUM:
        return _c10d.ReduceOp(kind)
    # The factor cannot be read from the boxed op. Only methods pass such an op, and their arguments contain it.
    given = [getattr(value, "reduceOp", value) for operator in _open.operators for value in operator.given]
    return next(op for op in reversed(given) if isinstance(op, _c10d.ReduceOp))


class _Holder(_c10d.ProcessGroup):  # type: ignore[misc]
    """Keeps a Work alive: C++ keeps only a Work that a Python method of a group returns to it."""

    def __init__(self, work: TorchWork) -> None:
        super().__init__(0, 1)
        self._work = work

    def barrier(self, opts: Any = None) -> TorchWork:
        return self._work


def _held(work: TorchWork) -> Any:
    return _c10d.ProcessGroup.barrier(_Holder(work))
