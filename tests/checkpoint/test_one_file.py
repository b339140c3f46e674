"""States in one file: damage is found, and a state is filled as from a checkpoint, also from safetensors files."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from allranks import CheckpointError, UsageError, checkpoint
from allranks.tools.checkpoint import main


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.b.weight = self.a.weight
        self.register_buffer("z", torch.randn(4, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))  # type: ignore[no-any-return]


def state(seed: int) -> dict[str, Any]:
    model = Tied(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=seed / 100)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "t": [torch.arange(4) + seed], "epoch": seed}


def saved_form(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.state_dict() if hasattr(value, "state_dict") else value for key, value in state.items()}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    torch.testing.assert_close(saved_form(one), saved_form(other), rtol=0, atol=0)
    return True


def refusal(act: Callable[[], object]) -> str:
    """Return the text of the AllranksError that the function raises, or "" if it raises none."""
    try:
        act()
    except (CheckpointError, UsageError) as error:
        return str(error)
    return ""


def test_a_flipped_bit_in_a_file_is_found(tmp_path: Path) -> None:
    """A file of allranks with a hash, and a file of torch with checksums of records, which torch does not compare."""
    path, pick = tmp_path / "c.pt", random.Random(1)
    saved = {"t": torch.arange(30_000.0), "numbers": [1.5, 2]}
    for save, least in ((checkpoint.save, 280), (torch.save, 200)):
        save(saved, path)  # type: ignore[operator]
        torch.testing.assert_close(checkpoint.load(path), saved, rtol=0, atol=0)
        torch.testing.assert_close(torch.load(path, mmap=True, weights_only=True), saved, rtol=0, atol=0)
        original, found = path.read_bytes(), 0
        for number in range(300):
            changed = bytearray(original)
            bit = (
                pick.randrange(8 * len(original) if number % 3 else 8 * 200)
                if number % 2
                else -1 - pick.randrange(8000)
            )
            changed[bit // 8] ^= 1 << bit % 8
            path.write_bytes(changed)
            if words := refusal(lambda: torch.testing.assert_close(checkpoint.load(path), saved, rtol=0, atol=0)):
                assert "c.pt is damaged" in words
                found += 1
        assert found >= least
    path.write_bytes(original[:-100])
    with pytest.raises(CheckpointError, match=r"c\.pt is damaged"):
        checkpoint.load(path)


def test_a_state_is_filled_from_a_file(tmp_path: Path) -> None:
    """A file of save, and a file that export has written from a checkpoint."""
    one, path = state(1), tmp_path / "c.pt"
    checkpoint.save(saved_form(one), path)
    checkpoint.save(one, tmp_path / "folder", step=1)
    assert main(["export", str(tmp_path / "folder"), str(tmp_path / "e.pt")]) == 0
    for file in (path, tmp_path / "e.pt"):
        other = state(2)
        weight, t = other["model"].a.weight, other["t"][0]
        assert checkpoint.load(file, into=other) is other
        assert same(other, one)
        assert other["model"].a.weight is weight is other["model"].b.weight
        assert other["t"][0] is t
    part = {"t": [checkpoint.Shard(torch.zeros(2, dtype=torch.int64), (1,), (4,))]}
    checkpoint.load(path, into=part)
    assert part["t"][0].tensor.tolist() == [2, 3]
    with pytest.raises(UsageError, match=r"tensor 't\.0' has dtype int64 in .*c\.pt, but float32 in the state to fill"):
        checkpoint.load(path, into={"t": [torch.zeros(4)]})
    with pytest.raises(UsageError, match="step=1 applies only to folders"):
        checkpoint.load(path, step=1)


def test_a_state_is_filled_from_safetensors(tmp_path: Path) -> None:
    """A file of export with tied weights and a dtype that safetensors has added later."""
    one, file = {**state(1), "optimizer": 0}, tmp_path / "c.safetensors"
    checkpoint.save(one, tmp_path / "folder", step=1)
    assert main(["export", str(tmp_path / "folder"), str(file)]) == 0
    other = {"model": state(2)["model"], "t": [torch.zeros(4, dtype=torch.int64)]}
    checkpoint.load(file, into=other)
    assert same(other, {"model": one["model"], "t": one["t"]})
    found = checkpoint.load(file)
    assert torch.equal(found["model.z"], one["model"].z)
    assert set(found) == {"model.a.weight", "model.a.bias", "model.z", "t.0"}
    for into, words in (
        ({"epoch": 0}, r"'epoch' is a int, but .*c\.safetensors is a safetensors file, which contains only tensors"),
        ({"x": torch.zeros(1)}, r"c\.safetensors has no tensor 'x'; it has "),
        ({"model": nn.Linear(3, 3)}, r"has no 'weight', 'bias' at 'model'"),
        ({"t": [torch.zeros(4)]}, "has dtype int64"),
    ):
        with pytest.raises(UsageError, match=words):
            checkpoint.load(file, into=into)
    plain = nn.Linear(3, 2)
    safetensors.torch.save_file(plain.state_dict(), file)
    assert same(checkpoint.load(file, into={"m": nn.Linear(3, 2)}["m"]).state_dict(), plain.state_dict())


def test_heads_of_safetensors_are_fuzzed(tmp_path: Path) -> None:
    file, pick = tmp_path / "c.safetensors", random.Random(6)
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}
    safetensors.torch.save_file(tensors, file)
    original = file.read_bytes()
    head = 8 + int.from_bytes(original[:8], "little")
    refused = 0
    for _ in range(500):
        changed = bytearray(original)
        for _ in range(pick.randrange(1, 4)):
            where = pick.randrange(head)
            changed[where] = pick.choice((pick.randrange(256), *b'0123456789-[]{},":eF'))
        file.write_bytes(changed)
        if words := refusal(lambda: checkpoint.load(file, into={"a": torch.zeros(2, 3)})):
            assert "c.safetensors" in words
            refused += 1
    assert refused > 300
    for lie in ({"a": {"dtype": "F32", "shape": [1 << 60], "data_offsets": [0, 1 << 62]}}, {"a": {"dtype": "F32"}}):
        text = repr(lie).replace("'", '"').encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
        with pytest.raises(CheckpointError, match="damaged safetensors file"):
            checkpoint.load(file)
    file.write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match="its header would have"):
        checkpoint.load(file)
