"""One handle for many workers: each worker stores a tensor under the same id, and a command is encoded once for all.

Operations that each worker executes alone are queued for a group as for one worker. This module contains collective
operations, and the distribution and collection of tensors.

Their autograd side is in `torch_device.exchange`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from allranks._base.errors import UsageError
from allranks._base.public import publish
from allranks.remote.protocol.signature import signature
from allranks.remote.torch_device.call_site import here
from allranks.remote.torch_device.exchange import apply_linear, as_view, has_tangent, part, zero_padded
from allranks.remote.torch_device.handle import DeviceTarget, Handle, make
from allranks.remote.torch_device.tensor import RemoteTensor

__all__ = ["Group", "all_reduce_", "broadcast_"]

_OPS = {"sum": "SUM", "avg": "AVG", "mean": "AVG", "product": "PRODUCT", "prod": "PRODUCT", "min": "MIN", "max": "MAX"}
_LINEAR = ("sum", "avg", "mean")


class Group:
    """Several workers that are driven as one: ``mw.group([1, 2, 3, 4])``.

    Within ``with group:`` factories create tensors on all of them. The group ends when no reference to it, or to a
    tensor on it, is left (`Master.group` keeps the last few alive).

    Attributes:
        ranks: The workers.
        device: The device for ``device=`` and ``.to()``. Its index is a number of this process only, and does not keep
            the group alive.
    """

    def __init__(self, place: DeviceTarget) -> None:
        self._target = place
        self.ranks = place.ranks
        self._contexts: list[Any] = []

    @property
    def _place(self) -> DeviceTarget:
        while self._target.successor is not None:
            self._target = self._target.successor
        return self._target

    @property
    def device(self) -> torch.device:
        return self._place.device

    def __enter__(self) -> Group:
        device = self.device
        device.__enter__()
        self._contexts.append(device)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._contexts.pop().__exit__(*exception)

    def __len__(self) -> int:
        return len(self.ranks)

    def __repr__(self) -> str:
        return f"Group(ranks={list(self.ranks)}, device='{self.device}')"

    def scatter(self, tensor: torch.Tensor, dim: int = 0) -> RemoteTensor:
        """Send each worker its part of a tensor of the master or of one worker, in the order of the ranks.

        Raises:
            UsageError: The tensor cannot be split into equal parts for all workers.

        Shape:
            ``[n, ...]`` here, ``[n / len(group), ...]`` on each worker.
        """
        self._share("scatter", tensor.shape, dim)
        if not isinstance(tensor, RemoteTensor):
            made: RemoteTensor = apply_linear(partial(self._deal, dim), partial(self._collect, dim), tensor)
            return made
        parts = zip(tensor.chunk(len(self.ranks), dim), self.ranks, strict=True)
        source = tensor._place.ranks
        return self.join(
            [
                # A part that stays on its worker is copied, too. Otherwise it would share memory with the source.
                part.clone(memory_format=torch.contiguous_format)
                if (rank,) == source
                else part.contiguous().to(f"worker:{rank}")
                for part, rank in parts
            ]
        )

    def join(self, tensors: Sequence[torch.Tensor]) -> RemoteTensor:
        """Combine tensors of the same shape, one on each worker in the order of the ranks, into one handle.

        The handle shares memory with them. If autograd records the join, they must not be changed in place until the
        backward.
        """
        if len(tensors) != len(self.ranks):
            raise UsageError(f"join: expected {len(self.ranks)} tensors, one for each worker, not {len(tensors)}")
        handles: list[RemoteTensor] = []
        for tensor, rank in zip(tensors, self.ranks, strict=True):
            if not isinstance(tensor, RemoteTensor) or tensor._place.ranks != (rank,):
                where = tensor._place if isinstance(tensor, RemoteTensor) else tensor.device
                raise UsageError(f"join: expected a tensor on worker:{rank}, not on {where}")
            handles.append(tensor)
        if len({(each._sig, each._off) for each in handles}) > 1:
            looks = sorted(
                {f"{x.dtype} {tuple(x.shape)}, strides {x.stride()}, offset {x.storage_offset()}" for x in handles}
            )
            raise UsageError(
                f"join: the tensors differ: {'; '.join(looks)}.\n"
                "  Convert them to one dtype and one shape, and clone views."
            )
        made: RemoteTensor = apply_linear(self._join, self._split, *handles)
        if made.grad_fn is not None:
            made.grad_fn.register_prehook(partial(_see_unchanged, handles, [each._version for each in handles]))
        return made

    def gather(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Concatenate the workers' tensors along a dimension, on the master. Waits for them.

        Tensors without dimensions form a vector, here and in `all_gather`.
        """
        made: torch.Tensor = apply_linear(
            partial(self._collect, dim), partial(self._deal, dim), _as_row(self._mine("gather", tensor))
        )
        return made

    def all_reduce_(self, tensors: torch.Tensor | Iterable[torch.Tensor], op: str = "sum") -> None:
        """Reduce tensors over the workers, in place: ``sum``, ``avg``, ``product``, ``min`` or ``max``."""
        reduction = _op("all_reduce_", op)

        def reduce(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self._copied("all_reduce", reduction, given)

        self._together("all_reduce", reduction, tensors, reduce, reduce if op in _LINEAR else None)

    def broadcast_(self, tensors: torch.Tensor | Iterable[torch.Tensor], src: int) -> None:
        """Copy the tensors, or parameters, of worker `src` to all workers, in place."""
        if src not in self.ranks:
            raise UsageError(f"broadcast_: src={src} is not in the group, which has the ranks {list(self.ranks)}")
        root = self.ranks.index(src)

        def spread(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self._copied("broadcast", root, given)

        def add(*grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
            totals = self._copied("all_reduce", "SUM", grads)
            return tuple(zero_padded(self._place, src, part(each, src)) for each in totals)

        self._together("broadcast", root, tensors, spread, add)

    def all_gather(self, tensor: torch.Tensor, dim: int = 0) -> RemoteTensor:
        """Concatenate all workers' tensors along a dimension, on each worker."""
        row = _as_row(self._mine("all_gather", tensor))
        made: RemoteTensor = apply_linear(
            partial(self._all_gather, dim), partial(self._reduce_scatter, "SUM", dim), row
        )
        return made

    def reduce_scatter(self, tensor: torch.Tensor, op: str = "sum", dim: int = 0) -> RemoteTensor:
        """Reduce the workers' tensors, and return each worker its part along a dimension."""
        reduction = _op("reduce_scatter", op)
        handle = self._mine("reduce_scatter", tensor)
        self._share("reduce_scatter", handle.shape, dim)
        if op not in _LINEAR and ((torch.is_grad_enabled() and handle.requires_grad) or has_tangent(handle)):
            raise _no_graph("reduce_scatter", op)
        # The transpose of an average also divides by the number of workers.
        share = len(self.ranks) if reduction == "AVG" else 1
        made: RemoteTensor = apply_linear(
            partial(self._reduce_scatter, reduction, dim), lambda grad: self._all_gather(dim, grad) / share, handle
        )
        return made

    # Functions that run below autograd.

    def _deal(self, dim: int, tensor: torch.Tensor) -> Handle:
        """Send each worker its part."""
        place, master = self._place, self._place.master
        master.connections.refuse_recording("the step sends a tensor of the master to workers")
        master.connections.check(place)
        plain = tensor.detach().resolve_conj().resolve_neg()
        parts = [each.contiguous() for each in plain.chunk(len(self.ranks), dim)]
        sig = signature(tensor.dtype, parts[0].shape, parts[0].stride())
        (ref,) = master.connections.outbox.reserve(place.target, 1)
        for each, rank in zip(parts, self.ranks, strict=True):
            master.transfers.hold(master.devices.worker(rank), ref, sig, each)
        return make(place, sig, ref)

    def _collect(self, dim: int, handle: Handle) -> torch.Tensor:
        """Fetch the parts."""
        return torch.cat([part(handle, rank).cpu() for rank in self.ranks], dim)

    def _join(self, *handles: Handle) -> Handle:
        place, master, first = self._place, self._place.master, handles[0]
        outbox = master.connections.outbox
        (ref,) = outbox.reserve(place.target, 1)
        key = ("join", first._sig)
        for handle in handles:
            own = handle._place
            call = own.calls.get(key)
            if call is None:
                new = ("new", first._sig, 0, True, 0)
                call = master.operators.define(
                    own, key, torch.ops.aten.alias.default, [["t"]], {}, [], [new], [], False
                )
            # The id of the result is passed explicitly, because it is the same on all workers.
            own.call(own.target, here(1), call.number, (handle._ref, outbox.view(ref, own.target)), 0)
        return as_view(first, make(place, first._sig, ref, first._off))

    def _split(self, handle: Handle) -> tuple[Handle, ...]:
        return tuple(part(handle, rank) for rank in self.ranks)

    def _all_gather(self, dim: int, handle: Handle) -> Handle:
        shape = list(handle.shape)
        shape[dim] = handle.size(dim) * len(self.ranks)
        return self._new("all_gather", handle, shape, [dim])

    def _reduce_scatter(self, op: str, dim: int, handle: Handle) -> Handle:
        shape = list(handle.shape)
        shape[dim] = self._share("reduce_scatter", handle.shape, dim)
        return self._new("reduce_scatter", handle, shape, [op, dim])

    def _new(self, name: str, handle: Handle, shape: list[int], arguments: list[Any]) -> Handle:
        looks = torch.empty(shape, device="meta")
        sig = signature(handle.dtype, looks.shape, looks.stride())
        plain: Any = handle.resolve_conj().resolve_neg()
        (made,) = self._place.master.operators.invoke(self._place, name, self._link(), [plain], arguments, [sig])
        return made

    def _together(
        self,
        name: str,
        argument: Any,
        tensors: torch.Tensor | Iterable[torch.Tensor],
        there: Callable[..., Any],
        back: Callable[..., Any] | None,
    ) -> None:
        """Change tensors in place. Autograd records this for results of operations, and not for parameters.

        Args:
            name: The name of the operation.
            argument: Its argument.
            tensors: Tensors of this group.
            there: Applies the operation to copies of tensors.
            back: The transpose of `there`, or None if it has none.
        """
        listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        handles = [self._mine(f"{name}_", each) for each in listed]
        if len(self.ranks) == 1:
            return
        seen = [x for x in handles if (torch.is_grad_enabled() and x.grad_fn is not None) or has_tangent(x)]
        if seen:
            if back is None:
                raise _no_graph(f"{name}_", argument.lower())
            for handle, made in zip(seen, apply_linear(there, back, *seen), strict=True):
                handle.copy_(made)
        rest = [each for each in handles if not any(each is one for one in seen)]  # `==` compares elements
        if rest:
            self._invoke(name, argument, rest)
            # A backward that still needs the previous values must raise.
            torch.autograd.graph.increment_version(rest)

    def _copied(self, name: str, argument: Any, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        # `Exchange` applies a function of its arguments, which autograd expects to stay unchanged.
        copies: list[Any] = [each.clone() for each in tensors]
        self._invoke(name, argument, copies)
        return tuple(copies)

    def _invoke(self, name: str, argument: Any, handles: Sequence[RemoteTensor]) -> None:
        self._place.master.operators.invoke(self._place, name, self._link(), handles, [argument])

    def _link(self) -> int:
        return self._place.master.transfers.link(self._place, *self.ranks)

    def _share(self, name: str, shape: torch.Size, dim: int) -> int:
        """Return the length of a worker's part.

        Raises:
            UsageError: The parts would not be equal.
        """
        count = len(self.ranks)
        if not -len(shape) <= dim < len(shape) or shape[dim] % count:
            raise UsageError(
                f"{name}: dimension {dim} of {tuple(shape)} cannot be split into {count} equal parts, "
                "one for each worker of the group.\n  Pad the tensor, or select another dimension with dim=."
            )
        return shape[dim] // count

    def _mine(self, name: str, tensor: torch.Tensor) -> RemoteTensor:
        if not isinstance(tensor, RemoteTensor) or tensor._place is not self._place:
            if isinstance(tensor, RemoteTensor):
                # Its worker may be lost, which is then the better error.
                tensor._place.master.connections.check(tensor._place)
            where = tensor._place if isinstance(tensor, RemoteTensor) else tensor.device
            raise UsageError(f"{name}: expected a tensor on {self._place}, not on {where}")
        return tensor


def _see_unchanged(joined: list[RemoteTensor], versions: list[int], grads: Any) -> None:
    """Check that no joined tensor has changed since the join.

    Raises:
        RuntimeError: The memory of a joined tensor has changed.
    """
    if [each._version for each in joined] != versions:
        raise RuntimeError(
            "join: one of the tensors, which share memory with the joined tensor, has been modified by an inplace"
            " operation.\n  Join clones of the tensors."
        )


def _as_row(x: Handle) -> torch.Tensor:
    return x if x.dim() else x.reshape(1)


def _op(name: str, op: str) -> str:
    """Return the reduction of the native channel for a name.

    Raises:
        UsageError: The name is unknown.
    """
    if op not in _OPS:
        raise UsageError(f"{name}: op={op!r}: expected one of {', '.join(_OPS)}")
    return _OPS[op]


def _no_graph(name: str, op: str) -> UsageError:
    return UsageError(
        f"{name}: autograd does not support op={op!r}, only sums and averages.\n"
        "  Call all_gather() and reduce the result, or call this function in no_grad()."
    )


def _group_of(name: str, tensors: torch.Tensor | Iterable[torch.Tensor]) -> tuple[Group, list[torch.Tensor]]:
    listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    if not listed:
        raise UsageError(f"{name}: expected at least one tensor")
    first = listed[0]
    if not isinstance(first, RemoteTensor):
        raise UsageError(
            f"{name}: expected tensors on a group of workers.\n"
            f"  For the ranks of a job, call {name.removesuffix('_')}()."
        )
    return Group(first._place), listed


def all_reduce_(tensors: torch.Tensor | Iterable[torch.Tensor], op: str = "sum") -> None:
    """Reduce tensors over the workers of their group, in place (master-worker mode).

    Args:
        tensors: Handles of one group, of any dtypes that can be reduced.
        op: ``"sum"``, ``"avg"``, ``"product"``, ``"min"`` or ``"max"``.

    Raises:
        UsageError: The tensors are of different groups, or the op is unknown.
        WorkerLost: A worker of the group is lost.

    Shape:
        Any. It does not change.

    Cost:
        The call is queued. The tensors of one dtype are reduced together, like ``all_reduce`` of the native channel.
        Before that, the workers exchange one message of 8 bytes each to check that no worker has a poisoned tensor.
    """
    group, listed = _group_of("all_reduce_", tensors)
    group.all_reduce_(listed, op)


def broadcast_(tensors: torch.Tensor | Iterable[torch.Tensor], src: int) -> None:
    """Copy tensors of one worker to all workers of their group, in place (master-worker mode).

    Args:
        tensors: Handles of one group, for example a module's parameters.
        src: The worker whose tensors are copied.

    Raises:
        UsageError: The tensors are of different groups, or `src` is not in the group.
        WorkerLost: A worker of the group is lost.

    Shape:
        Any. It does not change.

    Cost:
        The call is queued. It costs one ``broadcast`` of the native channel, and the check of `all_reduce_`.
    """
    group, listed = _group_of("broadcast_", tensors)
    group.broadcast_(listed, src)


publish(globals())
