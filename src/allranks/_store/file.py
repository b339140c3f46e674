"""A store in a file, for processes of one host or of hosts that share a file system. It needs no server and no port.

The file is a log of the requests that change the store. Each process replays the records of the other processes into
its own ``KeyTable``, and appends its own requests. It holds the lock of the file while it does so. Every record
contains its length and checksum. If a process is killed while it writes, its incomplete record is invalid. Readers
ignore it, and the next writer removes it.

The lock is a flock. Linux maps it to a lock on the whole file on NFS servers. It is released when the last copy of its
descriptor is closed. A forked child therefore closes the descriptors that threads of its parent have open. Otherwise
the child would hold their lock and wait for itself. Every request opens the file again, which also makes NFS show the
records of other hosts. A waiting caller checks the file every 1 to 20 ms, because a kernel reports changes on its own
host only.

Source: torch's FileStore, in which the last user removes the file; flock(2), fcntl(2), nfs(5).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import struct
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator

import msgspec

from allranks._base.errors import ConfigError, NotInitializedError, StoreLostError, TimeoutError, UsageError
from allranks._base.files import plain_file
from allranks._base.forks import Descriptor, follow, forks, refusal
from allranks._base.system import reason
from allranks._base.system import refusal as limit_refusal
from allranks._store.stores import Store, UserToken
from allranks._store.table import KeyTable
from allranks._store.wire import (
    FRAME_LIMIT,
    Length,
    ListNames,
    Peek,
    Pop,
    Reply,
    Request,
    RequestDone,
    WaitForKeys,
    WaitTimedOut,
    encode,
)

__all__ = ["FileStore"]

_CHOOSE = "Choose a file in an existing folder in which this user can write."
_KEEP = "Keep the file while any process uses it, and use another file for each job."
_MAGIC = b"allranks-file/1\n"
_HEAD = struct.Struct("<II")  # bytes and CRC-32 of a record
# Seconds between two checks of the file. Waiting callers poll, because inotify reports no writes of other hosts.
_PAUSE_S, _MAX_PAUSE_S = 0.001, 0.02
_LEAVE_TIMEOUT_S = 5.0  # limit of the wait for the lock when a user leaves, so that a held lock does not block its exit
_logger = logging.getLogger("allranks.store")


class _UserJoined(msgspec.Struct, frozen=True, array_like=True, tag="_Came"):
    """Record: the file has one more user."""


class _UserLeft(msgspec.Struct, frozen=True, array_like=True, tag="_Left"):
    """Record: the file has one user less."""


_decode: Callable[[bytes], Request | _UserJoined | _UserLeft] = msgspec.msgpack.Decoder(
    Request | _UserJoined | _UserLeft
).decode


class FileStore(Store):
    """A store in a file, for the processes of one host or of hosts that share a file system.

    A user leaves when it closes or drops the store, or exits. With ``world_size``, the last of ``world_size`` users to
    leave removes the file. Without it, the file and its values remain. A killed process does not leave, so the file
    remains in that case, too.

    Args:
        file_name: The file. Its folder must exist; the file is created if it is missing.
        world_size: The number of users, each with its own ``FileStore``; -1: any number.

    Raises:
        ConfigError: The file is not the file of a store, or cannot be opened.

    Cost: about 0.1 ms for a request on a local file system. A wait checks the file every 1 to 20 ms. The file never
    shrinks.
    """

    def __init__(self, file_name: str, world_size: int = -1) -> None:
        if not isinstance(world_size, int) or isinstance(world_size, bool):
            raise UsageError(f"FileStore: world_size must be a whole number, -1 for any, not {world_size!r}")
        self._path = os.path.abspath(os.fspath(file_name))
        self._log = _Log(self._path)
        # This record creates the file, so a wrong path is reported here and not by the first request.
        self._log.write(_UserJoined(), self.timeout_s)
        self._user_token = UserToken()
        self._finalizer = weakref.finalize(self._user_token, self._log.leave, world_size)

    @property
    def path(self) -> str:
        """The absolute path of the file."""
        return self._path

    def __str__(self) -> str:
        return f"FileStore({self.path})"

    def _copy_advice(self) -> str:
        return f"Create FileStore({self.path!r}) in the other process, too."

    def clone(self) -> FileStore:
        """Return another object for the same file, with a separate timeout. Both count as one user."""
        return super().clone()

    def close(self) -> None:
        """Leave the store. The last of ``world_size`` users removes the file. Idempotent."""
        self._finalizer()

    def _execute(self, request: Request) -> Reply:
        if not self._finalizer.alive:
            raise StoreLostError(
                f"{self}: close() was called on this store.\n  Use the store before close(), or create a new one."
            )
        if isinstance(request, Peek | ListNames | Length):
            # Readers take a shared lock, so they do not block each other.
            return self._log.read(request, self.timeout_s)
        if not isinstance(request, WaitForKeys | Pop):
            return self._log.write(request, self.timeout_s)
        deadline = time.monotonic() + request.timeout_s
        # A wait repeats an immediate request. If it slept with the lock, no other process could set the key.
        without_wait = msgspec.structs.replace(request, timeout_s=0.0)
        # A pop removes a value, so it is a record and needs the exclusive lock.
        execute = self._log.read if isinstance(request, WaitForKeys) else self._log.write
        pause_s = _PAUSE_S
        while True:
            # Taken before the request: a record that another thread replays after it must still count as growth.
            position = self._log.position
            reply = execute(without_wait, self.timeout_s)
            while isinstance(reply, WaitTimedOut) and (left_s := deadline - time.monotonic()) > 0:
                time.sleep(min(pause_s, left_s))
                if self._log.has_grown(position):  # also true if a writer was killed, and left an incomplete record
                    break
                pause_s = min(pause_s * 1.5, _MAX_PAUSE_S)
            else:
                return reply


class _Log:
    """The file, and the state that this process has replayed from it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._forks = forks()
        self._inode: int | None = None
        self.abandon()
        follow(self)

    def abandon(self) -> None:
        """Reset the state in a forked child, because a thread of the parent may have been changing it.

        The child reads the file from the beginning.
        """
        self._lock = threading.Lock()
        self.position = 0  # end of the last complete record, in bytes
        self._table = KeyTable()
        self._users = 0
        self._departures = 0

    def read(self, request: Request, patience_s: float) -> Reply:
        """Execute a request that does not change the store."""
        with self._open(fcntl.LOCK_SH, patience_s) as file:
            self._catch_up(file)
            return self._replay(request)

    def write(self, request: Request | _UserJoined | _UserLeft, patience_s: float) -> Reply:
        """Execute a request that changes the store. The reply is the result of its replay, equal in all processes."""
        payload = encode(request)
        if len(payload) > FRAME_LIMIT:
            raise UsageError(
                f"FileStore({self._path}): a request of {len(payload)} bytes exceeds the limit of {FRAME_LIMIT}"
                " bytes.\n"
                "  Transfer data with send or broadcast."
            )
        with self._open(fcntl.LOCK_EX, patience_s) as file:
            self._catch_up(file)
            # A pop from an empty queue changes nothing, so it is not recorded.
            if isinstance(request, Pop) and self._replay(Length(request.key)) == RequestDone(0):
                return WaitTimedOut([request.key])
            return self._append(file, payload)

    def has_grown(self, position: int) -> bool:
        """Return whether the file may contain bytes after a position."""
        try:
            with open(self._path, "rb", buffering=0) as file:  # NFS fetches the current size when a file is opened
                return os.fstat(file.fileno()).st_size != position
        except OSError:
            return True  # the next request reports the error

    def leave(self, world_size: int) -> None:
        """Record that this user leaves. Remove the file if this was the last user."""
        if self._forks != forks():  # a forked child does not count as a user
            return
        try:
            with self._open(fcntl.LOCK_EX, _LEAVE_TIMEOUT_S) as file:
                self._catch_up(file)
                self._append(file, encode(_UserLeft()))
                # Departures count, too: no user may be present between the departure of the first and the arrival of
                # the second.
                if self._users == 0 and 0 < world_size <= self._departures:
                    # Removed under the lock: a process that waits for the lock then sees in `_open` that the name is
                    # gone.
                    os.unlink(self._path)
        except (StoreLostError, TimeoutError) as error:  # the file was removed, or another process holds its lock
            _logger.debug("%s", error)

    @contextlib.contextmanager
    def _open(self, lock: int, patience_s: float) -> Iterator[Descriptor]:
        """Open and lock the file. The first request, which is ``_UserJoined``, creates it if it is missing."""
        deadline = time.monotonic() + max(patience_s, 0.0)
        first = self._inode is None
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if first else 0)
        began = forks()
        # Threads exclude each other here: two readers hold the shared lock of the file, but replay into one table.
        with self._lock:
            while True:
                try:
                    if first:
                        plain_file(self._path)  # checked because the last user removes the file
                    file = Descriptor.of(lambda: os.open(self._path, flags, 0o600))
                except OSError as error:
                    kind, action = (ConfigError, _CHOOSE) if first else (StoreLostError, _KEEP)
                    what = f"FileStore({self._path}): cannot be opened"
                    # A limit of open files does not depend on the path.
                    at_limit = error.errno in (errno.EMFILE, errno.ENFILE)
                    raise kind(
                        limit_refusal(what, error) if at_limit else f"{what}: {reason(error)}.\n  {action}"
                    ) from None
                try:
                    self._acquire(file, lock, deadline, patience_s)
                    inode = os.fstat(file.fileno()).st_ino
                    # Checked with the lock held, because a last user holds it while it removes the file.
                    if self._is_named(inode):
                        if self._inode not in (None, inode):
                            raise StoreLostError(
                                f"FileStore({self._path}): another file has replaced the file.\n  {_KEEP}"
                            )
                        self._inode = inode
                        yield file
                        if began != forks():  # a signal handler forked during the request, and this is the child
                            raise self._forked()
                        return
                    if not first:
                        raise StoreLostError(f"FileStore({self._path}): the file was removed.\n  {_KEEP}")
                    # The last user of the previous file removed it while this process waited for the lock. Try again.
                except (OSError, ValueError) as error:
                    if began == forks():
                        raise
                    raise self._forked() from error
                finally:
                    if began != forks():
                        self.abandon()  # again: after the fork, this request may have changed the state that was reset
                    file.close()  # releases the lock, too

    def _forked(self) -> NotInitializedError:
        return refusal(f"this request to FileStore({self._path})", "Create a new FileStore in the child.")

    def _is_named(self, inode: int) -> bool:
        try:
            return os.stat(self._path).st_ino == inode
        except FileNotFoundError:
            return False

    def _acquire(self, file: Descriptor, lock: int, deadline: float, patience_s: float) -> None:
        # Seconds. A request holds the lock for about 0.1 ms.
        pause_s = 0.0001
        while True:
            try:
                # Does not block: a stopped process may hold the lock, and flock has no timeout.
                fcntl.flock(file.fileno(), lock | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TimeoutError(
                        f"FileStore({self._path}): another process has held its lock for {patience_s:.1f} s.\n"
                        f"  Check whether a process that uses the file is stopped: fuser {self._path} lists these"
                        " processes."
                    ) from None
            except OSError as error:
                raise ConfigError(
                    f"FileStore({self._path}): cannot be locked: {reason(error)}.\n"
                    "  Choose a file on a file system that supports locks (flock)."
                ) from None
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, 0.005)

    def _catch_up(self, file: Descriptor) -> Reply:
        """Replay the new records. Return the reply to the last one."""
        size = os.fstat(file.fileno()).st_size
        if size < self.position:
            raise StoreLostError(f"FileStore({self._path}): another program truncated the file.\n  {_KEEP}")
        data = memoryview(_read(file, self.position, size))
        reply: Reply = RequestDone()
        offset = 0
        if self.position == 0:
            # Compares only the bytes that exist: the first writer may have been killed within the magic number.
            if bytes(data[: len(_MAGIC)]) != _MAGIC[: len(data)]:
                raise ConfigError(f"{self._path} is not the file of a FileStore. Expected a new or empty file.")
            offset = len(_MAGIC)
        while offset + _HEAD.size <= len(data):
            length, checksum = _HEAD.unpack_from(data, offset)
            payload = data[offset + _HEAD.size : offset + _HEAD.size + length]
            if not 0 < length == len(payload) or zlib.crc32(payload) != checksum:
                break  # its writer was killed while it wrote the record
            reply = self._replay(_decode(bytes(payload)))
            offset += _HEAD.size + length
        if offset <= len(data):  # otherwise the magic number is incomplete, and the next writer writes it again
            self.position += offset
        return reply

    def _append(self, file: Descriptor, payload: bytes) -> Reply:
        record = (b"" if self.position else _MAGIC) + _HEAD.pack(len(payload), zlib.crc32(payload)) + payload
        try:
            os.ftruncate(file.fileno(), self.position)  # removes the incomplete record of a killed writer
            while record:
                record = record[os.pwrite(file.fileno(), record, os.fstat(file.fileno()).st_size) :]
        except OSError as error:
            os.ftruncate(file.fileno(), self.position)  # removes the incomplete record, for example on a full disk
            raise StoreLostError(
                f"FileStore({self._path}): cannot be written: {reason(error)}.\n"
                "  Free space on its file system, or choose a file on another one."
            ) from error
        return self._catch_up(file)

    def _replay(self, request: Request | _UserJoined | _UserLeft) -> Reply:
        if isinstance(request, _UserJoined):
            self._users += 1
        elif isinstance(request, _UserLeft):
            self._users -= 1
            self._departures += 1
        else:
            # Replayed requests have a timeout of 0, so none waits. Exactly one reply is due, and the time is
            # irrelevant.
            [(_, reply)] = self._table.handle(None, request, 0.0)
            return reply
        return RequestDone()


def _read(file: Descriptor, position: int, end: int) -> bytes:
    parts = []
    while position < end and (part := os.pread(file.fileno(), end - position, position)):
        parts.append(part)
        position += len(part)
    return b"".join(parts)
