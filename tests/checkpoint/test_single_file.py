"""checkpoint.save into one file: the file contains the complete new state or stays unchanged."""

import errno
import os
import pickle
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from allranks import checkpoint
from allranks._base.errors import AllranksError, CheckpointError, UsageError
from allranks.checkpoint import single_file


def run_python(program, *args, timeout_s=100):
    command = [sys.executable, "-c", program, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


def test_saved_state_is_loaded(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "history": [{"loss": 0.5}]}
    checkpoint.save(saved, tmp_path / "c.pt")
    loaded = checkpoint.load(tmp_path / "c.pt")
    torch.testing.assert_close(loaded, saved, rtol=0, atol=0)
    assert os.listdir(tmp_path) == ["c.pt"]


def test_relative_path_and_default_permissions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoint.save([1], "c.pt")
    assert checkpoint.load("c.pt") == [1]
    Path("other").write_text("")
    assert stat.S_IMODE(os.stat("c.pt").st_mode) == stat.S_IMODE(os.stat("other").st_mode)


def test_symbolic_link_is_followed_and_kept(tmp_path):
    (tmp_path / "latest.pt").symlink_to("epoch3.pt")
    checkpoint.save([3], tmp_path / "latest.pt")
    assert (tmp_path / "latest.pt").is_symlink()
    assert checkpoint.load(tmp_path / "epoch3.pt") == [3]


# Forked children save objects whose parts all contain the same number, and are killed at random moments. The parent
# checks the file after each kill.
KILLER = """
import os, random, signal, sys, time
import torch
from allranks import checkpoint

folder, seed = sys.argv[1], int(sys.argv[2])
random.seed(seed)
path = os.path.join(folder, "c.pt")
torch.set_num_threads(1)
last, during = -1, 0
for round in range(20):
    start = last + 1
    child = os.fork()
    if child == 0:
        for number in range(start, start + 10_000):
            checkpoint.save({"number": number, "parts": [torch.full((200_000,), number) for _ in range(4)]}, path)
        os._exit(1)
    while not os.path.exists(path):
        time.sleep(0.001)
    time.sleep(random.uniform(0.0, 0.1))
    os.kill(child, signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    loaded = checkpoint.load(path)
    assert all((part == loaded["number"]).all() for part in loaded["parts"]), "torn"
    assert loaded["number"] >= last, "older than before"
    last = loaded["number"]
    litter = [f for f in os.listdir(folder) if f != "c.pt"]
    assert len(litter) <= 1, litter
    during += len(litter)
checkpoint.save({"number": -1}, path)
assert os.listdir(folder) == ["c.pt"], os.listdir(folder)
print(last, during)
"""


def test_kill_at_any_moment_leaves_a_complete_checkpoint(tmp_path):
    result = run_python(KILLER, tmp_path, 0)
    assert result.returncode == 0, result.stderr
    saves, killed_during = map(int, result.stdout.split())
    # Otherwise no kill was during a save.
    assert saves > 0
    assert killed_during > 0


def test_temporary_file_of_a_running_save_is_kept(tmp_path):
    descriptor, temporary = single_file._create_locked(str(tmp_path), "c.pt")
    try:
        checkpoint.save([1], tmp_path / "c.pt")
        assert sorted(os.listdir(tmp_path)) == sorted(["c.pt", os.path.basename(temporary)])
    finally:
        os.close(descriptor)
    checkpoint.save([2], tmp_path / "c.pt")
    assert os.listdir(tmp_path) == ["c.pt"]


def test_unrelated_files_are_kept(tmp_path):
    others = [".cc.pt.1-0123abcd.tmp", "c.pt.tmp", ".c.pt.bak", ".c.pt.1-0123abcd.tmp.old"]
    for name in others:
        (tmp_path / name).write_text("mine")
    checkpoint.save([1], tmp_path / "c.pt")
    assert sorted(os.listdir(tmp_path)) == sorted(["c.pt", *others])


FULL = """
import resource, signal, sys
import torch
from allranks import checkpoint

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    checkpoint.save({"big": [torch.ones(1000, 1000) for _ in range(3)]}, sys.argv[1])
except OSError as error:
    print(error.errno, error)
"""


# The limit is reached in the first header, in a small record, in the middle of a tensor, and near the end.
@pytest.mark.parametrize("limit", [0, 10, 500, 1_000_000, 12_000_000])
def test_full_disk(tmp_path, limit):
    path = tmp_path / "c.pt"
    checkpoint.save(["old"], path)
    result = run_python(FULL, path, limit)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"{errno.EFBIG} "), (result.stdout, result.stderr)
    assert str(path) in result.stdout
    assert "unchanged" in result.stdout
    assert checkpoint.load(path) == ["old"]
    assert os.listdir(tmp_path) == ["c.pt"]


def test_object_that_cannot_be_pickled_leaves_the_file_unchanged(tmp_path):
    path = tmp_path / "c.pt"
    checkpoint.save(["old"], path)
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        checkpoint.save({"a": torch.ones(3), "b": lambda: 0}, path)
    assert checkpoint.load(path) == ["old"]
    assert os.listdir(tmp_path) == ["c.pt"]


def test_missing_folder_is_reported(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"not saved.*nowhere/c\.pt"):
        checkpoint.save([1], tmp_path / "nowhere" / "c.pt")


def test_folders_and_pipes_are_not_replaced(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "pipe"):
        with pytest.raises(UsageError, match=name):
            checkpoint.save([1], tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["folder", "pipe"]


def test_load_refuses_code_by_default(tmp_path):
    path = tmp_path / "c.pt"
    checkpoint.save({"path": Path("x")}, path)
    with pytest.raises(pickle.UnpicklingError):
        checkpoint.load(path)
    assert checkpoint.load(path, weights_only=False) == {"path": Path("x")}
    with pytest.raises(FileNotFoundError):
        checkpoint.load(tmp_path / "none.pt")


def test_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(AllranksError, match=r"checkpoint\.pt is damaged or not a checkpoint \(16 bytes\)"):
        checkpoint.load(path)


def test_archive_that_declares_several_disks_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    torch.save({"w": torch.ones(3)}, path)
    content = bytearray(path.read_bytes())
    place = content.index(b"PK\x06\x07")  # torch's record with the number of disks
    content[place + 16] = 2
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.load(path)
