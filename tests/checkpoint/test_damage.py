"""Damaged checkpoints are not loaded, and the error names the file. An invalid manifest causes only an error."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import xxhash

from allranks import CheckpointError, UsageError, checkpoint
from allranks.checkpoint.loading import load_as_rank
from allranks.checkpoint.manifest import MANIFEST, load_manifest
from allranks.checkpoint.selection import select_local_checkpoint
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
    """Check that verify finds every flipped bit.

    load finds each one except in data that it does not read: headers of files and tensors that only the other rank has.
    """
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


def test_newest_undamaged_checkpoint_is_selected(copy: Path) -> None:
    folder = copy.parent
    shutil.copytree(copy, folder / "step-0000000009")
    flip(folder / "step-0000000009" / MANIFEST, 100)
    with pytest.warns(UserWarning, match=r"step-0000000009 is skipped.*manifest\.json is damaged"):
        listed = checkpoint.list(folder)
    assert [info.step for info in listed] == [5]
    with pytest.warns(UserWarning, match="is skipped"):
        found = checkpoint.latest(folder)
    assert found is not None
    assert found.path == copy


@pytest.mark.parametrize("threads", [1, 2])
def test_many_blocks_are_read_and_checked_by_any_number_of_threads(threads: int, tmp_path: Path) -> None:
    """Reads with one thread and with two, also of rows that begin and end within blocks."""
    rows = torch.randn(4567, 1024, generator=torch.Generator().manual_seed(1))  # 18 MiB: five blocks
    path = checkpoint.save({"rows": rows}, tmp_path, step=1)
    (part,) = path.glob("*.safetensors")
    head = load_manifest(path).files[0].head
    default = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        loaded = checkpoint.load(path)
        assert torch.equal(loaded["rows"], rows)
        some = checkpoint.load(path, into={"rows": checkpoint.Shard(torch.empty(3000, 1024), (700, 0), rows.shape)})
        assert torch.equal(some["rows"].tensor, rows[700:3700])
        for block in range(5):
            bit = 8 * (head + (block << 22) + 12345)
            flip(part, bit)
            with pytest.raises(CheckpointError, match=rf"{part.name} is damaged in bytes {head + (block << 22)} to "):
                checkpoint.load(path)
            flip(part, bit)
        assert torch.equal(checkpoint.load(path)["rows"], rows)
    finally:
        torch.set_num_threads(default)


def test_checkpoint_loads_if_no_thread_can_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(4567, 1024)  # 18 MiB: five blocks
    path = checkpoint.save({"rows": rows}, tmp_path, step=1)
    default, started = torch.get_num_threads(), []

    def start(thread: threading.Thread) -> None:
        started.append(thread)
        raise RuntimeError("can't start new thread")

    torch.set_num_threads(2)
    monkeypatch.setattr(threading.Thread, "start", start)
    try:
        assert torch.equal(checkpoint.load(path)["rows"], rows)
    finally:
        torch.set_num_threads(default)
    assert started


@pytest.mark.parametrize("what", ["missing", "short", "long", "manifest"])
def test_missing_and_truncated_files_are_reported(copy: Path, what: str) -> None:
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
    """Write a changed manifest with a valid digest."""
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
    "a time that no calendar has": _set("when", 1e300),
    "two parts at one place": lambda found: found["tensors"][0].update(
        shape=[1_500_000],
        pieces=[{**found["tensors"][0]["pieces"][0], "shape": [750_000], "hashes": "AAAAAAAAAAA="}] * 2,
    ),
    "one part of a file, many times": lambda found: found["tensors"].append(
        {**found["tensors"][0], "name": "large too"}
    ),
    "two files of one name": lambda found: found["files"][1].update(name=found["files"][0]["name"]),
    "a dict that is a list": _set("text", {"dict": [1]}, "trees", 0, "dict"),
    "a huge array": _set("text", {"numpy": ["<f4", [1 << 70], "large"]}, "trees", 0, "dict"),
    "a size that is none": _set("text", {"size": [-1]}, "trees", 0, "dict"),
}


@pytest.mark.parametrize("lie", LIES)
def test_inconsistent_manifest_is_rejected(copy: Path, lie: str) -> None:
    resealed(copy, LIES[lie])
    with pytest.raises(CheckpointError):
        checkpoint.load(copy)
    with pytest.raises(CheckpointError):
        checkpoint.load(copy, into={"text": {}} if "dict" in lie else {})


def test_part_that_is_not_a_regular_file_is_rejected(copy: Path) -> None:
    """A symbolic link that leads out of the folder, and a FIFO whose open would block until a writer opens it."""
    part = copy / "part-00001.safetensors"
    part.rename(copy.parent / "elsewhere")
    for make in (lambda: part.symlink_to(copy.parent / "elsewhere"), lambda: os.mkfifo(part)):
        make()
        with pytest.raises(CheckpointError, match=r"part-00001\.safetensors is not a regular file; rank 1 wrote one"):
            checkpoint.load(copy)
        (problem,) = checkpoint.verify(copy)
        assert "is not a regular file; rank 1 wrote one" in problem
        part.unlink()


class _FailsOnce:
    """Disk with one block that cannot be read."""

    def __init__(self) -> None:
        self.preadv, self.pread = os.preadv, os.pread
        self.at = -1

    def __call__(self, fd: int, views: list[memoryview], where: int) -> int:
        if where <= self.at < where + len(views[0]):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return self.preadv(fd, views, where)

    def head(self, fd: int, length: int, where: int) -> bytes:
        if where <= self.at < where + length:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return self.pread(fd, length, where)


def test_unreadable_block_is_reported_with_file_and_tensor(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = _FailsOnce()
    monkeypatch.setattr(os, "preadv", disk)
    monkeypatch.setattr(os, "pread", disk.head)
    file, piece = next(
        (file, piece)
        for saved in load_manifest(copy).tensors
        for piece in saved.pieces
        if saved.name == "large" and (file := load_manifest(copy).files[piece.file])
    )
    disk.at = piece.begin + 5_000_000
    words = rf"{file.name} cannot be read in bytes \d+ to \d+ \(.*Input/output error\): tensor 'large', written by rank"
    with pytest.raises(CheckpointError, match=words):
        checkpoint.load(copy)
    (problem,) = checkpoint.verify(copy)
    assert re.search(words, problem)
    disk.at = 3
    assert [re.sub(r"\d+", "N", problem) for problem in checkpoint.verify(copy)] == [
        "part-N.safetensors: its header (bytes N to N) cannot be read: [Errno N] Stale file handle; rank N wrote it"
    ] * 2


def test_unreadable_checkpoint_is_skipped_with_a_warning(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newer = Path(shutil.copytree(copy, copy.parent / "step-0000000009"))
    read = Path.read_bytes

    def refuses(path: Path) -> bytes:
        if path.parent == newer:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refuses)
    with pytest.warns(UserWarning, match=r"step-0000000009 is skipped: .*Permission denied"):
        assert [info.step for info in checkpoint.list(copy.parent)] == [5]


def test_error_before_the_first_read_leaves_the_state_unchanged(copy: Path) -> None:
    """A missing file, a different dtype and a different shape: each is an error before any tensor is filled."""
    part = copy / "part-00001.safetensors"
    into = {"small": {f"t{n}": torch.zeros(10, 10) for n in range(5)}, "large": torch.zeros(1_500_000), "text": ""}
    wrong = {"large": torch.zeros(1_500_000, dtype=torch.float64), "mine": torch.zeros(4)}
    for name, words in (
        ("large", "has dtype float32 in .*, but float64 in"),
        ("mine", r"has shape \[3\] in .*, but \[4\] in"),
    ):
        with pytest.raises(UsageError, match=rf"tensor '{name}' {words}"):
            checkpoint.load(copy, into={**into, name: wrong[name]})
    selected = select_local_checkpoint(copy)
    part.rename(part.with_suffix(".gone"))
    with pytest.raises(CheckpointError, match=r"part-00001\.safetensors is missing; rank 1 wrote it"):
        load_as_rank(selected, into, 0)
    assert not into["text"]
    assert not any(tensor.any() for tensor in (into["large"], *into["small"].values()))  # type: ignore[attr-defined]


def test_load_error_of_one_rank_is_raised_on_all_ranks(copy: Path) -> None:
    """Errors of the state to fill and of the files. Ranks without a local error keep their state unchanged."""
    import allranks as dist

    def loads() -> list[str]:
        rank, words = dist.get_rank(), []
        for mine in ({"mine": torch.zeros(3 + rank)}, {"mine": torch.zeros(3), "text": Refuses() if rank else ""}):
            with pytest.raises((UsageError, CheckpointError)) as caught:
                checkpoint.load(copy, into=mine)
            words.append(f"{type(caught.value).__name__}: {caught.value}")
        return words

    first, second = run_ranks(2, loads)
    assert first is not None
    assert second is not None
    assert second[0].startswith("UsageError: checkpoint.load: tensor 'mine' has shape [3] in ")
    assert first[0].startswith("UsageError: checkpoint.load: rank 1 (")
    assert first[0].endswith("tensor 'mine' has shape [3] in " + second[0].split("[3] in ")[1])
    assert "'text': Refuses.load_state_dict rejected the state of the checkpoint: ValueError('no')" in second[1]
    assert first[1].startswith("CheckpointError: checkpoint.load: rank 1 (")


class Refuses:
    def state_dict(self) -> Any:
        return None

    def load_state_dict(self, state: Any) -> None:
        raise ValueError("no")


def test_garbage_manifest_is_rejected(copy: Path) -> None:
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
    for body in (b"[" * 100_000, b'{"run":"\xb4"', b'{"format":1,"trees":[' + b'{"tuple":[' * 300 + b"]}" * 300 + b"]"):
        digest = xxhash.xxh3_128_hexdigest(body).encode()
        (copy / MANIFEST).write_bytes(body + b',"digest":"' + digest + b'"}')
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            checkpoint.load(copy)


def damage(part: Path) -> None:
    content = bytearray(part.read_bytes())
    content[-6] ^= 64
    part.write_bytes(content)


@pytest.mark.parametrize("ranks", [1, 2])
def test_newest_undamaged_checkpoint_replaces_a_damaged_one(ranks: int, tmp_path: Path) -> None:
    import allranks as dist

    def main() -> Any:
        for step in (1, 2, 3):
            checkpoint.save({"w": torch.full((1000,), float(step))}, tmp_path, step=step)
        if dist.get_rank() == 0:
            for step in (2, 3):
                damage(tmp_path / f"step-000000000{step}" / "part-00000.safetensors")
        dist.barrier()
        newest = checkpoint.latest(tmp_path, group=dist.group.WORLD)
        assert newest is not None
        with pytest.raises(CheckpointError, match=r"damaged(.|\n)*checkpoint verify .*step-0000000003\n.*verify=True"):
            checkpoint.load(newest)
        with pytest.raises(CheckpointError, match="damaged"):
            checkpoint.load(tmp_path, step=2)
        into = {"w": torch.zeros(1000)}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            whole = checkpoint.latest(tmp_path, group=dist.group.WORLD, verify=True)
            checkpoint.load(tmp_path, into=into)
        assert whole is not None
        return newest.step, whole.step, into["w"].unique().tolist(), sorted({str(each.message)[:35] for each in caught})

    left_out = [f"checkpoint: step-000000000{step} is skip" for step in (2, 3)]
    assert run_ranks(ranks, main) == [(3, 1, [1.0], left_out if rank == 0 else []) for rank in range(ranks)]


def test_state_resumes_from_the_newest_undamaged_checkpoint(tmp_path: Path) -> None:
    import allranks as dist

    def main() -> float:
        weight = torch.zeros(1)
        saves = dist.resilience.Checkpoints(tmp_path, every=4, keep=9)
        state = dist.resilience.State(weight=weight, checkpoints=saves)
        for step in state.steps(10):
            with step:
                weight += step.index
        return weight.item(), state.steps_done

    assert run_ranks(2, main) == [(45.0, 10)] * 2
    newest = checkpoint.latest(tmp_path)
    assert newest is not None
    damage(next(newest.path.glob("part-*")))
    assert run_ranks(2, main) == [(45.0, 10)] * 2


def test_load_right_after_save_async_returns_the_saved_state(tmp_path: Path) -> None:
    checkpoint.save_async({"w": torch.ones(1 << 20)}, tmp_path / "new", step=1)
    assert checkpoint.load(tmp_path / "new")["w"].sum() == 1 << 20


def test_control_characters_in_names_do_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from allranks.tools.checkpoint import main

    checkpoint.save({"\x1b]0;owned\x07red": torch.ones(3), "\x9b31m": 1}, tmp_path, step=1)
    damage(next(tmp_path.glob("*/part-*")))
    for command in ("show", "list --verify", "verify"):
        main([*command.split(), str(tmp_path)])
    out, err = capsys.readouterr()
    assert "           1  damaged: " in out
    assert "owned" in out
    assert not {"\x1b", "\x07", "\x9b"} & {*out, *err}
