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
from allranks.checkpoint.manifest import MANIFEST, FileShare, load_manifest
from allranks.checkpoint.participants import Participants, error_text

__all__ = ["CheckpointCandidate", "CheckpointEntry", "FolderListing", "by_step", "list_on_all_ranks", "list_path"]


class CheckpointEntry(NamedTuple):
    """A checkpoint or a share in a folder.

    Attributes:
        step: Step of the training.
        attempt: See ``folders.NamedFolder``.
        name: Name of its folder.
        share: None if it is not a share.
    """

    step: int
    attempt: int
    name: str
    share: FileShare | None


@dataclass
class FolderListing:
    """The entries that a rank sees.

    Attributes:
        folder: Folder of the entries.
        entries: Checkpoints and shares.
        pinned: The checkpoint that the path names; "" for a folder of checkpoints.
    """

    folder: Path
    entries: list[CheckpointEntry]
    pinned: str = ""

    @property
    def digest(self) -> str:
        """Digest of the names. It is the same on all ranks that see the same names."""
        return xxhash.xxh3_128_hexdigest(repr((self.pinned, self.entries)).encode())


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


def list_path(path: Path) -> FolderListing:
    """List a folder of checkpoints; or the checkpoint that a path names, or a share with the other shares of its save.

    Raises:
        CheckpointError: The path names a checkpoint that is damaged.
        OSError: The path cannot be read.
    """
    checkpoint = folders.parse_name(path)
    if checkpoint is None and (path / MANIFEST).exists():  # a renamed checkpoint
        manifest = load_manifest(path, sizes=False)
        checkpoint = folders.NamedFolder(manifest.step, 1, path, manifest.share)
    if checkpoint is None:
        return FolderListing(path, _entries(path))
    if checkpoint.share is None:
        is_complete = (path / MANIFEST).exists()
        return FolderListing(
            path.parent,
            [CheckpointEntry(checkpoint.step, checkpoint.attempt, path.name, None)] if is_complete else [],
            path.name,
        )
    shares = [each for each in _entries(path.parent) if each.share is not None and each.share.id == checkpoint.share.id]
    if path.exists() and all(each.name != path.name for each in shares):
        shares.append(CheckpointEntry(checkpoint.step, 1, path.name, checkpoint.share))
    return FolderListing(path.parent, shares, f"save {checkpoint.share.id}")


def _entries(folder: Path) -> list[CheckpointEntry]:
    try:
        found = folders.find(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [CheckpointEntry(one.step, one.attempt, one.path.name, one.share) for one in found]


def list_on_all_ranks(path: Path, participants: Participants) -> tuple[FolderListing, dict[int, list[CheckpointEntry]]]:
    """Return this rank's listing, and the report of the first rank of each class. All ranks call it, each with a path.

    Raises:
        CheckpointError: A rank cannot read its path, or the paths name different checkpoints. On all ranks.
    """
    trouble = ""
    try:
        listing = list_path(path)
    except (CheckpointError, OSError) as error:
        listing, trouble = FolderListing(path, []), error_text(error)
    summaries = participants.exchange(
        (listing.digest, listing.pinned, len(listing.entries), trouble), tuple[str, str, int, str]
    )
    for rank, (_, _, _, why) in enumerate(summaries):
        if why:
            raise CheckpointError(why if participants.size == 1 else f"rank {rank}: {why}")
    # Only ranks that see something count: a rank without the folder gets its data from the others.
    pinned_names = {
        pinned: rank for rank, (_, pinned, count, _) in reversed(list(enumerate(summaries))) if pinned or count
    }
    if len(pinned_names) > 1:
        listed = "; ".join(
            f"rank {rank}: {pinned or 'a folder of checkpoints'}" for pinned, rank in list(pinned_names.items())[:4]
        )
        raise CheckpointError(
            f"the ranks have requested different checkpoints ({listed}).\n  Pass the same checkpoint on all ranks."
        )
    digests = [digest for digest, _, _, _ in summaries]
    is_first = digests.index(digests[participants.rank]) == participants.rank
    reports = participants.exchange(listing.entries if is_first else None, list[CheckpointEntry] | None)
    # A rank that sees nothing must treat the checkpoint as named, too, because all ranks take the same branches.
    listing.pinned = next(iter(pinned_names), "")
    return listing, {rank: entries for rank, entries in enumerate(reports) if entries}


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
