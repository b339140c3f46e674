"""The thirteen kinds of mismatch between the calls of ranks.

Each raises an error on every rank that can detect it, with the right ranks and call sites. Twelve kinds are always
detected, the thirteenth only in debug mode.
"""

import re
import time
from collections.abc import Callable

import pytest
import torch

import allranks as dist
from allranks.testing import run_ranks

Case = Callable[[int, bool], "dist.Work | None"]


def ones(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(count, dtype=dtype)


def barrier(rank: int, async_op: bool) -> "dist.Work | None":
    return dist.barrier(async_op=async_op) if rank == 1 else dist.all_reduce(ones(4), async_op=async_op)


# The call of each of three ranks, and a part of the error. Rank 1 differs from the other ranks.
COLLECTIVES: dict[str, tuple[Case, str]] = {
    "element count": (
        lambda rank, a: dist.all_reduce(ones(8 if rank == 1 else 4), async_op=a),
        r"ranks 0, 2 called all_reduce\(4 x float32, SUM\), rank 1 called all_reduce\(8 x float32, SUM\)",
    ),
    "dtype f32/i32": (
        lambda rank, a: dist.all_reduce(ones(4, torch.int32 if rank == 1 else torch.float32), async_op=a),
        r"ranks 0, 2 called all_reduce\(4 x float32, SUM\), rank 1 called all_reduce\(4 x int32, SUM\)",
    ),
    "dtype f32/f64": (
        lambda rank, a: dist.broadcast(ones(4, torch.float64 if rank == 1 else torch.float32), 0, async_op=a),
        r"rank 1 called broadcast\(4 x float64, src=0\)",
    ),
    "SUM against MAX": (
        lambda rank, a: dist.all_reduce(ones(4), dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM, async_op=a),
        r"rank 1 called all_reduce\(4 x float32, MAX\)",
    ),
    "different verbs": (
        barrier,
        r"ranks 0, 2 called all_reduce\(4 x float32, SUM\), rank 1 called barrier",
    ),
    "root": (
        lambda rank, a: dist.broadcast(ones(4), 1 if rank == 1 else 0, async_op=a),
        r"ranks 0, 2 called broadcast\(4 x float32, src=0\), rank 1 called broadcast\(4 x float32, src=1\)",
    ),
    "all_gather sizes": (
        lambda rank, a: dist.all_gather([ones(2 + rank % 2) for _ in range(3)], ones(2 + rank % 2), async_op=a),
        r"ranks 0, 2 called all_gather\(2 x float32\), rank 1 called all_gather\(3 x float32\)",
    ),
    "all_to_all sizes": (
        lambda rank, a: dist.all_to_all_single(ones(3), ones(3), None, [2, 1, 0] if rank == 1 else None, async_op=a),
        r"rank 1 sends 8 bytes to rank 0, which expects 4",
    ),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_mismatched_collective_raises_with_calls_ranks_and_call_sites(name: str) -> None:
    call, expected = COLLECTIVES[name]

    def body() -> list[str]:
        texts = []
        for asynchronous in (False, True):
            with pytest.raises(dist.MismatchError) as caught:
                call(dist.get_rank(), asynchronous).wait()  # type: ignore[union-attr]  # a blocking call raises
            dist.barrier()  # the group still works
            texts.append(str(caught.value))
        return texts

    for texts in run_ranks(3, body):
        for text in texts:
            assert re.search(expected, text), text
            for rank in range(3):
                line = call.__code__.co_firstlineno + (call is barrier)
                assert re.search(rf"rank {rank} at .*test_mismatches.py:{line}\b", text), text
            assert re.search(r"\n  (Pass|Make) the same .*$", text), text  # the next step


@pytest.mark.parametrize("count", [3, 5])
def test_recv_of_another_size_raises(count: int) -> None:
    def body() -> None:
        if dist.get_rank() == 0:
            dist.send(ones(4), 1)
        else:
            with pytest.raises(dist.MismatchError, match=rf"rank 0 .* sent 4 x float32, .* holds {count} x float32"):
                dist.recv(ones(count), 0)
        dist.barrier()

    run_ranks(2, body)


def test_calls_on_different_groups_raise_errors_that_name_the_missing_rank() -> None:
    def body() -> str:
        dist.init_process_group(timeout=2.0)
        pair = dist.new_group([0, 1])
        with pytest.raises((dist.TimeoutError, dist.PeerLostError)) as caught:
            dist.all_reduce(ones(4), group=pair if dist.get_rank() == 1 else None)
        return str(caught.value)

    texts = run_ranks(3, body, init=False)
    for rank in (0, 2):
        assert "group 'world'" in texts[rank]
        assert "rank 1" in texts[rank]
    assert "rank 0" in texts[1]


PARTS: dict[str, Callable[[], object]] = {
    "new_group": lambda: dist.new_group([0, 1]),
    "split_group": lambda: dist.split_group(None, [[0, 1]]),
    "all_gather_object": lambda: dist.all_gather_object([None, None], "x"),
    "gather_object": lambda: dist.gather_object("x", [None, None]),
    "broadcast_object_list": lambda: dist.broadcast_object_list(["x"]),
    "scatter_object_list": lambda: dist.scatter_object_list([None], ["x", "y"]),
    "empty_shared": lambda: dist.empty_shared(8),
}


def test_composed_call_is_named_in_a_mismatch() -> None:
    """Compare composed calls with a collective that some of them use internally."""

    def body() -> list[str]:
        texts = []
        for call in PARTS.values():
            with pytest.raises(dist.MismatchError) as caught:
                call() if dist.get_rank() == 0 else dist.all_gather_single(torch.empty(2).long(), torch.empty(1).long())
            texts.append(str(caught.value))
        return texts

    for texts in run_ranks(2, body):
        for name, text in zip(PARTS, texts, strict=True):
            assert f"rank 0 called {name}, rank 1 called all_gather(1 x int64). No tensor was changed." in text
            assert re.search(r"rank 0 at \S+:\d+\n", text)


def test_composed_call_is_named_in_a_timeout() -> None:
    def body() -> str:
        dist.init_process_group(timeout=0.5)
        if dist.get_rank() == 1:
            time.sleep(1.5)
            return ""
        with pytest.raises(dist.TimeoutError) as caught:
            dist.new_group([0, 1])
        return str(caught.value)

    assert run_ranks(2, body, init=False)[0].startswith(
        "new_group #1 on group 'world' (rank 0 of 2): no data from rank 1"
    )


def test_timeout_names_the_rank_that_has_not_called() -> None:
    def body() -> str:
        dist.init_process_group(timeout=1.0)
        if dist.get_rank() == 1:
            time.sleep(2)
            return ""
        with pytest.raises(dist.TimeoutError) as caught:
            dist.all_reduce(ones(4))
        return str(caught.value)

    texts = run_ranks(3, body, init=False)
    for rank in (0, 2):
        assert "no data from rank 1" in texts[rank]
        assert "rank 1 had not called any collective" in texts[rank]


def one(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor)


def two(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor)


def swapped() -> None:
    for call in (two, one) if dist.get_rank() == 1 else (one, two):
        call(ones(4))


def legitimate() -> None:
    """Make matching calls from different call sites, as programs do."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for root in range(size):
        if rank == root:
            dist.broadcast(ones(4), root)
        else:
            dist.broadcast(torch.empty(4), root)
    for _ in range(3):
        dist.all_reduce(ones(4))
        if rank == 0:
            dist.all_reduce(ones(4))
        else:
            dist.all_reduce(torch.zeros(4))


@pytest.mark.parametrize("variable", ["", "ALLRANKS_DEBUG=1", "TORCH_DISTRIBUTED_DEBUG=DETAIL"])
def test_swapped_identical_calls_are_detected_in_debug_mode(variable: str) -> None:
    def body() -> str:
        legitimate()
        try:
            swapped()
        except dist.MismatchError as error:
            dist.barrier()
            return str(error)
        return ""

    name, _, value = variable.partition("=")
    for text in run_ranks(3, body, env={name: value} if variable else None):
        if not variable:
            assert text == ""  # without debug mode, this mismatch cannot be detected
            continue
        assert "in different orders" in text
        for rank in range(3):
            here = (one if rank == 1 else two).__code__.co_firstlineno + 1
            assert re.search(rf"rank {rank} at .*test_mismatches.py:{here}", text), text
