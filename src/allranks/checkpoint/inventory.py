"""Listing of the checkpoints in the folders of all ranks, by names only.

Each rank lists its own folder. Ranks that see the same names form a class, and the first rank of a class reports for
all of it. A folder that thousands of ranks share is therefore reported once. A checkpoint in shares may be complete if
all shares of one save are in the folders of these ranks, in any of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import xxhash

from allranks._base.errors import CheckpointError
from allranks.checkpoint import folders
from allranks.checkpoint.company import Company, in_words
from allranks.checkpoint.manifest import MANIFEST, FileShare, load_manifest

__all__ = ["CheckpointCandidate", "CheckpointEntry", "View", "by_step", "look", "look_together"]


class CheckpointEntry(NamedTuple):
    """A checkpoint or a share in a folder.

    Attributes:
        step: Step of the training.
        attempt: See ``folders.Named``.
        name: Name of its folder.
        share: None if it is not a share.
    """

    step: int
    attempt: int
    name: str
    share: FileShare | None


@dataclass
class View:
    """The entries that a rank sees.

    Attributes:
        folder: Folder of the entries.
        entries: Checkpoints and shares.
        pin: The checkpoint that the path names; "" for a folder of checkpoints.
    """

    folder: Path
    entries: list[CheckpointEntry]
    pin: str = ""

    @property
    def digest(self) -> str:
        """Digest of the names. It is the same on all ranks that see the same names."""
        return xxhash.xxh3_128_hexdigest(repr((self.pin, self.entries)).encode())


@dataclass
class CheckpointCandidate:
    """A checkpoint that may be complete.

    Attributes:
        step: Step of the training.
        save: Id of the save, which its shares have in common. Without shares: distinguishes checkpoints of the same
            step.
        count: Number of its shares; 0 for a checkpoint without shares.
        names: Names of its folders, by share number; 0 stands for a checkpoint without shares.
        reporters: First rank that sees each of them, by share number.
    """

    step: int
    save: str
    count: int
    names: dict[int, str] = field(default_factory=dict)
    reporters: dict[int, int] = field(default_factory=dict)

    @property
    def missing(self) -> list[int]:
        """Numbers of the shares that no rank has."""
        return [number for number in range(1, self.count + 1) if number not in self.names]


def look(path: Path) -> View:
    """List a folder of checkpoints; or the checkpoint that a path names, or a share with the other shares of its save.

    Raises:
        CheckpointError: The path names a checkpoint that is damaged.
        OSError: The path cannot be read.
    """
    one = folders.named(path)
    if one is None and (path / MANIFEST).exists():  # a renamed checkpoint
        manifest = load_manifest(path, sizes=False)
        one = folders.Named(manifest.step, 1, path, manifest.share)
    if one is None:
        return View(path, _entries(path))
    if one.share is None:
        there = (path / MANIFEST).exists()
        return View(path.parent, [CheckpointEntry(one.step, one.attempt, path.name, None)] if there else [], path.name)
    beside = [each for each in _entries(path.parent) if each.share is not None and each.share.id == one.share.id]
    if path.exists() and all(each.name != path.name for each in beside):
        beside.append(CheckpointEntry(one.step, 1, path.name, one.share))
    return View(path.parent, beside, f"save {one.share.id}")


def _entries(folder: Path) -> list[CheckpointEntry]:
    try:
        found = folders.find(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [CheckpointEntry(one.step, one.attempt, one.path.name, one.share) for one in found]


def look_together(path: Path, company: Company) -> tuple[View, dict[int, list[CheckpointEntry]]]:
    """Return this rank's view, and the report of the first rank of each class. All ranks call it, each with its path.

    Raises:
        CheckpointError: A rank cannot read its path, or the paths name different checkpoints. On all ranks.
    """
    trouble = ""
    try:
        view = look(path)
    except (CheckpointError, OSError) as error:
        view, trouble = View(path, []), in_words(error)
    told = company.exchange((view.digest, view.pin, len(view.entries), trouble), tuple[str, str, int, str])
    for rank, (_, _, _, why) in enumerate(told):
        if why:
            raise CheckpointError(why if company.size == 1 else f"rank {rank}: {why}")
    # Only ranks that see something count: a rank without the folder gets its data from the others.
    pins = {pin: rank for rank, (_, pin, count, _) in reversed(list(enumerate(told))) if pin or count}
    if len(pins) > 1:
        listed = "; ".join(f"rank {rank}: {pin or 'a folder of checkpoints'}" for pin, rank in list(pins.items())[:4])
        raise CheckpointError(f"the ranks have requested different checkpoints ({listed})")
    digests = [digest for digest, _, _, _ in told]
    is_first = digests.index(digests[company.rank]) == company.rank
    reports = company.exchange(view.entries if is_first else None, list[CheckpointEntry] | None)
    # A rank that sees nothing must treat the checkpoint as named, too, because all ranks take the same branches.
    view.pin = next(iter(pins), "")
    return view, {rank: entries for rank, entries in enumerate(reports) if entries}


def by_step(reports: dict[int, list[CheckpointEntry]], step: int | None) -> Iterator[list[CheckpointCandidate]]:
    """Yield the candidates of each step, the newest step first.

    Args:
        reports: Entries of the folders, by reporting rank.
        step: The only step to consider. None: all.
    """
    found: dict[int, dict[tuple[str, int], CheckpointCandidate]] = {}
    for rank, entries in reports.items():
        for entry in entries:
            # Checkpoints without shares in different folders may differ, so each folder's is a candidate of its own.
            share = entry.share or FileShare(f"{entry.attempt} of rank {rank}", 0, 0)
            key = (share.id, share.count)
            candidate = found.setdefault(entry.step, {}).setdefault(key, CheckpointCandidate(entry.step, *key))
            candidate.names.setdefault(share.number, entry.name)
            candidate.reporters.setdefault(share.number, rank)
    for number in sorted(found, reverse=True):
        if step in (None, number):
            yield list(found[number].values())
