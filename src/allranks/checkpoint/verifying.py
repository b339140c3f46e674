"""Whether a checkpoint is what was written: every byte of every file is read."""

from __future__ import annotations

import math
import os
from pathlib import Path

import xxhash

from allranks._base.errors import CheckpointError
from allranks.checkpoint import folders, parts
from allranks.checkpoint.manifest import Manifest, dtype_of, load_manifest

__all__ = ["verify"]


def verify(path: folders.PathLike) -> list[str]:
    """Reads all of a checkpoint.

    Args:
        path: its folder, or a folder of checkpoints: then the one that ``latest`` gives.

    Returns:
        What is wrong with it, a line each, which names the file, the tensor and the rank that wrote it. Empty: nothing.

    Raises:
        FileNotFoundError: there is no such checkpoint.
    """
    folder = Path(path)
    if folders.is_folder_of_checkpoints(folder):
        newest = folders.latest(folder)
        if newest is None:
            raise FileNotFoundError(f"there is no complete checkpoint in {folder}")
        folder = newest.path
    try:
        manifest = load_manifest(folder, sizes=False)
    except CheckpointError as error:
        return [str(error)]
    problems = []
    for number in range(len(manifest.files)):
        problems += _verify_file(folder, manifest, number)
    return problems


def _verify_file(folder: Path, manifest: Manifest, number: int) -> list[str]:
    file = manifest.files[number]
    path = folder / file.name
    try:
        nbytes = os.path.getsize(path)
    except FileNotFoundError:
        return [f"{file.name} is missing; rank {file.rank} wrote it"]
    if nbytes != file.nbytes:
        return [f"{file.name} has {nbytes} bytes, and must have {file.nbytes}; rank {file.rank} wrote it"]
    problems = []
    with parts.open_part(folder, file) as fd:
        if xxhash.xxh3_64_hexdigest(os.pread(fd, file.head, 0)) != file.hash:
            problems.append(f"{file.name}: its head (bytes 0 to {file.head}) is not what rank {file.rank} wrote")
        for saved in manifest.tensors:
            for piece in saved.pieces:
                if piece.file == number:
                    row = manifest.block
                    total = math.prod(piece.shape) * dtype_of(saved.dtype).itemsize
                    for begin in range(0, total, row):
                        end = min(begin + row, total)
                        try:
                            parts.read_rows(fd, manifest, saved, piece, begin, end, memoryview(bytearray(end - begin)))
                        except CheckpointError as error:
                            problems.append(str(error))
    return problems
