"""Full disks and exhausted quotas: small file systems that are mounted for the test.

Saves use allranks calls and torch's distributed checkpoint. All ranks report the cause, the previous checkpoint still
loads, no other files remain, and a smaller checkpoint can be saved.

If mkfs.ext4 or btrfs is missing, its case is skipped; with ALLRANKS_TEST_ALL=1, as in CI, it fails. If the kernel lacks
a feature (loop devices, btrfs), the case is always skipped.
"""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as td
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from allranks import CheckpointError, checkpoint
from allranks.testing import run_ranks
from support.worlds import world

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system requires root")

RANKS = 2
ROOM = 8 << 20  # bytes, approximately
DISKS = {
    "tmpfs": [["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "none", "{disk}"]],
    "ext4": [["mkfs.ext4", "-q", "-F", "{image}", "16m"], ["mount", "-o", "loop", "{image}", "{disk}"]],
    "quota": [
        ["truncate", "-s", "128m", "{image}"],
        ["mkfs.btrfs", "-q", "{image}"],
        ["mount", "-o", "loop", "{image}", "{disk}"],
        ["btrfs", "quota", "enable", "{disk}"],
        ["btrfs", "qgroup", "limit", str(ROOM), "{disk}"],
    ],
}


@pytest.fixture(params=list(DISKS))
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Folder on a small file system; "quota": on a larger one with a quota of that size."""
    found = tmp_path / "disk"
    found.mkdir()
    try:
        for command in DISKS[request.param]:
            words = [word.format(disk=found, image=tmp_path / "image") for word in command]
            if shutil.which(words[0]) is None:
                missing = f"there is no {words[0]}: apt-get install e2fsprogs btrfs-progs"
                pytest.fail(missing) if os.environ.get("ALLRANKS_TEST_ALL") == "1" else pytest.skip(missing)
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"{' '.join(words)}: {done.stderr.strip()}")
        yield found / request.param
    finally:
        if found.is_mount():
            subprocess.run(["umount", found], check=True)


def _state(numbers: int) -> dict[str, Any]:
    """State of which each rank writes a part; 4 bytes per number."""
    return {"x": distribute_tensor(torch.arange(float(numbers)), init_device_mesh("cpu", (RANKS,)), [Shard(0)])}


def _saves(disk: Path) -> list[str]:
    """Save until the disk is full. Return the texts of the errors."""
    small, large = 200_000, 8_000_000
    ours, theirs = disk / "ours", disk / "theirs"

    def save_by_dcp(numbers: int, step: int) -> None:
        dcp.save(_state(numbers), storage_writer=checkpoint.StorageWriter(theirs, step=step, keep=1))

    checkpoint.save(_state(small), ours, step=1, keep=1)
    save_by_dcp(small, 1)
    with pytest.raises(CheckpointError) as own:
        checkpoint.save(_state(large), ours, step=2, keep=1)
    with pytest.raises(CheckpointError) as background:
        checkpoint.save_async(_state(large), ours, step=2, keep=1).wait(120)
    with pytest.raises(CheckpointException) as dcps:
        save_by_dcp(large, 2)
    said = [str(error.value) for error in (own, background, dcps)]
    del own, background, dcps
    gc.collect()
    td.barrier()
    for folder in (ours, theirs):
        assert sorted(os.listdir(folder)) == [".job", ".lock", "step-0000000001"]
        assert torch.equal(checkpoint.load(folder)["x"], torch.arange(float(small)))
    td.barrier()
    checkpoint.save(_state(small), ours, step=3, keep=1)
    save_by_dcp(small, 3)
    return said


def test_full_disk_is_reported_and_smaller_save_succeeds(disk: Path, tmp_path: Path) -> None:
    def on_rank() -> list[str]:
        torch.set_num_threads(1)
        with world("allranks", tmp_path / "meeting"):
            return _saves(disk)

    first, second = run_ranks(RANKS, on_rank, init=False, timeout_s=300)
    assert first == second
    assert first is not None
    cause = "Disk quota exceeded" if disk.name == "quota" else "No space left on device"
    for words in first:
        assert "step 2 was not saved into" in words
        assert cause in words
        assert "Earlier checkpoints are unchanged" in words
    for name in ("ours", "theirs"):
        assert [info.step for info in checkpoint.list(disk / name)] == [3]
        assert checkpoint.verify(disk / name) == []
