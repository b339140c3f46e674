"""The manifest of a checkpoint: ``manifest.json``, which is written last and lists everything else.

A reader checks everything in it before it allocates memory for tensors. The manifest's own digest must be correct. Each
range must be in a file of the folder, and the file must have the listed size. The digest detects accidents, not
forgery.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import stat
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash

from allranks._base.errors import CheckpointError
from allranks.checkpoint.layout import overlap
from allranks.checkpoint.values import tree_problem

__all__ = [
    "BLOCK",
    "MANIFEST",
    "SHARED_FORMAT",
    "WHOLE_FORMAT",
    "ManifestFile",
    "Manifest",
    "Piece",
    "Saved",
    "FileShare",
    "Writer",
    "check_sizes",
    "decode",
    "dtype_of",
    "load_manifest",
    "size_problem",
]

WHOLE_FORMAT, SHARED_FORMAT = 1, 2
MANIFEST = "manifest.json"
BLOCK = 4 << 20
"""Bytes of a piece that share one hash, so that a part of a piece can be checked without the rest."""

_LARGEST = 1 << 30  # maximum size of a manifest in bytes
_MOST = 1 << 62  # exclusive limit of a dimension, and of a size in bytes
_LATEST = 1e11  # exclusive limit in seconds since 1970, within the range of calendar dates
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
_END = re.compile(rb',"digest":"([0-9a-f]{32})"}\n?\Z')


class Writer(msgspec.Struct, frozen=True):
    """A rank that took part in the save.

    Attributes:
        host: Its host.
        pid: Its process.
        tree: Index of the tree of its state.
    """

    host: str
    pid: int
    tree: int


class FileShare(msgspec.Struct, frozen=True):
    """The share of a checkpoint that a folder has, if hosts have separate folders.

    Attributes:
        id: Id of the save, which all shares of a checkpoint have in common.
        number: Number of this share, from 1.
        count: Number of shares of the checkpoint.
    """

    id: str
    number: int
    count: int


class ManifestFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file of tensors, in the safetensors format.

    Attributes:
        name: Name in the folder.
        nbytes: Size of the file in bytes.
        head: Size of the header before the tensors, in bytes.
        hash: Hash of the header.
        rank: Rank that wrote it.
        share: Number of the share that has it; 0 in a checkpoint without shares.
    """

    name: str
    nbytes: int
    head: int
    hash: str
    rank: int
    share: int = 0


class Piece(msgspec.Struct, frozen=True):
    """Location of a part of a tensor in a file. All its elements are contiguous, in the order of its dimensions.

    Attributes:
        file: Index of the file.
        begin: First byte in that file.
        offsets: Position of the part in the tensor.
        shape: Shape of the part.
        hashes: xxh3_64 of each block of its bytes, as 8 bytes, little-endian.
    """

    file: int
    begin: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    hashes: bytes


class Saved(msgspec.Struct, frozen=True):
    """A tensor.

    Attributes:
        name: Path of the tensor in the state.
        dtype: torch's name of the dtype.
        shape: Shape of the whole tensor.
        pieces: Its parts, without overlaps.
        ranks: Ranks whose state contains it, if other ranks have another tensor of this name. Empty: all ranks.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    ranks: tuple[int, ...] = ()


class Manifest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Contents of a checkpoint. All its shares have the same manifest, except for the number of the share.

    Attributes:
        format: Version of the format.
        step: Step of the training.
        run: Name of the job that wrote it.
        when: Time of the save, in seconds since 1970.
        allranks: Version of allranks that wrote it.
        block: Bytes that share one hash.
        writers: The ranks that wrote it, by rank.
        files: Files with the tensors.
        tensors: Tensors, sorted by name.
        trees: States without their tensors. Ranks with equal trees share one.
        share: The share that is in this folder. None: the whole checkpoint.
    """

    format: int
    step: int
    run: str
    when: float
    allranks: str
    block: int
    writers: tuple[Writer, ...]
    files: tuple[ManifestFile, ...]
    tensors: tuple[Saved, ...]
    trees: tuple[Any, ...]
    share: FileShare | None = None

    @property
    def nbytes(self) -> int:
        """Size in bytes of the files with tensors that are in this folder."""
        return sum(file.nbytes for file in self.files if self.is_here(file))

    @property
    def number(self) -> int:
        """Number of the share; 0 without shares."""
        return 0 if self.share is None else self.share.number

    def is_here(self, file: ManifestFile) -> bool:
        """Return whether a file is in this folder."""
        return file.share == self.number

    def identity(self) -> str:
        """Return an identifier that all shares of a checkpoint have in common, and no other checkpoint has."""
        # The number is the only difference between the manifests of the shares of a save.
        alike = None if self.share is None else msgspec.structs.replace(self.share, number=1)
        return xxhash.xxh3_128_hexdigest(msgspec.json.encode(msgspec.structs.replace(self, share=alike)))

    def encode(self) -> bytes:
        body = msgspec.json.encode(self)[:-1]
        return body + b',"digest":"' + xxhash.xxh3_128_hexdigest(body).encode() + b'"}\n'

    def tensors_of(self, rank: int) -> dict[str, Saved]:
        """Return the tensors in the state of a rank, by name. A rank that did not exist gets the tensors of rank 0."""
        found: dict[str, Saved] = {}
        # Later entries have priority: any rank's tensor, rank 0's, the tensor of this rank.
        for wanted in (None, 0, rank):
            for saved in self.tensors:
                if wanted is None:
                    found.setdefault(saved.name, saved)
                elif wanted in saved.ranks:
                    found[saved.name] = saved
        return found

    def tree(self, rank: int) -> Any:
        """Return the state of a rank without its tensors. A rank that did not exist gets the state of rank 0."""
        return self.trees[self.writers[rank if rank < len(self.writers) else 0].tree]


def dtype_of(name: str) -> torch.dtype:
    """Return torch's dtype of a name.

    Raises:
        CheckpointError: This version of torch has no such dtype.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"torch {torch.__version__} has no dtype {name!r}; update torch")
    return found


def load_manifest(folder: Path, sizes: bool = True) -> Manifest:
    """Read and check the manifest of a checkpoint.

    Args:
        folder: The checkpoint.
        sizes: Also check that its files exist and have the listed sizes.

    Raises:
        CheckpointError: It is damaged, has a later version, or does not match the files.
        OSError: It cannot be read; FileNotFoundError if it does not exist.
    """
    path = folder / MANIFEST
    # Checked before reading: a FIFO would block, and a huge file would fill the memory.
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode) or found.st_size > _LARGEST:
        raise CheckpointError(
            f"{path} is not a manifest: it is not a regular file, or it is too large ({found.st_size} bytes)"
        )
    manifest = decode(path, path.read_bytes())
    if sizes:
        check_sizes(folder, manifest)
    return manifest


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Check that the files of a folder exist and have the listed sizes.

    Raises:
        CheckpointError: A file is missing or has another size.
    """
    for file in manifest.files:
        if manifest.is_here(file):
            _check_size(folder, file)


def decode(path: Path, data: bytes) -> Manifest:
    """Decode and check a manifest. The sizes of the files are not checked.

    Raises:
        CheckpointError: See ``load_manifest``.
    """
    manifest = _decode(path, data)
    _check(path, manifest)
    return manifest


def _decode(path: Path, data: bytes) -> Manifest:
    end = _END.search(data)
    if end is None:
        raise CheckpointError(f"{path} is damaged: it has no digest at its end ({len(data)} bytes)")
    # The digest covers the exact bytes of the file, so it does not depend on how JSON is formatted.
    body = data[: end.start()]
    if xxhash.xxh3_128_hexdigest(body).encode() != end[1]:
        raise CheckpointError(f"{path} is damaged: its contents do not have the digest at its end")
    try:
        return msgspec.json.decode(body + b"}", type=Manifest)
    # RecursionError: JSON that is nested too deeply.
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a manifest that this version of allranks can read: {error}") from None


def _check(path: Path, manifest: Manifest) -> None:
    """Check that all numbers are consistent."""
    if manifest.format > SHARED_FORMAT:
        raise CheckpointError(
            f"{path} has format {manifest.format}, but this version of allranks reads only formats up to"
            f" {SHARED_FORMAT}; update allranks"
        )
    problem = _problem(manifest)
    if problem:
        raise CheckpointError(f"{path} is damaged: {problem}")


def _problem(manifest: Manifest) -> str:
    # The limit of the block size: a reader allocates whole blocks at the edges of a range.
    if not manifest.writers or not manifest.trees or not 0 < manifest.block <= 1 << 30:
        return "it has no writers or no state, or its block size is invalid"
    if not all(0 <= writer.tree < len(manifest.trees) for writer in manifest.writers):
        return "the state of a writer is missing"
    share = manifest.share or FileShare("", 0, 0)
    if not 0 <= share.number <= share.count or (manifest.share is not None and not share.number):
        return f"share {share.number} of {share.count} is invalid"
    if not (0 <= manifest.step < 10**18 and 0 <= manifest.when < _LATEST):
        return f"step {manifest.step} or time {manifest.when} is invalid"
    if len({file.name for file in manifest.files}) < len(manifest.files):
        return "two files have the same name"
    for file in manifest.files:
        if not (0 < file.share <= share.count if share.count else file.share == 0):
            return f"the file {file.name[:80]!r} is in share {file.share} of {share.count}, which does not exist"
        # A name with a slash could refer to a file outside of the folder.
        if not _PLAIN.fullmatch(file.name) or not 0 <= file.head <= file.nbytes < _MOST:
            return f"the name or size of the file {file.name[:80]!r} is invalid"
    for saved in manifest.tensors:
        if problem := _tensor_problem(manifest, saved):
            return f"tensor {saved.name[:200]!r}: {problem}"
    if problem := _shared_bytes(manifest):
        return problem
    return next(filter(None, map(tree_problem, manifest.trees)), "")


def _tensor_problem(manifest: Manifest, saved: Saved) -> str:
    size = dtype_of(saved.dtype).itemsize
    if not all(0 <= length < _MOST for length in saved.shape) or math.prod(saved.shape) * size >= _MOST:
        return "its shape is invalid"
    covered = 0
    for piece in saved.pieces:
        if not 0 <= piece.file < len(manifest.files):
            return "its file is not listed"
        if not len(piece.shape) == len(piece.offsets) == len(saved.shape) or not all(
            begin >= 0 and length >= 0 and begin + length <= whole
            for begin, length, whole in zip(piece.offsets, piece.shape, saved.shape, strict=True)
        ):
            return "a part of it is outside its shape"
        file, nbytes = manifest.files[piece.file], math.prod(piece.shape) * size
        if not file.head <= piece.begin or piece.begin + nbytes > file.nbytes:
            return f"a part of it is outside {file.name}"
        if len(piece.hashes) != 8 * -(-nbytes // manifest.block):
            return "the number of its hashes is wrong"
        covered += math.prod(piece.shape)
    if covered != math.prod(saved.shape):
        return "its parts do not cover its shape"
    return "two parts of it overlap" if overlap([(piece.offsets, piece.shape) for piece in saved.pieces]) else ""


def _shared_bytes(manifest: Manifest) -> str:
    """Check that no byte is in two parts. The tensors together are then not larger than the files."""
    ranges = sorted(
        (piece.file, piece.begin, piece.begin + math.prod(piece.shape) * dtype_of(saved.dtype).itemsize, saved.name)
        for saved in manifest.tensors
        for piece in saved.pieces
        if math.prod(piece.shape)
    )
    for (file, _, end, name), (other, begin, _, following) in itertools.pairwise(ranges):
        if file == other and begin < end:
            return f"tensors {name[:200]!r} and {following[:200]!r} share bytes of {manifest.files[file].name}"
    return ""


def _check_size(folder: Path, file: ManifestFile) -> None:
    try:
        # lstat, because `open_part` does not follow symbolic links either.
        found = os.lstat(folder / file.name)
    except FileNotFoundError:
        raise CheckpointError(f"{folder / file.name} is missing; rank {file.rank} wrote it") from None
    if problem := size_problem(found, file):
        raise CheckpointError(f"{folder / file.name} {problem}")


def size_problem(found: os.stat_result, file: ManifestFile) -> str:
    """Return why a file found under this name is not the listed file; "" if it may be."""
    if not stat.S_ISREG(found.st_mode):
        return f"is not a regular file; rank {file.rank} wrote one"
    if found.st_size != file.nbytes:
        return f"has {found.st_size} bytes instead of {file.nbytes}; rank {file.rank} wrote it"
    return ""
