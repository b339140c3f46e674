"""The programs of docs/master_worker.md run unchanged."""

import os
import re
import sys
from pathlib import Path

import pytest

from support import warm

PAGE = (Path(__file__).parents[2] / "docs" / "master_worker.md").read_text()
PROGRAMS = {block.split("\n")[0].strip("# "): block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)}
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_of_master_worker_page_runs(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(PROGRAMS[name])
    done = warm.run([sys.executable, name], cwd=tmp_path, env=ENVIRONMENT, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout
