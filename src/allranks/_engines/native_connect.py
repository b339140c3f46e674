"""Connects the native engine's ranks of one host: each hands a piece of its memory to every other.

Over unix sockets in the abstract namespace, which leave no file behind. The sockets stay open as liveness sockets:
the end of one says that its rank is gone. How the ranks hear of each other's addresses is the caller's
business (`Exchange`): a store for the world, the parent group for a group made later.
"""

from __future__ import annotations

import builtins
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from allranks._errors import AllranksError, JoinError, rank_list

if TYPE_CHECKING:
    from allranks._rendezvous import Member

__all__ = ["RECORD_BYTES", "Door", "Exchange", "connect"]

Exchange: TypeAlias = Callable[[bytes], list[bytes]]
"""Gives every rank of the group every rank's record, by rank."""

# A record: the address's random name, and a token. The name can be seen by everybody on the host (/proc/net/unix);
# the token, rank 0's, is what proves that a peer belongs to the group.
_NAME_BYTES, _TOKEN_BYTES = 8, 16
RECORD_BYTES = _NAME_BYTES + _TOKEN_BYTES
_HELLO = struct.Struct(f"!{_TOKEN_BYTES}sI")


def connect(
    rank: int, members: Sequence[Member], exchange: Exchange, create: Callable[[], int], timeout_s: float
) -> tuple[list[int], list[int]]:
    """Exchanges descriptors of memory with every other rank.

    Args:
        rank: this process in the group.
        members: who is in the group, by rank.
        exchange: how they hear of each other.
        create: makes this rank's.
        timeout_s: for all of it.

    Returns:
        The memories' descriptors and those of the sockets that stay connected (-1 for this rank), by rank.

    Raises:
        AllranksError: ranks are on different hosts.
        JoinError: a rank could not be reached in time.
    """
    size = len(members)
    elsewhere = [m for m in members if m.boot_id != members[rank].boot_id]
    if elsewhere:
        there = ", ".join(f"rank {m.rank} on {m.host}" for m in elsewhere)
        raise AllranksError(
            f"rank {rank} is on {members[rank].host}, {there}: this version of allranks connects ranks of one host only"
        )
    memory = create()
    if size == 1:
        return [memory], [-1]
    with Door(memory) as door:
        return door.meet(rank, exchange(door.record), timeout_s)


class Door:
    """Where a rank hands out its piece of memory and gets the others': opened, announced by its record, used once.

    Args:
        memory: this rank's; taken over.

    Attributes:
        record: what the other ranks must know.

    Raises:
        OSError: no socket could be had; the memory is closed.
    """

    def __init__(self, memory: int) -> None:
        self._memory = memory
        try:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            name = secrets.token_bytes(_NAME_BYTES)
            self._listener.bind(_address(name))
            self._listener.listen(socket.SOMAXCONN)
        except OSError:
            os.close(memory)
            raise
        self.record = name + secrets.token_bytes(_TOKEN_BYTES)

    def __enter__(self) -> Door:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        if self._memory >= 0:
            os.close(self._memory)

    def meet(self, rank: int, records: list[bytes], timeout_s: float) -> tuple[list[int], list[int]]:
        """As ``connect``, with everybody's records at hand."""
        segments = [-1] * len(records)
        segments[rank], self._memory = self._memory, -1
        sockets: dict[int, socket.socket] = {}
        try:
            _meet(rank, records, self._listener, sockets, segments, time.monotonic() + timeout_s)
        except BaseException:
            for connection in sockets.values():
                connection.close()
            for segment in segments:
                if segment >= 0:
                    os.close(segment)
            raise
        return segments, [sockets[r].detach() if r in sockets else -1 for r in range(len(records))]


def _address(name: bytes) -> str:
    return f"\0allranks-{name.hex()}"


def _meet(
    rank: int,
    records: list[bytes],
    listener: socket.socket,
    sockets: dict[int, socket.socket],
    segments: list[int],
    deadline: float,
) -> None:
    size = len(records)
    token = records[0][_NAME_BYTES:]

    def left() -> float:
        return max(0.001, deadline - time.monotonic())

    try:
        for peer in range(rank):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            sockets[peer] = connection
            connection.settimeout(left())
            connection.connect(_address(records[peer][:_NAME_BYTES]))
            socket.send_fds(connection, [_HELLO.pack(token, rank)], [segments[rank]])
        while len(sockets) < size - 1:
            listener.settimeout(left())
            connection = listener.accept()[0]
            connection.settimeout(min(5.0, left()))
            try:
                peer, segment = _hear(connection, token)
            except OSError:
                peer = -1
            if not rank < peer < size or peer in sockets:
                connection.close()  # a stranger
                continue
            sockets[peer], segments[peer] = connection, segment
            socket.send_fds(connection, [_HELLO.pack(token, rank)], [segments[rank]])
        for peer in range(rank):
            sockets[peer].settimeout(left())
            heard, segments[peer] = _hear(sockets[peer], token)
            if heard != peer:
                raise JoinError(f"rank {rank}: what answers at the address of rank {peer} is not rank {peer}")
        # Nobody goes on before everybody is connected: the way they heard of each other may then go away.
        for connection in sockets.values():
            connection.sendall(b"!")
        for connection in sockets.values():
            connection.settimeout(left())
            if connection.recv(1) != b"!":
                raise JoinError(f"rank {rank}: another rank broke off while the ranks were connecting")
    except OSError as error:
        missing = [r for r in range(size) if r != rank and segments[r] < 0]
        why = "in time" if isinstance(error, builtins.TimeoutError) else f"({error.strerror})"
        raise JoinError(
            f"rank {rank}: no connection with {rank_list(missing or list(sockets))} {why}.\n"
            "  Did a rank end while the ranks were connecting? Look at the end of its output"
        ) from error


def _hear(connection: socket.socket, token: bytes) -> tuple[int, int]:
    """The rank and the segment of a peer that knows the token; (-1, -1) for anybody else."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    message, fds, _, _ = socket.recv_fds(connection, _HELLO.size, 1)
    if uid == os.getuid() and len(message) == _HELLO.size and len(fds) == 1:
        said, rank = _HELLO.unpack(message)
        if secrets.compare_digest(said, token):
            return rank, fds[0]
    for fd in fds:
        os.close(fd)
    return -1, -1
