"""``allranks run --rehearse``: ranks are killed in each phase of a step, and the results are compared."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from allranks.launch.jobs.rehearsal import PHASES, rehearse
from support import warm

ROOT = Path(__file__).parents[2]


def _start(command: Sequence[str], environ: Mapping[str, str], output: Path, limit_s: float | None) -> int | None:
    """Run a job of a rehearsal in an interpreter that has imported torch."""
    done = warm.run([*command], env=environ, timeout=limit_s or 200)
    output.write_text(done.stdout + done.stderr)
    return done.returncode


def _rehearse(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    program: str,
    phases: Sequence[str] = PHASES,
    ranks: int = 3,
) -> tuple[int, dict[str, str], str]:
    """Rehearse a program.

    Returns:
        The exit code, the result of each phase, and all output.
    """
    script = folder / "program.py"
    script.write_text(program)
    code = rehearse(["-n", str(ranks), "--elastic", "2", str(script)], phases, _start)
    out = capsys.readouterr().out
    rows = re.findall(
        r"^(\w[\w ]*?)  +(rank \d.*?\))?  +(.+)$", out.partition("\n\n")[0].partition("\n")[2], re.MULTILINE
    )
    return code, {phase: result for phase, _, result in rows}, out


def _first_program() -> str:
    """The first program of the page on resilience, with few epochs."""
    page = (ROOT / "docs" / "resilience.md").read_text()
    program = page.partition("```python\n")[2].partition("```")[0]
    assert "state.epochs(400)" in program
    return program.replace("state.epochs(400)", "state.epochs(3)") + 'open("result", "w").close()\n'


def test_first_program_of_the_page_ends_with_the_same_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, results, out = _rehearse(tmp_path, capsys, _first_program())
    absent = {"between optimizers", "evaluation", "checkpoint"}
    assert results.pop("undisturbed") == "24 steps on 3 ranks", out
    assert results == {phase: "does not occur" if phase in absent else "same bits" for phase in PHASES}, out
    assert out.count("rank 2 (step 1), rank 0 (step 5)") == 5, out
    assert code == 0
    assert "is process" not in out  # the output of the program is not shown
    assert not Path("result").exists()  # a rehearsal ends before the code after the loop


EVERYTHING = """
import torch
import torch.nn.functional as F
from torch import nn
import allranks as dist

torch.manual_seed(0)
dist.init_process_group(timeout=60)
data = [(torch.randn(8), torch.randint(4, ())) for _ in range(300)]
model = dist.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2)))
head = dist.DistributedDataParallel(nn.Linear(8, 4))
first = torch.optim.AdamW(model.parameters())
second = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=dist.data.DistributedSampler(data))
state = dist.resilience.State(
    model=model, head=head, first=first, second=second, checkpoints=dist.resilience.Checkpoints("kept", every=500)
)
total = best = 0.0
for epoch in state.epochs(100):
    for step in state.steps(loader):
        with step:
            images, labels = step.batch
            first.zero_grad()
            second.zero_grad()
            loss = F.cross_entropy(head(model(images)), labels)
            loss.backward()
            dist.all_reduce(mean := loss.detach().clone())
            total += mean.item()
            first.step()
            second.step()
    for step in state.steps(1):
        with step:
            score = head(model(torch.ones(2, 8))).sum().detach()
            dist.all_reduce(score)
            best = max(best, score.item())
"""


def test_all_phases_occur_and_checkpoints_of_the_user_are_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept").mkdir()
    phases = ["between optimizers", "after the step", "evaluation", "checkpoint"]
    code, results, out = _rehearse(tmp_path, capsys, EVERYTHING, phases)
    assert {phase: results[phase] for phase in phases} == dict.fromkeys(phases, "same bits"), out
    assert results["undisturbed"] == "26 steps on 3 ranks"
    assert "rank 2 (step 12), rank 0 (step 12)" in out  # the evaluation, and the repeated evaluation
    assert code == 0
    assert not list((tmp_path / "kept").iterdir())


def test_variables_that_differ_between_ranks_are_restored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kill rank 0 just after its commit, and while a checkpoint is written: before the next step begins."""
    monkeypatch.chdir(tmp_path)
    program = EVERYTHING.partition("    for step in state.steps(1)")[0]
    program = program.replace("            dist.all_reduce(mean := loss.detach().clone())\n", "").replace(
        "mean.item", "loss.item"
    )
    phases = ["optimizer", "after the step", "checkpoint"]
    code, results, out = _rehearse(tmp_path, capsys, program, phases)
    assert {phase: results[phase] for phase in phases} == dict.fromkeys(phases, "same bits"), out
    assert code == 0


UNDECLARED = """
import time
import torch
import allranks as dist

torch.manual_seed(0)
dist.init_process_group(timeout=60)
model = dist.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scale, clock = {"factor": 1.0}, {"now": 0.0}
state = dist.resilience.State(model=model, optimizer=optimizer, local=["scale", "clock"])
for epoch in state.epochs(5):
    for step in state.steps(100):
        with step:
            optimizer.zero_grad()
            scale["factor"] *= 0.99
            clock["now"] = time.time()
            (scale["factor"] * model(torch.randn(3, 4)).sum()).backward()
            optimizer.step()
"""


def test_state_that_is_wrongly_declared_as_local_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, results, out = _rehearse(tmp_path, capsys, UNDECLARED, ["backward"], ranks=2)
    assert results["backward"] == (
        "DIFFERENT: model.weight, in step 1 on rank 0 (declared as local and also different: scale)"
    ), out
    assert code == 1
    assert "1 of 1 phases do not produce the same bits" in out


def test_refused_program_shows_the_error_and_its_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, results, out = _rehearse(
        tmp_path, capsys, UNDECLARED.replace(', local=["scale", "clock"]', ""), ["backward"], ranks=2
    )
    assert code == 1
    assert "backward" not in results
    assert results["undisturbed"].startswith("error: allranks.UsageError: State: a lost rank could not be"), out
    assert "scale (a dict; changed keys: factor) is changed by the loop" in out


def test_error_after_a_loss_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = UNDECLARED.replace("(timeout=60)", "(timeout=60)\nimport os").replace(
        "    for step", "    if os.environ['ALLRANKS_START'] != '0': raise ValueError('no license left')\n    for step"
    )
    code, results, out = _rehearse(tmp_path, capsys, program, ["forward"], ranks=2)
    assert code == 1
    assert results["forward"].startswith("error: "), out
    assert "no license left" in out


TIMED = """
import time
import torch
import allranks as dist

torch.manual_seed(0)
dist.init_process_group(timeout=60)
model = dist.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = dist.resilience.State(model=model, optimizer=optimizer)
before, spent = time.time(), 0.0
for step in state.steps(100):
    with step:
        optimizer.zero_grad()
        model(torch.randn(3, 4)).sum().backward()
        spent += time.time() - before
        before = time.time()
        NOISE
        optimizer.step()
open("result", "w").close()
"""


def test_variables_that_always_differ_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, results, out = _rehearse(tmp_path, capsys, TIMED.replace("NOISE", ""), ["forward"], ranks=2)
    assert results["forward"] == "same bits", out
    assert "Not compared, because two undisturbed runs differ: before, spent" in out
    assert code == 0
    assert not Path("result").exists()  # although the program has no loop of epochs


def test_program_that_is_not_deterministic_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = TIMED.replace("NOISE", "model.module.weight.grad.fill_(before % 1)")
    program = program.replace(
        "before = time.time()\n", "before = time.time(); dist.broadcast(t := torch.tensor(before), 0)\n"
    )
    program = program.replace("(before % 1)", "(t.item() % 1)").replace(
        "tensor(before)", "tensor(before, dtype=torch.float64)"
    )
    code, results, out = _rehearse(tmp_path, capsys, program, ["forward"], ranks=2)
    assert code == 1
    assert results["forward"] == "DIFFERENT: model.weight, which also differs between two undisturbed runs", out


def test_command_prints_the_table(tmp_path: Path) -> None:
    """Run the option itself, with jobs in new interpreters. The program creates no State, so only one job runs."""
    script = tmp_path / "plain.py"
    script.write_text("print('hello')\n")
    words = [sys.executable, "-m", "allranks", "run", "-n", "2", "--elastic", "1", "--rehearse", "--", sys.executable]
    done = warm.run([*words, script], timeout=100)
    assert done.returncode == 1, done
    assert "error: the program has run no step of allranks.resilience.State" in done.stdout
    assert "hello" in done.stdout
    assert done.stderr == ""


def test_sigterm_ends_the_rehearsal_and_its_ranks(tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text(
        "import os, time\nopen(f'pid{os.environ[\"RANK\"]}', 'w').write(str(os.getpid()))\ntime.sleep(100)\n"
    )
    words = [sys.executable, "-m", "allranks", "run", "-n", "2", "--elastic", "1", "--rehearse", str(script)]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        files = [tmp_path / "pid0", tmp_path / "pid1"]
        while not all(file.exists() and file.read_text() for file in files):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 130
    for file in files:
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)
