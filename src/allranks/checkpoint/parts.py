"""Files with tensors: safetensors, hashed during the write, and checked during the read.

A file is on the disk when ``write_part`` returns. A block is hashed just before it is written, so that the copy into
the page cache finds it in the processor's cache. The kernel is requested to start writing the block to the disk
immediately, so the fsync at the end has little left to wait for. The large calls (hash, write, read) run without the
GIL.
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
from allranks.checkpoint.folders import write_all
from allranks.checkpoint.layout import CACHE_LINE_BYTES, SaveJob
from allranks.checkpoint.manifest import BLOCK, Manifest, ManifestFile, Piece, Saved, dtype_of, size_problem
from allranks.checkpoint.participants import error_text

__all__ = ["SAFETENSORS_DTYPES", "DTYPES_KEY", "LocalFile", "Source", "open_part", "read_rows", "write_part"]

SAFETENSORS_DTYPES = {
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
"""Names in safetensors. Tensors of other dtypes are stored as bytes, and the manifest has their dtype."""

DTYPES_KEY = "dtypes"
"""Key in the metadata of a file: the dtype and shape of the tensors that are stored as bytes."""

_libc = ctypes.CDLL(None, use_errno=True)
_BEGIN_WRITING = 2  # SYNC_FILE_RANGE_WRITE
# Errors of a full disk, an exceeded quota or size limit. Other errors of fallocate are ignored.
_NO_SPACE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_READ_BYTES = 1 << 20  # bytes per read
_READERS = 2  # threads: hashing takes about half as long as reading from the page cache
_MIN_THREADED_BLOCKS = 3  # minimum for two threads: starting them takes 0.1 ms, reading a block 1 ms
_HEAD_SIZE = 8  # bytes of the length of the JSON header, little-endian


def write_part(
    folder: Path, jobs: Sequence[SaveJob], step: int, rank: int, views: Iterable[memoryview]
) -> tuple[ManifestFile, list[bytes]]:
    """Write the file of a rank, and wait until it is on the disk.

    Args:
        folder: Folder of the checkpoint.
        jobs: The parts to write, in the order of the file.
        step: Step of the training.
        rank: This rank.
        views: Bytes of each job. Each view is consumed before the next one is requested.

    Returns:
        The file, and the hashes of the blocks of each job, as ``Piece.hashes``.

    Raises:
        OSError: The file could not be written; FileExistsError if it exists.
    """
    head = _head_of(jobs, step, rank)
    name = f"part-{rank:05}.safetensors"
    hashes, position = [], len(head)
    # Exclusive: the file of another rank or save must never be overwritten.
    with open(folder / name, "xb", buffering=0) as file:
        fd = file.fileno()
        _reserve(fd, position + sum(job.description.nbytes for job in jobs))
        write_all(fd, memoryview(head))
        for view in views:
            block_hashes = array.array("Q")
            for begin in range(0, len(view), BLOCK):
                block = view[begin : begin + BLOCK]
                block_hashes.append(xxhash.xxh3_64_intdigest(block))
                write_all(fd, block)
                # Start the write to the disk now, so that the fsync at the end has little left to wait for.
                _libc.sync_file_range(fd, ctypes.c_int64(position), ctypes.c_int64(len(block)), _BEGIN_WRITING)
                position += len(block)
            # Hashes are little-endian in every manifest.
            if sys.byteorder == "big":
                block_hashes.byteswap()
            hashes.append(block_hashes.tobytes())
        os.fsync(fd)
    return ManifestFile(name, position, len(head), xxhash.xxh3_64_hexdigest(head), rank), hashes


def _head_of(jobs: Sequence[SaveJob], step: int, rank: int) -> bytes:
    """Return the header of a file, which precedes the tensors."""
    about = {"format": "pt", "step": str(step), "rank": str(rank)}
    entries: dict[str, object] = {"__metadata__": about}
    others: dict[str, tuple[str, tuple[int, ...]]] = {}
    for job in jobs:
        description = job.description
        kind, key = SAFETENSORS_DTYPES.get(description.dtype), job.key
        while key in entries:  # a tensor named "__metadata__", or "x#3" next to the key of rank 3's "x"
            key += "~"
        if kind is None:
            others[key] = (description.dtype, description.part)
        entries[key] = {
            "dtype": kind or "U8",
            "shape": list(description.part) if kind else [description.nbytes],
            "data_offsets": [job.begin, job.begin + description.nbytes],
        }
    if others:
        about[DTYPES_KEY] = msgspec.json.encode(others).decode()
    text = msgspec.json.encode(entries)
    # The tensors then begin at a cache line, as in memory: a load of 100 MB took 10.5 ms instead of 14.7 ms.
    text += b" " * (-(_HEAD_SIZE + len(text)) % CACHE_LINE_BYTES)
    return len(text).to_bytes(_HEAD_SIZE, "little") + text


def _reserve(fd: int, nbytes: int) -> None:
    """Reserve disk space, if the file system supports it, so that a full disk is detected before the write."""
    if _libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)) and ctypes.get_errno() in _NO_SPACE_ERRORS:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class Source(Protocol):
    """Source of the bytes of a file."""

    def read(self, where: int, view: memoryview, ahead: int) -> int:
        """Fill a view with bytes of the file.

        Args:
            where: Position of the first byte.
            view: Receives the bytes.
            ahead: End of the range that the caller will read next.

        Returns:
            Hash of the bytes; -1 if the file ends earlier.
        """


class LocalFile:
    """An open file.

    Attributes:
        fd: Its descriptor.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def read(self, where: int, view: memoryview, ahead: int) -> int:
        """See ``Source``. Each part is hashed while it is in the processor's cache."""
        done, found = 0, xxhash.xxh3_64()
        while done < len(view):
            # preadv with a position: two threads read the same descriptor without sharing a file offset.
            got = os.preadv(self.fd, [view[done : done + _READ_BYTES]], where + done)
            if not got:
                return -1
            found.update(view[done : done + got])
            done += got
        return found.intdigest()


@contextlib.contextmanager
def open_part(folder: Path, file: ManifestFile) -> Iterator[LocalFile]:
    """Open a file of a checkpoint for reading.

    Raises:
        CheckpointError: It is missing, not a plain file, of another size, or cannot be opened. The message names its
            writer.
    """
    path = folder / file.name
    # O_NONBLOCK: to open a FIFO without a writer would block. The check of the file type below rejects it.
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; rank {file.rank} wrote it") from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CheckpointError(f"{path} is not a regular file; rank {file.rank} wrote one") from None
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; rank {file.rank} wrote it") from error
    try:
        # fstat of the open file: between a check by name and the open, the file could be replaced.
        if problem := size_problem(os.fstat(fd), file):
            raise CheckpointError(f"{path} {problem}")
        yield LocalFile(fd)
    finally:
        os.close(fd)


def read_rows(
    source: Source, manifest: Manifest, saved: Saved, piece: Piece, begin: int, end: int, into: memoryview
) -> None:
    """Read and check bytes of a piece.

    Args:
        source: File of the piece.
        manifest: Manifest of the checkpoint.
        saved: The tensor.
        piece: The part of the tensor.
        begin: First byte in the piece.
        end: Byte after the last one.
        into: Receives the bytes.

    Raises:
        CheckpointError: The bytes are not the ones that were written.
    """
    block, nbytes = manifest.block, _nbytes_of(saved, piece, manifest)
    hashes = memoryview(piece.hashes)
    ahead = piece.begin + min(-(-end // block) * block, nbytes)
    numbers = range(begin // block, -(-end // block))
    blocks: list[tuple[int, memoryview]] = []
    for number in numbers:
        first, last = number * block, min((number + 1) * block, nbytes)
        # A hash covers a whole block, so a block at the edge of the range is read completely into extra memory.
        inside = first >= begin and last <= end
        view = into[first - begin : last - begin] if inside else memoryview(bytearray(last - first))
        blocks.append((piece.begin + first, view))
    with contextlib.closing(_read_blocks(source, blocks, ahead)) as digests:
        for number, (_, view) in zip(numbers, blocks, strict=True):
            first, last = number * block, number * block + len(view)
            try:
                is_right = next(digests) == int.from_bytes(hashes[8 * number : 8 * number + 8], "little")
            except OSError as error:
                raise damaged(manifest, saved, piece, first, last, error_text(error)) from error
            if not is_right:
                raise damaged(manifest, saved, piece, first, last)
            if first < begin or last > end:
                low, high = max(first, begin), min(last, end)
                into[low - begin : high - begin] = view[low - first : high - first]


def _read_blocks(source: Source, blocks: Sequence[tuple[int, memoryview]], ahead: int) -> Generator[int, None, None]:
    """Read blocks of a file and yield the hash of each, in order.

    Two threads read and hash if this process may use two CPUs, which torch's number of threads indicates.

    Args:
        source: The file.
        blocks: Position of each block, and the memory that receives it.
        ahead: See ``Source.read``.
    """

    def read(block: tuple[int, memoryview]) -> int:
        return source.read(*block, ahead)

    # A remote file uses the rounds of all ranks, which one thread must run in order.
    is_worthwhile = isinstance(source, LocalFile) and len(blocks) >= _MIN_THREADED_BLOCKS
    if not is_worthwhile or torch.get_num_threads() < _READERS:
        yield from map(read, blocks)
        return
    threads = ThreadPoolExecutor(_READERS, "allranks-checkpoint-read")
    try:
        digests = threads.map(read, blocks)
    except RuntimeError:  # the system permits no further thread
        threads.shutdown(cancel_futures=True)
        digests = map(read, blocks)
    try:
        yield from digests
    finally:
        # Wait also after an error: the caller may free the memory that the threads write.
        threads.shutdown(cancel_futures=True)


def _nbytes_of(saved: Saved, piece: Piece, manifest: Manifest) -> int:
    return math.prod(piece.shape) * dtype_of(saved.dtype).itemsize


def damaged(manifest: Manifest, saved: Saved, piece: Piece, begin: int, end: int, why: str = "") -> CheckpointError:
    """Return the error for bytes that are damaged or unreadable. It names the file, the tensor, and the rank."""
    file = manifest.files[piece.file]
    writer = manifest.writers[file.rank] if 0 <= file.rank < len(manifest.writers) else None
    writer_name = f"rank {file.rank}" + (f" ({writer.host}, pid {writer.pid})" if writer else "")
    where = f"bytes {piece.begin + begin} to {piece.begin + end}"
    what = (
        f"cannot be read in {where} ({why})"
        if why
        else f"is damaged in {where} (the data differs from what was written)"
    )
    return CheckpointError(f"step {manifest.step}: {file.name} {what}: tensor {saved.name!r}, written by {writer_name}")
