"""Failure of one rank: the launcher names it, stops the other ranks and returns its exit code."""

from __future__ import annotations

import re
import subprocess
import sys
import time

import pytest

from support.launcher_process import Launcher
from support.prompt import COMMAND_S

STARTS = pytest.mark.parametrize("start", ["fork", "spawn"])
PROLOGUE = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
from allranks._base.errors import PeerLostError
from pathlib import Path
def ready(): Path(f"ready{rank}").touch()
def wait_for(other):
    while not Path(f"ready{other}").exists(): time.sleep(0.001)
"""


def failing(launcher: Launcher, body: str, *options: str) -> tuple[int, list[str], str, float]:
    """Run a script. Return the exit code, the lines of stderr, stdout and the duration in seconds."""
    path = launcher.write(PROLOGUE + body)
    begin = time.monotonic()
    done = launcher.run(*options, str(path))
    return done.code, done.err.splitlines(), done.out, time.monotonic() - begin


@STARTS
def test_failed_rank_is_named_and_the_others_are_stopped(launcher: Launcher, start: str) -> None:
    body = "if rank == 1: print('last words'); raise ValueError('boom')\ntime.sleep(60)"
    code, err, out, seconds = failing(launcher, body, "-n", "3", "--start", start, "--grace", "60")
    assert code == 1
    assert re.fullmatch(r"allranks run: rank 1 \(pid \d+\) exited with code 1", err[0])
    assert err[-1] == "ValueError: boom"
    assert out == "[1] last words\n"
    assert seconds < COMMAND_S


def test_killed_rank_is_named(launcher: Launcher) -> None:
    body = "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)"
    code, err, _, _ = failing(launcher, body, "-n", "2", "--start", "spawn")
    assert code == 137
    assert len(err) == 1
    assert re.fullmatch(
        r"allranks run: rank 1 \(pid \d+\) was killed by SIGKILL \(often the kernel, out of memory: check dmesg\)",
        err[0],
    )


def test_rank_that_exits_with_code_0_does_not_stop_the_others(launcher: Launcher) -> None:
    code, err, out, _ = failing(launcher, "time.sleep(0.5 * rank); print('end')", "-n", "2", "--start", "spawn")
    assert (code, err) == (0, [])
    assert out.splitlines() == ["[0] end", "[1] end"]


@STARTS
@pytest.mark.parametrize("how", ["raise lost", "raise ValueError('later') from lost", "sys.exit(9)"])
def test_echo_is_not_named_as_the_cause(launcher: Launcher, start: str, how: str) -> None:
    # As in a collective: rank 0 detects immediately that rank 1 is exiting. The failure of rank 1 is visible later.
    body = f"""
if rank == 1: ready()
if rank == 0:
    wait_for(1)
    try: raise PeerLostError("rank 1 died", 1)
    except PeerLostError as lost: {how}
time.sleep(0.1)
if rank == 1: os._exit(7)
time.sleep(60)
"""
    code, err, _, _ = failing(launcher, body, "-n", "3", "--start", start)
    assert code == 7
    assert len(err) == 1
    assert "rank 1" in err[0]


def test_echo_without_a_cause_is_named_as_the_failure(launcher: Launcher) -> None:
    body = "if rank == 1: raise PeerLostError('rank 0 went', 0)\ntime.sleep(60)"
    code, err, _, _ = failing(launcher, body, "-n", "2", "--start", "spawn")
    assert code == 1
    assert "rank 1" in err[0]
    assert "allranks.PeerLostError: rank 0 went" in err[-2:]  # Python 3.11 and later print a link below it


def test_failure_is_reported_before_exit_handlers_run(launcher: Launcher) -> None:
    body = """
import atexit, threading
if rank == 1:
    wait_for(0)
    atexit.register(lambda: (time.sleep(1), print("handled")))
    raise ValueError("boom")
begin = time.monotonic()
def stop(number, frame):
    print(time.monotonic() - begin < 0.9)
    os._exit(0)
signal.signal(signal.SIGTERM, stop)
ready()
time.sleep(60)
"""
    code, err, out, _ = failing(launcher, body, "-n", "2", "--start", "spawn")
    assert (code, err[-1]) == (1, "ValueError: boom")
    assert sorted(out.splitlines()) == ["[0] True", "[1] handled"]


def test_ranks_that_do_not_exit_are_killed_after_the_grace_time(launcher: Launcher) -> None:
    body = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ready()
if rank == 2:
    wait_for(0); wait_for(1); sys.exit(5)
time.sleep(60)
"""
    code, err, _, seconds = failing(launcher, body, "-n", "3", "--start", "spawn", "--grace", "0.5")
    assert code == 5
    assert err[0] == "allranks run: ranks 0-1 did not exit within 0.5 s and were killed"
    assert "rank 2" in err[1]
    assert seconds < COMMAND_S


def test_stopped_rank_is_terminated_too(launcher: Launcher) -> None:
    body = "if rank == 0: os.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(0.3); sys.exit(5)"
    code, err, _, seconds = failing(launcher, body, "-n", "2", "--start", "spawn", "--grace", "60")
    assert (code, len(err)) == (5, 1)
    assert seconds < COMMAND_S


def test_equal_failures_are_reported_in_one_line(launcher: Launcher) -> None:
    body = "time.sleep(max(0, float(sys.argv[1]) - time.time())); raise ValueError('same')"
    path = launcher.write(PROLOGUE + body)
    done = launcher.run("-n", "3", "--start", "spawn", str(path), str(time.time() + 1))
    assert done.err.count("Traceback") == 1
    assert 1 <= done.err.count("ValueError: same") <= 2
    assert len([line for line in done.err.splitlines() if line.startswith("allranks run: also failed")]) <= 1


def test_very_long_error_message_is_printed_completely(launcher: Launcher) -> None:
    code, err, _, _ = failing(launcher, "raise ValueError('x' * 300000)", "--start", "spawn")
    assert code == 1
    assert err[-1] == "ValueError: " + "x" * 300000


@STARTS
def test_remaining_child_process_does_not_delay_the_launcher(launcher: Launcher, start: str) -> None:
    body = "import subprocess; subprocess.Popen(['sleep', '60']); print('done')"
    code, _, out, seconds = failing(launcher, body, "--start", start, "--grace", "60")
    assert (code, out) == (0, "[0] done\n")
    assert seconds < COMMAND_S
    assert launcher.wait_gone() == []


def test_remaining_child_process_that_writes_does_not_delay_the_launcher(launcher: Launcher) -> None:
    body = "import subprocess; subprocess.Popen(['yes'])"
    code, _, out, seconds = failing(launcher, body, "--start", "spawn", "--grace", "60")
    assert code == 0
    assert out.startswith("[0] y\n")
    assert seconds < COMMAND_S
    assert launcher.wait_gone() == []


@STARTS
@pytest.mark.parametrize("how", ["os._exit(0)", "sys.exit(0)"])
def test_echo_of_a_rank_that_exited_with_code_0_fails_the_job(launcher: Launcher, start: str, how: str) -> None:
    body = f"""
if rank == 1: ready(); {how}
wait_for(1); time.sleep(0.1); raise PeerLostError("rank 1 died", 1)
"""
    code, err, _, _ = failing(launcher, body, "-n", "2", "--start", start)
    assert code == 1
    assert re.fullmatch(r"allranks run: rank 0 \(pid \d+\) exited with code 1", err[0])
    assert "allranks.PeerLostError: rank 1 died" in err[-3:-1]
    assert err[-1] == "allranks run: rank 1 had already exited with code 0"


def test_rank_that_exits_before_a_collective_fails_the_others(launcher: Launcher) -> None:
    script = """
        import os, torch
        import allranks as dist
        dist.init_process_group()
        if dist.get_rank() == 1: os._exit(0)
        dist.all_reduce(torch.ones(1))
        """
    done = launcher.script(script, "-n", "2", real_torch=True)
    err = done.err.splitlines()
    assert done.code == 1
    assert "rank 0" in err[0]
    assert 'script.py", line 6' in err[2]
    assert "PeerLostError" in err[4]  # the frames of allranks are omitted
    assert err[-1] == "allranks run: rank 1 had already exited with code 0"


def test_frames_of_the_package_are_omitted_from_its_own_errors(launcher: Launcher) -> None:
    body = (
        "from allranks.launch.arguments.options import parse\n"
        "try: parse([])\nexcept ValueError as e: raise KeyError(1) from e"
    )
    code, err, _, _ = failing(launcher, body, "--start", "spawn")
    assert code == 1
    files = [line for line in err if line.startswith("  File")]
    assert len(files) == 2
    assert all("script.py" in line for line in files)
    assert any(line.startswith("allranks.ConfigError: nothing to run") for line in err)


def test_frames_of_the_package_are_shown_if_the_error_is_not_its_own(launcher: Launcher) -> None:
    code, err, _, _ = failing(launcher, "from allranks._base import errors; errors.rank_list(None)", "--start", "spawn")
    assert code == 1
    assert any("_base/errors.py" in line for line in err)


def test_early_exit_of_a_rank_is_reported_while_the_others_run(launcher: Launcher) -> None:
    backend = "if 'ALLRANKS_BACKEND' in os.environ: print(os.environ['ALLRANKS_BACKEND'], flush=True)\n"
    path = launcher.write(PROLOGUE + backend + "if rank == 0: time.sleep(1.5)")
    for options, said in (
        ((), r"allranks run: rank 1 exited with code 0 before the other ranks; rank 0 is still running\n"),
        (("-q",), ""),
        (
            ("-v", "--backend", "gloo"),
            r"""allranks run: \d+\.\d\d s: detected no scheduler and no other launcher
allranks run: \S+ s: the store is at unix:@\S+, OMP_NUM_THREADS=\d+
allranks run: \S+ s: ranks 0-1 started
allranks run: \S+ s: rank 1 \(pid \d+\) exited with code 0
allranks run: rank 1 exited with code 0 before the other ranks; rank 0 is still running
allranks run: \S+ s: rank 0 \(pid \d+\) exited with code 0
""",
        ),
    ):
        words = ["-n", "2", "--start", "spawn", *options, str(path)]
        code = "import sys; from allranks.launch import cli; from allranks.launch.policy import round; "
        code += f"round.LINGER_S = 0.3; sys.exit(cli.main({words!r}))"
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=launcher.folder,
            env=launcher.environ(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0
        assert re.fullmatch(said, done.stderr), done.stderr
        assert sorted(done.stdout.splitlines()) == (["[0] gloo", "[1] gloo"] if "gloo" in options else [])


@pytest.mark.parametrize("both", [False, True])
def test_full_disk(launcher: Launcher, both: bool) -> None:
    path = launcher.write("import time\nprint('x')\ntime.sleep(60)")
    with open("/dev/full", "wb") as full:
        process = subprocess.Popen(
            launcher.command("--start", "spawn", str(path)),
            cwd=launcher.folder,
            env=launcher.environ(),
            stdout=full,
            stderr=full if both else subprocess.PIPE,
        )
    launcher.started.append(process)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert both or err == b"allranks run: cannot write to stdout: No space left on device\n"


def test_job_fails_if_log_files_are_on_a_full_disk(launcher: Launcher) -> None:
    (launcher.folder / "logs").mkdir()
    (launcher.folder / "logs" / "rank0.log").symlink_to("/dev/full")
    code, err, out, _ = failing(launcher, "print('x')\ntime.sleep(60)", "--start", "spawn", "--logs", "logs")
    assert (code, out) == (1, "[0] x\n")
    assert err == ["allranks run: cannot write to --logs: No space left on device"]


@pytest.mark.parametrize("end", ["os._exit(3)", "os.kill(os.getpid(), 9)", "os.abort()"])
def test_output_before_an_abnormal_exit_is_shown(launcher: Launcher, end: str) -> None:
    """Check the output of a rank that exits abnormally, including an unterminated line."""
    done = launcher.script(f"import os\nprint('whole line')\nprint('loading ...', end='')\n{end}", "-n", "1")
    assert done.code != 0
    assert "[0] whole line\n[0] loading ...\n" in done.out


def test_failure_of_a_command_line_that_is_not_utf8_is_reported(launcher: Launcher) -> None:
    """Check a command line that the failure report and the answer to ``allranks trace show`` contain."""
    launcher.write(
        "import torch, allranks as dist\ndist.init_process_group()\ndist.all_reduce(torch.ones(dist.get_rank() + 1))"
    )
    done = launcher.run("-n", "2", "script.py", "data_\udcff.bin", real_torch=True)
    assert done.code == 1
    assert "MismatchError" in done.err
    assert "UnicodeEncodeError" not in done.err
