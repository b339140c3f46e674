"""What the ranks' models have in common: the same parameters and buffers, and one rank's values."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from allranks import _objects
from allranks._errors import MismatchError, rank_list
from allranks._group import ProcessGroup
from allranks.parallel.buckets import ALONE_BYTES

__all__ = ["broadcast_values", "require_same_model"]


def broadcast_values(tensors: list[Tensor], group: ProcessGroup, source: int = 0) -> None:
    """Gives every rank the values of the group's rank ``source``: large tensors in place, small ones together.

    Cost: one broadcast for each large tensor, one for all small ones of a dtype, which are copied in and out.
    """
    small: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    with torch.no_grad():
        for tensor in tensors:
            if tensor.nbytes >= ALONE_BYTES and tensor.is_contiguous():
                _broadcast_bytes(tensor.detach(), group, source)
                # As copy_ does below: a graph that still needs the old values must notice.
                torch.autograd.graph.increment_version(tensor)
            else:
                small.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for same in small.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in same])
            if not flat.numel():
                continue
            _broadcast_bytes(flat, group, source)
            parts = torch.split(flat, [tensor.numel() for tensor in same])
            torch._foreach_copy_(same, [part.view(t.shape) for part, t in zip(parts, same, strict=True)])


def _broadcast_bytes(tensor: Tensor, group: ProcessGroup, source: int) -> None:
    # As bytes: a broadcast does not compute, so any dtype can travel.
    group.broadcast(tensor.view(-1).view(torch.uint8), source)


def require_same_model(
    parameters: list[tuple[str, nn.Parameter]], buffers: list[tuple[str, Tensor]], group: ProcessGroup
) -> None:
    """Raises on every rank if the model of any rank differs from rank 0's in more than values.

    Raises:
        MismatchError: Names every rank that differs, and the first parameter in which it does.

    Cost: 32 bytes of each rank where all is well.
    """
    lines = [f"parameter {_describe(n, p)}" for n, p in parameters] + [f"buffer {_describe(n, b)}" for n, b in buffers]
    digest = torch.frombuffer(bytearray(hashlib.sha256("\n".join(lines).encode()).digest()), dtype=torch.int64)
    digests = digest.new_empty(group.size(), digest.numel())
    group.all_gather(digests, digest)
    if bool((digests == digests[0]).all()):
        return
    models: list[list[str]] = [[] for _ in range(group.size())]
    _objects.all_gather_object(models, lines, group)
    reference = models[0]
    differences: dict[str, list[int]] = {}
    for rank, model in zip(group.ranks, models, strict=True):
        if model != reference:
            differences.setdefault(_first_difference(model, reference), []).append(rank)
    source = group.ranks[0]
    raise MismatchError(
        f"DistributedDataParallel: the models of the ranks differ in more than values. Compared with rank {source}'s "
        f"({len(reference)} parameters and buffers): "
        + "; ".join(f"{rank_list(ranks)}: {difference}" for difference, ranks in differences.items())
    )


def _first_difference(model: list[str], reference: list[str]) -> str:
    position = next(i for i in range(len(model) + 1) if model[i : i + 1] != reference[i : i + 1])
    here, there = (("".join(side[position : position + 1]) or "nothing more") for side in (model, reference))
    return f"{len(model)} of them, first difference at number {position}: {here} (there {there})"


def _describe(name: str, tensor: Tensor) -> str:
    trained = ", trained" if tensor.requires_grad else ""
    return f"{name}: {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}{trained}"
