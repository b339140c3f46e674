"""Connections between watchers: a rank requests the state of the others.

They are apart from the collectives of the program, one of which hangs, and from torch's store, whose server may have
stopped with its rank. The ranks use the store once, at the start, to publish their addresses and to share a token. A
request with another token is not answered. A connection carries one request and one answer; the end of the stream ends
each.
"""

from __future__ import annotations

import errno
import hmac
import os
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from allranks._base.forks import Socket
from allranks._base.system import reason
from allranks._base.threads import Daemon
from allranks._cluster.network import listen, nearest_first
from allranks._trace.state import RankState
from allranks._watch.arrivals import Arrivals

__all__ = ["Announce", "Collect", "Compare", "InspectProcess", "Peer", "RankAnswer", "Request", "Server", "ask"]

_BACKLOG = 128
_LARGEST = 1 << 24  # bytes of a request or of an answer
_CLOSE_S = 1.0  # seconds for the thread to end; it may be answering a request
_READ_S = 1.0  # for a client to send its request
_AT_A_TIME = 256  # connections, so that a large job stays below the usual limit of 1024 descriptors


class Peer(msgspec.Struct, frozen=True):
    """A rank and the address of its watcher.

    Attributes:
        rank: World rank.
        pid: Pid of its process.
        namespace: The namespace of its pid. Pids of two processes are comparable only in the same namespace.
        host: Name of its host.
        machine: Identity of its host.
        name: Name of the abstract unix socket on which its watcher listens, for ranks of its host.
        addresses: Addresses of its host. Empty if the job has only one host: its watchers open no port.
        port: Port on which its watcher listens; 0 without addresses.
    """

    rank: int
    pid: int
    namespace: str
    host: str
    machine: str
    name: str
    addresses: tuple[str, ...] = ()
    port: int = 0


class Collect(msgspec.Struct, frozen=True, tag=True):
    """Request for the state of a rank.

    Attributes:
        collector: The rank that sends the request.
        limit_s: The limit that its wait has reached.
    """

    collector: int
    limit_s: float


class InspectProcess(msgspec.Struct, frozen=True, tag=True):
    """Request to read the state of another process, which does not answer, from its host's kernel."""

    rank: int
    pid: int


class Announce(msgspec.Struct, frozen=True, tag=True):
    """The text of a report. The rank prints it and exits."""

    text: str


class Compare(msgspec.Struct, frozen=True, tag=True):
    """Request for the times at which the rank began its collectives."""


Request = Collect | InspectProcess | Announce | Compare


class RankAnswer(msgspec.Struct, frozen=True):
    """The state of a rank.

    Attributes:
        state: Its calls and its process.
        place: The line at which its main thread is. "" if unknown.
        stacks: The stacks of its threads.
        problem: Why the rank did not answer itself. "" if it did.
        collecting: The rank itself is collecting states now, so only one of the two needs to report.
        arrivals: When it began its collectives, if the request was for that.
    """

    state: RankState
    place: str = ""
    stacks: str = ""
    problem: str = ""
    collecting: bool = False
    arrivals: Arrivals | None = None


class _AuthenticatedRequest(msgspec.Struct, frozen=True):
    token: bytes
    request: Request


class Server:
    """Answers requests in a thread that waits without the GIL.

    Args:
        name: Name of an abstract unix socket to listen on.
        addresses: Addresses of this host to listen on, too.
        token: The token that a request must have.
        respond: Returns the answer; None for a request that has none.

    Raises:
        OSError: The system provides no port or no thread.
    """

    def __init__(
        self, name: str, addresses: Sequence[str], token: bytes, respond: Callable[[Request], RankAnswer | None]
    ) -> None:
        self._token = token
        self._respond = respond
        self._decoder = msgspec.msgpack.Decoder(_AuthenticatedRequest)
        self._sockets = listen(addresses, 0, _BACKLOG)
        self.port: int = self._sockets[0].getsockname()[1] if self._sockets else 0
        self._sockets.append(Socket(socket.AF_UNIX, socket.SOCK_STREAM))
        self._sockets[-1].bind("\0" + name)
        self._sockets[-1].listen(_BACKLOG)
        self._thread = Daemon(target=self._serve, name="allranks-watch-answers")
        self._thread.start()

    def close(self) -> None:
        """Stop answering."""
        for sock in self._sockets:
            with suppress(OSError):  # ends `accept` in the thread
                sock.shutdown(socket.SHUT_RDWR)
        # As long as the thread polls the sockets, their names remain in use.
        self._thread.join(_CLOSE_S)
        for sock in self._sockets:
            sock.close()

    def _serve(self) -> None:
        with selectors.PollSelector() as selector:
            for sock in self._sockets:
                selector.register(sock, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    try:
                        connection, _ = key.fileobj.accept()  # type: ignore[union-attr]
                    except (OSError, ValueError):  # closed
                        return
                    self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            # A client that breaks off, or that is no watcher, must not end the thread.
            with suppress(OSError, msgspec.MsgspecError):
                connection.settimeout(_READ_S)
                message = self._decoder.decode(_read(connection))
                if hmac.compare_digest(message.token, self._token):
                    answer = self._respond(message.request)
                    connection.sendall(msgspec.msgpack.encode(answer))


def _read(connection: socket.socket) -> bytes:
    data = bytearray()
    while len(data) < _LARGEST and (piece := connection.recv(1 << 16)):
        data += piece
    return bytes(data)


class _PendingRequest:
    """One request: it tries the addresses of the peer one after the other."""

    def __init__(self, peer: Peer, request: bytes, here: bool) -> None:
        self.peer = peer
        self.answer: RankAnswer | None = None
        self.problem = "does not answer"
        self.sock: socket.socket | None = None
        self._request = request
        self._received = bytearray()
        self._targets: list[tuple[int, Any]] = [(socket.AF_UNIX, "\0" + peer.name)]
        if not here:
            self._targets = [
                (socket.AF_INET6 if ":" in address else socket.AF_INET, (address, peer.port))
                for address in nearest_first(peer.addresses)
            ]

    def begin(self) -> bool:
        """Connect to the next address. Return False if there is none."""
        while self._targets:
            family, target = self._targets.pop(0)
            sock = Socket(family, socket.SOCK_STREAM)
            sock.setblocking(False)
            error = sock.connect_ex(target)
            if error in (0, errno.EINPROGRESS):
                self.sock = sock
                self.problem = "cannot be reached"
                return True
            sock.close()
            self._fail(OSError(error, os.strerror(error)))
        return False

    def advance(self) -> bool:
        """Proceed after the socket is ready. Return whether the request is still in progress."""
        assert self.sock is not None
        try:
            if self._request:
                if error := self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    raise OSError(error, os.strerror(error))
                self.problem = "does not answer"
                self._request = self._request[self.sock.send(self._request) :]
                if not self._request:
                    self.sock.shutdown(socket.SHUT_WR)
                return True
            if piece := self.sock.recv(1 << 16):
                self._received += piece
                return len(self._received) < _LARGEST
            if self._received:
                self.answer = msgspec.msgpack.decode(self._received, type=RankAnswer | None)
        except BlockingIOError:
            return True
        except OSError as error:
            self._fail(error)
        except msgspec.MsgspecError:
            self.problem = "sent an answer of another version of allranks"
        return False

    @property
    def writing(self) -> bool:
        """Whether a part of the request has not been sent."""
        return bool(self._request)

    def _fail(self, error: OSError) -> None:
        refused = error.errno in (errno.ECONNREFUSED, errno.ECONNRESET)
        self.problem = "has exited" if refused else f"cannot be reached ({reason(error)})"


def ask(
    peers: Sequence[Peer], request: Request, token: bytes, machine: str, timeout_s: float
) -> tuple[dict[int, RankAnswer], dict[int, str]]:
    """Send a request to ranks.

    Args:
        peers: The ranks.
        request: The request.
        token: The token of the job.
        machine: Identity of this host.
        timeout_s: How long to wait for the answers.

    Returns:
        The answers, by rank, and for each rank without an answer the reason: it ``has exited``, ``cannot be reached``
        or ``does not answer``. The last one means that its host accepts connections for the process, but the process
        does not execute Python code: it is stopped, or a thread holds the GIL.
    """
    message = msgspec.msgpack.encode(_AuthenticatedRequest(token, request))
    answers: dict[int, RankAnswer] = {}
    problems: dict[int, str] = {}
    for first in range(0, len(peers), _AT_A_TIME):
        connections = [
            _PendingRequest(peer, message, peer.machine == machine) for peer in peers[first : first + _AT_A_TIME]
        ]
        _run(connections, time.monotonic() + timeout_s)
        for each in connections:
            if each.answer is not None:
                answers[each.peer.rank] = each.answer
            elif not isinstance(request, Announce):
                problems[each.peer.rank] = each.problem
    return answers, problems


def _run(connections: Sequence[_PendingRequest], until: float) -> None:
    with selectors.PollSelector() as selector:
        for each in connections:
            if each.begin():
                selector.register(_socket(each), selectors.EVENT_WRITE, each)
        while selector.get_map() and (left_s := until - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                each = key.data
                goes_on = each.advance()
                if goes_on:
                    selector.modify(key.fileobj, selectors.EVENT_WRITE if each.writing else selectors.EVENT_READ, each)
                    continue
                selector.unregister(key.fileobj)
                _socket(each).close()
                # Another address of the host may be reachable, unless the process is known to have exited.
                if each.answer is None and each.problem.startswith("cannot be reached") and each.begin():
                    selector.register(_socket(each), selectors.EVENT_WRITE, each)
        for key in list(selector.get_map().values()):
            _socket(key.data).close()


def _socket(connection: _PendingRequest) -> socket.socket:
    assert connection.sock is not None
    return connection.sock
