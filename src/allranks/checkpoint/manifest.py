"""What a checkpoint consists of: ``manifest.json``, which is written last and names everything else.

A reader trusts nothing in it: its own digest must be right, and each range must lie in a file of the folder that is as
large as it says, before a byte of memory is taken. The digest finds accidents, not forgery.
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
"""Bytes of a piece that have one hash, so that a part of it can be checked without the rest."""

_LARGEST = 1 << 30  # bytes of a manifest
_MOST = 1 << 62
_LATEST = 1e11  # seconds since 1970: what a calendar has
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
_END = re.compile(rb',"digest":"([0-9a-f]{32})"}\n?\Z')


class Writer(msgspec.Struct, frozen=True):
    """A rank that took part.

    Attributes:
        host: its host.
        pid: its process.
        tree: which of the trees is its state.
    """

    host: str
    pid: int
    tree: int


class FileShare(msgspec.Struct, frozen=True):
    """Which files of a checkpoint a folder has, where hosts have folders of their own.

    Attributes:
        id: of the save: the shares of one checkpoint have the same.
        number: of this share, from 1.
        count: how many make up the checkpoint.
    """

    id: str
    number: int
    count: int


class ManifestFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file of tensors, in the safetensors format.

    Attributes:
        name: in the folder.
        nbytes: of the file.
        head: bytes before the tensors.
        hash: of those.
        rank: who wrote it.
        share: which share it is in; 0 in a checkpoint that has none.
    """

    name: str
    nbytes: int
    head: int
    hash: str
    rank: int
    share: int = 0


class Piece(msgspec.Struct, frozen=True):
    """Where a part of a tensor is: all its elements, in the order of its dimensions.

    Attributes:
        file: which of the files.
        begin: the byte in that file.
        offsets: the part's place in the tensor.
        shape: of the part.
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
        name: its path in the state.
        dtype: torch's name.
        shape: of the whole.
        pieces: that make it up, without overlaps.
        ranks: those whose state it is in, where the others have another tensor of this name; else empty: of all.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    ranks: tuple[int, ...] = ()


class Manifest(msgspec.Struct, frozen=True, omit_defaults=True):
    """All of a checkpoint. Its shares have the same, but for the number of the share.

    Attributes:
        format: the version of this form.
        step: of the training.
        run: of the job that wrote it.
        when: seconds since 1970.
        allranks: the version that wrote it.
        block: bytes that have one hash.
        writers: by rank.
        files: with the tensors.
        tensors: in the order of their names.
        trees: what is not tensors; those of ranks that have the same are one.
        share: what of it is in this folder; None: all.
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
        """Of all files with tensors that are in this folder."""
        return sum(file.nbytes for file in self.files if self.is_here(file))

    @property
    def number(self) -> int:
        """Of the share; 0 where there are none."""
        return 0 if self.share is None else self.share.number

    def is_here(self, file: ManifestFile) -> bool:
        """Whether a file is in this folder."""
        return file.share == self.number

    def identity(self) -> str:
        """The same for all shares of a checkpoint, and for nothing else."""
        alike = None if self.share is None else msgspec.structs.replace(self.share, number=1)
        return xxhash.xxh3_128_hexdigest(msgspec.json.encode(msgspec.structs.replace(self, share=alike)))

    def encode(self) -> bytes:
        body = msgspec.json.encode(self)[:-1]
        return body + b',"digest":"' + xxhash.xxh3_128_hexdigest(body).encode() + b'"}\n'

    def tensors_of(self, rank: int) -> dict[str, Saved]:
        """The tensors in the state of a rank, by name; of rank 0 where there was no such rank."""
        found: dict[str, Saved] = {}
        for wanted in (None, 0, rank):
            for saved in self.tensors:
                if wanted is None:
                    found.setdefault(saved.name, saved)
                elif wanted in saved.ranks:
                    found[saved.name] = saved
        return found

    def tree(self, rank: int) -> Any:
        """The state of a rank, without tensors; of rank 0 where there was no such rank."""
        return self.trees[self.writers[rank if rank < len(self.writers) else 0].tree]


def dtype_of(name: str) -> torch.dtype:
    """torch's dtype.

    Raises:
        CheckpointError: this torch has none of that name.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"{name!r} is no dtype of torch {torch.__version__}")
    return found


def load_manifest(folder: Path, sizes: bool = True) -> Manifest:
    """Reads and checks the manifest of a checkpoint.

    Args:
        folder: the checkpoint.
        sizes: look whether its files are there, and as large as they must be.

    Raises:
        CheckpointError: it is damaged, of a later version, or does not fit the files.
        OSError: it cannot be read; FileNotFoundError where it is not there.
    """
    path = folder / MANIFEST
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode) or found.st_size > _LARGEST:
        raise CheckpointError(f"{path} is no manifest: it is no plain file, or has {found.st_size} bytes")
    manifest = decode(path, path.read_bytes())
    if sizes:
        check_sizes(folder, manifest)
    return manifest


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """That the files of a folder are there, and as large as they must be.

    Raises:
        CheckpointError: one is not.
    """
    for file in manifest.files:
        if manifest.is_here(file):
            _check_size(folder, file)


def decode(path: Path, data: bytes) -> Manifest:
    """A manifest from its bytes, checked but for the sizes of the files.

    Raises:
        CheckpointError: see ``load_manifest``.
    """
    manifest = _decode(path, data)
    _check(path, manifest)
    return manifest


def _decode(path: Path, data: bytes) -> Manifest:
    end = _END.search(data)
    if end is None:
        raise CheckpointError(f"{path} is damaged: it has no digest at its end ({len(data)} bytes)")
    body = data[: end.start()]
    if xxhash.xxh3_128_hexdigest(body).encode() != end[1]:
        raise CheckpointError(f"{path} is damaged: its contents do not have the digest at its end")
    try:
        return msgspec.json.decode(body + b"}", type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a manifest that this version reads: {error}") from None


def _check(path: Path, manifest: Manifest) -> None:
    """That all numbers fit each other."""
    if manifest.format > SHARED_FORMAT:
        raise CheckpointError(
            f"{path} has format {manifest.format}; this allranks reads up to {SHARED_FORMAT}: update it"
        )
    problem = _problem(manifest)
    if problem:
        raise CheckpointError(f"{path} is damaged: {problem}")


def _problem(manifest: Manifest) -> str:
    if not manifest.writers or not manifest.trees or not 0 < manifest.block <= 1 << 30:
        return "it has no writers, no state or no blocks"
    if not all(0 <= writer.tree < len(manifest.trees) for writer in manifest.writers):
        return "a writer's state is not there"
    share = manifest.share or FileShare("", 0, 0)
    if not 0 <= share.number <= share.count or (manifest.share is not None and not share.number):
        return f"share {share.number} of {share.count} is impossible"
    if not (0 <= manifest.step < 10**18 and 0 <= manifest.when < _LATEST):
        return f"step {manifest.step} at {manifest.when} is impossible"
    if len({file.name for file in manifest.files}) < len(manifest.files):
        return "two files have one name"
    for file in manifest.files:
        if not (0 < file.share <= share.count if share.count else file.share == 0):
            return f"the file {file.name[:80]!r} is in share {file.share} of {share.count}"
        if not _PLAIN.fullmatch(file.name) or not 0 <= file.head <= file.nbytes < _MOST:
            return f"the file {file.name[:80]!r} is impossible"
    for saved in manifest.tensors:
        if problem := _tensor_problem(manifest, saved):
            return f"tensor {saved.name[:200]!r}: {problem}"
    if problem := _shared_bytes(manifest):
        return problem
    return next(filter(None, map(tree_problem, manifest.trees)), "")


def _tensor_problem(manifest: Manifest, saved: Saved) -> str:
    size = dtype_of(saved.dtype).itemsize
    if not all(0 <= length < _MOST for length in saved.shape) or math.prod(saved.shape) * size >= _MOST:
        return "its shape is impossible"
    covered = 0
    for piece in saved.pieces:
        if not 0 <= piece.file < len(manifest.files):
            return "its file is not there"
        if not len(piece.shape) == len(piece.offsets) == len(saved.shape) or not all(
            begin >= 0 and length >= 0 and begin + length <= whole
            for begin, length, whole in zip(piece.offsets, piece.shape, saved.shape, strict=True)
        ):
            return "a part of it lies outside"
        file, nbytes = manifest.files[piece.file], math.prod(piece.shape) * size
        if not file.head <= piece.begin or piece.begin + nbytes > file.nbytes:
            return f"a part of it lies outside of {file.name}"
        if len(piece.hashes) != 8 * -(-nbytes // manifest.block):
            return "hashes are missing"
        covered += math.prod(piece.shape)
    if covered != math.prod(saved.shape):
        return "its parts do not make it up"
    return "two parts of it overlap" if overlap([(piece.offsets, piece.shape) for piece in saved.pieces]) else ""


def _shared_bytes(manifest: Manifest) -> str:
    """That no byte is in two parts: so all tensors together are no larger than the files are."""
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
        found = os.lstat(folder / file.name)
    except FileNotFoundError:
        raise CheckpointError(f"{folder / file.name} is missing; rank {file.rank} wrote it") from None
    if problem := size_problem(found, file):
        raise CheckpointError(f"{folder / file.name} {problem}")


def size_problem(found: os.stat_result, file: ManifestFile) -> str:
    """Why something with the name of a file is not that file; "" if it may be."""
    if not stat.S_ISREG(found.st_mode):
        return f"is no plain file; rank {file.rank} wrote one"
    if found.st_size != file.nbytes:
        return f"has {found.st_size} bytes, and must have {file.nbytes}; rank {file.rank} wrote it"
    return ""
