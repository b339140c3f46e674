"""Collectives that autograd can differentiate, with the names and arguments of torch.distributed.nn.functional.

They return new tensors (or the ones passed as outputs) and never change their inputs.

The gradient is that of the *sum of all ranks' losses*. A collective is one function from all ranks' inputs to all
ranks' outputs. Every rank calls ``backward()`` on its own loss, and gets the derivative of that sum by its own input.
Data-parallel training uses the mean of the losses, so it divides by the number of ranks.

Each backward is a collective, too: the transposed one. The pairs are broadcast and reduce, gather and scatter,
all_gather and reduce_scatter; all_to_all and all_reduce are their own transposes. All ranks must therefore call
``backward()``, with graphs that have the same collectives. A tensor must require a gradient on all ranks or on none.
Second derivatives work.

Differences from torch: torch's MIN, MAX, PRODUCT and (except for all_reduce) AVG have the gradients of SUM, or worse.
Here the gradients are correct. MIN and MAX divide the gradient among ranks with equal elements, as ``torch.amax`` does.
These ops cost P n bytes per rank, because each rank needs the elements of all ranks. Integer tensors are not
differentiable, regardless of the op.

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

# Ops whose derivative needs every rank's elements: functions from rows, one per rank, to the result.
_FOLDS: dict[ReduceOp, Callable[[Tensor], Tensor]] = {
    ReduceOp.MIN: lambda rows: rows.amin(0),
    ReduceOp.MAX: lambda rows: rows.amax(0),
    ReduceOp.PRODUCT: lambda rows: rows.prod(0, dtype=rows.dtype),
}


def broadcast(tensor: Tensor, src: int, group: ProcessGroup | None = None) -> Tensor:
    """Return the tensor of rank ``src`` on every rank.

    Args:
        tensor: The data on ``src``; on other ranks, a tensor of the same shape.
        src: Rank of the world that has the data.
        group: None: the world.

    Gradient:
        The sum of all ranks' gradients on ``src``, zero on other ranks.
    """
    resolved = resolve_group(group)
    return _BroadcastFunction.apply(resolved, root_of("broadcast", resolved, src, None, "src"), tensor)


def reduce(
    tensor: Tensor, dst: int, op: ReduceOp | PremulSum = ReduceOp.SUM, group: ProcessGroup | None = None
) -> Tensor:
    """Return the reduction of all ranks' tensors on rank ``dst``, zeros on other ranks.

    Args:
        tensor: A tensor of the same shape on all ranks.
        dst: Rank of the world that gets the result.
        op: See ``allranks.all_reduce``.
        group: None: the world.

    Gradient:
        The gradient on ``dst``, on all ranks. The results of other ranks have no effect.
    """
    resolved, (op, (tensor,)) = resolve_group(group), _applied(op, tensor)
    root = root_of("reduce", resolved, dst, None, "dst")
    if op in _FOLDS:
        return _FOLDS[op](torch.stack(_Gather.apply(resolved, root, tensor)))
    return _Reduce.apply(resolved, root, op, tensor)


def all_reduce(tensor: Tensor, op: ReduceOp | PremulSum = ReduceOp.SUM, group: ProcessGroup | None = None) -> Tensor:
    """Return the reduction of all ranks' tensors, bitwise identical on every rank.

    Args:
        tensor: A tensor of the same shape on all ranks.
        op: See ``allranks.all_reduce``.
        group: None: the world.

    Gradient:
        The sum of all ranks' gradients (AVG: their mean).
    """
    resolved, (op, (tensor,)) = resolve_group(group), _applied(op, tensor)
    if op in _FOLDS:
        return _FOLDS[op](torch.stack(_AllGather.apply(resolved, tensor)))
    return _AllReduce.apply(resolved, op, tensor)


def gather(tensor: Tensor, dst: int = 0, group: ProcessGroup | None = None) -> tuple[Tensor, ...]:
    """Return all ranks' tensors on rank ``dst``; on other ranks, the same number of zero tensors.

    Args:
        tensor: A tensor of the same shape on all ranks.
        dst: Rank of the world that gets the tensors.
        group: None: the world.

    Gradient:
        Each rank gets the gradient of its tensor from ``dst``.
    """
    resolved = resolve_group(group)
    return _Gather.apply(resolved, root_of("gather", resolved, dst, None, "dst"), tensor)


def scatter(tensors: Sequence[Tensor], src: int = 0, group: ProcessGroup | None = None) -> Tensor:
    """Return this rank's tensor of the list on rank ``src``.

    Args:
        tensors: One tensor per rank, all of one shape. Of the lists on other ranks, only the shape is used.
        src: Rank of the world whose list is distributed.
        group: None: the world.

    Gradient:
        ``src`` gets the gradient of each tensor from its rank; on other ranks it is zero.
    """
    resolved = resolve_group(group)
    return _Scatter.apply(resolved, root_of("scatter", resolved, src, None, "src"), *tensors)


def all_gather(tensor: Tensor, group: ProcessGroup | None = None) -> tuple[Tensor, ...]:
    """Return all ranks' tensors on every rank.

    Args:
        tensor: A tensor of the same shape on all ranks.
        group: None: the world.

    Gradient:
        The sum of all ranks' gradients of this rank's tensor.
    """
    return _AllGather.apply(resolve_group(group), tensor)


def reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: ReduceOp | PremulSum = ReduceOp.SUM,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Return this rank's part of the reduction of all ranks' lists.

    Args:
        output: Receives the result. Use the return value.
        input_list: One tensor per rank.
        op: See ``allranks.all_reduce``.
        group: None: the world.

    Gradient:
        Tensor q of each list gets the gradient of rank q (AVG: divided by the number of ranks).
    """
    resolved, (op, input_list) = resolve_group(group), _applied(op, *input_list)
    if op in _FOLDS:
        # A fold needs the elements of all ranks. autograd follows the exchange and the fold.
        rows = _AllToAll.apply(resolved, [torch.empty_like(output) for _ in input_list], *input_list)
        result = _FOLDS[op](torch.stack(rows))
        output.detach().copy_(result.detach())
        return result
    return _ReduceScatter.apply(resolved, op, output, *input_list)


def all_to_all(
    output_tensor_list: Sequence[Tensor], input_tensor_list: Sequence[Tensor], group: ProcessGroup | None = None
) -> tuple[Tensor, ...]:
    """Return tensor q of every rank's list on rank q.

    Args:
        output_tensor_list: Receives one tensor per rank, from that rank.
        input_tensor_list: One tensor per rank, for that rank. All sizes may differ.
        group: None: the world.

    Gradient:
        Each gradient is returned to the rank that its tensor came from.
    """
    return _AllToAll.apply(resolve_group(group), output_tensor_list, *input_tensor_list)


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Split ``input`` along its first dimension, and send chunk q to rank q.

    Args:
        output: Receives the chunks from rank 0, rank 1, ... in this order. Use the return value.
        input: The chunks for rank 0, rank 1, ...
        output_split_sizes: Rows from each rank. None: equal numbers.
        input_split_sizes: Rows for each rank. None: equal numbers.
        group: None: the world.

    Gradient:
        Each gradient is returned to the rank that its rows came from.
    """
    return _AllToAllSingle.apply(resolve_group(group), output, output_split_sizes, input_split_sizes, input)


def _all_gather_base(output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Run ``all_gather`` into one tensor. torch's users call it by this name despite its underscore."""
    return _AllGatherSingle.apply(resolve_group(group), output_tensor, input_tensor)


def _reduce_scatter_base(
    output: Tensor, input: Tensor, op: ReduceOp | PremulSum = ReduceOp.SUM, group: ProcessGroup | None = None
) -> Tensor:
    """Run ``reduce_scatter`` on one tensor that holds the chunks for all ranks in order."""
    size = resolve_group(group).size()
    return reduce_scatter(output, input.reshape(size, *output.shape).unbind(), op, group)


# Each function is a linear map from all ranks' tensors to all ranks' results. ``forward`` keeps the data that the
# transposed map needs. ``backward`` applies that map as a function of this kind, so it has a derivative, too. The
# engine writes outputs without autograd's knowledge. Outputs that the caller passes are therefore marked as changed:
# autograd then raises if a backward still needs an overwritten value.


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
        # Contiguous, because engines take contiguous tensors. The clone protects the caller's tensor.
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
        # The zeros on other ranks make it the transpose of broadcast.
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
        # Zeros: on ranks other than the root, gather writes no outputs, and their gradients must be valid.
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
        # The engine has written the output without autograd's knowledge.
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
    """Return the gradient of each rank's operand, if the result is the sum (AVG: the mean) of the operands."""
    return grad / ctx.group.size() if ctx.op is ReduceOp.AVG else grad


def _applied(op: ReduceOp | PremulSum, *tensors: Tensor) -> tuple[ReduceOp, tuple[Tensor, ...]]:
    """Return the op and its operands. premul_sum's factor is applied to the operands, so autograd records it."""
    known = as_reduce_op(op)
    if isinstance(known, ReduceOp):
        return known, tensors
    return ReduceOp.SUM, tuple(scaled(tensor, known.factor) for tensor in tensors)
