"""Verification of a checkpoint: every byte of every file is read."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import xxhash

from allranks._base.errors import CheckpointError
from allranks.checkpoint import folders, parts
from allranks.checkpoint.manifest import Manifest, ManifestFile, Piece, Saved, dtype_of, load_manifest
from allranks.checkpoint.participants import error_text

__all__ = ["check", "check_files", "verify"]

_STEP = 1 << 20  # bytes per read


def verify(path: folders.PathLike) -> list[str]:
    """Read all of a checkpoint, or of the share of it that the folder has.

    Args:
        path: Folder of the checkpoint, or a folder of checkpoints, of which the newest is read.

    Returns:
        The problems, one line each, with the file, the tensor and the rank that wrote it. Empty: no problem.

    Raises:
        FileNotFoundError: There is no such checkpoint.
    """
    folder = Path(path)
    if folders.is_folder_of_checkpoints(folder):
        newest = folders.newest(folder)
        if newest is None:
            raise FileNotFoundError(
                f"there is no complete checkpoint in {folder}.\n  Pass the folder that was passed to checkpoint.save."
            )
        folder = newest.path
    return check(folder)


def check(folder: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> list[str]:
    """Read all of a checkpoint; see ``verify``.

    Args:
        folder: The checkpoint.
        progress: Receives the number of bytes that have been read, and the total.
    """
    try:
        # Sizes are checked per file below, so that one problem does not hide the others.
        manifest = load_manifest(folder, sizes=False)
    except CheckpointError as error:
        return [str(error)]
    return check_files(folder, manifest, progress)


def check_files(
    folder: Path, manifest: Manifest, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[str]:
    """Read all files of a manifest that are in its folder; see ``check``."""
    problems, total, done = [], manifest.nbytes, 0
    for number, file in enumerate(manifest.files):
        if not manifest.is_here(file):
            continue
        try:
            with parts.open_part(folder, file) as source:
                if problem := _head_problem(source, file):
                    problems.append(problem)
                done += file.head
                for saved, piece, begin, end in _blocks(manifest, number):
                    try:
                        # One error per block, so that all damaged tensors are listed.
                        parts.read_rows(source, manifest, saved, piece, begin, end, memoryview(bytearray(end - begin)))
                    except CheckpointError as error:
                        problems.append(str(error))
                    done += end - begin
                    progress(done, total)
        except CheckpointError as error:  # the file cannot be opened
            problems.append(str(error))
    return problems


def _head_problem(source: parts.LocalFile, file: ManifestFile) -> str:
    head = f"{file.name}: its header (bytes 0 to {file.head})"
    found = xxhash.xxh3_64()
    try:
        for begin in range(0, file.head, _STEP):
            found.update(os.pread(source.fd, min(_STEP, file.head - begin), begin))
    except OSError as error:
        return f"{head} cannot be read: {error_text(error)}; rank {file.rank} wrote it"
    return "" if found.hexdigest() == file.hash else f"{head} differs from what rank {file.rank} wrote"


def _blocks(manifest: Manifest, number: int) -> Iterator[tuple[Saved, Piece, int, int]]:
    """Yield the contents of a file, one block at a time."""
    for saved in manifest.tensors:
        for piece in saved.pieces:
            if piece.file == number:
                nbytes = math.prod(piece.shape) * dtype_of(saved.dtype).itemsize
                for begin in range(0, nbytes, manifest.block):
                    yield saved, piece, begin, min(begin + manifest.block, nbytes)
