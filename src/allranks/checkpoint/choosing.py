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
from allranks.checkpoint.company import Company, alone, in_words
from allranks.checkpoint.inventory import CheckpointCandidate, View, by_step, look_together
from allranks.checkpoint.manifest import MANIFEST, FileShare, Manifest, check_sizes, decode, load_manifest
from allranks.checkpoint.verifying import check_files

__all__ = ["Chosen", "agreed", "latest", "only_here"]


_GONE = f"the checkpoint has no {MANIFEST}"  # another process is removing it


@dataclass(frozen=True)
class Chosen:
    """A checkpoint that is read.

    Attributes:
        folder: Path of the checkpoint on this rank. It need not exist if only other ranks see the checkpoint.
        manifest: Manifest of the checkpoint.
        here: Folders of the shares that this rank sees, by share number; 0 stands for a checkpoint without shares.
        holders: Ranks that see each share, by share number.
        named: The caller requested this checkpoint by step or path, so that no other checkpoint may replace it.
    """

    folder: Path
    manifest: Manifest
    here: dict[int, Path]
    holders: dict[int, list[int]]
    named: bool = False

    def is_everywhere(self, ranks: int) -> bool:
        """Return whether each rank sees all files."""
        return all(len(holders) == ranks for holders in self.holders.values())


def only_here(path: folders.PathLike, step: int | None = None) -> Chosen:
    """Return the checkpoint at a path for a process that reads without other ranks.

    Raises:
        CheckpointError: There is no checkpoint, it is damaged, or only some of its shares are in the folder.
    """
    return agreed(path, step, alone())


def agreed(path: folders.PathLike, step: int | None, company: Company, verified: bool = False) -> Chosen:
    """Return the checkpoint at a path for all ranks. All of them call it, each with its own path.

    Args:
        path: A checkpoint, or a folder of checkpoints.
        step: Step of the training. None: the newest.
        company: The ranks.
        verified: Read every byte, and accept only a checkpoint without damage.

    Raises:
        CheckpointError: There is no checkpoint, the named one is damaged, or only some of its shares exist. On all
            ranks.
    """
    found = _choose(path, step, company, verified)
    if found.chosen is None or (found.left_out and company.size == 1):
        what = "complete checkpoint" if step is None else f"checkpoint of step {step}"
        missing = "" if os.path.exists(path) else f": there is no {Path(path).absolute()}"
        raise CheckpointError(found.left_out[0] if found.left_out else f"there is no {what} in {Path(path)}{missing}")
    _warn(found, company)
    return found.chosen


def latest(folder: folders.PathLike, company: Company, verified: bool) -> folders.Info | None:
    """See ``allranks.checkpoint.latest``."""
    found = _choose(folder, None, company, verified)
    if found.left_out and company.size == 1:
        raise CheckpointError(found.left_out[0])
    _warn(found, company)
    if (chosen := found.chosen) is None:
        return None
    info = folders.Info.of(chosen.folder, chosen.manifest)
    return info if chosen.here or info.share is None else dataclasses.replace(info, share=(0, info.share[1]), nbytes=0)


class _Found(NamedTuple):
    """Result of a search.

    Attributes:
        chosen: The checkpoint to read. None: there is no complete checkpoint.
        left_out: Reasons why newer checkpoints are skipped.
    """

    chosen: Chosen | None
    left_out: list[str]


def _warn(found: _Found, company: Company) -> None:
    if company.rank == 0:
        for why in found.left_out:
            callsite.warn(f"checkpoint: {why}")


def _choose(path: folders.PathLike, step: int | None, company: Company, verified: bool) -> _Found:
    """Find the newest complete checkpoint. Skip damaged ones with a warning, unless the path or the step names them."""
    view, reports = look_together(Path(path), company)
    left_out: list[str] = []
    for candidates in by_step(reports, step):
        whole: list[tuple[float, int, str, CheckpointCandidate]] = []
        for number, candidate in enumerate(candidates):
            # An older attempt need not be examined: the newer one of the same folder is complete.
            if candidate.missing or any(_is_older_attempt(candidate, other) for _, _, _, other in whole):
                continue
            when, identity, why = _examine(candidate, view, company, verified)
            # A save that runs concurrently removes old checkpoints, which is not damage.
            if why == _GONE and not view.pin:
                continue
            if not why:
                whole.append((when, -number, identity, candidate))
            # The caller has named this checkpoint, so another one would be a wrong answer.
            elif step is not None or view.pin:
                raise CheckpointError(why)
            elif company.rank == 0:
                name = candidate.names[min(candidate.names)]
                callsite.warn(f"checkpoint: {name} is skipped: {why}.\n  To remove it, run: rm -r {view.folder / name}")
        if whole:
            _, _, identity, newest = max(whole, key=lambda each: each[:2])  # a step may have been saved twice
            opened = _open(newest, identity, view, company)
            return _Found(dataclasses.replace(opened, named=step is not None or view.pin != ""), left_out)
        left_out += [_incomplete(candidate, view, company) for candidate in candidates if candidate.missing]
    return _Found(None, left_out)


def _is_older_attempt(candidate: CheckpointCandidate, other: CheckpointCandidate) -> bool:
    """Return whether a checkpoint without shares is an older attempt at a step than another one.

    Each rank lists the newest attempt first, so `other` is newer if the same rank listed it.
    """
    return not candidate.count and not other.count and candidate.reporters == other.reporters


def _incomplete(candidate: CheckpointCandidate, view: View, company: Company) -> str:
    """Describe why a checkpoint is skipped. For a single process, add the writers of missing shares and a remedy."""
    there, missing, count = sorted(candidate.names), candidate.missing, candidate.count
    if company.size > 1:
        return (
            f"step {candidate.step} is skipped: no rank has {_shares(missing)} of {count} in its folder of checkpoints"
            f" ({view.folder} on rank {company.rank})"
        )
    return (
        f"{view.folder} has only {_shares(there)} of {count} of step {candidate.step}; missing: {_shares(missing)}"
        f"{_writers(candidate, view)}.\n"
        "  Load it with ranks on all of these hosts: latest(folder, group=...), then load(...).\n"
        "  Or merge the shares into one checkpoint: allranks checkpoint merge FOLDER FOLDER... --into FOLDER"
    )


def _writers(candidate: CheckpointCandidate, view: View) -> str:
    """Describe the ranks and hosts that wrote the missing shares."""
    try:
        manifest = load_manifest(view.folder / candidate.names[min(candidate.names)], sizes=False)
    except (CheckpointError, OSError) as error:
        return f" (the existing share cannot be read: {error})"
    ranks = sorted({file.rank for file in manifest.files if file.share in candidate.missing})
    hosts = dict.fromkeys(manifest.writers[rank].host for rank in ranks if rank < len(manifest.writers))
    return f" (written by {rank_list(ranks)} on {', '.join(hosts)})" if ranks else ""


def _shares(numbers: Sequence[int]) -> str:
    return f"{'share' if len(numbers) == 1 else 'shares'} {spans(numbers, ', ')}"


def _examine(candidate: CheckpointCandidate, view: View, company: Company, verified: bool) -> tuple[float, str, str]:
    """Return when a checkpoint was written, its identity, and a problem, or "". One rank examines each share.

    Args:
        candidate: The checkpoint.
        view: The entries that this rank sees.
        company: The ranks.
        verified: Read every byte.
    """
    mine = []
    for number, reporter in candidate.reporters.items():
        if reporter != company.rank:
            continue
        folder = view.folder / candidate.names[number]
        try:
            manifest = load_manifest(folder)
        except FileNotFoundError:
            mine.append((number, 0.0, "", _GONE))
            continue
        except (CheckpointError, OSError) as error:
            mine.append((number, 0.0, "", in_words(error)))
            continue
        expected = FileShare(candidate.save, number, candidate.count) if number else None
        why = "" if manifest.share == expected else f"{folder / MANIFEST} belongs to another share"
        if verified and not why:
            why = next(iter(check_files(folder, manifest)), "")
        mine.append((number, manifest.when, manifest.identity(), why))
    # Only the reporting ranks read a manifest: a folder that thousands of ranks share is read once.
    found = sorted(each for answer in company.exchange(mine, list[tuple[int, float, str, str]]) for each in answer)
    if troubles := [why for _, _, _, why in found if why]:
        return 0.0, "", troubles[0]
    if len({identity for _, _, identity, _ in found}) > 1:
        return 0.0, "", f"its shares belong to different saves: {', '.join(candidate.names.values())}"
    return found[0][1], found[0][2], ""


def _open(candidate: CheckpointCandidate, identity: str, view: View, company: Company) -> Chosen:
    """Open the checkpoint on each rank, and exchange which rank sees which share.

    A rank that sees no share receives the manifest from the first rank that has one.
    """
    here: dict[int, Path] = {}
    manifest: Manifest | None = None
    trouble = ""
    for number, name in sorted(candidate.names.items()):
        folder = view.folder / name
        try:
            # A folder of this name may hold another checkpoint on this rank. The identity shows it.
            found = load_manifest(folder, sizes=False)
            if found.identity() == identity:
                check_sizes(folder, found)
                manifest, here[number] = found, folder
        # Removed since the search. Whether another rank still has it is checked below.
        except FileNotFoundError:
            continue
        except (CheckpointError, OSError) as error:
            trouble = in_words(error)
    told = company.exchange((sorted(here), trouble), tuple[list[int], str])
    if failed := [(rank, why) for rank, (_, why) in enumerate(told) if why]:
        raise CheckpointError(f"rank {failed[0][0]}: {failed[0][1]}" if company.size > 1 else failed[0][1])
    holders = {number: [rank for rank, (seen, _) in enumerate(told) if number in seen] for number in candidate.names}
    if gone := [number for number, ranks in holders.items() if not ranks]:
        raise CheckpointError(f"{candidate.names[gone[0]]} was removed before step {candidate.step} could be read")
    if not all(seen for seen, _ in told):
        sender = min(ranks[0] for ranks in holders.values())
        encoded = manifest.encode() if manifest is not None and company.rank == sender else None
        # All ranks take part, because every rank has the same `told`.
        sent = company.exchange(encoded, bytes | None)[sender]
        assert sent is not None
        manifest = manifest or decode(view.folder / candidate.names[min(candidate.names)] / MANIFEST, sent)
    assert manifest is not None
    first = min(here or candidate.names)
    return Chosen(here.get(first, view.folder / candidate.names[first]), manifest, here, holders)
