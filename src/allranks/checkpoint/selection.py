"""Choose the checkpoint that the ranks read: the newest complete one, even if no rank sees all of its shares.

All ranks compute the same result from the same reports. A process that sees only some shares of the newest checkpoint
raises an error: an older checkpoint would be a wrong answer.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from allranks._base.errors import CheckpointError, rank_list, spans
from allranks._call import callsite
from allranks.checkpoint import folders
from allranks.checkpoint.inventory import CheckpointCandidate, FolderListing, by_step, list_on_all_ranks
from allranks.checkpoint.manifest import MANIFEST, FileShare, Manifest, check_sizes, decode, load_manifest
from allranks.checkpoint.participants import Participants, error_text, single_process
from allranks.checkpoint.verifying import check_files

__all__ = ["SelectedCheckpoint", "latest", "select_checkpoint", "select_local_checkpoint"]


_REMOVED = f"the checkpoint has no {MANIFEST}"  # another process is removing it


@dataclass(frozen=True)
class SelectedCheckpoint:
    """A checkpoint that is read.

    Attributes:
        folder: Path of the checkpoint on this rank. It need not exist if only other ranks see the checkpoint.
        manifest: Manifest of the checkpoint.
        local_folders: Folders of the shares that this rank sees, by share number. Key 0: a checkpoint without
            shares.
        holders: Ranks that see each share, by share number.
        named: The caller requested this checkpoint by step or path, so that no other checkpoint may replace it.
    """

    folder: Path
    manifest: Manifest
    local_folders: dict[int, Path]
    holders: dict[int, list[int]]
    named: bool = False

    def is_everywhere(self, ranks: int) -> bool:
        """Return whether each rank sees all files."""
        return all(len(holders) == ranks for holders in self.holders.values())


def select_local_checkpoint(path: folders.PathLike, step: int | None = None) -> SelectedCheckpoint:
    """Return the checkpoint at a path for a process that reads without other ranks.

    Raises:
        CheckpointError: There is no checkpoint, it is damaged, or only some of its shares are in the folder.
    """
    return select_checkpoint(path, step, single_process())


def select_checkpoint(
    path: folders.PathLike, step: int | None, participants: Participants, verified: bool = False
) -> SelectedCheckpoint:
    """Return the checkpoint at a path for all ranks. All of them call it, each with its own path.

    Args:
        path: A checkpoint, or a folder of checkpoints.
        step: Step of the training. None: the newest.
        participants: The ranks.
        verified: Read every byte, and accept only a checkpoint without damage.

    Raises:
        CheckpointError: There is no checkpoint, the named one is damaged, or only some of its shares exist. On all
            ranks.
    """
    result = _search(path, step, participants, verified)
    if result.selected is None or (result.skip_reasons and participants.size == 1):
        what = "complete checkpoint" if step is None else f"checkpoint of step {step}"
        missing = "" if os.path.exists(path) else f": there is no {Path(path).absolute()}"
        raise CheckpointError(
            result.skip_reasons[0]
            if result.skip_reasons
            else f"there is no {what} in {Path(path)}{missing}.\n  {_remedy(path, step)}"
        )
    _warn(result, participants)
    return result.selected


def _remedy(path: folders.PathLike, step: int | None) -> str:
    if step is None or not os.path.exists(path):
        return "Pass the folder that was passed to checkpoint.save."
    return f"To list the steps, run: allranks checkpoint list {Path(path)}"


def latest(folder: folders.PathLike, participants: Participants, verified: bool) -> folders.Info | None:
    """See ``allranks.checkpoint.latest``."""
    result = _search(folder, None, participants, verified)
    if result.skip_reasons and participants.size == 1:
        raise CheckpointError(f"checkpoint.latest: {result.skip_reasons[0]}")
    _warn(result, participants)
    if (selected := result.selected) is None:
        return None
    info = folders.Info.of(selected.folder, selected.manifest)
    return (
        info
        if selected.local_folders or info.share is None
        else dataclasses.replace(info, share=(0, info.share[1]), nbytes=0)
    )


class _SearchResult(NamedTuple):
    """Result of a search.

    Attributes:
        selected: The checkpoint to read. None: there is no complete checkpoint.
        skip_reasons: Reasons why newer checkpoints are skipped.
    """

    selected: SelectedCheckpoint | None
    skip_reasons: list[str]


def _warn(result: _SearchResult, participants: Participants) -> None:
    if participants.rank == 0:
        for why in result.skip_reasons:
            callsite.warn(f"checkpoint: {why}")


def _search(path: folders.PathLike, step: int | None, participants: Participants, verified: bool) -> _SearchResult:
    """Find the newest complete checkpoint. Skip damaged ones with a warning, unless the path or the step names them."""
    listing, reports = list_on_all_ranks(Path(path), participants)
    skip_reasons: list[str] = []
    for candidates in by_step(reports, step):
        complete: list[tuple[float, int, str, CheckpointCandidate]] = []
        for number, candidate in enumerate(candidates):
            # An older attempt need not be examined: the newer one of the same folder is complete.
            if candidate.missing or any(_is_older_attempt(candidate, other) for _, _, _, other in complete):
                continue
            when, identity, why = _examine(candidate, listing, participants, verified)
            # A save that runs concurrently removes old checkpoints, which is not damage.
            if why == _REMOVED and not listing.pinned:
                continue
            if not why:
                complete.append((when, -number, identity, candidate))
            # The caller has named this checkpoint, so another one would be a wrong answer.
            elif step is not None or listing.pinned:
                raise CheckpointError(
                    f"{why}.\n  Select another step, or pass the folder of checkpoints to use the newest intact one."
                )
            elif participants.rank == 0:
                name = candidate.names[min(candidate.names)]
                callsite.warn(
                    f"checkpoint: {name} is skipped: {why}.\n  To remove it, run: rm -r {listing.folder / name}"
                )
        if complete:
            _, _, identity, newest = max(complete, key=lambda each: each[:2])  # a step may have been saved twice
            opened = _open(newest, identity, listing, participants)
            return _SearchResult(
                dataclasses.replace(opened, named=step is not None or listing.pinned != ""), skip_reasons
            )
        skip_reasons += [_incomplete(candidate, listing, participants) for candidate in candidates if candidate.missing]
    return _SearchResult(None, skip_reasons)


def _is_older_attempt(candidate: CheckpointCandidate, other: CheckpointCandidate) -> bool:
    """Return whether a checkpoint without shares is an older attempt at a step than another one.

    Each rank lists the newest attempt first, so `other` is newer if the same rank listed it.
    """
    return not candidate.count and not other.count and candidate.reporters == other.reporters


def _incomplete(candidate: CheckpointCandidate, listing: FolderListing, participants: Participants) -> str:
    """Describe why a checkpoint is skipped. For a single process, add the writers of missing shares and a remedy."""
    present, missing, count = sorted(candidate.names), candidate.missing, candidate.count
    if participants.size > 1:
        return (
            f"step {candidate.step} is skipped: no rank has {_shares(missing)} of {count} in its folder of checkpoints"
            f" ({listing.folder} on rank {participants.rank}).\n"
            "  Start ranks on the hosts that have these shares, or copy the shares into the folder of a rank."
        )
    return (
        f"{listing.folder} has only {_shares(present)} of {count} of step {candidate.step}; missing: {_shares(missing)}"
        f"{_writers(candidate, listing)}.\n"
        "  Load it with ranks on all of these hosts: latest(folder, group=...), then load(...).\n"
        "  Or merge the shares into one checkpoint: allranks checkpoint merge FOLDER FOLDER... --into FOLDER"
    )


def _writers(candidate: CheckpointCandidate, listing: FolderListing) -> str:
    """Describe the ranks and hosts that wrote the missing shares."""
    try:
        manifest = load_manifest(listing.folder / candidate.names[min(candidate.names)], sizes=False)
    except (CheckpointError, OSError) as error:
        return f" (the existing share cannot be read: {error})"
    ranks = sorted({file.rank for file in manifest.files if file.share in candidate.missing})
    hosts = dict.fromkeys(manifest.writers[rank].host for rank in ranks if rank < len(manifest.writers))
    return f" (written by {rank_list(ranks)} on {', '.join(hosts)})" if ranks else ""


def _shares(numbers: Sequence[int]) -> str:
    return f"{'share' if len(numbers) == 1 else 'shares'} {spans(numbers, ', ')}"


def _examine(
    candidate: CheckpointCandidate, listing: FolderListing, participants: Participants, verified: bool
) -> tuple[float, str, str]:
    """Return when a checkpoint was written, its identity, and a problem, or "". One rank examines each share.

    Args:
        candidate: The checkpoint.
        listing: The entries that this rank sees.
        participants: The ranks.
        verified: Read every byte.
    """
    own_reports = []
    for number, reporter in candidate.reporters.items():
        if reporter != participants.rank:
            continue
        folder = listing.folder / candidate.names[number]
        try:
            manifest = load_manifest(folder)
        except FileNotFoundError:
            own_reports.append((number, 0.0, "", _REMOVED))
            continue
        except (CheckpointError, OSError) as error:
            own_reports.append((number, 0.0, "", error_text(error)))
            continue
        expected = FileShare(candidate.save, number, candidate.count) if number else None
        why = "" if manifest.share == expected else f"{folder / MANIFEST} belongs to another share"
        if verified and not why:
            why = next(iter(check_files(folder, manifest)), "")
        own_reports.append((number, manifest.when, manifest.identity(), why))
    # Only the reporting ranks read a manifest: a folder that thousands of ranks share is read once.
    reports = sorted(
        each
        for rank_reports in participants.exchange(own_reports, list[tuple[int, float, str, str]])
        for each in rank_reports
    )
    if troubles := [why for _, _, _, why in reports if why]:
        return 0.0, "", troubles[0]
    if len({identity for _, _, identity, _ in reports}) > 1:
        return 0.0, "", f"its shares belong to different saves: {', '.join(candidate.names.values())}"
    return reports[0][1], reports[0][2], ""


def _open(
    candidate: CheckpointCandidate, identity: str, listing: FolderListing, participants: Participants
) -> SelectedCheckpoint:
    """Open the checkpoint on each rank, and exchange which rank sees which share.

    A rank that sees no share receives the manifest from the first rank that has one.
    """
    local_folders: dict[int, Path] = {}
    manifest: Manifest | None = None
    trouble = ""
    for number, name in sorted(candidate.names.items()):
        folder = listing.folder / name
        try:
            # A folder of this name may hold another checkpoint on this rank. The identity shows it.
            found = load_manifest(folder, sizes=False)
            if found.identity() == identity:
                check_sizes(folder, found)
                manifest, local_folders[number] = found, folder
        # Removed since the search. Whether another rank still has it is checked below.
        except FileNotFoundError:
            continue
        except (CheckpointError, OSError) as error:
            trouble = error_text(error)
    seen_by_rank = participants.exchange((sorted(local_folders), trouble), tuple[list[int], str])
    if failed := [(rank, why) for rank, (_, why) in enumerate(seen_by_rank) if why]:
        raise CheckpointError(f"rank {failed[0][0]}: {failed[0][1]}" if participants.size > 1 else failed[0][1])
    holders = {
        number: [rank for rank, (seen, _) in enumerate(seen_by_rank) if number in seen] for number in candidate.names
    }
    if gone := [number for number, ranks in holders.items() if not ranks]:
        raise CheckpointError(
            f"{candidate.names[gone[0]]} was removed before step {candidate.step} could be read.\n"
            "  Repeat the call without a step to select the newest checkpoint."
        )
    if not all(seen for seen, _ in seen_by_rank):
        sender = min(ranks[0] for ranks in holders.values())
        encoded = manifest.encode() if manifest is not None and participants.rank == sender else None
        # All ranks take part, because `seen_by_rank` is the same on every rank.
        sent = participants.exchange(encoded, bytes | None)[sender]
        assert sent is not None
        manifest = manifest or decode(listing.folder / candidate.names[min(candidate.names)] / MANIFEST, sent)
    assert manifest is not None
    first = min(local_folders or candidate.names)
    return SelectedCheckpoint(
        local_folders.get(first, listing.folder / candidate.names[first]), manifest, local_folders, holders
    )
