"""The files with tensors: safetensors, hashed while they are written, and checked while they are read.

A file that is written is on the disk when ``write_part`` returns. A block is hashed just before it is written, so that
the copy into the page cache finds it in the processor's cache, and the disk is told to begin with it at once: the fsync
at the end has little left to wait for. The large calls (hash, write, read) run without the GIL.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import math
import os
import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import msgspec
import torch
import xxhash

from allranks._base.errors import CheckpointError
from allranks.checkpoint.company import in_words
from allranks.checkpoint.folders import write_all
from allranks.checkpoint.layout import LINE, SaveJob
from allranks.checkpoint.manifest import BLOCK, Manifest, ManifestFile, Piece, Saved, dtype_of, size_problem

__all__ = ["KINDS", "OTHERS", "LocalFile", "Source", "open_part", "read_rows", "write_part"]

KINDS = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
"""safetensors' names; tensors of other dtypes are there as bytes, and the manifest has their dtype."""

OTHERS = "dtypes"
"""In the metadata of a file: the dtype and the shape of those tensors."""

_libc = ctypes.CDLL(None, use_errno=True)
_BEGIN_WRITING = 2  # SYNC_FILE_RANGE_WRITE
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_STEP = 1 << 20  # bytes that are read at a time
_READERS = 2  # threads: hashing takes about half as long as reading from the page cache
_MANY_BLOCKS = 3  # minimum for two threads: starting them takes 0.1 ms, reading a block 1 ms
_HEAD_SIZE = 8  # bytes, little-endian: of the JSON that follows


def write_part(
    folder: Path, jobs: Sequence[SaveJob], step: int, rank: int, views: Iterable[memoryview]
) -> tuple[ManifestFile, list[bytes]]:
    """Writes the file of a rank, and waits until the disk has it.

    Args:
        folder: of the checkpoint.
        jobs: what is written, in the order of the file.
        step: of the training.
        rank: this one.
        views: the bytes of each job. Each is used up before the next is asked for.

    Returns:
        The file, and the hashes of the blocks of each job, as ``Piece.hashes``.

    Raises:
        OSError: it could not be written; FileExistsError where it is there already.
    """
    head = _head_of(jobs, step, rank)
    name = f"part-{rank:05}.safetensors"
    hashes, at = [], len(head)
    with open(folder / name, "xb", buffering=0) as file:
        fd = file.fileno()
        _reserve(fd, at + sum(job.offer.nbytes for job in jobs))
        write_all(fd, memoryview(head))
        for view in views:
            found = array.array("Q")
            for begin in range(0, len(view), BLOCK):
                block = view[begin : begin + BLOCK]
                found.append(xxhash.xxh3_64_intdigest(block))
                write_all(fd, block)
                _libc.sync_file_range(fd, ctypes.c_int64(at), ctypes.c_int64(len(block)), _BEGIN_WRITING)
                at += len(block)
            if sys.byteorder == "big":
                found.byteswap()
            hashes.append(found.tobytes())
        os.fsync(fd)
    return ManifestFile(name, at, len(head), xxhash.xxh3_64_hexdigest(head), rank), hashes


def _head_of(jobs: Sequence[SaveJob], step: int, rank: int) -> bytes:
    """What is before the tensors of a file."""
    about = {"format": "pt", "step": str(step), "rank": str(rank)}
    entries: dict[str, object] = {"__metadata__": about}
    others: dict[str, tuple[str, tuple[int, ...]]] = {}
    for job in jobs:
        offer = job.offer
        kind, key = KINDS.get(offer.dtype), job.key
        while key in entries:  # a tensor named "__metadata__", or "x#3" beside what rank 3 has as "x"
            key += "~"
        if kind is None:
            others[key] = (offer.dtype, offer.part)
        entries[key] = {
            "dtype": kind or "U8",
            "shape": list(offer.part) if kind else [offer.nbytes],
            "data_offsets": [job.begin, job.begin + offer.nbytes],
        }
    if others:
        about[OTHERS] = msgspec.json.encode(others).decode()
    text = msgspec.json.encode(entries)
    text += b" " * (-(_HEAD_SIZE + len(text)) % LINE)
    return len(text).to_bytes(_HEAD_SIZE, "little") + text


def _reserve(fd: int, nbytes: int) -> None:
    """Takes the room on the disk, where the file system can: so a disk that is too full is known beforehand."""
    if _libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)) and ctypes.get_errno() in _FULL:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class Source(Protocol):
    """What the bytes of a file are read from."""

    def read(self, where: int, view: memoryview, ahead: int) -> int:
        """Fills a view with bytes of the file.

        Args:
            where: the first.
            view: gets them.
            ahead: up to where the bytes will be read next.

        Returns:
            Their hash; -1 if the file ends before.
        """


class LocalFile:
    """A file that is open.

    Attributes:
        fd: its descriptor.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def read(self, where: int, view: memoryview, ahead: int) -> int:
        """See ``Source``. Hashes each part while the processor's cache has it."""
        done, found = 0, xxhash.xxh3_64()
        while done < len(view):
            got = os.preadv(self.fd, [view[done : done + _STEP]], where + done)
            if not got:
                return -1
            found.update(view[done : done + got])
            done += got
        return found.intdigest()


@contextlib.contextmanager
def open_part(folder: Path, file: ManifestFile) -> Iterator[LocalFile]:
    """A file to read from.

    Raises:
        CheckpointError: it is not there, no plain file, of another size, or cannot be opened. Names who wrote it.
    """
    path = folder / file.name
    try:  # what waits for a writer (a FIFO) is opened at once, and refused
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; rank {file.rank} wrote it") from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CheckpointError(f"{path} is no plain file; rank {file.rank} wrote one") from None
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; rank {file.rank} wrote it") from error
    try:
        if problem := size_problem(os.fstat(fd), file):
            raise CheckpointError(f"{path} {problem}")
        yield LocalFile(fd)
    finally:
        os.close(fd)


def read_rows(
    source: Source, manifest: Manifest, saved: Saved, piece: Piece, begin: int, end: int, into: memoryview
) -> None:
    """Reads bytes of a piece, and checks them.

    Args:
        source: its file.
        manifest: of the checkpoint.
        saved: the tensor.
        piece: the part of it.
        begin: the first byte of the piece.
        end: the byte after the last.
        into: gets them.

    Raises:
        CheckpointError: they are not what was written.
    """
    block, nbytes = manifest.block, _nbytes_of(saved, piece, manifest)
    hashes = memoryview(piece.hashes)
    ahead = piece.begin + min(-(-end // block) * block, nbytes)
    numbers = range(begin // block, -(-end // block))
    blocks: list[tuple[int, memoryview]] = []
    for number in numbers:
        first, last = number * block, min((number + 1) * block, nbytes)
        inside = first >= begin and last <= end
        view = into[first - begin : last - begin] if inside else memoryview(bytearray(last - first))
        blocks.append((piece.begin + first, view))
    with contextlib.closing(_read_blocks(source, blocks, ahead)) as found:
        for number, (_, view) in zip(numbers, blocks, strict=True):
            first, last = number * block, number * block + len(view)
            try:
                is_right = next(found) == int.from_bytes(hashes[8 * number : 8 * number + 8], "little")
            except OSError as error:
                raise damaged(manifest, saved, piece, first, last, in_words(error)) from error
            if not is_right:
                raise damaged(manifest, saved, piece, first, last)
            if first < begin or last > end:
                low, high = max(first, begin), min(last, end)
                into[low - begin : high - begin] = view[low - first : high - first]


def _read_blocks(source: Source, blocks: Sequence[tuple[int, memoryview]], ahead: int) -> Generator[int, None, None]:
    """Read blocks of a file and yield the hash of each, in order.

    Two threads read and hash if this process may use two CPUs, which torch's number of threads indicates.

    Args:
        source: the file.
        blocks: the position of each block, and the memory that receives it.
        ahead: see ``Source.read``.
    """

    def read(block: tuple[int, memoryview]) -> int:
        return source.read(*block, ahead)

    is_worthwhile = isinstance(source, LocalFile) and len(blocks) >= _MANY_BLOCKS
    if not is_worthwhile or torch.get_num_threads() < _READERS:
        yield from map(read, blocks)
        return
    threads = ThreadPoolExecutor(_READERS, "allranks-checkpoint-read")
    try:
        found = threads.map(read, blocks)
    except RuntimeError:  # the system permits no further thread
        threads.shutdown(cancel_futures=True)
        found = map(read, blocks)
    try:
        yield from found
    finally:
        # Wait also after an error: the caller may free the memory that the threads write.
        threads.shutdown(cancel_futures=True)


def _nbytes_of(saved: Saved, piece: Piece, manifest: Manifest) -> int:
    return math.prod(piece.shape) * dtype_of(saved.dtype).itemsize


def damaged(manifest: Manifest, saved: Saved, piece: Piece, begin: int, end: int, why: str = "") -> CheckpointError:
    """The error of bytes that are not what was written, or cannot be read: names file, tensor, and rank."""
    file = manifest.files[piece.file]
    writer = manifest.writers[file.rank] if 0 <= file.rank < len(manifest.writers) else None
    who = f"rank {file.rank}" + (f" ({writer.host}, pid {writer.pid})" if writer else "")
    where = f"bytes {piece.begin + begin} to {piece.begin + end}"
    what = f"cannot be read in {where} ({why})" if why else f"is damaged in {where} (it is not what was written)"
    return CheckpointError(f"step {manifest.step}: {file.name} {what}: tensor {saved.name!r}, written by {who}")
