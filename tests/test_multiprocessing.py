"""``allranks.multiprocessing`` as a replacement for ``torch.multiprocessing``."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from torch.multiprocessing.spawn import ProcessContext, ProcessRaisedException

import allranks.multiprocessing as mp
from allranks._base.errors import AllranksError
from allranks._store import StoreClient, StoreServer
from support.marked import wait_for


def tell(number: int, queue: Any) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    queue.put((number, [os.environ.get(name) for name in names], os.environ.get("ALLRANKS_STORE")))


def meet(number: int, nprocs: int) -> None:
    store = StoreClient.connect(os.environ["ALLRANKS_STORE"], timeout_s=30)
    store.set(f"here{number}", b"")
    store.wait([f"here{other}" for other in range(nprocs)], 30)


def fail(number: int) -> None:
    raise ValueError("boom")


def told(
    monkeypatch: pytest.MonkeyPatch, nprocs: int, **environ: str
) -> list[tuple[int, list[str | None], str | None]]:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ALLRANKS_STORE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    queue = mp.get_context("fork").SimpleQueue()
    mp.start_processes(tell, (queue,), nprocs=nprocs, start_method="fork")
    return sorted(queue.get() for _ in range(nprocs))


def test_processes_connect_to_the_parent_s_store() -> None:
    assert mp.spawn(meet, (2,), nprocs=2) is None


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    places = told(monkeypatch, 2)
    assert [place[1] for place in places] == [
        ["0", "2", "0", "2", None, None],
        ["1", "2", "1", "2", None, None],
    ]
    stores = {place[2] for place in places}
    assert len(stores) == 1
    assert str(stores.pop()).startswith("unix:@")


def test_ranks_are_numbered_across_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    [(_, names, store)] = told(monkeypatch, 1, RANK="1", WORLD_SIZE="2", MASTER_ADDR="node0", MASTER_PORT="29500")
    assert names == ["1", "2", "0", "1", "node0", "29500"]
    assert store is None


def test_processes_inside_an_allranks_job_use_another_store(monkeypatch: pytest.MonkeyPatch) -> None:
    outer = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "ALLRANKS_STORE": "unix:@outer"}
    [(_, _, store)] = told(monkeypatch, 1, **outer)
    assert store is not None
    assert store != "unix:@outer"


def test_user_defined_master_address_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    [(_, names, store)] = told(monkeypatch, 1, MASTER_ADDR="localhost", MASTER_PORT="12355")
    assert names == ["0", "1", "0", "1", "localhost", "12355"]
    assert store is not None


def test_failure_raises_the_exception_of_torch() -> None:
    with pytest.raises(ProcessRaisedException, match="ValueError: boom"):
        mp.start_processes(fail, nprocs=1, start_method="fork")


def test_context_closes_the_store_after_all_processes_have_exited(monkeypatch: pytest.MonkeyPatch) -> None:
    servers: list[StoreServer] = []

    def unix() -> StoreServer:
        servers.append(original())
        return servers[-1]

    original = StoreServer.unix
    monkeypatch.setattr(StoreServer, "unix", unix)
    context = mp.start_processes(meet, (2,), nprocs=2, join=False, start_method="fork")
    assert isinstance(context, ProcessContext)
    assert len(context.processes) == 2
    StoreClient.connect(servers[0].address, timeout_s=10).close()
    while not context.join(timeout=30):
        pass
    with pytest.raises(AllranksError):
        StoreClient.connect(servers[0].address, timeout_s=1, retry=False)


def test_spawn_warns_about_another_start_method() -> None:
    with pytest.warns(FutureWarning, match="start_method=spawn"):
        mp.spawn(fail, nprocs=0, start_method="fork")


def test_other_names_are_those_of_torch() -> None:
    assert mp.Process is multiprocessing.Process
    assert mp.get_context("fork").get_start_method() == "fork"
    assert "file_descriptor" in mp.get_all_sharing_strategies()
    assert {"Queue", "spawn", "set_start_method"} <= set(dir(mp))
    with pytest.raises(AttributeError):
        _ = mp.nothing


def test_importing_multiprocessing_does_not_import_torch() -> None:
    code = "import sys, allranks.multiprocessing; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.parametrize("nprocs", [1, 2])
def test_failure_leaves_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nprocs: int) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ProcessRaisedException):
        mp.start_processes(fail, nprocs=nprocs, start_method="fork")
    assert [path.name for path in tmp_path.iterdir() if "errorfile" in path.name] == []


SLEEPY = """
import os, sys, time
from pathlib import Path
import allranks.multiprocessing as mp

def sleep(number):
    Path(f"pid{number}").write_text(str(os.getpid()))
    Path(f"ready{number}").touch()
    try:
        for _ in range(600):  # a signal between Python's look for one and the system's sleep would wait for its end
            time.sleep(0.1)
    finally:
        if "late" in sys.argv: time.sleep(1); raise ValueError("late")

if __name__ == "__main__":
    context = mp.start_processes(sleep, nprocs=2, join=False, start_method=sys.argv[1])
    Path("ready").touch()
    while not context.join():
        pass
"""


def sleepy(folder: Path, *words: str, ignore: bool) -> tuple[subprocess.Popen[bytes], list[int]]:
    """Start a parent of two processes. ``ignore``: SIGINT is ignored, as under nohup."""
    (folder / "sleepy.py").write_text(SLEEPY)
    command = [sys.executable, "sleepy.py", *words]
    if ignore:
        command = ["sh", "-c", "trap '' INT; exec \"$@\"", "-", *command]
    environ = {**os.environ, "TMPDIR": str(folder)}
    process = subprocess.Popen(command, cwd=folder, env=environ, stderr=subprocess.DEVNULL)
    # both child processes and the parent, which may be the last
    wait_for(lambda: len(list(folder.glob("ready*"))) == 3)
    return process, [int(path.read_text()) for path in folder.glob("pid*")]


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_killed_parent_leaves_no_process(tmp_path: Path, how: str) -> None:
    parent, children = sleepy(tmp_path, how, ignore=True)
    parent.kill()
    parent.wait()
    wait_for(lambda: not any(runs(pid) for pid in children), 10)


def test_interrupted_join_leaves_no_file(tmp_path: Path) -> None:
    parent, children = sleepy(tmp_path, "fork", "late", ignore=False)
    for pid in (parent.pid, *children):  # A terminal sends SIGINT to the whole process group.
        os.kill(pid, signal.SIGINT)
    assert parent.wait(20) != 0
    assert [path.name for path in tmp_path.iterdir() if "errorfile" in path.name] == []


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
