"""Collectives and messages as functions, with torch.distributed's names, arguments and in-place semantics.

Each function resolves its group, translates ranks of the world to ranks of the group, and calls the group's method.

Every rank of the group calls a collective, in the same order. A call also synchronizes: no rank returns before every
rank has entered the call. If ranks make different calls (verb, element count, dtype, reduce op, root), every rank
raises a MismatchError and no tensor is changed.

All functions raise: MismatchError as above; PeerLostError if a rank died or left; TimeoutError if a rank did not call
within the group's timeout; UsageError for invalid tensors and arguments; NotInitializedError without a group. On a rank
outside the group they warn and do nothing, like torch's functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

from torch import Tensor

from allranks._api.world import GroupMember, resolve_group
from allranks._base.errors import UsageError, rank_list
from allranks._base.integers import integer_of
from allranks._base.public import publish
from allranks._base.timeouts import seconds_of
from allranks._call import callsite
from allranks._call.types import ReduceOp
from allranks._call.work import CallWithTimeout, Together, Work
from allranks._engines.checks import check_apart, check_tensor

if TYPE_CHECKING:
    from allranks._call.types import PremulSum
    from allranks._group.process_group import ProcessGroup

    Group: TypeAlias = ProcessGroup | None
    Op: TypeAlias = ReduceOp | PremulSum

__all__ = [
    "P2POp",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "gather",
    "gather_into_tensor",
    "gather_single",
    "irecv",
    "isend",
    "list_of",
    "monitored_barrier",
    "outside",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "root_of",
    "scatter",
    "send",
    "source_of",
]


@overload
def all_reduce(tensor: Tensor, op: Op = ..., group: Group = ..., async_op: Literal[False] = ...) -> None: ...
@overload
def all_reduce(tensor: Tensor, op: Op = ..., group: Group = ..., async_op: Literal[True] = ...) -> Work: ...
@overload
def all_reduce(tensor: Tensor, op: Op = ..., group: Group = ..., async_op: bool = ...) -> Work | None: ...
def all_reduce(
    tensor: Tensor,
    op: Op = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce ``tensor`` over all ranks, in place. The results of all ranks are bitwise equal.

    Args:
        tensor: A CPU tensor of integers, floating-point numbers, bools or complex numbers.
        op: SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR. See ReduceOp for the supported dtypes.
        group: The process group. None: the world.
        async_op: Return immediately, with a Work.

    Returns:
        A Work if ``async_op`` is set. Otherwise None.

    Raises:
        MismatchError: The ranks' calls differ.
        PeerLostError: A rank died or left.
        TimeoutError: A rank did not call within the group's timeout. The error names it.
        UsageError: A tensor or an op is not supported.

    Shape:
        any, with the same element count on all ranks. A non-contiguous tensor is copied and copied back. A sparse COO
        tensor (SUM only) may have different elements on each rank. It is coalesced afterwards.

    Cost:
        P ranks, n bytes. Up to 64 KiB: one latency, P n bytes read per rank. Above: reduce-scatter and all-gather,
        pipelined through shared memory; about 4 n bytes moved per rank.

    Source:
        Rabenseifner, "Optimization of Collective Reduction Operations", 2004, on shared memory. The order of summation
        is rank 0, 1, ..., P-1 for every element, on every rank.

    Example:
        >>> import torch, allranks as dist
        >>> dist.init_process_group()  # one process: the world is this one
        >>> t = torch.tensor([1.0, -1.0])
        >>> dist.all_reduce(t)
        >>> t
        tensor([ 1., -1.])
        >>> dist.destroy_process_group()
    """
    # The check for None comes first, because it is the usual case and costs less than the call.
    if group is not None and outside(group, "all_reduce"):
        return None
    return resolve_group(group).all_reduce(tensor, op, async_op)


@overload
def reduce(
    tensor: Tensor,
    dst: int | None = ...,
    op: Op = ...,
    group: Group = ...,
    async_op: Literal[False] = ...,
    group_dst: int | None = ...,
) -> None: ...
@overload
def reduce(
    tensor: Tensor,
    dst: int | None = ...,
    op: Op = ...,
    group: Group = ...,
    async_op: Literal[True] = ...,
    group_dst: int | None = ...,
) -> Work: ...
@overload
def reduce(
    tensor: Tensor,
    dst: int | None = ...,
    op: Op = ...,
    group: Group = ...,
    async_op: bool = ...,
    group_dst: int | None = ...,
) -> Work | None: ...
def reduce(
    tensor: Tensor,
    dst: int | None = None,
    op: Op = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Reduce ``tensor`` over all ranks. Rank ``dst`` receives the result in place; other tensors are unchanged.

    Args:
        tensor: See ``all_reduce``.
        dst: Rank of the world that receives the result.
        op: See ``all_reduce``.
        group: The process group. None: the world.
        async_op: Return immediately, with a Work.
        group_dst: Rank of the group that receives the result, instead of ``dst``.

    Returns:
        A Work if ``async_op`` is set. Otherwise None.

    Raises:
        MismatchError, PeerLostError, TimeoutError, UsageError: See ``all_reduce``.

    Shape:
        any, with the same element count on all ranks.

    Cost:
        as ``all_reduce``; above 64 KiB all ranks share the work of the reduction.

    Source:
        as ``all_reduce``; only ``dst`` receives the shards.

    Example:
        >>> t = torch.tensor([dist.get_rank() + 1.0])  # on each of 2 ranks; rank 0 shows:
        >>> dist.reduce(t, dst=0)
        >>> t
        tensor([3.])
    """
    if group is not None and outside(group, "reduce"):
        return None
    resolved = resolve_group(group)
    return resolved.reduce(tensor, root_of("reduce", resolved, dst, group_dst, "dst"), op, async_op)


@overload
def broadcast(
    tensor: Tensor,
    src: int | None = ...,
    group: Group = ...,
    async_op: Literal[False] = ...,
    group_src: int | None = ...,
) -> None: ...
@overload
def broadcast(
    tensor: Tensor,
    src: int | None = ...,
    group: Group = ...,
    async_op: Literal[True] = ...,
    group_src: int | None = ...,
) -> Work: ...
@overload
def broadcast(
    tensor: Tensor, src: int | None = ..., group: Group = ..., async_op: bool = ..., group_src: int | None = ...
) -> Work | None: ...
def broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Copy ``tensor`` of rank ``src`` into the ``tensor`` of every rank.

    Args:
        tensor: Data on ``src``; overwritten on other ranks. Any dtype.
        src: Rank of the world that has the data.
        group: The process group. None: the world.
        async_op: Return immediately, with a Work.
        group_src: Rank of the group that has the data, instead of ``src``.

    Returns:
        A Work if ``async_op`` is set. Otherwise None.

    Raises:
        MismatchError, PeerLostError, TimeoutError, UsageError: See ``all_reduce``.

    Shape:
        any, with the same element count on all ranks.

    Cost:
        n bytes written once, and read once by each other rank; one latency.

    Source:
        a ring in shared memory, which ``src`` writes while the other ranks read.

    Example:
        >>> t = torch.tensor([dist.get_rank() + 1.0])  # on each of 2 ranks; rank 0 shows:
        >>> dist.broadcast(t, src=1)
        >>> t
        tensor([2.])
    """
    if group is not None and outside(group, "broadcast"):
        return None
    resolved = resolve_group(group)
    return resolved.broadcast(tensor, root_of("broadcast", resolved, src, group_src, "src"), async_op)


@overload
def all_gather(
    tensor_list: Sequence[Tensor], tensor: Tensor, group: Group = ..., async_op: Literal[False] = ...
) -> None: ...
@overload
def all_gather(
    tensor_list: Sequence[Tensor], tensor: Tensor, group: Group = ..., async_op: Literal[True] = ...
) -> Work: ...
@overload
def all_gather(
    tensor_list: Sequence[Tensor], tensor: Tensor, group: Group = ..., async_op: bool = ...
) -> Work | None: ...
def all_gather(
    tensor_list: Sequence[Tensor], tensor: Tensor, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Gather every rank's ``tensor`` on every rank.

    Args:
        tensor_list: Receives one tensor per rank, in the order of the ranks.
        tensor: Input of this rank.
        group: The process group. None: the world.
        async_op: Return immediately, with a Work.

    Returns:
        A Work if ``async_op`` is set. Otherwise None.

    Raises:
        MismatchError, PeerLostError, TimeoutError, UsageError: See ``all_reduce``.

    Shape:
        every tensor has as many elements as ``tensor``, on all ranks. On the native engine the counts may differ:
        tensor i has as many elements as rank i's input. This kind of call is executed as an ``all_to_all``.

    Cost:
        n bytes written and (P-1) n read per rank, one latency (large: one per 128 KiB).

    Source:
        each rank writes into its ring in shared memory, and the other ranks read. Between more than 8 hosts, a ring of
        hosts, as in Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH",
        2005.

    Example:
        >>> parts = [torch.empty(1), torch.empty(1)]  # on each of 2 ranks; rank 0 shows:
        >>> dist.all_gather(parts, torch.tensor([dist.get_rank() + 1.0]))
        >>> parts
        [tensor([1.]), tensor([2.])]
    """
    if group is not None and outside(group, "all_gather"):
        return None
    return resolve_group(group).all_gather(list_of("all_gather", tensor_list, "tensor_list"), tensor, async_op)


@overload
def all_gather_single(
    output_tensor: Tensor, input_tensor: Tensor, group: Group = ..., async_op: Literal[False] = ...
) -> None: ...
@overload
def all_gather_single(
    output_tensor: Tensor, input_tensor: Tensor, group: Group = ..., async_op: Literal[True] = ...
) -> Work: ...
@overload
def all_gather_single(
    output_tensor: Tensor, input_tensor: Tensor, group: Group = ..., async_op: bool = ...
) -> Work | None: ...
def all_gather_single(
    output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Gather every rank's ``input_tensor`` in one tensor on every rank.

    Args:
        output_tensor: Receives the concatenated or stacked inputs: P times the elements of ``input_tensor``.
        input_tensor: Input of this rank. It may be this rank's part of ``output_tensor``.
        group: The process group. None: the world.
        async_op: Return immediately, with a Work.

    Returns:
        A Work if ``async_op`` is set. Otherwise None.

    Raises:
        MismatchError, PeerLostError, TimeoutError, UsageError: See ``all_reduce``.

    Shape:
        ``output_tensor`` has P times the elements of ``input_tensor``, the same on all ranks.

    Cost:
        as ``all_gather``.

    Example:
        >>> whole = torch.empty(4)  # on each of 2 ranks; rank 0 shows:
        >>> dist.all_gather_single(whole, torch.full((2,), dist.get_rank() + 1.0))
        >>> whole
        tensor([1., 1., 2., 2.])
    """
    if group is not None and outside(group, "all_gather_single"):
        return None
    return resolve_group(group).all_gather(check_tensor("output_tensor", output_tensor), input_tensor, async_op)


@overload
def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: Group = ..., async_op: Literal[False] = ...
) -> None: ...
@overload
def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: Group = ..., async_op: Literal[True] = ...
) -> Work: ...
@overload
def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: Group = ..., async_op: bool = ...
) -> Work | None: ...
def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Call ``all_gather_single``, under its name in torch before 2.13.

    Args:
        output_tensor: See ``all_gather_single``.
        input_tensor: See ``all_gather_single``.
        group: The process group. None: the world.
        async_op: Return immediately, with a Work.

    Raises:
        MismatchError, PeerLostError, TimeoutError, UsageError: See ``all_reduce``.

    Shape:
        as ``all_gather_single``.

    Cost:
        as ``all_gather_single``.
    """
    return all_gather_single(output_tensor, input_tensor, group, async_op)


@overload
def gather(
    tensor: Tensor,
    gather_list: Sequence[Tensor] | None = ...,
    dst: int | None = ...,
    group: Group = ...,
    async_op: Literal[False] = ...,
    group_dst: int | None = ...,
) -> None: ...
@overload
def gather(
    tensor: Tensor,
    gather_list: Sequence[Tensor] | None = ...,
    dst: int | None = ...,
    group: Group = ...,
    async_op: Literal[True] = ...,
    group_dst: int | None = ...,
) -> Work: ...
@overload
def gather(
    tensor: Tensor,
    gather_list: Sequence[Tensor] | None = ...,
    dst: int | None = ...,
    group: Group = ...,
    async_op: bool = ...,
    group_dst: int | None = ...,
) -> Work | None: ...
def gather(
    tensor: Tensor,
    gather_list: Sequence[Tensor] | None = None,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Gather every rank's ``tensor`` on rank ``dst``.

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
        MismatchError, PeerLostError, TimeoutError, UsageError: See ``all_reduce``.

    Shape:
        ``tensor`` and each tensor of ``gather_list`` have the same element count, on all ranks.

    Cost:
        n bytes written per rank, (P-1) n bytes read by ``dst``, one latency (large: one per 128 KiB).

    Source:
        as ``all_gather``; between more than 8 hosts, a binomial tree of hosts (Thakur, Rabenseifner and Gropp, 2005).

    Example:
        >>> rank = dist.get_rank()  # on each of 2 ranks; rank 0 shows:
        >>> parts = [torch.empty(1), torch.empty(1)] if rank == 0 else None
        >>> dist.gather(torch.tensor([rank + 1.0]), parts, dst=0)
        >>> parts
        [tensor([1.]), tensor([2.])]
    """
    if group is not None and outside(group, "gather"):
        return None
    resolved = resolve_group(group)
    outputs = list_of("gather", gather_list, "gather_list") if gather_list else None
    return resolved.gather(tensor, outputs, root_of("gather", resolved, dst, group_dst, "dst", default=0), async_op)


@overload
def gather_single(
    tensor: Tensor,
    gather_tensor: Tensor | None = ...,
    dst: int | None = ...,
    group: Group = ...,
    async_op: Literal[False] = ...,
    group_dst: int | None = ...,
) -> None: ...
@overload
def gather_single(
    tensor: Tensor,
    gather_tensor: Tensor | None = ...,
    dst: int | None = ...,
    group: Group = ...,
    async_op: Literal[True] = ...,
    group_dst: int | None = ...,
) -> Work: ...
@overload
def gather_single(
    tensor: Tensor,
    gather_tensor: Tensor | None = ...,
    dst: int | None = ...,
    group: Group = ...,
    async_op: bool = ...,
    group_dst: int | None = ...,
) -> Work | None: ...
def gather_single(
    tensor: Tensor,
    gather_tensor: Tensor | None = None,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Gather every rank's ``tensor`` in one tensor on rank ``dst``.

    Args:
        tensor: Input of this rank.
        gather_tensor: Only on ``dst``: receives the concatenated or stacked inputs. Contiguous.
        dst: Rank of the world that receives them. 0 if neither it nor ``group_dst`` is given.
        group: The process group. None: the world.
        async_op: Return immediately, with a Work.
        group_dst: Rank of the group that receives them, instead of ``dst``.

    Returns:
        A Work if ``async_op`` is set. Otherwise None.

    Raises:
        MismatchError, PeerLostError, TimeoutError, UsageError: See ``all_reduce``.

    Shape:
        ``gather_tensor`` has P times the elements of ``tensor``, which are the same number on all ranks.

    Cost:
        as ``gather``.

    Example:
        >>> rank = dist.get_rank()  # on each of 2 ranks; rank 0 shows:
        >>> whole = torch.empty(2) if rank == 0 else None
        >>> dist.gather_single(torch.tensor([rank + 1.0]), whole)
        >>> whole
        tensor([1., 2.])
    """
    if group is not None and outside(group, "gather_single"):
        return None
    resolved = resolve_group(group)
    outputs = None
    if gather_tensor is not None:
        size = resolved.size()
        check_tensor("gather_tensor", gather_tensor)
        if not gather_tensor.is_contiguous() or gather_tensor.numel() != size * check_tensor("tensor", tensor).numel():
            raise UsageError(
                f"gather_single: gather_tensor has the shape {tuple(gather_tensor.shape)}. Expected a contiguous tensor"
                f" of {size} x {tensor.numel()} elements"
            )
        outputs = list(gather_tensor.view(size, *tensor.shape))
    return resolved.gather(
        tensor, outputs, root_of("gather_single", resolved, dst, group_dst, "dst", default=0), async_op
    )


@overload
def gather_into_tensor(
    tensor: Tensor,
    gather_tensor: Tensor | None = ...,
    dst: int | None = ...,
    group: Group = ...,
    async_op: Literal[False] = ...,
    group_dst: int | None = ...,
) -> None: ...
@overload
def gather_into_tensor(
    tensor: Tensor,
    gather_tensor: Tensor | None = ...,
    dst: int | None = ...,
    group: Group = ...,
    async_op: Literal[True] = ...,
    group_dst: int | None = ...,
) -> Work: ...
@overload
def gather_into_tensor(
    tensor: Tensor,
    gather_tensor: Tensor | None = ...,
    dst: int | None = ...,
    group: Group = ...,
    async_op: bool = ...,
    group_dst: int | None = ...,
) -> Work | None: ...
def gather_into_tensor(
    tensor: Tensor,
    gather_tensor: Tensor | None = None,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Call ``gather_single``, under another name that torch has.

    Args:
        tensor: See ``gather_single``.
        gather_tensor: See ``gather_single``.
        dst: Rank of the world that receives them. 0 if neither it nor ``group_dst`` is given.
        group: The process group. None: the world.
        async_op: Return immediately, with a Work.
        group_dst: Rank of the group that receives them, instead of ``dst``.

    Raises:
        MismatchError, PeerLostError, TimeoutError, UsageError: See ``all_reduce``.

    Shape:
        as ``gather_single``.

    Cost:
        as ``gather_single``.
    """
    return gather_single(tensor, gather_tensor, dst, group, async_op, group_dst)


@overload
def scatter(
    tensor: Tensor,
    scatter_list: Sequence[Tensor] | None = ...,
    src: int | None = ...,
    group: Group = ...,
    async_op: Literal[False] = ...,
    group_src: int | None = ...,
) -> None: ...
@overload
def scatter(
    tensor: Tensor,
    scatter_list: Sequence[Tensor] | None = ...,
    src: int | None = ...,
    group: Group = ...,
    async_op: Literal[True] = ...,
    group_src: int | None = ...,
) -> Work: ...
@overload
def scatter(
    tensor: Tensor,
    scatter_list: Sequence[Tensor] | None = ...,
    src: int | None = ...,
    group: Group = ...,
    async_op: bool = ...,
    group_src: int | None = ...,
) -> Work | None: ...
def scatter(
    tensor: Tensor,
    scatter_list: Sequence[Tensor] | None = None,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Send each rank one tensor of rank ``src``'s list.

    Args:
        tensor: Output of this rank.
        scatter_list: Only on ``src``: one tensor per rank.
        src: Rank of the world that has the list. 0 if neither it nor ``group_src`` is given.
        group: The process group. None: the world.
        async_op: Return immediately, with a Work.
        group_src: Rank of the group that has the list, instead of ``src``.

    Returns:
        A Work if ``async_op`` is set. Otherwise None.

    Raises:
        MismatchError, PeerLostError, TimeoutError, UsageError: See ``all_reduce``.

    Shape:
        ``tensor`` and each tensor of ``scatter_list`` have the same element count, on all ranks.

    Cost:
        (P-1) n bytes written by ``src``, n bytes read by each other rank, one latency (large: one per 128 KiB).

    Source:
        chunks of the ring of ``src`` are divided into one cell for each rank. Between more than 8 hosts, as ``gather``.

    Example:
        >>> t = torch.empty(1)  # on each of 2 ranks; rank 0 shows:
        >>> parts = [torch.tensor([5.0]), torch.tensor([6.0])] if dist.get_rank() == 1 else None
        >>> dist.scatter(t, parts, src=1)
        >>> t
        tensor([5.])
    """
    if group is not None and outside(group, "scatter"):
        return None
    resolved = resolve_group(group)
    inputs = list_of("scatter", scatter_list, "scatter_list") if scatter_list else None
    return resolved.scatter(tensor, inputs, root_of("scatter", resolved, src, group_src, "src", default=0), async_op)


@overload
def reduce_scatter(
    output: Tensor, input_list: Sequence[Tensor], op: Op = ..., group: Group = ..., async_op: Literal[False] = ...
) -> None: ...
@overload
def reduce_scatter(
    output: Tensor, input_list: Sequence[Tensor], op: Op = ..., group: Group = ..., async_op: Literal[True] = ...
) -> Work: ...
@overload
def reduce_scatter(
    output: Tensor, input_list: Sequence[Tensor], op: Op = ..., group: Group = ..., async_op: bool = ...
) -> Work | None: ...
def reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: Op = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce the lists of all ranks, and give each rank its part of the result.

    Args:
        output: Receives the reduction of all ranks' tensors for this rank.
        input_list: One tensor per rank.
        op: See ``all_reduce``.
        group: The process group. None: the world.
        async_op: Return immediately, with a Work.

    Returns:
        A Work if ``async_op`` is set. Otherwise None.

    Raises:
        MismatchError, PeerLostError, TimeoutError, UsageError: See ``all_reduce``.

    Shape:
        ``output`` and each tensor of ``input_list`` have the same element count, on all ranks.

    Cost:
        (P-1) n bytes written and P n bytes read per rank, one latency (large: one per 128 KiB).

    Source:
        pairwise: each rank writes the inputs of the other ranks' reductions into cells of its ring. Between more than 8
        hosts, along a chain in the order of the ranks.

    Example:
        >>> mine = torch.empty(1)  # on each of 2 ranks; rank 0 shows:
        >>> dist.reduce_scatter(mine, [torch.tensor([1.0]), torch.tensor([10.0])])
        >>> mine
        tensor([2.])
    """
    if group is not None and outside(group, "reduce_scatter"):
        return None
    return resolve_group(group).reduce_scatter(
        output, list_of("reduce_scatter", input_list, "input_list"), op, async_op
    )


@overload
def reduce_scatter_single(
    output: Tensor, input: Tensor, op: Op = ..., group: Group = ..., async_op: Literal[False] = ...
) -> None: ...
@overload
def reduce_scatter_single(
    output: Tensor, input: Tensor, op: Op = ..., group: Group = ..., async_op: Literal[True] = ...
) -> Work: ...
@overload
def reduce_scatter_single(
    output: Tensor, input: Tensor, op: Op = ..., group: Group = ..., async_op: bool = ...
) -> Work | None: ...
def reduce_scatter_single(
    output: Tensor,
    input: Tensor,
    op: Op = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce ``input`` of all ranks, and give each rank its part of the result.

    Args:
        output: Receives this rank's part.
        input: P times the elements of ``output``: the part for rank 0, then for rank 1, and so on.
        op: See ``all_reduce``.
        group: The process group. None: the world.
        async_op: Return immediately, with a Work.

    Returns:
        A Work if ``async_op`` is set. Otherwise None.

    Raises:
        MismatchError, PeerLostError, TimeoutError, UsageError: See ``all_reduce``.

    Shape:
        ``input`` has P times the elements of ``output``, the same on all ranks.

    Cost:
        as ``reduce_scatter``.

    Example:
        >>> mine = torch.empty(2)  # on each of 2 ranks; rank 0 shows:
        >>> dist.reduce_scatter_single(mine, torch.arange(4.0))
        >>> mine
        tensor([0., 2.])
    """
    if group is not None and outside(group, "reduce_scatter_single"):
        return None
    return resolve_group(group).reduce_scatter(output, check_tensor("input", input), op, async_op)


@overload
def reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: Op = ..., group: Group = ..., async_op: Literal[False] = ...
) -> None: ...
@overload
def reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: Op = ..., group: Group = ..., async_op: Literal[True] = ...
) -> Work: ...
@overload
def reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: Op = ..., group: Group = ..., async_op: bool = ...
) -> Work | None: ...
def reduce_scatter_tensor(
    output: Tensor,
    input: Tensor,
    op: Op = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Call ``reduce_scatter_single``, under its name in torch before 2.13.

    Args:
        output: See ``reduce_scatter_single``.
        input: See ``reduce_scatter_single``.
        op: See ``all_reduce``.
        group: The process group. None: the world.
        async_op: Return immediately, with a Work.

    Raises:
        MismatchError, PeerLostError, TimeoutError, UsageError: See ``all_reduce``.

    Shape:
        as ``reduce_scatter_single``.

    Cost:
        as ``reduce_scatter_single``.
    """
    return reduce_scatter_single(output, input, op, group, async_op)


@overload
def all_to_all(
    output_tensor_list: Sequence[Tensor],
    input_tensor_list: Sequence[Tensor],
    group: Group = ...,
    async_op: Literal[False] = ...,
) -> None: ...
@overload
def all_to_all(
    output_tensor_list: Sequence[Tensor],
    input_tensor_list: Sequence[Tensor],
    group: Group = ...,
    async_op: Literal[True] = ...,
) -> Work: ...
@overload
def all_to_all(
    output_tensor_list: Sequence[Tensor], input_tensor_list: Sequence[Tensor], group: Group = ..., async_op: bool = ...
) -> Work | None: ...
def all_to_all(
    output_tensor_list: Sequence[Tensor],
    input_tensor_list: Sequence[Tensor],
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Send tensor q of every rank's list to rank q.

    Args:
        output_tensor_list: Receives one tensor from each rank.
        input_tensor_list: One tensor per rank, which is sent to that rank. All sizes may differ.
        group: The process group. None: the world.
        async_op: Return immediately, with a Work.

    Returns:
        A Work if ``async_op`` is set. Otherwise None.

    Raises:
        MismatchError: Two ranks disagree on the size of the data between them. Raised on every rank.
        PeerLostError, TimeoutError, UsageError: See ``all_reduce``.

    Shape:
        tensor q of rank p's inputs has as many elements as tensor p of rank q's outputs.

    Cost:
        sent data is written once, received data is read once; one latency (large: one per 128 KiB).

    Source:
        pairwise exchange (Thakur, Rabenseifner and Gropp, 2005) through cells of a ring in shared memory, or a TCP
        connection between each two ranks.

    Example:
        >>> rank = dist.get_rank()  # on each of 2 ranks; rank 0 shows:
        >>> gets = [torch.empty(1), torch.empty(1)]
        >>> dist.all_to_all(gets, [torch.tensor([10.0 * rank]), torch.tensor([10.0 * rank + 1])])
        >>> gets
        [tensor([0.]), tensor([10.])]
    """
    if group is not None and outside(group, "all_to_all"):
        return None
    outputs, inputs = (
        list_of("all_to_all", output_tensor_list, "output_tensor_list"),
        list_of("all_to_all", input_tensor_list, "input_tensor_list"),
    )
    return resolve_group(group).all_to_all(outputs, inputs, async_op)


@overload
def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = ...,
    input_split_sizes: Sequence[int] | None = ...,
    group: Group = ...,
    async_op: Literal[False] = ...,
) -> None: ...
@overload
def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = ...,
    input_split_sizes: Sequence[int] | None = ...,
    group: Group = ...,
    async_op: Literal[True] = ...,
) -> Work: ...
@overload
def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = ...,
    input_split_sizes: Sequence[int] | None = ...,
    group: Group = ...,
    async_op: bool = ...,
) -> Work | None: ...
def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Split ``input`` along its first dimension, send part q to rank q, and concatenate the received parts.

    Args:
        output: Receives the parts from rank 0, rank 1, and so on, concatenated.
        input: The parts for rank 0, rank 1, and so on.
        output_split_sizes: Rows from each rank. None: equal parts.
        input_split_sizes: Rows for each rank. None: equal parts.
        group: The process group. None: the world.
        async_op: Return immediately, with a Work.

    Returns:
        A Work if ``async_op`` is set. Otherwise None.

    Raises:
        MismatchError, PeerLostError, TimeoutError, UsageError: See ``all_to_all``.

    Shape:
        the first dimensions are split, evenly or by the sizes; the part that rank p sends to rank q has as many
        elements as rank q expects from rank p.

    Cost:
        as ``all_to_all``.

    Example:
        >>> rank = dist.get_rank()  # on each of 2 ranks; rank 0 keeps one element, gives 3
        >>> sizes = [1, 3] if rank == 0 else [2, 2]
        >>> counts = torch.empty(2, dtype=torch.int64)
        >>> dist.all_to_all_single(counts, torch.tensor(sizes))
        >>> gets = torch.empty(int(counts.sum()))
        >>> dist.all_to_all_single(gets, torch.full((4,), float(rank)), counts.tolist(), sizes)
        >>> gets
        tensor([0., 1., 1.])
    """
    if group is not None and outside(group, "all_to_all_single"):
        return None
    output, input = check_tensor("output", output), check_tensor("input", input)
    return resolve_group(group).all_to_all_single(output, input, output_split_sizes, input_split_sizes, async_op)


@overload
def barrier(
    group: Group = ...,
    async_op: Literal[False] = ...,
    device_ids: Sequence[int] | None = ...,
    timeout: timedelta | float | None = ...,
) -> None: ...
@overload
def barrier(
    group: Group = ...,
    async_op: Literal[True] = ...,
    device_ids: Sequence[int] | None = ...,
    timeout: timedelta | float | None = ...,
) -> Work: ...
@overload
def barrier(
    group: Group = ...,
    async_op: bool = ...,
    device_ids: Sequence[int] | None = ...,
    timeout: timedelta | float | None = ...,
) -> Work | None: ...
def barrier(
    group: ProcessGroup | None = None,
    async_op: bool = False,
    device_ids: Sequence[int] | None = None,
    timeout: timedelta | float | None = None,
) -> Work | None:
    """Return when every rank of the group has called this function.

    Args:
        group: The process group. None: the world.
        async_op: Return immediately, with a Work.
        device_ids: Accepted for compatibility with torch. Groups are not bound to a device.
        timeout: Timeout of this call, as a timedelta or in seconds. None: the group's timeout. Zero: it expires
            immediately.

    Returns:
        A Work if ``async_op`` is set. Otherwise None.

    Raises:
        MismatchError, PeerLostError, TimeoutError: See ``all_reduce``.

    Cost:
        one latency: each rank writes one cache line, which the other ranks read.

    Source:
        the alternative, dissemination (Hensgen, Finkel and Manber, "Two Algorithms for Barrier Synchronization",
        1988), needs log P latencies instead of one.

    Example:
        >>> dist.barrier(timeout=60)  # on each rank; after 60 s, the error names the missing ranks
    """
    if group is not None and outside(group, "barrier"):
        return None
    if timeout is None:
        return resolve_group(group).barrier(async_op)
    seconds = seconds_of(timeout)  # a wrong value must not start the call
    work = CallWithTimeout(resolve_group(group).barrier(True), seconds)
    if async_op:
        return work
    work.wait()
    return None


def monitored_barrier(
    group: ProcessGroup | None = None,
    timeout: timedelta | float | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """Run a barrier whose error names the missing ranks, as the errors of all calls here do.

    Args:
        group: The process group. None: the world.
        timeout: Timeout of this call, as a timedelta or in seconds. None: the group's timeout.
        wait_all_ranks: Rank 0's error also names all missing ranks in torch's words. allranks's own text always names
            all of them.

    Raises:
        MismatchError, PeerLostError, TimeoutError: See ``all_reduce``. The TimeoutError ends with torch's words.

    Cost:
        as ``barrier``.

    Example:
        >>> dist.monitored_barrier(timeout=60)  # on each rank
    """
    if not outside(group, "monitored_barrier"):
        resolve_group(group).monitored_barrier(timeout, wait_all_ranks)


def send(
    tensor: Tensor,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """Send ``tensor`` to rank ``dst``.

    Returns when the tensor may be changed again. For up to 256 KiB of unreceived messages (less in groups of more than
    four ranks) this is immediate: two ranks may both send first.

    Args:
        tensor: Any CPU tensor.
        dst: Another rank of the world.
        group: The process group. None: the world.
        tag: Must equal the receiver's tag. Messages with the same tag are received in the order in which they were
            sent.
        group_dst: Another rank of the group, instead of ``dst``.

    Raises:
        PeerLostError, TimeoutError, UsageError: See ``all_reduce``.

    Shape:
        any; the receiver's tensor has the same element count.

    Cost:
        n bytes copied into shared memory and n bytes out of it, in chunks that overlap.

    Example:
        >>> rank = dist.get_rank()  # of 2; rank 0 shows:
        >>> t = torch.tensor([rank + 1.0])
        >>> if rank == 1:
        ...     dist.send(t, dst=0)
        ... else:
        ...     source = dist.recv(t)  # from any
        ...     print(source, t)
        1 tensor([2.])
    """
    if group is not None and outside(group, "send"):
        return
    resolved = resolve_group(group)
    resolved.send(tensor, root_of("send", resolved, dst, group_dst, "dst"), tag)


def recv(
    tensor: Tensor,
    src: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """Receive a tensor into ``tensor``.

    Args:
        tensor: Output. Its dtype and element count must be those of the sent tensor.
        src: Sending rank in the world. None: the rank that sends first.
        group: The process group. None: the world.
        tag: Must equal the sender's tag.
        group_src: Sending rank in the group, instead of ``src``.

    Returns:
        The sending rank, as a rank of the world. -1 if this rank is not in the group.

    Raises:
        MismatchError: The message has another dtype or element count. It is discarded.
        PeerLostError, TimeoutError, UsageError: See ``all_reduce``.

    Shape:
        any, with the element count of the sent tensor.

    Cost:
        as ``send``.
    """
    if group is not None and outside(group, "recv"):
        return -1
    resolved = resolve_group(group)
    return resolved.ranks[resolved.recv(tensor, source_of("recv", resolved, src, group_src), tag)]


def isend(
    tensor: Tensor,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Work:
    """Run ``send``, but return immediately. Do not change the tensor before the Work is complete.

    Args:
        tensor: Any CPU tensor.
        dst: Another rank of the world.
        group: The process group. None: the world.
        tag: Must equal the receiver's tag.
        group_dst: Another rank of the group, instead of ``dst``.

    Returns:
        A Work. None if this rank is not in the group.

    Raises:
        PeerLostError, UsageError: See ``all_reduce``.

    Shape:
        as ``send``.

    Cost:
        as ``send``; the transfer runs concurrently with the program.
    """
    if group is not None and outside(group, "isend"):
        return None  # type: ignore[return-value]  # type checkers assume that this rank is in the group
    resolved = resolve_group(group)
    return resolved.isend(tensor, root_of("isend", resolved, dst, group_dst, "dst"), tag)


def irecv(
    tensor: Tensor,
    src: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Work:
    """Run ``recv``, but return immediately. Do not use the tensor before the Work is complete.

    Args:
        tensor: Output.
        src: Sending rank in the world. None: the rank that sends first (``Work.source_rank``).
        group: The process group. None: the world.
        tag: Must equal the sender's tag.
        group_src: Sending rank in the group, instead of ``src``.

    Returns:
        A Work. None if this rank is not in the group.

    Raises:
        PeerLostError, UsageError: See ``all_reduce``.

    Shape:
        as ``recv``.

    Cost:
        as ``send``; the transfer runs concurrently with the program.

    Example:
        >>> other = 1 - dist.get_rank()  # of 2; rank 0 shows:
        >>> gets = torch.empty(1)
        >>> works = [dist.irecv(gets, other), dist.isend(torch.tensor([10.0 + other]), other)]
        >>> for work in works:
        ...     _ = work.wait()
        >>> gets
        tensor([10.])
    """
    if group is not None and outside(group, "irecv"):
        return None  # type: ignore[return-value]  # type checkers assume that this rank is in the group
    resolved = resolve_group(group)
    return resolved.irecv(tensor, source_of("irecv", resolved, src, group_src), tag)


class P2POp:
    """One message for ``batch_isend_irecv``.

    Attributes:
        op: ``isend`` or ``irecv``.
        tensor: The tensor to send, or to overwrite.
        peer: The other rank, as a rank of the world.
        group: The process group. None: the world.
        tag: Must be equal on both sides.
        group_peer: The other rank, as a rank of the group.
    """

    def __init__(
        self,
        op: Callable[..., Any],
        tensor: Tensor,
        peer: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        if op not in (isend, irecv):
            raise UsageError(f"P2POp: op must be isend or irecv, not {op!r}")
        resolved = resolve_group(group)
        self.op = op
        self.tensor = tensor
        self.group = resolved
        self.group_peer = root_of("P2POp", resolved, peer, group_peer, "peer")
        self.peer = resolved.ranks[self.group_peer]
        self.tag = tag

    def __repr__(self) -> str:
        return f"P2POp({self.op.__name__}, peer={self.peer}, {tuple(self.tensor.shape)}, tag={self.tag})"


def batch_isend_irecv(p2p_op_list: list[P2POp]) -> list[Work]:
    """Start several messages together, in any order on any rank.

    Args:
        p2p_op_list: The messages, all of one group.

    Returns:
        Their Works, in order.

    Raises:
        UsageError: The argument is not a list of P2POp, or the groups differ.

    Shape:
        as ``send`` and ``recv``, for each message.

    Cost:
        the cost of its messages.

    Example:
        >>> other = 1 - dist.get_rank()  # of 2; rank 0 shows:
        >>> gives, gets = torch.tensor([10.0 + other]), torch.empty(1)
        >>> ops = [dist.P2POp(dist.isend, gives, other), dist.P2POp(dist.irecv, gets, other)]
        >>> for work in dist.batch_isend_irecv(ops):
        ...     _ = work.wait()
        >>> gets
        tensor([10.])
    """
    if not isinstance(p2p_op_list, list):
        raise UsageError(f"batch_isend_irecv: expected a list of P2POp, not {type(p2p_op_list).__name__}")
    for place, op in enumerate(p2p_op_list):
        if not isinstance(op, P2POp):
            raise UsageError(f"batch_isend_irecv: expected a list of P2POp, but element {place} is {type(op).__name__}")
    if len({id(op.group) for op in p2p_op_list}) > 1:
        names = ", ".join(f"'{name}'" for name in dict.fromkeys(op.group.name for op in p2p_op_list))
        raise UsageError(
            f"batch_isend_irecv: all messages must use one group, but they use {names}.\n"
            "  Make one call for each group."
        )
    return [
        op.group.isend(op.tensor, op.group_peer, op.tag)
        if op.op is isend
        else op.group.irecv(op.tensor, op.group_peer, op.tag)
        for op in p2p_op_list
    ]


@overload
def all_reduce_coalesced(
    tensors: Sequence[Tensor], op: Op = ..., group: Group = ..., async_op: Literal[False] = ...
) -> None: ...
@overload
def all_reduce_coalesced(
    tensors: Sequence[Tensor], op: Op = ..., group: Group = ..., async_op: Literal[True] = ...
) -> Work: ...
@overload
def all_reduce_coalesced(
    tensors: Sequence[Tensor], op: Op = ..., group: Group = ..., async_op: bool = ...
) -> Work | None: ...
def all_reduce_coalesced(
    tensors: Sequence[Tensor], op: Op = ReduceOp.SUM, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Run ``all_reduce`` on several tensors, in place.

    Args:
        tensors: Tensors to reduce. Their sizes must be the same on all ranks.
        op: See ``all_reduce``.
        group: The process group. None: the world.
        async_op: Return immediately, with a Work for all of them.

    Returns:
        A Work if ``async_op`` is set. Otherwise None.

    Raises:
        MismatchError, PeerLostError, TimeoutError, UsageError: See ``all_reduce``.

    Shape:
        as ``all_reduce``, for each tensor.

    Cost:
        an ``all_reduce`` of each tensor.
    """
    if group is not None and outside(group, "all_reduce_coalesced"):
        return None
    resolved = resolve_group(group)
    check_apart("all_reduce_coalesced", list_of("all_reduce_coalesced", tensors, "tensors"))
    return _together([resolved.all_reduce(t, op, True) for t in tensors], async_op)


@overload
def all_gather_coalesced(
    output_tensor_lists: Sequence[Sequence[Tensor]],
    input_tensor_list: Sequence[Tensor],
    group: Group = ...,
    async_op: Literal[False] = ...,
) -> None: ...
@overload
def all_gather_coalesced(
    output_tensor_lists: Sequence[Sequence[Tensor]],
    input_tensor_list: Sequence[Tensor],
    group: Group = ...,
    async_op: Literal[True] = ...,
) -> Work: ...
@overload
def all_gather_coalesced(
    output_tensor_lists: Sequence[Sequence[Tensor]],
    input_tensor_list: Sequence[Tensor],
    group: Group = ...,
    async_op: bool = ...,
) -> Work | None: ...
def all_gather_coalesced(
    output_tensor_lists: Sequence[Sequence[Tensor]],
    input_tensor_list: Sequence[Tensor],
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Run ``all_gather`` on several tensors.

    Args:
        output_tensor_lists: For each rank, receives the tensors of its input list.
        input_tensor_list: Inputs of this rank.
        group: The process group. None: the world.
        async_op: Return immediately, with a Work for all of them.

    Returns:
        A Work if ``async_op`` is set. Otherwise None.

    Raises:
        MismatchError, PeerLostError, TimeoutError, UsageError: See ``all_reduce``.

    Shape:
        as ``all_gather``, for each tensor of the input list.

    Cost:
        an ``all_gather`` of each tensor.
    """
    if group is not None and outside(group, "all_gather_coalesced"):
        return None
    resolved = resolve_group(group)
    inputs = list_of("all_gather_coalesced", input_tensor_list, "input_tensor_list")
    for rank, outputs in enumerate(output_tensor_lists):
        if len(outputs) != len(inputs):
            raise UsageError(
                f"all_gather_coalesced: expected {len(inputs)} tensors in output_tensor_lists[{rank}], as in"
                f" input_tensor_list, not {len(outputs)}"
            )
    check_apart("all_gather_coalesced", [output for outputs in output_tensor_lists for output in outputs])
    works = [resolved.all_gather([row[i] for row in output_tensor_lists], t, True) for i, t in enumerate(inputs)]
    return _together(works, async_op)


def _together(works: Sequence[Work | None], async_op: bool) -> Work | None:
    together = Together([work for work in works if work is not None])
    if async_op:
        return together
    together.wait()
    return None


def outside(group: ProcessGroup | int | None, verb: str) -> bool:
    """Return whether this rank is not a member of the group. If so, warn, like torch."""
    if type(group) is not type(GroupMember.NON_GROUP_MEMBER) or group != GroupMember.NON_GROUP_MEMBER:
        return False
    callsite.warn(
        f"{verb}: this rank is not in the given process group; the call has no effect.\n"
        "  Call it only on members of the group."
    )
    return True


def root_of(
    verb: str,
    group: ProcessGroup,
    world_rank: int | None,
    group_rank: int | None,
    what: str,
    default: int | None = None,
) -> int:
    """Return the rank in the group that a rank of the world or of the group denotes.

    Raises:
        UsageError: Both are given, or neither, or the rank is not a member.
    """
    # The usual case: no lookup. An invalid rank is reported by the group.
    if group_rank is None and world_rank is not None and group.in_world_order:
        return world_rank
    if group_rank is not None:
        if world_rank is not None:
            raise UsageError(f"{verb}: pass either {what} or group_{what}, not both")
        return group_rank
    if world_rank is None:
        if default is None:
            raise UsageError(f"{verb}: {what} or group_{what} must be passed")
        world_rank = default
    if group is not resolve_group(None):
        number = integer_of(world_rank)
        if number is None:
            raise TypeError(f"{verb}: {what} must be a rank, not {type(world_rank).__name__}")
        if number not in group.ranks:
            raise UsageError(
                f"{verb}: {what}={number}, a rank of the world, is not in group '{group.name}':"
                f" expected one of {rank_list(group.ranks)}"
            )
        return group.ranks.index(number)
    return world_rank


def source_of(verb: str, group: ProcessGroup, src: int | None, group_src: int | None) -> int | None:
    """Return the sending rank in the group, or None for any rank."""
    return None if src is None and group_src is None else root_of(verb, group, src, group_src, "src")


def list_of(verb: str, tensors: Sequence[Tensor], what: str) -> Sequence[Tensor]:
    """Return the argument if it is a list.

    Raises:
        TypeError: It is not a list.
    """
    if not isinstance(tensors, (list, tuple)):
        raise TypeError(f"{verb}: {what}: expected a list of tensors, not {type(tensors).__name__}")
    return tensors


publish(globals())
