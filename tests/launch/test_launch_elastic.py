"""``allranks run --elastic``: the launcher restarts a lost rank, or the other ranks continue without it."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from support.cluster import trouble
from support.launcher_process import Done, Launcher
from support.slot_watch import SLOT_WATCH

STARTS = pytest.mark.parametrize("start", ["fork", "spawn"])


def run(launcher: Launcher, body: str, *options: str, real_torch: bool = False) -> Done:
    return launcher.run(*options, str(launcher.write(SLOT_WATCH + body)), real_torch=real_torch)


def without_pids(text: str) -> list[str]:
    return [re.sub(r"pid \d+", "pid N", line).removeprefix("allranks run: ") for line in text.splitlines()]


KILLED = """
assert os.environ["ALLRANKS_ELASTIC"] == "1"
say("start", start)
if rank == 1 and start == 0:
    assert slot(2) == (0, "running")
    die()
wait_for(1, 1, "running")
if rank == 0:
    await_key("seen")
else:
    tell("seen")
"""


@STARTS
def test_only_the_killed_rank_is_restarted(launcher: Launcher, start: str) -> None:
    done = run(launcher, KILLED, "-n", "3", "--elastic", "2", "--start", start)
    assert (done.code, without_pids(done.err)) == (0, ["rank 1 (pid N) was killed by SIGKILL; restarted (1 of 3)"])
    assert done.lines == ["[0] start 0", "[1] start 0", "[1] start 1", "[2] start 0"]


def test_killed_command_is_restarted(launcher: Launcher) -> None:
    script = "echo $RANK $ALLRANKS_START; [ $RANK$ALLRANKS_START = 10 ] && kill -9 $$; sleep 0.5"
    done = launcher.run("-n", "2", "--elastic", "1", "--", "sh", "-c", script)
    assert (done.code, done.lines) == (0, ["[0] 0 0", "[1] 1 0", "[1] 1 1"])


def test_without_respawns_the_others_go_on(launcher: Launcher) -> None:
    body = """
if rank == 1: die()
wait_for(1, 0, "gone")
if rank == 2: sys.exit(3)
wait_for(2, 0, "gone")
say("end")
"""
    done = run(launcher, body, "-n", "4", "--elastic", "2", "--respawns", "0")
    assert (done.code, done.lines) == (0, ["[0] end", "[3] end"])
    assert without_pids(done.err) == [
        "rank 1 (pid N) was killed by SIGKILL; the other ranks continue (3 of at least 2)",
        "rank 2 (pid N) exited with code 3; the other ranks continue (2 of at least 2)",
    ]


def test_job_fails_if_too_few_ranks_remain(launcher: Launcher) -> None:
    body = """
if rank == 1: die()
wait_for(1, 0, "gone")
if rank == 2: raise ValueError("boom")
time.sleep(60)
"""
    done = run(launcher, body, "-n", "3", "--elastic", "2", "--respawns", "0")
    lines = without_pids(done.err)
    assert done.code == 1
    assert lines[:2] == [
        "rank 1 (pid N) was killed by SIGKILL; the other ranks continue (2 of at least 2)",
        "rank 2 (pid N) exited with code 1",
    ]
    assert lines[-1] == "ValueError: boom"


def test_rank_that_fails_after_all_respawns_is_not_restarted(launcher: Launcher) -> None:
    body = """
if rank == 1: raise ValueError(f"boom {start}")
wait_for(1, 2, "gone")
"""
    done = run(launcher, body, "-n", "2", "--elastic", "1", "--respawns", "2")
    lines = without_pids(done.err)
    assert done.code == 0
    assert [line for line in lines if line.startswith("rank 1 (")] == [
        "rank 1 (pid N) exited with code 1; restarted (1 of 2)",
        "rank 1 (pid N) exited with code 1; restarted (2 of 2)",
        "rank 1 (pid N) exited with code 1; the other ranks continue (1 of at least 1)",
    ]
    assert [line for line in lines if "ValueError: " in line] == [f"[1] ValueError: boom {n}" for n in range(3)]


@pytest.mark.parametrize("first", ["echo", "death"])
def test_job_stops_if_a_rank_does_not_survive_the_loss_of_another(launcher: Launcher, first: str) -> None:
    wait = 'tell("echoed")' if first == "echo" else 'wait_for(1, 1, "running")'
    before = 'await_key("echoed")' if first == "echo" else ""
    body = f"""
if rank == 1 and start == 0:
    {before}
    die()
if rank == 0:
    {wait}
    raise PeerLostError("rank 1 died", 1)
time.sleep(60)
"""
    done = run(launcher, body, "-n", "3", "--elastic", "2")
    lines = without_pids(done.err)
    assert done.code == 137
    assert any(line.startswith("rank 1 (pid N) was killed by SIGKILL (often") for line in lines)
    assert (
        "rank 0 did not survive the loss of rank 1 (allranks.PeerLostError: rank 1 died); the job stops.\n"
        "  To survive losses, see docs/resilience.md." in "\n".join(lines)
    )


def test_exit_of_an_excluded_rank_does_not_fail_the_job(launcher: Launcher) -> None:
    body = """
if rank == 1: raise ExcludedError("the others have gone on")
wait_for(1, 0, "gone")
"""
    done = run(launcher, body, "-n", "3", "--elastic", "2")
    assert done.code == 0
    assert without_pids(done.err) == [
        "rank 1 exited because the other ranks had continued without it; the other ranks continue (2 of at least 2)"
    ]


def test_no_rank_is_restarted_if_no_rank_has_the_state(launcher: Launcher) -> None:
    body = """
if rank == 1:
    if start == 0: die()
    raise StateLostError("all ranks that had the state are lost")
wait_for(1, 1, "running")
time.sleep(60)
"""
    done = run(launcher, body, "-n", "3", "--elastic", "1")
    assert done.code == 1
    lines = without_pids(done.err)
    assert lines[:2] == [
        "rank 1 (pid N) was killed by SIGKILL; restarted (1 of 3)",
        "no remaining rank has the complete state of the program; the job stops",
    ]
    assert "; restarted (" not in "".join(lines[1:])


def test_rank_that_exits_with_code_0_is_gone_and_not_reported(launcher: Launcher) -> None:
    done = run(launcher, 'rank and wait_for(0, 0, "gone")', "-n", "2", "--elastic", "2")
    assert (done.code, done.err) == (0, "")


def test_last_rank_is_not_restarted(launcher: Launcher) -> None:
    """Check that a rank is not restarted if no other rank can provide the state of the program."""
    done = run(launcher, "die()", "-n", "1", "--elastic", "1")
    assert done.code == 137
    assert "; restarted (" not in done.err


def test_all_ranks_are_restarted_if_too_few_remain(launcher: Launcher) -> None:
    body = """
round = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
assert start == 0 and table().version <= 1 + round  # the other rank of the second round may have ended
if rank == 1 and round == 0: die()
if round == 0: time.sleep(60)
say("round", round)
"""
    done = run(launcher, body, "-n", "2", "--elastic", "2", "--respawns", "0", "--restarts", "1")
    assert (done.code, done.lines) == (0, ["[0] round 1", "[1] round 1"])
    assert "restarting (1 of 1)" in done.err


def test_two_ranks_that_are_lost_simultaneously_are_restarted(launcher: Launcher) -> None:
    body = """
if start == 0 and rank in (1, 2):
    tell(f"there{rank}")
    await_key(f"there{3 - rank}")
    die()
wait_for(1, 1, "running")
wait_for(2, 1, "running")
if rank != 0: tell(f"back{rank}")
await_key("back1")
await_key("back2")
"""
    done = run(launcher, body, "-n", "4", "--elastic", "2")
    assert done.code == 0
    assert sorted(without_pids(done.err)) == [
        f"rank {rank} (pid N) was killed by SIGKILL; restarted (1 of 3)" for rank in (1, 2)
    ]


def test_child_processes_of_a_lost_rank_are_terminated_before_its_restart(launcher: Launcher) -> None:
    body = """
import subprocess
if rank == 1 and start == 0:
    child = subprocess.Popen(["sleep", "100"])
    _store.set("child", str(child.pid))
    die()
wait_for(1, 1, "running")
if rank == 1:
    pid = int(_store.get("child", 10))
    try:
        with open(f"/proc/{pid}/stat") as file: say(file.read().split()[2])
    except FileNotFoundError: say("Z")
"""
    done = run(launcher, body, "-n", "2", "--elastic", "1")
    assert (done.code, done.lines) == (0, ["[1] Z"])


def test_restarted_rank_has_torch_and_allranks_preloaded(launcher: Launcher) -> None:
    script = launcher.write(
        'import sys\nfound = [name in sys.modules for name in ("torch", "allranks._engines.native.engine")]\n'
        + SLOT_WATCH
        + """
if rank == 1 and start == 0: die()
wait_for(1, 1, "running")
if rank == 1: say(found)
"""
    )
    done = launcher.run("-n", "2", "--elastic", "1", str(script), real_torch=True)
    assert (done.code, done.lines) == (0, ["[1] [True, True]"])


def test_replacement_rank_has_its_own_random_state(launcher: Launcher) -> None:
    script = launcher.write(
        SLOT_WATCH
        + """
import torch
say(torch.initial_seed(), torch.rand(1).item())
if rank == 1 and start < 2: die()
wait_for(1, 2, "running")
"""
    )
    done = launcher.run("-n", "2", "--elastic", "1", str(script), real_torch=True)
    values = [line.split()[1:] for line in done.lines]
    assert [len(set(column)) for column in zip(*values, strict=True)] == [4, 4], done.err


@pytest.mark.skipif(bool(trouble()), reason=trouble())
@STARTS
def test_replacement_rank_is_on_the_same_host_after_an_address_has_appeared(launcher: Launcher, start: str) -> None:
    script = launcher.write(
        SLOT_WATCH
        + """
import subprocess
from allranks._cluster.network import machine
from allranks._rendezvous.rendezvous import this_member

if rank == 1 and start == 0:
    before = machine({})
    for command in "link add nic0 type dummy", "addr add 10.99.0.1/24 dev nic0", "link set nic0 up":
        subprocess.run(["ip", *command.split()], check=True)
    assert machine({}) != before
    die()
wait_for(1, 1, "running")
nested = [sys.executable, "-c", "from allranks._cluster import network; print(network.fixed_machine().split(':')[3])"]
say(this_member(rank, 2).machine, subprocess.check_output(nested, text=True))
other_namespace = subprocess.check_output(["unshare", "--net", *nested], text=True)
say("other:", other_namespace.strip() != machine())
"""
    )
    command = ["unshare", "--net", *launcher.command("-n", "2", "--elastic", "1", "--start", start, str(script))]
    process = launcher.open(command, launcher.environ())
    out, err = process.communicate(timeout=60)
    lines = [line.split()[1:] for line in out.decode().splitlines()]
    identities = [word for words in lines if words[:1] != ["other:"] for word in words]
    assert (len(identities), len({*identities})) == (4, 1), (out, err)
    assert [words for words in lines if words[:1] == ["other:"]] == [["other:", "True"]] * 2


def test_rank_that_is_restarted_later_has_modules_of_optimizers_preloaded(launcher: Launcher) -> None:
    script = launcher.write(
        SLOT_WATCH
        + """
import torch
if rank == 1:
    if "torch._dynamo" not in sys.modules:
        time.sleep(0.5)  # which leaves the CPUs to the import
        die()
    say("start after the first:", start > 0)
    tell("end")
await_key("end")
"""
    )
    done = launcher.run("-n", "2", "--elastic", "1", "--respawns", "80", str(script), real_torch=True)
    assert (done.code, done.lines) == (0, ["[1] start after the first: True"])


@pytest.mark.parametrize("part", ["template", "stopped template", "guard", "launcher"])
def test_job_survives_the_loss_of_the_template_or_guard_but_not_of_the_launcher(launcher: Launcher, part: str) -> None:
    """Lose one part of the launcher before a rank is restarted.

    Without the template, ranks start in new interpreters. Without the guard, ranks start normally. Without the
    launcher, the job ends.
    """
    body = """
if rank == 1:
    if start == 0:
        say("up")
        await_key("die")
        die()
    say("again")
    tell("end")
if Path("go").exists() or rank == 0:
    while not Path("go").exists(): time.sleep(0.01)
    tell("die")
await_key("end")
"""
    process = launcher.start("-n", "2", "--elastic", "1", str(launcher.write(SLOT_WATCH + body)))
    assert process.stdout is not None
    assert process.stdout.readline() == b"[1] up\n"
    template = next(pid for pid in children(process.pid) if stdout(pid) == stdout(process.pid))
    if part == "launcher":
        process.kill()
        process.wait()
        until = time.monotonic() + 5
        while Path(f"/proc/{template}").exists() and time.monotonic() < until:
            time.sleep(0.01)
        assert not Path(f"/proc/{template}").exists()
        process.communicate()
        return
    guard = next(pid for pid in children(process.pid) if stdout(pid) == os.devnull)
    os.kill(guard if part == "guard" else template, signal.SIGSTOP if part == "stopped template" else signal.SIGKILL)
    (launcher.folder / "go").touch()
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, b"[1] again\n"), err
    assert b"Traceback" not in err
    assert (b"the launcher's guard (pid %d) was killed" % guard in err) == (part == "guard")


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def stdout(pid: int) -> str:
    """Return the stdout of a process: a separate pipe for each rank, /dev/null for the guard."""
    return os.readlink(f"/proc/{pid}/fd/1")


def test_invalid_elastic_options_are_rejected(launcher: Launcher) -> None:
    script = str(launcher.write("pass"))
    for options, text in (
        (("-n", "2", "--respawns", "1"), "--respawns requires an elastic job.\n  Add --elastic MIN."),
        (("-n", "2", "--elastic", "3"), "--elastic 3 requires at least 3 ranks, but the job has 2.\n  Increase -n."),
        (("-n", "4", "--elastic", "1:2"), "--elastic 1:2 allows at most 2 ranks, but the job has 4.\n  Decrease -n."),
        (("-n", "2", "--elastic", "2:1"), "'2:1': MIN is greater than MAX"),
        (("-n", "2", "--elastic", "1", "--mode", "master"), "--elastic cannot be combined with --mode master"),
    ):
        done = launcher.run(*options, script)
        assert done.code == 2
        assert text in done.err


def test_job_fails_if_the_last_running_rank_is_lost_while_another_starts(launcher: Launcher) -> None:
    body = """
if start == 0:
    _store.set(f"pid/{rank}", str(os.getpid()).encode())
    if rank == 0:
        await_key("pid/1")
        os.kill(int(_store.get("pid/1", 10.0)), signal.SIGKILL)
        die()
time.sleep(30)
"""
    done = run(launcher, body, "-n", "2", "--elastic", "1")
    assert done.code == 137
    first, said, last = without_pids(done.err)[:3]
    ranks = sorted((first[5], last[5]))
    assert ranks == ["0", "1"]
    assert first == f"rank {first[5]} (pid N) was killed by SIGKILL; restarted (1 of 3)"
    assert said == f"no remaining rank has the state of the program; rank {first[5]} cannot continue"
    assert last == f"rank {last[5]} (pid N) was killed by SIGKILL (often the kernel, out of memory: check dmesg)"
