"""The program of docs/hangs.md runs unchanged under the shown command, and prints the shown report."""

from __future__ import annotations

import doctest
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "hangs.md").read_text()
UNSET = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ALLRANKS_WATCH", "ALLRANKS_WATCH_FOLDER")


def block(language: str) -> str:
    """Return the first block of the page in a language."""
    found = re.search(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


def test_shown_command_prints_the_shown_report(tmp_path: Path) -> None:
    (tmp_path / "hang.py").write_text(block("python"))
    words = shlex.split(block("bash"))
    assert words[:4] == ["allranks", "watch", "--", "torchrun"]
    environ = {name: value for name, value in os.environ.items() if name not in UNSET}
    environ |= {"OMP_NUM_THREADS": "1", "TMPDIR": "/tmp", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    # A port of its own: other tests may use the port of torchrun.
    command = [*words[:4], "--standalone", *words[4:]]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=150, check=True)
    said = "".join(line for line in done.stderr.splitlines(keepends=True) if line.startswith("allranks watch: "))
    shown = block("text")
    assert doctest.OutputChecker().check_output(shown, said, doctest.ELLIPSIS), said
    report = Path(re.findall(r"\S+\.txt$", said, re.MULTILINE)[0])
    assert "hang.py" in report.read_text()
    report.unlink()
    # The job was not aborted: it ended by itself.
    assert done.returncode == 0
