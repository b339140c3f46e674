"""Progress that a command draws on a terminal, and its absence without a terminal."""

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import allranks as dist
from allranks import checkpoint
from allranks._base.console import has_colours
from allranks.testing import run_ranks
from support import terminal_model
from support.console import on_terminal

CODE = """
import sys, threading
from allranks.tools import progress

progress._LONG_S, progress._AGAIN_S = {long}, 0.01
drawn = threading.Event()
write = sys.stderr.write
sys.stderr.write = lambda text: (write(text), "second" in text and drawn.set())
with progress.TerminalProgress("allranks test", {shown}) as shown:
    shown.at("first")
    shown.at("second" + "!" * 200)
    if {waits}:
        drawn.wait()
        shown.put("a part")
print("the result")
"""


def test_progress_line_is_erased_before_the_result() -> None:
    seen = on_terminal(CODE.format(long=0.01, shown=True, waits=True), {"TERM": "xterm"})
    before, _, result = seen.rpartition("\r\x1b[K")
    assert result == "a part\r\nthe result\r\n"
    lines = before.split("\r\x1b[K")[1:]
    assert any(line.startswith("allranks test: second!!!") for line in lines)
    assert max(map(len, lines)) < 80


@pytest.mark.parametrize(("long_s", "shown", "term"), [(60, True, "xterm"), (0, False, "xterm"), (0, True, "dumb")])
def test_no_progress_is_drawn(long_s: float, shown: bool, term: str) -> None:
    """Draw nothing for a short command, on ranks except rank 0, and on a terminal that cannot erase a line."""
    assert on_terminal(CODE.format(long=long_s, shown=shown, waits=False), {"TERM": term}) == "the result\r\n"


def test_no_progress_is_drawn_into_a_file(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(long=0, shown=True, waits=False)],
        env={**os.environ, "TERM": "xterm"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("the result\n", "")


BARS = """
import sys
from allranks.tools import checkpoint, progress

progress._LONG_S = {long}
sys.exit(checkpoint.main({words}))
"""


@pytest.fixture(scope="module")
def shares(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint of two hosts, once in a shared folder and once as one share per host."""
    folder = tmp_path_factory.mktemp("bars")

    def saves() -> None:
        rank = dist.get_rank()
        warnings.simplefilter("ignore")
        for path in (folder / "whole", folder / f"host{rank}"):
            checkpoint.save({"t": torch.full((3_000_000,), float(rank))}, path, step=1)

    run_ranks(2, saves)
    return folder


@pytest.mark.parametrize("command", ["verify", "diff", "export", "merge"])
def test_progress_bars_are_drawn_and_erased(command: str, shares: Path, tmp_path: Path) -> None:
    """Draw size, rate and time on a terminal, then erase the bar. Draw no bar without a terminal."""
    whole = str(shares / "whole")
    words = {
        "verify": ["verify", whole],
        "diff": ["diff", whole, whole],
        "export": ["export", whole, str(tmp_path / "x.safetensors"), "--force"],
        "merge": ["merge", str(shares / "host0"), str(shares / "host1"), "--into", str(tmp_path / "into")],
    }[command]
    code = BARS.format(long=-1, words=words)
    seen = on_terminal(code, {"TERM": "xterm", "COLUMNS": "120", "NO_COLOR": "1"})
    assert re.search(r"allranks checkpoint: .*\d+%.*\d+\.\d/\d+\.\d MB.*[kMG]B/s.*\d:\d\d:\d\d", seen)
    screen = terminal_model.Terminal(120)
    screen.feed(seen.encode())
    assert [row for row in screen.rows if row] == ([] if command == "diff" else screen.rows[:1])
    assert command == "diff" or screen.rows[0].startswith(str(tmp_path if command in ("export", "merge") else shares))
    assert screen.cursor_visible
    if command == "verify":
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert (done.stdout, done.stderr) == (f"{whole}/step-0000000001: intact\n", "")


class OfTerminal:
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environ", "expected"),
    [({"TERM": "xterm"}, True), ({"TERM": "xterm", "NO_COLOR": ""}, True), ({"TERM": "xterm", "NO_COLOR": "1"}, False),
     ({"TERM": "dumb"}, False), ({}, False)],
)  # fmt: skip
def test_colors_depend_on_environment(environ: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TERM", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert has_colours(OfTerminal()) is expected


@pytest.mark.parametrize("environ", [{"TERM": "xterm"}, {"TERM": "xterm", "NO_COLOR": "1"}])
def test_doctor_uses_colors_on_a_terminal(environ: dict[str, str]) -> None:
    seen = on_terminal("from allranks.__main__ import main; main(['doctor'])", {"NO_COLOR": "", **environ})
    shown = seen.rpartition("\r\x1b[K")[2]  # without the progress lines
    assert ("\x1b[" in shown) is ("NO_COLOR" not in environ)
    assert " checks: " in shown


def test_bench_replaces_progress_by_table_rows() -> None:
    """The progress line passes through the launcher. Rows of the table replace it."""
    # Each size takes 0.5 s: the maximum number of blocks, of 10 ms each. On a slow machine, the budget ends it earlier.
    command = "bench all_reduce -n 2 --sizes 1M,1100K,1200K,1300K,1400K,1500K --budget 1"
    code = f"import sys; from allranks.__main__ import main; sys.exit(main({command.split()}))"
    seen = on_terminal(code, {"TERM": "xterm"})
    assert re.search(r"allranks bench: all_reduce of [\d.]+ MB, \d of 6 \(\d+ s\)", seen), seen
    screen = terminal_model.Terminal(columns=400)
    screen.feed(seen.encode())
    assert len([row for row in screen.rows if re.match(r" +\d+ +\d+ +float32 ", row)]) == 6, seen
    assert screen.rows[-1] == "# wrong elements: 0"
    assert not any("allranks bench" in row for row in screen.rows)
