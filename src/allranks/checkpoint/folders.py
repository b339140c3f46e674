"""Checkpoints in a folder: their names, which are complete, and how one becomes so.

A checkpoint is written in a folder of another name, ``.step-0000000100.1a2b3c4d.partial``. It is complete when its
manifest is there, and gets its name by a rename, so that ``step-0000000100`` never is half of one. A step that is there
already is written as ``step-0000000100-2``, and then the old one is removed: there is no moment without one.

Only one job writes into a folder at a time: it holds the lock of ``.lock``, which the kernel drops when its process
ends. Whoever has the lock removes what others have left half-written.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import socket
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from allranks._base.errors import CheckpointError, UsageError
from allranks.checkpoint.manifest import MANIFEST, Manifest, load_manifest

__all__ = [
    "Info",
    "PathLike",
    "complete",
    "find",
    "holding",
    "is_folder_of_checkpoints",
    "keep_some",
    "latest",
    "list_checkpoints",
    "new_partial",
    "partials",
]

PathLike = str | os.PathLike[str]

_NAME = re.compile(r"step-(\d{10,18})(?:-(\d{1,9}))?")
_PARTIAL = re.compile(r"\.(step-\d{10,18}|trash)\.[0-9a-f]{8}\.partial")
_LOCK = ".lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_STALE_S = 24 * 3600.0  # where there are no locks


@dataclass(frozen=True)
class Info:
    """A checkpoint that is complete.

    Attributes:
        path: its folder. ``os.fspath`` of this gives it, too.
        step: of the training.
        nbytes: of its files.
        when: seconds since 1970.
        ranks: how many wrote it.
        hosts: theirs.
        run: of the job.
    """

    path: Path
    step: int
    nbytes: int
    when: float
    ranks: int
    hosts: tuple[str, ...]
    run: str

    def __fspath__(self) -> str:
        return str(self.path)

    @classmethod
    def of(cls, path: Path, manifest: Manifest) -> Info:
        hosts = tuple(dict.fromkeys(writer.host for writer in manifest.writers))
        return cls(path, manifest.step, manifest.nbytes, manifest.when, len(manifest.writers), hosts, manifest.run)


def is_folder_of_checkpoints(path: Path) -> bool:
    """Whether it is one, and not a checkpoint."""
    return not (path / MANIFEST).exists() and path.is_dir() and not _NAME.fullmatch(path.name)


def find(folder: PathLike) -> list[tuple[int, int, Path]]:
    """The step, the attempt and the path of what has a checkpoint's name, the newest first."""
    found = []
    for entry in os.scandir(folder):
        if (match := _NAME.fullmatch(entry.name)) is not None and entry.is_dir():
            found.append((int(match[1]), int(match[2] or 1), Path(entry.path)))
    return sorted(found, reverse=True)


def list_checkpoints(folder: PathLike) -> list[Info]:
    """The complete checkpoints in a folder, the newest first.

    One that is damaged is left out, with a warning: its manifest cannot be read, or a file is missing or has another
    size. ``verify`` reads everything.

    Args:
        folder: where ``save`` was told to save.

    Raises:
        OSError: the folder cannot be read; FileNotFoundError where there is none.
    """
    found: dict[int, Info] = {}
    for step, _, path in find(folder):
        try:
            if step not in found:
                found[step] = Info.of(path, load_manifest(path))
        except FileNotFoundError:
            continue  # removed meanwhile
        except CheckpointError as error:
            warnings.warn(f"checkpoint: {path.name} is left out: {error}", stacklevel=3)
    return list(found.values())


def latest(folder: PathLike) -> Info | None:
    """The newest complete checkpoint in a folder; None if there is none, or no such folder. See ``list``."""
    try:
        candidates = find(folder)
    except (FileNotFoundError, NotADirectoryError):
        return None
    for _, _, path in candidates:
        try:
            return Info.of(path, load_manifest(path))
        except FileNotFoundError:
            continue
        except CheckpointError as error:
            warnings.warn(f"checkpoint: {path.name} is left out: {error}", stacklevel=2)
    return None


# Writing.


@contextlib.contextmanager
def holding(folder: Path, run: str) -> Iterator[None]:
    """Holds the lock of a folder, which is made if it is not there, and removes what is half-written in it.

    Raises:
        UsageError: another job has it.
        OSError: the folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        locked = _lock(fd, folder)
        os.ftruncate(fd, 0)
        os.pwrite(fd, msgspec.json.encode({"run": run, "host": socket.gethostname(), "pid": os.getpid()}), 0)
        _sweep(folder, 0.0 if locked else _STALE_S)
        try:
            yield
        finally:
            if locked:
                fcntl.flock(fd, fcntl.LOCK_UN)  # a child that was forked meanwhile has the same lock
    finally:
        os.close(fd)


def _lock(fd: int, folder: Path) -> bool:
    """Takes the lock. False where the file system has none."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        raise UsageError(f"checkpoint.save: {_holder(fd)} is saving into {folder}; give each job a folder") from None
    return True


def _holder(fd: int) -> str:
    try:
        found = msgspec.json.decode(os.pread(fd, 4096, 0), type=dict[str, str | int])
        return f"another process (host {found['host']}, pid {found['pid']}, run {found['run']!r})"
    except (msgspec.DecodeError, KeyError):
        return "another process"


def _sweep(folder: Path, age_s: float) -> None:
    for entry in os.scandir(folder):
        if _PARTIAL.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            with contextlib.suppress(FileNotFoundError):
                if entry.stat().st_mtime + age_s <= time.time() or not age_s:
                    shutil.rmtree(entry.path)


def new_partial(folder: Path, step: int) -> Path:
    """Makes the folder in which a checkpoint is written."""
    path = folder / f".step-{step:010}.{secrets.token_hex(4)}.partial"
    path.mkdir()
    return path


def partials(folder: Path, step: int) -> list[Path]:
    """The folders in which checkpoints of a step are written; one at most while their writer holds the lock."""
    return [path for path in folder.glob(f".step-{step:010}.*.partial") if _PARTIAL.fullmatch(path.name)]


def complete(partial: Path, manifest: Manifest, start: int) -> Path:
    """Makes a checkpoint of a folder that has all files. Returns its path.

    Args:
        partial: the folder.
        manifest: what it consists of.
        start: 1, or what is to follow the name of a step that is there already.

    Raises:
        OSError: that failed. The folder is as it was.
    """
    with open(partial / MANIFEST, "xb", buffering=0) as file:
        write_all(file.fileno(), memoryview(manifest.encode()))
        os.fsync(file.fileno())
    sync_folder(partial)
    name = f"step-{manifest.step:010}"
    old = [(attempt, path) for step, attempt, path in find(partial.parent) if step == manifest.step]
    attempt = max([start - 1, *(number for number, _ in old)]) + 1
    final = partial.parent / (name if attempt == 1 else f"{name}-{attempt}")
    os.rename(partial, final)
    sync_folder(partial.parent)
    for _, path in old:
        remove(path)
    return final


def write_all(fd: int, view: memoryview) -> None:
    """Writes all bytes: a call of the kernel may take fewer."""
    while view:
        view = view[os.write(fd, view) :]


def sync_folder(folder: Path) -> None:
    """Waits until the names in a folder are on the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems cannot, and need not
            raise
    finally:
        os.close(fd)


def remove(checkpoint: Path) -> None:
    """Removes a checkpoint. It has lost its name before its first file goes."""
    trash = checkpoint.parent / f".trash.{secrets.token_hex(4)}.partial"
    with contextlib.suppress(FileNotFoundError):
        os.rename(checkpoint, trash)
        shutil.rmtree(trash)


def keep_some(new: Path, keep: int | None, every: int | None) -> None:
    """Removes old checkpoints.

    Args:
        new: the one that was just written, which stays.
        keep: how many of the newest stay; None: all.
        every: those whose step is a multiple of it stay, too; None: no others.
    """
    if keep is None:
        return
    for step, _, path in find(new.parent)[keep:]:
        if path != new and (every is None or step % every):
            remove(path)
