"""Store server in another process under hostile clients: it continues to run and to serve, in little memory."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from allranks import _store
from allranks._net.frames import FrameDecoder, pack_frame, read_frame
from allranks._net.handshake import HANDSHAKE_FRAME, HANDSHAKE_S, PROVED
from allranks._store import StoreClient, StoreServer
from allranks._store.wire import PROTOCOL, Add, encode
from support.handshakes import first_frame, prove

SECRET = b"0123456789abcdef"
SERVER = f"""
import sys
from allranks._store import StoreServer
with StoreServer.tcp("localhost", 0, {SECRET!r}).start() as server:
    print(server.address.rpartition(":")[2], flush=True)
    sys.stdin.read()
"""
SLACK_KIB = 10 << 10
# Less than the timeout of a handshake. The goal, met on a quiet machine, is 0.1 s. `pytest -s` prints the figure.
RANK_DELAY_S = 4.0


class Server:
    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process, self.port = process, port
        self.serve_a_rank()
        self.kib = self.resident_kib()

    def resident_kib(self) -> int:
        return int(Path(f"/proc/{self.process.pid}/status").read_text().partition("VmRSS:")[2].split()[0])

    def dial(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=HANDSHAKE_S + 5.0)

    def serve_a_rank(self) -> float:
        began = time.monotonic()
        with StoreClient.connect(f"tcp:localhost:{self.port}", SECRET, 10.0) as client:
            assert client.add("alive", 1) > 0
        return time.monotonic() - began

    def assert_well(self) -> None:
        assert self.process.poll() is None
        delay_s = self.serve_a_rank()
        print(f"a rank is served in {delay_s * 1e3:.1f} ms, the server uses {self.resident_kib() - self.kib} KiB more")
        assert delay_s < RANK_DELAY_S
        assert self.resident_kib() - self.kib < SLACK_KIB


@contextlib.contextmanager
def serving(first: str = "") -> Iterator[Server]:
    environ = os.environ | {"PYTHONPATH": str(Path(_store.__file__).parents[2])}
    process = subprocess.Popen(
        [sys.executable, "-c", first + SERVER], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process, process.stdout, process.stdin:
        yield Server(process, int(process.stdout.readline()))
        process.stdin.close()
        assert process.wait(10.0) == 0


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


def hello(nonce: bytes = bytes(32)) -> bytes:
    return pack_frame(first_frame(nonce))


def is_dropped(sock: socket.socket) -> bool:
    with contextlib.suppress(ConnectionError):
        while sock.recv(1 << 16):
            pass
    return True


def recorded(server: Server) -> bytes:
    """Run a real session, and return all data that its client sent, including the handshake."""
    nonce = os.urandom(32)
    with server.dial() as sock:
        sock.sendall(hello(nonce))
        proof, right = prove(SECRET, nonce, sock.recv(4096)[4:])
        assert right
        request = pack_frame(proof) + pack_frame(encode(Add("stolen", 1)))
        sock.sendall(request)
        replies = FrameDecoder(HANDSHAKE_FRAME)
        assert read_frame(sock, replies, time.monotonic() + 5.0) == PROVED
        assert read_frame(sock, replies, time.monotonic() + 5.0)
    return hello(nonce) + request


def test_hostile_clients_are_dropped_and_memory_stays_constant(server: Server) -> None:
    """Send junk, HTTP, a huge length, truncation, a replay, a wrong token and a reflected proof, 50 times each."""
    session = recorded(server)
    said = {
        "junk": os.urandom(65536),
        "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 100,
        "huge length": b"\xff\xff\xff\xff" + bytes(65536),
        "truncation": hello()[:20],
        "replay": session,
        "wrong token": hello() + pack_frame(prove(b"another secret..", bytes(32), PROTOCOL.head + bytes(64))[0]),
        "request for a proof": hello() + pack_frame(encode(Add("stolen", 1))),
    }
    for words in said.values():
        for _ in range(50):
            with server.dial() as sock, contextlib.suppress(OSError):  # the server may drop it before all data is sent
                sock.sendall(words)
                sock.shutdown(socket.SHUT_WR)
                assert is_dropped(sock)
    for _ in range(50):
        with server.dial() as sock:
            sock.sendall(hello())
            answer = sock.recv(4096)[4:]
            sock.sendall(pack_frame(answer[-32:]))
            assert is_dropped(sock)
    with StoreClient.connect(f"tcp:localhost:{server.port}", SECRET, 5.0) as client:
        assert client.peek(["stolen"]) == [b"1"]  # only the recorded session itself added to it
    server.assert_well()


def test_authenticated_client_with_invalid_requests_is_dropped(server: Server) -> None:
    """After the handshake, send invalid UTF-8, an unknown message, deep nesting and two simultaneous requests."""
    for words in (b"\x91\xa2\x00\x80", b"\x92\xa3Who\x01", b"\x91" * 9999, b"", b"\xc1"):
        nonce = os.urandom(32)
        with server.dial() as sock:
            sock.sendall(hello(nonce))
            proof, _ = prove(SECRET, nonce, sock.recv(4096)[4:])
            sock.sendall(pack_frame(proof) + pack_frame(words) * 2)
            sock.shutdown(socket.SHUT_WR)
            assert is_dropped(sock)
    server.assert_well()


def test_rank_is_served_among_500_idle_or_partial_handshakes(server: Server) -> None:
    """Serve a rank while 500 clients are silent, send half a first frame, or send it and then no proof."""
    for words in (b"", hello()[:10], hello()):
        with contextlib.ExitStack() as stack:
            for _ in range(500):
                sock = stack.enter_context(server.dial())
                with contextlib.suppress(ConnectionError):
                    sock.sendall(words)
            server.assert_well()


@pytest.mark.parametrize("words", [b"", hello()], ids=["silent", "half-greeted"])
def test_rank_is_served_if_clients_use_all_descriptors(words: bytes) -> None:
    """Limit the server to 30 descriptors: it closes idle connections, and serves a rank."""
    with serving("import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (30, 30))\n") as server:
        with contextlib.ExitStack() as stack:
            for _ in range(100):
                sock = stack.enter_context(server.dial())
                with contextlib.suppress(ConnectionError):
                    sock.sendall(words)
            server.assert_well()


def test_slow_client_is_dropped_after_handshake_timeout(server: Server) -> None:
    """Drop a silent client, and one that sends a byte per second, after 5 s. Ranks are served without delay."""
    with server.dial() as drip, server.dial() as silent:
        began, delays = time.monotonic(), []
        drip.settimeout(1.0)
        silent.settimeout(0.01)
        ended: dict[socket.socket, float] = {}
        while len(ended) < 2 and time.monotonic() - began < 2 * HANDSHAKE_S:
            for sock in {drip, silent} - ended.keys():
                try:
                    if sock is drip:
                        sock.sendall(b"\0")
                    if not sock.recv(16):
                        ended[sock] = time.monotonic() - began
                except TimeoutError:
                    continue
                except ConnectionError:
                    ended[sock] = time.monotonic() - began
            delays.append(server.serve_a_rank())
        assert len(ended) == 2
        assert max(ended.values()) < HANDSHAKE_S + 2.0
        assert max(delays) < RANK_DELAY_S
    server.assert_well()


def test_rank_is_served_if_clients_fill_two_listeners() -> None:
    """Connect 160 clients that never send a proof to two listeners, then connect a rank."""
    doors = [socket.create_server(("127.0.0.1", 0), backlog=256) for _ in range(2)]
    first = pack_frame(first_frame(os.urandom(32)))
    with _store.StoreServer(doors, f"tcp:127.0.0.1:{doors[0].getsockname()[1]}", SECRET).start() as server:
        for _ in range(5):
            with contextlib.ExitStack() as crowd:
                for i in range(160):
                    guest = crowd.enter_context(socket.create_connection(doors[i % 2].getsockname()))
                    guest.sendall(first)
                with StoreClient.connect(server.address, SECRET, 10.0) as client:
                    assert client.add("alive", 1) > 0


@pytest.mark.skipif(os.geteuid() != 0, reason="changing the user requires root")
def test_refused_user_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """The kernel identifies the user of a unix socket. The server logs each refused user once."""
    program = """
import os, socket, sys
os.setuid(65534)
for _ in range(300):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect("\\0" + sys.argv[1])
        connection.recv(1)
"""
    with caplog.at_level(logging.WARNING, "allranks.store"), StoreServer.unix().start() as server:
        name = server.address.rpartition("@")[2]
        done = subprocess.run([sys.executable, "-c", program, name], capture_output=True, timeout=60)
        assert done.returncode == 0, done
        with StoreClient.connect(server.address, b"", 10) as client:
            assert client.add("alive", 1) == 1
    assert len(caplog.records) == 1
    assert "user 65534 was refused" in caplog.text
