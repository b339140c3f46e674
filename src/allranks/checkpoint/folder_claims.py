"""The job that saves into a folder: only one at a time, from its first save until its processes have exited.

Two jobs that save alternately would remove each other's checkpoints as old ones. Therefore each process that saves
holds a shared lock on the file ``.job``, which has a record of its job. To take over the folder, a job needs an
exclusive lock, which the kernel refuses while a process of another job holds the shared one. The kernel releases the
locks of a process that exits for any reason, and a forked child closes its copy immediately. The processes of one job
share the lock. A job whose rank 0 has become another process, or that was restarted, therefore continues immediately.

Some file systems have no locks. In this case only the record decides: a process raises an error if it finds that
another job has replaced its record, and no process removes a checkpoint of another job.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import multiprocessing
import os
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from allranks._base.errors import UsageError
from allranks._base.forks import Descriptor

__all__ = ["NO_LOCKS", "FolderClaim", "agree_on_run_id", "claim", "agreed_run_id", "open_file", "release", "run_id"]

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""Errors of a lock request on a file system without locks."""

_NAME = ".job"
_LENGTH = 1024  # bytes of a record, in one write: the processes of a job may replace it simultaneously
_BUSY = (errno.EAGAIN, errno.EACCES)
# Another process may hold the exclusive lock briefly, to check whether the folder is free. Retry for 0.5 s.
_TRIES, _PAUSE_S = 20, 0.025


class JobRecord(msgspec.Struct, frozen=True):
    """The record of a job.

    Attributes:
        run: Name of the job.
        host: Host of the process that wrote the record.
        pid: Pid of that process.
        since: Start of the claim, in seconds since 1970.
        started: Start time of that process, in kernel ticks. It distinguishes a later process with the same pid.
    """

    run: str
    host: str
    pid: int
    since: float
    started: int = 0

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since))
        return f"another job (host {self.host}, pid {self.pid}, run {self.run!r}, since {since})"

    def is_dead(self) -> bool | None:
        """Return whether the process has exited; None if it is on another host."""
        if self.host != socket.gethostname():
            return None
        return _start_ticks(self.pid) != self.started


@dataclass
class FolderClaim:
    """A folder into which this process saves.

    Attributes:
        run: Name of the job.
        fd: Descriptor of the record, which holds the lock.
        has_lock: The file system has locks.
        remark: Message for the user; "" for none.
    """

    run: str
    fd: Descriptor
    has_lock: bool
    remark: str = ""

    def is_of(self, record: Path) -> bool:
        """Return whether the claim is for the current record. The folder may have been removed and recreated."""
        try:
            return self.fd.fileno() >= 0 and os.path.samestat(os.fstat(self.fd.fileno()), os.stat(record))
        except FileNotFoundError:
            return False


# Held during a whole claim: two threads of one process must not claim the same folder twice.
_guard = threading.Lock()
_claims: dict[Path, FolderClaim] = {}


def claim(folder: Path, run: str) -> tuple[FolderClaim, bool]:
    """Ensure that no other job saves into a folder.

    Returns:
        The claim, which lasts until this process exits, and whether it is new.

    Raises:
        UsageError: Another job saves into the folder. The message names it.
        OSError: The folder cannot be written to.
    """
    with _guard:
        record = folder / _NAME
        existing = _claims.pop(folder, None)
        # The lock is on a file that no longer has this name, so it protects nothing.
        if existing is not None and not existing.is_of(record):
            existing.fd.close()
            existing = None
        if existing is not None:
            owner = _read(existing.fd)
            if owner is not None and owner.run == run == existing.run:
                _claims[folder] = existing
                # The user has already received the remark.
                existing.remark = ""
                return existing, False
        # Without locks, another job has replaced the record. With locks, the kernel would have refused it.
        if existing is not None and existing.run == run and owner is not None and not owner.is_dead():
            _claims[folder] = existing  # so that the next save fails, too
            raise _refusal(owner, folder)
        fd = existing.fd if existing is not None else open_file(record)
        try:
            new_claim = _claim(fd, folder, run)
        except BaseException:
            fd.close()
            raise
        _claims[folder] = new_claim
        return new_claim, existing is None


def release(folder: Path) -> None:
    """End a claim of an operation that saves once, such as a merge."""
    with _guard:
        if (existing := _claims.pop(folder, None)) is not None:
            existing.fd.close()


def open_file(path: Path) -> Descriptor:
    """Open a lock file with a descriptor that a forked child closes."""
    return Descriptor.of(lambda: os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666))


def _claim(fd: Descriptor, folder: Path, run: str) -> FolderClaim:
    """Take the lock, and write the record."""
    own_record = JobRecord(run, socket.gethostname(), os.getpid(), time.time(), _start_ticks(os.getpid()))
    for _ in range(_TRIES):
        try:
            # The exclusive lock shows that no other job uses the folder. The conversion to a shared lock is not atomic:
            # another job may get the exclusive lock in between, so the record is read again below.
            if taken := _try_lock(fd, fcntl.LOCK_EX):
                _write(fd, own_record)
            shared = _try_lock(fd, fcntl.LOCK_SH)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            return _claim_without_lock(fd, folder, own_record)
        owner = _read(fd)
        if shared and owner is not None and owner.run == run:
            if not taken:
                _write(fd, msgspec.structs.replace(own_record, since=owner.since))
            return FolderClaim(run, fd, True)
        time.sleep(_PAUSE_S)
    raise _refusal(owner, folder)


def _claim_without_lock(fd: Descriptor, folder: Path, own_record: JobRecord) -> FolderClaim:
    owner, remark = _read(fd), ""
    if owner is not None and owner.run != own_record.run:
        is_dead = owner.is_dead()
        if is_dead is False:
            raise _refusal(owner, folder)
        if is_dead is None:
            remark = (
                f"{owner} has saved into {folder}. This file system has no locks, so allranks cannot detect whether"
                " that job still runs. Its checkpoints are not removed. If it still runs, use one folder per job"
            )
    _write(fd, own_record)
    return FolderClaim(own_record.run, fd, False, remark)


def _refusal(owner: JobRecord | None, folder: Path) -> UsageError:
    owner_name = "another job" if owner is None else str(owner)
    return UsageError(
        f"checkpoint.save: {owner_name} saves into {folder} until its processes have exited.\n"
        "  Use a separate folder for each job."
    )


def _try_lock(fd: Descriptor, operation: int) -> bool:
    try:
        fcntl.flock(fd.fileno(), operation | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _BUSY:
            return False
        raise
    return True


def _read(fd: Descriptor) -> JobRecord | None:
    try:
        return msgspec.json.decode(os.pread(fd.fileno(), _LENGTH, 0), type=JobRecord)
    except msgspec.DecodeError:
        return None  # no process has written it


def _write(fd: Descriptor, owner: JobRecord) -> None:
    os.pwrite(fd.fileno(), msgspec.json.encode(owner).ljust(_LENGTH), 0)


def _start_ticks(pid: int) -> int:
    """Return when a process was started, in kernel ticks; 0 if it does not exist."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        # Field 22 (starttime). The process name in parentheses may contain spaces and parentheses.
        return int(file.read().rpartition(b")")[2].split()[19])
    return 0


# The name of the job.

_run = ""


def agreed_run_id() -> str:
    """Return the name of the job, from its launcher or agreed on by its ranks; "" if it has none yet."""
    found = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return _run or ("" if found == "none" else found)


def agree_on_run_id(names: list[tuple[str, str]]) -> None:
    """Agree with the other ranks on a name: the first decided one, or else the one of rank 0.

    Args:
        names: ``agreed_run_id()`` and ``run_id()`` of each rank.
    """
    global _run
    _run = next((agreed for agreed, _ in names if agreed), names[0][1])


def run_id() -> str:
    """Return the name of the job.

    If there is none, the name stands for this process and the processes that it starts by multiprocessing: they inherit
    its authentication key.
    """
    if found := agreed_run_id():
        return found
    secret = hashlib.blake2b(multiprocessing.current_process().authkey, digest_size=6)
    return f"{socket.gethostname()}-{secret.hexdigest()}"
