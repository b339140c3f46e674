"""Exit codes and error lines of all commands with ``| head``, a full disk, Ctrl-C, no HOME and no stdout."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from allranks.tools.commands import COMMANDS

LINES = {
    "help": "--help",
    "version": "-V",
    **{f"help of {name}": f"help {name}" for name in COMMANDS},
    "env": "env",
    "env for programs": "env --json",
    "doctor": "doctor",
    "doctor for programs": "doctor --json",
    "file": "submit --to slurm script.py",
    "plan": "run --dry-run -n 2 script.py",
}
SOME = ("version", "help of run", "env", "doctor", "file", "plan")
# Ctrl-C can also arrive while the interpreter exits, when no code of allranks runs.
INTERRUPTED = (0, 128 + signal.SIGINT, -signal.SIGINT)
MOMENTS = int(os.environ.get("ALLRANKS_TEST_MOMENTS", "12"))


def start(folder: Path, *words: str, environ: dict[str, str] | None = None, **how: int) -> subprocess.Popen[bytes]:
    (folder / "script.py").write_text("import time, torch\ntime.sleep(5)")
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | how
    return subprocess.Popen(words, cwd=folder, env=environ, start_new_session=True, **streams)


def command(line: str) -> list[str]:
    return [sys.executable, "-m", "allranks", *line.split()]


@pytest.mark.parametrize("case", LINES)
def test_closed_pipe_is_not_a_failure(tmp_path: Path, case: str) -> None:
    ear, mouth = os.pipe()
    os.close(ear)
    process = start(tmp_path, *command(LINES[case]), stdout=mouth)
    os.close(mouth)
    assert (process.communicate(timeout=60)[1], process.returncode) == (b"", 0)


def test_failed_check_sets_exit_code_on_closed_pipe(tmp_path: Path) -> None:
    ear, mouth = os.pipe()
    os.close(ear)
    process = start(tmp_path, *command("doctor"), stdout=mouth, environ={**os.environ, "RANK": "5", "WORLD_SIZE": "2"})
    os.close(mouth)
    assert (process.communicate(timeout=60)[1], process.returncode) == (b"", 1)


@pytest.mark.parametrize("case", SOME)
def test_full_disk_prints_one_error_line(tmp_path: Path, case: str) -> None:
    with open("/dev/full", "wb") as full:
        process = start(tmp_path, *command(LINES[case]), stdout=full.fileno())
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.endswith(b": error: cannot write to stdout: No space left on device\n"), err
    assert err.count(b"\n") == 1


@pytest.mark.parametrize("case", SOME)
def test_closed_stdout_is_not_a_failure(tmp_path: Path, case: str) -> None:
    process = start(tmp_path, "sh", "-c", 'exec "$@" >&-', "sh", *command(LINES[case]))
    assert (process.communicate(timeout=60), process.returncode) == ((b"", b""), 0)


@pytest.mark.parametrize("case", SOME)
def test_commands_work_without_home_and_utf_8(tmp_path: Path, case: str) -> None:
    environ = {name: value for name, value in os.environ.items() if name not in ("HOME", "TERM", "LANG")}
    environ |= {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    process = start(tmp_path, *command(LINES[case]), environ=environ)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")
    out.decode("ascii")


def test_non_ascii_path_in_ascii_locale(tmp_path: Path) -> None:
    folder = tmp_path / "rénk"
    folder.mkdir()
    environ = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    process = start(folder, *command("submit --to slurm script.py"), environ=environ)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")
    assert b"cd " in out


@pytest.mark.parametrize(
    "line",
    ["run -n 2 script.py", "torchrun script.py", "doctor", "doctor -n 2", "bench all_reduce --sizes 4", "env"],
)
def test_ctrl_c_at_any_moment_prints_no_traceback(tmp_path: Path, line: str) -> None:
    """Send SIGINT at random times after the interpreter has started, while the command runs."""
    code = "import sys\nfrom allranks.__main__ import main\nprint('up', file=sys.stderr, flush=True)\nsys.exit(main())"
    moments = random.Random(line)
    for _ in range(max(1, MOMENTS // 6)):
        process = start(tmp_path, sys.executable, "-c", code, *line.split())
        assert process.stderr is not None
        assert process.stderr.readline() == b"up\n"
        time.sleep(moment := moments.random() ** 2)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert process.returncode in INTERRUPTED, (moment, out, err)
        assert b"Traceback" not in out + err, (moment, err)
        assert b"ignored" not in err, (moment, err)
        if process.returncode == INTERRUPTED[1]:
            assert b": stopped by SIGINT\n" in err, (moment, err)


def test_spellings_of_help_and_version_are_equal() -> None:
    def said(line: str) -> tuple[int, str, str]:
        done = subprocess.run(command(line), capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    assert said("help") == said("--help") == said("-h")
    assert said("help run") == said("run --help")
    assert said("-V") == said("--version")
    assert said("help fly")[0] == 2


def test_run_process_waits_for_threads_and_skips_teardown() -> None:
    code = """if True:
        import atexit, threading, time
        from allranks._base.console import run_process

        class Large:
            def __del__(self):
                print("taken apart", flush=True)

        large = Large()
        atexit.register(print, "at exit")
        threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
        run_process("x", lambda: 3)
        """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "thread\nat exit\n", "")
