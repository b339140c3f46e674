"""The store: pure parts with random input, all store types with the same tests, the server with hostile peers."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import cloudpickle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allranks import FileStore, TCPStore, _store
from allranks._base.errors import (
    AllranksError,
    ConfigError,
    JoinError,
    SecretError,
    StoreLostError,
    TimeoutError,
    UsageError,
)
from allranks._cluster.network import published_addresses
from allranks._net import admission
from allranks._net.frames import FrameDecoder, WireError, pack_frame, read_frame
from allranks._net.handshake import HANDSHAKE_FRAME, PROVED, Protocol
from allranks._net.listener import Listener
from allranks._net.listener import dial as dial_listener
from allranks._net.secret import load_secret
from allranks._store import ForeignStore, HashStore, PrefixStore, Store, StoreClient, StoreServer
from allranks._store import address as address_module
from allranks._store.table import KeyTable
from allranks._store.wire import (
    FRAME_LIMIT,
    PROTOCOL,
    Add,
    CompareSet,
    Delete,
    FoundValues,
    Peek,
    Request,
    RequestDone,
    Set,
    WaitForKeys,
    WaitTimedOut,
    decode_reply,
    encode,
)
from support.handshakes import first_frame, prove, server_side
from support.prompt import PROMPT_S

SECRET = b"0123456789abcdef"
SRC = str(Path(_store.__file__).parents[2])


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    threads, descriptors = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    yield
    assert set(threading.enumerate()) <= threads  # threads of another test may have ended since
    assert len(os.listdir("/proc/self/fd")) == descriptors


def within(seconds: float, true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.005)
    return true()


quick = settings(max_examples=80, database=None)


# --- frames, handshake and table ------------------------------------------------------------------------------


@quick
@given(st.lists(st.binary(max_size=300), max_size=8), st.data())
def test_frames_are_decoded_for_any_split_of_the_stream(frames: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(map(pack_frame, frames))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    decoder, seen = FrameDecoder(300), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        decoder.feed(stream[start:end])
        while (frame := decoder.next()) is not None:
            seen.append(frame)
    assert seen == frames


def test_read_frame_consumes_exactly_one_frame() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(pack_frame(b"first") + pack_frame(b"") + b"what follows")
        until = time.monotonic() + 5
        assert read_frame(ours, FrameDecoder(5), until) == b"first"
        assert read_frame(ours, FrameDecoder(5), until) == b""
        assert ours.recv(100) == b"what follows"
        theirs.sendall(pack_frame(b"longer"))
        with pytest.raises(WireError, match="6 bytes, but the limit is 5 bytes"):
            read_frame(ours, FrameDecoder(5), until)
        theirs.close()
        assert ours.recv(6) == b"longer"
        with pytest.raises(ConnectionResetError):
            read_frame(ours, FrameDecoder(5), until)


@quick
@given(st.binary(max_size=2000))
def test_junk_raises_wire_error_or_gives_short_frames(junk: bytes) -> None:
    decoder = FrameDecoder(256)
    decoder.feed(junk)
    with contextlib.suppress(WireError):
        while (frame := decoder.next()) is not None:
            assert len(frame) <= 256


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (b"HTTP/1.1 400 Bad Request\r\nServer: x", "it looks like HTTP: 'HTTP/1.1 400 Bad Request'"),
        (b"<!DOCTYPE HTML>\n<html>", "it looks like HTTP: '<!DOCTYPE HTML>'"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "it sends text: 'SSH-2.0-OpenSSH_9.2'"),
        (b"\xff\xff\xff\xff", "it announced a frame of 4294967295 bytes, but the limit is 256 bytes"),
        (b"\n\n\n\n", "it announced a frame of 168430090 bytes, but the limit is 256 bytes"),
    ],
)
def test_other_protocol_is_named_in_the_error(said: bytes, text: str) -> None:
    decoder = FrameDecoder(256)
    decoder.feed(said)
    with pytest.raises(WireError) as caught:
        decoder.next()
    assert str(caught.value) == text


@quick
@given(st.lists(st.binary(max_size=256), min_size=1, max_size=3))
def test_random_frames_never_pass_the_handshake(frames: list[bytes]) -> None:
    handshake = server_side(SECRET, os.urandom(32))
    with contextlib.suppress(WireError, ConfigError):
        for frame in frames:
            assert handshake.step(frame) is not None


OTHER = Protocol(b"allranks-store/", b"9")


def hello(nonce: bytes) -> bytes:
    return first_frame(nonce)


def test_handshake_proves_the_secret_on_both_sides() -> None:
    nonce = os.urandom(32)
    handshake = server_side(SECRET, os.urandom(32))
    answer = handshake.step(hello(nonce))
    assert answer is not None
    proof, right = prove(SECRET, nonce, answer)
    assert right
    assert handshake.step(proof) is None
    assert max(map(len, (hello(nonce), answer, proof))) <= 256
    assert not prove(b"another", nonce, answer)[1]


def test_replayed_proof_is_refused() -> None:
    nonce = os.urandom(32)
    answer = server_side(SECRET, b"1" * 32).step(hello(nonce))
    assert answer is not None
    proof, _ = prove(SECRET, nonce, answer)
    second = server_side(SECRET, b"2" * 32)
    second.step(hello(nonce))
    with pytest.raises(SecretError):
        second.step(proof)


def test_reflected_proof_is_refused() -> None:
    """Refuse a client that sends the proof of the server back, as it need not know the secret."""
    for nonce in (b"1" * 32, b"2" * 32):
        handshake = server_side(SECRET, b"1" * 32)
        answer = handshake.step(hello(nonce))
        assert answer is not None
        with pytest.raises(SecretError):
            handshake.step(answer[-32:])


def test_other_version_is_named_in_the_error() -> None:
    frame = first_frame(bytes(32), OTHER)
    with pytest.raises(ConfigError, match="allranks-store/9"):
        server_side(SECRET, bytes(32)).step(frame)
    with pytest.raises(ConfigError, match="one version"):
        prove(SECRET, bytes(32), b"allranks-store/9")


keys = st.sampled_from("abc")
requests = st.one_of(
    st.builds(Set, keys, st.binary(max_size=2)),
    st.builds(Delete, keys),
    st.builds(CompareSet, keys, st.sampled_from([b"", b"x"]), st.sampled_from([b"x", b"y"])),
    st.builds(Peek, st.lists(keys, max_size=3)),
    st.builds(WaitForKeys, st.lists(keys, min_size=1, max_size=3), st.floats(0, 3), st.booleans()),
)


@quick
@given(st.lists(st.tuples(requests, st.floats(0, 2)), max_size=30))
def test_table_answers_every_request_once(steps: list[tuple[Request, float]]) -> None:
    """Compare the table with a dict. A wait ends when its last key appears or at its deadline, exactly once."""
    table, values, now = KeyTable(), dict[str, bytes](), 0.0
    waiting: dict[int, tuple[set[str], float]] = {}
    for who, (request, pause) in enumerate(steps):
        replies = dict(table.handle(who, request, now))
        match request:
            case Set(key, value):
                values[key] = value
                assert replies.pop(who) == RequestDone()
            case Delete(key):
                assert replies.pop(who) == RequestDone(int(values.pop(key, None) is not None))
            case CompareSet(key, expected, desired):
                before = values.get(key)
                if before == expected or (before is None and not expected):
                    values[key] = desired
                assert replies.pop(who) == FoundValues([values.get(key, expected)])
            case Peek(names):
                assert replies.pop(who) == FoundValues([values.get(name) for name in names])
            case WaitForKeys(names, timeout_s):
                missing = set(names) - set(values)
                if missing and timeout_s > 0:
                    waiting[who] = (missing, now + timeout_s)
                else:
                    assert isinstance(replies.pop(who), WaitTimedOut if missing else FoundValues)
        for other in [w for w, (missing, _) in waiting.items() if not (missing - values.keys())]:
            # A key that was set and then deleted has still ended the wait for it.
            assert isinstance(replies.pop(other), FoundValues)
            del waiting[other]
        waiting = {w: (missing - values.keys(), end) for w, (missing, end) in waiting.items()}
        assert not replies
        now += pause
        late = {w for w, (_, end) in waiting.items() if end <= now}
        assert {w for w, reply in table.expire(now) if isinstance(reply, WaitTimedOut)} == late
        waiting = {w: rest for w, rest in waiting.items() if w not in late}
        assert table.next_deadline() == min((end for _, end in waiting.values()), default=None)


# --- store types ----------------------------------------------------------------------------------------------


class TorchLike:
    """Store with the Python interface of a torch store."""

    def __init__(self) -> None:
        self.inner = HashStore()

    def set(self, key: str, value: bytes) -> None:
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        return self.inner.get(key, 300.0)

    def add(self, key: str, amount: int) -> int:
        return self.inner.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self.inner.check(keys)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        try:
            self.inner.wait(keys, timeout.total_seconds())
        except TimeoutError as error:
            raise RuntimeError("wait timeout") from error

    def delete_key(self, key: str) -> bool:
        return self.inner.delete_key(key)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        return self.inner.compare_set(key, expected, desired)


@pytest.fixture(params=["memory", "unix", "tcp", "prefix", "foreign"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    with contextlib.ExitStack() as stack:
        match request.param:
            case "memory":
                yield HashStore()
            case "foreign":
                yield ForeignStore(TorchLike())
            case "unix":
                server = stack.enter_context(StoreServer.unix().start())
                yield stack.enter_context(StoreClient.connect(server.address))
            case "tcp":
                server = stack.enter_context(StoreServer.tcp("localhost", 0, SECRET).start())
                yield stack.enter_context(StoreClient.connect(server.address, SECRET))
            case "prefix":
                inner = HashStore()
                inner.set("a", b"not this one")
                yield PrefixStore("p", inner)


def test_values_are_set_read_and_deleted(store: Store) -> None:
    assert not store.check(["a"])
    store.set("a", b"\x00\xff")
    store.set("b", b"")
    assert store.get("a", 1.0) == b"\x00\xff"
    assert store.check(["a", "b"])
    assert not store.check(["a", "c"])
    assert store.peek(["a", "c", "b"]) == [b"\x00\xff", None, b""]
    store.wait(["a", "b"], 1.0)
    assert store.delete_key("a")
    assert not store.delete_key("a")
    assert store.peek(["a"]) == [None]


def test_add_counts_atomically(store: Store) -> None:
    assert [store.add("n", 1), store.add("n", 5), store.add("n", -7)] == [1, 6, -1]
    assert store.get("n", 1.0) == b"-1"
    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(lambda _: store.add("m", 1), range(40))) == list(range(1, 41))


def test_compare_set_replaces_only_expected_value(store: Store) -> None:
    assert store.compare_set("a", b"x", b"y") == b"x"
    assert not store.check(["a"])
    assert store.compare_set("a", b"", b"one") == b"one"
    assert store.compare_set("a", b"zero", b"two") == b"one"
    assert store.compare_set("a", b"one", b"two") == b"two"


def test_blocked_reader_does_not_block_other_calls(store: Store) -> None:
    with ThreadPoolExecutor(3) as pool:
        reader = pool.submit(store.get, "late", 20.0)
        waiter = pool.submit(store.wait, ["late", "later"], 1e9)  # longer than the maximum timeout of a selector
        time.sleep(0.02)
        store.set("late", b"here")
        assert reader.result(5.0) == b"here"
        assert not waiter.done()
        store.set("later", b"")
        waiter.result(5.0)


def test_wait_times_out(store: Store) -> None:
    store.set("b", b"")
    for call in (lambda: store.get("a", 0.05), lambda: store.wait(["a", "b"], 0.05)):
        began = time.monotonic()
        with pytest.raises(TimeoutError, match=r"'(p/)?a' in 0\.1 s"):
            call()
        assert 0.04 < time.monotonic() - began < PROMPT_S


def test_foreign_store_without_required_methods_is_refused() -> None:
    with pytest.raises(UsageError, match="no method get, add"):
        ForeignStore(type("Half", (), dict.fromkeys(("set", "check", "wait"), len))())
    foreign = TorchLike()
    foreign.compare_set = None  # type: ignore[assignment,method-assign]
    with pytest.raises(UsageError, match="no method compare_set"):
        ForeignStore(foreign).compare_set("a", b"", b"")


# --- client and server ----------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[StoreServer]:
    with StoreServer.tcp("localhost", 0, SECRET).start() as server:
        yield server


def dial(server: StoreServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(server.address.rpartition(":")[2])), timeout=5.0)


def is_dropped(sock: socket.socket) -> bool:
    try:
        while sock.recv(4096):
            pass
    except ConnectionError:
        pass
    return True


def still_serves(server: StoreServer) -> None:
    with StoreClient.connect(server.address, SECRET, 5.0) as client:
        assert client.add("alive", 1) > 0


JUNK = {
    "junk": os.urandom(4096),
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "huge length": b"\xff\xff\xff\xff",
    "large length": pack_frame(bytes(257)),
    "empty frame": pack_frame(b""),
    "zeros": bytes(1000),
    "no handshake": pack_frame(encode(Set("a", b"1"))),
    "wrong proof": pack_frame(hello(bytes(32))) + pack_frame(bytes(32)),
    "short proof": pack_frame(hello(bytes(32))) + pack_frame(b""),
    "request for proof": pack_frame(hello(bytes(32))) + pack_frame(encode(Set("a", b"1"))),
}


@pytest.mark.parametrize("name", JUNK)
def test_hostile_input_is_dropped_immediately(server: StoreServer, name: str) -> None:
    with dial(server) as sock:
        sock.sendall(JUNK[name])
        assert is_dropped(sock)
    still_serves(server)
    with StoreClient.connect(server.address, SECRET, 5.0) as client:
        assert not client.check(["a"])


def test_replayed_session_is_dropped(server: StoreServer) -> None:
    nonce = os.urandom(32)
    with dial(server) as sock:
        sock.sendall(pack_frame(hello(nonce)))
        proof, right = prove(SECRET, nonce, sock.recv(4096)[4:])
        assert right
        session = pack_frame(proof) + pack_frame(encode(Add("n", 1)))
        sock.sendall(session)
        replies = FrameDecoder(HANDSHAKE_FRAME)
        assert read_frame(sock, replies, time.monotonic() + PROMPT_S) == PROVED
        assert decode_reply(read_frame(sock, replies, time.monotonic() + PROMPT_S)) == RequestDone(1)
    with dial(server) as sock:
        sock.sendall(pack_frame(hello(nonce)) + session)
        assert is_dropped(sock)
    with StoreClient.connect(server.address, SECRET, 5.0) as client:
        assert client.peek(["n"]) == [b"1"]


def test_truncated_input_leaves_no_connection(server: StoreServer) -> None:
    whole = pack_frame(hello(os.urandom(32)))
    for length in (1, 4, 5, len(whole) - 1, len(whole)):
        with dial(server) as sock:
            sock.sendall(whole[:length])
    still_serves(server)
    assert within(PROMPT_S, lambda: not server._peers and not len(server._admission))


def test_idle_and_slow_clients_are_dropped_after_timeout(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "HANDSHAKE_S", 0.3)
    with dial(server) as idle, dial(server) as drip:
        began = time.monotonic()
        whole = pack_frame(hello(os.urandom(32)))
        with contextlib.suppress(ConnectionError):
            for i in range(len(whole)):
                drip.sendall(whole[i : i + 1])
                time.sleep(0.1)
        assert is_dropped(idle)
        assert is_dropped(drip)
        assert time.monotonic() - began < PROMPT_S


def test_idle_connections_do_not_block_a_rank(server: StoreServer) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(150):
            stack.enter_context(dial(server))
        still_serves(server)
        assert len(server._admission) <= 64


def test_client_reconnects_if_dropped_before_its_proof_is_read() -> None:
    """A server with many clients closes some of them, here after the proof has arrived and before it is read."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        port = listener.getsockname()[1]
        connecting = pool.submit(StoreClient.connect, f"tcp:localhost:{port}", SECRET, 20.0)
        sock, _ = listener.accept()
        with sock:
            handshake = server_side(SECRET, os.urandom(32)).step(
                read_frame(sock, FrameDecoder(HANDSHAKE_FRAME), time.monotonic() + PROMPT_S)
            )
            sock.sendall(pack_frame(handshake or b""))
            assert sock.recv(1, socket.MSG_PEEK)
        listener.close()
        with StoreServer.tcp("localhost", port, SECRET).start(), connecting.result(20.0) as client:
            assert client.add("n", 1) == 1


def test_frame_over_the_limit_closes_the_connection(server: StoreServer) -> None:
    with StoreClient.connect(server.address, SECRET, 5.0) as client:
        with pytest.raises(UsageError, match="exceeds the limit of"):
            client.set("big", bytes(FRAME_LIMIT))
        client.set("big", bytes(1 << 20))
        assert len(client.get("big", 1.0)) == 1 << 20
        line = client._idle[0]
        line.sock.sendall((FRAME_LIMIT + 1).to_bytes(4, "big"))
        with pytest.raises(StoreLostError, match="the connection broke"):
            client.check(["big"])
    still_serves(server)


def test_wrong_argument_raises_usage_error(server: StoreServer) -> None:
    with StoreClient.connect(server.address, SECRET, 5.0) as client:
        with pytest.raises(UsageError, match="must be bytes or a string, not 5"):
            client.set("a", 5)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="invalid argument"):
            client._reply(Set("a", 5), RequestDone)  # type: ignore[arg-type]
        client.set("a", b"word")
        with pytest.raises(UsageError, match="not a whole number"):
            client.add("a", 1)


def test_different_secrets_are_reported_on_both_sides(server: StoreServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "allranks.store"):
        for _ in range(2):
            with pytest.raises(
                SecretError, match=r"secret differs.*ALLRANKS_SECRET.*ALLRANKS_SECRET_FILE.*copy the file"
            ):
                StoreClient.connect(server.address, b"another secret!!", 5.0)
        assert within(PROMPT_S, lambda: not server._peers and not len(server._admission))
    assert list(server.refusals) == ["127.0.0.1"]
    assert "127.0.0.1 was refused: its secret differs" in server.refusals["127.0.0.1"]
    assert len(caplog.records) == 1


def test_other_version_is_reported_on_both_sides(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with dial(server) as sock:
        sock.sendall(pack_frame(first_frame(bytes(32), OTHER)))
        answer = sock.recv(4096)[4:]
        assert is_dropped(sock)
    with pytest.raises(ConfigError, match="install one"):
        prove(SECRET, bytes(32), answer.replace(PROTOCOL.head, b"allranks-store/9"))
    assert "allranks-store/9" in server.refusals["127.0.0.1"]


def test_port_of_another_service_is_reported_on_both_sides(server: StoreServer) -> None:
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"allranks-store/.*allranks-agent/.*another service"):
        dial_listener([("127.0.0.1", server.port)], SECRET, began + 20.0)
    assert "allranks-agent/" in server.refusals["127.0.0.1"]
    listener = Listener(["127.0.0.1"], 0, SECRET)
    try:
        with pytest.raises(ConfigError, match=r"allranks-agent/.*allranks-store/.*another service"):
            StoreClient.connect(f"tcp:localhost:{listener.port}", SECRET, 20.0)
        assert "allranks-store/" in listener.refused["127.0.0.1"]
    finally:
        listener.close()
    assert time.monotonic() - began < 10.0  # no attempt was repeated


def test_client_that_disconnects_before_the_answer_is_harmless() -> None:
    with StoreServer.unix().start() as server:
        for frame in (first_frame(bytes(32), OTHER), hello(bytes(32)), bytes(4)):
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect("\0" + server.address.removeprefix("unix:@"))
                sock.sendall(pack_frame(frame) * 2)
        with StoreClient.connect(server.address, timeout_s=2.0) as client:
            client.set("a", b"1")
        assert within(PROMPT_S, lambda: not server._peers and not len(server._admission))


@contextlib.contextmanager
def stranger(answer: bytes | None) -> Iterator[str]:
    """Listen on a port, and answer the first line of every client with ``answer`` (None: do not answer)."""

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                held.append(sock)
                if answer is not None:
                    sock.makefile("rb").readline()
                    sock.sendall(answer)

    held: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"tcp:127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for sock in held:
                sock.close()


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"-ERR\r\n", pack_frame(b"hello"), bytes(80)])
def test_foreign_server_is_recognized_immediately(answer: bytes) -> None:
    with stranger(answer) as address:
        began = time.monotonic()
        with pytest.raises(ConfigError, match="a server answers at this address, but it is not an allranks store"):
            StoreClient.connect(address, SECRET, 30.0)
        assert time.monotonic() - began < PROMPT_S


def test_silent_server_raises_after_the_timeout() -> None:
    with stranger(None) as address:
        with pytest.raises(JoinError, match=r"did not answer for 0\.\d s \(last: no answer\)"):
            StoreClient.connect(address, SECRET, 0.3)


@pytest.mark.parametrize("address", ["tcp:127.0.0.1:9", "unix:@allranks-nobody", "tcp:no-such-host.invalid:1"])
def test_unreachable_address_raises_join_error(address: str) -> None:
    with pytest.raises(JoinError, match=r"did not answer for 0\.\d s \(last: .*\)\.\n  Check that the process"):
        StoreClient.connect(address, SECRET, 0.2)


@pytest.mark.parametrize("address", ["", "host:1", "tcp:host", "unix:/path", "tcp::1"])
def test_malformed_address_raises_config_error(address: str) -> None:
    with pytest.raises(ConfigError, match=r"not the address of a store|number"):
        StoreClient.connect(address, SECRET, 0.2)


def test_client_waits_for_the_server_to_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(StoreClient.connect, f"tcp:127.0.0.1:{port}", SECRET, 10.0)
        time.sleep(0.05)
        with StoreServer.tcp("localhost", port, SECRET).start():
            with early.result(5.0) as client:
                client.set("a", b"1")


def test_closed_server_frees_its_port_despite_a_forked_child() -> None:
    server = StoreServer.tcp("localhost", 0, SECRET).start()
    port = int(server.address.rpartition(":")[2])
    held = server._listeners[0].dup()  # equivalent to the descriptor of a forked child
    try:
        client = StoreClient.connect(server.address, SECRET, 5.0)
        server.close()
        with StoreServer.tcp("localhost", port, SECRET).start():
            with StoreClient.connect(f"tcp:localhost:{port}", SECRET, 5.0) as again:
                assert again.peek(["a"]) == [None]
        with pytest.raises(StoreLostError, match=r"the connection broke .*\n  The process that serves it"):
            client.check(["a"])
        client.close()
    finally:
        held.close()


def test_error_for_port_in_use_names_the_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} .*already in use, held by pid {os.getpid()} \("):
            StoreServer.tcp("localhost", port, SECRET)


def bound(server: StoreServer) -> list[str]:
    return [listener.getsockname()[0] for listener in server._listeners]


@pytest.mark.parametrize(
    ("host", "expected"),
    [("localhost", "127.0.0.1"), ("127.0.0.7", "127.0.0.7"), ("no.such.host.invalid", None), ("", None)],
)
def test_server_binds_addresses_of_its_host_name(host: str, expected: str | None) -> None:
    with StoreServer.tcp(host, 0, SECRET).start() as server:
        assert bound(server) == ([expected] if expected else ["127.0.0.1", *published_addresses()])
        assert server.address.startswith(f"tcp:{expected or host or socket.gethostname()}:")
        assert len({listener.getsockname()[1] for listener in server._listeners}) == 1
        with StoreClient.connect(server.here, SECRET, 5.0) as client:
            client.set("a", b"1")


@pytest.mark.parametrize(
    ("name", "addresses", "chosen", "expected"),
    [
        (
            "node0",
            ["127.0.1.1"],
            "",
            ["127.0.0.1", "127.0.1.1", "192.0.2.7"],
        ),  # loopback, as on Debian
        ("node0", ["127.0.1.1", "127.0.0.3"], "", ["127.0.0.1", "127.0.1.1", "127.0.0.3", "192.0.2.7"]),
        ("node0", ["198.51.100.9"], "", ["127.0.0.1", "192.0.2.7"]),  # address of a proxy or NAT in front of this host
        ("node0", ["10.9.9.9"], "", ["127.0.0.1", "10.9.9.9"]),  # an address of this host
        ("10.9.9.9", ["10.9.9.9"], "", ["127.0.0.1", "10.9.9.9"]),
        ("10.9.9.9", ["10.9.9.9"], "eth7", ["127.0.0.1", "192.0.2.7"]),
        ("127.0.0.1", [], "eth7", ["127.0.0.1"]),
    ],
)
def test_name_selects_addresses_to_bind(
    name: str, addresses: list[str], chosen: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address_module, "_resolve", lambda host: addresses)
    monkeypatch.setattr(address_module, "_is_local", lambda address: not address.startswith("198."))
    monkeypatch.setattr(address_module, "published_addresses", lambda environ: ("192.0.2.7",))
    assert address_module.addresses_of(name, {"ALLRANKS_IFACE": chosen}) == expected


def test_server_works_on_ipv6() -> None:
    try:
        server = StoreServer.tcp("::1", 0, SECRET).start()
    except ConfigError as error:
        pytest.skip(str(error))
    with server, StoreClient.connect(server.address, SECRET, 5.0) as client:
        assert server.address.startswith("tcp:[::1]:")
        client.set("a", b"1")


def test_no_descriptor_is_inherited() -> None:
    with StoreServer.unix().start() as server, StoreClient.connect(server.address) as client:
        fds = (
            server._listeners[0].fileno(),
            server._wake.fileno(),
            client._idle[0].sock.fileno(),
            server._selector.fileno(),
        )
        assert not any(os.get_inheritable(fd) for fd in fds)
        assert not any(os.get_inheritable(peer.sock.fileno()) for peer in server._peers)


def test_forked_child_does_not_serve_waiting_threads_of_parent() -> None:
    """Push to a queue in a child while a thread of the parent waits. The thread does not exist in the child."""
    store = HashStore()
    waiting = threading.Thread(target=lambda: store.queue_pop("q"))
    waiting.start()
    try:
        assert within(PROMPT_S, lambda: bool(store._table._waiting))
        child = os.fork()
        if child == 0:
            store.queue_push("q", b"of the child")
            os._exit(0 if store.queue_len("q") == 1 else 1)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        store.queue_push("q", b"of the parent")
        waiting.join()
    assert store.queue_len("q") == 0


def test_server_bound_before_fork_is_not_closed_by_children() -> None:
    """The parent serves and its children connect. A child closes only its own copy of the server."""
    server = StoreServer.unix()
    children = []
    for _ in range(2):
        pid = os.fork()
        if not pid:
            status = 1
            try:
                server.close()
                with StoreClient.connect(server.address, timeout_s=10.0) as client:
                    client.add("n", 1)
                status = 0
            finally:
                os._exit(status)
        children.append(pid)
    with server.start():
        assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0]
        with StoreClient.connect(server.address) as client:
            assert client.get("n", 1.0) == b"2"
    server.close()


def test_close_waits_until_clients_have_disconnected() -> None:
    server = StoreServer.unix().start()
    client = StoreClient.connect(server.address)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(server.close, 10.0)
        time.sleep(0.05)
        client.set("a", b"still there")
        assert not closing.done()
        with pytest.raises(JoinError):
            StoreClient.connect(server.address, timeout_s=0.0)
        client.close()
        closing.result(PROMPT_S)
    with pytest.raises(StoreLostError, match="this process has closed its connection"):
        client.check(["a"])


def test_close_ends_after_linger_timeout() -> None:
    server = StoreServer.unix().start()
    with StoreClient.connect(server.address) as client:
        began = time.monotonic()
        server.close(0.1)
        assert 0.09 < time.monotonic() - began < PROMPT_S
        with pytest.raises(StoreLostError):
            client.check(["a"])


def test_closing_client_or_server_ends_waiting_calls() -> None:
    server = StoreServer.unix().start()
    first, second = StoreClient.connect(server.address), StoreClient.connect(server.address)
    with ThreadPoolExecutor(2) as pool:
        gets = [pool.submit(client.get, "never", 60.0) for client in (first, second)]
        assert within(PROMPT_S, lambda: all(map(server._table.is_waiting, server._peers)))
        first.close()
        with pytest.raises(StoreLostError, match="this process has closed its connection"):
            gets[0].result(5.0)
        server.close()
        with pytest.raises(StoreLostError, match="the connection broke"):
            gets[1].result(5.0)
    second.close()


def test_unresponsive_server_does_not_hang_a_client() -> None:
    server = StoreServer.unix()  # bound, never started
    with pytest.raises(JoinError, match="no answer"):
        StoreClient.connect(server.address, timeout_s=0.2)
    server.start()
    with StoreClient.connect(server.address, timeout_s=0.2) as client:
        client.set("a", b"")  # all earlier connections have been accepted
        busy = threading.Event()
        server._admission._accept = lambda listener: busy.wait(5.0)  # type: ignore[assignment,return-value,method-assign]
        with socket.socket(socket.AF_UNIX) as knock:
            knock.connect("\0" + server.address.removeprefix("unix:@"))
            time.sleep(0.05)
            with pytest.raises(TimeoutError, match=r"did not answer for 0\.2 s"):
                client.check(["a"])
            busy.set()
    server.close()


# --- the secret -----------------------------------------------------------------------------------------------


def test_secret_is_read_from_environment_or_file(tmp_path: Path) -> None:
    file = tmp_path / "s"
    file.write_text("fedcba9876543210\n")
    file.chmod(0o600)
    assert load_secret({"ALLRANKS_SECRET": SECRET.decode(), "ALLRANKS_SECRET_FILE": str(file)}) == SECRET
    assert load_secret({"ALLRANKS_SECRET_FILE": str(file)}) == b"fedcba9876543210"
    with pytest.raises(ConfigError, match="ALLRANKS_SECRET has 5 bytes"):
        load_secret({"ALLRANKS_SECRET": "short"})
    with pytest.raises(ConfigError, match="no such file"):
        load_secret({"ALLRANKS_SECRET_FILE": str(tmp_path / "none")})
    file.chmod(0o640)
    with pytest.raises(ConfigError, match=r"not safe: owner \d+, mode 0640.*\n.*chmod 600"):
        load_secret({"ALLRANKS_SECRET_FILE": str(file)})


def test_ranks_that_start_simultaneously_create_one_secret(tmp_path: Path) -> None:
    code = "from allranks._net.secret import load_secret; print(load_secret().decode())"
    env = {name: value for name, value in os.environ.items() if not name.startswith("ALLRANKS_")}
    env |= {"PYTHONPATH": SRC, "XDG_CONFIG_HOME": str(tmp_path / "new")}
    run = [sys.executable, "-c", code]
    ranks = [subprocess.Popen(run, env=env, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    outputs = {rank.communicate(timeout=60)[0].strip() for rank in ranks}
    file = tmp_path / "new" / "allranks" / "secret"
    assert outputs == {file.read_text().strip()}
    assert len(bytes.fromhex(file.read_text())) == 32
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in file.parent.iterdir()] == ["secret"]


def test_unsafe_or_uncreatable_secret_raises_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert len(load_secret(environ)) == 64
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    if os.getuid():
        with pytest.raises(ConfigError, match="not safe"):
            load_secret(environ)
    monkeypatch.undo()
    (tmp_path / "allranks" / "secret").chmod(0o604)
    with pytest.raises(ConfigError, match="not safe"):
        load_secret(environ)
    with pytest.raises(
        ConfigError, match=r"Cannot create this user's secret in /proc/nowhere/.*\n  Set ALLRANKS_SECRET"
    ):
        load_secret({"XDG_CONFIG_HOME": "/proc/nowhere"})


def test_store_errors_derive_from_allranks_errors() -> None:
    assert issubclass(StoreLostError, AllranksError)
    assert issubclass(SecretError, ConfigError)


def test_pickling_a_store_raises_with_advice(tmp_path: Path) -> None:
    with TCPStore("localhost", 0, is_master=True) as tcp, FileStore(str(tmp_path / "file")) as file:
        for store, told in (
            (tcp, rf"TCPStore\('localhost', {tcp.port}\) in the other process, too, without is_master"),
            (file, rf"Create FileStore\('{file.path}'\) in the other process, too\."),
            (HashStore(), "use a TCPStore or a FileStore"),
            (
                PrefixStore("a", PrefixStore("b", file)),
                r"FileStore\('.*'\) .* Then create PrefixStore\('b', .* PrefixStore\('a', ",
            ),
        ):
            for copied in (pickle.dumps, copy.deepcopy, cloudpickle.dumps, ForkingPickler.dumps):
                with pytest.raises(TypeError, match=f"^a {type(store).__name__} belongs to its process[\\s\\S]*{told}"):
                    copied(store)
            clone = store.clone()
            clone.set_timeout(1)
            assert (type(clone), store.timeout.seconds) == (type(store), 300)


def test_server_sets_values_without_a_client() -> None:
    server = StoreServer.unix()
    server.set_locally("before", b"1")
    with server.start(), StoreClient.connect(server.address) as client, ThreadPoolExecutor() as pool:
        assert client.get("before") == b"1"
        waits = pool.submit(client.get, "after", 20.0)
        server.set_locally("after", b"2")
        assert waits.result() == b"2"
        assert client.num_keys() == 2
