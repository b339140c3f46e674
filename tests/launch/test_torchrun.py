"""Rendezvous of ranks of torchrun on the store of its agent, because the agent holds MASTER_PORT."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

SUM = """
    import os
    import sys

    import torch

    import allranks as dist

    dist.init_process_group(timeout=60)
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    os.write(1, f"attempt {attempt}: {total.item():.0f}\\n".encode())
"""


def torchrun(tmp_path: Path, script: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a script on two ranks under the real torchrun."""
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(script))
    mine = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "ALLRANKS_STORE")
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *options, str(path)],
        env={name: value for name, value in os.environ.items() if name not in mine} | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def test_ranks_of_torchrun_form_a_group_on_the_default_port(tmp_path: Path) -> None:
    done = torchrun(tmp_path, SUM)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["attempt 0: 3"] * 2


def test_restarted_ranks_do_not_use_the_rendezvous_of_the_failed_attempt(tmp_path: Path) -> None:
    """Restart ranks while the store still has the keys of the first attempt, with its complete rendezvous.

    Then join again in the same processes, with a URL that names the port of the agent, which rank 0 cannot use.
    """
    again = """
    if attempt == "0":
        sys.exit(3 * dist.get_rank())
    dist.destroy_process_group()
    dist.init_process_group(init_method="tcp://{MASTER_ADDR}:{MASTER_PORT}".format(**os.environ), timeout=60)
    dist.barrier()
    os.write(1, b"again\\n")
    """
    done = torchrun(tmp_path, SUM + again, "--standalone", "--max-restarts=1")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == ["attempt 0: 3"] * 2
    assert sorted(lines[2:]) == ["again"] * 2 + ["attempt 1: 3"] * 2


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    late = """
        import os
        import time

        import allranks as dist

        if os.environ["RANK"] == "1":
            time.sleep(60)
        dist.init_process_group(timeout=1)
    """
    done = torchrun(tmp_path, late, "--standalone")
    assert done.returncode == 1
    assert "1 of 2 ranks did not join in 1.0 s: missing rank 1." in done.stderr
