"""The collectives and messages as functions, with torch.distributed's names, arguments and in-place meaning.

Each resolves its group, translates the world's ranks to the group's, and leaves the rest to the group.

Collectives are called by every rank of the group, in the same order. A call is also a synchronisation: no rank leaves
it before every rank has entered it. Ranks that call different things (verb, element count, dtype, reduce op, root)
get a MismatchError, on every rank, with no tensor touched.

All raise: MismatchError as above; PeerLostError when a rank died or left; TimeoutError when one did not call within
the group's timeout; UsageError for tensors and arguments that cannot be; NotInitializedError without a group. On a
rank that is not in the group they warn and do nothing, as torch's do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

from torch import Tensor

from allranks._api.world import GroupMember, resolve_group
from allranks._base.errors import UsageError
from allranks._base.integers import integer_of
from allranks._base.public import publish
from allranks._base.timeouts import seconds_of
from allranks._call import callsite
from allranks._call.types import ReduceOp
from allranks._call.work import Together, Work
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
    "irecv",
    "isend",
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
    """Reduces ``tensor`` over all ranks, in place; every rank ends with the same bits.

    Args:
        tensor: a CPU tensor of integers, floating point, bool or complex numbers.
        op: SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR; see ReduceOp for what takes which.
        group: None is the world.
        async_op: return at once, with a Work.

    Returns:
        A Work if ``async_op``, else None.

    Raises:
        MismatchError: the ranks' calls differ.
        PeerLostError: a rank died or left.
        TimeoutError: a rank did not call within the group's timeout; names it.
        UsageError: a tensor or an op that cannot be reduced.

    Shape:
        any, the same element count on all ranks. A non-contiguous tensor is copied and copied back. A sparse COO
        tensor (SUM only) may have other elements on each rank; it ends coalesced.

    Cost:
        P ranks, n bytes. Up to 64 KiB: one latency, P n bytes read per rank. Above: reduce-scatter
        and all-gather, pipelined through shared memory; about 4 n bytes moved per rank.

    Source:
        Rabenseifner, "Optimization of Collective Reduction Operations", 2004, on shared memory. The
        order of summation is rank 0, 1, ..., P-1 for every element, on every rank.

    Example:
        >>> import torch, allranks as dist
        >>> dist.init_process_group()  # one process: the world is this one
        >>> t = torch.tensor([1.0, -1.0])
        >>> dist.all_reduce(t)
        >>> t
        tensor([ 1., -1.])
        >>> dist.destroy_process_group()
    """
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
    """Reduces ``tensor`` over all ranks; rank ``dst`` gets the result, in place. The others' tensors stay.

    Args:
        tensor: as ``all_reduce``'s.
        dst: who gets the result, as a rank of the world.
        op: as ``all_reduce``'s.
        group: None is the world.
        async_op: return at once, with a Work.
        group_dst: who gets the result, as a rank of the group, in place of ``dst``.

    Returns:
        A Work if ``async_op``, else None.

    Raises:
        MismatchError, PeerLostError, TimeoutError, UsageError: as ``all_reduce``.

    Shape:
        any, the same element count on all ranks.

    Cost:
        as ``all_reduce``; the work of reducing is shared by all ranks above 64 KiB.

    Source:
        as ``all_reduce``; only ``dst`` gets the shards.

    Example:
        >>> t = torch.tensor([dist.get_rank() + 1.0])  # on each of 2 ranks; rank 0 shows:
        >>> dist.reduce(t, dst=0)
        >>> t
        tensor([3.])
    """
    if group is not None and outside(group, "reduce"):
        return None
    resolved = resolve_group(group)
    return resolved.reduce(tensor, root_of(resolved, dst, group_dst, "dst"), op, async_op)


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
    """Copies ``tensor`` of rank ``src`` into the ``tensor`` of every rank.

    Args:
        tensor: the data on ``src``; overwritten elsewhere. Any dtype.
        src: who has the data, as a rank of the world.
        group: None is the world.
        async_op: return at once, with a Work.
        group_src: who has the data, as a rank of the group, in place of ``src``.

    Returns:
        A Work if ``async_op``, else None.

    Raises:
        MismatchError, PeerLostError, TimeoutError, UsageError: as ``all_reduce``.

    Shape:
        any, the same element count on all ranks.

    Cost:
        n bytes written once and read once by each other rank, one latency.

    Source:
        a ring in shared memory, written by ``src`` while the others read.

    Example:
        >>> t = torch.tensor([dist.get_rank() + 1.0])  # on each of 2 ranks; rank 0 shows:
        >>> dist.broadcast(t, src=1)
        >>> t
        tensor([2.])
    """
    if group is not None and outside(group, "broadcast"):
        return None
    resolved = resolve_group(group)
    return resolved.broadcast(tensor, root_of(resolved, src, group_src, "src"), async_op)


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
    """Gathers every rank's ``tensor`` on every rank.

    Args:
        tensor_list: written: one tensor per rank, in the order of the ranks.
        tensor: what this rank gives.
        group: None is the world.
        async_op: return at once, with a Work.

    Returns:
        A Work if ``async_op``, else None.

    Raises:
        MismatchError, PeerLostError, TimeoutError, UsageError: as ``all_reduce``.

    Shape:
        every tensor has as many elements as ``tensor``, on all ranks. On the native engine they may differ: tensor i
        has as many as rank i gives; such a call is an ``all_to_all``.

    Cost:
        n bytes written and (P-1) n read per rank, one latency (large: one per 128 KiB).

    Source:
        each rank writes into its ring in shared memory, and the others read. Between more than 8 hosts a ring of
        hosts, as in Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
        MPICH", 2005.

    Example:
        >>> parts = [torch.empty(1), torch.empty(1)]  # on each of 2 ranks; rank 0 shows:
        >>> dist.all_gather(parts, torch.tensor([dist.get_rank() + 1.0]))
        >>> parts
        [tensor([1.]), tensor([2.])]
    """
    if group is not None and outside(group, "all_gather"):
        return None
    return resolve_group(group).all_gather(_list(tensor_list, "tensor_list"), tensor, async_op)


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
    """Gathers every rank's ``input_tensor`` in one tensor on every rank.

    Args:
        output_tensor: written: P times the elements of ``input_tensor``, concatenated or stacked.
        input_tensor: what this rank gives; may be its own place in ``output_tensor``.
        group: None is the world.
        async_op: return at once, with a Work.

    Returns:
        A Work if ``async_op``, else None.

    Raises:
        MismatchError, PeerLostError, TimeoutError, UsageError: as ``all_reduce``.

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
    """``all_gather_single`` by its name in torch before 2.13.

    Args:
        output_tensor: see there.
        input_tensor: see there.
        group: None is the world.
        async_op: return at once, with a Work.

    Raises:
        MismatchError, PeerLostError, TimeoutError, UsageError: as ``all_reduce``.

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
    """Gathers every rank's ``tensor`` on rank ``dst``.

    Args:
        tensor: what this rank gives.
        gather_list: on ``dst`` only: written, one tensor per rank.
        dst: who gets them, as a rank of the world; 0 if neither it nor ``group_dst`` is given.
        group: None is the world.
        async_op: return at once, with a Work.
        group_dst: who gets them, as a rank of the group, in place of ``dst``.

    Returns:
        A Work if ``async_op``, else None.

    Raises:
        MismatchError, PeerLostError, TimeoutError, UsageError: as ``all_reduce``.

    Shape:
        ``tensor`` and each of ``gather_list`` have as many elements, the same on all ranks.

    Cost:
        n bytes written per rank, (P-1) n read by ``dst``, one latency (large: one per 128 KiB).

    Source:
        as ``all_gather``; between more than 8 hosts a binomial tree of hosts (Thakur, Rabenseifner and Gropp, 2005).

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
    outputs = _list(gather_list, "gather_list") if gather_list else None
    return resolved.gather(tensor, outputs, root_of(resolved, dst, group_dst, "dst", default=0), async_op)


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
    """Gives each rank its tensor of rank ``src``'s list.

    Args:
        tensor: written: what this rank gets.
        scatter_list: on ``src`` only: one tensor per rank.
        src: who has the list, as a rank of the world; 0 if neither it nor ``group_src`` is given.
        group: None is the world.
        async_op: return at once, with a Work.
        group_src: who has the list, as a rank of the group, in place of ``src``.

    Returns:
        A Work if ``async_op``, else None.

    Raises:
        MismatchError, PeerLostError, TimeoutError, UsageError: as ``all_reduce``.

    Shape:
        ``tensor`` and each of ``scatter_list`` have as many elements, the same on all ranks.

    Cost:
        (P-1) n bytes written by ``src``, n read by each other rank, one latency (large: one per 128 KiB).

    Source:
        pieces of the ring of ``src`` are cut into a cell for each rank. Between more than 8 hosts as ``gather``.

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
    inputs = _list(scatter_list, "scatter_list") if scatter_list else None
    return resolved.scatter(tensor, inputs, root_of(resolved, src, group_src, "src", default=0), async_op)


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
    """Reduces every rank's lists, and gives each rank its part of the result.

    Args:
        output: written: the reduction of all ranks' tensors for this rank.
        input_list: one tensor per rank.
        op: as ``all_reduce``'s.
        group: None is the world.
        async_op: return at once, with a Work.

    Returns:
        A Work if ``async_op``, else None.

    Raises:
        MismatchError, PeerLostError, TimeoutError, UsageError: as ``all_reduce``.

    Shape:
        ``output`` and each of ``input_list`` have as many elements, the same on all ranks.

    Cost:
        (P-1) n bytes written and P n read per rank, one latency (large: one per 128 KiB).

    Source:
        pairwise: each rank writes what the others reduce into cells of its ring. Between more than 8 hosts along a
        chain, in the order of the ranks.

    Example:
        >>> mine = torch.empty(1)  # on each of 2 ranks; rank 0 shows:
        >>> dist.reduce_scatter(mine, [torch.tensor([1.0]), torch.tensor([10.0])])
        >>> mine
        tensor([2.])
    """
    if group is not None and outside(group, "reduce_scatter"):
        return None
    return resolve_group(group).reduce_scatter(output, _list(input_list, "input_list"), op, async_op)


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
    """Reduces every rank's ``input``, and gives each rank its part of the result.

    Args:
        output: written: this rank's part.
        input: P times the elements of ``output``: the part for rank 0, then for rank 1, ...
        op: as ``all_reduce``'s.
        group: None is the world.
        async_op: return at once, with a Work.

    Returns:
        A Work if ``async_op``, else None.

    Raises:
        MismatchError, PeerLostError, TimeoutError, UsageError: as ``all_reduce``.

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
    """``reduce_scatter_single`` by its name in torch before 2.13.

    Args:
        output: see there.
        input: see there.
        op: as ``all_reduce``'s.
        group: None is the world.
        async_op: return at once, with a Work.

    Raises:
        MismatchError, PeerLostError, TimeoutError, UsageError: as ``all_reduce``.

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
    """Gives tensor q of every rank's list to rank q.

    Args:
        output_tensor_list: written: one tensor per rank, from that rank.
        input_tensor_list: one tensor per rank, for that rank. Sizes may all differ.
        group: None is the world.
        async_op: return at once, with a Work.

    Returns:
        A Work if ``async_op``, else None.

    Raises:
        MismatchError: two ranks disagree on the size of what goes from one to the other; on every rank.
        PeerLostError, TimeoutError, UsageError: as ``all_reduce``.

    Shape:
        tensor q of rank p's inputs has as many elements as tensor p of rank q's outputs.

    Cost:
        what a rank sends is written once, what it gets read once; one latency (large: one per 128 KiB).

    Source:
        pairwise exchange (Thakur, Rabenseifner and Gropp, 2005) through cells of a ring in shared memory, or a TCP
        connection of each two ranks.

    Example:
        >>> rank = dist.get_rank()  # on each of 2 ranks; rank 0 shows:
        >>> gets = [torch.empty(1), torch.empty(1)]
        >>> dist.all_to_all(gets, [torch.tensor([10.0 * rank]), torch.tensor([10.0 * rank + 1])])
        >>> gets
        [tensor([0.]), tensor([10.])]
    """
    if group is not None and outside(group, "all_to_all"):
        return None
    outputs, inputs = _list(output_tensor_list, "output_tensor_list"), _list(input_tensor_list, "input_tensor_list")
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
    """Cuts ``input`` along its first dimension and gives piece q to rank q; ``output`` is made of what comes.

    Args:
        output: written: the pieces from rank 0, rank 1, ... one after the other.
        input: the pieces for rank 0, rank 1, ...
        output_split_sizes: rows from each rank; None: equal.
        input_split_sizes: rows for each rank; None: equal.
        group: None is the world.
        async_op: return at once, with a Work.

    Returns:
        A Work if ``async_op``, else None.

    Raises:
        MismatchError, PeerLostError, TimeoutError, UsageError: as ``all_to_all``.

    Shape:
        the first dimensions are cut, evenly or by the sizes; what rank p sends to rank q has as many elements as
        what q expects from p.

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
    """Returns when every rank of the group has called it.

    Args:
        group: None is the world.
        async_op: return at once, with a Work.
        device_ids: for torch's signature; groups are bound to no device.
        timeout: of this call, a timedelta or seconds; None: the group's.

    Returns:
        A Work if ``async_op``, else None.

    Raises:
        MismatchError, PeerLostError, TimeoutError: as ``all_reduce``.

    Cost:
        one latency: each rank writes one cache line, which the others read.

    Source:
        each rank writes one line, which all read. Dissemination (Hensgen, Finkel and Manber, "Two Algorithms for
        Barrier Synchronization", 1988) takes log P latencies where this takes one.

    Example:
        >>> dist.barrier(timeout=60)  # on each rank; a rank that does not come is named
    """
    if group is not None and outside(group, "barrier"):
        return None
    if timeout is None or async_op:
        return resolve_group(group).barrier(async_op)
    seconds = seconds_of(timeout)  # wrong, it must not begin the call
    work = resolve_group(group).barrier(True)
    assert work is not None
    work.wait(seconds)
    return None


def monitored_barrier(
    group: ProcessGroup | None = None,
    timeout: timedelta | float | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """A barrier that names the ranks that did not come. (So does every other call here.)

    Args:
        group: None is the world.
        timeout: of this call, a timedelta or seconds; None: the group's.
        wait_all_ranks: rank 0's error names all missing ranks in torch's words too. In ours all are always named.

    Raises:
        MismatchError, PeerLostError, TimeoutError: as ``all_reduce``. The TimeoutError ends with torch's words.

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
    """Sends ``tensor`` to rank ``dst``.

    Returns when the tensor may be changed again, which for up to 256 KiB of unreceived messages (less in groups of
    more than four) is at once: two ranks may both send first.

    Args:
        tensor: any CPU tensor.
        dst: another rank, of the world.
        group: None is the world.
        tag: must equal the receiver's. Messages of one tag are received in the order sent.
        group_dst: another rank, of the group, in place of ``dst``.

    Raises:
        PeerLostError, TimeoutError, UsageError: as ``all_reduce``.

    Shape:
        any; the receiver's tensor has as many elements.

    Cost:
        n bytes copied into shared memory and n bytes out of it, in pieces that overlap.

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
    resolved.send(tensor, root_of(resolved, dst, group_dst, "dst"), tag)


def recv(
    tensor: Tensor,
    src: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """Receives a tensor into ``tensor``.

    Args:
        tensor: overwritten; dtype and element count must be those that were sent.
        src: the sending rank, of the world; None: whoever sends first.
        group: None is the world.
        tag: must equal the sender's.
        group_src: the sending rank, of the group, in place of ``src``.

    Returns:
        The rank of the world that sent; -1 if this rank is not in the group.

    Raises:
        MismatchError: the message has another dtype or element count. It is dropped.
        PeerLostError, TimeoutError, UsageError: as ``all_reduce``.

    Shape:
        any, with as many elements as were sent.

    Cost:
        as ``send``.
    """
    if group is not None and outside(group, "recv"):
        return -1
    resolved = resolve_group(group)
    return resolved.ranks[resolved.recv(tensor, source_of(resolved, src, group_src), tag)]


def isend(
    tensor: Tensor,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Work:
    """``send`` that returns at once. The tensor must not be changed before the Work is complete.

    Args:
        tensor: any CPU tensor.
        dst: another rank, of the world.
        group: None is the world.
        tag: must equal the receiver's.
        group_dst: another rank, of the group, in place of ``dst``.

    Returns:
        A Work (None if this rank is not in the group).

    Raises:
        PeerLostError, UsageError: as ``all_reduce``.

    Shape:
        as ``send``.

    Cost:
        as ``send``, moved beside what the program does.
    """
    if group is not None and outside(group, "isend"):
        return None  # type: ignore[return-value]  # to checkers each group is one that this rank is in
    resolved = resolve_group(group)
    return resolved.isend(tensor, root_of(resolved, dst, group_dst, "dst"), tag)


def irecv(
    tensor: Tensor,
    src: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Work:
    """``recv`` that returns at once. The tensor must not be used before the Work is complete.

    Args:
        tensor: overwritten.
        src: the sending rank, of the world; None: whoever sends first (``Work.source_rank`` is which).
        group: None is the world.
        tag: must equal the sender's.
        group_src: the sending rank, of the group, in place of ``src``.

    Returns:
        A Work (None if this rank is not in the group).

    Raises:
        PeerLostError, UsageError: as ``all_reduce``.

    Shape:
        as ``recv``.

    Cost:
        as ``send``, moved beside what the program does.

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
        return None  # type: ignore[return-value]  # to checkers each group is one that this rank is in
    resolved = resolve_group(group)
    return resolved.irecv(tensor, source_of(resolved, src, group_src), tag)


class P2POp:
    """One message for ``batch_isend_irecv``.

    Attributes:
        op: ``isend`` or ``irecv``.
        tensor: what is sent or overwritten.
        peer: the other rank, of the world.
        group: None is the world.
        tag: must be equal on both sides.
        group_peer: the other rank, of the group.
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
        self.group_peer = root_of(resolved, peer, group_peer, "peer")
        self.peer = resolved.ranks[self.group_peer]
        self.tag = tag

    def __repr__(self) -> str:
        return f"P2POp({self.op.__name__}, peer={self.peer}, {tuple(self.tensor.shape)}, tag={self.tag})"


def batch_isend_irecv(p2p_op_list: list[P2POp]) -> list[Work]:
    """Starts messages together, in any order on any rank.

    Args:
        p2p_op_list: the messages, all of one group.

    Returns:
        Their Works, in order.

    Raises:
        UsageError: not a list of P2POp, or of different groups.

    Shape:
        as ``send`` and ``recv``, for each message.

    Cost:
        that of its messages.

    Example:
        >>> other = 1 - dist.get_rank()  # of 2; rank 0 shows:
        >>> gives, gets = torch.tensor([10.0 + other]), torch.empty(1)
        >>> ops = [dist.P2POp(dist.isend, gives, other), dist.P2POp(dist.irecv, gets, other)]
        >>> for work in dist.batch_isend_irecv(ops):
        ...     _ = work.wait()
        >>> gets
        tensor([10.])
    """
    if not isinstance(p2p_op_list, list) or not all(isinstance(op, P2POp) for op in p2p_op_list):
        raise UsageError("batch_isend_irecv: expected a list of P2POp")
    if len({id(op.group) for op in p2p_op_list}) > 1:
        raise UsageError("batch_isend_irecv: all messages must use one group")
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
    """``all_reduce`` of several tensors, in place.

    Args:
        tensors: what to reduce; the same sizes on all ranks.
        op: as ``all_reduce``'s.
        group: None is the world.
        async_op: return at once, with a Work for all of them.

    Returns:
        A Work if ``async_op``, else None.

    Raises:
        MismatchError, PeerLostError, TimeoutError, UsageError: as ``all_reduce``.

    Shape:
        as ``all_reduce``, for each tensor.

    Cost:
        an ``all_reduce`` of each tensor.
    """
    if group is not None and outside(group, "all_reduce_coalesced"):
        return None
    resolved = resolve_group(group)
    check_apart("all_reduce_coalesced", _list(tensors, "tensors"))
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
    """``all_gather`` of several tensors.

    Args:
        output_tensor_lists: written: for each rank the tensors that it gives.
        input_tensor_list: what this rank gives.
        group: None is the world.
        async_op: return at once, with a Work for all of them.

    Returns:
        A Work if ``async_op``, else None.

    Raises:
        MismatchError, PeerLostError, TimeoutError, UsageError: as ``all_reduce``.

    Shape:
        as ``all_gather``, for each tensor of the input list.

    Cost:
        an ``all_gather`` of each tensor.
    """
    if group is not None and outside(group, "all_gather_coalesced"):
        return None
    resolved = resolve_group(group)
    inputs = _list(input_tensor_list, "input_tensor_list")
    for rank, outputs in enumerate(output_tensor_lists):
        if len(outputs) != len(inputs):
            raise UsageError(
                f"all_gather_coalesced: expected {len(inputs)} tensors from rank {rank}, not {len(outputs)}"
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
    """Whether this rank is not a member of the group; then it warns, as torch does."""
    if type(group) is not type(GroupMember.NON_GROUP_MEMBER) or group != GroupMember.NON_GROUP_MEMBER:
        return False
    callsite.warn(f"{verb}: this rank is not in the given process group; nothing is done")
    return True


def root_of(
    group: ProcessGroup, world_rank: int | None, group_rank: int | None, what: str, default: int | None = None
) -> int:
    """The rank in the group that is meant by a rank of the world or of the group.

    Raises:
        UsageError: both are given, or neither, or it is not a member.
    """
    if group_rank is None and world_rank is not None and group.in_world_order:
        return world_rank
    if group_rank is not None:
        if world_rank is not None:
            raise UsageError(f"give either {what} or group_{what}, not both")
        return group_rank
    if world_rank is None:
        if default is None:
            raise UsageError(f"{what} or group_{what} must be given")
        world_rank = default
    if group is not resolve_group(None):
        number = integer_of(world_rank)
        if number is None:
            raise TypeError(f"{what} must be a rank, not {type(world_rank).__name__}")
        if number not in group.ranks:
            raise UsageError(f"{what}={number}, a rank of the world, is not in group '{group.name}'")
        return group.ranks.index(number)
    return world_rank


def source_of(group: ProcessGroup, src: int | None, group_src: int | None) -> int | None:
    """The sending rank in the group; None: any."""
    return None if src is None and group_src is None else root_of(group, src, group_src, "src")


def _list(tensors: Sequence[Tensor], what: str) -> Sequence[Tensor]:
    if not isinstance(tensors, (list, tuple)):
        raise TypeError(f"{what}: expected a list of tensors, not {type(tensors).__name__}")
    return tensors


publish(globals())
