"""Connections between hosts: two servers in one process, unauthenticated clients, and invalid proofs."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from allranks._base.errors import JoinError, SecretError
from allranks._engines.native import tcp
from allranks._net import admission
from allranks._net.frames import pack_frame
from allranks._net.handshake import HANDSHAKE_FRAME, HANDSHAKE_S
from allranks._rendezvous.rendezvous import Member
from support.handshakes import first_frame

SECRET, TOKEN = b"a secret of the tests", bytes(range(16))


class Comm:
    """Replacement of the core that stores the connections which it receives."""

    def __init__(self) -> None:
        self.adopted: list[tuple[int, int, socket.socket]] = []
        self.given_up: list[int] = []

    def adopt(self, rank: int, kind: int, fd: int, greeting: str) -> None:
        connection = socket.socket(fileno=fd)
        connection.settimeout(5)
        if greeting:
            connection.sendall(greeting.encode())
        self.adopted.append((rank, kind, connection))

    def give_up(self, rank: int) -> None:
        self.given_up.append(rank)


class Pair:
    """Ranks 0 and 1 of a group, each with its own server."""

    def __init__(self, token: bytes = TOKEN, secrets: tuple[bytes, bytes] = (SECRET, SECRET)) -> None:
        self.servers = [tcp.ConnectionServer.of((f"127.0.0.{i + 1}",)) for i in range(2)]
        members = [Member(i, os.getpid(), f"host{i}", str(i), 2, (f"127.0.0.{i + 1}",)) for i in range(2)]
        self.groups = []
        for i, (server, secret) in enumerate(zip(self.servers, secrets, strict=True)):
            other = 1 - i
            target = (members[other].addresses, self.servers[other].port)
            targets = [target if r == other else None for r in range(2)]
            self.groups.append(tcp.PeerConnections(server, "world", i, members, targets, secret, token))
        self.comms = [Comm(), Comm()]
        for group, comm in zip(self.groups, self.comms, strict=True):
            group.comm = comm  # type: ignore[assignment]

    def close(self) -> None:
        for group in self.groups:
            group.close()
        for comm in self.comms:
            for _, _, connection in comm.adopted:
                connection.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    before = set(threading.enumerate())  # the parallel test runner has its own threads
    made = Pair()
    yield made
    made.close()
    assert not tcp.ConnectionServer._all
    # Python adds a dummy entry for a foreign thread that enters the interpreter during the test.
    assert not [each for each in threading.enumerate() if each not in before and not _is_dummy(each)]


def _is_dummy(thread: threading.Thread) -> bool:
    return isinstance(thread, threading._DummyThread)


def _opened(fd: int) -> str:
    """Return the target of a descriptor, or "" if it has just been closed."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""


def _until(condition: object, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_simultaneous_connection_attempts_result_in_one_connection() -> None:
    pick = random.Random(1)
    for round_ in range(40):
        pair = Pair(token=round_.to_bytes(16, "big"))
        askers = pick.choice([(0, 1), (1, 0), (0,), (1,)])
        for i in askers:
            pair.servers[i].ask(pair.groups[i].number, 1 - i, tcp.MESSAGE)
            time.sleep(pick.choice([0, 0, 0.0005, 0.002]))
        _until(lambda pair=pair: all(comm.adopted for comm in pair.comms))
        (from_0,), (from_1,) = (comm.adopted for comm in pair.comms)
        assert (from_0[:2], from_1[:2]) == ((1, tcp.MESSAGE), (0, tcp.MESSAGE))
        for connection in (from_0[2], from_1[2]):  # no TCP timeout: a rank may compute for a long time without reading
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
        from_0[2].sendall(b"ping")
        assert from_1[2].recv(10) == b"ping"  # without any byte of the greeting
        from_1[2].sendall(b"pong")
        assert from_0[2].recv(10) == b"pong"
        pair.close()
        assert [len(comm.adopted) for comm in pair.comms] == [1, 1]


def test_unauthenticated_connections_are_dropped_and_delay_no_rank(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "HANDSHAKE_S", 2.0)
    where = ("127.0.0.1", pair.servers[0].port)
    pick = random.Random(2)
    hello = tcp.ConnectionSubject(pair.groups[0].name, 1, 0, tcp.COLLECTIVE)
    greeting = pack_frame(first_frame(bytes(32), tcp.PROTOCOL, hello.pack()))
    idle = [socket.create_connection(where, 10) for _ in range(150)]
    said = [pick.randbytes(pick.randrange(1, 400)) for _ in range(50)]
    said += [b"GET / HTTP/1.1\r\n\r\n", b"\xff\xff\xff\xff", pack_frame(bytes(HANDSHAKE_FRAME + 1)), greeting[:-1]]
    said += [greeting + pack_frame(bytes(32)), greeting + pack_frame(b""), greeting + greeting]
    for words in said:
        with socket.create_connection(where, 10) as stranger:
            stranger.sendall(words)
    began = time.monotonic()
    pair.servers[1].ask(pair.groups[1].number, 0, tcp.COLLECTIVE)
    _until(lambda: pair.comms[0].adopted and pair.comms[1].adopted)
    assert time.monotonic() - began < HANDSHAKE_S  # the server does not wait for idle clients
    for connection in idle:  # closed without a response
        connection.settimeout(5)
        assert connection.recv(1) == b""
        connection.close()
    assert len(pair.comms[0].adopted) == 1


def proof(key: bytes, role: bytes, hello: tcp.ConnectionSubject, nonces: bytes = bytes(64)) -> bytes:
    return tcp.PROTOCOL.proof(key, role, hello.pack(), nonces)


def test_handshake_proof_cannot_be_reused(pair: Pair) -> None:
    """Replay the greeting and proof of a rank, as a man in the middle could, for another purpose or a second time."""
    target, dialer = pair.groups
    honest = tcp.ConnectionSubject(target.name, 1, 0, tcp.COLLECTIVE)
    for other in (honest._replace(kind=tcp.MESSAGE), honest._replace(from_=0), honest._replace(to=1)):
        assert proof(dialer.key, b"client", honest) != proof(dialer.key, b"client", other)
    assert proof(dialer.key, b"client", honest) != proof(dialer.key, b"server", honest)
    where = ("127.0.0.1", pair.servers[0].port)
    said = b""
    for _ in range(2):  # the second connection replays the valid proof of the first
        with socket.create_connection(where, 5) as connection:
            connection.sendall(pack_frame(first_frame(bytes(32), tcp.PROTOCOL, honest.pack())))
            nonce = connection.recv(1000)[4 + len(tcp.PROTOCOL.head) :][:32]
            said = said or proof(target.key, b"client", honest, bytes(32) + nonce)
            connection.sendall(pack_frame(said))
            heard = connection.recv(1)
    assert heard == b""
    assert len(pair.comms[0].adopted) == 1


def test_different_secrets_are_reported() -> None:
    pair = Pair(secrets=(SECRET, b"another secret of the tests"))
    with pytest.raises(SecretError, match="ALLRANKS_SECRET"):
        pair.groups[1].connect_heartbeats([0], 5)
    with pytest.raises(JoinError, match=r"rank 1 \(host1\) did not connect(.|\n)*its secret differs"):
        pair.groups[0].connect_heartbeats([1], 0.2)
    pair.servers[1].ask(pair.groups[1].number, 0, tcp.MESSAGE)
    _until(lambda: pair.comms[1].given_up == [0])
    assert "secret" in pair.groups[1].troubles[0]
    pair.close()


def test_forked_child_inherits_no_descriptors(pair: Pair) -> None:
    pair.servers[1].ask(pair.groups[1].number, 0, tcp.COLLECTIVE)
    _until(lambda: pair.comms[0].adopted and pair.comms[1].adopted)
    theirs = [fd for server in pair.servers for fd in (*server._listeners, server._requests, server._asking)]
    names = {_opened(each.fileno()) for each in theirs}  # compare names: other threads open and close descriptors
    assert len(names) == 4  # each server has a listener and a pipe
    child = os.fork()
    if child == 0:
        held = {_opened(int(fd)) for fd in os.listdir("/proc/self/fd")}
        os._exit(0 if not held & names and not tcp.ConnectionServer._all else 1)
    assert os.waitpid(child, 0)[1] == 0
    pair.servers[1].ask(pair.groups[1].number, 0, tcp.MESSAGE)  # the server of the parent continues
    _until(lambda: len(pair.comms[0].adopted) == 2)
