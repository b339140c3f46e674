"""Checkpoints in a folder: their names, their completeness, and how a checkpoint becomes complete.

A checkpoint is written in a folder with another name, ``.step-0000000100.1a2b3c4d.partial``. It is complete when it has
its manifest. A rename then gives it its name, so ``step-0000000100`` is never incomplete. If the step already exists,
the new checkpoint gets the name ``step-0000000100-2``, and then the old one is removed. There is no moment without one.

If hosts have separate folders, each folder gets a share, ``step-0000000100-share-1-of-2-1a2b3c4d5e6f7a8b``. The last
part is the same for all shares of a save, so the names alone show whether all shares exist.

Only one job writes into a folder (``folder_claims``), and only one save at a time: it holds the lock on the file
``.lock``, which the kernel releases when the process exits. The holder of the lock removes the incomplete writes of
other processes.
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
from allranks.checkpoint import folder_claims
from allranks.checkpoint.manifest import MANIFEST, FileShare, Manifest, load_manifest

__all__ = [
    "HeldFolder",
    "Info",
    "NamedFolder",
    "PathLike",
    "complete",
    "find",
    "hold_folder",
    "id_of",
    "is_folder_of_checkpoints",
    "list_checkpoints",
    "make_folder",
    "create_marker",
    "has_marker",
    "parse_name",
    "new_name",
    "new_partial",
    "newest",
    "partials",
    "remove",
    "warn_of_remarks",
    "tidy",
]

PathLike = str | os.PathLike[str]

_NAME = re.compile(r"step-(\d{10,18})(?:-(\d{1,9}))?")
_SHARE = re.compile(r"step-(\d{10,18})-share-(\d{1,6})-of-(\d{1,6})-([0-9a-f]{16})")
_INCOMPLETE = re.compile(r"\.(step-\d{10,18}|trash)\.[0-9a-f]{8,16}\.(partial|\d{1,9}\.mark)")
_LOCK = ".lock"
_STALE_S = 24 * 3600.0  # if the file system has no locks: minimum age of an incomplete write that is removed


@dataclass(frozen=True)
class Info:
    """A complete checkpoint.

    Attributes:
        path: Its folder. ``os.fspath`` of this object returns it, too.
        step: Step of the training.
        nbytes: Size of its files in bytes.
        when: Time of the save, in seconds since 1970.
        ranks: Number of ranks that wrote it.
        hosts: Hosts of these ranks.
        run: Name of the job.
        share: If hosts have separate folders: the number of the share that is here (0: none), and the number of shares.
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
        """Return the facts in the manifest of a folder."""
        hosts = tuple(dict.fromkeys(writer.host for writer in manifest.writers))
        share = None if manifest.share is None else (manifest.share.number, manifest.share.count)
        return cls(
            path, manifest.step, manifest.nbytes, manifest.when, len(manifest.writers), hosts, manifest.run, share
        )


class NamedFolder(NamedTuple):
    """A folder with the name of a checkpoint, or of a share.

    Attributes:
        step: Step of the training.
        attempt: 1, or the number after the step in its name.
        path: Path of the folder.
        share: None if it is not a share.
    """

    step: int
    attempt: int
    path: Path
    share: FileShare | None


def is_folder_of_checkpoints(path: Path) -> bool:
    """Return whether a path is a folder of checkpoints, and not a checkpoint."""
    return not (path / MANIFEST).exists() and path.is_dir() and parse_name(path) is None


def parse_name(path: Path) -> NamedFolder | None:
    """Parse the name of a folder; None if it is not the name of a checkpoint."""
    if (match := _NAME.fullmatch(path.name)) is not None:
        return NamedFolder(int(match[1]), int(match[2] or 1), path, None)
    if (match := _SHARE.fullmatch(path.name)) is not None:
        return NamedFolder(int(match[1]), 1, path, FileShare(match[4], int(match[2]), int(match[3])))
    return None


def find(folder: PathLike) -> list[NamedFolder]:
    """List the folders with the name of a checkpoint or share, the newest first. Shares come last in a step."""
    found = []
    for entry in os.scandir(folder):
        if (one := parse_name(Path(entry.path))) is not None and entry.is_dir():
            found.append(one)
    return sorted(found, key=_order, reverse=True)


def _order(one: NamedFolder) -> tuple[int, bool, int, str]:
    return one.step, one.share is None, one.attempt, one.path.name


def list_checkpoints(folder: PathLike) -> list[Info]:
    """Return the complete checkpoints and the shares in a folder, the newest first.

    A damaged checkpoint is skipped with a warning: its manifest cannot be read, or a file is missing or has another
    size. ``verify`` reads everything.

    Args:
        folder: The folder that was passed to ``save``.

    Raises:
        OSError: The folder cannot be read; FileNotFoundError if it does not exist.
    """
    found: dict[object, Info] = {}
    for one in find(folder):
        key = (one.step, one.share)
        try:
            if key not in found:
                found[key] = Info.of(one.path, load_manifest(one.path))
        except FileNotFoundError:
            continue  # removed in the meantime
        except (CheckpointError, OSError) as error:
            _warn_of_skipped(one.path, error)
    return list(found.values())


def newest(folder: PathLike) -> Info | None:
    """Return the newest checkpoint of ``list_checkpoints``, without reading the others."""
    for one in find(folder):
        try:
            return Info.of(one.path, load_manifest(one.path))
        except FileNotFoundError:
            continue
        except (CheckpointError, OSError) as error:
            _warn_of_skipped(one.path, error)
    return None


def _warn_of_skipped(checkpoint: Path, error: Exception) -> None:
    callsite.warn(
        f"checkpoint: {checkpoint.name} is skipped: {error}.\n"
        f"  To check it, run: allranks checkpoint verify {checkpoint}"
    )


# Writing.


@dataclass
class HeldFolder:
    """A folder whose lock is held.

    Attributes:
        run: Name of the job if the file system has no locks, so that checkpoints of other jobs must stay; else "".
        remarks: Messages for the user.
    """

    run: str
    remarks: list[str]


@contextlib.contextmanager
def hold_folder(folder: Path, run: str, *, stays: bool = True) -> Iterator[HeldFolder]:
    """Hold the lock of a folder, which is created if needed, and remove the incomplete writes in it.

    Args:
        folder: Folder of checkpoints.
        run: Name of the job.
        stays: No other job may save into the folder until this process exits. False: only until the lock is released.

    Raises:
        UsageError: Another job saves into the folder.
        OSError: The folder cannot be written to.
    """
    make_folder(folder)
    # The claim excludes other jobs until this process exits. The lock allows one save at a time.
    claim, is_new = folder_claims.claim(folder, run)
    try:
        lock = folder_claims.open_file(folder / _LOCK)
        fd = lock.fileno()
        try:
            locked = _lock(fd, folder)
            # Only after the lock is held: the record is that of the current holder, which `_holder` reports.
            os.ftruncate(fd, 0)
            os.pwrite(fd, msgspec.json.encode({"run": run, "host": socket.gethostname(), "pid": os.getpid()}), 0)
            remarks = [claim.remark] if claim.remark else []
            yield HeldFolder("" if claim.has_lock else run, remarks + _sweep(folder, 0.0 if locked else _STALE_S))
        finally:
            lock.close()
    finally:
        if is_new and not stays:
            folder_claims.release(folder)


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents, durably: they survive a crash of the machine.

    Raises:
        OSError: The folder could not be created.
    """
    first, missing = folder, []
    while not first.is_dir():
        missing.append(first)
        first = first.parent
    for each in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another rank was faster; a file of this name is an error later
            each.mkdir()
        _sync_name(each)
    if first not in _synced:  # its creator may have been killed before the fsync
        _sync_name(first)
    _synced.add(folder)


# Folders whose creation is known to be durable: one fsync per folder and process is enough.
_synced: set[Path] = set()


def _sync_name(folder: Path) -> None:
    if not os.access(folder.parent, os.W_OK):
        return  # so it was not created here
    try:
        sync_folder(folder.parent)
    except PermissionError:  # writable but not readable: fsync needs a readable folder
        os.sync()


def _lock(fd: int, folder: Path) -> bool:
    """Take the lock. Return False if the file system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in folder_claims.NO_LOCKS:
            return False
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        raise UsageError(
            f"checkpoint.save: {_holder(fd)} is saving into {folder}.\n  Wait until that save has finished."
        ) from None
    return True


def _holder(fd: int) -> str:
    try:
        found = msgspec.json.decode(os.pread(fd, 4096, 0), type=dict[str, str | int])
        return f"another process (host {found['host']}, pid {found['pid']}, run {found['run']!r})"
    except (msgspec.DecodeError, KeyError):
        return "another process"


def _sweep(folder: Path, age_s: float) -> list[str]:
    """Remove incomplete writes older than `age_s`. Return the ones that could not be removed, with the reasons."""
    problems = []
    for entry in os.scandir(folder):
        if not _INCOMPLETE.fullmatch(entry.name):
            continue
        try:
            # Without locks, a recent incomplete write may belong to a live process.
            if age_s and entry.stat(follow_symlinks=False).st_mtime + age_s > time.time():
                continue
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            elif entry.name.endswith(".mark"):
                os.unlink(entry.path)
        except FileNotFoundError:
            continue
        except OSError as error:
            problems.append(_not_removed(Path(entry.path), error))
    return problems


def warn_of_remarks(what: str, remarks: list[str]) -> None:
    """Warn of problems that do not make a save fail."""
    if remarks:
        more = f"; and {len(remarks) - 3} more" if remarks[3:] else ""
        callsite.warn(f"{what}, but {'; '.join(remarks[:3])}{more}")


def _not_removed(path: Path, error: OSError | CheckpointError) -> str:
    return f"{path} could not be removed: {getattr(error, 'strerror', None) or error}; the next save tries again"


def new_partial(folder: Path, step: int, name: str = "") -> Path:
    """Create the folder in which a checkpoint is written. ``name``: the name that another rank has chosen elsewhere."""
    path = folder / (name or f".step-{step:010}.{secrets.token_hex(8)}.partial")
    path.mkdir()
    return path


def id_of(partial: str) -> str:
    """Return the random part of the name of a partial folder."""
    return partial.split(".")[2]


def partials(folder: Path, step: int) -> list[Path]:
    """Return the partial folders of a step: at most one while its writer holds the lock."""
    return [path for path in folder.glob(f".step-{step:010}.*.partial") if _INCOMPLETE.fullmatch(path.name)]


def create_marker(folder: Path, partial: str, rank: int) -> Path:
    """Create a marker file, and its folder if needed. A rank that finds the file sees the same folder."""
    make_folder(folder)
    path = folder / _marker_name(partial, rank)
    path.touch(exist_ok=False)
    return path


def has_marker(folder: Path, partial: str, rank: int) -> bool:
    """Return whether the file of a rank is in a folder."""
    return (folder / _marker_name(partial, rank)).exists()


def _marker_name(partial: str, rank: int) -> str:
    return f"{partial.removesuffix('.partial')}.{rank}.mark"


def complete(partial: Path, manifest: Manifest) -> Path:
    """Turn a partial folder with all its files into a checkpoint or share, and return its path.

    The order makes the result durable: the manifest, the names in the folder, the rename, the name of the folder.

    Args:
        partial: The partial folder.
        manifest: Its manifest.

    Raises:
        OSError: A step failed. The folder has its partial name, unless the rename cannot be undone.
    """
    encoded = manifest.encode()
    with open(partial / MANIFEST, "xb", buffering=0) as file:
        write_all(file.fileno(), memoryview(encoded))
        os.fsync(file.fileno())
    # The name of the manifest must be durable before the folder gets its final name.
    sync_folder(partial)
    final = partial.parent / new_name(partial.parent, manifest)
    try:
        # The rename is the commit point: before it, readers see no checkpoint of this name.
        os.rename(partial, final)
    except OSError:
        if not _is_done(partial, final, encoded):
            raise
    try:
        sync_folder(partial.parent)
    except OSError:
        with contextlib.suppress(OSError):  # the caller reports that the save failed, so undo the rename
            os.rename(final, partial)
        raise
    return final


def _is_done(partial: Path, final: Path, encoded: bytes) -> bool:
    """Return whether a rename succeeded although it reported an error.

    The server of a network file system can lose its answer. The repeated request then finds that the old name is gone.
    """
    try:
        return partial.name not in os.listdir(final.parent) and (final / MANIFEST).read_bytes() == encoded
    except OSError:
        return False


def new_name(folder: Path, manifest: Manifest) -> str:
    """Return the name of a checkpoint in a folder. The name of a share does not depend on the folder."""
    name = f"step-{manifest.step:010}"
    if (share := manifest.share) is not None:
        return f"{name}-share-{share.number}-of-{share.count}-{share.id}"
    attempt = 1 + max((one.attempt for one in find(folder) if one.step == manifest.step and not one.share), default=0)
    return name if attempt == 1 else f"{name}-{attempt}"


def write_all(fd: int, view: memoryview) -> None:
    """Write all bytes: one system call may write fewer."""
    while view:
        view = view[os.write(fd, view) :]


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems do not support it, and do not need it
            raise
    finally:
        os.close(fd)


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint. It loses its name before its first file is removed, so it never looks complete."""
    trash = checkpoint.parent / f".trash.{secrets.token_hex(4)}.partial"
    with contextlib.suppress(FileNotFoundError):
        os.rename(checkpoint, trash)
        shutil.rmtree(trash)


def tidy(new: Path, keep: int | None, every: int | None, run: str = "") -> list[str]:
    """Remove the checkpoints that a new one replaces, and old ones.

    Args:
        new: The checkpoint that was just written; it stays. All others of its step are removed, except shares of the
            same save.
        keep: Number of the newest steps whose checkpoints stay. None: all.
        every: Checkpoints whose step is a multiple of it stay, too. None: no others.
        run: Only checkpoints of this job are removed. "": remove those of all jobs.

    Returns:
        What could not be removed, with the reasons. The new checkpoint is complete in any case.
    """
    try:
        entries = find(new.parent)
    except OSError as error:
        return [f"nothing was removed from {new.parent}: {error.strerror or error}"]
    new_name_parts = parse_name(new)
    assert new_name_parts is not None
    # Without the new checkpoint, removing the old ones could leave none.
    if all(entry.path != new for entry in entries):
        return [f"{new} no longer exists: another program has removed it"]
    kept_steps = sorted({entry.step for entry in entries}, reverse=True)[:keep]
    problems = []
    for entry in entries:
        is_old = entry.step not in kept_steps and (every is None or entry.step % every)
        is_same = (
            entry.share is not None and new_name_parts.share is not None and entry.share.id == new_name_parts.share.id
        )
        if entry.path == new or is_same or not (entry.step == new_name_parts.step or is_old):
            continue
        try:
            if not run or load_manifest(entry.path, sizes=False).run == run:
                remove(entry.path)
        except (OSError, CheckpointError) as error:
            problems.append(_not_removed(entry.path, error))
    return problems
