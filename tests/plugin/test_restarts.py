"""torchrun restarts the ranks on the plugin after a failure, with a store that contains the previous attempt's keys."""

import sys
from pathlib import Path

from support import warm

PROGRAM = """
import os, sys, torch, torch.distributed as dist

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("allranks")
tensor = torch.ones(1)
dist.all_reduce(tensor)
if attempt == 0 and dist.get_rank() == 1:
    os._exit(3)
half = dist.new_group([0, 1])
if attempt == 1 and dist.get_rank() == 0:
    sys.exit(4)
dist.all_reduce(tensor, group=half)
if attempt == 2:
    raise SystemExit(5)
dist.destroy_process_group()
print(f"attempt {attempt}: {tensor.item()}", flush=True)
"""


def test_ranks_on_the_plugin_work_after_three_restarts(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=3"]
    command = [*torchrun, "--monitor-interval=0.1", str(script)]
    done = warm.run(command, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("attempt 3: 4.0") == 2
