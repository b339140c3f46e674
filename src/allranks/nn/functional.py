"""Collectives that autograd goes through, with torch.distributed.nn.functional's names and arguments.

They return new tensors (or the ones given as outputs) and never change their inputs.

The gradient is that of the *sum of all ranks' losses*: a collective is one function from all ranks' inputs to all
ranks' outputs, and ``backward()``, called by every rank on its own loss, gives each rank the derivative of that sum
by its own input. Data-parallel training wants the mean of the losses, so that it divides by the number of ranks.

Each backward is a collective too, the transposed one: broadcast and reduce, gather and scatter, all_gather and
reduce_scatter stand for each other, all_to_all and all_reduce for themselves. So all ranks must call ``backward()``,
with graphs that hold the same collectives, and a tensor must require a gradient on all ranks or on none. Second
derivatives work.

Where torch differs: its MIN, MAX, PRODUCT and (except for all_reduce) AVG have the gradients of SUM or worse; here
they are right. MIN and MAX divide theirs among equal ranks, as ``torch.amax`` does. They cost P n bytes per rank,
because each rank needs all of the ranks' elements. Nothing here is differentiable in integers, whatever the op.

Source: torch/distributed/nn/functional.py for the interface.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import increment_version

from allranks._api.collectives import root_of
from allranks._api.world import resolve_group
from allranks._call.types import PremulSum, ReduceOp, as_reduce_op, scaled

if TYPE_CHECKING:
    from allranks._group.process_group import ProcessGroup

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]

# Ops whose derivative needs every rank's elements: from rows, one per rank, to the result.
_FOLDS: dict[ReduceOp, Callable[[Tensor], Tensor]] = {
    ReduceOp.MIN: lambda rows: rows.amin(0),
    ReduceOp.MAX: lambda rows: rows.amax(0),
    ReduceOp.PRODUCT: lambda rows: rows.prod(0, dtype=rows.dtype),
}


def broadcast(tensor: Tensor, src: int, group: ProcessGroup | None = None) -> Tensor:
    """The tensor of rank ``src``, on every rank.

    Args:
        tensor: the data on ``src``; elsewhere of the same shape.
        src: who has the data, as a rank of the world.
        group: None is the world.

    Gradient:
        the sum of all ranks' on ``src``, zero elsewhere.
    """
    resolved = resolve_group(group)
    return _BroadcastFunction.apply(resolved, root_of(resolved, src, None, "src"), tensor)


def reduce(
    tensor: Tensor, dst: int, op: ReduceOp | PremulSum = ReduceOp.SUM, group: ProcessGroup | None = None
) -> Tensor:
    """The reduction of all ranks' tensors on rank ``dst``, zeros elsewhere.

    Args:
        tensor: of the same shape on all ranks.
        dst: who gets the result, as a rank of the world.
        op: see ``allranks.all_reduce``.
        group: None is the world.

    Gradient:
        that of ``dst``, on all ranks; the others' results count for nothing.
    """
    resolved, (op, (tensor,)) = resolve_group(group), _applied(op, tensor)
    root = root_of(resolved, dst, None, "dst")
    if op in _FOLDS:
        return _FOLDS[op](torch.stack(_Gather.apply(resolved, root, tensor)))
    return _Reduce.apply(resolved, root, op, tensor)


def all_reduce(tensor: Tensor, op: ReduceOp | PremulSum = ReduceOp.SUM, group: ProcessGroup | None = None) -> Tensor:
    """The reduction of all ranks' tensors, on every rank with the same bits.

    Args:
        tensor: of the same shape on all ranks.
        op: see ``allranks.all_reduce``.
        group: None is the world.

    Gradient:
        the sum of all ranks' (AVG: their mean).
    """
    resolved, (op, (tensor,)) = resolve_group(group), _applied(op, tensor)
    if op in _FOLDS:
        return _FOLDS[op](torch.stack(_AllGather.apply(resolved, tensor)))
    return _AllReduce.apply(resolved, op, tensor)


def gather(tensor: Tensor, dst: int = 0, group: ProcessGroup | None = None) -> tuple[Tensor, ...]:
    """All ranks' tensors on rank ``dst``; elsewhere as many of zeros.

    Args:
        tensor: of the same shape on all ranks.
        dst: who gets them, as a rank of the world.
        group: None is the world.

    Gradient:
        each rank gets its tensor's from ``dst``.
    """
    resolved = resolve_group(group)
    return _Gather.apply(resolved, root_of(resolved, dst, None, "dst"), tensor)


def scatter(tensors: Sequence[Tensor], src: int = 0, group: ProcessGroup | None = None) -> Tensor:
    """This rank's tensor of rank ``src``'s list.

    Args:
        tensors: one per rank, all of one shape. Of the other ranks' lists only the shape is used.
        src: whose list it is, as a rank of the world.
        group: None is the world.

    Gradient:
        ``src`` gets each tensor's from its rank; elsewhere zero.
    """
    resolved = resolve_group(group)
    return _Scatter.apply(resolved, root_of(resolved, src, None, "src"), *tensors)


def all_gather(tensor: Tensor, group: ProcessGroup | None = None) -> tuple[Tensor, ...]:
    """All ranks' tensors, on every rank.

    Args:
        tensor: of the same shape on all ranks.
        group: None is the world.

    Gradient:
        the sum of what all ranks have for this rank's tensor.
    """
    return _AllGather.apply(resolve_group(group), tensor)


def reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: ReduceOp | PremulSum = ReduceOp.SUM,
    group: ProcessGroup | None = None,
) -> Tensor:
    """This rank's part of the reduction of all ranks' lists.

    Args:
        output: written; use what is returned.
        input_list: one tensor per rank.
        op: see ``allranks.all_reduce``.
        group: None is the world.

    Gradient:
        tensor q of each list gets rank q's (AVG: divided by the number of ranks).
    """
    resolved, (op, input_list) = resolve_group(group), _applied(op, *input_list)
    if op in _FOLDS:
        rows = _AllToAll.apply(resolved, [torch.empty_like(output) for _ in input_list], *input_list)
        result = _FOLDS[op](torch.stack(rows))
        output.detach().copy_(result.detach())
        return result
    return _ReduceScatter.apply(resolved, op, output, *input_list)


def all_to_all(
    output_tensor_list: Sequence[Tensor], input_tensor_list: Sequence[Tensor], group: ProcessGroup | None = None
) -> tuple[Tensor, ...]:
    """Tensor q of every rank's list, on rank q.

    Args:
        output_tensor_list: written: one tensor per rank, from that rank.
        input_tensor_list: one tensor per rank, for that rank. Sizes may all differ.
        group: None is the world.

    Gradient:
        goes back where its tensor came from.
    """
    return _AllToAll.apply(resolve_group(group), output_tensor_list, *input_tensor_list)


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Cuts ``input`` along its first dimension, and gives piece q to rank q.

    Args:
        output: written: the pieces from rank 0, rank 1, ... one after the other; use what is returned.
        input: the pieces for rank 0, rank 1, ...
        output_split_sizes: rows from each rank; None: equal.
        input_split_sizes: rows for each rank; None: equal.
        group: None is the world.

    Gradient:
        goes back where its rows came from.
    """
    return _AllToAllSingle.apply(resolve_group(group), output, output_split_sizes, input_split_sizes, input)


def _all_gather_base(output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """``all_gather`` into one tensor: a name that torch's users use in spite of its underscore."""
    return _AllGatherSingle.apply(resolve_group(group), output_tensor, input_tensor)


def _reduce_scatter_base(
    output: Tensor, input: Tensor, op: ReduceOp | PremulSum = ReduceOp.SUM, group: ProcessGroup | None = None
) -> Tensor:
    """``reduce_scatter`` of one tensor that holds the pieces for all ranks in turn."""
    size = resolve_group(group).size()
    return reduce_scatter(output, input.reshape(size, *output.shape).unbind(), op, group)


# Each is a linear map from all ranks' tensors to all ranks' results. ``forward`` keeps what the transposed map needs;
# ``backward`` applies that map, so that it has a derivative too. The engine writes outputs behind autograd's back, so
# that those which the caller gave are marked: a value that a backward still needs must not be overwritten unseen.


class _ToOne(Function):
    if TYPE_CHECKING:

        @classmethod
        def apply(cls, *args: Any) -> Tensor: ...


class _ToMany(Function):
    if TYPE_CHECKING:

        @classmethod
        def apply(cls, *args: Any) -> tuple[Tensor, ...]: ...


class _BroadcastFunction(_ToOne):
    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, root: int, tensor: Tensor) -> Tensor:
        ctx.group, ctx.root = group, root
        output = tensor.clone(memory_format=torch.contiguous_format)
        group.broadcast(output, root)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, _Reduce.apply(ctx.group, ctx.root, ReduceOp.SUM, grad)


class _Reduce(_ToOne):
    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, root: int, op: ReduceOp, tensor: Tensor) -> Tensor:
        ctx.group, ctx.root, ctx.op = group, root, op
        output = tensor.clone(memory_format=torch.contiguous_format)
        group.reduce(output, root, op)
        # Zero elsewhere is what makes it the transpose of broadcast.
        return output if group.rank() == root else output.zero_()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, _BroadcastFunction.apply(ctx.group, ctx.root, _shared(ctx, grad))


class _AllReduce(_ToOne):
    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, op: ReduceOp, tensor: Tensor) -> Tensor:
        ctx.group, ctx.op = group, op
        output = tensor.clone(memory_format=torch.contiguous_format)
        group.all_reduce(output, op)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, _AllReduce.apply(ctx.group, ctx.op, grad)


class _Gather(_ToMany):
    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, root: int, tensor: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.root = group, root
        outputs = [torch.zeros_like(tensor, memory_format=torch.contiguous_format) for _ in group.ranks]
        group.gather(tensor, outputs if group.rank() == root else None, root)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, _Scatter.apply(ctx.group, ctx.root, *grads)


class _Scatter(_ToOne):
    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, root: int, *tensors: Tensor) -> Tensor:
        ctx.group, ctx.root = group, root
        output = torch.empty_like(tensors[0], memory_format=torch.contiguous_format)
        group.scatter(output, tensors if group.rank() == root else None, root)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_Gather.apply(ctx.group, ctx.root, grad)


class _AllGather(_ToMany):
    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, tensor: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        outputs = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in group.ranks]
        group.all_gather(outputs, tensor)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        output = torch.empty_like(grads[0], memory_format=torch.contiguous_format)
        return None, _ReduceScatter.apply(ctx.group, ReduceOp.SUM, output, *grads)


class _AllGatherSingle(_ToOne):
    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, output: Tensor, tensor: Tensor) -> Tensor:
        ctx.group, ctx.shape = group, tensor.shape
        group.all_gather(output, tensor)
        increment_version(output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        pieces = grad.reshape(ctx.group.size(), *ctx.shape).unbind()
        return None, None, _ReduceScatter.apply(ctx.group, ReduceOp.SUM, grad.new_empty(ctx.shape), *pieces)


class _ReduceScatter(_ToOne):
    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, op: ReduceOp, output: Tensor, *tensors: Tensor) -> Tensor:
        ctx.group, ctx.op = group, op
        group.reduce_scatter(output, tensors, op)
        increment_version(output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *_AllGather.apply(ctx.group, _shared(ctx, grad))


class _AllToAll(_ToMany):
    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, outputs: Sequence[Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.shapes = group, [tensor.shape for tensor in tensors]
        group.all_to_all(outputs, tensors)
        increment_version(tuple(outputs))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        outputs = [grads[0].new_empty(shape) for shape in ctx.shapes]
        return None, None, *_AllToAll.apply(ctx.group, outputs, *grads)


class _AllToAllSingle(_ToOne):
    @staticmethod
    def forward(
        ctx: Any,
        group: ProcessGroup,
        output: Tensor,
        output_split_sizes: Sequence[int] | None,
        input_split_sizes: Sequence[int] | None,
        tensor: Tensor,
    ) -> Tensor:
        ctx.group, ctx.shape = group, tensor.shape
        ctx.output_split_sizes, ctx.input_split_sizes = output_split_sizes, input_split_sizes
        group.all_to_all_single(output, tensor, output_split_sizes, input_split_sizes)
        increment_version(output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        output = grad.new_empty(ctx.shape)
        back = _AllToAllSingle.apply(ctx.group, output, ctx.input_split_sizes, ctx.output_split_sizes, grad)
        return None, None, None, None, back


def _shared(ctx: Any, grad: Tensor) -> Tensor:
    """The gradient of a result that is the sum (AVG: the mean) of the ranks' operands, by each of them."""
    return grad / ctx.group.size() if ctx.op is ReduceOp.AVG else grad


def _applied(op: ReduceOp | PremulSum, *tensors: Tensor) -> tuple[ReduceOp, tuple[Tensor, ...]]:
    """The op and its operands: premul_sum's factor is applied to them, where autograd sees it."""
    known = as_reduce_op(op)
    if isinstance(known, ReduceOp):
        return known, tensors
    return ReduceOp.SUM, tuple(scaled(tensor, known.factor) for tensor in tensors)
