"""Assignment of tensor parts to ranks and to positions in their files. Every rank computes the same result.

The ranks exchange descriptions of their tensors (``PartDescription``). A tensor that is the same on several ranks is
written by one of them. The work is distributed by bytes, the largest tensors first. A tensor that differs between ranks
is written once for each different value. Shards are written by the ranks that hold them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from allranks._base.errors import UsageError, rank_list

__all__ = ["CACHE_LINE_BYTES", "Box", "SaveJob", "PartDescription", "SavePlan", "make_plan", "overlap", "set_positions"]

CACHE_LINE_BYTES = 64
"""Alignment in bytes of torch's tensor allocations, and of the end of a file's header."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""A part of a tensor: its offsets, and its shape."""


class PartDescription(msgspec.Struct, frozen=True, array_like=True):
    """A tensor, or a part of one, that a rank has.

    Attributes:
        name: Path of the tensor in the state.
        dtype: torch's name of the dtype.
        size: Bytes of an element.
        shape: Shape of the whole tensor.
        offsets: Position of the part in the whole tensor.
        part: Shape of the part.
        digest: Digest of its bytes.
        own: Every rank's tensor is written, whether they differ or not.
    """

    name: str
    dtype: str
    size: int
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    part: tuple[int, ...]
    digest: int
    own: bool = False

    @property
    def nbytes(self) -> int:
        """Size of the part in bytes."""
        return math.prod(self.part) * self.size

    @property
    def is_whole(self) -> bool:
        """Whether it is a whole tensor, not a shard."""
        return self.part == self.shape


@dataclass
class SaveJob:
    """A part of a tensor that is written once.

    Attributes:
        description: Description of the part.
        ranks: Ranks whose state contains it. Empty: all ranks that have a tensor of this name.
        holders: Ranks that have it in memory.
        writer: The holder that writes it.
        begin: Its position in the writer's file, after the header.
    """

    description: PartDescription
    ranks: tuple[int, ...]
    holders: tuple[int, ...]
    writer: int = -1
    begin: int = 0

    @property
    def key(self) -> str:
        """Name of the tensor in the file."""
        description = self.description
        position = "" if description.is_whole else "@" + ",".join(map(str, description.offsets))
        owner = f"#{self.ranks[0]}" if self.ranks else ""
        return description.name + position + owner


@dataclass
class SavePlan:
    """The writes of all ranks.

    Attributes:
        jobs: All jobs.
        files: Jobs of each rank that writes, in the order of its file.
    """

    jobs: list[SaveJob] = field(default_factory=list)
    files: dict[int, list[SaveJob]] = field(default_factory=dict)


def make_plan(descriptions: Sequence[Sequence[PartDescription]]) -> SavePlan:
    """Assign each part to a rank and a position.

    Args:
        descriptions: Tensors of each rank.

    Raises:
        UsageError: Ranks have tensors of the same name that cannot be parts of one tensor.
    """
    by_name: dict[str, list[tuple[int, PartDescription]]] = {}
    for rank, parts in enumerate(descriptions):
        for description in parts:
            by_name.setdefault(description.name, []).append((rank, description))
    plan = SavePlan()
    for name in sorted(by_name):
        plan.jobs += _jobs_of(name, by_name[name])
    load = [0] * len(descriptions)
    # The largest job first, each to the holder with the fewest bytes so far, which keeps the loads of the ranks even.
    for job in sorted(plan.jobs, key=lambda job: -job.description.nbytes):
        job.writer = min(job.holders, key=lambda rank: (load[rank], rank))
        load[job.writer] += job.description.nbytes
    for job in plan.jobs:
        plan.files.setdefault(job.writer, []).append(job)
    for jobs in plan.files.values():
        set_positions(jobs)
    return plan


def set_positions(jobs: list[SaveJob]) -> None:
    """Sort the jobs of a rank into the order of its file, and set their positions.

    safetensors allows no gaps. Parts whose size is a multiple of a cache line come first, so each of them begins at a
    cache line, as it does in memory. A copy between addresses of different alignment runs at 0.7 of the speed, and in
    the worst case at 0.25. The other parts follow by descending element size, so that no element crosses its own
    alignment.
    """
    jobs.sort(key=lambda job: (job.description.nbytes % CACHE_LINE_BYTES != 0, -job.description.size, job.key))
    begin = 0
    for job in jobs:
        job.begin = begin
        begin += job.description.nbytes


def _jobs_of(name: str, parts: list[tuple[int, PartDescription]]) -> list[SaveJob]:
    if all(description.is_whole for _, description in parts):
        return _whole(parts)
    kinds = {(description.dtype, description.shape) for _, description in parts}
    if len(kinds) > 1:
        listed = "; ".join(
            f"rank {rank}: {description.dtype} {list(description.shape)}" for rank, description in parts[:4]
        )
        raise UsageError(
            f"checkpoint: the shards of tensor {name!r} differ in dtype or in the shape of the whole tensor: {listed}."
            "\n  Pass shards with the same dtype and the same whole shape on all ranks."
        )
    return _shards(name, parts)


def _whole(parts: list[tuple[int, PartDescription]]) -> list[SaveJob]:
    classes: dict[tuple[object, ...], list[int]] = {}
    firsts: dict[tuple[object, ...], PartDescription] = {}
    for rank, description in parts:
        # With `own`, each rank forms its own class, even if the values are equal.
        kind = (description.dtype, description.shape, description.digest, rank if description.own else -1)
        classes.setdefault(kind, []).append(rank)
        firsts.setdefault(kind, description)
    is_same_on_all = len(classes) == 1
    return [
        SaveJob(firsts[kind], () if is_same_on_all else tuple(ranks), tuple(ranks))
        for kind, ranks in sorted(classes.items(), key=lambda item: item[1][0])
    ]


def _shards(name: str, parts: list[tuple[int, PartDescription]]) -> list[SaveJob]:
    boxes: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[int, PartDescription]]] = {}
    for rank, description in parts:
        boxes.setdefault((description.offsets, description.part), []).append((rank, description))
    jobs = []
    for _, holders in sorted(boxes.items()):
        first = holders[0][1]
        if differs := [rank for rank, description in holders if description.digest != first.digest]:
            raise UsageError(
                f"checkpoint: {rank_list([holders[0][0], *differs])} have the same part of tensor {name!r} with"
                " different values; replicas of a shard must be equal.\n"
                "  Broadcast the shard to its replicas before the save."
            )
        # Empty shards need no job. If all shards are empty, one job below keeps the tensor in the manifest.
        if first.nbytes:
            jobs.append(SaveJob(first, (), tuple(rank for rank, _ in holders)))
    _check_cover(name, parts[0][1].shape, [job.description for job in jobs], jobs)
    return jobs or [SaveJob(parts[0][1], (), (parts[0][0],))]


def _check_cover(name: str, shape: tuple[int, ...], parts: Sequence[PartDescription], jobs: Iterable[SaveJob]) -> None:
    """Check that the parts cover the whole tensor without overlap."""
    covered = sum(math.prod(part.part) for part in parts)
    # Without an overlap, an equal number of elements means a complete cover.
    if covered == math.prod(shape) and not overlap([(part.offsets, part.part) for part in parts]):
        return
    listed = "; ".join(
        f"rank {job.holders[0]}: {list(job.description.part)} at {list(job.description.offsets)}"
        for job in list(jobs)[:4]
    )
    raise UsageError(
        f"checkpoint: the shards of tensor {name!r} do not cover its shape {list(shape)} exactly once ({covered} of"
        f" {math.prod(shape)} elements): {listed}.\n"
        "  Save with all ranks that have a shard, or correct the offsets of the shards."
    )


def overlap(boxes: Sequence[Box]) -> bool:
    """Return whether two boxes have a common element. Boxes that a plane separates are not compared with each other."""
    todo = [[(offsets, shape) for offsets, shape in boxes if math.prod(shape)]]
    while todo:
        near = todo.pop()
        if len(near) < 2:
            continue
        for dimension in range(len(near[0][0])):
            if len(groups := _separate(near, dimension)) > 1:
                todo += groups
                break
        else:
            # No dimension separates these boxes, so compare all pairs.
            if any(_intersect(one, other) for number, one in enumerate(near) for other in near[:number]):
                return True
    return False


def _separate(boxes: list[Box], dimension: int) -> list[list[Box]]:
    """Split the boxes into groups that do not overlap in a dimension."""
    groups: list[list[Box]] = []
    end = -1
    for offsets, shape in sorted(boxes, key=lambda box: box[0][dimension]):
        if offsets[dimension] >= end:
            groups.append([])
        groups[-1].append((offsets, shape))
        end = max(end, offsets[dimension] + shape[dimension])
    return groups


def _intersect(one: Box, other: Box) -> bool:
    return all(a < b + m and b < a + n for a, n, b, m in zip(one[0], one[1], other[0], other[1], strict=True))
