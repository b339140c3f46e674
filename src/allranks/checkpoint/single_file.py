"""Checkpoints in a single file that survive a kill.

`torch.save(obj, path)` truncates the old file before it writes the new one: a job that is killed in between has
neither. `save` writes a temporary file in the same directory and renames it, so that at any instant ``path`` is a
complete checkpoint, the old or the new one.

The caller decides which rank saves (usually ``if dist.get_rank() == 0``) and what the checkpoint contains. The caller
also calls `barrier` before other ranks read it. This module does not communicate and needs no process group.

Source of the method: LWN, "Ensuring data reaches disk" (https://lwn.net/Articles/457667/).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import re
import secrets
import struct
import zipfile
import zlib
from typing import Any, BinaryIO

import torch
import xxhash

from allranks._base.errors import CheckpointError, UsageError
from allranks._base.files import plain_file
from allranks._base.forks import guard

__all__ = ["load", "save"]

PathLike = str | os.PathLike[str]

_SEAL, _DIGITS = b"allranks xxh3 ", 32
_LENGTH = 2  # bytes of the length of a zip archive's comment, stored just before the comment
_STEP = 1 << 20  # bytes per read
# Exceptions that Python raises for a damaged zip archive.
_DAMAGES = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, RuntimeError, ValueError, IndexError, OverflowError)
_DAMAGES_OF_PICKLE = (EOFError, LookupError, ValueError, TypeError, AttributeError, AssertionError, OverflowError)

# Errors of flock() on file systems without locks (NFS without a lock daemon, some FUSE file systems).
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


def save(obj: Any, path: PathLike) -> None:
    """Write ``obj`` to ``path``, completely or not at all.

    Whatever happens during the call (kill -9, a full disk, an object that cannot be pickled), ``path`` holds either its
    previous contents or all of ``obj``. When it returns, the data is on the disk. A killed save leaves its incomplete
    ``.NAME.*.tmp`` in the directory of ``path``; the next save to the same ``path`` removes it.

    Args:
        obj: Any object that `torch.save` accepts. State dicts stay loadable for longer than modules.
        path: The file. A symbolic link is followed, and its target is replaced.

    Raises:
        UsageError: ``path`` exists and is not a plain file.
        OSError: The file could not be written (missing directory, full disk, no permission). The message names the
            path; the old file is unchanged.

    Cost: One more checkpoint's worth of disk space during the call; two fsyncs.
    """
    try:
        final = plain_file(path)
    except OSError as error:
        raise UsageError(
            f"checkpoint.save: {os.fspath(path)!r} exists: {error.strerror}.\n"
            "  Pass the path of a regular file or of a new file, or step=N to save into a folder of checkpoints."
        ) from None
    directory, name = os.path.split(final)
    try:
        _remove_stale(directory, name)
        descriptor, temporary = _create_locked(directory, name)
        try:
            with contextlib.ExitStack() as locked:
                with open(descriptor, "wb", buffering=0) as raw:
                    sink = _Sink(raw)
                    try:
                        torch.save(obj, sink)  # type: ignore[arg-type]
                    except BaseException:
                        # torch's zip writer replaces the OSError of the sink with "file write failed".
                        if sink.failure is not None:
                            raise sink.failure from None
                        raise
                    _seal(raw, sink)
                    # Before the rename: otherwise a crash of the machine could leave the new name with incomplete data.
                    os.fsync(raw.fileno())
                    locked.callback(os.close, os.dup(raw.fileno()))  # keeps the lock: the copy shares the open file
                # A network file system may report an error on close, so the file is closed before the rename.
                os.replace(temporary, final)
        except BaseException:
            # The temporary file no longer exists if an interrupt arrived just after the rename.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
    except OSError as error:
        what = f"{error.strerror or error}; the checkpoint was not saved, and an existing file is unchanged"
        raise OSError(error.errno or errno.EIO, what, os.fspath(path)) from error
    _sync_directory(directory)


def load(path: PathLike, map_location: Any = "cpu", weights_only: bool = True) -> Any:
    """Read an object that `save` wrote.

    Args:
        path: The file.
        map_location: Device of the tensors, as in `torch.load`. The default is the CPU, because the rank that saved may
            have had another device than the rank that loads.
        weights_only: Accept only tensors and plain containers. False runs any code that the file contains: use it only
            for trusted files.

    Returns:
        The object.

    Raises:
        OSError: The file cannot be read; FileNotFoundError if it does not exist.
        CheckpointError: The file is damaged, or was not written by `save` or `torch.save`.
        pickle.UnpicklingError: The file holds objects that ``weights_only=True`` rejects.

    Cost: The file is read twice, the first time to check it.
    """
    with open(path, "rb") as file:  # a missing file raises Python's own error
        if not _is_archive(file):
            raise CheckpointError(
                f"{os.fspath(path)} is damaged or not a checkpoint ({os.path.getsize(path)} bytes).{_REMEDY}"
            )
        _check(file, os.fspath(path))
    try:
        return torch.load(path, map_location=map_location, weights_only=weights_only)
    except _DAMAGES_OF_PICKLE as error:
        if not weights_only:
            raise  # an error of the program's own classes
        raise CheckpointError(f"{os.fspath(path)} is damaged: {error}{_REMEDY}") from error
    except RuntimeError as error:
        if "PytorchStreamReader" not in str(error):
            raise
        raise CheckpointError(f"{os.fspath(path)} is damaged: {error}{_REMEDY}") from error


_REMEDY = "\n  Copy the file again, or load an earlier checkpoint."


def _is_archive(file: BinaryIO) -> bool:
    try:
        return zipfile.is_zipfile(file)
    except zipfile.BadZipFile:  # its last record claims to be one of several archives
        return False


def _seal(raw: io.RawIOBase, sink: _Sink) -> None:
    """Append a hash of all bytes, as the comment of the zip archive. torch writes no comment, and does not check it."""
    seal = _SEAL + sink.hash.hexdigest().encode()
    end = raw.tell()
    raw.seek(end - _LENGTH)
    _write_all(raw, len(seal).to_bytes(_LENGTH, "little") + seal)


def _check(file: BinaryIO, name: str) -> None:
    """Check that a file holds the written bytes. A file without a hash (torch, older versions) has CRCs."""
    size = os.fstat(file.fileno()).st_size
    sealed = size - len(_SEAL) - _DIGITS
    file.seek(max(0, sealed))
    seal = file.read()
    if sealed < _LENGTH or not seal.startswith(_SEAL):
        _check_records(file, name)
        return
    found, left = xxhash.xxh3_128(), sealed - _LENGTH
    file.seek(0)
    while left and (part := file.read(min(left, _STEP))):
        found.update(part)
        left -= len(part)
    found.update(bytes(_LENGTH))  # the length of the comment was 0 when the hash was computed
    if found.hexdigest().encode() != seal[len(_SEAL) :]:
        raise CheckpointError(f"{name} is damaged: its data differs from what was written.{_REMEDY}")


def _check_records(file: BinaryIO, name: str) -> None:
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: a position before the first byte of the file
            raise
        raise CheckpointError(f"{name} is damaged: a record would be outside the file.{_REMEDY}") from error
    except _DAMAGES as error:
        raise CheckpointError(f"{name} is damaged: {error}{_REMEDY}") from error
    if damaged is not None:
        raise CheckpointError(
            f"{name} is damaged: the record {damaged} does not match its CRC-32.\n"
            "  If torch wrote no CRC-32 (torch.serialization.set_crc32_options), load the file with torch.load."
        )


def _write_all(raw: io.RawIOBase, data: Any) -> None:
    view = memoryview(data).cast("B")
    while view:
        view = view[raw.write(view) or 0 :]


class _Sink(io.RawIOBase):
    """Writes all bytes or raises, and hashes them. It keeps its error, because torch's writer discards the cause."""

    def __init__(self, raw: io.RawIOBase) -> None:
        self.raw = raw
        self.hash = xxhash.xxh3_128()
        self.failure: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        try:
            _write_all(self.raw, data)
        except OSError as error:
            self.failure = error
            raise
        self.hash.update(data)
        return len(memoryview(data).cast("B"))


def _create_locked(directory: str, name: str) -> tuple[int, str]:
    """Open a new temporary file and lock it: the kernel releases the lock when its writer dies.

    A pid in the name could not distinguish dead processes from living ones. Pids are reused (always the same ones after
    a container restarts) and are ambiguous between the hosts of a shared folder.
    """
    while True:
        # The pid is only for users who inspect the directory.
        temporary = os.path.join(directory, f".{name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(descriptor)
                os.unlink(temporary)
                raise
        # Between open and lock, another save may have taken it for stale and removed it.
        if os.fstat(descriptor).st_nlink > 0:
            return descriptor, temporary
        os.close(descriptor)


def _remove_stale(directory: str, name: str) -> None:
    """Remove temporary files of ``name`` whose writer has died."""
    pattern = re.compile(rf"\.{re.escape(name)}\.\d+-[0-9a-f]{{8}}\.tmp")
    for entry in os.listdir(directory):
        if not pattern.fullmatch(entry):
            continue
        leftover = os.path.join(directory, entry)
        # A child forked here would keep the lock, for which the writer of the file may be waiting.
        with guard:
            try:
                descriptor = os.open(leftover, os.O_RDWR | os.O_CLOEXEC)
            except (FileNotFoundError, PermissionError):
                continue  # another save has removed it, or another user owns it: not an error of this save
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(leftover)
            except OSError as error:
                # The writer is alive (EAGAIN), another process has removed the file, or there are no locks.
                if error.errno not in (errno.EAGAIN, errno.EACCES, errno.ENOENT, *_NO_LOCKS):
                    raise
            finally:
                os.close(descriptor)


def _sync_directory(directory: str) -> None:
    """Make the rename durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems do not support it, and do not need it
            raise
    finally:
        os.close(descriptor)
