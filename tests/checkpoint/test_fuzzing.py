"""Random changes of manifests and file headers: each causes one AllranksError or a load, and never a traceback.

Each change is tested with all readers of checkpoints: load, torch's distributed checkpoint, the command line and merge.
The memory limit is far below the lengths that the changed values request.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import xxhash
from torch import nn

import allranks as dist
from allranks import AllranksError, checkpoint
from allranks.checkpoint.manifest import MANIFEST, load_manifest
from allranks.testing import run_ranks
from allranks.tools.checkpoint import main

HUGE = 1 << 60
VALUES: list[Any] = [
    None, -1, 0, 1, 7, HUGE, 1 << 70, 1.5, 1e300, "", "x", "../x", [], [1], [[]], {}, {"dict": {}}, {"dict": [1]},
    {"items": [[[], 1]]}, {"tensor": "t"}, {"numpy": ["O", [1 << 70], "t"]}, {"int": "x"}, True,
]  # fmt: skip


def state() -> dict[str, Any]:
    torch.manual_seed(1)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    values = {"numbers": {1: 2.5, 2: None}, "pair": (1, [2, "x"]), "size": torch.Size([2]), "huge": 1 << 80}
    arrays = {"array": np.arange(4), "scalar": np.float32(1), "complex": 1j, "bytes": b"x", "dtype": torch.int8}
    return {"model": model, "optimizer": optimizer, "random": checkpoint.RandomState(), "t": torch.ones(5),
            **values, **arrays}  # fmt: skip


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    path = checkpoint.save(state(), tmp_path / "whole", step=5)
    assert path is not None
    return path


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), hard))
    generators = checkpoint.RandomState().state_dict()
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        checkpoint.RandomState().load_state_dict(generators)


def resealed(path: Path, original: bytes, change: Callable[[dict[str, Any]], object]) -> None:
    """Write a changed manifest with a valid digest."""
    found = json.loads(original)
    del found["digest"]
    change(found)
    try:
        body = msgspec.json.encode(found)[:-1]
    except OverflowError:  # msgspec does not encode integers of more than 64 bits
        body = json.dumps(found).encode()[:-1]
    path.write_bytes(body + b',"digest":"' + xxhash.xxh3_128_hexdigest(body).encode() + b'"}\n')


def mutate(found: Any, pick: random.Random) -> None:
    while True:
        keys = list(found) if isinstance(found, dict) else list(range(len(found)))
        key = pick.choice(keys)
        inner = found[key]
        if isinstance(inner, (dict, list)) and inner and pick.random() < 0.85:
            found = inner
            continue
        if isinstance(found, dict) and pick.random() < 0.2:
            del found[key]
        else:
            found[key] = pick.choice(VALUES)
        return


def by_torch(path: Path) -> None:
    """Load through torch's distributed checkpoint, which wraps allranks's errors."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    into = {"t": torch.zeros(5), "model": nn.Linear(3, 3).state_dict(), "pair": None}
    try:
        dcp.load(into, storage_reader=checkpoint.StorageReader(path), no_dist=True)
    except CheckpointException as error:
        failure: BaseException = error
        while isinstance(failure, CheckpointException):
            failure = next(iter(failure.failures.values()))[0]
        of_its_planner = "Missing key in checkpoint" in str(failure) or "Size mismatch between" in str(failure)
        if not isinstance(failure, AllranksError) and not of_its_planner:
            raise failure from None


def test_changed_manifest_loads_or_raises_one_error(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Changes of any value."""
    path = whole / MANIFEST
    original, pick = path.read_bytes(), random.Random(3)
    file = tmp_path / "x.safetensors"
    ways: list[Callable[[], object]] = [
        lambda: checkpoint.load(whole),
        lambda: checkpoint.load(whole, into={}),
        lambda: checkpoint.load(whole, into=state()),
        lambda: by_torch(whole),
    ]
    commands: list[list[object]] = [
        ["show"], ["show", "--json"], ["verify"], ["diff", whole], ["export", file],
        ["export", file, "--force"], ["export", tmp_path / "x.pt", "--force"],
    ]  # fmt: skip
    with little_memory(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(300):
            resealed(path, original, lambda found: mutate(found, pick))
            for way in ways:
                with contextlib.suppress(AllranksError):
                    way()
            command, *more = pick.choice(commands)
            code = main([str(command), str(whole), *map(str, more)])
            # An error is one line, followed by indented lines that state the action for the user.
            lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("  ")]
            assert len(lines) == (code == 2), lines


def test_merge_of_changed_shares_succeeds_or_raises_an_error(tmp_path: Path) -> None:
    def saves() -> None:
        warnings.simplefilter("ignore")
        checkpoint.save({"t": torch.ones(5), "x": {"n": dist.get_rank()}}, tmp_path / str(dist.get_rank()), step=1)

    run_ranks(2, saves)
    (share,) = (tmp_path / "1").glob("step-*")
    original, pick = (share / MANIFEST).read_bytes(), random.Random(4)
    merged = 0
    for _ in range(60):
        resealed(share / MANIFEST, original, lambda found: mutate(found, pick))
        with contextlib.suppress(AllranksError):
            checkpoint.merge(tmp_path / "0", tmp_path / "1", into=tmp_path / "into")
            merged += 1
            shutil.rmtree(tmp_path / "into")
    assert merged < 12  # a change can keep the value
    (share / MANIFEST).write_bytes(original)
    checkpoint.merge(tmp_path / "0", tmp_path / "1", into=tmp_path / "into")


def test_changed_file_header_is_found_and_does_not_mislead_load(whole: Path) -> None:
    """Positions of tensors come only from the manifest: load ignores file headers, and verify finds each change."""
    (part,) = whole.glob("*.safetensors")
    head, pick = load_manifest(whole).files[0].head, random.Random(5)
    original = part.read_bytes()
    for _ in range(100):
        changed = bytearray(original)
        for _ in range(pick.randrange(1, 9)):
            changed[pick.randrange(head)] ^= pick.randrange(1, 256)
        if changed == original:
            continue
        part.write_bytes(changed)
        assert torch.equal(checkpoint.load(whole)["t"], torch.ones(5))
        (problem,) = checkpoint.verify(whole)
        assert "its head" in problem
        assert "differs from what rank 0 wrote" in problem


def test_header_is_read_in_chunks(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest can declare the whole file as header."""
    (part,) = whole.glob("*.safetensors")
    os.truncate(part, 1 << 28)

    def change(found: dict[str, Any]) -> None:
        found["files"][0].update(nbytes=1 << 28, head=1 << 28)
        found.update(tensors=[], trees=[None])

    resealed(whole / MANIFEST, (whole / MANIFEST).read_bytes(), change)
    longest, pread = [0], os.pread

    def watched(fd: int, length: int, where: int) -> bytes:
        longest[0] = max(longest[0], length)
        return pread(fd, length, where)

    monkeypatch.setattr(os, "pread", watched)
    assert "its head" in checkpoint.verify(whole)[0]
    assert 0 < longest[0] <= 1 << 20
