"""Checkpoints of ranks without a common folder: the ranks that share a folder store one share.

In these tests, a folder represents a host: each rank passes the folder of its host.
tests/hosts/test_checkpoint_hosts.py tests hosts with separate disks and equal paths.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import allranks as dist
from allranks import AllranksError, CheckpointError, UsageError, checkpoint
from allranks.checkpoint import folders, own_folders, remote_files
from allranks.checkpoint.participants import single_process
from allranks.testing import run_ranks
from support.worlds import world

RANKS = 4
TWO = (0, 0, 1, 1)  # the hosts of four ranks


def model_and_optimizer(step: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(step)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape)
    optimizer.step()
    return model, optimizer


def state(rank: int, step: int, fill: bool = False) -> dict[str, Any]:
    """Return the state of one of four ranks; with ``fill``, a state to load into."""
    model, optimizer = model_and_optimizer(step + 100 * fill)
    generator = torch.Generator().manual_seed(step)
    found: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "large": torch.randn(1_500_000, generator=generator),
        "small": {f"t{n}": torch.randn(7, generator=generator) for n in range(20)},
        "mine": torch.full((5,), float(step * 10 + rank)),
        "shard": checkpoint.Shard(torch.arange(6.0).reshape(2, 3) + 6 * rank + step, (2 * rank, 0), (2 * RANKS, 3)),
        "step": step,
        "rank": rank,
    }
    if fill:
        for tensor in (found["large"], *found["small"].values(), found["mine"], found["shard"].tensor):
            tensor.zero_()
        found["step"] = found["rank"] = -1
    return found


def plain(found: dict[str, Any]) -> dict[str, Any]:
    model, optimizer, shard = found["model"], found["optimizer"], found["shard"]
    return {
        **found,
        "model": model if isinstance(model, dict) else model.state_dict(),
        "optimizer": optimizer if isinstance(optimizer, dict) else optimizer.state_dict(),
        "shard": shard if isinstance(shard, torch.Tensor) else shard.tensor,
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def check(found: dict[str, Any], rank: int, step: int) -> None:
    """Assert that a state equals the state that the rank has saved, with its own shard or with the whole tensor."""
    right, found = plain(state(rank, step)), plain(found)
    if found["shard"].shape != right["shard"].shape:
        right["shard"] = torch.cat([state(each, step)["shard"].tensor for each in range(RANKS)])
    assert same(found, right)


def on(root: Path, hosts: Sequence[int], body: Callable[[Path], Any], **more: Any) -> list[Any]:
    """Run ``body(folder)`` on ranks of these hosts."""
    return run_ranks(len(hosts), lambda: _quietly(body, root / f"host{hosts[dist.get_rank()]}"), **more)


def _quietly(body: Callable[[Path], Any], folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="checkpoint")
        return body(folder)


def saves(*steps: int, **more: Any) -> Callable[[Path], Any]:
    def body(folder: Path) -> list[str]:
        return [str(checkpoint.save(state(dist.get_rank(), step), folder, step=step, **more)) for step in steps]

    return body


def newest(folder: Path) -> Any:
    return checkpoint.latest(folder, group=dist.group.WORLD)


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2, saved by four ranks on two hosts."""
    root = tmp_path_factory.mktemp("two")
    on(root, TWO, saves(1, 2))
    return root


@pytest.fixture
def copy(two_hosts: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(two_hosts, tmp_path / "copy"))


def share(root: Path, host: int, step: int) -> Path:
    (found,) = (root / f"host{host}").glob(f"step-{step:010}-share-{host + 1}-of-*")
    return found


def flip_near_the_end(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-5, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


# Saving.


@pytest.mark.parametrize("how", ["save", "save_async"])
def test_each_host_keeps_a_share(tmp_path: Path, how: str) -> None:
    def body(folder: Path) -> None:
        rank = dist.get_rank()
        if how == "save":
            path = checkpoint.save(state(rank, 3), folder, step=3)
        else:
            path = checkpoint.save_async(state(rank, 3), folder, step=3).wait(60)
        assert path is not None
        assert path.parent == folder
        assert path.is_dir()

    on(tmp_path, TWO, body)
    for host, ranks in ((0, (0, 1)), (1, (2, 3))):
        path = share(tmp_path, host, 3)
        assert sorted(os.listdir(path)) == ["manifest.json", *(f"part-{rank:05}.safetensors" for rank in ranks)]
        assert sorted(os.listdir(path.parent)) == [".job", ".lock", path.name]
        (info,) = checkpoint.list(path.parent)
        assert (info.path, info.step, info.share, info.ranks) == (path, 3, (host + 1, 2), RANKS)
        assert checkpoint.verify(path) == checkpoint.verify(path.parent) == []
    assert share(tmp_path, 0, 3).name.rsplit("-")[-1] == share(tmp_path, 1, 3).name.rsplit("-")[-1]


def test_different_folders_are_reported_once(tmp_path: Path) -> None:
    def body() -> list[str]:
        rank = dist.get_rank()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in (1, 2):
                checkpoint.save({"x": 1}, tmp_path / f"host{TWO[rank]}", step=step)
        return [str(each.message) for each in caught]

    first, *others = run_ranks(RANKS, body)
    assert others == [[]] * 3
    assert first is not None
    (words,) = first
    assert "the ranks have 2 different folders" in words
    assert "ranks 0-1; ranks 2-3. Each folder gets a share" in words


def test_one_folder_under_several_paths_is_one_checkpoint(tmp_path: Path) -> None:
    """The paths differ, but they lead to the same folder."""
    (tmp_path / "folder").mkdir()
    for number in range(2):
        (tmp_path / f"host{number}").symlink_to("folder")
    on(tmp_path, TWO, saves(1))
    assert sorted(os.listdir(tmp_path / "folder")) == [".job", ".lock", "step-0000000001"]
    check(checkpoint.load(tmp_path / "host1"), 0, 1)


def test_ranks_that_share_a_folder_store_one_share(tmp_path: Path) -> None:
    """Ranks 1 and 3 share a folder."""
    on(tmp_path, (0, 1, 2, 1), saves(1))
    assert [info.share for host in (0, 1, 2) for info in checkpoint.list(tmp_path / f"host{host}")] == [
        (1, 3),
        (2, 3),
        (3, 3),
    ]
    on(tmp_path, (0, 1, 2, 1), lambda folder: check(checkpoint.load(newest(folder)), dist.get_rank(), 1))


def test_keep_and_keep_every_apply_to_shares(tmp_path: Path) -> None:
    on(tmp_path, TWO, saves(*range(1, 8), keep=2, keep_every=5))
    for host in range(2):
        assert [info.step for info in checkpoint.list(tmp_path / f"host{host}")] == [7, 6, 5]
        assert len(os.listdir(tmp_path / f"host{host}")) == 5


def test_save_of_an_existing_step_replaces_the_shares(tmp_path: Path) -> None:
    def body(folder: Path) -> Any:
        for value in (1, 2):
            checkpoint.save({"value": value, "rank": dist.get_rank()}, folder, step=1)
        return checkpoint.load(folder, group=dist.group.WORLD)

    found = on(tmp_path, TWO, body)
    assert found == [{"value": 2, "rank": rank} for rank in range(RANKS)]
    assert all(len(checkpoint.list(tmp_path / f"host{host}")) == 1 for host in range(2))


def test_inconsistent_visibility_of_folders_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 sees the marker files of both other ranks, which do not see those of each other."""

    def body() -> str:
        rank = dist.get_rank()
        if rank == 1:
            folders.has_marker = lambda folder, partial, number: True  # type: ignore[assignment]
        with pytest.raises(CheckpointError) as caught:
            checkpoint.save({"x": 1}, tmp_path / f"host{rank}", step=1)
        assert [name for name in os.listdir(tmp_path / f"host{rank}") if name not in (".job", ".lock")] == []
        return str(caught.value)

    for words in run_ranks(3, body):
        assert "rank 1 (" in str(words)
        assert "cannot determine which ranks share the folder" in str(words)
        assert "sees the marker files of ranks 1-2; expected those of rank 1" in str(words)


def test_shares_are_numbered_only_if_folders_differ() -> None:
    assert own_folders.share_numbers_of([0, 0, 2, 0, 2, 5]) == [1, 1, 2, 1, 2, 3]
    assert own_folders.share_numbers_of([0, 0]) == [0, 0]


# Loading.


@pytest.mark.parametrize(
    "hosts",
    [TWO, (1, 1, 0, 0), (0, 1), (2, 0, 1), (1, 2, 0, 2, 2), (0, 2, 2, 1, 2, 2, 2, 2)],
    ids=["the same", "exchanged", "fewer ranks", "rank 0 on a new host", "more hosts", "eight ranks"],
)
@pytest.mark.parametrize("into", [True, False], ids=["into", "new"])
def test_checkpoint_loads_on_any_assignment_of_ranks_to_hosts(
    two_hosts: Path, hosts: tuple[int, ...], into: bool
) -> None:
    """Host 2 has no files. Each rank receives the values of the same rank number, from any host."""

    def body(folder: Path) -> None:
        rank = dist.get_rank()
        last = newest(folder)
        assert (last.step, last.path.parent, last.path.exists()) == (2, folder, folder.exists())
        assert last.share == (hosts[rank] + 1 if hosts[rank] < 2 else 0, 2)
        saved_by = rank if rank < RANKS else 0
        if not into:
            check(checkpoint.load(last), saved_by, 2)
            return
        filled = state(saved_by, 2, fill=True)
        assert checkpoint.load(folder, into=filled) is filled
        check(filled, saved_by, 2)
        check(checkpoint.load(folder, into=state(saved_by, 1, fill=True), step=1), saved_by, 1)

    on(two_hosts, hosts, body)
    assert not (two_hosts / "host2").exists()


@pytest.mark.parametrize("hosts", [TWO, (0, 0, 0, 0)], ids=["two", "one"])
def test_shares_are_saved_and_loaded_without_pickle(tmp_path: Path, hosts: tuple[int, ...]) -> None:
    """The messages between the ranks do not use pickle."""

    def body(folder: Path) -> None:
        rank = dist.get_rank()
        checkpoint.save(state(rank, 1), folder, step=1)
        checkpoint.save_async(state(rank, 2), folder, step=2).wait(60)
        check(checkpoint.load(newest(folder)), rank, 2)

    on(tmp_path, hosts, body, env={"ALLRANKS_PICKLE": "0"})


def test_shares_load_with_a_group_of_torch(two_hosts: Path, tmp_path: Path) -> None:
    def body() -> None:
        with world("gloo", tmp_path / "meeting"):
            rank = torch.distributed.get_rank()
            folder = two_hosts / f"host{(1, 2, 0)[rank]}"
            group = torch.distributed.group.WORLD
            check(checkpoint.load(checkpoint.latest(folder, group=group)), rank, 2)

    run_ranks(3, body, init=False)


def test_transferred_chunks_have_a_bounded_size(two_hosts: Path) -> None:
    """Large tensors are transferred in chunks, and several small tensors in one message."""

    def body(folder: Path) -> list[int]:
        lengths = []
        real = remote_files.TransferRounds.fetch

        def fetch(self: Any, file: int, begin: int, end: int) -> Any:
            lengths.append(end - begin)
            return real(self, file, begin, end)

        remote_files.TransferRounds.fetch = fetch  # type: ignore[method-assign]
        remote_files._MAX_RANGE_BYTES = 4 << 20
        check(checkpoint.load(newest(folder)), dist.get_rank(), 2)
        return lengths

    *halves, all_of_it = on(two_hosts, (0, 1, 2), body)
    assert max(sum(halves, all_of_it)) <= 4 << 20
    assert len(all_of_it) > 2
    assert len(all_of_it) < 20  # for 50 tensors


def test_load_on_one_host_reports_the_missing_share(two_hosts: Path) -> None:
    folder = two_hosts / "host1"
    for call in (
        lambda: checkpoint.latest(folder),
        lambda: checkpoint.load(folder),
        lambda: checkpoint.load(folder, step=1),
    ):
        with pytest.raises(CheckpointError) as caught:
            call()
        for words in (
            f"{folder} has only share 2 of 2 of step",
            "missing: share 1 (written by ranks 0-1 on ",
            "allranks checkpoint merge FOLDER FOLDER... --into FOLDER",
        ):
            assert words in str(caught.value)
    with pytest.raises(CheckpointError, match="has only share 2 of 2"):
        checkpoint.load(share(two_hosts, 1, 2))


def test_all_shares_in_one_folder_load_without_a_group(copy: Path) -> None:
    """The share was copied manually."""
    shutil.move(share(copy, 1, 2), copy / "host0")
    last = checkpoint.latest(copy / "host0")
    assert last is not None
    assert last.step == 2
    check(checkpoint.load(copy / "host0"), 0, 2)
    on(copy, (2, 0), lambda folder: check(checkpoint.load(newest(folder)), dist.get_rank(), 2))


def test_newest_checkpoint_with_all_shares_is_selected(copy: Path) -> None:
    shutil.rmtree(share(copy, 1, 2))

    def body(folder: Path) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            last = newest(folder)
            assert last.step == 1
            check(checkpoint.load(folder, into=state(dist.get_rank(), 1, fill=True)), dist.get_rank(), 1)
        return [str(each.message) for each in caught]

    first, *others = on(copy, TWO, body)
    assert others == [[]] * 3
    assert len(first) == 2
    assert "step 2 is skipped: no rank has share 2 of 2 in its folder of checkpoints" in first[0]


def test_no_checkpoint_has_all_shares(copy: Path) -> None:
    shutil.rmtree(copy / "host1")

    def body(folder: Path) -> None:
        assert newest(folder) is None
        with pytest.raises(CheckpointError, match="no rank has share 2 of 2"):
            checkpoint.load(folder, group=dist.group.WORLD)
        with pytest.raises(CheckpointError, match="there is no complete checkpoint in"):
            checkpoint.load(folder.parent / "none", group=dist.group.WORLD)

    on(copy, TWO, body)


def test_complete_checkpoint_on_one_host_loads_on_all_ranks(tmp_path: Path) -> None:
    on(tmp_path, (0, 0, 0, 0), saves(1))
    on(tmp_path, (2, 0, 1), lambda folder: check(checkpoint.load(newest(folder)), dist.get_rank(), 1))


def test_complete_checkpoints_of_the_same_name_are_not_mixed(tmp_path: Path) -> None:
    """Each host has saved separately under the same names: all ranks receive rank 0's checkpoint."""
    for host in range(2):
        on(tmp_path, [host], lambda folder: checkpoint.save({"from": str(folder)}, folder, step=1))
    found = on(tmp_path, (0, 1), lambda folder: checkpoint.load(newest(folder)))
    assert found == [{"from": str(tmp_path / "host0")}] * 2


def test_load_error_of_one_rank_is_raised_on_all_ranks(two_hosts: Path) -> None:
    def body(folder: Path) -> str:
        rank = dist.get_rank()
        into = state(rank, 2, fill=True)
        if rank == 3:
            into["large"] = torch.zeros(3)
        with pytest.raises(UsageError) as caught:
            checkpoint.load(folder, into=into)
        return str(caught.value)

    *others, own = on(two_hosts, TWO, body)
    assert "tensor 'large' has shape [1500000]" in own
    assert all("checkpoint.load: rank 3 (" in words and "tensor 'large' has shape" in words for words in others)


def test_damage_on_another_host_is_named(copy: Path) -> None:
    flip_near_the_end(share(copy, 1, 2) / "part-00002.safetensors")

    def body(folder: Path) -> str:
        with pytest.raises(CheckpointError) as caught:
            checkpoint.load(newest(folder))
        return str(caught.value)

    for words in on(copy, (0, 2, 1), body):
        assert "part-00002.safetensors is damaged in bytes" in words
        assert "written by rank 2" in words


def test_rank_that_cannot_read_data_for_others_is_reported(copy: Path) -> None:
    def body(folder: Path) -> str:
        if dist.get_rank() == 1:

            def fail(*arguments: Any) -> None:
                raise OSError(5, "Input/output error")

            remote_files._fill = fail  # type: ignore[assignment]
        with pytest.raises(CheckpointError) as caught:
            checkpoint.load(newest(folder))
        return str(caught.value)

    for words in on(copy, (0, 1), body):
        assert "rank 1 (" in words
        assert "cannot be read: [Errno 5] Input/output error" in words


def test_checkpoint_with_a_truncated_share_is_skipped(copy: Path) -> None:
    path = share(copy, 1, 2) / "part-00002.safetensors"
    os.truncate(path, path.stat().st_size - 1)

    def body(folder: Path) -> None:
        assert newest(folder).step == 1
        with pytest.raises(CheckpointError, match=r"part-00002\.safetensors has .* bytes instead of"):
            checkpoint.load(folder, step=2)

    on(copy, TWO, body)


def test_ranks_that_request_different_checkpoints_are_refused(two_hosts: Path) -> None:
    def body(folder: Path) -> None:
        rank = dist.get_rank()
        named = share(two_hosts, rank, 1 + rank)
        with pytest.raises(CheckpointError, match="the ranks have requested different checkpoints"):
            checkpoint.load(named, group=dist.group.WORLD)
        check(checkpoint.load(share(two_hosts, rank, 1), group=dist.group.WORLD), rank, 1)

    on(two_hosts, (0, 1), body)


# Merging.


def test_merge(two_hosts: Path, tmp_path: Path) -> None:
    path = checkpoint.merge(two_hosts / "host0", two_hosts / "host1", into=tmp_path)
    assert path == tmp_path / "step-0000000002"
    assert checkpoint.verify(path) == []
    check(checkpoint.load(tmp_path), 0, 2)
    run_ranks(RANKS, lambda: check(checkpoint.load(tmp_path), dist.get_rank(), 2))
    (info,) = checkpoint.list(tmp_path)
    assert (info.share, info.ranks, info.nbytes) == (
        None,
        RANKS,
        sum(checkpoint.list(two_hosts / f"host{host}")[0].nbytes for host in range(2)),
    )
    other = checkpoint.merge(share(two_hosts, 1, 1), share(two_hosts, 0, 1), into=tmp_path, step=1)
    check(checkpoint.load(other), 0, 1)
    with pytest.raises(UsageError, match="a checkpoint of step 2 already exists"):
        checkpoint.merge(two_hosts / "host0", two_hosts / "host1", into=tmp_path)


def test_merge_into_the_folder_of_a_host(copy: Path) -> None:
    checkpoint.merge(copy / "host0", copy / "host1", into=copy / "host0")
    last = checkpoint.latest(copy / "host0")
    assert last is not None
    assert last.share is None
    check(checkpoint.load(copy / "host0"), 0, 2)
    on(copy, (1, 0), lambda folder: check(checkpoint.load(newest(folder)), dist.get_rank(), 2))


def test_merge_copies_files_if_links_fail(two_hosts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    path = checkpoint.merge(two_hosts / "host0", two_hosts / "host1", into=tmp_path)
    assert checkpoint.verify(path) == []
    assert (path / "part-00000.safetensors").stat().st_nlink == 1


def test_merge_refuses_incomplete_and_mismatched_shares(copy: Path, tmp_path: Path) -> None:
    zero, one, into = copy / "host0", copy / "host1", tmp_path / "into"
    for words, call in (
        ("step 2 is incomplete in", lambda: checkpoint.merge(zero, into=into)),
        ("missing: share 2 of 2 (written by ranks 2-3 on", lambda: checkpoint.merge(zero, into=into)),
        ("shares of different saves", lambda: checkpoint.merge(share(copy, 0, 1), share(copy, 1, 2), into=into)),
        ("there is no share of step 9", lambda: checkpoint.merge(zero, one, into=into, step=9)),
        ("there is no share in", lambda: checkpoint.merge(tmp_path, into=into)),
    ):
        with pytest.raises((UsageError, CheckpointError)) as caught:
            call()
        assert words in str(caught.value)
    with pytest.raises(FileNotFoundError):
        checkpoint.merge(zero, copy / "host7", into=into)
    assert not into.exists()
    flip_near_the_end(share(copy, 1, 2) / "part-00003.safetensors")
    shutil.rmtree(share(copy, 1, 1))
    (copy / "host1" / share(copy, 0, 1).name.replace("share-1", "share-2")).mkdir()
    with pytest.raises(CheckpointError, match=r"checkpoint\.merge: step 2: .*part-00003\.safetensors"):
        checkpoint.merge(zero, one, into=into)
    assert [name for name in os.listdir(into) if name not in (".job", ".lock")] == []


def test_merge_reports_the_newest_complete_step(copy: Path, tmp_path: Path) -> None:
    shutil.rmtree(share(copy, 1, 2))
    with pytest.raises(CheckpointError, match=r"missing: share 2 of 2 .*\n  Pass .* All shares of step 1.*step=1"):
        checkpoint.merge(copy / "host0", copy / "host1", into=tmp_path / "into")
    check(checkpoint.load(checkpoint.merge(copy / "host0", copy / "host1", into=tmp_path / "into", step=1)), 0, 1)


# Kills and failures.

MOMENTS = ["before the vote", "before its manifest", "before its rename", "after its rename", "before the old one goes"]
KILLS = [(moment, victim) for moment in MOMENTS for victim in ((0, 1, 2, 3) if moment == MOMENTS[0] else (0, 2))]


def _die_at(moment: str) -> None:
    """Kill this process at a given moment of its next save."""

    def die(*arguments: Any, **more: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    def die_after(real: Callable[..., Any]) -> Callable[..., Any]:
        def act(*arguments: Any, **more: Any) -> None:
            real(*arguments, **more)
            die()

        return act

    match moment:
        case "before the vote":
            from allranks.checkpoint import parts

            parts.write_part = die_after(parts.write_part)
        case "before its manifest":
            folders.complete = die
        case "before its rename":
            folders.new_name = die
        case "after its rename":
            folders.complete = die_after(folders.complete)
        case "before the old one goes":
            folders.tidy = die


@pytest.mark.parametrize(("moment", "victim"), KILLS)
def test_newest_common_checkpoint_is_complete_after_a_kill(tmp_path: Path, moment: str, victim: int) -> None:
    """Check that the newest common checkpoint is the previous or the new one, and complete.

    If save returned on any rank, it is the new one.
    """

    def body(folder: Path) -> bool:
        rank = dist.get_rank()
        checkpoint.save(state(rank, 1), folder, step=1, keep=1)
        if rank == victim:
            _die_at(moment)
        with contextlib.suppress(AllranksError):
            checkpoint.save(state(rank, 2), folder, step=2, keep=1)
            return True
        return False

    was_told = any(on(tmp_path, TWO, body, may_die=[victim]))

    def resumes(folder: Path) -> int:
        rank = dist.get_rank()
        last = newest(folder)
        check(checkpoint.load(last), rank, last.step)
        checkpoint.save(state(rank, 3), folder, step=3, keep=1)
        check(checkpoint.load(newest(folder)), rank, 3)
        return int(last.step)

    (step,) = set(on(tmp_path, TWO, resumes))
    assert step == 2 if was_told or moment == "before the old one goes" else step in (1, 2)
    for host in range(2):
        assert sorted(os.listdir(tmp_path / f"host{host}")) == [".job", ".lock", share(tmp_path, host, 3).name]


def test_tidy_keeps_shares_of_the_same_save(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"step-0000000003-share-{number}-of-2-00112233445566aa").mkdir()
    (tmp_path / "step-0000000003-share-1-of-2-ff112233445566aa").mkdir()
    (tmp_path / "step-0000000003").mkdir()
    folders.tidy(tmp_path / "step-0000000003-share-2-of-2-00112233445566aa", None, None)
    assert [one.share.number for one in folders.find(tmp_path) if one.share is not None] == [2, 1]
    assert len(folders.find(tmp_path)) == 2


@pytest.mark.parametrize("victim", [0, 2])
def test_failed_commit_is_undone_on_all_hosts(tmp_path: Path, victim: int) -> None:
    def body(folder: Path) -> str:
        rank = dist.get_rank()
        checkpoint.save(state(rank, 1), folder, step=1)
        if rank == victim:

            def fail(*arguments: Any) -> None:
                raise OSError(28, "No space left on device")

            folders.complete, real = fail, folders.complete  # type: ignore[assignment]
        with pytest.raises(CheckpointError) as caught:
            checkpoint.save(state(rank, 2), folder, step=2)
        if rank == victim:
            folders.complete = real
        assert newest(folder).step == 1
        checkpoint.save(state(rank, 3), folder, step=3)
        return str(caught.value)

    said = set(on(tmp_path, TWO, body))
    assert len(said) == 2  # each host reports the path of its own folder
    assert all(f"rank {victim} (" in words and "No space left on device" in words for words in said)
    for host in range(2):
        assert [info.step for info in checkpoint.list(tmp_path / f"host{host}")] == [3, 1]


def test_partial_shares_are_removed_by_the_next_save(tmp_path: Path) -> None:
    for name in (".step-0000000009.0011aabb0011aabb.partial", ".trash.0011aabb.partial"):
        (tmp_path / "host1" / name).mkdir(parents=True)
    (tmp_path / "host1" / ".step-0000000009.0011aabb0011aabb.3.mark").touch()
    on(tmp_path, TWO, saves(1))
    assert sorted(os.listdir(tmp_path / "host1")) == [".job", ".lock", share(tmp_path, 1, 1).name]


def test_save_is_refused_if_another_job_uses_one_of_the_folders(tmp_path: Path) -> None:
    def body(folder: Path) -> str:
        with pytest.raises(UsageError) as caught:
            checkpoint.save({"x": 1}, folder, step=1)
        return str(caught.value)

    (tmp_path / "host1").mkdir()
    with folders.hold_folder(tmp_path / "host1", "the other"):
        said = on(tmp_path, TWO, body)
    assert all(f"pid {os.getpid()}, run 'the other', since " in words for words in said)
    assert all(f"saves into {tmp_path / 'host1'} until its" in words for words in said)
    assert [name for name in os.listdir(tmp_path / "host0") if name not in (".job", ".lock")] == []


def test_single_process_does_not_send() -> None:
    participants = single_process()
    assert participants.exchange(7, int) == [7]
    assert participants.duplicate(lambda: None) is participants
    with pytest.raises(AssertionError, match="cannot send"):
        participants.send(torch.zeros(1), 0)
    with pytest.raises(AssertionError, match="cannot receive"):
        participants.receive(torch.zeros(1), 0)
