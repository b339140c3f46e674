"""A store in a file: for processes of one host, or of hosts that share a file system, with no server and no port.

The file is a log of the requests that changed something. Each process replays what others have written into a
``KeyTable`` of its own, does its request there and writes it behind the rest, all of it under the file's lock. A
record has its length and checksum: what a process that was killed in the middle of writing leaves behind is no
record, so nobody reads it, and the next one who writes cuts it off.

The lock is flock's, which Linux carries to NFS servers as a lock on the whole file. It ends when the last copy of its
descriptor is closed, so a forked child closes those that threads of its parent's have at that moment: else it would
hold their lock, and wait for itself. Everybody opens the file anew for each request, which also makes NFS show what
others have written. Who waits looks for it, every 1 to 20 ms: a kernel reports changes on its own host only.

Source: the last one who leaves removes the file, by torch's FileStore; flock(2), fcntl(2), nfs(5).
"""

from __future__ import annotations

import contextlib
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
from allranks._store.stores import Store
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

_MAGIC = b"allranks-file/1\n"
_HEAD = struct.Struct("<II")  # bytes and CRC-32 of a record
_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.02
_LEAVING_S = 5.0  # for the lock, by one who leaves
_logger = logging.getLogger("allranks.store")


class _Came(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Somebody uses the file from now on."""


class _Left(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Somebody does not any more."""


_decode: Callable[[bytes], Request | _Came | _Left] = msgspec.msgpack.Decoder(Request | _Came | _Left).decode


class _Use:
    """Lives as long as a store or one of its clones."""


class FileStore(Store):
    """A store in a file, for all processes that can lock it: those of one host, or of hosts that share a file system.

    With ``world_size`` the last of as many users that leaves (closes the store, drops it or ends) removes the file;
    without, it stays, and what is in it with it. A process that is killed does not leave: the file stays then, too.

    Args:
        file_name: the file; it need not be there yet, its folder must.
        world_size: how many users there are, each with a ``FileStore`` of its own; -1: any number.

    Raises:
        ConfigError: the file is something else, or cannot be opened.

    Cost: some 0.1 ms for a request on a local file system; who waits looks every 1 to 20 ms. The file only grows.
    """

    def __init__(self, file_name: str, world_size: int = -1) -> None:
        if not isinstance(world_size, int) or isinstance(world_size, bool):
            raise UsageError(f"world_size must be a whole number, -1 for any, not {world_size!r}")
        self._path = os.path.abspath(os.fspath(file_name))
        self._log = _Log(self._path)
        self._log.write(_Came(), self.timeout_s)
        self._use = _Use()
        self._finalizer = weakref.finalize(self._use, self._log.leave, world_size)

    @property
    def path(self) -> str:
        """The file."""
        return self._path

    def __str__(self) -> str:
        return f"FileStore({self.path})"

    def _elsewhere(self) -> str:
        return f"make it in the other process, too, as FileStore({self.path!r})"

    def clone(self) -> FileStore:
        """Another object on the same file, with a timeout of its own; both count as one user."""
        return super().clone()

    def close(self) -> None:
        """Leaves; the last of ``world_size`` users removes the file. Idempotent."""
        self._finalizer()

    def _ask(self, request: Request) -> Reply:
        if not self._finalizer.alive:
            raise StoreLostError(f"{self}: this store was closed.")
        if isinstance(request, Peek | ListNames | Length):
            return self._log.read(request, self.timeout_s)
        if not isinstance(request, WaitForKeys | Pop):
            return self._log.write(request, self.timeout_s)
        deadline = time.monotonic() + request.timeout_s
        at_once = msgspec.structs.replace(request, timeout_s=0.0)
        carry_out = self._log.read if isinstance(request, WaitForKeys) else self._log.write
        pause_s = _PAUSE_S
        while True:
            seen = self._log.position  # before the request: another thread may read on meanwhile
            reply = carry_out(at_once, self.timeout_s)
            while isinstance(reply, WaitTimedOut) and (left_s := deadline - time.monotonic()) > 0:
                time.sleep(min(pause_s, left_s))
                if self._log.has_grown(seen):  # also where somebody was killed in the middle of writing
                    break
                pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)
            else:
                return reply


class _Log:
    """The file, and what this process has read of it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._forks = forks()
        self._inode: int | None = None
        self.abandon()
        follow(self)

    def abandon(self) -> None:
        """In a forked child: reads the file anew, as a thread of the parent's may have been reading."""
        self._lock = threading.Lock()
        self.position = 0  # bytes, up to the end of the last whole record
        self._table = KeyTable()
        self._users = 0
        self._left = 0

    def read(self, request: Request, patience_s: float) -> Reply:
        """Answers a request that changes nothing."""
        with self._open(fcntl.LOCK_SH, patience_s) as file:
            self._catch_up(file)
            return self._replay(request)

    def write(self, request: Request | _Came | _Left, patience_s: float) -> Reply:
        """Carries out a request that changes something: what it answers is what everybody's replay answers."""
        payload = encode(request)
        if len(payload) > FRAME_LIMIT:
            raise UsageError(
                f"FileStore({self._path}): {len(payload)} bytes, the limit is {FRAME_LIMIT}."
                " Data travels by send or broadcast."
            )
        with self._open(fcntl.LOCK_EX, patience_s) as file:
            self._catch_up(file)
            if isinstance(request, Pop) and self._replay(Length(request.key)) == RequestDone(0):
                return WaitTimedOut([request.key])
            return self._append(file, payload)

    def has_grown(self, seen: int) -> bool:
        """Whether there may be something behind that position."""
        try:
            with open(self._path, "rb", buffering=0) as file:  # NFS asks its server when a file is opened
                return os.fstat(file.fileno()).st_size != seen
        except OSError:
            return True  # the next request reports what is wrong

    def leave(self, world_size: int) -> None:
        """Says that this user is gone; removes the file if it was the last."""
        if self._forks != forks():  # a forked child has not come
            return
        try:
            with self._open(fcntl.LOCK_EX, _LEAVING_S) as file:
                self._catch_up(file)
                self._append(file, encode(_Left()))
                if self._users == 0 and 0 < world_size <= self._left:
                    os.unlink(self._path)
        except (StoreLostError, TimeoutError) as error:  # somebody else has removed it, or holds it
            _logger.debug("%s", error)

    @contextlib.contextmanager
    def _open(self, lock: int, patience_s: float) -> Iterator[Descriptor]:
        """Opens and locks the file; makes it for the first request, which is _Came."""
        deadline = time.monotonic() + max(patience_s, 0.0)
        first = self._inode is None
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if first else 0)
        began = forks()
        with self._lock:
            while True:
                try:
                    if first:
                        plain_file(self._path)  # the last user removes it
                    file = Descriptor.of(lambda: os.open(self._path, flags, 0o600))
                except OSError as error:
                    kind = ConfigError if first else StoreLostError
                    raise kind(f"FileStore({self._path}): cannot be opened: {reason(error)}.") from None
                try:
                    self._acquire(file, lock, deadline, patience_s)
                    inode = os.fstat(file.fileno()).st_ino
                    if self._is_named(inode):
                        if self._inode not in (None, inode):
                            raise StoreLostError(f"FileStore({self._path}): it is another file now.")
                        self._inode = inode
                        yield file
                        if began != forks():  # by a signal handler, in the middle of it
                            raise self._forked()
                        return
                    if not first:
                        raise StoreLostError(f"FileStore({self._path}): the file was removed.")
                    # The last user of an earlier one removed it, while this one waited for the lock.
                except (OSError, ValueError) as error:
                    if began == forks():
                        raise
                    raise self._forked() from error
                finally:
                    if began != forks():
                        self.abandon()  # again: this request may have gone on with what the child has read
                    file.close()  # and with it the lock

    def _forked(self) -> NotInitializedError:
        return refusal(f"this request to FileStore({self._path})", "Make it in the child anew")

    def _is_named(self, inode: int) -> bool:
        try:
            return os.stat(self._path).st_ino == inode
        except FileNotFoundError:
            return False

    def _acquire(self, file: Descriptor, lock: int, deadline: float, patience_s: float) -> None:
        pause_s = 0.0001
        while True:
            try:
                fcntl.flock(file.fileno(), lock | fcntl.LOCK_NB)  # a process that is stopped may hold it
                return
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TimeoutError(
                        f"FileStore({self._path}): another process holds its lock for {patience_s:.1f} s.\n"
                        "  Is one of its users stopped? (fuser shows who has it open.)"
                    ) from None
            except OSError as error:
                raise ConfigError(
                    f"FileStore({self._path}): cannot be locked: {reason(error)}. Expected a file system with locks."
                ) from None
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, 0.005)

    def _catch_up(self, file: Descriptor) -> Reply:
        """Replays what has been written since; returns the answer to the last of it."""
        size = os.fstat(file.fileno()).st_size
        if size < self.position:
            raise StoreLostError(f"FileStore({self._path}): it was cut short by something else.")
        data = memoryview(_read(file, self.position, size))
        reply: Reply = RequestDone()
        at = 0
        if self.position == 0:
            if bytes(data[: len(_MAGIC)]) != _MAGIC[: len(data)]:
                raise ConfigError(f"{self._path} is not the file of a FileStore. Expected one that is new, or empty.")
            at = len(_MAGIC)
        while at + _HEAD.size <= len(data):
            length, checksum = _HEAD.unpack_from(data, at)
            payload = data[at + _HEAD.size : at + _HEAD.size + length]
            if not 0 < length == len(payload) or zlib.crc32(payload) != checksum:
                break  # its writer was killed in the middle of it
            reply = self._replay(_decode(bytes(payload)))
            at += _HEAD.size + length
        if at <= len(data):
            self.position += at
        return reply

    def _append(self, file: Descriptor, payload: bytes) -> Reply:
        record = (b"" if self.position else _MAGIC) + _HEAD.pack(len(payload), zlib.crc32(payload)) + payload
        try:
            os.ftruncate(file.fileno(), self.position)  # cuts off what is no record
            while record:
                record = record[os.pwrite(file.fileno(), record, os.fstat(file.fileno()).st_size) :]
        except OSError as error:
            os.ftruncate(file.fileno(), self.position)
            raise StoreLostError(f"FileStore({self._path}): cannot be written: {reason(error)}.") from error
        return self._catch_up(file)

    def _replay(self, request: Request | _Came | _Left) -> Reply:
        if isinstance(request, _Came):
            self._users += 1
        elif isinstance(request, _Left):
            self._users -= 1
            self._left += 1
        else:
            [(_, reply)] = self._table.handle(None, request, 0.0)
            return reply
        return RequestDone()


def _read(file: Descriptor, at: int, end: int) -> bytes:
    parts = []
    while at < end and (part := os.pread(file.fileno(), end - at, at)):
        parts.append(part)
        at += len(part)
    return b"".join(parts)
