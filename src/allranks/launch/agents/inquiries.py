"""Answers commands of the same user that request the state of this job's ranks (the other side: ``_trace/jobs``).

The launcher has such a socket. So has the agent of every other host, which forwards requests to the launcher. A
connection that requests nothing costs a descriptor until the job ends; at most 16 connections exist.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket

import msgspec

from allranks._net.sockets import unix_peer
from allranks._trace.jobs import Question, own_address

__all__ = ["Inquiries"]

_MOST = 16  # simultaneous connections, each of which costs a descriptor
_LINE = 1 << 12  # bytes; a longer line is no request
_numbers = itertools.count()


class Inquiries:
    """The socket of one job.

    Attributes:
        fd: readable when `take` has work.
    """

    def __init__(self) -> None:
        # One descriptor for the listener and all connections, so that the owner watches a single one.
        self._epoll = select.epoll()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._listener.setblocking(False)
        with contextlib.suppress(OSError):  # without a socket no command can send a request; the job continues
            self._listener.bind(own_address(next(_numbers)))
            self._listener.listen(_MOST)
            self._epoll.register(self._listener, select.EPOLLIN)
        self._connections: dict[socket.socket, bytes] = {}
        self._asking: list[socket.socket] = []

    @property
    def fd(self) -> int:
        """See the class."""
        return self._epoll.fileno()

    def take(self) -> list[Question]:
        """Return the requests that have arrived."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # no connection, or it was closed again
                break
            # An abstract socket has no file permissions, so the kernel's record of the peer's user decides.
            if unix_peer(connection)[1] in (os.geteuid(), 0) and len(self._connections) + len(self._asking) < _MOST:
                connection.setblocking(False)
                self._connections[connection] = b""
                self._epoll.register(connection, select.EPOLLIN)
            else:
                connection.close()
        questions = []
        for connection in list(self._connections):  # a copy: ``_read`` removes entries
            if (question := self._read(connection)) is not None:
                questions.append(question)
        return questions

    def answer(self, answer: bytes) -> None:
        """Answer all pending requests."""
        for connection in self._asking:
            with contextlib.suppress(OSError), connection:  # the other side has disconnected
                connection.settimeout(1.0)  # blocking with a limit: the other side waits for the answer, and reads it
                connection.sendall(answer)
        self._asking.clear()

    def close(self) -> None:
        """Close the socket. A command that still waits detects from this that the job has ended."""
        for connection in (self._listener, *self._connections, *self._asking):
            connection.close()
        self._connections.clear()
        self._asking.clear()
        self._epoll.close()

    def _read(self, connection: socket.socket) -> Question | None:
        try:
            data = connection.recv(_LINE)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        line = self._connections[connection] + data
        if data and len(line) < _LINE and b"\n" not in line:
            self._connections[connection] = line
            return None
        del self._connections[connection]
        self._epoll.unregister(connection)
        try:
            question = msgspec.json.decode(line, type=Question)
        except msgspec.DecodeError:
            connection.close()
            return None
        self._asking.append(connection)
        return question
