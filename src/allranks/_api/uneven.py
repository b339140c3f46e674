"""Collectives whose tensors may have another size on each rank, as functions.

torch.distributed has none of them. The names are those of torchcomms, as far as it has them; MPI marks the same calls
with v and w. The rules in ``collectives`` apply here, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias, overload

from torch import Tensor

from allranks._api.collectives import list_of, outside, root_of
from allranks._api.world import resolve_group
from allranks._base.public import publish
from allranks._call.types import ReduceOp, as_reduce_op
from allranks._call.work import Work

if TYPE_CHECKING:
    from allranks._call.types import PremulSum
    from allranks._group.process_group import ProcessGroup

    Group: TypeAlias = ProcessGroup | None
    Op: TypeAlias = ReduceOp | PremulSum

__all__ = ["all_gather_v", "all_to_all_w", "gather_v", "reduce_scatter_v", "scatter_v"]


@overload
def all_gather_v(
    tensor_list: Sequence[Tensor], tensor: Tensor, group: Group = ..., async_op: Literal[False] = ...
) -> None: ...


@overload
def all_gather_v(
    tensor_list: Sequence[Tensor], tensor: Tensor, group: Group = ..., async_op: Literal[True] = ...
) -> Work: ...


@overload
def all_gather_v(
    tensor_list: Sequence[Tensor], tensor: Tensor, group: Group = ..., async_op: bool = ...
) -> Work | None: ...


def all_gather_v(
    tensor_list: Sequence[Tensor], tensor: Tensor, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Gather every rank's ``tensor`` into ``tensor_list``. The tensors may have a different size on each rank.

    MPI's name is MPI_Allgatherv. Nothing is padded.

    Args:
        tensor_list: One output per rank.
        tensor: Input of this rank.
        group: The process group. None: the world.
        async_op: Return immediately, with a Work.

    Returns:
        A Work if ``async_op`` is set. Otherwise None.

    Raises:
        MismatchError: A rank expects another size than a rank passes, or the ranks make different calls.
        PeerLostError, TimeoutError, UsageError: See ``all_reduce``.

    Shape:
        ``tensor_list[r]`` has the element count of rank r's ``tensor``, and its dtype. If a rank does not know all
        sizes, exchange them first with ``all_gather``.

    Cost:
        For n bytes in all, n bytes read per rank. Small: one latency. From 1 MiB on, with 3 ranks or more: a
        broadcast of each tensor.

    Example:
        >>> rank = dist.get_rank()  # on each of 2 ranks; rank 0 shows:
        >>> parts = [torch.empty(1), torch.empty(2)]
        >>> dist.all_gather_v(parts, torch.full((rank + 1,), float(rank)))
        >>> parts
        [tensor([0.]), tensor([1., 1.])]
    """
    if outside(group, "all_gather_v"):
        return None
    return resolve_group(group).all_gather_v(list_of("all_gather_v", tensor_list, "tensor_list"), tensor, async_op)


@overload
def reduce_scatter_v(
    output: Tensor, input_list: Sequence[Tensor], op: Op = ..., group: Group = ..., async_op: Literal[False] = ...
) -> None: ...


@overload
def reduce_scatter_v(
    output: Tensor, input_list: Sequence[Tensor], op: Op = ..., group: Group = ..., async_op: Literal[True] = ...
) -> Work: ...


@overload
def reduce_scatter_v(
    output: Tensor, input_list: Sequence[Tensor], op: Op = ..., group: Group = ..., async_op: bool = ...
) -> Work | None: ...


def reduce_scatter_v(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: ReduceOp | PremulSum = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce ``input_list[r]`` of all ranks into ``output`` of rank r. Each rank's part may have a different size.

    MPI's name is MPI_Reduce_scatter. The inputs do not change.

    Args:
        output: Receives the reduced part of this rank.
        input_list: One input for each rank.
        op: The reduce op.
        group: The process group. None: the world.
        async_op: Return immediately, with a Work.

    Returns:
        A Work if ``async_op`` is set. Otherwise None.

    Raises:
        MismatchError: The ranks pass other sizes for the same rank, or make different calls.
        PeerLostError, TimeoutError, UsageError: See ``all_reduce``.

    Shape:
        ``input_list[r]`` has the element count of rank r's ``output``, on all ranks.

    Cost:
        One ``reduce`` for each rank: P latencies, and each input is read once.

    Example:
        >>> rank = dist.get_rank()  # on each of 2 ranks; rank 0 shows:
        >>> mine = torch.empty(rank + 1)
        >>> dist.reduce_scatter_v(mine, [torch.ones(1), torch.ones(2)])
        >>> mine
        tensor([2.])
    """
    if outside(group, "reduce_scatter_v"):
        return None
    inputs = list_of("reduce_scatter_v", input_list, "input_list")
    return resolve_group(group).reduce_scatter_v(output, inputs, as_reduce_op(op), async_op)


@overload
def gather_v(
    tensor: Tensor,
    gather_list: Sequence[Tensor] | None = ...,
    dst: int | None = ...,
    group: Group = ...,
    async_op: Literal[False] = ...,
    group_dst: int | None = ...,
) -> None: ...


@overload
def gather_v(
    tensor: Tensor,
    gather_list: Sequence[Tensor] | None = ...,
    dst: int | None = ...,
    group: Group = ...,
    async_op: Literal[True] = ...,
    group_dst: int | None = ...,
) -> Work: ...


@overload
def gather_v(
    tensor: Tensor,
    gather_list: Sequence[Tensor] | None = ...,
    dst: int | None = ...,
    group: Group = ...,
    async_op: bool = ...,
    group_dst: int | None = ...,
) -> Work | None: ...


def gather_v(
    tensor: Tensor,
    gather_list: Sequence[Tensor] | None = None,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Gather every rank's ``tensor`` on rank ``dst``. The tensors may have a different size on each rank.

    MPI's name is MPI_Gatherv.

    Args:
        tensor: Input of this rank.
        gather_list: Only on ``dst``: receives one tensor per rank.
        dst: Rank of the world that receives them. 0 if neither it nor ``group_dst`` is given.
        group: The process group. None: the world.
        async_op: Return immediately, with a Work.
        group_dst: Rank of the group that receives them, instead of ``dst``.

    Returns:
        A Work if ``async_op`` is set. Otherwise None.

    Raises:
        MismatchError: ``dst`` expects another size than a rank passes, or the ranks make different calls.
        PeerLostError, TimeoutError, UsageError: See ``all_reduce``.

    Shape:
        On ``dst``, ``gather_list[r]`` has the element count of rank r's ``tensor``, and its dtype.

    Cost:
        That of an ``all_to_all`` whose other parts are empty.

    Example:
        >>> rank = dist.get_rank()  # on each of 2 ranks; rank 0 shows:
        >>> parts = [torch.empty(1), torch.empty(2)] if rank == 0 else None
        >>> dist.gather_v(torch.full((rank + 1,), float(rank)), parts, dst=0)
        >>> parts
        [tensor([0.]), tensor([1., 1.])]
    """
    if outside(group, "gather_v"):
        return None
    resolved = resolve_group(group)
    outputs = list_of("gather_v", gather_list, "gather_list") if gather_list is not None else None
    return resolved.gather_v(tensor, outputs, root_of("gather_v", resolved, dst, group_dst, "dst", default=0), async_op)


@overload
def scatter_v(
    tensor: Tensor,
    scatter_list: Sequence[Tensor] | None = ...,
    src: int | None = ...,
    group: Group = ...,
    async_op: Literal[False] = ...,
    group_src: int | None = ...,
) -> None: ...


@overload
def scatter_v(
    tensor: Tensor,
    scatter_list: Sequence[Tensor] | None = ...,
    src: int | None = ...,
    group: Group = ...,
    async_op: Literal[True] = ...,
    group_src: int | None = ...,
) -> Work: ...


@overload
def scatter_v(
    tensor: Tensor,
    scatter_list: Sequence[Tensor] | None = ...,
    src: int | None = ...,
    group: Group = ...,
    async_op: bool = ...,
    group_src: int | None = ...,
) -> Work | None: ...


def scatter_v(
    tensor: Tensor,
    scatter_list: Sequence[Tensor] | None = None,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Send ``scatter_list[r]`` of rank ``src`` to rank r. The tensors may have a different size for each rank.

    MPI's name is MPI_Scatterv.

    Args:
        tensor: Receives the tensor of this rank.
        scatter_list: Only on ``src``: one tensor for each rank.
        src: Rank of the world that sends them. 0 if neither it nor ``group_src`` is given.
        group: The process group. None: the world.
        async_op: Return immediately, with a Work.
        group_src: Rank of the group that sends them, instead of ``src``.

    Returns:
        A Work if ``async_op`` is set. Otherwise None.

    Raises:
        MismatchError: A rank expects another size than ``src`` passes, or the ranks make different calls.
        PeerLostError, TimeoutError, UsageError: See ``all_reduce``.

    Shape:
        On ``src``, ``scatter_list[r]`` has the element count of rank r's ``tensor``, and its dtype.

    Cost:
        That of an ``all_to_all`` whose other parts are empty.

    Example:
        >>> rank = dist.get_rank()  # on each of 2 ranks; rank 0 shows:
        >>> mine = torch.empty(rank + 1)
        >>> dist.scatter_v(mine, [torch.zeros(1), torch.ones(2)] if rank == 0 else None, src=0)
        >>> mine
        tensor([0.])
    """
    if outside(group, "scatter_v"):
        return None
    resolved = resolve_group(group)
    inputs = list_of("scatter_v", scatter_list, "scatter_list") if scatter_list is not None else None
    return resolved.scatter_v(
        tensor, inputs, root_of("scatter_v", resolved, src, group_src, "src", default=0), async_op
    )


@overload
def all_to_all_w(
    output_tensor_list: Sequence[Tensor],
    input_tensor_list: Sequence[Tensor],
    group: Group = ...,
    async_op: Literal[False] = ...,
) -> None: ...


@overload
def all_to_all_w(
    output_tensor_list: Sequence[Tensor],
    input_tensor_list: Sequence[Tensor],
    group: Group = ...,
    async_op: Literal[True] = ...,
) -> Work: ...


@overload
def all_to_all_w(
    output_tensor_list: Sequence[Tensor], input_tensor_list: Sequence[Tensor], group: Group = ..., async_op: bool = ...
) -> Work | None: ...


def all_to_all_w(
    output_tensor_list: Sequence[Tensor],
    input_tensor_list: Sequence[Tensor],
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Send ``input_tensor_list[r]`` to rank r, with any shapes and dtypes.

    MPI's name is MPI_Alltoallw. Unlike in ``all_to_all``, the tensors of one list may have different dtypes. Both sides
    of a pair have the same dtype, which the ranks compare.

    Args:
        output_tensor_list: ``output_tensor_list[r]`` receives what rank r sends to this rank.
        input_tensor_list: One input for each rank.
        group: The process group. None: the world.
        async_op: Return immediately, with a Work.

    Returns:
        A Work if ``async_op`` is set. Otherwise None.

    Raises:
        MismatchError: A rank expects another dtype or another number of bytes than it is sent, or the ranks make other
            calls. The outputs of an asynchronous call are then undefined.
        PeerLostError, TimeoutError, UsageError: See ``all_reduce``.

    Shape:
        ``output_tensor_list[r]`` has the element count of rank r's input for this rank.

    Cost:
        An ``all_gather`` of 2 P bytes for the dtypes, and an ``all_to_all``.

    Example:
        >>> rank = dist.get_rank()  # on each of 2 ranks; rank 0 shows:
        >>> dtypes = [torch.int64, torch.float64]
        >>> outs = [torch.empty(1, dtype=dtypes[sender]) for sender in range(2)]
        >>> dist.all_to_all_w(outs, [torch.full((1,), rank + 1, dtype=dtypes[rank]) for receiver in range(2)])
        >>> outs
        [tensor([1]), tensor([2.], dtype=torch.float64)]
    """
    if outside(group, "all_to_all_w"):
        return None
    outputs, inputs = (
        list_of("all_to_all_w", output_tensor_list, "output_tensor_list"),
        list_of("all_to_all_w", input_tensor_list, "input_tensor_list"),
    )
    return resolve_group(group).all_to_all_w(outputs, inputs, async_op)


publish(globals())
