"""Random collectives with operands and results at arbitrary offsets in one buffer, compared with runs on clones."""

from __future__ import annotations

import random

import torch
from torch import Tensor

import allranks as dist

COUNTS = (1, 24, 1000, 9000, 50_000, 90_000)  # Elements of a chunk: from one call slot to many chunks of the ring.
VERBS = ("all_gather", "all_gather_single", "gather", "scatter", "reduce_scatter", "reduce_scatter_single")
VERBS += ("all_to_all", "all_to_all_single", "uneven all_gather")


def call_overlapping(seed: int, calls: int, kind: str, group: dist.ProcessGroup | None = None) -> None:
    """Make random calls on each rank of the group.

    Args:
        seed: seed of the random generator.
        calls: number of calls.
        kind: memory of the buffer: private or shared.
        group: the group; None is the world.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    alike, own = random.Random(seed), random.Random(1000 * seed + rank)
    room = (2 * size + 2) * max(COUNTS)
    make = dist.empty_shared if kind == "shared" else torch.empty
    memory = make(room, dtype=torch.int32)
    for number in range(calls):
        verb, count, root = alike.choice(VERBS), alike.choice(COUNTS), alike.randrange(size)
        async_op = alike.random() < 0.5
        even = [[count] * size for _ in range(size)]
        # indexed by source and destination
        sizes = [[alike.randrange(2 * count) for _ in range(size)] for _ in range(size)]
        sizes = sizes if verb in ("all_to_all", "all_to_all_single") and alike.random() < 0.7 else even
        gives, gets = sizes[rank], [row[rank] for row in sizes]
        if verb == "uneven all_gather":
            each = [alike.randrange(2 * count) for _ in range(size)]
            gives, gets = [each[rank]] * size, each
        memory.copy_(torch.arange(room, dtype=torch.int32) * 7 + rank * 1_000_003 + number)
        ins, outs = _views(own, memory, verb, gives, gets)
        if verb == "scatter" and rank != root:
            ins = []
        if verb == "gather" and rank != root:
            outs = []
        copies = [tensor.clone() for tensor in ins]
        wanted = [torch.zeros_like(tensor) for tensor in outs]
        _call(verb, copies, wanted, root, False, group)
        _call(verb, ins, outs, root, async_op, group)
        for index, (tensor, want) in enumerate(zip(outs, wanted, strict=True)):
            places = [(t.storage_offset(), t.numel()) for t in (*ins, *outs)]
            about = f"call {number} of seed {seed}, {kind}: {verb}, rank {rank} of {size}, {len(ins)} ins at {places}"
            assert torch.equal(tensor, want), f"{about}: result {index}"
        dist.barrier(group)


def _views(own: random.Random, memory: Tensor, verb: str, gives: list[int], gets: list[int]) -> tuple[list, list]:
    """Return operands at arbitrary offsets, and results in arbitrary order that do not overlap each other."""
    one_in = verb in ("all_gather", "all_gather_single", "uneven all_gather", "gather")
    one_out = verb in ("reduce_scatter", "reduce_scatter_single", "scatter")
    whole_in = verb in ("reduce_scatter_single", "all_to_all_single") or own.random() < 0.3
    whole_out = verb in ("all_gather_single", "all_to_all_single") or own.random() < 0.3
    room, count = memory.numel(), max(1, gives[0])
    gets = gets[:1] if one_out else gets
    order = list(range(len(gets)))
    gap = 0
    if not whole_out:
        own.shuffle(order)
        gap = own.choice([0, 0, count // 2])
    begin = own.choice([0, count, own.randrange(count + 1)])
    starts = [0] * len(gets)
    for index in order:
        starts[index] = begin
        begin += gets[index] + gap
    outs = [memory[start : start + n] for start, n in zip(starts, gets, strict=True)]

    def somewhere(nbytes: int) -> int:
        nearby = own.choice(starts) + own.choice([0, 0, 0, count // 2, -(count // 2), 1, -1, count, -count])
        return min(max(own.choice([nearby, nearby, own.randrange(room - nbytes + 1)]), 0), room - nbytes)

    if one_in:
        start = somewhere(gives[0])
        return [memory[start : start + gives[0]]], outs
    if whole_in:
        start = somewhere(sum(gives))
        return list(torch.split(memory[start : start + sum(gives)], gives)), outs
    if own.random() < 0.3 and gives == gets:
        return list(outs), outs
    places = [somewhere(n) for n in gives]
    return [memory[start : start + n] for start, n in zip(places, gives, strict=True)], outs


def _call(
    verb: str, ins: list[Tensor], outs: list[Tensor], root: int, async_op: bool, group: dist.ProcessGroup | None
) -> None:
    rest = {"group": group, "async_op": async_op}
    match verb:
        case "all_gather" | "uneven all_gather":
            work = dist.all_gather(outs, ins[0], **rest)
        case "all_gather_single":
            work = dist.all_gather_single(_whole(outs), ins[0], **rest)
        case "gather":
            work = dist.gather(ins[0], outs or None, group_dst=root, **rest)
        case "scatter":
            work = dist.scatter(outs[0], ins or None, group_src=root, **rest)
        case "reduce_scatter":
            work = dist.reduce_scatter(outs[0], ins, **rest)
        case "reduce_scatter_single":
            work = dist.reduce_scatter_single(outs[0], _whole(ins), **rest)
        case "all_to_all":
            work = dist.all_to_all(outs, ins, **rest)
        case _:
            gets, gives = [t.numel() for t in outs], [t.numel() for t in ins]
            even = len(set(gets + gives)) == 1
            sizes = () if even else (gets, gives)
            work = dist.all_to_all_single(_whole(outs), _whole(ins), *sizes, **rest)
    if work is not None:
        work.wait()


def _whole(parts: list[Tensor]) -> Tensor:
    """Return the tensor that consists of these parts in order.

    If the parts are clones, create the tensor and rebind the parts to it.
    """
    offsets = [part.storage_offset() for part in parts]
    if len({part.untyped_storage()._cdata for part in parts}) == 1:
        return parts[0].as_strided((sum(part.numel() for part in parts),), (1,), offsets[0])
    whole = torch.cat(parts)
    for part, place in zip(parts, torch.split(whole, [part.numel() for part in parts]), strict=True):
        part.set_(place)
    return whole
