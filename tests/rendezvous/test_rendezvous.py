"""Rendezvous of real processes with every init method, and the errors if the ranks cannot join."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from allranks._base.errors import ConfigError, JoinError, UsageError
from allranks._rendezvous import rendezvous
from allranks._rendezvous.rendezvous import JobMeeting, join
from allranks._store import HashStore, PrefixStore, StoreClient, StoreServer, address
from support.joining import SECRET, SRC, Rank, answers, assert_met
from support.prompt import PROMPT_S


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    threads, descriptors = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    yield
    assert set(threading.enumerate()) <= threads  # threads of another test may have ended since
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@pytest.fixture
def launcher() -> Iterator[dict[str, str]]:
    """Environment variables that a launcher sets for its ranks."""
    with StoreServer.unix().start() as server:
        yield {"ALLRANKS_STORE": server.address}


# --- init methods ---------------------------------------------------------------------------------------------


def test_launcher_store_joins_ranks_repeatedly(launcher: dict[str, str]) -> None:
    """Join four times in the same processes, with the same store."""
    assert_met(*(Rank(None, rounds=4, RANK=i, WORLD_SIZE=3, **launcher) for i in range(3)))


def test_launcher_store_joins_two_ranks_within_20_ms(launcher: dict[str, str]) -> None:
    def take_part(rank: int) -> float:
        began = time.perf_counter()
        join(None, rank=rank, world_size=2, timeout_s=10.0, environ=launcher).close()
        return time.perf_counter() - began

    with ThreadPoolExecutor(2) as pool:
        times = [max(pool.map(take_part, range(2))) for _ in range(10)]
    assert min(times) < 0.02


def test_env_method_accepts_port_in_master_addr(port: int) -> None:
    workers = [Rank("env://", RANK=i, WORLD_SIZE=3, MASTER_ADDR=f"localhost:{port}") for i in (1, 2)]
    assert_met(Rank("env://", RANK=0, WORLD_SIZE=3, MASTER_PORT=port), *workers)


def test_tcp_method_joins_repeatedly_on_one_port(port: int) -> None:
    """Rank 0 binds the same port again each time, while the other ranks can still reach the previous server."""
    assert_met(*(Rank(f"tcp://127.0.0.1:{port}", i, 3, rounds=5) for i in range(3)))


def test_tcp_url_query_sets_rank_and_world_size(port: int) -> None:
    url = f"tcp://localhost:{port}?rank={{}}&world_size=2"
    assert_met(Rank(url.format(0)), Rank(url.format(7), rank=1))


def test_file_method_creates_and_removes_file(tmp_path: Path) -> None:
    assert_met(*(Rank(f"file://{tmp_path}/meet", i, 2, rounds=3) for i in range(2)))
    assert list(tmp_path.iterdir()) == []


def test_file_method_accepts_existing_empty_file() -> None:
    with tempfile.NamedTemporaryFile() as file:
        assert_met(*(Rank(f"file://{file.name}", i, 2) for i in range(2)))
        assert Path(file.name).read_bytes() == b""


def test_file_method_replaces_stale_file(tmp_path: Path) -> None:
    """Start a job on the file of a job that was killed before its ranks joined. Rank 0 starts last."""
    path = tmp_path / "meet"
    url = f"file://{path}"
    killed = Rank(url, 0, 2)
    while not path.exists():
        time.sleep(0.005)
    killed.process.kill()
    killed.process.communicate()
    stale = path.read_bytes()
    worker = Rank(url, 1, 2)
    time.sleep(0.2)
    assert path.read_bytes() == stale
    assert path.stat().st_mode & 0o777 == 0o600
    assert_met(Rank(url, 0, 2), worker)
    assert list(tmp_path.iterdir()) == []


def test_passed_store_is_used_and_stays_open() -> None:
    ours = HashStore()
    for store in (ours, PrefixStore("p", ours)):

        def take_part(rank: int, store: object = store) -> JobMeeting:
            meeting = join(None, rank=rank, world_size=2, timeout_s=10.0, store=store, environ={})
            meeting.close()
            return meeting

        with ThreadPoolExecutor(2) as pool:
            first = list(pool.map(take_part, range(2)))
            second = list(pool.map(take_part, range(2)))
        first[0].store.set("a", b"1")
        assert first[1].store.check(["a"])
        assert not second[0].store.check(["a"])


def test_torch_store_joins_ranks(tmp_path: Path) -> None:
    code = f"""
import threading, torch.distributed, pytest
from allranks._rendezvous.rendezvous import join
from allranks._base.errors import JoinError, TimeoutError
from allranks._store import ForeignStore
files = [torch.distributed.FileStore({str(tmp_path / "store")!r}, 2) for _ in range(2)]
def take_part(rank):
    assert [m.rank for m in join(None, rank=rank, world_size=2, timeout_s=60.0, store=files[rank]).members] == [0, 1]
other = threading.Thread(target=take_part, args=[1])
other.start()
take_part(0)
other.join()
with pytest.raises(JoinError, match="1 of 2 ranks did not join in 0.2 s: missing rank 1."):
    join(None, rank=0, world_size=2, timeout_s=0.2, store=files[0])
store = ForeignStore(torch.distributed.HashStore())
store.set("a", b"\\x00\\xff")
assert store.get("a", 1.0) == b"\\x00\\xff" and store.add("n", 2) == 2 and store.peek(["b"]) == [None]
assert store.compare_set("c", b"", b"x\\xff") == b"x\\xff" and store.delete_key("a") and not store.check(["a"])
with pytest.raises(TimeoutError, match="no process set 'b' in 0.1 s"):
    store.get("b", 0.1)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100, env=os.environ | {"PYTHONPATH": SRC})


def test_single_process_opens_no_socket() -> None:
    before = os.listdir("/proc/self/fd")
    meeting = join(None, timeout_s=1.0, environ={})
    assert (meeting.rank, meeting.world_size, len(meeting.members)) == (0, 1, 1)
    assert meeting.members[0].pid == os.getpid()
    assert isinstance(meeting.store, HashStore)
    assert os.listdir("/proc/self/fd") == before
    meeting.close()
    assert join("tcp://localhost:1", rank=0, world_size=1, timeout_s=1.0, environ={}).world_size == 1


def test_local_rank_from_launcher_is_used(launcher: dict[str, str]) -> None:
    def take_part(rank: int) -> JobMeeting:
        told = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "6"}
        meeting = join(None, timeout_s=10.0, environ=launcher | told)
        meeting.close()
        return meeting

    with ThreadPoolExecutor(2) as pool:
        for meeting in pool.map(take_part, range(2)):
            assert (meeting.local_rank, meeting.local_world_size) == (5, 6)


# --- errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "given", "text"),
    [
        ("udp://localhost:1", {}, "is not known. Expected one of env://, tcp://HOST:PORT, file:///PATH, or none."),
        ("localhost:1", {}, "is not known"),
        ("tcp://[::1", {}, "is not a URL"),
        ("tcp://localhost", {"rank": 1, "world_size": 2}, "is incomplete. Expected tcp://HOST:PORT."),
        ("tcp://", {"rank": 1, "world_size": 2}, "init_method='tcp://' is incomplete."),
        ("tcp://:29500", {"rank": 1, "world_size": 2}, "is incomplete"),
        ("tcp://localhost:99999", {"rank": 1, "world_size": 2}, "99999 is out of range"),
        ("tcp://localhost:29500", {}, "RANK and WORLD_SIZE are not set"),
        ("tcp://localhost:29500?rank=1", {}, "WORLD_SIZE is not set (rank 1)"),
        ("tcp://localhost:29500?rank=x&world_size=2", {}, "rank='x' is not a number"),
        ("file://relative/path", {"rank": 0, "world_size": 2}, "has no absolute path"),
        ("file:///no/such/folder/x", {"rank": 0, "world_size": 2}, "Expected a new file in an existing folder"),
        ("file:///no/such/folder/x", {"rank": 1, "world_size": 2}, "Expected a new file in an existing folder"),
        ("file:///proc/nothing", {"rank": 0, "world_size": 2}, "cannot be written"),
        ("env://", {"rank": 1, "world_size": 2}, "MASTER_ADDR and MASTER_PORT are not set (rank 1 of 2)"),
    ],
)
def test_wrong_settings_raise_immediately(url: str, given: dict[str, int], text: str) -> None:
    began = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        join(url, timeout_s=30.0, environ={"ALLRANKS_SECRET": SECRET}, **given)  # type: ignore[arg-type]
    assert text in str(caught.value)
    assert time.monotonic() - began < PROMPT_S


def test_store_and_url_together_raise_usage_error() -> None:
    with pytest.raises(UsageError, match="Expected only one of them"):
        join("env://", timeout_s=1.0, store=HashStore(), environ={})


def failures(url: str | None, *ranks: tuple[int, int, float], environ: dict[str, str]) -> list[str]:
    """Run ranks in threads that cannot join, as (rank, world size, timeout). Return the texts of their errors."""

    def take_part(rank: int, size: int, timeout_s: float) -> str:
        began = time.monotonic()
        with pytest.raises(JoinError) as caught:
            join(url, rank=rank, world_size=size, timeout_s=timeout_s, environ=environ)
        assert time.monotonic() - began < min(t for _, _, t in ranks) + PROMPT_S
        return str(caught.value)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(lambda rank: take_part(*rank), ranks))


def test_missing_ranks_are_named_on_launcher_store(launcher: dict[str, str]) -> None:
    told = failures(None, (0, 7, 0.5), (2, 7, 0.5), (6, 7, 0.5), environ=launcher)
    me = f"(host {socket.gethostname()}, pid {os.getpid()})"
    for text in told:
        assert "4 of 7 ranks did not join in 0.5 s: missing ranks 1, 3-5.\n" in text
        assert f"Joined: rank 0 {me}, rank 2 {me}, rank 6 {me}." in text


def test_duplicate_rank_is_named_in_missing_rank_error(launcher: dict[str, str]) -> None:
    """Two processes set RANK=1 and none sets RANK=2, which is a common mistake."""
    with ThreadPoolExecutor(1) as pool:
        missing = pool.submit(failures, None, (0, 3, 2.0), (1, 3, 2.0), environ=launcher)
        with StoreClient.connect(launcher["ALLRANKS_STORE"]) as client:
            client.get("allranks/1/join/member/1", 5.0)
        double = Rank(None, RANK=1, WORLD_SIZE=3, **launcher)
        assert "error" in double.answer()
        for text in missing.result(10.0):
            assert "1 of 3 ranks did not join in 2.0 s: missing rank 2.\n" in text
            assert f"joined first, then rank 1 (host {socket.gethostname()}, pid {double.process.pid})." in text


def test_other_protocol_version_raises_immediately() -> None:
    store = HashStore()
    other = {"process": "x", "member": {"rank": 1, "pid": 5, "host": "h", "machine": "m", "world_size": 2}}
    store.set("allranks/1/join/first", msgspec.msgpack.encode(other))
    with pytest.raises(
        ConfigError, match=r"joins with protocol 2, rank 1 \(host h, pid 5\) with protocol 1: they run different"
    ):
        join(None, rank=0, world_size=2, timeout_s=30.0, store=store, environ={})
    store.set("allranks/2/join/first", b"1")
    with pytest.raises(ConfigError, match="Another version of allranks"):
        join(None, rank=0, world_size=2, timeout_s=30.0, store=store, environ={})


def test_exchange_timeout_names_missing_rank(launcher: dict[str, str]) -> None:
    def take_part(rank: int) -> list[bytes]:
        meeting = join(None, rank=rank, world_size=3, timeout_s=10.0, environ=launcher)
        try:
            rows = meeting.exchange(b"%d" % rank, 5.0)
            if rank:
                with pytest.raises(TimeoutError, match=r"rank 0 did not take part in an exchange of 3 ranks in 0\.1 s"):
                    meeting.exchange(b"", 0.1)
            return rows
        finally:
            meeting.close()

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(take_part, range(3))) == [[b"0", b"1", b"2"]] * 3


def test_first_timeout_ends_the_wait_of_all_ranks(port: int) -> None:
    for first, second in (0, 1), (1, 0):
        ranks = (first, 3, 0.3), (second, 3, 30.0)
        told = failures(f"tcp://localhost:{port}", *ranks, environ={"ALLRANKS_SECRET": SECRET})
        assert all("1 of 3 ranks did not join in 0.3 s: missing rank 2.\n" in text for text in told)


def assert_missing(answer: dict[str, Any], text: str, timeout_s: float) -> None:
    assert answer["error"] == "JoinError", answer
    assert text in answer["text"]
    assert answer["took"] < timeout_s + PROMPT_S


def test_error_names_unreachable_server_if_rank_0_never_starts(port: int, tmp_path: Path) -> None:
    told = answers(
        Rank(f"tcp://localhost:{port}", 1, 3, timeout_s=0.5),
        Rank(f"file://{tmp_path}/meet", 1, 3, timeout_s=0.5),
        Rank(None, timeout_s=0.5, RANK=1, WORLD_SIZE=3, ALLRANKS_STORE="unix:@allranks-nobody"),
    )
    assert_missing(told[0], f"rank 0 (the server at tcp:localhost:{port}) did not answer for 0.5 s", 0.5)
    assert_missing(told[1], "did not answer for 0.5 s (last: the file does not exist)", 0.5)
    assert_missing(told[2], "unix:@allranks-nobody did not answer for 0.5 s (last: connection refused)", 0.5)


def test_error_about_an_unreachable_server_has_only_the_system_error_as_cause(port: int) -> None:
    with pytest.raises(JoinError, match="last: connection refused") as caught:
        join(f"tcp://localhost:{port}", rank=1, world_size=2, timeout_s=0.2, environ={"ALLRANKS_SECRET": SECRET})
    assert isinstance(caught.value.__cause__, ConnectionRefusedError)
    assert caught.value.__cause__.__cause__ is None


def test_death_of_rank_0_is_reported_promptly_to_waiting_ranks(port: int, tmp_path: Path) -> None:
    path = tmp_path / "meet"
    for url in (f"tcp://localhost:{port}", f"file://{path}"):
        first, second = (Rank(url, i, 3, timeout_s=30.0) for i in range(2))
        while url.startswith("file") and not path.exists():
            time.sleep(0.005)
        spot = json.loads(path.read_text()) if path.exists() else {"address": f"tcp:localhost:{port}", "token": SECRET}
        with StoreClient.connect(spot["address"], spot["token"].encode(), 20.0) as client:
            client.get("allranks/1/join/member/1", 20.0)
        first.process.send_signal(signal.SIGKILL)
        died = time.monotonic()
        first.process.communicate()
        answer = second.answer()
        assert time.monotonic() - died < PROMPT_S
        assert answer["error"] == "JoinError"
        assert "rank 0 (the server" in answer["text"]
        assert "became unreachable while the ranks joined" in answer["text"]


def test_lost_launcher_store_is_reported_promptly_to_waiting_ranks() -> None:
    server = StoreServer.unix().start()
    environ = {"RANK": "1", "WORLD_SIZE": "2", "ALLRANKS_STORE": server.address}
    with ThreadPoolExecutor(1) as pool:
        rank = pool.submit(join, None, timeout_s=30.0, environ=environ)
        while not any(map(server._table.is_waiting, server._peers)):
            time.sleep(0.005)
        server.close()
        with pytest.raises(
            JoinError, match=r"the launcher's store at unix:@.* became unreachable while the ranks joined"
        ):
            rank.result(PROMPT_S)


def test_duplicate_rank_is_refused_and_first_process_joins(launcher: dict[str, str]) -> None:
    def take_part(rank: int) -> JobMeeting:
        return join(None, rank=rank, world_size=3, timeout_s=20.0, environ=launcher)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(take_part, 1)
        with StoreClient.connect(launcher["ALLRANKS_STORE"]) as client:
            client.get("allranks/1/join/member/1", 5.0)
        answer = Rank(None, RANK=1, WORLD_SIZE=3, **launcher).answer()
        assert answer["error"] == "JoinError"
        host = socket.gethostname()
        assert (
            f"rank 1 (host {host}, pid {os.getpid()}) joined first, then rank 1 (host {host}, pid {answer['pid']})."
            in answer["text"]
        )
        assert answer["took"] < PROMPT_S
        # The process that joined first is not affected.
        others = [pool.submit(take_part, 0), Rank(None, RANK=2, WORLD_SIZE=3, **launcher)]
        assert "error" not in others[1].answer()  # type: ignore[union-attr]
        first.result(5.0).close()
        others[0].result(5.0).close()  # type: ignore[union-attr]


def test_duplicate_ranks_are_refused_on_a_port(port: int) -> None:
    """Refuse duplicates of rank 1, and of rank 0, of which only one can bind the port."""
    url = f"tcp://localhost:{port}"
    environ = {"ALLRANKS_SECRET": SECRET}
    with ThreadPoolExecutor(1) as pool:
        server = pool.submit(join, url, rank=0, world_size=3, timeout_s=20.0, environ=environ)
        doubles = [Rank(url, 1, 3), Rank(url, 1, 3)]
        with StoreClient.connect(f"tcp:localhost:{port}", SECRET.encode(), 20.0) as client:
            client.get("allranks/1/join/double/1", 20.0)
        zero = Rank(url, 0, 3).answer()
        assert zero["error"] == "ConfigError"
        assert f"held by pid {os.getpid()} (" in zero["text"]
        last = Rank(url, 2, 3)
        server.result(20.0).close()
        assert "error" not in last.answer()
        told = answers(*doubles)
    refused = [answer for answer in told if "error" in answer]
    assert len(refused) == 1
    assert all(f"rank 1 (host {socket.gethostname()}, pid {answer['pid']})" in refused[0]["text"] for answer in told)


def test_different_world_sizes_are_reported_on_every_rank(launcher: dict[str, str]) -> None:
    ranks = [Rank(None, timeout_s=30.0, RANK=i, WORLD_SIZE=n, **launcher) for i, n in ((0, 3), (1, 3), (2, 4))]
    told = answers(*ranks)
    for answer in told:
        assert answer["error"] == "JoinError"
        assert "The ranks disagree on the world size: rank " in answer["text"]
        assert " has 3" in answer["text"]
        assert f"rank 2 (host {socket.gethostname()}, pid {told[2]['pid']}) has 4" in answer["text"]
        assert answer["took"] < PROMPT_S


def test_port_in_use_is_reported_on_every_rank(port: int) -> None:
    """Rank 0 names the process that holds the port. The other rank reports that it is not an allranks store."""
    with socket.create_server(("127.0.0.1", port)) as listener:

        def answer_one() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.recv(4096)
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        with ThreadPoolExecutor(1) as pool:
            served = pool.submit(answer_one)
            told = answers(*(Rank(f"tcp://localhost:{port}", i, 2, timeout_s=30.0) for i in range(2)))
            served.result(5.0)
    assert [answer["error"] for answer in told] == ["ConfigError"] * 2
    assert f"Cannot listen on port {port}" in told[0]["text"]
    assert f"held by pid {os.getpid()} (" in told[0]["text"]
    assert "it is not an allranks store (it looks like HTTP: 'HTTP/1.1 400 Bad Request')" in told[1]["text"]
    assert max(answer["took"] for answer in told) < PROMPT_S


def test_different_secrets_are_reported_on_both_ranks(port: int) -> None:
    """Rank 1 raises immediately. Rank 0 waits until its timeout, as any process could have sent the wrong secret."""
    url = f"tcp://localhost:{port}"
    with ThreadPoolExecutor(1) as pool:
        environ = {"ALLRANKS_SECRET": "another secret!!"}
        other = pool.submit(join, url, rank=1, world_size=2, timeout_s=30.0, environ=environ)
        told = failures(url, (0, 2, 0.5), environ={"ALLRANKS_SECRET": SECRET})
        with pytest.raises(ConfigError) as caught:
            other.result(PROMPT_S)
    for text in (told[0], str(caught.value)):
        assert "secret differs from this process's; use the same secret on both sides: set ALLRANKS_SECRET" in text
    assert "missing rank 1" in told[0]


def test_rank_that_rejoins_early_waits_for_next_rendezvous(port: int) -> None:
    """Rank 1 leaves and joins again while rank 0 is still in the first rendezvous."""
    url = f"tcp://localhost:{port}"
    environ = {"ALLRANKS_SECRET": SECRET}
    worker = Rank(url, 1, 2, rounds=2)
    first = join(url, rank=0, world_size=2, timeout_s=20.0, environ=environ)
    time.sleep(0.3)
    first.close()
    second = join(url, rank=0, world_size=2, timeout_s=20.0, environ=environ)
    assert [m.pid for m in second.members] == [os.getpid(), worker.process.pid]
    second.close()
    assert "error" not in worker.answer()


def test_failed_rendezvous_can_be_repeated(launcher: dict[str, str]) -> None:
    """The late rank raises the error of the rendezvous that it missed, and then joins the next one."""

    def take_part(rank: int) -> list[str]:
        told = []
        for timeout_s in (0.2, 20.0):
            try:
                join(None, rank=rank, world_size=3, timeout_s=timeout_s, environ=launcher).close()
                told.append("met")
            except JoinError as error:
                told.append(str(error).partition(".\n")[0])
        return told

    with ThreadPoolExecutor(3) as pool:
        early = [pool.submit(take_part, rank) for rank in range(2)]
        with StoreClient.connect(launcher["ALLRANKS_STORE"]) as client:
            client.get("allranks/2/join/member/0", 10.0)
        for rank in [*early, pool.submit(take_part, 2)]:
            assert rank.result(10.0) == ["1 of 3 ranks did not join in 0.2 s: missing rank 2", "met"]


# --- wait reports ---------------------------------------------------------------------------------------------


def test_long_wait_is_reported_once(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendezvous, "_NOTICE_S", 0.3)
    end = "; it gives up after 1 s, see init_process_group(timeout=...)"
    for url, last in (
        (f"tcp://no.such.host.invalid:{port}", r"tcp:no.such.host.invalid:\d+\); last: .*name"),
        (f"tcp://localhost:{port}", rf"tcp:localhost:{port}\); last: connection refused"),
        (f"file://{tmp_path}/meet", rf"named in {tmp_path}/meet\); last: the file does not exist"),
    ):
        failures(url, (1, 2, 0.8), environ={"ALLRANKS_SECRET": SECRET})
        [line] = capsys.readouterr().err.splitlines()
        assert re.match(rf"allranks: rank 1 has waited \d s for rank 0 \(the server .*{last}", line), line
        assert line.endswith(end)
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    [told] = failures(None, (1, 2, 0.8), environ=agent)
    agents = f"the store of torchrun's agent at 127.0.0.1:{port}"
    assert f"{agents} did not answer for 0.8 s (last: connection refused)" in told
    [line] = capsys.readouterr().err.splitlines()
    assert line == f"allranks: rank 1 has waited 0 s for {agents}; last: connection refused{end}"
    failures(None, (1, 2, 0.8), environ={"ALLRANKS_STORE": "unix:@allranks-nobody"})
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith("for the launcher's store at unix:@allranks-nobody; last: connection refused" + end)


def test_one_rank_reports_for_all_that_wait_for_the_same_ranks(
    port: int, launcher: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendezvous, "_NOTICE_S", 0.3)
    failures(f"tcp://127.0.0.1:{port}", *((i, 5, 0.8) for i in range(3)), environ={"ALLRANKS_SECRET": SECRET})
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("allranks: rank 0 has waited 0 s for ranks 3-4 (rank 0 listens on port ")
    failures(None, *((i, 5, 0.8) for i in (4, 2, 1)), environ=launcher)
    [line] = capsys.readouterr().err.splitlines()
    assert re.match(r"allranks: rank [124] has waited 0 s for ranks 0, 3 on the launcher's store at unix:@", line)


def test_ranks_that_join_in_time_print_no_wait_report(
    launcher: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Print nothing if all ranks are in time, and one line if rank 1 joins just after a report."""
    with ThreadPoolExecutor(2) as pool:

        def take_part(rank: int) -> None:
            join(None, rank=rank, world_size=2, timeout_s=20.0, environ=launcher).close()

        list(pool.map(take_part, range(2)))
        assert capsys.readouterr().err == ""
        monkeypatch.setattr(rendezvous, "_NOTICE_S", 0.2)
        first = pool.submit(take_part, 0)
        time.sleep(0.6)
        take_part(1)
        first.result(5.0)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("allranks: rank 0 has waited 0 s for rank 1 on the launcher's store")


@pytest.mark.parametrize(
    ("host", "where"),
    [
        ("127.0.0.1", "on port {port} of 127.0.0.1, which only this host can reach."),
        ("", "on port {port} of 127.0.0.1"),
        ("192.0.2.1", "; '192.0.2.1' is not an address of this host ("),
        ("no.such.host.invalid", "; 'no.such.host.invalid' does not resolve"),
    ],
)
def test_error_names_port_and_address_of_rank_0(port: int, host: str, where: str) -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": host, "MASTER_PORT": str(port), "ALLRANKS_SECRET": SECRET}
    with pytest.raises(JoinError) as caught:
        join(None, timeout_s=0.2, environ=environ)
    assert "missing rank 1." in str(caught.value)
    assert f"\n  Rank 0 listened on port {port} of 127.0.0.1" in str(caught.value)
    assert where.format(port=port) in str(caught.value)
    for thread in threading.enumerate():  # join does not wait for a name service that does not answer
        if thread.name == "allranks-resolve":
            thread.join()


def test_unresponsive_name_service_does_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()
    monkeypatch.setattr(address, "_resolution_problem", lambda host: str(answer.wait(20.0)))
    began = time.monotonic()
    assert address.address_problem("node0", 0.2) == "does not resolve in 0.2 s"
    assert time.monotonic() - began < PROMPT_S
    answer.set()
    for thread in threading.enumerate():
        if thread.name == "allranks-resolve":
            thread.join()
