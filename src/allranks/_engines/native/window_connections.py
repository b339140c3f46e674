"""The connections of windows between hosts.

Each pair of ranks that communicate has a connection of its own (``tcp``, WINDOW). A thread of the owner of a memory
reads it, and writes the received bytes into the memory.
"""

from __future__ import annotations

import enum
import errno
import queue
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from torch import Tensor

from allranks._base.errors import PeerLostError, TimeoutError
from allranks._base.forks import Socket, guard
from allranks._base.system import reason
from allranks._base.threads import Daemon
from allranks._engines.native.window_memory import bytes_of
from allranks._net.sockets import keep_alive

__all__ = ["RequestKind", "WindowConnection", "WindowConnections"]

_SLICE_S = 0.05  # seconds between two checks for lost ranks and signals of the system
_LOST_AFTER_S = 15  # seconds until a vanished host ends a connection, as for the other connections (``tcp``)
_BROKEN_OFF = "an earlier call was interrupted or timed out"
_SMALL_BYTES = 16 << 10  # a payload that is copied behind its head, which costs less than a second system call
_HEAD = struct.Struct("!BxxxIQQ")  # kind, number of the window, offset or number of the request, bytes of the payload


class RequestKind(enum.IntEnum):
    """What a frame of a connection requests."""

    PUT = 1
    SIGNAL = 2
    GET = 3
    REPLY = 4


class _Served(NamedTuple):
    """A window of this rank.

    Attributes:
        memory: The registered bytes.
        requests: Number of requests that have been served, by rank.
        add_signal: Counts a signal for the first rank, of the second one.
    """

    memory: memoryview
    requests: list[int]
    add_signal: Callable[[int, int], None]


class WindowConnections:
    """The connections of a group's windows with ranks of other hosts.

    Attributes:
        timeout_s: Seconds that a call waits for another rank. The engine sets it before the first window exists.
    """

    def __init__(self, group: str, rank: int, ask: Callable[[int], None]) -> None:
        """Begin without connections. ``ask`` requests one with a rank."""
        self.group = group
        self.rank = rank
        self.timeout_s = 0.0
        self._ask = ask
        self.changed = threading.Condition()
        self._connections: dict[int, WindowConnection] = {}
        self._troubles: dict[int, str] = {}
        self._served: dict[int, _Served] = {}

    def add(self, number: int, memory: memoryview, ranks: int, count: Callable[[int, int], None]) -> None:
        """Serve a window of this rank."""
        self._served[number] = _Served(memory, [0] * ranks, count)

    def remove(self, number: int) -> None:
        self._served.pop(number, None)

    def take(self, peer: int, connection: Socket, greeting: bytes) -> None:
        """Take over a connection, on which ``greeting`` must be sent first. The server's thread calls it."""
        with suppress(OSError):  # it has closed, which the thread of the connection detects
            connection.send(greeting)
        keep_alive(connection, _LOST_AFTER_S, must_read=False)
        # Otherwise a signal could wait 40 ms for the acknowledgement of an earlier request.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        with self.changed:
            self._connections[peer] = WindowConnection(self, peer, connection)
            self.changed.notify_all()

    def give_up(self, peer: int, why: str) -> None:
        """Note that there is no connection with a rank. The server's thread calls it."""
        with self.changed:
            self._troubles[peer] = why
            self.changed.notify_all()

    def to(self, peer: int) -> WindowConnection:
        """Return the connection with a rank. Create it if there is none."""
        with self.changed:
            if peer not in self._connections:
                self._ask(peer)
            deadline = time.monotonic() + self.timeout_s
            while peer not in self._connections:
                self.check(peer)
                if not self.changed.wait(_SLICE_S) and time.monotonic() > deadline:
                    raise self.timed_out(peer, "could not be connected")
            return self._connections[peer]

    def check(self, peer: int) -> None:
        """Raise if the connection with a rank has failed."""
        found = self._connections.get(peer)
        why = self._troubles.get(peer) if found is None else found.failed
        if why:
            raise PeerLostError(
                f"{self._where()}: no connection with rank {peer}: {why}.\n  Check the end of its output.", peer
            )

    def is_read(self, peer: int) -> bool:
        """Return whether data of a rank may still arrive."""
        found = self._connections.get(peer)
        return found is not None and found.is_read

    def timed_out(self, peer: int, what: str) -> TimeoutError:
        """Return the error of a call that has waited too long for a rank. ``what``: what the rank has not done."""
        error = TimeoutError(
            f"{self._where()}: rank {peer} {what} in {self.timeout_s:g} s.\n  Check whether it is stopped."
        )
        error.ranks = (peer,)
        return error

    def wait_for_requests(self, number: int, expected: Sequence[int], check: Callable[[int], None]) -> None:
        """Wait until as many requests of each rank have been served."""
        served, deadline = self._served[number].requests, time.monotonic() + self.timeout_s
        with self.changed:
            for peer, sent in enumerate(expected):
                while served[peer] < sent:
                    if not self.is_read(peer):
                        check(peer)
                    if not self.changed.wait(_SLICE_S) and time.monotonic() > deadline:
                        raise self.timed_out(peer, "did not deliver its data")

    def part(self, number: int, offset: int, nbytes: int, peer: int) -> memoryview:
        """Return the part of a window of this rank to which a request of another rank refers."""
        served = self._served.get(number)
        if served is None or offset + nbytes > len(served.memory):
            raise ValueError(f"rank {peer} requested bytes {offset} to {offset + nbytes} of window {number}")
        return served.memory[offset : offset + nbytes]

    def note(self, number: int, peer: int, signals: bool) -> None:
        """Note that a request has been served."""
        if (served := self._served.get(number)) is not None:
            if signals:
                served.add_signal(self.rank, peer)
            with self.changed:
                served.requests[peer] += 1
                self.changed.notify_all()

    def close(self) -> None:
        with self.changed:
            for connection in self._connections.values():
                connection.fail("the group was closed")
        self._served.clear()  # the windows, which own memory

    def _where(self) -> str:
        return f"window on group '{self.group}' (rank {self.rank})"


class _Fetch(NamedTuple):
    into: Tensor
    done: threading.Event


class WindowConnection:
    """The connection of the windows of a group with one rank of another host.

    Attributes:
        failed: Why it has ended. "" as long as it has not.
        is_read: Data may still arrive.
    """

    def __init__(self, owner: WindowConnections, peer: int, connection: Socket) -> None:
        self.failed, self.is_read = "", True
        self._owner, self._peer, self._socket = owner, peer, connection
        self._writing = threading.Lock()
        self._fetches: dict[int, _Fetch] = {}
        self._fetched = 0
        self._replies: queue.SimpleQueue[tuple[int, int, memoryview] | None] = queue.SimpleQueue()
        # Two threads: the reader never waits for the other rank to read. Otherwise two ranks that fetch from each other
        # could both wait for the other's reader.
        for run in (self._read, self._reply):
            Daemon(target=run, name="allranks-window").start()

    def send(
        self, kind: RequestKind, number: int, position: int, payload: memoryview, nbytes: int | None = None
    ) -> None:
        """Send a frame. Return when the kernel has the payload, so that the caller may change it."""
        head = memoryview(_HEAD.pack(kind, number, position, len(payload) if nbytes is None else nbytes))
        with self._writing:
            try:
                # One packet, if the payload is small.
                self._send_all(memoryview(b"".join((head, payload))) if len(payload) <= _SMALL_BYTES else head)
                if len(payload) > _SMALL_BYTES:
                    self._send_all(payload)
            except BaseException as error:
                # A part of the frame may have been sent, so nothing can follow it.
                is_lost = isinstance(error, OSError) and not isinstance(error, TimeoutError)
                self.fail(reason(error) if is_lost else _BROKEN_OFF)
                if not is_lost:
                    raise
        self._check()

    def _send_all(self, data: memoryview) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        deadline = time.monotonic() + self._owner.timeout_s
        while data and not self.failed:
            try:
                data = data[self._socket.send(data) :]
                deadline = time.monotonic() + self._owner.timeout_s
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise self._owner.timed_out(self._peer, "did not read") from None
                poll.poll(_SLICE_S * 1000)

    def fetch(self, number: int, offset: int, into: Tensor) -> None:
        """Read bytes of the other rank's window."""
        with self._writing:
            self._fetched += 1
            request = self._fetched
        fetch = self._fetches[request] = _Fetch(into, threading.Event())
        try:
            self.send(RequestKind.GET, number, offset, memoryview(struct.pack("!Q", request)), into.nbytes)
            deadline = time.monotonic() + self._owner.timeout_s
            while not fetch.done.wait(_SLICE_S):
                self._check()
                if time.monotonic() > deadline:
                    raise self._owner.timed_out(self._peer, "did not send its memory")
        except BaseException:
            # Otherwise a late reply would change the caller's tensor.
            self._fetches.pop(request, None)
            self.fail(_BROKEN_OFF)
            raise
        self._check()

    def fail(self, why: str) -> None:
        """End the connection."""
        if not self.failed:
            self.failed = why
            with suppress(OSError):  # it is closed already
                self._socket.shutdown(socket.SHUT_RDWR)
            self._replies.put(None)

    def _check(self) -> None:
        if self.failed:
            self._owner.check(self._peer)

    # The threads of the connection.

    def _read(self) -> None:
        try:
            head = memoryview(bytearray(_HEAD.size))
            while self._fill(head, may_end=True):
                self._serve(*_HEAD.unpack(head))
            self.fail("it closed the connection")
        except (OSError, ValueError) as error:
            self.fail(reason(error) if isinstance(error, OSError) else str(error))
        self.is_read = False
        with self._owner.changed:
            self._owner.changed.notify_all()
        for fetch in list(self._fetches.values()):
            fetch.done.set()
        with guard:
            self._socket.close()

    def _serve(self, kind: int, number: int, position: int, nbytes: int) -> None:
        owner = self._owner
        match kind:
            case RequestKind.PUT:
                self._fill(owner.part(number, position, nbytes, self._peer))
                owner.note(number, self._peer, signals=True)
            case RequestKind.SIGNAL:
                owner.note(number, self._peer, signals=True)
            case RequestKind.GET:
                request = memoryview(bytearray(8))
                self._fill(request)
                memory = owner.part(number, position, nbytes, self._peer)
                self._replies.put((number, struct.unpack("!Q", request)[0], memory))
                owner.note(number, self._peer, signals=False)
            case RequestKind.REPLY:
                fetch = self._fetches.pop(position, None)
                if fetch is None:
                    raise ValueError(f"rank {self._peer} sent a reply to no request")
                self._fill(bytes_of(fetch.into))
                fetch.done.set()
            case _:
                raise ValueError(f"rank {self._peer} sent an unknown request, {kind}")

    def _reply(self) -> None:
        while (reply := self._replies.get()) is not None:
            number, request, memory = reply
            with suppress(PeerLostError, TimeoutError):  # the reader ends, too
                self.send(RequestKind.REPLY, number, request, memory)

    def _fill(self, into: memoryview, may_end: bool = False) -> bool:
        """Receive bytes. ``may_end``: return False if the other rank has closed the connection before the first one."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        left = into
        while left:
            try:
                received = self._socket.recv_into(left)
            except BlockingIOError:
                poll.poll()
                continue
            if not received:
                if may_end and len(left) == len(into):
                    return False
                raise ConnectionResetError(errno.ECONNRESET, "it closed the connection within a request")
            left = left[received:]
        return True
