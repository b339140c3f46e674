"""Launcher on a terminal: ranks have terminals too, and progress bars move in place."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import termios
from collections.abc import Callable

import pytest

from support.launcher_process import Launcher
from support.terminal_model import Terminal

ROWS, COLUMNS = 30, 60
pytestmark = pytest.mark.timeout(40)


class Session:
    """Command on a separate terminal, and the content of that terminal."""

    def __init__(
        self,
        launcher: Launcher,
        script: str,
        *options: str,
        err_tty: bool = True,
        environ: dict[str, str] | None = None,
    ) -> None:
        self.terminal = Terminal(COLUMNS)
        self.raw = b""
        self._master, slave = pty.openpty()
        self.resize(ROWS, COLUMNS)
        self.process = subprocess.Popen(
            launcher.command("--start", "spawn", *options, str(launcher.write(script))),
            cwd=launcher.folder,
            env=launcher.environ() | {"TERM": "xterm"} | (environ or {}),
            stdin=slave,
            stdout=slave,
            stderr=slave if err_tty else subprocess.PIPE,
        )
        launcher.started.append(self.process)
        os.close(slave)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, key: bytes) -> None:
        os.write(self._master, key)

    def watch(self, until: Callable[[list[str]], bool] = lambda rows: False) -> list[str]:
        """Read until the rows satisfy the condition or the output ends. Return the rows."""
        while not until(self.terminal.rows):
            try:
                data = os.read(self._master, 4096)
            except OSError:  # EIO: all processes have closed the terminal
                os.close(self._master)
                self.process.wait(20)
                break
            self.raw += data
            self.terminal.feed(data)
        return self.terminal.rows


def test_ranks_have_terminals(launcher: Launcher) -> None:
    script = """
        import os, shutil, sys, termios
        print([os.isatty(n) for n in range(3)], tuple(os.get_terminal_size()), shutil.get_terminal_size().columns)
        print("raw", termios.tcgetattr(1)[1] & termios.OPOST, os.environ.get("LINES"), os.environ.get("COLUMNS"))
        """
    session = Session(launcher, script, environ={"LINES": "99", "COLUMNS": "99"})
    assert session.watch() == [
        "[0] [True, True, True] (56, 30) 56",
        "[0] raw 0 30 56",
    ]
    assert session.raw.count(b"\r\n") == 2
    assert b"\r\r\n" not in session.raw


def test_ranks_receive_the_new_window_size(launcher: Launcher) -> None:
    script = """
        import os, signal
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGWINCH])
        print("ready")
        signal.sigwait([signal.SIGWINCH])
        print(os.get_terminal_size().columns)
        """
    session = Session(launcher, script)
    session.watch(lambda rows: "[0] ready" in rows)
    session.resize(50, 100)
    session.process.send_signal(signal.SIGWINCH)  # the launcher is not in the terminal's foreground group here
    assert session.watch() == ["[0] ready", "[0] 96"]


def test_progress_bar_moves_while_others_print(launcher: Launcher) -> None:
    script = """
        import os, time
        from rich.progress import track
        if os.environ["RANK"] == "0":
            for n in track(range(10)): time.sleep(0.1)
            print("bar done")
        else:
            for n in range(5): time.sleep(0.2); print("line", n)
            print("open end", end="")
        """
    session = Session(launcher, script, "-n", "2")
    rows = session.watch(lambda rows: "[1] line 2" in rows and "[0] Working" in rows[-1])
    assert "100%" not in rows[-1]
    rows = session.watch()
    bars = [row for row in rows if "Working" in row]
    assert len(bars) == 1
    assert "100%" in bars[0]
    assert [row for row in rows if row.startswith("[1]")] == [*(f"[1] line {n}" for n in range(5)), "[1] open end"]
    assert "[0] bar done" in rows
    assert session.terminal.cursor_visible
    assert session.process.returncode == 0


def test_progress_bar_moves_with_timestamps_and_collapsed_lines(launcher: Launcher) -> None:
    script = """
        import os, sys, time
        print("begin")
        if os.environ["RANK"] == "0":
            for n in range(11): time.sleep(0.1); sys.stderr.write(f"\\r{10 * n}%|" + n * "#"); sys.stderr.flush()
            sys.stderr.write("\\n")
        else:
            for n in range(3): time.sleep(0.3); print("line", n)
        print("end")
        """
    session = Session(launcher, script, "-n", "3", "--collapse", "always", "--timestamps")
    session.watch(lambda rows: "0%|" in rows[-1])
    rows = [row[24:] for row in session.watch()]
    assert [row for row in rows if "%|" in row] == ["[0] 100%|##########"]
    for line in ("begin", "line 0", "line 1", "line 2", "end"):  # a slow machine may need two rows for one line
        ranks = [row for row in rows if row.endswith(f"] {line}")]
        assert 1 <= len(ranks) <= 3
    assert all(row[:1] == "[" for row in rows)


def test_progress_bar_of_a_killed_rank_stays_visible(launcher: Launcher) -> None:
    script = """
        import os, signal, sys
        sys.stdout.write("\\x1b[?25l\\r50%"); sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
        """
    session = Session(launcher, script)
    rows = session.watch()
    assert rows[0] == "[0] 50%"
    assert "was killed by SIGKILL" in rows[1]
    assert session.terminal.cursor_visible
    assert session.process.returncode == 137


@pytest.mark.parametrize(
    ("environ", "coloured"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False)],
)
def test_color_depends_on_the_environment(launcher: Launcher, environ: dict[str, str], coloured: bool) -> None:
    session = Session(launcher, "print('x')", environ=environ)
    session.watch()
    assert (b"\x1b[" in session.raw) == coloured
    assert session.terminal.rows == ["[0] x"]


def test_redirected_stderr_is_not_a_terminal_in_ranks(launcher: Launcher) -> None:
    script = "import os, sys; print(os.isatty(1), os.isatty(2)); print('err', file=sys.stderr)"
    session = Session(launcher, script, err_tty=False)
    assert session.watch() == ["[0] True False"]
    assert session.process.stderr is not None
    assert session.process.stderr.read() == b"[0] err\n"


def test_sigint_report_on_a_terminal_locates_the_rank(launcher: Launcher) -> None:
    session = Session(launcher, "import time; print('ready'); time.sleep(60)")
    session.watch(lambda rows: "[0] ready" in rows)
    session.process.send_signal(signal.SIGINT)
    rows = session.watch()
    assert rows[1:] == ["allranks run: stopped by SIGINT", "allranks run: rank 0: at script.py:1 in <module>"]
    assert session.process.returncode == 130


def test_launcher_handles_signals_after_ctrl_s(launcher: Launcher) -> None:
    session = Session(launcher, "while True: print('line')", "--grace", "1")
    session.watch(lambda rows: "[0] line" in rows)
    session.press(b"\x13")
    session.process.send_signal(signal.SIGTERM)
    assert session.process.wait(10) == 143


def test_ctrl_q_continues_the_output_after_ctrl_s(launcher: Launcher) -> None:
    session = Session(launcher, "print('ready')\nfor n in range(3000): print('line', n)", environ={"NO_COLOR": "1"})
    session.watch(lambda rows: "[0] ready" in rows)
    session.press(b"\x13")
    session.press(b"\x11")
    assert session.watch()[1:] == [f"[0] line {n}" for n in range(3000)]
    assert session.process.returncode == 0
