"""Run the commands of the documents line by line, as a shell does.

ELSEWHERE lists the commands that need other hosts, a scheduler, a package or minutes, with the tests that cover them.
The remaining pages (README.md, examples/README.md, start, ...) start their own programs and the examples, which have
tests.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from allranks import checkpoint
from allranks.testing import run_ranks
from support import warm
from support.pages import blocks, commands, is_shell

PAGES = ("checkpoints", "launching", "resilience", "security", "torch", "tracing", "training", "tuning")
ELSEWHERE = {
    r"^(?!.*--dry-run).* (-H|--hostfile) ": "several hosts: tests/hosts",
    r"--master-addr|MASTER_ADDR|MASTER_PORT": "several hosts, or two terminals: tests/hosts, tests/launch",
    r"--rehearse": "many jobs: tests/resilience/test_rehearsal.py",
    r"^(sbatch|srun|mpirun|mpiexec) |kubectl|--now": "a scheduler or an MPI: tests/hosts, tests/engines, tests/tools",
    r"^allranks (bench|tune) |ALLRANKS_TUNING": "minutes: tests/tools",
    r" examples/": "tests/parallel, tests/house",
    r"--bind core": "as many cores: tests/launch",
    r"^allranks run: ": "what the launcher prints",
}
TRAIN = """
import torch
import allranks as dist

dist.init_process_group()
dist.all_reduce(total := torch.ones(2))
assert total.tolist() == [dist.get_world_size()] * 2
dist.destroy_process_group()
"""
PROFILED = """
import os
import torch
import allranks as dist

dist.init_process_group()
with torch.profiler.profile() as profile:
    dist.all_reduce(torch.ones(2))
if not os.path.exists(file := f"profile-{dist.get_rank()}.json"):  # of the first training of the page
    profile.export_chrome_trace(file)
dist.destroy_process_group()
"""
ON_TORCH = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(2))
dist.destroy_process_group()
"""
UNSET = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONUNBUFFERED")


def to_run(page: str) -> list[str]:
    """Return the command lines of a page, with their comments and variables."""
    found = []
    for language, block in blocks(f"docs/{page}.md"):
        if language in ("", "bash") and commands(block) and is_shell(block):
            lines = block.replace("\\\n", " ").splitlines()
            found += [line for line in lines if commands(line) and not any(re.search(each, line) for each in ELSEWHERE)]
    return found


def is_plain(line: str) -> bool:
    """Return whether a line is an allranks command that needs a shell only for splitting it into words."""
    return line.startswith("allranks ") and not re.search(r"[|&;<>$`*?~{}\[\]()]", line.partition(" #")[0])


def _saved(folder: str) -> None:
    """Save steps 1000 and 2000 into one folder per rank, as on separate hosts; step 1000 also into a shared folder."""
    rank = os.environ["RANK"]
    for step in (1000, 2000):
        state = {"weight": torch.full((4,), float(step)), "step": step}
        for name in ("checkpoints", "ck"):
            checkpoint.save(state, f"{folder}/node{rank}/{name}", step=step)
        if step == 1000:
            checkpoint.save(state, f"{folder}/checkpoints", step=step)


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_succeed(page: str, tmp_path: Path) -> None:
    if page == "security" and shutil.which("openssl") is None:
        missing = "there is no openssl, which makes the certificates"
        pytest.fail(missing) if os.environ.get("ALLRANKS_TEST_ALL") == "1" else pytest.skip(missing)
    (tmp_path / "train.py").write_text({"torch": ON_TORCH, "tracing": PROFILED}.get(page, TRAIN))
    (tmp_path / "data").write_text("a line\n")
    if page == "checkpoints":
        run_ranks(2, _saved, str(tmp_path))
    environ = {name: value for name, value in os.environ.items() if name not in UNSET}
    environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), environ["PATH"]))
    environ |= {"XDG_STATE_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    lines = to_run(page)
    assert lines
    for line in lines:
        if is_plain(line):
            _, *words = shlex.split(line, comments=True)
            done = warm.run([sys.executable, "-m", "allranks", *words], cwd=tmp_path, env=environ, timeout=100)
        else:
            done = subprocess.run(
                ["bash", "-c", line], cwd=tmp_path, env=environ, stdin=subprocess.DEVNULL,
                capture_output=True, text=True, timeout=100, check=False,
            )  # fmt: skip
        expected = 1 if " checkpoint diff " in line else 0  # The two compared checkpoints differ.
        assert done.returncode == expected, f"{line}\n{done.stdout}{done.stderr}"


def test_every_exclusion_matches_a_documented_command() -> None:
    lines = [line for page in PAGES for _, block in blocks(f"docs/{page}.md") for line in block.splitlines()]
    assert [reason for reason in ELSEWHERE if not any(re.search(reason, line.strip()) for line in lines)] == []
