"""Checkpoints in a folder: their names, which are complete, and how one becomes so.

A checkpoint is written in a folder of another name, ``.step-0000000100.1a2b3c4d.partial``. It is complete when its
manifest is there, and gets its name by a rename, so that ``step-0000000100`` never is half of one. A step that is there
already is written as ``step-0000000100-2``, and then the old one is removed: there is no moment without one.

Where hosts have folders of their own, each gets a share, ``step-0000000100-share-1-of-2-1a2b3c4d5e6f7a8b``. The last
part is the same for all shares of a save, so names alone tell whether all shares are there.

Only one job writes into a folder (``owners``), and one save at a time: it holds the lock of ``.lock``, which the kernel
drops when its process ends. Whoever has the lock removes what others have left half-written.
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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from allranks._base.errors import CheckpointError, UsageError
from allranks._call import callsite
from allranks.checkpoint import owners
from allranks.checkpoint.manifest import MANIFEST, FileShare, Manifest, load_manifest

__all__ = [
    "Held",
    "Info",
    "Named",
    "PathLike",
    "complete",
    "find",
    "holding",
    "id_of",
    "is_folder_of_checkpoints",
    "list_checkpoints",
    "make_folder",
    "mark",
    "marked",
    "named",
    "new_name",
    "new_partial",
    "newest",
    "partials",
    "remove",
    "tell",
    "tidy",
]

PathLike = str | os.PathLike[str]

_NAME = re.compile(r"step-(\d{10,18})(?:-(\d{1,9}))?")
_SHARE = re.compile(r"step-(\d{10,18})-share-(\d{1,6})-of-(\d{1,6})-([0-9a-f]{16})")
_HALF = re.compile(r"\.(step-\d{10,18}|trash)\.[0-9a-f]{8,16}\.(partial|\d{1,9}\.mark)")
_LOCK = ".lock"
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
        share: where hosts have folders of their own: which share of the checkpoint is here (0: none), of how many.
    """

    path: Path
    step: int
    nbytes: int
    when: float
    ranks: int
    hosts: tuple[str, ...]
    run: str
    share: tuple[int, int] | None = None

    def __fspath__(self) -> str:
        return str(self.path)

    @classmethod
    def of(cls, path: Path, manifest: Manifest) -> Info:
        """What the manifest of a folder says."""
        hosts = tuple(dict.fromkeys(writer.host for writer in manifest.writers))
        share = None if manifest.share is None else (manifest.share.number, manifest.share.count)
        return cls(
            path, manifest.step, manifest.nbytes, manifest.when, len(manifest.writers), hosts, manifest.run, share
        )


class Named(NamedTuple):
    """A folder with the name of a checkpoint, or of a share of one.

    Attributes:
        step: of the training.
        attempt: 1, or what follows the step in its name.
        path: of the folder.
        share: None if it is no share.
    """

    step: int
    attempt: int
    path: Path
    share: FileShare | None


def is_folder_of_checkpoints(path: Path) -> bool:
    """Whether it is one, and not a checkpoint."""
    return not (path / MANIFEST).exists() and path.is_dir() and named(path) is None


def named(path: Path) -> Named | None:
    """What the name of a folder says; None if it is not that of a checkpoint."""
    if (match := _NAME.fullmatch(path.name)) is not None:
        return Named(int(match[1]), int(match[2] or 1), path, None)
    if (match := _SHARE.fullmatch(path.name)) is not None:
        return Named(int(match[1]), 1, path, FileShare(match[4], int(match[2]), int(match[3])))
    return None


def find(folder: PathLike) -> list[Named]:
    """What has the name of a checkpoint or a share, the newest first; of a step, shares come last."""
    found = []
    for entry in os.scandir(folder):
        if (one := named(Path(entry.path))) is not None and entry.is_dir():
            found.append(one)
    return sorted(found, key=_order, reverse=True)


def _order(one: Named) -> tuple[int, bool, int, str]:
    return one.step, one.share is None, one.attempt, one.path.name


def list_checkpoints(folder: PathLike) -> list[Info]:
    """The complete checkpoints in a folder, the newest first, and the shares of such.

    One that is damaged is left out, with a warning: its manifest cannot be read, or a file is missing or has another
    size. ``verify`` reads everything.

    Args:
        folder: where ``save`` was told to save.

    Raises:
        OSError: the folder cannot be read; FileNotFoundError where there is none.
    """
    found: dict[object, Info] = {}
    for one in find(folder):
        key = (one.step, one.share)
        try:
            if key not in found:
                found[key] = Info.of(one.path, load_manifest(one.path))
        except FileNotFoundError:
            continue  # removed meanwhile
        except (CheckpointError, OSError) as error:
            callsite.warn(f"checkpoint: {one.path.name} is left out: {error}")
    return list(found.values())


def newest(folder: PathLike) -> Info | None:
    """The newest that ``list_checkpoints`` gives. The others are not read."""
    for one in find(folder):
        try:
            return Info.of(one.path, load_manifest(one.path))
        except FileNotFoundError:
            continue
        except (CheckpointError, OSError) as error:
            callsite.warn(f"checkpoint: {one.path.name} is left out: {error}")
    return None


# Writing.


@dataclass
class Held:
    """A folder whose lock is held.

    Attributes:
        run: of the job, where the file system has no locks, and what others have written must stay; else "".
        remarks: what the user should be told.
    """

    run: str
    remarks: list[str]


@contextlib.contextmanager
def holding(folder: Path, run: str, *, stays: bool = True) -> Iterator[Held]:
    """Holds the lock of a folder, which is made if it is not there, and removes what is half-written in it.

    Args:
        folder: of checkpoints.
        run: the job.
        stays: no other job saves into the folder until this process ends; otherwise, until the lock is dropped.

    Raises:
        UsageError: another job saves into it.
        OSError: the folder cannot be written to.
    """
    make_folder(folder)
    claim, is_new = owners.claim(folder, run)
    try:
        lock = owners.open_file(folder / _LOCK)
        fd = lock.fileno()
        try:
            locked = _lock(fd, folder)
            os.ftruncate(fd, 0)
            os.pwrite(fd, msgspec.json.encode({"run": run, "host": socket.gethostname(), "pid": os.getpid()}), 0)
            remarks = [claim.remark] if claim.remark else []
            yield Held("" if claim.has_lock else run, remarks + _sweep(folder, 0.0 if locked else _STALE_S))
        finally:
            lock.close()
    finally:
        if is_new and not stays:
            owners.release(folder)


def make_folder(folder: Path) -> None:
    """Makes a folder, and those that it lies in, so that a crash of the machine leaves them.

    Raises:
        OSError: that failed.
    """
    first, missing = folder, []
    while not first.is_dir():
        missing.append(first)
        first = first.parent
    for each in reversed(missing):
        with contextlib.suppress(FileExistsError):  # made by another rank meanwhile; or a file, which is an error later
            each.mkdir()
        _sync_name(each)
    if first not in _synced:  # who made it may have been killed before that
        _sync_name(first)
    _synced.add(folder)


_synced: set[Path] = set()


def _sync_name(folder: Path) -> None:
    if not os.access(folder.parent, os.W_OK):
        return  # it was not made here
    try:
        sync_folder(folder.parent)
    except PermissionError:  # it may be written to, and not be read
        os.sync()


def _lock(fd: int, folder: Path) -> bool:
    """Takes the lock. False where the file system has none."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in owners.NO_LOCKS:
            return False
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        raise UsageError(f"checkpoint.save: {_holder(fd)} is saving into {folder}; wait until it has") from None
    return True


def _holder(fd: int) -> str:
    try:
        found = msgspec.json.decode(os.pread(fd, 4096, 0), type=dict[str, str | int])
        return f"another process (host {found['host']}, pid {found['pid']}, run {found['run']!r})"
    except (msgspec.DecodeError, KeyError):
        return "another process"


def _sweep(folder: Path, age_s: float) -> list[str]:
    """Removes what is half-written and older. Returns what could not be removed, and why."""
    troubles = []
    for entry in os.scandir(folder):
        if not _HALF.fullmatch(entry.name):
            continue
        try:
            if age_s and entry.stat(follow_symlinks=False).st_mtime + age_s > time.time():
                continue
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            elif entry.name.endswith(".mark"):
                os.unlink(entry.path)
        except FileNotFoundError:
            continue
        except OSError as error:
            troubles.append(_not_removed(Path(entry.path), error))
    return troubles


def tell(what: str, remarks: list[str]) -> None:
    """Warns of what does not make a save a failure."""
    if remarks:
        more = f"; and {len(remarks) - 3} more" if remarks[3:] else ""
        callsite.warn(f"{what}, but {'; '.join(remarks[:3])}{more}")


def _not_removed(path: Path, error: OSError | CheckpointError) -> str:
    return f"{path} could not be removed: {getattr(error, 'strerror', None) or error}; the next save tries it again"


def new_partial(folder: Path, step: int, name: str = "") -> Path:
    """Makes the folder in which a checkpoint is written. ``name``: that of one that another rank has made elsewhere."""
    path = folder / (name or f".step-{step:010}.{secrets.token_hex(8)}.partial")
    path.mkdir()
    return path


def id_of(partial: str) -> str:
    """The random part of the name of such a folder."""
    return partial.split(".")[2]


def partials(folder: Path, step: int) -> list[Path]:
    """The folders in which checkpoints of a step are written; one at most while their writer holds the lock."""
    return [path for path in folder.glob(f".step-{step:010}.*.partial") if _HALF.fullmatch(path.name)]


def mark(folder: Path, partial: str, rank: int) -> Path:
    """Leaves a file by which other ranks see whether they have the same folder, which is made if it is not there."""
    make_folder(folder)
    path = folder / _mark_name(partial, rank)
    path.touch(exist_ok=False)
    return path


def marked(folder: Path, partial: str, rank: int) -> bool:
    """Whether that file is in a folder."""
    return (folder / _mark_name(partial, rank)).exists()


def _mark_name(partial: str, rank: int) -> str:
    return f"{partial.removesuffix('.partial')}.{rank}.mark"


def complete(partial: Path, manifest: Manifest) -> Path:
    """Makes a checkpoint, or a share, of a folder that has all files. Returns its path.

    Args:
        partial: the folder.
        manifest: what it consists of.

    Raises:
        OSError: that failed. The folder is as it was.
    """
    encoded = manifest.encode()
    with open(partial / MANIFEST, "xb", buffering=0) as file:
        write_all(file.fileno(), memoryview(encoded))
        os.fsync(file.fileno())
    sync_folder(partial)
    final = partial.parent / new_name(partial.parent, manifest)
    try:
        os.rename(partial, final)
    except OSError:
        if not _is_done(partial, final, encoded):
            raise
    try:
        sync_folder(partial.parent)
    except OSError:
        with contextlib.suppress(OSError):  # its caller says that it was not saved
            os.rename(final, partial)
        raise
    return final


def _is_done(partial: Path, final: Path, encoded: bytes) -> bool:
    """Whether a rename was done, though it failed: a server that is asked again, as its answer was lost, finds the old
    name gone."""
    try:
        return partial.name not in os.listdir(final.parent) and (final / MANIFEST).read_bytes() == encoded
    except OSError:
        return False


def new_name(folder: Path, manifest: Manifest) -> str:
    """The name that a checkpoint gets in a folder; that of a share is always the same."""
    name = f"step-{manifest.step:010}"
    if (share := manifest.share) is not None:
        return f"{name}-share-{share.number}-of-{share.count}-{share.id}"
    attempt = 1 + max((one.attempt for one in find(folder) if one.step == manifest.step and not one.share), default=0)
    return name if attempt == 1 else f"{name}-{attempt}"


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


def tidy(new: Path, keep: int | None, every: int | None, run: str = "") -> list[str]:
    """Removes what a new checkpoint replaces, and old ones.

    Args:
        new: the one that was just written, which stays. All other ones of its step go, but for shares of the same save.
        keep: of how many of the newest steps checkpoints stay; None: of all.
        every: those whose step is a multiple of it stay, too; None: no others.
        run: what another job has written stays; "": the folder is this job's alone.

    Returns:
        What could not be removed, and why: the new checkpoint is complete all the same.
    """
    try:
        found = find(new.parent)
    except OSError as error:
        return [f"nothing was removed from {new.parent}: {error.strerror or error}"]
    own = named(new)
    assert own is not None
    if all(one.path != new for one in found):
        return [f"{new} is not there any more: another program has removed it"]
    kept = sorted({one.step for one in found}, reverse=True)[:keep]
    troubles = []
    for one in found:
        is_old = one.step not in kept and (every is None or one.step % every)
        is_same = one.share is not None and own.share is not None and one.share.id == own.share.id
        if one.path == new or is_same or not (one.step == own.step or is_old):
            continue
        try:
            if not run or load_manifest(one.path, sizes=False).run == run:
                remove(one.path)
        except (OSError, CheckpointError) as error:
            troubles.append(_not_removed(one.path, error))
    return troubles
