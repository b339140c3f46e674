"""Wait reports: the launcher reports once, without a request, which ranks wait and for which rank."""

from __future__ import annotations

import os
import re
import signal
import subprocess

import pytest

from allranks._cluster.env import NOTICE_AFTER, notice_seconds
from allranks._trace.inspection import next_limit
from allranks._trace.kernel import KernelWait
from allranks._trace.state import CallState, GroupState, RankState
from allranks.launch.policy.interface import (
    AnswerStates,
    DumpStacks,
    InspectRanks,
    PrintWaitReport,
    RanksStarted,
    StatesRequested,
    TimePassed,
)
from allranks.launch.policy.round import Round, Rules, step
from allranks.launch.policy.wait_reports import WaitReports
from allranks.launch.spec.events import LongWait, Stacks
from support.launcher_process import Launcher

# Rules, with simulated ranks.


def waiting(rank: int, number: int = 5) -> RankState:
    call = CallState(7, f"all_reduce #{number}", "all_reduce", "world", (0, 1, 2), number, 0, "float32", 4, -1,
                     "train.py:8", 0.0, 10.0, False, -1, "", False, True)  # fmt: skip
    return RankState(
        rank,
        100 + rank,
        "sleeping",
        0.0,
        True,
        calls=(call,),
        groups=(GroupState("world", (0, 1, 2), "native", number, True),),
    )


def late(rank: int, **more: object) -> RankState:
    return RankState(rank, 100 + rank, "sleeping", 0.0, True, **more)  # type: ignore[arg-type]


STACK = b'Current thread 0x1 (most recent call first):\n  File "/home/me/data.py", line 31 in load\n'
RUNNING = {0, 1, 2}


def ask(notices: WaitReports, limit: float = 10.0, at: float = 0.0, index: int = 7) -> list[object]:
    return list(notices.take_wait(LongWait(0, index, limit), [0, 1, 2], at))


def tell(notices: WaitReports, *states: RankState, at: float = 0.1, reader: int | None = None) -> list[object]:
    for state in states:
        notices.take_state(state)
    return list(notices.check(RUNNING, reader, at))


def test_long_wait_leads_to_a_wait_report_with_stacks() -> None:
    notices = WaitReports()
    assert notices.deadline() is None
    assert ask(notices) == [InspectRanks((0, 1, 2))]
    assert ask(notices, index=8) == []  # one inspection at a time
    assert tell(notices, waiting(0), waiting(1)) == []  # rank 2 has not answered
    assert tell(notices, late(2)) == [DumpStacks((2,))]
    notices.take_stacks(Stacks(2, STACK), 0.2)
    assert notices.check(RUNNING, None, 0.2) == []  # more stacks may arrive
    (notice,) = notices.check(RUNNING, None, 0.5)
    assert isinstance(notice, PrintWaitReport)
    assert notice.diagnosis.late == (2,)
    assert notice.stacks == {2: STACK}
    assert notices.deadline() is None


def test_silent_agents_and_ranks_do_not_delay_a_wait_report() -> None:
    notices = WaitReports()
    ask(notices)
    assert notices.deadline() == 0.5
    assert tell(notices, waiting(0), at=0.4) == []
    (notice,) = tell(notices, at=0.5)
    assert isinstance(notice, PrintWaitReport)
    assert notice.diagnosis.late == (1, 2)
    ask(notices, index=9)
    assert tell(notices, waiting(0, 6), waiting(1, 6), late(2), at=3.0) == [DumpStacks((2,))]
    (notice,) = notices.check(RUNNING, None, 4.0)
    assert isinstance(notice, PrintWaitReport)
    assert notice.stacks == {}


def test_same_wait_is_reported_again_only_after_the_next_limit() -> None:
    notices = WaitReports()
    states = [waiting(0), waiting(1), late(2)]
    ask(notices)
    tell(notices, *states)
    assert len(notices.check(RUNNING, None, 5.0)) == 1
    assert ask(notices, at=6.0) == []
    assert notices.take_wait(LongWait(1, 7, 10.0), [0, 1, 2], 6.0) == []  # the first report included this wait
    assert ask(notices, at=6.0, index=8) == [InspectRanks((0, 1, 2))]  # another call with the same diagnosis
    assert tell(notices, *states, at=6.1) == []
    assert ask(notices, 60.0, at=60.0) == [InspectRanks((0, 1, 2))]
    assert tell(notices, *states, at=60.1) == [DumpStacks((2,))]


def test_rank_that_waits_for_its_user_is_not_late() -> None:
    for more, reader in (({"kernel": KernelWait("read", "/dev/pts/0", 0)}, None), ({}, 2)):
        notices = WaitReports()
        ask(notices)
        assert tell(notices, waiting(0), waiting(1), late(2, **more), reader=reader) == []
        assert notices.deadline() is None


def test_stop_cancels_a_wait_report() -> None:
    notices = WaitReports()
    ask(notices)
    notices.forget()
    assert tell(notices, waiting(0), waiting(1), late(2)) == []
    assert notices.deadline() is None


def test_stacks_are_not_requested_from_ranks_that_have_exited() -> None:
    notices = WaitReports()
    ask(notices)
    for state in (waiting(0), waiting(1), late(2)):
        notices.take_state(state)
    (notice,) = notices.check({0, 1}, None, 0.1)
    assert isinstance(notice, PrintWaitReport)


def test_request_of_another_command_is_answered() -> None:
    state = Round(Rules(10.0))
    step(state, RanksStarted((0, 1, 2)), 0.0)
    assert step(state, StatesRequested(5), 1.0) == [InspectRanks((0, 1, 2), 5)]
    assert step(state, StatesRequested(5), 1.1) == []  # receives the same answer as the first request
    assert state.deadline() == 1.5
    for each in (waiting(0), waiting(1), late(2)):
        step(state, each, 1.2)
    assert step(state, TimePassed(), 1.2) == [DumpStacks((2,))]
    step(state, Stacks(2, STACK), 1.3)
    assert state.deadline() == 1.5
    (answer,) = step(state, TimePassed(), 1.5)
    assert answer == AnswerStates([waiting(0), waiting(1), late(2)], {2: STACK}, {})
    assert state.deadline() is None
    assert step(state, StatesRequested(0, stacks=False), 2.0) == [InspectRanks((0, 1, 2))]
    (answer,) = step(state, TimePassed(), 2.5)  # no agent has answered
    assert answer == AnswerStates([], {}, {})


def test_limits_of_repeated_wait_reports_grow() -> None:
    limits, told = [], 0.0
    for _ in range(6):
        told = next_limit(10.0, told)
        limits.append(told)
    assert limits == [10, 60, 300, 1800, 3600, 5400]
    assert next_limit(600.0, 600.0) == 1800


# Programs that hang.

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
import torch
import allranks as dist

def load(how):
    if how == "sleep": print("hangs", flush=True); time.sleep(1000)
    if how == "stop": os.kill(os.getpid(), signal.SIGSTOP)
    if how == "loop": max(iter(int, 1))
    if how == "branch": dist.recv(torch.ones(1), 0)
    if how == "group": dist.all_reduce(t, group=pair)

dist.init_process_group(timeout=50)
t = torch.ones(4)
pair = dist.new_group([0, 1])
for step in range(4):
    time.sleep(0.06)
    dist.all_reduce(t)
    if dist.get_rank() == 1 and step == 2:
        load(sys.argv[1])
dist.barrier()
"""
WAITED = "ranks 0, 2 have waited N s in all_reduce #5 (hung.py:19, shape (4,)) for rank 1, "
CIRCLE = "deadlock: ranks 0-1 have waited for each other for N s: rank 0 in all_reduce #5 (hung.py:19, shape (4,)) for "
TELLS = {
    "sleep": WAITED + "which is at hung.py:8 in load; its process is sleeping, in a timer",
    "stop": WAITED + "whose process is stopped, after all_reduce #4 (hung.py:19, shape (4,))",
    "loop": WAITED + "which is at hung.py:10 in load; its process is running",
    "branch": CIRCLE + "rank 1; rank 1 in recv from rank 0 (hung.py:11, shape (1,)) for rank 0",
    "group": CIRCLE + "rank 1; rank 1 in all_reduce #1 of group 'group 1' (hung.py:12, shape (4,)) for rank 0",
}


@pytest.mark.parametrize("how", TELLS)
def test_programs_that_hang(launcher: Launcher, how: str) -> None:
    launcher.write(PROGRAM, "hung.py")
    process = launcher.start("-n", "3", "--notice-after", "1", "--grace", "0.5", "hung.py", how, real_torch=True)
    line = first_line(process)
    os.kill(process.pid, signal.SIGINT)
    rest = process.communicate(timeout=30)[1].decode()
    assert re.sub(r"waited (for each other for )?\d+ s", r"waited \1N s", re.sub(r"\b[1-9] s\b", "N s", line)) == (
        f"allranks run: {TELLS[how]}\n"
    )
    assert "have waited" not in rest


def first_line(process: subprocess.Popen[bytes]) -> str:
    assert process.stderr is not None
    return process.stderr.readline().decode()


def test_wait_report_can_be_disabled(launcher: Launcher) -> None:
    """A job without reports hangs for longer than another job, which starts later and reports after 1 s."""
    assert notice_seconds({NOTICE_AFTER: "0"}) == 0
    launcher.write(PROGRAM, "hung.py")
    silent = launcher.start("-n", "3", "hung.py", "sleep", real_torch=True, environ={NOTICE_AFTER: "0"})
    assert silent.stdout is not None
    assert silent.stdout.readline().decode() == "[1] hangs\n"
    other = launcher.start("-n", "3", "hung.py", "sleep", real_torch=True, environ={NOTICE_AFTER: "1"})
    assert "waited" in first_line(other)
    for process in (other, silent):
        os.kill(process.pid, signal.SIGINT)
    assert "waited" not in silent.communicate(timeout=30)[1].decode()
    other.communicate(timeout=30)


def test_invalid_time_until_a_wait_report_is_rejected(launcher: Launcher) -> None:
    done = launcher.run("-n", "1", "x.py", environ={"ALLRANKS_NOTICE_AFTER": "soon"})
    assert done.code == 2
    assert "ALLRANKS_NOTICE_AFTER: 'soon' is not a time (30 or 30s, 5m, 2h)" in done.err


MASTER = """
import time, torch, allranks as ar
mw = ar.init_master_worker()
x = torch.randn({size}, {size}, device="worker:1")

def load():
    time.sleep(4)
    return 1

print({what})
"""


@pytest.mark.parametrize(
    ("what", "size", "place"),
    [
        ("(x @ x).sum().item()", 5000, r"which executes aten::\w+; its process is \w[\w ]*"),
        (
            "mw.remote(load, on=1)().result()",
            1,
            r"which is at .*script.py:7 in load; its process is sleeping, in a timer",
        ),
    ],
    ids=["operator", "function"],
)
def test_wait_report_explains_a_master_that_waits(launcher: Launcher, what: str, size: int, place: str) -> None:
    script = launcher.write(MASTER.format(what=what, size=size))
    done = launcher.run("--mode", "master", "-n", "2", "--notice-after", "1s", str(script), real_torch=True)
    assert done.code == 0, done.err
    line = (
        r"^allranks run: rank 0 has waited \d s in a wait for worker 1 \(.*script.py:\d+\) for rank 1, " + place + "$"
    )
    assert re.search(line, done.err, re.M), done.err
