"""The ``*_multigpu`` collectives of torch before 2.2: every rank passes a list of tensors, each like a rank's own.

torch used one tensor per GPU of the rank. Here they are CPU tensors: the list is reduced or copied within the rank, and
one collective runs between the ranks. All ranks pass lists of the same length, with tensors of the same shape and
dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, overload

from allranks import _core
from allranks._api.collectives import outside, root_of
from allranks._api.world import resolve_group
from allranks._base.errors import UsageError
from allranks._base.public import publish
from allranks._call.types import PremulSum, ReduceOp, as_reduce_op, is_integer, scaled
from allranks._call.work import Then, Work
from allranks._engines.checks import check_apart
from allranks._engines.operands import different

if TYPE_CHECKING:
    from torch import Tensor

    from allranks._api.collectives import Group, Op
    from allranks._group.process_group import ProcessGroup

__all__ = [
    "all_gather_multigpu",
    "all_reduce_multigpu",
    "broadcast_multigpu",
    "reduce_multigpu",
    "reduce_scatter_multigpu",
]

_MOST_DIMENSIONS = 64  # of a tensor: torch's own limit for arithmetic, as in core/base/types.h


@overload
def all_reduce_multigpu(
    tensor_list: Sequence[Tensor], op: Op = ..., group: Group = ..., async_op: Literal[False] = ...
) -> None: ...
@overload
def all_reduce_multigpu(
    tensor_list: Sequence[Tensor], op: Op = ..., group: Group = ..., async_op: Literal[True] = ...
) -> Work: ...
@overload
def all_reduce_multigpu(
    tensor_list: Sequence[Tensor], op: Op = ..., group: Group = ..., async_op: bool = ...
) -> Work | None: ...
def all_reduce_multigpu(
    tensor_list: Sequence[Tensor],
    op: ReduceOp | PremulSum = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce all tensors of all ranks, and store the result in each of them.

    Args:
        tensor_list: Tensors of this rank.
        op: SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR.
        group: The process group. None: the world.
        async_op: Return immediately, with a Work.

    Returns:
        A Work if ``async_op`` is set. Otherwise None.

    Raises:
        UsageError, MismatchError, PeerLostError, TimeoutError: See ``all_reduce``.

    Shape:
        the tensors of a rank's list have one shape; the lengths of lists and tensors are equal on all ranks.

    Cost:
        an ``all_reduce`` of one tensor, and a copy of each.
    """
    if outside(group, "all_reduce_multigpu"):
        return None
    ours = _alike(tensor_list, "all_reduce_multigpu")
    # The same tensor may be listed several times, but different tensors must not overlap.
    check_apart("all_reduce_multigpu", different(ours))
    between, combined = _combined(ours, op, "all_reduce_multigpu")
    work = resolve_group(group).all_reduce(_counted(combined, ours), between, True)

    def spread() -> None:
        _share_out(between, combined, len(ours))
        for tensor in ours:
            tensor.copy_(combined)

    return _end(work, spread, ours, async_op)


@overload
def reduce_multigpu(
    tensor_list: Sequence[Tensor],
    dst: int,
    op: Op = ...,
    group: Group = ...,
    async_op: Literal[False] = ...,
    dst_tensor: int = ...,
) -> None: ...
@overload
def reduce_multigpu(
    tensor_list: Sequence[Tensor],
    dst: int,
    op: Op = ...,
    group: Group = ...,
    async_op: Literal[True] = ...,
    dst_tensor: int = ...,
) -> Work: ...
@overload
def reduce_multigpu(
    tensor_list: Sequence[Tensor],
    dst: int,
    op: Op = ...,
    group: Group = ...,
    async_op: bool = ...,
    dst_tensor: int = ...,
) -> Work | None: ...
def reduce_multigpu(
    tensor_list: Sequence[Tensor],
    dst: int,
    op: ReduceOp | PremulSum = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    dst_tensor: int = 0,
) -> Work | None:
    """Reduce all tensors of all ranks into ``tensor_list[dst_tensor]`` of rank ``dst``.

    Args:
        tensor_list: Tensors of this rank.
        dst: A rank of the world.
        op: See ``all_reduce_multigpu``.
        group: The process group. None: the world.
        async_op: Return immediately, with a Work.
        dst_tensor: Index in the list.

    Returns:
        A Work if ``async_op`` is set. Otherwise None.

    Raises:
        UsageError, MismatchError, PeerLostError, TimeoutError: See ``reduce``.

    Shape:
        the tensors of a rank's list have one shape; the lengths of lists and tensors are equal on all ranks.

    Cost:
        a ``reduce`` of one tensor; the list is first reduced within the rank.
    """
    if outside(group, "reduce_multigpu"):
        return None
    ours, resolved = _alike(tensor_list, "reduce_multigpu", dst_tensor), resolve_group(group)
    root = root_of("reduce_multigpu", resolved, dst, None, "dst")
    between, combined = _combined(ours, op, "reduce_multigpu")
    work = resolved.reduce(_counted(combined, ours), root, between, True)

    def place() -> None:
        if resolved.rank() == root:
            _share_out(between, combined, len(ours))
            ours[dst_tensor].copy_(combined)

    return _end(work, place, [ours[dst_tensor]] if resolved.rank() == root else [], async_op)


@overload
def broadcast_multigpu(
    tensor_list: Sequence[Tensor], src: int, group: Group = ..., async_op: Literal[False] = ..., src_tensor: int = ...
) -> None: ...
@overload
def broadcast_multigpu(
    tensor_list: Sequence[Tensor], src: int, group: Group = ..., async_op: Literal[True] = ..., src_tensor: int = ...
) -> Work: ...
@overload
def broadcast_multigpu(
    tensor_list: Sequence[Tensor], src: int, group: Group = ..., async_op: bool = ..., src_tensor: int = ...
) -> Work | None: ...
def broadcast_multigpu(
    tensor_list: Sequence[Tensor],
    src: int,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    src_tensor: int = 0,
) -> Work | None:
    """Copy ``tensor_list[src_tensor]`` of rank ``src`` to all tensors of all ranks.

    Args:
        tensor_list: Tensors of this rank.
        src: A rank of the world.
        group: The process group. None: the world.
        async_op: Return immediately, with a Work.
        src_tensor: Index in the list.

    Returns:
        A Work if ``async_op`` is set. Otherwise None.

    Raises:
        UsageError, MismatchError, PeerLostError, TimeoutError: See ``broadcast``.

    Shape:
        the tensors of a rank's list have one shape; the lengths of lists and tensors are equal on all ranks.

    Cost:
        a ``broadcast`` of one tensor, and a copy of each.
    """
    if outside(group, "broadcast_multigpu"):
        return None
    ours, resolved = _alike(tensor_list, "broadcast_multigpu", src_tensor), resolve_group(group)
    check_apart("broadcast_multigpu", different(ours))
    first = ours[src_tensor]
    work = resolved.broadcast(first, root_of("broadcast_multigpu", resolved, src, None, "src"), True)

    def spread() -> None:
        for tensor in ours:
            if tensor is not first:
                tensor.copy_(first)

    return _end(work, spread, ours, async_op)


@overload
def all_gather_multigpu(
    output_tensor_lists: Sequence[Sequence[Tensor]],
    input_tensor_list: Sequence[Tensor],
    group: Group = ...,
    async_op: Literal[False] = ...,
) -> None: ...
@overload
def all_gather_multigpu(
    output_tensor_lists: Sequence[Sequence[Tensor]],
    input_tensor_list: Sequence[Tensor],
    group: Group = ...,
    async_op: Literal[True] = ...,
) -> Work: ...
@overload
def all_gather_multigpu(
    output_tensor_lists: Sequence[Sequence[Tensor]],
    input_tensor_list: Sequence[Tensor],
    group: Group = ...,
    async_op: bool = ...,
) -> Work | None: ...
def all_gather_multigpu(
    output_tensor_lists: Sequence[Sequence[Tensor]],
    input_tensor_list: Sequence[Tensor],
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Gather all tensors of all ranks into each of this rank's lists.

    Args:
        output_tensor_lists: Receives for each input tensor a list of (ranks x inputs) tensors: those of rank 0, then of
            rank 1, and so on.
        input_tensor_list: Tensors of this rank.
        group: The process group. None: the world.
        async_op: Return immediately, with a Work.

    Returns:
        A Work if ``async_op`` is set. Otherwise None.

    Raises:
        UsageError, MismatchError, PeerLostError, TimeoutError: See ``all_gather``.

    Shape:
        the tensors of a rank's list have one shape; the lengths of lists and tensors are equal on all ranks.

    Cost:
        an ``all_gather`` of the whole list, and a copy of each output.
    """
    import torch

    if outside(group, "all_gather_multigpu"):
        return None
    ours, resolved = _alike(input_tensor_list, "all_gather_multigpu"), resolve_group(group)
    total = resolved.size() * len(ours)
    if len(output_tensor_lists) != len(ours) or any(len(outputs) != total for outputs in output_tensor_lists):
        raise UsageError(
            f"all_gather_multigpu: expected {len(ours)} output lists of {total} tensors, not lists of"
            f" {[len(outputs) for outputs in output_tensor_lists]}"
        )
    results = [output for outputs in output_tensor_lists for output in outputs]
    check_apart("all_gather_multigpu", results)
    mine = torch.stack([tensor.detach() for tensor in ours])
    everybodys = mine.new_empty((total, *ours[0].shape))
    work = resolved.all_gather(everybodys, mine, True)

    def spread() -> None:
        for outputs in output_tensor_lists:
            for output, gathered in zip(outputs, everybodys, strict=True):
                output.copy_(gathered.view(output.shape))

    return _end(work, spread, results, async_op)


@overload
def reduce_scatter_multigpu(
    output_tensor_list: Sequence[Tensor],
    input_tensor_lists: Sequence[Sequence[Tensor]],
    op: Op = ...,
    group: Group = ...,
    async_op: Literal[False] = ...,
) -> None: ...
@overload
def reduce_scatter_multigpu(
    output_tensor_list: Sequence[Tensor],
    input_tensor_lists: Sequence[Sequence[Tensor]],
    op: Op = ...,
    group: Group = ...,
    async_op: Literal[True] = ...,
) -> Work: ...
@overload
def reduce_scatter_multigpu(
    output_tensor_list: Sequence[Tensor],
    input_tensor_lists: Sequence[Sequence[Tensor]],
    op: Op = ...,
    group: Group = ...,
    async_op: bool = ...,
) -> Work | None: ...
def reduce_scatter_multigpu(
    output_tensor_list: Sequence[Tensor],
    input_tensor_lists: Sequence[Sequence[Tensor]],
    op: ReduceOp | PremulSum = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce all lists of all ranks element by element, and distribute the results over the outputs of the ranks.

    Args:
        output_tensor_list: Receives this rank's results.
        input_tensor_lists: For each output a list of (ranks x outputs) tensors.
        op: See ``all_reduce_multigpu``.
        group: The process group. None: the world.
        async_op: Return immediately, with a Work.

    Returns:
        A Work if ``async_op`` is set. Otherwise None.

    Raises:
        UsageError, MismatchError, PeerLostError, TimeoutError: See ``reduce_scatter``.

    Shape:
        the tensors of a rank's list have one shape; the lengths of lists and tensors are equal on all ranks.

    Cost:
        a ``reduce_scatter`` of one list, reduced within the rank first, and a copy of each output.
    """
    import torch

    if outside(group, "reduce_scatter_multigpu"):
        return None
    ours, resolved = _alike(output_tensor_list, "reduce_scatter_multigpu"), resolve_group(group)
    total = resolved.size() * len(ours)
    if len(input_tensor_lists) != len(ours) or any(len(inputs) != total for inputs in input_tensor_lists):
        raise UsageError(
            f"reduce_scatter_multigpu: expected {len(ours)} input lists of {total} tensors, not lists of"
            f" {[len(inputs) for inputs in input_tensor_lists]}"
        )
    check_apart("reduce_scatter_multigpu", ours)
    stacks = [torch.stack([tensor.detach() for tensor in inputs]) for inputs in input_tensor_lists]
    between, combined = _combined(stacks, op, "reduce_scatter_multigpu")
    mine = combined.new_empty((len(ours), *combined.shape[1:]))
    work = resolved.reduce_scatter(mine, combined, between, True)

    def place() -> None:
        _share_out(between, mine, len(ours))
        for output, result in zip(ours, mine, strict=True):
            output.copy_(result.view(output.shape))

    return _end(work, place, ours, async_op)


def _alike(tensors: Sequence[Tensor], verb: str, index: int = 0) -> list[Tensor]:
    ours = list(tensors)
    if not ours:
        raise UsageError(f"{verb}: expected at least one tensor, but the list is empty")
    if any(tensor.shape != ours[0].shape or tensor.dtype != ours[0].dtype for tensor in ours):
        kinds = dict.fromkeys(f"{tuple(tensor.shape)} of {tensor.dtype}" for tensor in ours)
        raise UsageError(f"{verb}: the tensors of a list must have one shape and dtype, not {', '.join(kinds)}")
    if any(not tensor.is_cpu for tensor in ours):
        raise UsageError(
            f"{verb}: only CPU tensors are supported, but one is on"
            f" {next(tensor.device for tensor in ours if not tensor.is_cpu)}.\n"
            f"  Start one rank for each GPU, and call {verb.removesuffix('_multigpu')}."
        )
    if not 0 <= index < len(ours):
        raise UsageError(f"{verb}: no tensor {index} in a list of {len(ours)}: expected 0 to {len(ours) - 1}")
    return ours


def _combined(tensors: Sequence[Tensor], op: ReduceOp | PremulSum, verb: str) -> tuple[ReduceOp, Tensor]:
    """Return the op between the ranks, and this rank's operand: the reduction of its own tensors.

    The operand of AVG is their mean. For integers it is their sum, which `_share_out` divides later.
    """
    import torch

    op, dtype = as_reduce_op(op), tensors[0].dtype
    # Like the core: accumulate halves in float32, and round once.
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    operands = [tensor.detach().to(wide) for tensor in tensors]
    if isinstance(op, PremulSum):
        factor = op.factor
        operands, op = [scaled(tensor, factor) for tensor in operands], ReduceOp.SUM
    combines: dict[ReduceOp, Callable[..., Tensor]] = {
        ReduceOp.SUM: torch.add,
        ReduceOp.AVG: torch.add,
        ReduceOp.PRODUCT: torch.mul,
        ReduceOp.MIN: torch.minimum,
        ReduceOp.MAX: torch.maximum,
        ReduceOp.BAND: torch.bitwise_and,
        ReduceOp.BOR: torch.bitwise_or,
        ReduceOp.BXOR: torch.bitwise_xor,
    }
    if op not in combines:
        raise UsageError(f"PREMUL_SUM requires a factor: pass op=premul_sum(factor), not {op!r}")
    try:
        combined = functools.reduce(combines[op], operands)
    except RuntimeError as error:
        raise UsageError(f"{verb} does not support {op.name} of {dtype} tensors") from error
    if op is ReduceOp.AVG and dtype is torch.bool:
        raise UsageError(f"{verb} does not support AVG of {dtype} tensors")
    if op is ReduceOp.AVG and not is_integer(dtype):
        combined = combined / len(operands)
    # The reduction of a single operand is the caller's own tensor, which the collective would overwrite.
    if combined is operands[0]:
        combined = combined.clone()
    return op, combined.to(dtype).contiguous()


def _share_out(op: ReduceOp, averages: Tensor, tensors: int) -> None:
    """Divide the ranks' averages of sums of integers by the number of tensors in each sum."""
    if op is ReduceOp.AVG and is_integer(averages.dtype):
        code = _core.DTYPES[str(averages.dtype).removeprefix("torch.")]
        _core.divide(averages.data_ptr(), averages.numel(), code, tensors)


def _counted(combined: Tensor, ours: Sequence[Tensor]) -> Tensor:
    """Return a view whose shape encodes the length of the list, so that ranks with different lengths raise an error."""
    return combined.view((1,) * ((_MOST_DIMENSIONS + 1) * (len(ours) - 1)) + combined.shape)


def _end(work: Work | None, then: Callable[[], None], written: list[Tensor], async_op: bool) -> Work | None:
    import torch

    assert work is not None  # all calls are started asynchronously
    ended = Then(work, torch.no_grad()(then), written)
    if async_op:
        return ended
    ended.wait()
    return None


publish(globals())
