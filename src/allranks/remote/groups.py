"""One handle for many workers: each holds a tensor under the same id, and a command is encoded once for all.

What the workers do alone is told to a group as to one worker. What they do together, and how tensors come to them in
parts and go back, is here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from allranks._errors import UsageError
from allranks.remote.signature import signature
from allranks.remote.tensor import Place, RemoteTensor, make

__all__ = ["Group", "all_reduce_", "broadcast_"]

_OPS = {"sum": "SUM", "avg": "AVG", "mean": "AVG", "product": "PRODUCT", "prod": "PRODUCT", "min": "MIN", "max": "MAX"}


class Group:
    """Some workers, driven as one: ``mw.group([1, 2, 3, 4])``.

    Within ``with group:`` factories make tensors on all of them.

    Attributes:
        ranks: the workers.
        device: for ``device=`` and ``.to()``; its index is a number of this process only.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self.ranks = place.ranks
        self.device = place.device
        self._contexts: list[Any] = []

    def __enter__(self) -> Group:
        self._contexts.append(self.device.__enter__())
        return self

    def __exit__(self, *exception: Any) -> None:
        self._contexts.pop()
        self.device.__exit__(*exception)

    def __len__(self) -> int:
        return len(self.ranks)

    def __repr__(self) -> str:
        return f"Group(ranks={list(self.ranks)}, device='{self.device}')"

    def scatter(self, tensor: torch.Tensor, dim: int = 0) -> RemoteTensor:
        """Gives each worker its part of a tensor of the master's or of one worker's, in the order of the ranks.

        Raises:
            UsageError: it cannot be cut into as many equal parts.

        Shape:
            ``[n, ...]`` here, ``[n / len(group), ...]`` on each.
        """
        _without_graph("scatter", tensor)
        place, count = self._place, len(self.ranks)
        if tensor.dim() == 0 or tensor.shape[dim] % count:
            raise UsageError(
                f"scatter: dimension {dim} of {tuple(tensor.shape)} cannot be cut into {count} equal parts, "
                "one for each worker of the group"
            )
        parts = [part.contiguous() for part in tensor.detach().chunk(count, dim)]
        if isinstance(tensor, RemoteTensor):
            return self.join([part.to(f"worker:{rank}") for part, rank in zip(parts, self.ranks, strict=True)])
        master = place.master
        master.refuse_recording("a tensor of the master's is sent to workers")
        master.check(place)
        sig = signature(tensor.dtype, parts[0].shape, parts[0].stride())
        (ref,) = master.outbox.reserve(place.target, 1)
        for part, rank in zip(parts, self.ranks, strict=True):
            master.hold(master.places[(rank,)], ref, sig, part)
        return make(place, sig, ref)

    def join(self, tensors: Sequence[torch.Tensor]) -> RemoteTensor:
        """Makes one handle of tensors of the same shape, one on each worker, in the order of the ranks.

        The memory stays shared with them.
        """
        place = self._place
        if len(tensors) != len(self.ranks):
            raise UsageError(f"join: expected {len(self.ranks)} tensors, one for each worker, not {len(tensors)}")
        handles: list[RemoteTensor] = []
        for tensor, rank in zip(tensors, self.ranks, strict=True):
            _without_graph("join", tensor)
            if not isinstance(tensor, RemoteTensor) or tensor._place.ranks != (rank,):
                where = tensor._place if isinstance(tensor, RemoteTensor) else tensor.device
                raise UsageError(f"join: expected a tensor on worker:{rank}, not on {where}")
            handles.append(tensor)
        if len({(each._sig, each._off) for each in handles}) > 1:
            looks = sorted(
                {f"{x.dtype} {tuple(x.shape)} of strides {x.stride()} from {x.storage_offset()} on" for x in handles}
            )
            raise UsageError(f"join: the tensors differ: {'; '.join(looks)}")
        master = place.master
        master.refuse_recording("tensors are joined")
        (ref,) = master.outbox.reserve(place.target, 1)
        for handle in handles:
            master.order(handle._place, "alias", id=handle._ref.id, outputs=[ref.id])
        return make(place, handles[0]._sig, ref, handles[0]._off)

    def gather(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """The workers' tensors, one behind the other along a dimension, on the master. Waits for them."""
        _without_graph("gather", tensor)
        handle = self._mine(tensor)
        parts = [handle._place.master.shard(handle, rank).cpu() for rank in self.ranks]
        return torch.cat(parts, dim) if handle.dim() else torch.stack(parts)

    def all_reduce_(self, tensors: torch.Tensor | Iterable[torch.Tensor], op: str = "sum") -> None:
        """Reduces tensors over the workers, in place: ``sum``, ``avg``, ``product``, ``min`` or ``max``."""
        if op not in _OPS:
            raise UsageError(f"all_reduce_: op={op!r}: expected one of {', '.join(_OPS)}")
        self._together("all_reduce", tensors, _OPS[op])

    def broadcast_(self, tensors: torch.Tensor | Iterable[torch.Tensor], src: int) -> None:
        """Makes all workers' tensors, or parameters, those of worker `src`, in place."""
        if src not in self.ranks:
            raise UsageError(f"broadcast_: src={src} is not in the group, which has {list(self.ranks)}")
        self._together("broadcast", tensors, self.ranks.index(src))

    def all_gather(self, tensor: torch.Tensor, dim: int = 0) -> RemoteTensor:
        """All workers' tensors, one behind the other along a dimension, on each of them."""
        _without_graph("all_gather", tensor)
        handle = self._mine(tensor)
        shape = list(handle.shape)
        shape[dim] *= len(self.ranks)
        return self._new("all_gather", handle, shape, [dim])

    def reduce_scatter(self, tensor: torch.Tensor, op: str = "sum", dim: int = 0) -> RemoteTensor:
        """Each worker's part, along a dimension, of the reduced tensor."""
        _without_graph("reduce_scatter", tensor)
        handle = self._mine(tensor)
        shape = list(handle.shape)
        if shape[dim] % len(self.ranks):
            raise UsageError(f"reduce_scatter: {tuple(shape)} cannot be cut into {len(self.ranks)} equal parts")
        shape[dim] //= len(self.ranks)
        return self._new("reduce_scatter", handle, shape, [_OPS[op], dim])

    def _new(self, name: str, handle: RemoteTensor, shape: list[int], said: list[Any]) -> RemoteTensor:
        master = self._place.master
        looks = torch.empty(shape, device="meta")
        sig = signature(handle.dtype, looks.shape, looks.stride())
        (made,) = master.invoke(self._place, name, self._link(), [handle], said, [sig])
        return made

    def _together(self, name: str, tensors: torch.Tensor | Iterable[torch.Tensor], said: Any) -> None:
        listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        handles = [self._mine(each) for each in listed]
        if not handles or len(self.ranks) == 1:
            return
        self._place.master.invoke(self._place, name, self._link(), handles, [said])
        torch.autograd.graph.increment_version(handles)

    def _link(self) -> int:
        return self._place.master.link(self._place, *self.ranks)

    def _mine(self, tensor: torch.Tensor) -> RemoteTensor:
        if not isinstance(tensor, RemoteTensor) or tensor._place is not self._place:
            where = tensor._place if isinstance(tensor, RemoteTensor) else tensor.device
            raise UsageError(f"expected a tensor on {self._place}, not on {where}")
        return tensor


def _without_graph(name: str, tensor: torch.Tensor) -> None:
    """
    Raises:
        UsageError: autograd would have to go through it.
    """
    if tensor.requires_grad and torch.is_grad_enabled():
        raise UsageError(f"{name}: autograd does not go through it; give it tensor.detach(), or call it in no_grad()")


def _group_of(tensors: torch.Tensor | Iterable[torch.Tensor]) -> tuple[Group, list[torch.Tensor]]:
    listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    if not listed:
        raise UsageError("expected a tensor at least")
    first = listed[0]
    if not isinstance(first, RemoteTensor):
        raise UsageError("expected tensors on a group of workers; for the ranks of a job there is all_reduce()")
    return Group(first._place), listed


def all_reduce_(tensors: torch.Tensor | Iterable[torch.Tensor], op: str = "sum") -> None:
    """Reduces tensors over the workers of their group, in place (master-worker mode).

    Args:
        tensors: handles of one group, of any dtypes that can be reduced.
        op: ``"sum"``, ``"avg"``, ``"product"``, ``"min"`` or ``"max"``.

    Raises:
        UsageError: they are not of one group, or there is no such op.
        WorkerLost: a worker of the group is gone.

    Shape:
        any, the same afterwards.

    Cost:
        queued. The tensors of a dtype are reduced together, as by ``all_reduce`` of the native channel, after one
        message of 8 bytes to each worker by which they agree that nobody's tensors are spoilt.
    """
    group, listed = _group_of(tensors)
    group.all_reduce_(listed, op)


def broadcast_(tensors: torch.Tensor | Iterable[torch.Tensor], src: int) -> None:
    """Makes tensors on all workers of their group those of one of them, in place (master-worker mode).

    Args:
        tensors: handles of one group, for example a module's parameters.
        src: the worker whose tensors they become.

    Raises:
        UsageError: they are not of one group, or `src` is not in it.
        WorkerLost: a worker of the group is gone.

    Shape:
        any, the same afterwards.

    Cost:
        queued; as ``broadcast`` of the native channel, and the agreement of `all_reduce_`.
    """
    group, listed = _group_of(tensors)
    group.broadcast_(listed, src)
