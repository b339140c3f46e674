"""Nothing that is damaged is loaded, and it is named; whatever a manifest says, nothing worse than an error happens."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import xxhash

from allranks import AllranksError, CheckpointError, checkpoint
from allranks.checkpoint.manifest import MANIFEST, load_manifest
from allranks.testing import run_ranks


def state(rank: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    return {
        "large": torch.randn(1_500_000, generator=generator),
        "small": {f"t{n}": torch.randn(10, 10, generator=generator) for n in range(5)},
        "mine": torch.full((3,), float(rank)),
        "text": "as it was",
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import allranks as dist

    folder = tmp_path_factory.mktemp("whole")
    run_ranks(2, lambda: checkpoint.save(state(dist.get_rank()), folder, step=5))
    assert checkpoint.verify(folder) == []
    return folder / "step-0000000005"


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / whole.name))


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        old = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([old ^ (1 << bit % 8)]))


def test_a_flipped_bit_anywhere_is_found(copy: Path) -> None:
    """By verify always; by load unless that does not read it: the head of a file, what only the other rank has."""
    pick = random.Random(1)
    manifest = load_manifest(copy)
    heads = {file.name: file.head for file in manifest.files}
    files = sorted(copy.iterdir())
    for number in range(1000):
        path = pick.choice(files)
        bit = pick.randrange(8 * (heads[path.name] if number % 3 == 0 and path.name in heads else path.stat().st_size))
        flip(path, bit)
        (problem,) = checkpoint.verify(copy)
        assert path.name in problem
        of_another = "tensor 'mine', written by rank 1" in problem
        if path.name == MANIFEST or (bit // 8 >= heads[path.name] and not of_another):
            with pytest.raises(CheckpointError) as caught:
                checkpoint.load(copy)
            assert path.name in str(caught.value)
        if path.name != MANIFEST:
            assert re.search(r"rank [01]", problem)
            assert "tensor '" in problem or "its head" in problem
        flip(path, bit)
    assert checkpoint.verify(copy) == []


def test_the_newest_that_is_whole_is_taken(copy: Path) -> None:
    folder = copy.parent
    shutil.copytree(copy, folder / "step-0000000009")
    flip(folder / "step-0000000009" / MANIFEST, 100)
    with pytest.warns(UserWarning, match=r"step-0000000009 is left out.*manifest\.json is damaged"):
        listed = checkpoint.list(folder)
    assert [info.step for info in listed] == [5]
    with pytest.warns(UserWarning, match="left out"):
        found = checkpoint.latest(folder)
    assert found is not None
    assert found.path == copy


@pytest.mark.parametrize("what", ["missing", "short", "long", "manifest"])
def test_files_that_are_missing_or_cut(copy: Path, what: str) -> None:
    part = copy / "part-00001.safetensors"
    if what == "missing":
        part.unlink()
    elif what == "manifest":
        (copy / MANIFEST).unlink()
        assert checkpoint.latest(copy.parent) is None
        return
    else:
        os.truncate(part, part.stat().st_size + (-1 if what == "short" else 1))
    (problem,) = checkpoint.verify(copy)
    assert "part-00001.safetensors" in problem
    assert "rank 1 wrote it" in problem
    with pytest.raises(CheckpointError, match=r"part-00001\.safetensors"):
        checkpoint.load(copy)


def resealed(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Writes a manifest that is another, with the right digest."""
    path = folder / MANIFEST
    found = json.loads(path.read_bytes())
    del found["digest"]
    change(found)
    body = msgspec.json.encode(found)[:-1]
    path.write_bytes(body + b',"digest":"' + xxhash.xxh3_128_hexdigest(body).encode() + b'"}\n')


def _set(key: str, value: Any, *path: Any) -> Callable[[dict[str, Any]], None]:
    def change(found: Any) -> None:
        for step in path:
            found = found[step]
        found[key] = value

    return change


HUGE = 1 << 60
LIES = {
    "a later format": _set("format", 99),
    "a path": _set("name", "../../etc/passwd", "files", 0),
    "a hidden file": _set("name", ".lock", "files", 0),
    "another size": _set("nbytes", HUGE, "files", 0),
    "a head that is larger": _set("head", HUGE, "files", 0),
    "a huge shape": _set("shape", [HUGE, HUGE], "tensors", 0),
    "a huge tensor": _set("shape", [HUGE], "tensors", 0),
    "a negative shape": _set("shape", [-3], "tensors", 0),
    "a part outside": _set("offsets", [7], "tensors", 0, "pieces", 0),
    "a part outside of the file": _set("begin", HUGE, "tensors", 0, "pieces", 0),
    "a part in the head": _set("begin", 0, "tensors", 0, "pieces", 0),
    "a part before the file": _set("begin", -8, "tensors", 0, "pieces", 0),
    "a file that is not there": _set("file", 17, "tensors", 0, "pieces", 0),
    "no parts": _set("pieces", [], "tensors", 0),
    "no hashes": _set("hashes", "", "tensors", 0, "pieces", 0),
    "other hashes": _set("hashes", "AAAAAAAAAAA=", "tensors", 0, "pieces", 0),
    "no dtype": _set("dtype", "Tensor", "tensors", 0),
    "an evil dtype": _set("dtype", "__name__", "tensors", 0),
    "no writers": _set("writers", []),
    "a tree that is not there": _set("tree", 5, "writers", 0),
    "a block of no bytes": _set("block", 0),
    "a tag that is none": _set("text", {"call": "os.system"}, "trees", 0, "dict"),
    "a tensor that is none": _set("text", {"tensor": "other"}, "trees", 0, "dict"),
    "a tensor with a number for a name": _set("text", {"tensor": 5}, "trees", 0, "dict"),
    "a step in words": _set("step", "five"),
}


@pytest.mark.parametrize("lie", LIES)
def test_manifests_that_lie(copy: Path, lie: str) -> None:
    resealed(copy, LIES[lie])
    with pytest.raises(CheckpointError):
        checkpoint.load(copy)


def test_manifests_that_are_fuzzed(copy: Path) -> None:
    """Any change of its values gives an error of ours, or a load; and no memory is taken that a length asks for."""
    original = (copy / MANIFEST).read_bytes()
    pick = random.Random(3)
    values = [None, -1, 0, 1, 7, HUGE, 1.5, "", "x", "../x", [], [1], [[]], {}, {"dict": {}}, {"tensor": "large"}, True]
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), hard))
    try:
        for _ in range(400):
            (copy / MANIFEST).write_bytes(original)
            resealed(copy, lambda found: _mutate(found, pick, values))
            with contextlib.suppress(AllranksError):
                checkpoint.load(copy)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _mutate(found: Any, pick: random.Random, values: list[Any]) -> None:
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
            found[key] = pick.choice(values)
        return


def test_manifests_of_garbage(copy: Path) -> None:
    pick = random.Random(4)
    original = (copy / MANIFEST).read_bytes()
    for _ in range(200):
        garbage = bytearray(original[: pick.randrange(len(original))])
        for _ in range(pick.randrange(5)):
            if garbage:
                garbage[pick.randrange(len(garbage))] = pick.randrange(256)
        (copy / MANIFEST).write_bytes(bytes(garbage))
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            checkpoint.load(copy)
    (copy / MANIFEST).write_bytes(
        b"[" * 100_000 + b',"digest":"' + xxhash.xxh3_128_hexdigest(b"[" * 100_000).encode() + b'"}'
    )
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        checkpoint.load(copy)
