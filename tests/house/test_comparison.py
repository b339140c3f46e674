"""The table of README.md compares allranks with torch.distributed on gloo. These tests run the same cases on both."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as td

import allranks as dist
from allranks.testing import run_ranks

LIMIT = timedelta(seconds=6)  # also for the connections of the group on a busy machine


def on_gloo(path: str) -> int:
    """Create torch's default group on gloo. Return the rank."""
    rank = int(os.environ["RANK"])
    td.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2, timeout=LIMIT)
    return rank


def test_different_calls_give_wrong_numbers_on_gloo_and_an_error_on_allranks(tmp_path: Path) -> None:
    def gloo(path: str) -> list[float]:
        rank = on_gloo(path)
        tensor = torch.ones(4) if rank == 0 else torch.ones(4, dtype=torch.int32)
        td.all_reduce(tensor)
        return tensor.tolist()

    def allranks() -> list[float]:
        tensor = torch.ones(4) if dist.get_rank() == 0 else torch.ones(4, dtype=torch.int32)
        try:
            dist.all_reduce(tensor)
        except dist.MismatchError:
            return tensor.tolist()
        raise AssertionError("no MismatchError")

    assert [2.0] * 4 not in run_ranks(2, gloo, str(tmp_path / "meet"), init=False)
    assert run_ranks(2, allranks) == [[1.0] * 4, [1] * 4]


def test_error_about_a_late_rank_names_it_on_allranks_only(tmp_path: Path) -> None:
    def gloo(path: str, done: str) -> str:
        if on_gloo(path) == 1:
            return wait_for(done)
        try:
            td.all_reduce(torch.ones(4))
        except RuntimeError as error:
            Path(done).touch()
            return str(error)
        raise AssertionError("no error")

    def allranks(done: str) -> str:
        group = dist.new_group(timeout=LIMIT)
        if dist.get_rank() == 1:
            return wait_for(done)
        try:
            dist.all_reduce(torch.ones(4), group=group)
        except dist.TimeoutError as error:
            Path(done).touch()
            return str(error)
        raise AssertionError("no error")

    def wait_for(done: str) -> str:
        while not Path(done).exists():
            time.sleep(0.01)
        return ""

    of_gloo, _ = run_ranks(2, gloo, str(tmp_path / "meet"), str(tmp_path / "gloo"), init=False)
    of_allranks, _ = run_ranks(2, allranks, str(tmp_path / "allranks"))
    assert of_gloo
    assert "rank 1" not in of_gloo
    assert of_allranks
    assert "rank 1" in of_allranks


def test_ranks_that_both_send_first_hang_on_gloo_and_continue_on_allranks(tmp_path: Path) -> None:
    def gloo(path: str) -> str:
        rank = on_gloo(path)
        try:
            td.send(torch.ones(4), 1 - rank)
        except RuntimeError as error:
            return str(error)
        raise AssertionError("send has returned without a recv")

    def allranks() -> float:
        other = 1 - dist.get_rank()
        dist.send(torch.full((4,), float(dist.get_rank())), other)
        dist.recv(got := torch.empty(4), other)
        return got[0].item()

    assert any(text and "Timed out" in text for text in run_ranks(2, gloo, str(tmp_path / "meet"), init=False))
    assert run_ranks(2, allranks) == [1.0, 0.0]
