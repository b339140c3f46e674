"""Messages between the master and its workers before the first command: addresses and identities."""

from __future__ import annotations

import contextlib
import select
import socket
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from allranks._net.frames import FrameDecoder, WireError, pack_frame, read_frame
from allranks._net.secret import load_secret, store_secret
from allranks._rendezvous.rendezvous import Member

__all__ = [
    "TIMEOUT_S", "MasterEndpoint", "Welcome", "WorkerConnection", "WorkerHello", "WorkerReady", "close_connection",
    "is_closed", "receive_message", "send_message",
]  # fmt: skip

TIMEOUT_S = 300.0  # default time limit, in seconds, for the workers to connect
_LIMIT = 1 << 20  # maximum bytes of a message

T = TypeVar("T")


class MasterEndpoint(msgspec.Struct, frozen=True):
    """The addresses of a master.

    Attributes:
        machine: Its host, see ``_cluster.network.machine``.
        store: The address of its store, for workers on its host.
        listener: The unix socket on which it listens for workers on its host.
        stores: The addresses of its store, for workers on other hosts.
        addresses: The addresses on which it listens for workers on other hosts.
        port: The port of these addresses.
        size: The number of processes.
        token: The secret that proves that a process belongs to the job; "" if it is derived from the salt and the job's
            secret.
        salt: A string that only this job has.
    """

    machine: str
    store: str
    listener: str
    stores: tuple[str, ...]
    addresses: tuple[str, ...]
    port: int
    size: int
    token: str
    salt: str

    def secret(self) -> bytes:
        """Return the secret that proves that a process belongs to the job."""
        return self.token.encode() or store_secret(load_secret(), self.salt)


class WorkerHello(msgspec.Struct, frozen=True):
    """The first message of a worker."""

    member: Member


class Welcome(msgspec.Struct, frozen=True):
    """The master's answer: the device on which to work, and the function that is the worker's program."""

    device: str
    serve: str


class WorkerReady(msgspec.Struct, frozen=True):
    """The last message of a worker before its program starts. ``trouble``: the reason why it cannot start."""

    trouble: str = ""


@dataclass
class WorkerConnection:
    """The master's connection with one worker.

    Attributes:
        rank: The rank of the worker.
        host: Its host.
        pid: Its process id on this host.
        socket: A connected stream.
    """

    rank: int
    host: str
    pid: int
    socket: socket.socket

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


def send_message(sock: socket.socket, message: msgspec.Struct) -> None:
    sock.sendall(pack_frame(msgspec.json.encode(message)))


def receive_message(sock: socket.socket, kind: type[T], until: float) -> T:
    """Receive one message, and leave the bytes after it in the socket."""
    try:
        payload = read_frame(sock, FrameDecoder(_LIMIT), until)
    except WireError as error:
        raise ConnectionError(str(error)) from None
    sock.settimeout(None)  # `read_frame` has set a timeout
    return msgspec.json.decode(payload, type=kind)


def close_connection(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the peer has already closed the connection
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def is_closed(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(0))
