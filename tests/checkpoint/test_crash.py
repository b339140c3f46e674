"""A machine that loses its power while it saves, and a disk that fails, simulated on what the saves asked for.

``Disk`` notes each write, fsync, rename and removal while they are done. A crash at any moment is then laid out in
another folder: what was synced is there; of the rest, a seed decides what the disk had written by itself, in any order.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from allranks import CheckpointError, checkpoint


def _path_of(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")


class Disk:
    """Notes what is asked of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.announced: list[tuple[int, int]] = []  # moments, and steps that were saved then
        self._real = {name: getattr(os, name) for name in ("write", "fsync", "rename", "mkdir", "unlink", "rmdir")}
        for name in self._real:
            monkeypatch.setattr(os, name, getattr(self, name))

    def write(self, fd: int, data: Any) -> int:
        path = _path_of(fd)
        if path.endswith((".safetensors", "manifest.json")):
            self.log.append(("write", path, bytes(data)))
        return int(self._real["write"](fd, data))

    def fsync(self, fd: int) -> None:
        self.log.append(("fsync", _path_of(fd)))
        self._real["fsync"](fd)

    def rename(self, source: Any, target: Any) -> None:
        self.log.append(("rename", str(source), str(target)))
        self._real["rename"](source, target)

    def mkdir(self, path: Any, mode: int = 0o777, **more: Any) -> None:
        self._real["mkdir"](path, mode, **more)
        self.log.append(("mkdir", str(path)))

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self.log.append(("unlink", str(path) if dir_fd is None else f"{_path_of(dir_fd)}/{path}"))
        self._real["unlink"](path, dir_fd=dir_fd)

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self.log.append(("rmdir", str(path) if dir_fd is None else f"{_path_of(dir_fd)}/{path}"))
        self._real["rmdir"](path, dir_fd=dir_fd)


class Node:
    """A file or a folder: what it is, and what of it the disk has for sure."""

    def __init__(self, is_folder: bool) -> None:
        self.is_folder = is_folder
        self.data = b""
        self.durable = b""
        self.names: dict[str, Node] = {}
        self.durable_names: dict[str, Node] = {}
        self.since: list[tuple[str, str, Node | None]] = []  # changes of names that are not synced


def crash(log: list[tuple[Any, ...]], root: Path, into: Path, pick: random.Random) -> None:
    """Lays out what the disk has after these calls."""
    top = Node(True)
    for call, path, *rest in log:
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
    for kind, which, other in node.since:  # in order, as a journal has them; each may be the last that was written
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
        if len(child.data) > len(data) and pick.random() < 0.7:  # some pages came, others are zeros
            more = bytearray(child.data[len(data) : pick.randrange(len(data), len(child.data) + 1)])
            for begin in range(0, len(more), 4096):
                if pick.random() < 0.5:
                    more[begin : begin + 4096] = bytes(len(more[begin : begin + 4096]))
            data += more
        (into / name).write_bytes(data)


def state(step: int) -> dict[str, Any]:
    return {"step": step, "x": torch.full((5000,), float(step)), "y": [torch.full((7,), step + 0.5)]}


def test_after_a_crash_the_newest_announced_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    root = tmp_path / "checkpoints"
    root.mkdir()
    with monkeypatch.context() as patch:
        disk = Disk(patch)
        for step in (1, 2, 2, 3, 4):
            checkpoint.save(state(step), root, step=step, keep=2)
            disk.announced.append((len(disk.log), step))
    pick = random.Random(1)
    for number in range(400):
        moment = pick.randrange(len(disk.log) + 1)
        into = tmp_path / f"crash{number}"
        crash(disk.log[:moment], root, into, pick)
        announced = max((step for at, step in disk.announced if at <= moment), default=0)
        newest = checkpoint.latest(into)
        assert (0 if newest is None else newest.step) >= announced, (number, moment)
        if newest is not None:
            found = checkpoint.load(newest)
            right = state(newest.step)
            assert found["step"] == newest.step
            assert torch.equal(found["x"], right["x"])
            assert torch.equal(found["y"][0], right["y"][0])
    assert not recwarn.list  # none was damaged: a name is given to what is whole


def test_a_crash_is_seen_without_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulation finds what a save without fsync would lose."""
    root = tmp_path / "checkpoints"
    root.mkdir()
    with monkeypatch.context() as patch:
        disk = Disk(patch)
        checkpoint.save(state(1), root, step=1)
    log = [entry for entry in disk.log if not (entry[0] == "fsync" and entry[1].endswith(".safetensors"))]
    pick, lost = random.Random(2), 0
    for number in range(50):
        crash(log, root, into := tmp_path / f"crash{number}", pick)
        try:
            checkpoint.load(into)
        except CheckpointError:
            lost += 1
        except UserWarning:
            lost += 1
    assert lost > 10


def _error_of(save: Callable[[], object]) -> str:
    try:
        save()
    except CheckpointError as error:
        return str(error)
    return ""


CALLS = ("write", "fsync", "rename", "mkdir", "open")


@pytest.mark.parametrize("call", CALLS)
def test_any_call_that_fails(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first, the second, ...: each time all is as it was, and the next save goes well."""
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
        if not said and number:  # the first mkdir is of a folder that is there
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
    assert sorted(os.listdir(tmp_path)) == [".lock", "step-0000000003"]
    assert torch.equal(checkpoint.load(tmp_path)["x"], state(3)["x"])


def test_short_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, pick = os.write, random.Random(5)
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[: pick.randrange(1, len(data) + 1)]))
    checkpoint.save(state(1), tmp_path, step=1)
    assert checkpoint.verify(tmp_path) == []
