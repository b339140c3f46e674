"""Saves that fail because of a disk, a file server or an administrator: errors name rank, folder and cause.

No earlier checkpoint is lost. Further tests: problems that do not make a save fail, and failures whose save the program
has not waited for.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import allranks as dist
from allranks import CheckpointError, checkpoint
from allranks.checkpoint import background, folders
from allranks.testing import run_ranks
from support import warm
from support.failing_calls import FAILURES, failing

RANKS = 2


def state(step: int) -> dict[str, Any]:
    return {"x": torch.full((3000,), float(step)), "y": torch.full((2000,), step + 0.5), "step": step}


def check(folder: Path, *steps: int) -> None:
    """Assert that the folder contains exactly these checkpoints, bit for bit."""
    found = checkpoint.list(folder)
    assert [one.step for one in found] == list(steps)
    for one in found:
        loaded, right = checkpoint.load(one), state(one.step)
        assert loaded["step"] == one.step
        assert torch.equal(loaded["x"], right["x"])
        assert torch.equal(loaded["y"], right["y"])


# Old checkpoints that cannot be removed.


@pytest.mark.parametrize("apart", [False, True], ids=["one folder", "shares"])
def test_old_checkpoint_that_cannot_be_removed_causes_a_warning(tmp_path: Path, apart: bool) -> None:
    """The folder cannot be renamed (EACCES), or its files cannot be removed (``.nfs`` files of a server)."""

    def saves() -> list[list[str]]:
        rank = dist.get_rank()
        folder = tmp_path / (f"host{rank}" if apart else "both")
        told = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            checkpoint.save(state(1), folder, step=1, keep=1)
        for step, (where, name, error, when) in enumerate(
            (
                (os, "rename", errno.EACCES, lambda source, target: ".trash." in str(target)),
                (shutil, "rmtree", errno.ENOTEMPTY, lambda path, **_: ".trash." in str(path)),
            ),
            2,
        ):
            with warnings.catch_warnings(record=True) as caught, failing(where, name, error, when):
                warnings.simplefilter("always")
                assert checkpoint.save(state(step), folder, step=step, keep=1) is not None
            told.append([str(one.message) for one in caught if "is complete in" in str(one.message)])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            checkpoint.save(state(4), folder, step=4, keep=1)
        assert [one.step for one in checkpoint.list(folder)] == [4]
        dist.barrier()
        assert sorted(name[0] for name in os.listdir(folder)) == [".", ".", "s"]
        return told

    first, second = run_ranks(RANKS, saves)
    for told in (first, second) if apart else (first,):
        ((denied,), (left,)) = told
        assert "checkpoint.save: step 2 is complete in" in denied
        assert "step-0000000001" in denied
        assert "could not be removed: Permission denied" in denied
        assert "could not be removed: Directory not empty" in left
    if not apart:
        assert second == [[], []]
        check(tmp_path / "both", 4)


def test_partial_save_that_cannot_be_removed_causes_a_warning(tmp_path: Path) -> None:
    (tmp_path / ".step-0000000009.0011aabb0011aabb.partial").mkdir()
    when = lambda path, **_: "0011aabb" in str(path)  # noqa: E731
    with (
        failing(shutil, "rmtree", errno.EACCES, when),
        pytest.warns(UserWarning, match=r"step 1 is complete in .*, but .*0011aabb\.partial could not be removed"),
    ):
        checkpoint.save(state(1), tmp_path, step=1)
    check(tmp_path, 1)


# Renames on a file server.


@pytest.mark.parametrize("error", [errno.ENOENT, errno.ESTALE])
def test_rename_that_succeeded_with_an_error_counts_as_done(tmp_path: Path, error: int) -> None:
    """A server that has lost its reply receives the request again and does not find the old name."""
    with failing(os, "rename", error, lambda source, target: "step-" in Path(target).name[:5], after=True):
        assert checkpoint.save(state(1), tmp_path, step=1) == tmp_path / "step-0000000001"
    with (
        failing(os, "rename", error, lambda source, target: "step-" in Path(target).name[:5]),
        pytest.raises(CheckpointError, match=r"step 2 was not saved into .*: rank 0 .*: " + os.strerror(error)),
    ):
        checkpoint.save(state(2), tmp_path, step=2)
    check(tmp_path, 1)


# Failures of one rank in each call, also in the background.


def test_failed_call_of_one_rank_is_raised_on_all_ranks(tmp_path: Path) -> None:
    """Two ranks, with one common folder and with two folders. The next save succeeds."""

    def saves() -> dict[str, str]:
        rank, said = dist.get_rank(), {}
        warnings.simplefilter("ignore")
        for kind in ("both", f"host{rank}"):
            checkpoint.save(state(1), tmp_path / kind, step=1)
        for name, failure in FAILURES.items():
            for victim in range(RANKS):
                for kind in ("both", f"host{rank}"):
                    folder = tmp_path / kind
                    if victim and kind == "both" and failure.is_of_the_first:
                        continue
                    with contextlib.ExitStack() as stack:
                        if rank == victim:
                            stack.enter_context(failure.inject())
                        with pytest.raises(CheckpointError) as caught:
                            checkpoint.save_async(state(2), folder, step=2).wait(60)
                    said[f"{name} {victim} {kind[:4]}"] = str(caught.value)
                    for part in (f"step 2 was not saved into {folder}", f"rank {victim} (", os.strerror(failure.error)):
                        assert part in str(caught.value), (name, victim, kind)
        for kind in ("both", f"host{rank}"):
            newest = checkpoint.latest(tmp_path / kind, group=dist.group.WORLD)
            assert newest is not None
            assert newest.step == 1
            checkpoint.save(state(3), tmp_path / kind, step=3)
        return said

    first, second = run_ranks(RANKS, saves)
    assert first is not None
    assert second is not None
    assert {key: words for key, words in first.items() if "both" in key} == {
        key: words for key, words in second.items() if "both" in key
    }
    check(tmp_path / "both", 3, 1)
    for kind in ("both", "host0", "host1"):
        assert len(os.listdir(tmp_path / kind)) == 4  # .job, .lock and two checkpoints


def test_failed_copy_of_one_rank_is_raised_on_all_ranks(tmp_path: Path) -> None:
    """Memory for the copy is missing: all ranks raise the error, and no rank waits for the others."""

    def saves() -> str:
        if dist.get_rank() == 1:

            def no_memory(nbytes: int) -> Any:
                raise OSError(errno.ENOMEM, "Cannot allocate memory")

            background._prefaulted, real = no_memory, background._prefaulted
        saving = checkpoint.save_async(state(1), tmp_path, step=1)
        with pytest.raises(CheckpointError) as caught:
            saving.wait(60)
        if dist.get_rank() == 1:
            background._prefaulted = real
        checkpoint.save_async(state(2), tmp_path, step=2).wait(60)
        return str(caught.value)

    first, second = run_ranks(RANKS, saves)
    assert first == second
    assert first is not None
    assert "step 1 was not saved" in first
    assert "rank 1 (" in first
    assert "Cannot allocate memory" in first
    check(tmp_path, 2)


# Delays.


def test_checkpoint_is_not_visible_before_a_slow_fsync_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An fsync that blocks: the program continues, and the checkpoint exists only after fsync has returned."""
    begun, end = threading.Event(), threading.Event()
    checkpoint.save(state(1), tmp_path, step=1)
    real = os.fsync

    def slow(fd: int) -> None:
        begun.set()
        end.wait()
        real(fd)

    monkeypatch.setattr(os, "fsync", slow)
    saving = checkpoint.save_async(state(2), tmp_path, step=2)
    assert begun.wait(60)
    assert not saving.done()
    with pytest.raises(dist.TimeoutError, match="step 2 was not saved"):
        saving.wait(0.05)
    assert [one.step for one in checkpoint.list(tmp_path)] == [1]  # load would block until the save finishes
    assert checkpoint.verify(tmp_path) == []
    end.set()
    saving.wait(60)
    check(tmp_path, 2, 1)


# Removed folders and read-only folders.


@pytest.mark.parametrize("moment", ["between saves", "after the parts", "before the rename"])
def test_save_reports_a_removed_folder(tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a" / "checkpoints"
    checkpoint.save(state(1), folder, step=1)
    if moment == "between saves":
        shutil.rmtree(folder.parent)
    else:
        name = {"after the parts": "complete", "before the rename": "new_name"}[moment]
        real = getattr(folders, name)

        def removes(*arguments: Any) -> Any:
            shutil.rmtree(folder.parent)
            return real(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(folders, name, removes)
            with pytest.raises(CheckpointError, match=r"step 2 was not saved into .*: rank 0 .*No such file"):
                checkpoint.save(state(2), folder, step=2)
        assert not folder.exists()
    checkpoint.save(state(3), folder, step=3)
    check(folder, 3)


PLAIN_USER = """
import os, sys
from allranks import checkpoint
os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    checkpoint.save({"x": 1}, sys.argv[1], step=2)
except checkpoint.CheckpointError as error:
    print(error)
"""


def test_save_without_write_permission_reports_the_cause() -> None:
    if os.getuid():
        pytest.skip("changing the user requires root")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "checkpoints"
        checkpoint.save(state(1), folder, step=1)
        Path(name).chmod(0o755)
        folder.chmod(0o755)
        done = subprocess.run(
            [sys.executable, "-c", PLAIN_USER, folder], capture_output=True, text=True, check=True, cwd="/"
        )
        assert f"step 2 was not saved into {folder}: rank 0" in done.stdout
        assert "Permission denied" in done.stdout
        check(folder, 1)


# Failures whose save the program has not waited for.


def test_failure_in_the_background_is_raised_by_the_next_call(tmp_path: Path) -> None:
    checkpoint.save(state(1), tmp_path, step=1)
    calls: list[Callable[[], Any]] = [
        lambda: checkpoint.latest(tmp_path),
        lambda: checkpoint.list(tmp_path),
        lambda: checkpoint.verify(tmp_path),
        lambda: checkpoint.merge(tmp_path, into=tmp_path / "x"),
        lambda: checkpoint.load(tmp_path),
        lambda: checkpoint.StorageWriter(tmp_path, step=3).set_up_storage_writer(True),
    ]
    for call in calls:
        with failing(os, "fsync", errno.EIO, lambda *_: True):
            saving = checkpoint.save_async(state(2), tmp_path, step=2)
            assert saving._ended.wait(60)
        with pytest.raises(CheckpointError, match=r"step 2 was not saved into .*Input/output error"):
            call()
        if call is not calls[3]:
            call()  # succeeds: the error is raised only once


AT_THE_END = """
import atexit, errno, os, sys
atexit.register(lambda: print("handlers run", flush=True))
from allranks import checkpoint
def fsync(fd):
    raise OSError(errno.EIO, "Input/output error")
os.fsync = fsync
saving = checkpoint.save_async({"x": 1}, sys.argv[1], step=7)
if sys.argv[2] == "waits":
    try:
        saving.wait()
    except checkpoint.CheckpointError:
        pass
"""


@pytest.mark.parametrize(("how", "code"), [("does not wait", 1), ("waits", 0)])
def test_failure_in_the_background_at_exit_sets_the_exit_code(tmp_path: Path, how: str, code: int) -> None:
    done = warm.run([sys.executable, "-c", AT_THE_END, tmp_path, how])
    assert done.returncode == code
    assert done.stdout == "handlers run\n"
    words = f"allranks: checkpoint.save: step 7 was not saved into {tmp_path}: rank 0"
    assert (words in done.stderr, "Input/output error" in done.stderr) == (code == 1, code == 1)
