"""Simulated power losses and disk errors during a save, based on the recorded system calls.

``Disk`` records each write, fsync, rename and removal. ``crash`` then builds the folder that a power loss at any moment
can leave. Synced data is present. A seed decides which unsynced changes the disk has written, in any order.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import allranks as dist
from allranks import CheckpointError, checkpoint
from allranks.checkpoint import folders
from allranks.testing import run_ranks


def _path_of(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")


class Disk:
    """Recorder of the file system calls of this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[Any, ...]] = []  # entries: time, call, path, arguments
        self._real = {name: getattr(os, name) for name in ("write", "fsync", "rename", "mkdir", "unlink", "rmdir")}
        for name in self._real:
            monkeypatch.setattr(os, name, getattr(self, name))

    def note(self, *what: Any) -> None:
        self.log.append((time.monotonic_ns(), *what))

    def write(self, fd: int, data: Any) -> int:
        path = _path_of(fd)
        if path.endswith((".safetensors", "manifest.json")):
            self.note("write", path, bytes(data))
        return int(self._real["write"](fd, data))

    def fsync(self, fd: int) -> None:
        self._real["fsync"](fd)
        self.note("fsync", _path_of(fd))

    def rename(self, source: Any, target: Any) -> None:
        self.note("rename", str(source), str(target))
        self._real["rename"](source, target)

    def mkdir(self, path: Any, mode: int = 0o777, **more: Any) -> None:
        self._real["mkdir"](path, mode, **more)
        self.note("mkdir", str(path))

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self.note("unlink", str(path) if dir_fd is None else f"{_path_of(dir_fd)}/{path}")
        self._real["unlink"](path, dir_fd=dir_fd)

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self.note("rmdir", str(path) if dir_fd is None else f"{_path_of(dir_fd)}/{path}")
        self._real["rmdir"](path, dir_fd=dir_fd)


class Node:
    """File or folder: its current content and the content that is durable on the disk."""

    def __init__(self, is_folder: bool) -> None:
        self.is_folder = is_folder
        self.data = b""
        self.durable = b""
        self.names: dict[str, Node] = {}
        self.durable_names: dict[str, Node] = {}
        self.since: list[tuple[str, str, Node | None]] = []  # changes of names that are not synced


def crash(log: list[tuple[Any, ...]], root: Path, into: Path, pick: random.Random) -> None:
    """Build the folder that the disk can contain after these calls."""
    top = Node(True)
    for _, call, path, *rest in log:
        if not path.startswith(f"{root}/") and path != str(root):
            continue
        parts = Path(path).relative_to(root).parts
        if not parts:
            if call == "fsync":
                top.durable_names, top.since = dict(top.names), []
            continue
        folder = top
        for part in parts[:-1]:
            folder = folder.names[part]
        _apply(call, folder, parts[-1], rest, root)
    _lay_out(top, into, pick)


def _apply(call: str, folder: Node, name: str, rest: list[Any], root: Path) -> None:
    def put(which: str, node: Node | None) -> None:
        if node is None:
            folder.names.pop(which, None)
        else:
            folder.names[which] = node
        folder.since.append(("put", which, node))

    if call == "write":
        if name not in folder.names:
            put(name, Node(False))
        folder.names[name].data += rest[0]
    elif call == "fsync":
        node = folder.names.get(name)
        if node is None:
            return
        node.durable = node.data
        node.durable_names, node.since = dict(node.names), []
    elif call == "mkdir":
        put(name, Node(True))
    elif call == "rename":
        node = folder.names[name]
        folder.names.pop(name)
        folder.names[Path(rest[0]).name] = node
        folder.since.append(("rename", name, node))
        folder.since[-1] = ("rename", f"{name}\n{Path(rest[0]).name}", node)
    else:
        put(name, None)


def _lay_out(node: Node, into: Path, pick: random.Random) -> None:
    into.mkdir()
    names = dict(node.durable_names)
    for kind, which, other in node.since:  # in order, as in a journal; any of them may be the last one on the disk
        if pick.random() < 0.5:
            break
        if kind == "rename":
            old, new = which.split("\n")
            names.pop(old, None)
            assert other is not None
            names[new] = other
        elif other is None:
            names.pop(which, None)
        else:
            names[which] = other
    for name, child in names.items():
        if child.is_folder:
            _lay_out(child, into / name, pick)
            continue
        data = bytearray(child.durable)
        if len(child.data) > len(data) and pick.random() < 0.7:  # some pages were written, others are zeros
            more = bytearray(child.data[len(data) : pick.randrange(len(data), len(child.data) + 1)])
            for begin in range(0, len(more), 4096):
                if pick.random() < 0.5:
                    more[begin : begin + 4096] = bytes(len(more[begin : begin + 4096]))
            data += more
        (into / name).write_bytes(data)


def state(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "x": torch.full((5000,), float(step)),
        "y": [torch.full((7,), step + 0.5)],
        "mine": checkpoint.Shard(
            torch.full((1,), float(step)), (dist.get_rank() if dist.is_initialized() else 0,), (_ranks(),)
        ),
    }


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def recorded(folder: Path, steps: Sequence[int], background: bool) -> tuple[list[tuple[Any, ...]], Path]:
    """Save these steps. Return the file system calls of this rank and the folder that was passed."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="checkpoint.save: the ranks have 2 different folders")
        disk = Disk(patch)
        for step in steps:
            if background:
                checkpoint.save_async(state(step), folder, step=step, keep=2).wait()
            else:
                checkpoint.save(state(step), folder, step=step, keep=2)
            disk.note("announced", str(folder), step)
    return disk.log, folder


@pytest.mark.parametrize("background", [False, True], ids=["save", "save_async"])
@pytest.mark.parametrize("kind", ["one process", "two ranks", "two folders"])
def test_newest_reported_checkpoint_survives_a_crash(
    tmp_path: Path, kind: str, background: bool, recwarn: pytest.WarningsRecorder
) -> None:
    """Crash simulation in which the first save creates the folder and its parent folders."""
    root, steps = tmp_path / "disk", (1, 2, 2, 3, 4)
    root.mkdir()
    if kind == "one process":
        log, _ = recorded(root / "a" / "b" / "checkpoints", steps, background)
    else:

        def saves() -> tuple[list[tuple[Any, ...]], Path]:
            name = str(dist.get_rank()) if kind == "two folders" else "both"
            return recorded(root / "a" / name / "checkpoints", steps, background)

        log = [entry for found, _ in run_ranks(2, saves) for entry in found]
    log.sort(key=lambda entry: int(entry[0]))
    announced = [(at, entry[3]) for at, entry in enumerate(log) if entry[1] == "announced"]
    calls = [entry for entry in log if entry[1] != "announced"]
    before = [sum(entry[1] != "announced" for entry in log[:at]) for at in range(len(log))]
    assert {step for _, step in announced} == set(steps)
    pick = random.Random(1)
    for number in range(60):
        moment = pick.randrange(len(calls) + 1) if number % 2 else before[pick.choice(announced)[0]]
        into = tmp_path / f"crash{number}"
        crash(calls[:moment], root, into, pick)
        told = max((step for at, step in announced if before[at] <= moment), default=0)
        found = newest_of(into, kind)
        assert (0 if found is None else found[1]) >= told, (number, moment)
        if found is not None:
            loaded, right = checkpoint.load(found[0], step=found[1]), state(found[1])
            assert loaded["step"] == found[1]
            assert torch.equal(loaded["x"], right["x"])
            assert torch.equal(loaded["y"][0], right["y"][0])
            assert loaded["mine"].unique().tolist() == [found[1]]
    assert not recwarn.list  # no checkpoint was damaged: a folder gets its final name only when it is complete


def newest_of(into: Path, kind: str) -> tuple[Path, int] | None:
    """Return the folder after a crash and its newest complete step, with both shares if there are two."""
    if kind != "two folders":
        folder = into / "a" / ("b" if kind == "one process" else "both") / "checkpoints"
        newest = checkpoint.latest(folder)
        return None if newest is None else (folder, newest.step)
    first, second = into / "a" / "0" / "checkpoints", into / "a" / "1" / "checkpoints"
    if not first.is_dir() or not second.is_dir():
        return None
    for path in second.glob("step-*"):
        path.rename(first / path.name)
    saves = [(one.step, one.share.id) for one in folders.find(first) if one.share is not None]
    return max(((first, step) for step, name in saves if saves.count((step, name)) == 2), default=None)


def test_simulation_detects_a_missing_fsync(tmp_path: Path) -> None:
    """Check that a save without fsync of its files or of its new folders loses data in the simulation."""
    root = tmp_path / "disk"
    root.mkdir()
    log, _ = recorded(root / "a" / "b", [1], False)
    log = [entry for entry in log if entry[1] != "announced"]
    for what in (".safetensors", str(root), str(root / "a")):
        without = [entry for entry in log if not (entry[1] == "fsync" and entry[2].endswith(what))]
        assert len(without) < len(log)
        pick, lost = random.Random(2), 0
        for number in range(30):
            crash(without, root, into := tmp_path / f"crash{what[-1]}{number}", pick)
            try:
                checkpoint.load(into / "a" / "b")
            except (CheckpointError, OSError, UserWarning):
                lost += 1
        assert lost > 6, what


def _error_of(save: Callable[[], object]) -> str:
    try:
        save()
    except CheckpointError as error:
        return str(error)
    return ""


CALLS = ("write", "fsync", "rename", "mkdir", "open")


@pytest.mark.parametrize("call", CALLS)
def test_failed_system_call_changes_nothing_and_the_next_save_succeeds(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fail the first, second, ... occurrence of a call; the files stay unchanged and the next save succeeds."""
    checkpoint.save(state(1), tmp_path, step=1)
    real: Callable[..., Any] = getattr(os, call)
    failed = 0
    for number in range(40):
        left = [number]

        def fail(*arguments: Any, left: list[int] = left, **more: Any) -> Any:
            left[0] -= 1
            if left[0] == -1:
                raise OSError(errno.EIO, "Input/output error")
            return real(*arguments, **more)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            said = _error_of(lambda: checkpoint.save(state(2), tmp_path, step=2))
        if not said and number:  # the first mkdir is of an existing folder
            break
        assert not said or "Input/output error" in said
        failed += bool(said)
        found = checkpoint.list(tmp_path)
        assert [one.step for one in found] == ([1] if said else [2, 1])
        assert checkpoint.verify(found[0]) == []
        if not said:
            shutil.rmtree(found[0].path)
    assert failed
    checkpoint.save(state(3), tmp_path, step=3, keep=1)
    assert sorted(os.listdir(tmp_path)) == [".job", ".lock", "step-0000000003"]
    assert torch.equal(checkpoint.load(tmp_path)["x"], state(3)["x"])


def test_save_completes_after_short_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, pick = os.write, random.Random(5)
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[: pick.randrange(1, len(data) + 1)]))
    checkpoint.save(state(1), tmp_path, step=1)
    assert checkpoint.verify(tmp_path) == []
