"""What the master and its workers send to each other before the first command: where the master is, and who comes."""

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

TIMEOUT_S = 300.0
_LIMIT = 1 << 20

T = TypeVar("T")


class MasterEndpoint(msgspec.Struct, frozen=True):
    """Where a master is to be found.

    Attributes:
        machine: its host, see ``_cluster.network.machine``.
        store: its store, for workers of its host.
        listener: the unix socket on which it listens, for the same.
        stores: its store, for workers of other hosts.
        addresses: on which it listens, for the same.
        port: of these addresses.
        size: how many processes there are.
        token: what proves that a process belongs to the job; "" where that follows from the salt and the job's secret.
        salt: text of this job only.
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
        """What proves that a process belongs to the job."""
        return self.token.encode() or store_secret(load_secret(), self.salt)


class WorkerHello(msgspec.Struct, frozen=True):
    """A worker's first message."""

    member: Member


class Welcome(msgspec.Struct, frozen=True):
    """The master's answer: on what device to work, and what function is the worker's program."""

    device: str
    serve: str


class WorkerReady(msgspec.Struct, frozen=True):
    """The worker's last message before its program begins. ``trouble``: why it cannot."""

    trouble: str = ""


@dataclass
class WorkerConnection:
    """The master's connection with one worker.

    Attributes:
        rank: the worker's.
        host: where it is.
        pid: its process there.
        socket: a connected stream.
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
    """Takes one message, and nothing of what follows it."""
    try:
        payload = read_frame(sock, FrameDecoder(_LIMIT), until)
    except WireError as error:
        raise ConnectionError(str(error)) from None
    sock.settimeout(None)
    return msgspec.json.decode(payload, type=kind)


def close_connection(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other side was quicker
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def is_closed(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(0))
