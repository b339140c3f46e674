"""Log files and visible streams, with the options and the file layout of torchrun."""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from allranks.launch.output.logs import Logs
from allranks.launch.output.screen import Screen
from allranks.launch.spec.events import Output
from allranks.launch.spec.options import Display
from allranks.launch.spec.stdio import Streams
from support.launcher_process import Launcher

SCRIPT = """
import os, sys
print(os.isatty(1), "out"); print("err", file=sys.stderr)
sys.stdout.write("end")
"""


def files(folder: Path) -> dict[str, str]:
    """Return the text of each log file by its path relative to the folder of the run."""
    return {
        str(path.relative_to(run)): path.read_text()
        for run in folder.iterdir() for path in run.rglob("*.log")
    }  # fmt: skip


def test_redirected_streams_are_in_files_only(launcher: Launcher) -> None:
    done = launcher.script(SCRIPT, "-n", "2", "--start", "spawn", "-r", "0:3,10:3", "-t", "1:1", "--log-dir", "logs")
    assert (done.code, done.lines) == (0, ["[1] False out", "[1] end"])
    assert done.err.splitlines() == ["[1] err"]
    assert files(launcher.folder / "logs") == {
        "attempt_0/0/stdout.log": "False out\nend",
        "attempt_0/0/stderr.log": "err\n",
        "attempt_0/1/stdout.log": "False out\nend",
    }


def test_log_files_are_the_same_as_with_torchrun(launcher: Launcher) -> None:
    options = ["-r", "2", "--tee", "0:3,1:0"]
    script = launcher.write("import os, sys\nprint('out'); print('err', file=sys.stderr)")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run(
        [*torchrun, *options, "--log-dir", "theirs", str(script)],
        cwd=launcher.folder,
        env=launcher.environ(real_torch=True),
        check=True,
        capture_output=True,
        timeout=60,
    )
    assert launcher.run("-n", "2", "--start", "spawn", *options, "--log-dir", "ours", str(script)).code == 0
    assert files(launcher.folder / "ours") == files(launcher.folder / "theirs")
    (ours,), (theirs,) = ((launcher.folder / name).iterdir() for name in ("ours", "theirs"))
    assert re.fullmatch(r"[\w-]+_\w{8}", ours.name)
    assert re.fullmatch(r"[\w-]+_\w{8}", theirs.name)


def test_default_log_folder_is_printed(launcher: Launcher, tmp_path: Path) -> None:
    done = launcher.script(SCRIPT, "-t", "3", "--start", "spawn", environ={"TMPDIR": str(tmp_path)})
    match = re.search(r"allranks run: log files are in (\S+)", done.err)
    assert match is not None
    assert files(Path(match[1]))["attempt_0/0/stderr.log"] == "err\n"


def test_separate_streams_never_share_a_line(launcher: Launcher) -> None:
    """Write to the separate stdout and stderr of a rank (because of --tee), which are shown in one file."""
    script = launcher.write(
        """
        import os
        os.write(1, b"half "); os.write(2, b"err\\n"); os.write(1, b"a line\\n"); os.write(2, b"open")
        """
    )
    command = launcher.command("--start", "spawn", "-t", "3", "--log-dir", "logs", str(script))
    done = subprocess.run(
        command,
        cwd=launcher.folder,
        env=launcher.environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=True,
    )
    assert sorted(done.stdout.splitlines()) == [b"[0] err", b"[0] half a line", b"[0] open"]


def test_local_ranks_filter_hides_the_output_of_other_ranks(launcher: Launcher) -> None:
    options = ["-n", "3", "--start", "spawn", "--local-ranks-filter", "0,2", "--logs", "logs"]
    done = launcher.script(SCRIPT, *options)
    assert done.lines == ["[0] False out", "[0] end", "[2] False out", "[2] end"]
    assert (launcher.folder / "logs/rank1.log").read_text().splitlines().count("False out") == 1
    done = launcher.script("import os, sys\nif os.environ['RANK'] == '1': print('tail'); os._exit(3)", *options)
    assert (done.code, done.out) == (3, "")
    assert done.err.splitlines()[1:] == ["tail"]  # the output of this rank was hidden


def test_timestamps_on_the_screen_and_in_files(launcher: Launcher) -> None:
    before = datetime.now()
    options = ["-n", "2", "--start", "spawn", "--timestamps", "--logs", "logs", "-t", "1:2", "--log-dir", "x"]
    done = launcher.script(SCRIPT, *options)
    lines = done.lines + (launcher.folder / "logs/rank0.log").read_text().splitlines()
    lines += files(launcher.folder / "x")["attempt_0/1/stderr.log"].splitlines()
    assert len(lines) == 4 + 3 + 1
    for line in lines:
        when = datetime.fromisoformat(line[:23])
        assert before.timestamp() - 0.001 <= when.timestamp() <= datetime.now().timestamp()
    assert [line[23:] for line in lines[-4:]].count(" err") == 2


def test_failure_is_reported_after_all_collapsed_lines(launcher: Launcher) -> None:
    script = """
        import os, signal
        print("same", flush=True)
        if os.environ["RANK"] == "1": print("last"); os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()
        """
    command = launcher.command("-n", "2", "--start", "spawn", "--collapse", "always", str(launcher.write(script)))
    done = subprocess.run(
        command,
        cwd=launcher.folder,
        env=launcher.environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert done.returncode == 137
    lines = done.stdout.decode().splitlines()
    assert lines[-1].endswith("was killed by SIGKILL (often the kernel, out of memory: check dmesg)")
    assert "[1] last" in lines[:-1]
    assert sum("1] same" in line for line in lines[:-1]) == 1


class Shown:
    """Screen in this process that writes to the pipes of pytest."""

    def __init__(self, capfd: pytest.CaptureFixture[str], ranks: range, display: Display, **how: object) -> None:
        self.capfd = capfd
        self.screen = Screen(ranks, display, {}, **how)  # type: ignore[arg-type]
        self.screen.open()

    def take(self, *outputs: Output) -> list[str]:
        for output in outputs:
            self.screen.take(output)
        for rank in self.screen.ranks:
            self.screen.end(rank)
        self.screen.settle()
        assert self.screen.flush() == []
        self.screen.close()
        return self.capfd.readouterr().out.splitlines()


def test_screen_of_some_ranks_keeps_their_numbers_and_hosts(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    hosts = ["a"] * 8 + ["long"] * 8
    shown = Shown(capfd, range(8, 16), Display(logs=tmp_path, collapse="auto"), hosts=hosts, world_size=16)
    outputs = [Output(rank, 1, b"same\n") for rank in range(8, 16)] + [Output(9, 1, b"own")]
    assert shown.take(*outputs) == ["[long:8-15] same", "[ long:9] own"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"rank{rank}.log" for rank in range(8, 16))
    assert (tmp_path / "rank9.log").read_text() == "same\nown\n"


def test_filter_and_log_files_use_local_ranks_of_each_host(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    display = Display(only=frozenset({1}), redirects=Streams(of_some={0: 1}), log_dir=tmp_path)
    shown = Shown(capfd, range(4), display, hosts=["a", "a", "b", "b"], run_id="job")
    assert shown.take(*(Output(rank, 1, b"%d\n" % rank) for rank in range(4))) == ["[a:1] 1", "[b:3] 3"]
    texts = sorted(path.read_text() for path in tmp_path.glob("job_*/attempt_0/0/stdout.log"))
    assert texts == ["0\n", "2\n"]


def test_log_files_of_all_attempts_are_in_one_folder(tmp_path: Path) -> None:
    display = Display(logs=tmp_path / "lines", log_dir=tmp_path / "bytes", tee=Streams(1))
    for attempt in range(2):
        logs = Logs(display, {0: ("", 0)}, "again", attempt)
        logs.put_lines(0, b"line %d\n" % attempt)
        logs.put_bytes(0, 1, b"byte %d" % attempt)
        assert logs.flush() == []
        logs.close()
    assert (tmp_path / "lines/rank0.log").read_text() == "line 0\nline 1\n"
    assert files(tmp_path / "bytes") == {"attempt_0/0/stdout.log": "byte 0", "attempt_1/0/stdout.log": "byte 1"}


def test_full_disk_is_reported_once_and_other_log_files_continue(tmp_path: Path) -> None:
    logs = Logs(Display(logs=tmp_path, log_dir=tmp_path / "x", tee=Streams(1)), {0: ("", 0)}, "full", 0)
    logs._lines[0].file.close()
    logs._lines[0].file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    logs.put_lines(0, b"line\n")
    logs.put_bytes(0, 1, b"byte")
    ((option, error),) = logs.flush()
    assert (option, error.errno) == ("--logs", 28)
    logs.put_lines(0, b"line\n")
    assert logs.flush() == []
    logs.close()
    assert files(tmp_path / "x") == {"attempt_0/0/stdout.log": "byte"}
