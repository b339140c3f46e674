"""Exit of a program with open groups, pending calls or futures: code 0 and no output."""

import sys
from pathlib import Path

import pytest

from support import warm

ENDINGS = {
    "nothing destroyed": "td.new_group([0, 1]); td.all_reduce(torch.ones(3))",
    "calls pending": """
works = [td.irecv(torch.ones(1), 1 - td.get_rank()), td.all_reduce(torch.ones(1000), async_op=True)]
if td.get_rank():
    works.append(td.all_reduce(torch.ones(3), async_op=True))
""",
    "futures": """
works = [td.all_reduce(torch.ones(100_000), async_op=True) for _ in range(5)]
futures = [work.get_future().then(lambda done: done.value()[0] * 2) for work in works]
""",
    "a future that is never complete": """
futures = [td.irecv(torch.ones(1), 1 - td.get_rank()).get_future().then(lambda done: done.value())]
""",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_program_without_cleanup_exits_with_code_0_and_no_output(ending: str, tmp_path: Path) -> None:
    script = tmp_path / "ends.py"
    script.write_text(f"import torch, torch.distributed as td\ntd.init_process_group('allranks')\n{ENDINGS[ending]}")
    for _ in range(2):
        done = warm.run([sys.executable, "-m", "allranks", "run", "-n", "2", str(script)], timeout=60)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
