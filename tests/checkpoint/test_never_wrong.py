"""Loads return the saved bits: values that share memory, large tensors of every dtype, ranks that differ slightly.

A load that does not match is an error, and the state to fill stays unchanged.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from allranks import checkpoint
from allranks.checkpoint.part_descriptions import contiguous_on_cpu, digest_of, sums_digest


def again(folder: Path, state: Any) -> Any:
    checkpoint.save(state, folder, step=0)
    return checkpoint.load(folder)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(
        contiguous_on_cpu(one).reshape(-1).view(torch.uint8), contiguous_on_cpu(other).reshape(-1).view(torch.uint8)
    )


def test_lazy_views_of_one_storage_are_restored(tmp_path: Path) -> None:
    z = torch.randn(40, dtype=torch.complex64)
    state = {"a": z, "b": z.conj(), "c": z.conj().imag, "d": z.imag, "e": z}
    found = again(tmp_path, state)
    assert all(same_bits(found[name], state[name]) for name in state)
    assert found["a"] is found["e"]
    into = {"a": torch.zeros(40, dtype=torch.complex64).conj(), "c": torch.zeros(40, dtype=torch.complex64).conj().imag}
    checkpoint.load(tmp_path, into=into)
    assert all(same_bits(into[name], state[name]) for name in into)


def test_shards_with_shared_memory_are_restored(tmp_path: Path) -> None:
    """Two shards are aliases only if they have the same position in the same whole tensor."""
    memory = torch.arange(4.0)
    state = {"a": checkpoint.Shard(memory, (0,), (4,)), "b": checkpoint.Shard(memory, (0,), (4,)), "c": memory}
    found = again(tmp_path, {**state, "d": checkpoint.Shard(memory[:0], (4,), (4,)), "e": memory.reshape(2, 2)}
                  | {"d": memory})  # fmt: skip
    assert all(torch.equal(found[name], memory) for name in "abcd")
    assert torch.equal(found["e"], memory.reshape(2, 2))


def test_names_that_look_like_names_of_parts_are_restored(tmp_path: Path) -> None:
    """``__metadata__`` has a special meaning in a safetensors file."""
    state = {"__metadata__": torch.arange(3), "x": torch.arange(4), "x@0": torch.arange(5), "x#0": torch.arange(6)}
    found = again(tmp_path, state)
    assert all(torch.equal(found[name], state[name]) for name in state)
    (part,) = (tmp_path / "step-0000000000").glob("*.safetensors")
    assert len(safetensors.torch.load_file(part)) == 4
    assert checkpoint.verify(tmp_path) == []


def test_digest_depends_on_each_bit() -> None:
    """Digests for the CPU and for devices. They do not depend on the memory layout."""
    generator = torch.Generator().manual_seed(2)
    for dtype in (torch.float32, torch.uint8, torch.bfloat16, torch.complex128, torch.bool):
        tensor = torch.randint(0, 2, (3, 400_001), generator=generator).to(dtype)
        for digest in (digest_of, sums_digest):
            found = digest(tensor)
            assert digest(tensor.t().contiguous().t()) == found
            seen = {found}
            for where in (0, 1_048_575, 1_048_576, 1_200_002):
                changed = tensor.clone()
                changed.view(-1)[where] = not changed.view(-1)[where]
                seen.add(digest(changed))
            seen.add(digest(torch.roll(tensor, 1)))
            assert len(seen) == 6


DTYPES = sorted(
    {
        dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype)
        and not str(dtype).startswith(("torch.q", "torch.bits", "torch.int1", "torch.int2"))
        and (dtype.itemsize > 1 or dtype in (torch.bool, torch.uint8, torch.int8) or "float" in str(dtype))
    }
    | {torch.int16},
    key=str,
)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("how", ["save", "save_async"])
def test_large_tensors_of_all_dtypes(tmp_path: Path, how: str) -> None:
    """Random bits, more than 64 KiB of each dtype, and a view with gaps that is filled in place."""
    assert len(DTYPES) >= 20
    generator = torch.Generator().manual_seed(1)
    state = {}
    for dtype in DTYPES:
        raw = torch.randint(0, 2 if dtype is torch.bool else 256, (300, 256), dtype=torch.uint8, generator=generator)
        state[str(dtype)], state[f"{dtype} with gaps"] = raw.view(dtype), raw.view(dtype)[::2].t()
        assert raw.nbytes > 64 << 10
    if how == "save_async":
        checkpoint.save_async(state, tmp_path, step=0).wait(60)
        found = checkpoint.load(tmp_path)
    else:
        found = again(tmp_path, state)
    assert all(same_bits(found[name], state[name]) for name in state)
    into = {name: torch.empty(tensor.t().shape, dtype=tensor.dtype).t() for name, tensor in state.items()}
    checkpoint.load(tmp_path, into=into)
    assert all(same_bits(into[name], state[name]) for name in state)
