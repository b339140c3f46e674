"""Jobs that hang or receive a signal: the launcher reports briefly where the ranks are."""

from __future__ import annotations

import signal

import pytest
from ready_ranks import WAITING, end, start

from allranks._trace.stacks import main_place, parse, render
from support.launcher_process import Launcher
from support.marked import wait_for

TEXT = """\
Thread 0x00007f0000000001 [loader] (most recent call first):
  File "/x/lib/threading.py", line 982 in run

Current thread 0x00007f0000000002 (most recent call first):
  File "/x/site-packages/torch/nn.py", line 5 in forward
  File "/home/me/train.py", line 7 in step
  File "/home/me/train.py", line 9 in <module>
  File "{runpy}", line 88 in _run_code
  File "{rank}", line 140 in run
  File "/x/bin/allranks", line 8 in <module>
"""


def text(address: int = 2) -> str:
    from allranks.launch.ranks import rank

    return TEXT.format(runpy="<frozen runpy>", rank=rank.__file__).replace("02 (most", f"{address:02} (most")


def test_parsed_stacks_omit_the_frames_of_the_launcher() -> None:
    (main, frames), (other, _) = parse(text())
    assert (main, other) == ("main thread", "thread loader")
    assert [frame.function for frame in frames] == ["forward", "step", "<module>"]
    assert main_place(text()) == "/home/me/train.py:7 in step"


def test_equal_stacks_with_different_addresses_are_printed_once() -> None:
    elsewhere = text().replace("line 7", "line 8")
    groups = render({2: text(2), 0: text(3), 1: elsewhere})
    assert [ranks for ranks, _ in groups] == [[0, 2], [1]]
    assert groups[1][1][2] == '  File "/home/me/train.py", line 8 in step'


def test_text_without_a_stack_has_no_location() -> None:
    assert main_place("") == main_place("garbage\n") == ""
    assert render({0: "Thread 0x1 (most recent call first):\n  <no Python frame>\n"})[0][1][1] == "  <no Python frame>"


def test_idle_job_is_stopped_and_prints_the_stacks_of_all_ranks(launcher: Launcher) -> None:
    body = """
def other(): time.sleep(60)
def step():
    print("begin")
    time.sleep(60)
threading.Thread(target=other, daemon=True).start()
if rank == "2": os.kill(os.getpid(), signal.SIGSTOP)
step()
"""
    done = launcher.script(WAITING + body, "-n", "3", "--idle-timeout", "2s", "--logs", "logs")
    lines = done.err.splitlines()
    assert done.code == 124
    assert done.lines == ["[0] begin", "[1] begin"]
    assert lines[0] == "allranks run: no rank has written anything for 2 s (--idle-timeout); stacks of all ranks:"
    assert lines[1] == "[0-1] main thread (most recent call first):"
    assert lines[2].endswith('script.py", line 10 in step')
    assert "[0-1] thread 1 (most recent call first):" in lines
    assert any(line.endswith("line 7 in other") for line in lines)
    assert lines[-3].startswith("allranks run: rank 2 is stopped (pid ")
    assert lines[-2:] == [
        "allranks run: stopped because no rank had written anything for 2 s",
        "allranks run: ranks 0-1: at script.py:10 in step",
    ]
    assert "line 10 in step" in (launcher.folder / "logs/rank1.log").read_text()
    assert "line 10 in step" not in (launcher.folder / "logs/rank2.log").read_text()


def test_a_job_that_writes_is_not_idle(launcher: Launcher) -> None:
    body = "for n in range(16):\n    time.sleep(0.25)\n    if rank == '1': print(n)"
    done = launcher.script(WAITING + body, "-n", "2", "--show", "none", "--idle-timeout", "3")
    assert (done.code, done.err) == (0, "")


def test_idle_report_explains_missing_stacks(launcher: Launcher) -> None:
    done = launcher.run("--idle-timeout", "0.5", "--", "sleep", "60")
    assert done.code == 124
    assert "rank 0 does not run a python script (pid " in done.err
    body = "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, signal.NSIG))\nprint()\ntime.sleep(60)"
    done = launcher.script(WAITING + body, "--idle-timeout", "2", "--grace", "0.1")
    assert done.code == 124
    assert "rank 0 did not report its stacks (blocked signals, or a system call)" in done.err


def test_idle_report_locates_ranks_that_hang_in_a_collective(launcher: Launcher) -> None:
    script = """
        import threading, time
        begun = threading.Event()
        def live():
            while not begun.wait(0.2): print("beginning")
        thread = threading.Thread(target=live)
        thread.start()
        import allranks as dist
        dist.init_process_group()
        dist.barrier()
        begun.set(); thread.join()
        if dist.get_rank() == 0: dist.barrier()
        else: time.sleep(60)
        """
    done = launcher.script(script, "-n", "2", "--idle-timeout", "2", "--grace", "2", real_torch=True)
    assert done.code == 124
    assert done.err.splitlines()[-2:] == [
        "allranks run: rank 0: at script.py:12 in <module>",
        "allranks run: rank 1: at script.py:13 in <module>",
    ]
    assert "in barrier" in done.err


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_sigterm_report_locates_the_ranks(launcher: Launcher, how: str) -> None:
    body = """
def step():
    ready()
    time.sleep(60)
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
step()
"""
    process = start(launcher, body, "--start", how)
    process.send_signal(signal.SIGTERM)
    code, out, err = end(process)
    assert (code, out) == (143, [])
    assert err == ["allranks run: stopped by SIGTERM", "allranks run: ranks 0-1: at script.py:9 in step"]


def test_ctrl_c_report_locates_ranks_that_ignore_the_signal(launcher: Launcher) -> None:
    body = "signal.signal(signal.SIGINT, signal.SIG_IGN)\nready()\ntime.sleep(60)"
    process = start(launcher, body, "--grace", "0.5")
    process.send_signal(signal.SIGINT)
    code, _, err = end(process)
    assert code == 130
    assert err[1:] == ["allranks run: stopped by SIGINT", "allranks run: ranks 0-1: at script.py:8 in <module>"]


def test_user_signals_are_forwarded_and_do_not_stop_the_job(launcher: Launcher) -> None:
    body = """
def count(number, frame):
    print(signal.Signals(number).name)
    Path(f"got-{signal.Signals(number).name}-{rank}").touch()
for number in (signal.SIGUSR1, signal.SIGUSR2): signal.signal(number, count)
import subprocess
child = subprocess.Popen(["sleep", "60"])
ready()
while not Path("go").exists(): time.sleep(0.01)
print("child", child.poll())
child.kill()
"""
    process = start(launcher, body)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        process.send_signal(number)
        wait_for(lambda number=number: len(list(launcher.folder.glob(f"got-{number.name}-*"))) == 2)
    (launcher.folder / "go").touch()
    names = [f"[{rank}] {word}" for rank in range(2) for word in ("SIGUSR1", "SIGUSR2", "child None")]
    assert end(process) == (0, names, [])


def test_signal_that_is_not_forwarded_terminates_the_launcher(launcher: Launcher) -> None:
    process = start(launcher, "ready()\ntime.sleep(60)", "--signals", "none")
    process.send_signal(signal.SIGUSR1)
    assert process.wait(20) == -signal.SIGUSR1
    assert launcher.wait_gone() == []


def test_rank_that_calls_exec_is_not_asked_for_its_stacks(launcher: Launcher) -> None:
    body = "os.execvp('sh', ['sh', '-c', 'trap \"echo saved; exit 0\" TERM; touch ready$RANK; sleep 60 & wait'])"
    process = start(launcher, body)
    process.send_signal(signal.SIGTERM)
    assert end(process) == (143, ["[0] saved", "[1] saved"], ["allranks run: stopped by SIGTERM"])
