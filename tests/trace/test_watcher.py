"""Wait reports without a launcher: the lowest waiting rank on the host of a late rank reports for all ranks."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from allranks._trace.diagnosis import diagnose
from allranks._trace.state import CallState, GroupState, RankState
from allranks._trace.watcher import WatchedPeer, choose_teller
from support import warm

RANKS = (0, 1, 2, 3)
PEERS = {rank: WatchedPeer(rank, 100 + rank, f"node{rank // 2}", rank < 2) for rank in RANKS}
CALL = CallState(
    1, "all_reduce #5", "all_reduce", "world", RANKS, 5, 0, "float32", 4, -1, "", 0.0, 9.0, False, -1, "", False, True
)


def state(rank: int, number: int, waits: bool = False) -> RankState:
    groups = (GroupState("world", RANKS, "native", number, True),)
    return RankState(rank, 100 + rank, "sleeping", 0.0, True, calls=(CALL,) if waits else (), groups=groups)


def teller(*states: RankState) -> int:
    return choose_teller(diagnose(states), PEERS, CALL)


def test_reporting_rank_is_chosen_near_the_late_rank() -> None:
    # View of node0, which knows only the numbers of the collectives on node1.
    assert teller(state(0, 5, True), state(1, 4), state(2, 5), state(3, 5)) == 0  # on the host of the late rank
    assert teller(state(0, 4), state(1, 5, True), state(2, 5), state(3, 5)) == 1
    assert teller(state(0, 5, True), state(1, 5, True), state(2, 5), state(3, 4)) == 2  # it sees the process of rank 3
    assert teller(state(0, 5, True), state(1, 5, True), state(2, 4), state(3, 4)) == 0  # no waiting rank sees them


PROGRAM = """
import os, sys, time
import torch
import allranks as dist
def load():
    time.sleep(1000)
dist.init_process_group()
for step in range(3):
    time.sleep(0.06)
    dist.all_reduce(torch.ones(4))
    if dist.get_rank() == 1 and step == 1:
        load()
"""


def test_one_rank_reports_the_wait_without_a_launcher(tmp_path: Path) -> None:
    (tmp_path / "hung.py").write_text(PROGRAM)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "3", "ALLRANKS_NOTICE_AFTER": "1"}
    read, write = os.pipe()
    ranks = [
        subprocess.Popen(
            [sys.executable, "hung.py"], cwd=tmp_path, stderr=write, env=os.environ | common | {"RANK": str(rank)}
        )
        for rank in range(3)
    ]
    os.close(write)
    with os.fdopen(read) as err:
        line = err.readline()
        for rank in ranks:
            rank.kill()
            rank.wait()
        rest = err.read()
    assert re.sub(r"\d+ s ", "N s ", line) == (
        "allranks: rank 0: ranks 0, 2 have waited N s in all_reduce #3 (hung.py:10, shape (4,)) for rank 1, which is "
        "at hung.py:6 in load; its process is sleeping, in a timer\n"
    )
    assert "have waited" not in rest


@pytest.mark.parametrize("value", ["0", "1h"])
def test_reports_can_be_disabled_or_delayed(value: str) -> None:
    script = (
        "import threading, allranks as dist; "
        "dist.init_process_group(init_method='tcp://127.0.0.1:0', rank=0, world_size=1);"
        " print([t.name for t in threading.enumerate() if t.name == 'allranks-notices'])"
    )
    environ = os.environ | {"ALLRANKS_NOTICE_AFTER": value}
    done = warm.run([sys.executable, "-c", script], env=environ, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n" if value == "0" else "['allranks-notices']\n", "")
