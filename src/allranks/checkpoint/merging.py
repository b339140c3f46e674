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
from allranks.checkpoint import folders, owners
from allranks.checkpoint.inventory import CheckpointCandidate, by_step, look
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
    candidate, places = _candidate([Path(source) for source in sources], step)
    manifests = _manifests(candidate, places)
    target = Path(os.path.realpath(into))
    with contextlib.ExitStack() as held:
        held.enter_context(folders.holding(target, owners.run_id(), stays=False))
        if there := [one.path for one in folders.find(target) if one.step == candidate.step and one.share is None]:
            raise UsageError(
                f"checkpoint.merge: a checkpoint of step {candidate.step} already exists: {there[0]}\n"
                "  Remove it, or merge into another folder."
            )
        partial = folders.new_partial(target, candidate.step)
        # After `complete`, the folder has another name, and this does nothing.
        held.callback(shutil.rmtree, partial, ignore_errors=True)
        first = manifests[1]
        files = tuple(msgspec.structs.replace(file, share=0) for file in first.files)
        merged = msgspec.structs.replace(first, format=WHOLE_FORMAT, files=files, share=None)
        taken = 0
        for file in first.files:
            progress("copying", taken, 2 * merged.nbytes)
            _take(places[file.share] / file.name, partial / file.name)
            taken += file.nbytes
        if problems := check_files(partial, merged, lambda done, total: progress("reading", total + done, 2 * total)):
            raise CheckpointError(f"checkpoint.merge: step {candidate.step}: {problems[0]}")
        # The names of the files must be on the disk before the manifest that lists them.
        folders.sync_folder(partial)
        return folders.complete(partial, merged)


def _candidate(sources: Sequence[Path], step: int | None) -> tuple[CheckpointCandidate, dict[int, Path]]:
    """Return the save whose shares all exist, and the path of each share."""
    views = []
    for source in sources:
        if not source.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(source))
        views.append(look(source))
    if len(pins := {view.pin for view in views if view.pin}) > 1:
        raise UsageError(f"checkpoint.merge: the paths are shares of different saves: {', '.join(map(str, sources))}")
    only = next(iter(pins), "")
    reports = {
        number: [one for one in view.entries if one.share is not None and (not only or only == f"save {one.share.id}")]
        for number, view in enumerate(views)
    }
    candidates = [each for of_step in by_step(reports, step) for each in of_step]
    if not candidates:
        of_step = "" if step is None else f" of step {step}"
        raise UsageError(f"checkpoint.merge: there is no share{of_step} in {', '.join(map(str, sources))}")
    newest = [each for each in candidates if each.step == candidates[0].step]
    whole = [each for each in newest if not each.missing]
    if not whole:
        older = next((each.step for each in candidates if not each.missing), None)
        raise CheckpointError(_words(newest[0], [view.folder for view in views], older))
    found = [(each, {n: views[each.reporters[n]].folder / name for n, name in each.names.items()}) for each in whole]
    return max(found, key=lambda each: load_manifest(each[1][1]).when)  # a step may have been saved twice


def _words(candidate: CheckpointCandidate, places: Sequence[Path], older: int | None) -> str:
    """Describe the missing shares, their writers, and an older step with all its shares."""
    number, name = next(iter(candidate.names.items()))
    manifest = load_manifest(places[candidate.reporters[number]] / name, sizes=False)
    lost = ["share " if len(candidate.missing) == 1 else "shares ", spans(candidate.missing, ", ")]
    ranks = sorted({file.rank for file in manifest.files if file.share in candidate.missing})
    hosts = ", ".join(dict.fromkeys(manifest.writers[rank].host for rank in ranks))
    written = f" (written by {rank_list(ranks)} on {hosts})" if ranks else ""
    return (
        f"checkpoint.merge: step {candidate.step} is incomplete in {', '.join(map(str, places))}; missing:"
        f" {''.join(lost)} of {candidate.count}{written}"
        + ("" if older is None else f".\n  All shares of step {older} exist. To merge it, pass step={older}.")
    )


def _manifests(candidate: CheckpointCandidate, places: dict[int, Path]) -> dict[int, Manifest]:
    found = {number: load_manifest(path) for number, path in places.items()}
    if len({manifest.identity() for manifest in found.values()}) > 1:
        listed = ", ".join(map(str, places.values()))
        raise CheckpointError(f"checkpoint.merge: the shares belong to different saves: {listed}")
    return found


def _take(source: Path, target: Path) -> None:
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
