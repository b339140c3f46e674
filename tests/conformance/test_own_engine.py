"""An engine of an installed package: the example engine of docs/extending.md gives the same results as torch's gloo.

Its ranks are real processes, and it sends bytes over its own sockets. A world on this engine can also create groups on
other engines.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_programs import difference, steps, tries

import allranks as dist
from allranks.testing import run_ranks
from support.own_engine import installed
from support.workers import Workers


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    where = installed(tmp_path_factory.mktemp("package"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(where)  # run_ranks passes this path to its ranks
        yield where


def on_mine(fn: Callable[..., Any], *args: Any) -> Any:
    dist.init_process_group("mine", timeout=60)
    result = fn(*args)
    dist.destroy_process_group()
    return result


def ranks_on_mine(ranks: int, fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    return run_ranks(ranks, on_mine, fn, *args, init=False, **options)


@pytest.fixture(scope="module", params=[2, 3])
def workers(request: pytest.FixtureRequest, site: Path) -> Iterator[tuple[int, Workers]]:
    made = Workers(request.param, difference, ranks_on_mine)
    yield request.param, made
    made.close()


@tries(60)
@given(data=st.data())
def test_equal_values(workers: tuple[int, Workers], data: st.DataObject) -> None:
    ranks, asked = workers
    program = data.draw(st.lists(steps(ranks), min_size=1, max_size=8))
    assert asked.ask(("mine", program)) == [""] * ranks


def test_base_class_provides_reductions_messages_and_groups(site: Path) -> None:
    """Compare ops and dtypes, also those that gloo lacks, with the native engine; check messages and groups."""

    def body() -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        assert (dist.get_backend(), dist.get_backend_config()) == ("mine", "cpu:mine")
        assert dist.is_backend_available("mine")
        native = dist.new_group(backend="native")
        generator = torch.Generator().manual_seed(rank)
        for dtype in (
            torch.float32,
            torch.bfloat16,
            torch.int16,
            torch.int64,
            torch.uint8,
            torch.bool,
            torch.complex64,
        ):
            for op in dist.ReduceOp:
                mine = torch.randint(0, 5, (7,), generator=generator).to(dtype)
                theirs = mine.clone()
                try:
                    dist.all_reduce(theirs, op, group=native)
                except dist.UsageError as error:
                    with pytest.raises(dist.UsageError, match=str(error).partition(" ")[0]):
                        dist.all_reduce(mine, op)
                    continue
                dist.all_reduce(mine, op)
                assert torch.equal(mine, theirs), (dtype, op)
        scaled = torch.tensor([rank + 1.0, 1.0])
        dist.all_reduce(scaled, dist.premul_sum(2.0))
        assert scaled.tolist() == [size * (size + 1), 2 * size]
        if rank == 0:
            got = torch.zeros(1)
            sources = {dist.recv(got, tag=5) for _ in range(size - 1)}
            assert sources == set(range(1, size))
        else:
            dist.send(torch.ones(1), 0, tag=5)
        pair = dist.new_group([0, 1], backend="mine")
        alone = dist.new_group([size - 1], backend="mine")
        for group in (pair, alone):
            if dist.get_rank(group) >= 0:
                dist.all_reduce(ones := torch.ones(2), group=group)
                assert ones.tolist() == [dist.get_world_size(group)] * 2
        dist.barrier()

    ranks_on_mine(3, body)


def test_mismatched_calls_raise_in_debug_mode(site: Path) -> None:
    def body() -> None:
        with pytest.raises(dist.MismatchError, match=r"rank 0 called all_reduce of 3 x float32, SUM; rank 1 called"):
            dist.all_reduce(torch.ones(3 + dist.get_rank()))

    ranks_on_mine(2, body, env={"ALLRANKS_DEBUG": "1"})


def test_calls_raise_peer_lost_error_after_a_peer_destroys_its_group(site: Path) -> None:
    def body() -> None:
        dist.init_process_group("mine", timeout=60)
        if dist.get_rank() == 0:
            where = r"recv on group 'world' \(rank 0 of 2\): rank 1 has left"
            with pytest.raises(dist.PeerLostError, match=where) as caught:
                dist.recv(torch.zeros(1), 1)
            assert caught.value.rank == 1
            where = r"all_reduce on group 'world' \(rank 0 of 2\): rank 1 has left"
            with pytest.raises(dist.PeerLostError, match=where):
                dist.all_reduce(torch.zeros(1))
        dist.destroy_process_group()

    run_ranks(2, body, init=False)


def test_call_times_out_if_a_peer_does_not_make_it(site: Path) -> None:
    def body() -> None:
        late = dist.new_group(backend="mine", timeout=0.3, group_desc="late")
        if dist.get_rank() == 0:
            where = r"all_reduce on group 'late' \(rank 0 of 2\): another rank did not call within 0.3 s"
            with pytest.raises(dist.TimeoutError, match=where):
                dist.all_reduce(torch.ones(1), group=late)
            with pytest.raises(dist.AllranksError, match="any more: all_reduce was abandoned before it completed"):
                dist.all_reduce(torch.ones(1), group=late)
        else:
            with pytest.raises(dist.TimeoutError, match=r"recv .*another rank did not call within 0.3 s"):
                dist.recv(torch.zeros(1), 0, group=late)
        dist.barrier()

    ranks_on_mine(2, body)


def test_launcher_accepts_the_engine_as_backend(site: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import torch, allranks as dist\n"
        "dist.init_process_group()\n"
        "dist.all_reduce(total := torch.ones(1))\n"
        "print(dist.get_backend(), total.item())\n"
    )
    command = [sys.executable, "-m", "allranks", "run", "-n", "2", "--backend", "mine", str(program)]
    environ = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert sorted(done.stdout.splitlines()) == ["[0] mine 2.0", "[1] mine 2.0"]
