"""Code blocks that are parts of programs run on four ranks.

This file supplies the parts that the pages omit: a model, data, and the rank. All blocks run in one job, in sequence.
"""

import json
import os
import re
import socket
import sys
from pathlib import Path

from support import warm

ROOT = Path(__file__).parents[2]
UNSET = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONUNBUFFERED")
PRELUDE = """
import os
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
import allranks as dist
from allranks import checkpoint

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)])
    def forward(self, x):
        for block in self.blocks:
            x = block(x).relu()
        return x

rank = int(os.environ["RANK"])
data = TensorDataset(torch.randn(256, 8), torch.arange(256) % 8)
"""
STATE = """
dist.init_process_group()
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state_dict = {"model": model.state_dict()}
"""
FRAGMENTS = {
    # page, beginning of the block: the code that precedes it, and the assertion that follows it
    ("docs/launching.md", "import allranks as dist\nimport allranks.logging"): (
        "", "assert 'ready' in open(f'process_{rank}.log').read()"
    ),
    ("docs/resilience.md", "# train.py\n"): ("", "assert epoch == 9"),
    ("docs/resilience.md", "dist.init_process_group()\nmesh"): (
        "", "assert model.blocks[0].weight.to_local().shape == (4, 8)"
    ),
    ("docs/checkpoints.md", "import torch\nimport allranks as dist\n"): (
        "", "dist.barrier(); assert state['progress']['step'] == 1000"
    ),
    ("docs/checkpoints.md", "import torch.distributed.checkpoint"): (
        STATE, "dist.barrier(); assert {one.step for one in checkpoint.list('checkpoints')} == {1000, 2000}"
    ),
    ("docs/torch.md", "import torch\n"): ("", "assert torch.distributed.get_backend() == 'allranks'"),
    ("docs/security.md", "import allranks as dist\n"): ("", "assert store.get('greeting') == b'hello'"),
}  # fmt: skip


def fragment(page: str, start: str) -> str:
    """Return the block of a page that begins with ``start``."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    (found,) = [block for block in blocks if block.startswith(start)]
    return found


def test_fragments(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    programs = []
    for (page, start), (before, after) in FRAGMENTS.items():
        text = fragment(page, start)
        if page == "docs/security.md":  # Use this host, and the number of ranks of the job.
            text = text.replace('"node0", 29500', f'"127.0.0.1", {port}').replace("world_size=2", "world_size=4")
        # The page uses 400 epochs so that a reader has time to kill a rank.
        text = text.replace("state.epochs(400)", "state.epochs(10)")
        programs.append((f"{page}: {start!r}", "\n".join([PRELUDE, before, text, after])))
    (tmp_path / "programs.json").write_text(json.dumps(programs))
    (tmp_path / "all.py").write_text(
        "import json, os\nimport torch.distributed\nimport allranks\n"
        "for number, (name, text) in enumerate(json.load(open('programs.json'))):\n"
        "    os.makedirs(f'{number}', exist_ok=True)\n"
        "    os.chdir(f'{number}')\n"
        "    exec(compile(text, name, 'exec'), {'__name__': name})\n"
        "    allranks.barrier()\n"
        "    torch.distributed.destroy_process_group()\n"
        "    os.chdir('..')\n"
        "    print(number)\n"
    )
    environ = {name: value for name, value in os.environ.items() if name not in UNSET}
    done = warm.run(
        [sys.executable, "-m", "allranks", "run", "-n", "4", "--show", "0", "all.py"],
        cwd=tmp_path,
        env=environ,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    numbers = [line for line in done.stdout.splitlines() if line.isdigit()]  # The programs print other lines, too.
    assert numbers == [str(number) for number in range(len(programs))]
