"""The collectives as functions, with torch.distributed's names, arguments and in-place meaning.

Each resolves its group and leaves the rest to it.

All of them are called by every rank of the group, in the same order. A call is also a
synchronisation: no rank leaves it before every rank has entered it. Ranks that call different
things (verb, element count, dtype, reduce op, root) get a MismatchError, on every rank, with no
tensor touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from allranks._types import ReduceOp
from allranks._world import resolve_group

if TYPE_CHECKING:
    import torch

    from allranks._group import ProcessGroup
    from allranks._work import Work

__all__ = ["all_reduce", "barrier", "broadcast", "recv", "send"]


def all_reduce(
    tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Reduces ``tensor`` over all ranks, in place; every rank ends with the same bits.

    Args:
        tensor: a CPU tensor of float16, bfloat16, float32, float64, int8 to int64, uint8 or bool.
        op: SUM, AVG, PROD, MIN or MAX.
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
        any, the same element count on all ranks. A non-contiguous tensor is copied and copied back.

    Cost:
        P ranks, n bytes. Up to 128 KiB: one latency, P n bytes read per rank. Above: reduce-scatter
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
    return resolve_group(group).all_reduce(tensor, op, async_op)


def broadcast(tensor: torch.Tensor, src: int, group: ProcessGroup | None = None, async_op: bool = False) -> Work | None:
    """Copies ``tensor`` of rank ``src`` into the ``tensor`` of every rank.

    Args:
        tensor: the data on ``src``; overwritten elsewhere. Any dtype of torch's CPU tensors.
        src: the rank that has the data.
        group: None is the world.
        async_op: return at once, with a Work.

    Returns:
        A Work if ``async_op``, else None.

    Raises:
        MismatchError, PeerLostError, TimeoutError, UsageError: as ``all_reduce``.

    Shape:
        any, the same element count on all ranks.

    Cost:
        n bytes written once and read once by each other rank, one latency.

    Source:
        a ring of chunks in shared memory, written by ``src`` while the others read.
    """
    return resolve_group(group).broadcast(tensor, src, async_op)


def barrier(group: ProcessGroup | None = None, async_op: bool = False) -> Work | None:
    """Returns when every rank of the group has called it.

    Args:
        group: None is the world.
        async_op: return at once, with a Work.

    Returns:
        A Work if ``async_op``, else None.

    Raises:
        MismatchError, PeerLostError, TimeoutError: as ``all_reduce``.

    Cost:
        one latency: each rank writes one cache line, which the others read.
    """
    return resolve_group(group).barrier(async_op)


def send(tensor: torch.Tensor, dst: int, group: ProcessGroup | None = None, tag: int = 0) -> None:
    """Sends ``tensor`` to rank ``dst``.

    Returns when the tensor may be changed again, which for up to 256 KiB of unreceived messages is
    at once: two ranks may both send first.

    Args:
        tensor: any CPU tensor.
        dst: another rank of the group.
        group: None is the world.
        tag: must equal the receiver's. Messages of one tag are received in the order sent.

    Raises:
        PeerLostError, TimeoutError, UsageError: as ``all_reduce``.

    Cost:
        n bytes copied into shared memory and n bytes out of it, in pieces that overlap.
    """
    resolve_group(group).send(tensor, dst, tag)


def recv(tensor: torch.Tensor, src: int | None = None, group: ProcessGroup | None = None, tag: int = 0) -> int:
    """Receives a tensor into ``tensor``.

    Args:
        tensor: overwritten; dtype and element count must be those that were sent.
        src: the sending rank; None: whoever sends first.
        group: None is the world.
        tag: must equal the sender's.

    Returns:
        The rank that sent.

    Raises:
        MismatchError: the message has another dtype or element count. It is dropped.
        PeerLostError, TimeoutError, UsageError: as ``all_reduce``.
    """
    return resolve_group(group).recv(tensor, src, tag)
