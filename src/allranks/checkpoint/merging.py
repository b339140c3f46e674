"""Merging of the shares that hosts with separate folders have written into one ordinary checkpoint."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from allranks._base.errors import CheckpointError, UsageError, rank_list, spans
from allranks.checkpoint import folder_claims, folders
from allranks.checkpoint.inventory import CheckpointCandidate, by_step, list_path
from allranks.checkpoint.manifest import WHOLE_FORMAT, Manifest, load_manifest
from allranks.checkpoint.verifying import check_files

__all__ = ["merge", "merge_shares"]

# Another file system, one without hard links, or a file with too many links.
_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK)


def merge(*sources: folders.PathLike, into: folders.PathLike, step: int | None = None) -> Path:
    """Combine the shares of a checkpoint into one checkpoint. One process calls it.

    The files are hard-linked if the file system supports this, and copied otherwise. Every byte is checked before the
    checkpoint gets its name. The shares stay in their folders.

    Args:
        sources: A folder of checkpoints of each host, or one share each.
        into: The folder of checkpoints that receives the result. It is created if it does not exist.
        step: Step of the training. None: the newest step with all its shares.

    Returns:
        The checkpoint.

    Raises:
        UsageError: ``sources`` has no shares, or shares of different saves; or a job saves into ``into``.
        CheckpointError: A share is missing or damaged. The message names the share and its writer.
        OSError: A file cannot be read or written.
    """
    return merge_shares(sources, into, step)


def merge_shares(
    sources: Sequence[folders.PathLike],
    into: folders.PathLike,
    step: int | None,
    progress: Callable[[str, int, int], None] = lambda words, done, total: None,
) -> Path:
    """See ``merge``.

    Args:
        sources: See ``merge``.
        into: See ``merge``.
        step: See ``merge``.
        progress: Receives the current action, the bytes done, and the total. Each byte counts twice: it is copied or
            linked, and read.
    """
    candidate, share_folders = _find_complete([Path(source) for source in sources], step)
    manifests = _manifests(candidate, share_folders)
    target = Path(os.path.realpath(into))
    with contextlib.ExitStack() as held:
        held.enter_context(folders.hold_folder(target, folder_claims.run_id(), stays=False))
        if existing := [one.path for one in folders.find(target) if one.step == candidate.step and one.share is None]:
            raise UsageError(
                f"checkpoint.merge: a checkpoint of step {candidate.step} already exists: {existing[0]}\n"
                "  Remove it, or merge into another folder."
            )
        partial = folders.new_partial(target, candidate.step)
        # After `complete`, the folder has another name, and this does nothing.
        held.callback(shutil.rmtree, partial, ignore_errors=True)
        first = manifests[1]
        files = tuple(msgspec.structs.replace(file, share=0) for file in first.files)
        merged = msgspec.structs.replace(first, format=WHOLE_FORMAT, files=files, share=None)
        copied_bytes = 0
        for file in first.files:
            progress("copying", copied_bytes, 2 * merged.nbytes)
            _link_or_copy(share_folders[file.share] / file.name, partial / file.name)
            copied_bytes += file.nbytes
        if problems := check_files(partial, merged, lambda done, total: progress("reading", total + done, 2 * total)):
            raise CheckpointError(
                f"checkpoint.merge: step {candidate.step}: {problems[0]}.\n"
                "  Copy this share again from the host that wrote it, and merge again."
            )
        # The names of the files must be on the disk before the manifest that lists them.
        folders.sync_folder(partial)
        return folders.complete(partial, merged)


def _find_complete(sources: Sequence[Path], step: int | None) -> tuple[CheckpointCandidate, dict[int, Path]]:
    """Return the save whose shares all exist, and the path of each share."""
    listings = []
    for source in sources:
        if not source.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(source))
        listings.append(list_path(source))
    if len(pinned_names := {listing.pinned for listing in listings if listing.pinned}) > 1:
        raise UsageError(
            f"checkpoint.merge: the paths are shares of different saves: {', '.join(map(str, sources))}.\n"
            "  Pass the shares of one save, or the folders that contain them."
        )
    pinned_name = next(iter(pinned_names), "")
    reports = {
        number: [
            one
            for one in listing.entries
            if one.share is not None and (not pinned_name or pinned_name == f"save {one.share.id}")
        ]
        for number, listing in enumerate(listings)
    }
    candidates = [each for of_step in by_step(reports, step) for each in of_step]
    if not candidates:
        of_step = "" if step is None else f" of step {step}"
        raise UsageError(
            f"checkpoint.merge: there is no share{of_step} in {', '.join(map(str, sources))}.\n"
            "  Pass the folders into which the hosts have saved. A checkpoint without shares needs no merge."
        )
    newest = [each for each in candidates if each.step == candidates[0].step]
    complete = [each for each in newest if not each.missing]
    if not complete:
        older = next((each.step for each in candidates if not each.missing), None)
        raise CheckpointError(_describe_missing(newest[0], [listing.folder for listing in listings], older))
    found = [
        (each, {n: listings[each.reporters[n]].folder / name for n, name in each.names.items()}) for each in complete
    ]
    return max(found, key=lambda each: load_manifest(each[1][1]).when)  # a step may have been saved twice


def _describe_missing(candidate: CheckpointCandidate, share_folders: Sequence[Path], older: int | None) -> str:
    """Describe the missing shares, their writers, and an older step with all its shares."""
    number, name = next(iter(candidate.names.items()))
    manifest = load_manifest(share_folders[candidate.reporters[number]] / name, sizes=False)
    lost = ["share " if len(candidate.missing) == 1 else "shares ", spans(candidate.missing, ", ")]
    ranks = sorted({file.rank for file in manifest.files if file.share in candidate.missing})
    hosts = ", ".join(dict.fromkeys(manifest.writers[rank].host for rank in ranks))
    written = f" (written by {rank_list(ranks)} on {hosts})" if ranks else ""
    return (
        f"checkpoint.merge: step {candidate.step} is incomplete in {', '.join(map(str, share_folders))}; missing:"
        f" {''.join(lost)} of {candidate.count}{written}"
        ".\n  Pass the folders with the missing shares, too."
        + ("" if older is None else f" All shares of step {older} exist. To merge it, pass step={older}.")
    )


def _manifests(candidate: CheckpointCandidate, share_folders: dict[int, Path]) -> dict[int, Manifest]:
    found = {number: load_manifest(path) for number, path in share_folders.items()}
    if len({manifest.identity() for manifest in found.values()}) > 1:
        listed = ", ".join(map(str, share_folders.values()))
        raise CheckpointError(
            f"checkpoint.merge: the shares belong to different saves: {listed}.\n"
            "  Copy the shares of one save again from the hosts that wrote them."
        )
    return found


def _link_or_copy(source: Path, target: Path) -> None:
    """Link or copy a file, and wait until it is on the disk."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copyfile(source, target)
    # Also of a linked file: another program may have just copied it to this host.
    with open(target, "rb") as file:
        os.fsync(file.fileno())
