"""PyTorch features that use process groups: each program gives the same state on the plugin as on gloo."""

from pathlib import Path

import pytest

from support.worlds import Job, programs

FILES = {file.stem: file for file in sorted((Path(__file__).parent / "programs").glob("*.py"))}
RANKS = {
    "calls": 2,
    "checkpoints": 4,
    "compiled": 2,
    "ddp": 2,
    "dtensor": 2,
    "four": 4,
    "fsdp": 2,
    "methods": 2,
    "operators": 2,
}
JOBS = {name: Job(file, RANKS[name]) for name, file in FILES.items()}


@pytest.mark.timeout(1000)  # longer than the timeout of the job, which reports where its ranks are
@pytest.mark.parametrize(("file", "program"), [(name, each) for name, file in FILES.items() for each in programs(file)])
def test_program_gives_the_same_state_as_on_gloo(file: str, program: str) -> None:
    JOBS[file].assert_same(program)
