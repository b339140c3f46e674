"""Signals to the launcher: it forwards them, and no process of the job remains."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time

import pytest
from ready_ranks import WAITING, end, start

from support.launcher_process import Launcher
from support.marked import wait_for
from support.prompt import PROMPT_S

CHILD = """
import subprocess
subprocess.Popen(["sleep", "60"])
ready()
time.sleep(60)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_signal_is_forwarded_to_the_ranks(launcher: Launcher, number: signal.Signals, code: int) -> None:
    body = f"""
def stop(number, frame):
    print(signal.Signals(number).name)
    sys.exit(0)
signal.signal({int(number)}, stop)
ready()
time.sleep(60)
"""
    process = start(launcher, body)
    process.send_signal(number)
    name = number.name
    assert end(process) == (code, [f"[0] {name}", f"[1] {name}"], [f"allranks run: stopped by {name}"])


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_ctrl_c_report_locates_each_rank_once(launcher: Launcher, how: str) -> None:
    """Check that each rank is located once, even if it reports its location by itself and on request."""
    late = "import atexit\natexit.register(time.sleep, 0.5)\n" if how == "fork" else "\n\n"
    asleep = "__import__('threading').Timer(0.3, ready).start()"  # the signal must not arrive during ready()
    process = start(launcher, f"{late}def step():\n    {asleep}\n    time.sleep(60)\nstep()", "--start", how)
    process.send_signal(signal.SIGINT)
    code, _, err = end(process)
    assert code == 130
    assert err == ["allranks run: stopped by SIGINT", "allranks run: ranks 0-1: at script.py:10 in step"]


def test_program_has_time_to_exit_after_ctrl_c(launcher: Launcher) -> None:
    body = """
try:
    ready()
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(0.5)
    print("saved")
"""
    process = start(launcher, body)
    process.send_signal(signal.SIGINT)
    assert end(process)[:2] == (130, ["[0] saved", "[1] saved"])


def test_second_ctrl_c_kills_the_ranks(launcher: Launcher) -> None:
    process = start(
        launcher, "signal.signal(signal.SIGINT, lambda *_: print('no'))\nready()\nwhile True: time.sleep(1)"
    )
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert end(process)[:2] == (130, ["[0] no", "[1] no"])
    assert time.monotonic() - begin < PROMPT_S


def test_repeated_sigterm_does_not_kill(launcher: Launcher) -> None:
    body = """
def stop(number, frame):
    time.sleep(0.5)
    print("saved")
    os._exit(0)
signal.signal(signal.SIGTERM, stop)
ready()
time.sleep(60)
"""
    process = start(launcher, body)
    for _ in range(3):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.05)
    assert end(process)[:2] == (143, ["[0] saved", "[1] saved"])


def test_rank_that_ignores_the_signal_is_killed_after_the_grace_time(launcher: Launcher) -> None:
    process = start(
        launcher, "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nready()\ntime.sleep(60)", "--grace", "0.5"
    )
    process.send_signal(signal.SIGTERM)
    code, _, err = end(process)
    assert code == 143
    assert err[0] == "allranks run: ranks 0-1 did not exit within 0.5 s and were killed"


def test_ctrl_c_stops_the_job_while_torch_is_imported(launcher: Launcher) -> None:
    launcher.environ()
    launcher.write("import time; open('importing', 'w').close(); time.sleep(60)", "fake/torch.py")
    process = launcher.start(str(launcher.write("import torch")))
    wait_for(lambda: (launcher.folder / "importing").exists())
    process.send_signal(signal.SIGINT)
    assert end(process) == (130, [], ["allranks run: stopped by SIGINT"])


def test_children_of_ranks_receive_the_signal_too(launcher: Launcher) -> None:
    command = "touch ready$RANK; sleep 60"
    process = launcher.start("-n", "2", "--", "sh", "-c", command)
    wait_for(lambda: len(list(launcher.folder.glob("ready*"))) == 2)
    process.send_signal(signal.SIGTERM)
    assert end(process)[0] == 143
    assert launcher.wait_gone() == []


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_killed_launcher_leaves_no_processes_or_shared_memory(launcher: Launcher, how: str) -> None:
    body = "import subprocess; subprocess.Popen(['sleep', '60'], env=os.environ)\nready()\ntime.sleep(60)"
    shared = set(os.listdir("/dev/shm"))
    process = start(launcher, body, "--start", how, nproc=3)
    assert len(launcher.alive()) >= 1 + 3 + 3
    process.kill()
    process.wait()
    assert launcher.wait_gone() == []
    left = set(os.listdir("/dev/shm")) - shared
    wait_for(lambda: not left & set(os.listdir("/dev/shm")), timeout_s=60)  # temporary files of other jobs disappear
    assert sorted(p.name for p in launcher.folder.iterdir()) == ["fake", "ready0", "ready1", "ready2", "script.py"]


def test_killed_launcher_leaves_no_child_process_of_a_command(launcher: Launcher) -> None:
    process = launcher.start("-n", "2", "--", "sh", "-c", "trap '' TERM HUP INT; touch ready$RANK; sleep 60; true")
    wait_for(lambda: len(list(launcher.folder.glob("ready*"))) == 2)
    process.kill()
    process.wait()
    assert launcher.wait_gone() == []


def test_job_exits_with_code_141_when_its_output_is_closed(launcher: Launcher) -> None:
    process = start(launcher, "ready()\nwhile True: print('x'); time.sleep(0.01)")
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert process.wait(20) == 141


def test_ignored_hangup_stays_ignored(launcher: Launcher) -> None:
    path = launcher.write(WAITING + "ready()\ntime.sleep(0.5)")
    command = ["sh", "-c", "trap '' HUP; exec \"$@\"", "-", *launcher.command("--start", "spawn", str(path))]
    process = subprocess.Popen(command, cwd=launcher.folder, env=launcher.environ())
    launcher.started.append(process)
    wait_for(lambda: (launcher.folder / "ready0").exists())
    process.send_signal(signal.SIGHUP)
    assert process.wait(20) == 0


NOISY = """
while True:
    print("x" * 1000)
    Path(f"ready{os.environ['RANK']}").touch()
"""


def quiet_for(launcher: Launcher, seconds: float) -> bool:
    """Return whether no rank has written for ``seconds``, because the output is not read."""
    times = [path.stat().st_mtime for path in launcher.folder.glob("ready*")]
    return time.time() - max(times) > seconds


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_stops_a_job_whose_output_is_not_read(launcher: Launcher, number: signal.Signals) -> None:
    process = start(launcher, NOISY, "--grace", "1")
    wait_for(lambda: quiet_for(launcher, 0.5))
    process.send_signal(number)
    assert process.wait(10) == 128 + number
    assert process.stderr is not None
    assert b"stopped by " + number.name.encode() in process.stderr.read()


def test_failed_rank_stops_a_job_whose_output_is_not_read(launcher: Launcher) -> None:
    body = """
if os.environ["RANK"] == "1":
    ready()
    while not Path("go").exists(): time.sleep(0.01)
    os._exit(7)
"""
    process = start(launcher, body + NOISY, "--grace", "1")
    wait_for(lambda: quiet_for(launcher, 0.5))
    (launcher.folder / "go").touch()
    wait_for(lambda: len(launcher.alive()) <= 1, 5)  # the ranks and the guard exit although the output is not read
    process.send_signal(signal.SIGTERM)  # too late to be the cause
    assert process.wait(10) == 7
    assert process.stderr is not None
    assert b"rank 1" in process.stderr.read()


def test_second_ctrl_c_kills_a_job_whose_output_is_not_read(launcher: Launcher) -> None:
    process = start(launcher, "signal.signal(signal.SIGINT, signal.SIG_IGN)" + NOISY, "--grace", "60")
    wait_for(lambda: quiet_for(launcher, 0.5))
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    assert process.wait(10) == 130


def test_ranks_wait_for_a_slow_reader_without_losing_output(launcher: Launcher) -> None:
    process = start(launcher, "ready()\nfor n in range(40000): print(n, 'x' * 100)")
    time.sleep(1)
    assert process.poll() is None
    assert len(launcher.alive()) >= 1 + 2
    code, out, err = end(process)
    assert (code, err) == (0, [])
    assert out == sorted(f"[{rank}] {n} {'x' * 100}" for rank in range(2) for n in range(40000))


def test_signal_stops_a_launcher_whose_last_output_is_not_read(launcher: Launcher) -> None:
    process = start(launcher, "ready()\nfor n in range(2000): print('x' * 100)")
    wait_for(lambda: len(launcher.alive()) <= 1)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(5) == 143


def test_ctrl_c_report_locates_the_caller_of_compiled_text(launcher: Launcher) -> None:
    body = "exec(compile('def f():\\n ready()\\n time.sleep(60)', '<made>', 'exec'))\nf()"
    process = start(launcher, body)
    process.send_signal(signal.SIGINT)
    assert end(process)[2][1] == "allranks run: ranks 0-1: at script.py:7 in <module>"


def test_guard_survives_a_signal_to_all_processes_of_the_job(launcher: Launcher) -> None:
    """Send SIGUSR1 to each process of a job, as SLURM does. The guard must survive."""
    process = start(launcher, "signal.signal(signal.SIGUSR1, signal.SIG_IGN)\n" + CHILD)
    for pid in launcher.alive():
        os.kill(pid, signal.SIGUSR1)
    process.kill()
    assert process.wait(10) == -signal.SIGKILL
    assert not launcher.wait_gone(10)


HELPED = """
import subprocess
helper = subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"], text=True,
                          stdout=subprocess.PIPE)
helper.stdout.readline()
def save(number, frame):
    time.sleep(0.3)
    print("helped" if helper.poll() is None else "alone", flush=True)
    sys.exit(0)
signal.signal(NUMBER, save)
ready()
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_children_of_a_rank_survive_the_signal_to_stop(launcher: Launcher, number: signal.Signals) -> None:
    """Check that child processes survive, because a last checkpoint may need data loader workers."""
    process = start(launcher, HELPED.replace("NUMBER", str(int(number))))
    process.send_signal(number)
    said = [f"allranks run: stopped by {number.name}"]
    assert end(process) == (128 + number, ["[0] helped", "[1] helped"], said)


def test_children_of_a_rank_receive_the_signal_after_the_rank_exits(launcher: Launcher) -> None:
    """Start the training in a child of the rank. The rank exits immediately, and the training saves."""
    inner = launcher.write(
        """
        import os, signal, sys, time
        from pathlib import Path
        def save(number, frame):
            with open("saved" + os.environ["RANK"], "a") as file:
                file.write("once")
            time.sleep(0.7)
            Path("ended" + os.environ["RANK"]).touch()
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        Path("ready" + os.environ["RANK"]).touch()
        time.sleep(60)
        """,
        "inner.py",
    )
    process = start(launcher, f"import subprocess\nsubprocess.run([sys.executable, {str(inner)!r}])")
    process.send_signal(signal.SIGTERM)
    assert end(process)[0] == 143
    assert [(launcher.folder / f"saved{rank}").read_text() for rank in (0, 1)] == ["once", "once"]
    assert all((launcher.folder / f"ended{rank}").exists() for rank in (0, 1))


def test_remaining_child_processes_of_a_rank_are_reported(launcher: Launcher) -> None:
    body = "import subprocess\nsubprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)"
    done = launcher.run("-n", "1", str(launcher.write(body)))
    assert done.code == 0
    assert re.fullmatch(
        r"allranks run: rank 0 left sleep \(pid \d+\) running; the launcher terminates it \(to keep a process, start it"
        r" with setsid\)\n",
        done.err,
    )


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_ignored_signals_stay_ignored_in_ranks(launcher: Launcher, how: str) -> None:
    script = launcher.write("import signal; print(signal.getsignal(signal.SIGHUP).name)")
    words = ["nohup", *launcher.command("-n", "1", "--start", how, str(script))]
    out, _ = launcher.open(words, launcher.environ()).communicate(timeout=30)
    assert out == b"[0] SIG_IGN\n"
