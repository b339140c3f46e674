"""The programs of the guides run unchanged and print the output that the pages show."""

import doctest
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from support import warm

ROOT = Path(__file__).parents[2]
UNSET = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONUNBUFFERED")
GUIDES = {"docs/process_groups.md": 4, "docs/training.md": 2, "docs/tuning.md": 2}
"""Number of ranks of the program of each page."""


ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in UNSET}
TEXT = re.compile(r"^```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def programs(page: str) -> dict[str, str]:
    """Return the programs of a page by name."""
    blocks = PYTHON.findall((ROOT / page).read_text())
    return {block.splitlines()[0].removeprefix("# "): block for block in blocks}


def run(folder: Path, *words: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    environ = {**ENVIRONMENT, "TMPDIR": str(folder), "XDG_STATE_HOME": str(folder)}
    return warm.run(
        [sys.executable, "-m", "allranks", "run", "-n", str(ranks), *words],
        cwd=folder,
        env=environ,
        timeout=110,
    )


@pytest.mark.parametrize("page", GUIDES)
def test_program_of_a_guide_prints_the_shown_output(page: str, tmp_path: Path) -> None:
    text = (ROOT / page).read_text()
    (tmp_path / "guide.py").write_text("".join(PYTHON.findall(text)))
    done = run(tmp_path, "--show", "0", "guide.py", ranks=GUIDES[page])
    assert (done.returncode, done.stderr) == (0, "")
    assert re.sub(r"^\[0\] ", "", done.stdout, flags=re.MULTILINE) == "".join(TEXT.findall(text))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the page shows the link, which Python 3.10 does not print")
def test_programs_of_start_page_print_the_shown_output(tmp_path: Path) -> None:
    """Each program prints the output shown below it; three dots match any text."""
    shown = TEXT.findall((ROOT / "docs/start.md").read_text())
    for (name, text), expected in zip(programs("docs/start.md").items(), shown, strict=True):
        (tmp_path / name).write_text(text)
        done = run(tmp_path, name)
        said = "".join(sorted(done.stdout.splitlines(keepends=True))) + done.stderr
        assert doctest.OutputChecker().check_output(expected, said, doctest.ELLIPSIS), said


@pytest.mark.parametrize(
    ("name", "said"), [("training.py", ["[1.0, 1.0]"] * 3), ("driving.py", ["[3.0, 3.0]", "", ""])]
)
def test_both_thd_modes_run_with_manually_set_variables(name: str, said: list[str], tmp_path: Path) -> None:
    """Run the program on one host, with the variables that the page sets."""
    (tmp_path / name).write_text(programs("docs/thd.md")[name])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(3):
        where = {"MASTER_ADDR": f"localhost:{port}"} if rank else {"MASTER_PORT": str(port)}
        environ = {**ENVIRONMENT, "WORLD_SIZE": "3", "RANK": str(rank), "XDG_CONFIG_HOME": str(tmp_path), **where}
        ranks.append(
            subprocess.Popen([sys.executable, name], cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True)
        )
    for rank, expected in zip(ranks, said, strict=True):
        assert rank.communicate(timeout=100)[0].strip().endswith(expected)
        assert rank.returncode == 0


def test_algorithm_drawings_and_costs_match_the_code() -> None:
    subprocess.run([sys.executable, "docs/draw_algorithms.py", "--check"], cwd=ROOT, check=True)
