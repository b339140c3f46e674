"""``allranks checkpoint`` on checkpoints that ranks have written: output, exit codes and exported files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import allranks as dist
from allranks import checkpoint
from allranks.testing import run_ranks
from support import warm


def state(rank: int, step: int) -> dict[str, Any]:
    return {
        "model": {"weight": torch.arange(12.0).reshape(3, 4) + step, "bias": torch.zeros(4, dtype=torch.bfloat16)},
        "shard": checkpoint.Shard(torch.full((2, 3), float(rank)), (2 * rank, 0), (4, 3)),
        "mine": torch.tensor([rank]),
        "epoch": step,
        "name": "as it was",
        "betas": (0.9, 0.99),
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")

    def saves() -> None:
        for step in (1, 2):
            checkpoint.save(state(dist.get_rank(), step), folder, step=step)

    run_ranks(2, saves)
    return folder


def command(*words: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "allranks", "checkpoint", *map(str, words)]
    return warm.run(line, timeout=100)


def output(*words: object, code: int = 0) -> str:
    done = command(*words)
    assert (done.returncode, done.stderr) == (code, "")
    return done.stdout


def test_list_prints_steps_and_damage(saved: Path, tmp_path: Path) -> None:
    head, newest, oldest = output("list", saved).splitlines()
    assert head.split() == ["step", "when", "size", "ranks", "hosts"]
    assert newest.split()[0] == "2"
    assert oldest.split()[0] == "1"
    listed = json.loads(output("list", saved, "--json"))
    assert [(entry["step"], entry["ranks"]) for entry in listed] == [(2, 2), (1, 2)]
    copy = Path(shutil.copytree(saved, tmp_path / "copy"))
    (copy / "step-0000000002" / "part-00001.safetensors").unlink()
    assert "damaged:" in output("list", copy).splitlines()[1]
    assert output("list", tmp_path) == f"There is no checkpoint in {tmp_path}.\n"


def test_show_prints_tensors_values_and_files(saved: Path) -> None:
    text = output("show", saved)
    for words in (
        "step 2, ",
        "2 ranks on ",
        "model.weight",
        "bfloat16",
        "[3, 4]",
        "in 2 parts",
        "of rank 1",
        "epoch = 2",
    ):
        assert words in text
    found = json.loads(output("show", saved, "--step", 1, "--json"))
    assert found["values"] == {"epoch": "1", "name": '"as it was"', "betas": "[0.9, 0.99]"}
    assert {tensor["name"] for tensor in found["tensors"]} == {"model.weight", "model.bias", "shard", "mine"}
    assert [file["rank"] for file in found["files"]] == [0, 1]
    mine = json.loads(output("show", saved, "--rank", 1, "--json"))["tensors"]
    assert [tensor["ranks"] for tensor in mine if tensor["name"] == "mine"] == [[1]]
    assert len(mine) == 4
    done = command("show", saved, "--rank", 2)
    assert done.returncode == 2
    assert "--rank 2: step 2 has ranks 0 to 1" in done.stderr


def test_verify_finds_damaged_files(saved: Path, tmp_path: Path) -> None:
    assert output("verify", saved) == f"{saved / 'step-0000000002'}: intact\n"
    copy = Path(shutil.copytree(saved, tmp_path / "copy"))
    part = copy / "step-0000000001" / "part-00000.safetensors"
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    assert output("verify", copy).endswith("intact\n")
    text = output("verify", copy, "--all", code=1)
    assert "step-0000000002: intact" in text
    assert "part-00000.safetensors is damaged in bytes" in text
    assert "written by rank 0" in text
    assert len(json.loads(output("verify", copy, "--step", 1, "--json", code=1))[str(part.parent)]) == 1
    (copy / "step-0000000002" / "manifest.json").write_bytes(b"{}")
    assert "manifest.json is damaged" in output("verify", copy / "step-0000000002", code=1)


def test_diff_prints_differences(saved: Path, tmp_path: Path) -> None:
    one, two = saved / "step-0000000001", saved / "step-0000000002"
    assert output("diff", one, one) == ""
    assert output("diff", one, two, code=1).splitlines() == [
        "model.weight: 12 of 12 elements differ, by up to 1",
        "epoch: 1 and 2",
    ]
    other = state(0, 1)
    other["model"] = {"weight": torch.zeros(4, 4), "more": torch.zeros(2)}
    other["shard"] = torch.tensor([[0.0] * 3] * 2 + [[1.0] * 3] * 2)
    path = checkpoint.save(other, tmp_path, step=1)
    assert path is not None
    assert json.loads(output("diff", one, path, "--json", code=1)) == [
        f"model.bias: only in {one}",
        f"model.more: only in {path}",
        "model.weight: float32 [3, 4] and float32 [4, 4]",
    ]
    assert "mine: 1 of 1 elements differ" in output("diff", one, path, "--rank", 1, code=1)


def test_export_writes_safetensors_and_torch_files(saved: Path, tmp_path: Path) -> None:
    file = tmp_path / "one.safetensors"
    text = output("export", saved, file, "--rank", 1)
    assert text.startswith(f"{file}: 4 tensors (")
    assert text.endswith("; 3 values that are not tensors are omitted\n")
    found = safetensors.torch.load_file(file)
    assert torch.equal(found["shard"], torch.tensor([[0.0] * 3] * 2 + [[1.0] * 3] * 2))
    assert torch.equal(found["model.weight"], torch.arange(12.0).reshape(3, 4) + 2)
    assert found["mine"] == 1
    output("export", saved, tmp_path / "one.pt", "--step", 1)
    whole = torch.load(tmp_path / "one.pt", weights_only=True)
    assert whole["betas"] == (0.9, 0.99)
    assert whole["mine"] == 0
    assert torch.equal(whole["model"]["weight"], torch.arange(12.0).reshape(3, 4) + 1)
    before = file.read_bytes()
    done = command("export", saved, file)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{file} already exists.\n  Pass --force to overwrite it." in done.stderr
    assert file.read_bytes() == before
    told = json.loads(output("export", saved, file, "--force", "--json"))
    assert told == {"file": str(file), "nbytes": file.stat().st_size, "step": 2, "rank": 0, "tensors": 4, "left_out": 3}
    assert safetensors.torch.load_file(file)["mine"] == 0
    assert sorted(os.listdir(tmp_path)) == ["one.pt", "one.safetensors"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["show", "nowhere"], "there is no complete checkpoint in nowhere"),
        (["list", "nowhere"], "nowhere: No such file or directory"),
        (["show", "SAVED", "--step", "7"], "there is no checkpoint of step 7"),
        (["verify", "nowhere"], "nowhere/manifest.json: No such file or directory"),
        (["export", "SAVED", "nowhere/x.pt"], "does not exist"),
    ],
)
def test_errors(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str) -> None:
    monkeypatch.chdir(tmp_path)
    done = command(*(saved if word == "SAVED" else word for word in words))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("allranks checkpoint: error: ")
    first, *actions = done.stderr.splitlines()
    assert said in first
    assert all(line.startswith("  ") for line in actions)


@pytest.fixture(scope="module")
def shares(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of two hosts that do not share storage, with steps 1 and 2."""
    root = tmp_path_factory.mktemp("shares")

    def saves() -> None:
        rank = dist.get_rank()
        warnings.simplefilter("ignore")
        for step in (1, 2):
            checkpoint.save(state(rank, step), root / f"host{rank}", step=step)

    run_ranks(2, saves)
    return root


def test_incomplete_share_is_named(shares: Path) -> None:
    listed = output("list", shares / "host1").splitlines()
    assert all(line.endswith("  (share 2 of 2)") for line in listed[1:])
    assert [(entry["share"], entry["shares"]) for entry in json.loads(output("list", shares / "host1", "--json"))] == [
        (2, 2)
    ] * 2
    text = output("show", shares / "host1")
    assert "share 2 of 2: " in text
    assert "model.weight" in text
    shown = json.loads(output("show", shares / "host1", "--json"))
    assert [file["share"] for file in shown["files"]] == [1, 2]
    assert "share 2 of 2, intact; the other shares were not checked" in output("verify", shares / "host1")
    for words in (("export", shares / "host1", shares / "x.safetensors"), ("diff", shares / "host1", shares / "host0")):
        done = command(*words)
        assert done.returncode == 2
        assert "has only share 2 of 2 of step 2; missing: share 1 (written by rank 0 on " in done.stderr


def test_merge(shares: Path, tmp_path: Path) -> None:
    text = output("merge", shares / "host0", shares / "host1", "--into", tmp_path / "into")
    assert text.startswith(f"{tmp_path / 'into' / 'step-0000000002'}: complete (")
    told = output("merge", shares / "host1", shares / "host0", "--into", tmp_path / "into", "--step", "1", "--json")
    assert json.loads(told)["path"] == str(tmp_path / "into" / "step-0000000001")
    assert output("verify", tmp_path / "into", "--all").count(": intact\n") == 2
    done = command("merge", shares / "host0", "--into", tmp_path / "into", "--step", "1")
    assert done.returncode == 2
    assert "step 1 is incomplete in" in done.stderr
    assert "missing: share 2 of 2 (written by rank 1 on" in done.stderr
