"""Properties that the models of all ranks share: parameters, buffers, and initial values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from allranks._api import objects
from allranks._base.errors import MismatchError, rank_list
from allranks._elastic.replay import included_in_state
from allranks._group.process_group import ProcessGroup
from allranks.parallel.buckets import ALONE_BYTES
from allranks.parallel.drift import find, gather_in

__all__ = ["broadcast_values", "require_same_model", "require_same_values"]


def broadcast_values(tensors: list[Tensor], group: ProcessGroup, source: int = 0) -> None:
    """Give every rank the values of the group's rank ``source``.

    Large tensors are broadcast in place, small ones together.

    Cost: one broadcast for each large tensor, and one for all small tensors of a dtype, which are copied in and out.
    """
    small: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    with torch.no_grad():
        for tensor in tensors:
            # Decide by size only: strides can differ between ranks, and all ranks must make the same calls.
            if tensor.nbytes < ALONE_BYTES:
                small.setdefault((tensor.dtype, tensor.device), []).append(tensor)
            elif tensor.is_contiguous():
                _broadcast_bytes(tensor.detach(), group, source)
                # Like copy_: autograd must detect a graph that still needs the old values.
                torch.autograd.graph.increment_version(tensor)
            else:
                dense = tensor.detach().contiguous()
                _broadcast_bytes(dense, group, source)
                tensor.copy_(dense)
        for same in small.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in same])
            if not flat.numel():
                continue
            _broadcast_bytes(flat, group, source)
            parts = torch.split(flat, [tensor.numel() for tensor in same])
            torch._foreach_copy_(same, [part.view(t.shape) for part, t in zip(parts, same, strict=True)])


def _broadcast_bytes(tensor: Tensor, group: ProcessGroup, source: int) -> None:
    # Send bytes: a broadcast does no arithmetic, so any dtype can be sent.
    # A process that replaces a lost rank receives the model with the training state, so the replay log need not keep
    # it.
    with included_in_state():
        group.broadcast(tensor.view(-1).view(torch.uint8), source)


_REMEDY = (
    "An optimizer has used gradients that were not averaged over the ranks: from a backward in no_sync(), from a"
    " forward that called the wrapped module itself, or from a second backward after the one that the forward"
    " synchronized. Make the last backward before each optimizer step follow a forward of the wrapper. Otherwise the"
    " program changes parameters differently on the ranks: look for settings and hooks that depend on the rank, and"
    " for parameters that were replaced after wrapping."
)


def require_same_values(named: Iterable[tuple[str, Tensor]], group: ProcessGroup) -> None:
    """Raise on every rank if the values of a parameter differ between ranks.

    Raises:
        MismatchError: Names the differing parameters and the first differing element, with its values and ranks.

    Cost: a hash of all parameters, and an all_gather_object of 8 bytes.
    """
    values = dict(named)
    difference = find(values, group.ranks, gather_in(group), values)
    if difference is not None:
        raise MismatchError(
            f"DistributedDataParallel: the ranks train different models: {difference}.\n  "
            + (f"{difference.memory_fault} Restart from a checkpoint." if difference.memory_fault else _REMEDY)
        )


def require_same_model(
    parameters: list[tuple[str, nn.Parameter]],
    buffers: list[tuple[str, Tensor]],
    options: Mapping[str, object],
    wish: bool,
    group: ProcessGroup,
) -> bool:
    """Raise on every rank if a model differs from rank 0's in more than values, or if its options differ.

    Returns:
        True if ``wish`` is true on every rank.

    Raises:
        MismatchError: Names every rank that differs, and the options or the first parameter in which it differs.

    Cost: 40 bytes from each rank if the models agree.
    """
    choices = [f"{name}={value}" for name, value in options.items()]
    lines = [f"parameter {_describe(n, p)}" for n, p in parameters] + [f"buffer {_describe(n, b)}" for n, b in buffers]
    digest = hashlib.sha256("\n".join([*choices, *lines]).encode()).digest()
    # 32 bytes of SHA-256 and 8 bytes of the wish: the exchange has a fixed size, and details follow only after a
    # mismatch.
    mine = torch.frombuffer(bytearray(digest + int(wish).to_bytes(8, "little")), dtype=torch.int64).to(group.device)
    all_of_them = mine.new_empty(group.size(), mine.numel())
    group.all_gather(all_of_them, mine)
    # The usual case ends here. The texts follow only after a mismatch.
    if bool((all_of_them[:, :-1] == all_of_them[0, :-1]).all()):
        return bool(all_of_them[:, -1].all())
    everyones: list[tuple[list[str], list[str]]] = [([], []) for _ in range(group.size())]
    objects.all_gather_object(everyones, (choices, lines), group)
    _compare_options([theirs for theirs, _ in everyones], group)
    models = [model for _, model in everyones]
    reference = models[0]
    differences: dict[str, list[int]] = {}
    for rank, model in zip(group.ranks, models, strict=True):
        if model != reference:
            differences.setdefault(_first_difference(model, reference), []).append(rank)
    source = group.ranks[0]
    raise MismatchError(
        "DistributedDataParallel: the models of the ranks differ in their parameters or buffers, not only in values. "
        f"Compared with the reference, rank {source} ({len(reference)} parameters and buffers): "
        + "; ".join(f"{rank_list(ranks)}: {difference}" for difference, ranks in differences.items())
        + ".\n  Create the same model on all ranks before wrapping it."
    )


def _compare_options(everyones: list[list[str]], group: ProcessGroup) -> None:
    reference = everyones[0]
    differences: dict[str, list[int]] = {}
    for rank, theirs in zip(group.ranks, everyones, strict=True):
        pairs = zip(theirs, reference, strict=True)
        others = [f"{here} (reference: {there})" for here, there in pairs if here != there]
        if others:
            differences.setdefault(", ".join(others), []).append(rank)
    if differences:
        raise MismatchError(
            "DistributedDataParallel: the ranks must pass the same options. "
            f"Compared with the reference, rank {group.ranks[0]}: "
            + "; ".join(f"{rank_list(ranks)}: {difference}" for difference, ranks in differences.items())
        )


def _first_difference(model: list[str], reference: list[str]) -> str:
    position = next(i for i in range(len(model) + 1) if model[i : i + 1] != reference[i : i + 1])
    here, there = (("".join(side[position : position + 1]) or "nothing") for side in (model, reference))
    return f"{len(model)} of them, first difference at number {position}: {here} (reference: {there})"


def _describe(name: str, tensor: Tensor) -> str:
    trained = ", trained" if tensor.requires_grad else ""
    return f"{name}: {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}{trained}"
