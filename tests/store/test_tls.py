"""TLS on the TCP connections of a store: admission, data on the wire, and errors for wrong settings."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shlex
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from allranks._base.errors import ConfigError
from allranks._net import admission
from allranks._net.frames import FrameDecoder, pack_frame
from allranks._net.handshake import HANDSHAKE_FRAME, NONCE, PROVED
from allranks._net.tls import Tls, tls_context
from allranks._store import StoreClient, StoreServer, TCPStore
from allranks._store import server as server_module
from allranks._store.wire import Add, RequestDone, decode_reply, encode
from support.handshakes import first_frame, prove
from support.joining import SRC, Rank, assert_met

SECRET = b"0123456789abcdef"
NAMES = ("ALLRANKS_TLS_CERT", "ALLRANKS_TLS_KEY", "ALLRANKS_TLS_CA")
TIMELY_S = 6.0


class Site:
    """Certificate authority and a certificate that it signed, created with the commands of docs/security.md."""

    def __init__(self, folder: Path) -> None:
        self.ca, self.cert, self.key = folder / "ca.pem", folder / "host.pem", folder / "host.key"
        folder.mkdir()
        page = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
        for line in re.findall("^openssl .*", page, re.MULTILINE):
            subprocess.run(shlex.split(line), cwd=folder, check=True, capture_output=True)

    def environ(self, **other: Path) -> dict[str, str]:
        files = {"cert": self.cert, "key": self.key, "ca": self.ca} | other
        return {name: str(file) for name, file in zip(NAMES, files.values(), strict=True)}


@pytest.fixture(scope="session")
def sites(tmp_path_factory: pytest.TempPathFactory) -> tuple[Site, Site]:
    if shutil.which("openssl") is None:
        missing = "the openssl command is missing, which makes the certificates: apt-get install openssl"
        pytest.fail(missing) if os.environ.get("ALLRANKS_TEST_ALL") == "1" else pytest.skip(missing)
    folder = tmp_path_factory.mktemp("tls")
    return Site(folder / "ours"), Site(folder / "theirs")


@pytest.fixture
def ours(sites: tuple[Site, Site]) -> Site:
    return sites[0]


@contextlib.contextmanager
def setting(environ: dict[str, str]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in NAMES:
            patch.delenv(name, raising=False)
        for name, value in environ.items():
            patch.setenv(name, value)
        yield


@pytest.fixture
def server(ours: Site) -> Iterator[StoreServer]:
    with setting(ours.environ()), StoreServer.tcp("localhost", 0, SECRET).start() as server:
        yield server


@contextlib.contextmanager
def recorder(port: int) -> Iterator[tuple[int, bytearray]]:
    """Forward one connection to a port, and record the data of both directions."""
    seen = bytearray()

    def carry(source: socket.socket, sink: socket.socket) -> None:
        while data := source.recv(1 << 16):
            seen.extend(data)
            sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def serve() -> None:
        with listener.accept()[0] as near, socket.create_connection(("127.0.0.1", port)) as far:
            back = threading.Thread(target=carry, args=(far, near))
            back.start()
            carry(near, far)
            back.join()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1], seen
        thread.join()


def test_two_ranks_join_with_tls(ours: Site) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    assert_met(*(Rank(url, rank, 2, rounds=2, **ours.environ()) for rank in range(2)))


@pytest.mark.parametrize("tls", [True, False])
def test_tls_hides_keys_and_values(ours: Site, tls: bool) -> None:
    with setting(ours.environ() if tls else {}), StoreServer.tcp("localhost", 0, SECRET).start() as server:
        with recorder(server.port) as (port, seen):
            with StoreClient.connect(f"tcp:127.0.0.1:{port}", SECRET, 5.0) as client:
                client.set("a key by name", b"a value to be kept")
                assert client.get("a key by name") == b"a value to be kept"
    for word in (b"allranks", b"a key by name", b"a value to be kept"):
        assert (word in seen) != tls  # without TLS the recorder sees the words, so the check is valid


@pytest.mark.parametrize("newest", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_tls_stream_split_anywhere_is_decoded(ours: Site, newest: ssl.TLSVersion) -> None:
    sides = []
    for server_side in (True, False):
        context = tls_context(server_side, ours.environ())
        assert context is not None
        context.maximum_version = newest
        sides.append(Tls(context, server_side))
    to, fro = sides
    heard = {to: b"", fro: b""}
    on_the_way = {to: fro.seal(b"question" * 9000), fro: b""}
    while any(on_the_way.values()):
        for side, other in ((to, fro), (fro, to)):
            data, on_the_way[side] = on_the_way[side], b""
            cuts = range(0, len(data), 1 if len(data) < 5000 else 4099)
            for part in (data[at : at + cuts.step] for at in cuts):
                heard[side] += side.receive(part)
                on_the_way[other] += side.due()
            if side is to and data and heard[to] == b"question" * 9000:
                on_the_way[fro] += to.seal(b"answer")
    assert heard == {to: b"question" * 9000, fro: b"answer"}


def test_tls_serves_many_clients_and_large_values(server: StoreServer) -> None:
    large = os.urandom(12 << 20)

    def client(number: int) -> int:
        with StoreClient.connect(server.address, SECRET, 30.0) as client:
            if number == 0:
                client.set("large", large)
            assert client.add("count", 1) > 0
            client.wait([f"client {number - 1}"] if number else ["large"])
            client.set(f"client {number}", b"%d" % number)
            return len(client.get("large")) if number < 4 else int(client.get(f"client {number}"))

    with ThreadPoolExecutor(100) as pool:
        assert list(pool.map(client, range(100))) == [len(large)] * 4 + list(range(4, 100))
    assert server.refusals == {}


def test_client_with_certificate_is_not_evicted_by_other_clients(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "_CERTIFIED_S", 4.0)
    nonce = bytes(NONCE)

    def hear(sock: socket.socket, tls: Tls, decoder: FrameDecoder) -> bytes:
        while (frame := decoder.next()) is None:
            data = sock.recv(1 << 16)
            assert data, "the server dropped this connection"
            decoder.feed(tls.receive(data))
            sock.sendall(tls.due())
        return frame

    with contextlib.ExitStack() as crowd:
        waiting = []
        for _ in range(64):
            sock = crowd.enter_context(socket.create_connection(("127.0.0.1", server.port), TIMELY_S))
            context = tls_context(False)
            assert context is not None
            tls = Tls(context, server_side=False)
            sock.sendall(tls.seal(pack_frame(first_frame(nonce))))
            answer = hear(sock, tls, FrameDecoder(HANDSHAKE_FRAME))
            waiting.append((sock, tls, prove(SECRET, nonce, answer, tls.channel)[0]))
        crowd.enter_context(socket.create_connection(("127.0.0.1", server.port), TIMELY_S))
        time.sleep(0.1)  # enough time to evict a client that has only connected
        for number, (sock, tls, proof) in enumerate(waiting, 1):
            sock.sendall(tls.seal(pack_frame(proof) + pack_frame(encode(Add("count", 1)))))
            replies = FrameDecoder(HANDSHAKE_FRAME)
            assert hear(sock, tls, replies) == PROVED
            assert decode_reply(hear(sock, tls, replies)) == RequestDone(number)


def test_stalled_or_junk_clients_do_not_delay_a_rank(server: StoreServer) -> None:
    context = tls_context(False)
    assert context is not None
    hello = Tls(context, server_side=False).seal(b"")
    with contextlib.ExitStack() as crowd:
        for number in range(150):
            stranger = crowd.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            with contextlib.suppress(ConnectionResetError):  # the server has already closed this connection
                stranger.sendall(
                    (b"\x16", hello, hello[:100], hello[:5] + bytes(500), b"GET / HTTP/1.1\r\n")[number % 5]
                )
        began = time.monotonic()
        with StoreClient.connect(server.address, SECRET, 10.0) as client:
            assert client.add("alive", 1) == 1
        assert time.monotonic() - began < TIMELY_S


def test_client_without_certificate_is_refused(server: StoreServer, caplog: pytest.LogCaptureFixture) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with caplog.at_level(logging.WARNING, "allranks.store"):
        with socket.create_connection(("127.0.0.1", server.port), TIMELY_S) as plain:
            with context.wrap_socket(plain) as sock, pytest.raises(ssl.SSLError, match=r"(?i)certificate.required"):
                sock.recv(1)
    assert "did not return a certificate" in server.refusals["127.0.0.1"]


BOTH_SET = "set ALLRANKS_TLS_CERT, ALLRANKS_TLS_KEY and ALLRANKS_TLS_CA on both sides"


@pytest.mark.parametrize("case", ["all theirs", "their certificate", "client without", "server without"])
def test_tls_mismatch_is_reported_on_both_sides(
    sites: tuple[Site, Site], caplog: pytest.LogCaptureFixture, case: str
) -> None:
    ours, theirs = sites
    served, dialled, at_client, at_server = {
        "all theirs": (
            ours.environ(), theirs.environ(),
            r"this process does not accept its certificate \(.*\)", r"does not accept the certificate or .*alert.*",
        ),
        "their certificate": (
            ours.environ(), ours.environ(cert=theirs.cert, key=theirs.key),
            r"does not accept the certificate or .*alert.*", r"this process does not accept its certificate \(.*\)",
        ),
        "client without": (ours.environ(), {}, "this process does not", "does not use TLS, but this process does"),
        "server without": ({}, ours.environ(), "does not use TLS, but this process does", "this process does not"),
    }[case]  # fmt: skip
    with setting(served), StoreServer.tcp("localhost", 0, SECRET).start() as server:
        began = time.monotonic()
        with setting(dialled), caplog.at_level(logging.WARNING, "allranks.store"):
            with pytest.raises(ConfigError, match=f"{at_client}; {BOTH_SET}"):
                StoreClient.connect(server.address, SECRET, 30.0)
        while not server.refusals and time.monotonic() < began + TIMELY_S:
            time.sleep(0.01)
        assert time.monotonic() - began < TIMELY_S
    assert re.search(f"127.0.0.1 was refused: .*{at_server}.*; {BOTH_SET}", server.refusals["127.0.0.1"])
    assert "127.0.0.1 was refused" in caplog.text


def test_rank_without_tls_is_reported_by_rank_0(ours: Site) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    zero, one = Rank(url, 0, 2, timeout_s=2.0, **ours.environ()), Rank(url, 1, 2, timeout_s=2.0)
    told, other = zero.answer(), one.answer()
    assert (told["error"], other["error"]) == ("JoinError", "ConfigError")
    assert "127.0.0.1 was refused: it does not use TLS" in told["text"]
    assert "it uses TLS, but this process does not" in other["text"]


def test_tcp_store_uses_tls_on_passed_socket(ours: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLRANKS_SECRET", SECRET.decode())
    bound = socket.create_server(("127.0.0.1", 0))
    with setting(ours.environ()):
        store = TCPStore("127.0.0.1", 0, is_master=True, master_listen_fd=bound.detach())
        store.set("key", b"value")
        with setting({}), pytest.raises(ConfigError, match="uses TLS, but this process does not"):
            TCPStore("127.0.0.1", store.port)
        store.close()


def test_unix_sockets_ignore_tls_settings() -> None:
    with setting({NAMES[0]: "/nowhere"}), StoreServer.unix(SECRET).start() as server:
        with StoreClient.connect(server.address, SECRET, 5.0) as client:
            assert client.add("alive", 1) == 1


def test_unix_server_uses_tls_for_other_hosts(ours: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "published_addresses", lambda: ["127.0.0.1"])
    with setting(ours.environ()), StoreServer.unix(SECRET).start() as server:
        (address,) = server.listen_to_other_hosts()
        for number, where in enumerate((server.address, address), 1):
            with StoreClient.connect(where, SECRET, 5.0) as client:
                assert client.add("alive", 1) == number
        with setting({}), pytest.raises(ConfigError, match="uses TLS, but this process does not"):
            StoreClient.connect(address, SECRET, 5.0)


def test_wrong_tls_settings_raise_config_error(sites: tuple[Site, Site], tmp_path: Path) -> None:
    ours, theirs = sites
    assert tls_context(True, {}) is None
    open_key, locked_key, junk = tmp_path / "open.key", tmp_path / "locked.key", tmp_path / "junk.pem"
    shutil.copyfile(ours.key, open_key)
    open_key.chmod(0o640)
    junk.write_text("no PEM")
    subprocess.run(
        ["openssl", "pkey", "-aes256", "-passout", "pass:word", "-in", ours.key, "-out", locked_key],
        check=True, capture_output=True,
    )  # fmt: skip
    locked_key.chmod(0o600)
    cases: list[tuple[dict[str, str], str]] = [
        ({NAMES[0]: str(ours.cert)}, "TLS_CERT is set, but ALLRANKS_TLS_KEY, ALLRANKS_TLS_CA is not.\n  Set all three"),
        (ours.environ(key=tmp_path / "none"), rf"TLS_KEY={tmp_path}/none cannot be read: no such file"),
        (ours.environ(ca=tmp_path), rf"TLS_CA={tmp_path} cannot be read: is a directory"),
        (ours.environ(key=open_key), rf"TLS_KEY={open_key} is not safe: owner \d+, mode 0640(.|\n)*chmod 600"),
        (ours.environ(key=locked_key), rf"TLS_KEY={locked_key} is encrypted"),
        (ours.environ(key=theirs.key), rf"TLS_KEY={theirs.key} is not the key of ALLRANKS_TLS_CERT={ours.cert}"),
        (ours.environ(cert=junk), rf"TLS_KEY={ours.key} cannot be used with ALLRANKS_TLS_CERT={junk}"),
        (ours.environ(ca=junk), rf"TLS_CA={junk} holds no certificate"),
    ]
    for environ, message in cases:
        for server_side in (True, False):
            with pytest.raises(ConfigError, match=message):
                tls_context(server_side, environ)
    with setting(cases[0][0]):
        with pytest.raises(ConfigError, match="Set all three"):
            StoreServer.tcp("localhost", 0, SECRET)
        with pytest.raises(ConfigError, match="Set all three"):
            StoreServer.on_socket(socket.create_server(("127.0.0.1", 0)), "127.0.0.1", SECRET)
        with pytest.raises(ConfigError, match="Set all three"):
            StoreClient.connect("tcp:127.0.0.1:9", SECRET, 5.0)


def test_ssl_is_imported_only_if_needed() -> None:
    code = "import sys, allranks._rendezvous.rendezvous, allranks._store; sys.exit('ssl' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": SRC}).returncode == 0


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_relay_with_certificate_but_without_secret_reads_nothing(server: StoreServer, version: ssl.TLSVersion) -> None:
    """Relay a connection with TLS to both sides, with the certificate of a host. The client detects the relay."""
    context, dial = tls_context(True), tls_context(False)
    assert context is not None
    assert dial is not None
    context.maximum_version = version
    seen: list[bytes] = []

    def pump(source: ssl.SSLSocket, sink: ssl.SSLSocket) -> None:
        with contextlib.suppress(OSError, ValueError):
            while data := source.recv(1 << 16):
                seen.append(data)
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)

    def relay(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                plain, _ = listener.accept()
                to_server = dial.wrap_socket(socket.create_connection(("127.0.0.1", server.port)))
                from_client = context.wrap_socket(plain, server_side=True)
                for pair in ((from_client, to_server), (to_server, from_client)):
                    threading.Thread(target=pump, args=pair, daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=relay, args=(listener,), daemon=True).start()
        with pytest.raises(ConfigError, match="secret differs"):
            StoreClient.connect(f"tcp:127.0.0.1:{listener.getsockname()[1]}", SECRET, 10.0).set("key", b"value")
    assert seen
    assert not any(b"value" in data for data in seen)
    with StoreClient.connect(server.address, SECRET, 10.0) as client:
        assert client.add("alive", 1) == 1
