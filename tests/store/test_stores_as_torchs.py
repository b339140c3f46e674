"""Stores of allranks compared with those of torch: equal calls return equal results."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as torchs

import allranks

KINDS = ("HashStore", "FileStore", "TCPStore", "PrefixStore")
PROGRAMS, STEPS = 6, 40
SHORT = timedelta(seconds=0.02)
SECRET = "a secret of the tests, long enough"
# Number of internal keys that torch includes in num_keys().
COUNTED = {"FileStore": 1, "TCPStore": 1}
# The FileStore of torch reports that it deleted a missing key, appends nothing if the value equals the appended text,
# and has no queues. The barriers of its TCPStore use other keys.
NOT_COMPARED = {
    ("FileStore", "delete_key"),
    ("FileStore", "append"),
    ("FileStore", "queue_push"),
    ("FileStore", "queue_pop"),
    ("FileStore", "queue_len"),
    ("TCPStore", "barrier"),
}


@contextlib.contextmanager
def made(module: Any, kind: str, folder: Path) -> Iterator[Any]:
    match kind:
        case "HashStore":
            store = module.HashStore()
        case "FileStore":
            store = module.FileStore(str(folder / module.__name__), 1)
        case "TCPStore":
            store = module.TCPStore("127.0.0.1", 0, 1, True, timeout=timedelta(seconds=10))
        case _:
            store = module.PrefixStore("p", module.HashStore())
    store.set_timeout(SHORT)
    yield store
    if module is allranks:
        store.close()


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLRANKS_SECRET", SECRET)


Call = tuple[str, tuple[Any, ...]]


def made_up(seed: int) -> list[Call]:
    pick = random.Random(seed)
    key = lambda: pick.choice("abcd")  # noqa: E731
    number = lambda: pick.choice("nm")  # noqa: E731
    value = lambda: pick.choice(["", "x", "y", b"\x00\xff", "7"])  # noqa: E731
    queue = lambda: pick.choice(["q", "r"])  # noqa: E731
    makers: list[Callable[[], Call]] = [
        lambda: ("set", (key(), value())),
        lambda: ("get", (key(),)),
        lambda: ("add", (number(), pick.choice([1, 5, -3, 0, 1 << 40]))),
        lambda: ("get", (number(),)),
        lambda: ("check", ([key() for _ in range(pick.randrange(3))],)),
        lambda: ("wait", ([key() for _ in range(pick.randrange(3))],)),
        lambda: ("wait", ([key(), number()], SHORT)),
        lambda: ("compare_set", (key(), value(), value())),
        lambda: ("delete_key", (pick.choice("abn"),)),
        lambda: ("append", (key(), value())),
        lambda: ("multi_set", (["a", "b"], [value(), value()])),
        lambda: ("multi_get", ([key(), key()],)),
        lambda: ("num_keys", ()),
        lambda: ("list_keys", ()),
        lambda: ("queue_push", (queue(), value())),
        lambda: ("queue_pop", (queue(), pick.choice([True, False, False]))),
        lambda: ("queue_len", (queue(),)),
        lambda: ("check", ([queue()],)),
        lambda: ("barrier", (f"barrier {pick.randrange(3)}", 1)),
    ]
    return [pick.choice(makers)() for _ in range(STEPS)]


def outcome(store: Any, kind: str, call: Call) -> Any:
    name, arguments = call
    try:
        answer = getattr(store, name)(*arguments)
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        if "queue is empty" in str(error) or type(error).__name__ == "QueueEmptyError":
            return "empty"
        late = isinstance(error, TimeoutError) or "imeout" in str(error)
        return "late" if late else "refused"
    if name == "num_keys" and store.__class__.__module__.startswith("torch"):
        return answer - COUNTED.get(kind, 0)
    return answer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_random_programs_equal_torch(kind: str, tmp_path: Path) -> None:
    # The FileStore of torch needs half a second for an error, to resolve its C++ stack trace.
    for seed in range(2 if kind == "FileStore" else PROGRAMS):
        (tmp_path / str(seed)).mkdir()
        with made(torchs, kind, tmp_path / str(seed)) as theirs, made(allranks, kind, tmp_path / str(seed)) as ours:
            for step, call in enumerate(made_up(seed)):
                name, arguments = call
                if (kind, name) in NOT_COMPARED or (kind == "FileStore" and "q" in str(arguments)):
                    continue
                expected, actual = outcome(theirs, kind, call), outcome(ours, kind, call)
                if name == "list_keys":
                    expected, actual = sorted(set(expected) - {"efcount/"}), sorted(actual)
                assert actual == expected, f"program {seed}, step {step}: {call}"


WRONG: list[tuple[Call, str]] = [
    (("set", ("a", 3)), "must be bytes or a string, not 3"),
    (("set", (3, "a")), "key must be a string"),
    (("check", ("ab",)), "must be a list of strings"),
    (("wait", (["a"], "soon")), "timeout must be a timedelta"),
    (("add", ("a", 1.5)), "a whole number of 64 bits, not 1.5"),
    (("add", ("a", 1 << 64)), "a whole number of 64 bits"),
    (("add", ("word", 1)), "its value is not a whole number"),
    (("set_timeout", ("x",)), "timeout must be"),
]


@pytest.mark.parametrize(("call", "text"), WRONG, ids=lambda x: str(x)[:30])
def test_arguments_that_torch_refuses_raise_usage_error(call: Call, text: str, tmp_path: Path) -> None:
    for kind in KINDS:
        with made(allranks, kind, tmp_path) as ours:
            ours.set("word", "word")
            with pytest.raises(allranks.UsageError, match=text):
                getattr(ours, call[0])(*call[1])
            assert ours.get("word") == b"word"
    theirs = torchs.HashStore()
    theirs.set("word", "word")
    with pytest.raises((TypeError, ValueError)):
        getattr(theirs, call[0])(*call[1])


def test_counter_overflow_raises_and_keeps_the_store_usable(tmp_path: Path) -> None:
    for kind in KINDS:
        with made(allranks, kind, tmp_path) as ours:
            ours.add("n", (1 << 63) - 1)
            with pytest.raises(allranks.UsageError, match="does not fit into 64 bits"):
                ours.add("n", 1)
            with pytest.raises(allranks.UsageError, match="2 keys, but 1 values"):
                ours.multi_set(["a", "b"], ["1"])
            assert ours.num_keys() == 1


@pytest.mark.parametrize("kind", KINDS)
def test_waits_are_woken_and_timeouts_name_the_key(kind: str, tmp_path: Path) -> None:
    with made(allranks, kind, tmp_path) as ours, made(allranks, "HashStore", tmp_path):
        with pytest.raises(allranks.DistStoreError, match=r"'(p/)?gone'"):
            ours.wait(["gone"], 0.05)
        with pytest.raises(TimeoutError, match=r"'(p/)?gone'"):
            ours.get("gone")
        with pytest.raises(allranks.QueueEmptyError, match="is empty"):
            ours.queue_pop("q", block=False)
        ours.set_timeout(20)
        other = ours.clone()
        assert (other.timeout, ours.timeout) == (timedelta(seconds=20),) * 2
        told: list[bytes] = []
        threads = [threading.Thread(target=lambda: told.append(other.queue_pop("q"))) for _ in range(2)]
        threads.append(threading.Thread(target=lambda: told.append(other.get("late"))))
        for thread in threads:
            thread.start()
        time.sleep(0.05)
        ours.multi_set(["late", "b"], ["3", "4"])
        ours.queue_push("q", "1")
        ours.queue_push("q", "2")
        for thread in threads:
            thread.join(20)
        assert sorted(told) == [b"1", b"2", b"3"]
        assert ours.queue_len("q") == 0


def test_names_and_arguments_match_torch() -> None:
    """Read the signatures of torch from its docstrings, as it has them nowhere else."""
    import inspect

    for kind in ("TCPStore", "FileStore", "HashStore", "PrefixStore"):
        said = getattr(torchs, kind).__init__.__doc__.partition("->")[0]
        expected = re.findall(r"[(,] (\w+):", said.replace("(self", "( self"))[1:]
        ours = list(inspect.signature(getattr(allranks, kind)).parameters)
        assert ours == expected, kind
    public = {name for name in dir(torchs.Store) if not name.startswith("_")}
    assert public <= set(dir(allranks.Store))


# --- TCPStore -------------------------------------------------------------------------------------------------


def test_tcp_store_master_and_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(allranks.JoinError, match=r"1 of 2 stores connected in 0\.2 s"):
        allranks.TCPStore("localhost", 0, 2, True, 0.2)
    with allranks.TCPStore("localhost", 0, 2, True, 5, wait_for_workers=False) as master:
        assert isinstance(master, allranks.TCPStore)
        with allranks.TCPStore("localhost", master.port, 2, False, 5) as worker:
            worker.set("a", "1")
            assert master.get("a") == b"1"
            assert (master.host, master.num_keys(), master.list_keys()) == ("localhost", 1, ["a"])
        with pytest.raises(allranks.ConfigError, match="held by pid"):
            allranks.TCPStore("localhost", master.port, None, True)
        monkeypatch.setenv("ALLRANKS_SECRET", "another secret!!")
        with pytest.raises(allranks.SecretError, match="secret differs"):
            allranks.TCPStore("localhost", master.port, timeout=5)
    with pytest.raises(allranks.StoreLostError):
        master.get("a")


def test_tenants_share_a_server_until_the_last_one_closes() -> None:
    first = allranks.TCPStore("localhost", 0, is_master=True, multi_tenant=True)
    second = allranks.TCPStore("localhost", first.port, is_master=True, multi_tenant=True)
    second.set("a", "1")
    port = first.port
    del first  # as in torch, the store is not closed explicitly
    assert second.get("a") == b"1"
    second.close()
    with pytest.raises(allranks.JoinError):
        allranks.TCPStore("localhost", port, timeout=0.1)


def test_passed_listening_socket_is_used() -> None:
    import socket

    bound = socket.create_server(("127.0.0.1", 0))
    port = bound.getsockname()[1]
    with allranks.TCPStore("127.0.0.1", port, is_master=True, master_listen_fd=bound.detach()) as store:
        store.set("a", "1")
        assert store.port == port


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("", 1), "the master's host and port"),
        (("localhost", 0), "the master's host and port"),
        (("localhost", 70000), "a port, 0 to 65535"),
        (("localhost", 1, 0), "world_size=0"),
    ],
)
def test_wrong_arguments_of_tcp_store_raise_usage_error(arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(allranks.UsageError, match=text):
        allranks.TCPStore(*arguments)


# --- FileStore ------------------------------------------------------------------------------------------------


def test_last_file_store_removes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "store"
    first, second = allranks.FileStore(str(path), 2), allranks.FileStore(str(path), 2)
    first.set("a", "1")
    first.close()
    first.close()
    assert second.get("a") == b"1"
    with pytest.raises(allranks.StoreLostError, match=r"close\(\) was called"):
        first.get("a")
    again = second.clone()
    del second
    assert again.get("a") == b"1"
    del again
    assert not path.exists()
    with allranks.FileStore(str(path)) as kept:
        kept.set("a", "1")
    assert allranks.FileStore(str(path)).get("a") == b"1"
    path.unlink()


def test_foreign_file_is_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "letter"
    path.write_text("Dear all,\n")
    with pytest.raises(allranks.ConfigError, match="is not the file of a FileStore"):
        allranks.FileStore(str(path))
    assert path.read_text() == "Dear all,\n"
    with pytest.raises(allranks.ConfigError, match="cannot be opened: no such file"):
        allranks.FileStore(str(tmp_path / "no" / "store"))
    with tempfile.NamedTemporaryFile() as empty, allranks.FileStore(empty.name) as store:
        store.set("a", "1")
        os.truncate(empty.name, 0)
        with pytest.raises(allranks.StoreLostError, match="truncated the file"):
            store.get("a")


def test_torn_record_is_truncated(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with allranks.FileStore(str(path)) as store:
        store.set("a", "1")
        whole = path.read_bytes()
        store.set("b", bytes(5000))
        record = path.read_bytes()[len(whole) :]
    for torn in (record[:1], record[:8], record[:100], record[:-1], record[:-1] + b"x", bytes(64)):
        path.write_bytes(whole + torn)
        with allranks.FileStore(str(path)) as reader:
            assert reader.get("a") == b"1"
            assert not reader.check(["b"])
            reader.set("c", "2")
            assert allranks.FileStore(str(path)).multi_get(["a", "c"]) == [b"1", b"2"]
    path.write_bytes(whole[:7])  # not even the complete first line
    with allranks.FileStore(str(path)) as store:
        assert store.list_keys() == []


HAMMER = """
import os, sys
import allranks
kind, where, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
store = allranks.FileStore(where) if kind == "FileStore" else allranks.TCPStore("127.0.0.1", int(where))
store.barrier("start", 4)
for i in range(100):
    store.add("sum", 1)
    store.append("text", f"{rank};")
    seen = store.get("swaps") if store.check(["swaps"]) else b""
    while (now := store.compare_set("swaps", seen, mine := f"{int(seen or b'0') + 1}")) != mine.encode():
        seen = now
"""


@pytest.mark.parametrize("kind", ["FileStore", "TCPStore"])
def test_concurrent_updates_are_not_lost(kind: str, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        if kind == "FileStore":
            store = stack.enter_context(allranks.FileStore(str(tmp_path / "store")))
        else:
            store = stack.enter_context(allranks.TCPStore("127.0.0.1", 0, is_master=True))
        where = str(tmp_path / "store") if kind == "FileStore" else str(store.port)  # type: ignore[attr-defined]
        ranks = [subprocess.Popen([sys.executable, "-c", HAMMER, kind, where, str(rank)]) for rank in range(4)]
        assert [rank.wait(60) for rank in ranks] == [0] * 4
        assert store.get("sum") == b"400"
        assert sorted(store.get("text").decode().split(";")) == sorted(["", *"0123" * 100])
        assert int(store.get("swaps")) >= 100


WRITER = """
import sys
import allranks
store = allranks.FileStore(sys.argv[1])
for i in range(1 << 30):
    store.add("written", 1)
    store.set("large", bytes([i % 256]) * (8 << 20))
"""


def test_writer_killed_during_write_loses_no_other_data(tmp_path: Path) -> None:
    with allranks.FileStore(str(tmp_path / "store")) as store:
        for turn in range(4):
            store.append("mine", f"{turn};")
            before = int(store.get("written")) if turn else 0
            writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "store")])
            while store.add("written", 0) <= before:
                time.sleep(0.01)
            size = (tmp_path / "store").stat().st_size
            while (tmp_path / "store").stat().st_size < size + (1 << 20):
                pass  # the signal arrives in the middle of a write
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            assert store.get("mine").decode() == "".join(f"{t};" for t in range(turn + 1))
            if store.check(["large"]):
                assert len(set(store.get("large"))) == 1
            store.set("after", str(turn))
            assert allranks.FileStore(str(tmp_path / "store")).get("after") == b"%d" % turn
            (tmp_path / "store").unlink() if turn == 3 else None


def test_lock_held_by_another_process_times_out(tmp_path: Path) -> None:
    import fcntl

    with allranks.FileStore(str(tmp_path / "store"), 1) as store, open(tmp_path / "store", "rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        store.set_timeout(0.1)
        with pytest.raises(allranks.TimeoutError, match=r"has held its lock for 0\.1 s"):
            store.set("a", "1")
        fcntl.flock(other, fcntl.LOCK_UN)
        store.set("a", "1")
