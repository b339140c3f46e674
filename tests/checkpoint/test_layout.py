"""Which rank writes which tensor: every value is written once, and the ranks share the work."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allranks import UsageError
from allranks.checkpoint.layout import PartDescription, SavePlan, make_plan


def whole(name: str, length: int, digest: int = 0, own: bool = False) -> PartDescription:
    return PartDescription(name, "float32", 4, (length,), (0,), (length,), digest, own)


def part(
    name: str, shape: tuple[int, ...], offsets: tuple[int, ...], size: tuple[int, ...], digest: int = 0
) -> PartDescription:
    return PartDescription(name, "float32", 4, shape, offsets, size, digest)


def check(plan: SavePlan, ranks: int) -> None:
    """Assert that files have no gaps and that ranks write only tensors that they have."""
    assert sorted(job.key for job in plan.jobs) == sorted(job.key for jobs in plan.files.values() for job in jobs)
    for rank, jobs in plan.files.items():
        assert 0 <= rank < ranks
        end = 0
        for job in jobs:
            assert job.begin == end
            assert rank in job.holders
            end += job.description.nbytes
        assert len({job.key for job in jobs}) == len(jobs)


@settings(max_examples=200)
@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.integers(0, 50), st.lists(st.integers(0, 2), min_size=6, max_size=6)), max_size=20),
)
def test_each_distinct_value_of_a_tensor_is_written_once(ranks: int, tensors: list[tuple[int, list[int]]]) -> None:
    offers = [[whole(f"t{n}", size, had[r]) for n, (size, had) in enumerate(tensors)] for r in range(ranks)]
    plan = make_plan(offers)
    check(plan, ranks)
    for number, (_, had) in enumerate(tensors):
        jobs = [job for job in plan.jobs if job.description.name == f"t{number}"]
        assert sorted(job.description.digest for job in jobs) == sorted(set(had[:ranks]))
        if len(jobs) == 1:
            assert jobs[0].ranks == ()
        else:
            assert sorted(rank for job in jobs for rank in job.ranks) == list(range(ranks))


def test_bytes_to_write_are_balanced_between_ranks() -> None:
    plan = make_plan([[whole(f"t{n}", 1000 + n) for n in range(40)]] * 4)
    loads = [sum(job.description.nbytes for job in jobs) for jobs in plan.files.values()]
    assert len(loads) == 4
    assert max(loads) - min(loads) <= 4 * 1040


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 200), st.sampled_from([1, 2, 4, 8, 16])), max_size=30))
def test_tensors_are_aligned_in_the_file(tensors: list[tuple[int, int]]) -> None:
    """Tensors of N * 64 bytes begin at a multiple of 64 bytes, the others at a multiple of their element size."""
    offers = [
        PartDescription(f"t{n}", "any", size, (length,), (0,), (length,), 0) for n, (length, size) in enumerate(tensors)
    ]
    plan = make_plan([offers])
    check(plan, 1)
    for job in plan.jobs:
        assert job.begin % (64 if job.description.nbytes % 64 == 0 else job.description.size) == 0


def test_each_rank_writes_tensors_marked_as_own() -> None:
    plan = make_plan([[whole("t", 3, 7, own=True)], [whole("t", 3, 7, own=True)]])
    assert [job.key for job in plan.jobs] == ["t#0", "t#1"]


def test_tensor_of_some_ranks_is_written_by_one_of_them() -> None:
    """Tensors as in the stages of a pipeline."""
    plan = make_plan([[whole("a", 3)], [whole("b", 3)]])
    assert {rank: [job.key for job in jobs] for rank, jobs in plan.files.items()} == {0: ["a"], 1: ["b"]}


@settings(max_examples=200)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 7), st.integers(1, 7), st.integers(1, 2))
def test_each_shard_of_a_grid_is_written_once(rows: int, columns: int, height: int, width: int, replicas: int) -> None:
    """Grid of parts of any size; one or several ranks have each part."""
    shape = (rows * height, columns * width)
    offers = [
        [part("t", shape, (r * height, c * width), (height, width))]
        for _ in range(replicas)
        for r in range(rows)
        for c in range(columns)
    ]
    plan = make_plan(offers)
    check(plan, len(offers))
    assert len(plan.jobs) == rows * columns
    assert sum(math.prod(job.description.part) for job in plan.jobs) == math.prod(shape)


@pytest.mark.parametrize(
    ("offers", "words"),
    [
        (
            [part("t", (4,), (0,), (2,)), part("t", (4,), (3,), (1,))],
            "shape [4] exactly once (3 of 4 elements)",
        ),
        ([part("t", (4,), (0,), (3,)), part("t", (4,), (3,), (1,)), part("t", (4,), (2,), (2,))], "do not cover"),
        ([part("t", (4,), (0,), (3,)), part("t", (4,), (2,), (1,))], "do not cover"),
        ([part("t", (2, 2), (0, 0), (2, 1)), part("t", (2, 2), (0, 0), (1, 2))], "do not cover"),
        (
            [part("t", (4,), (0,), (2,)), part("t", (5,), (2,), (3,))],
            "differ in dtype or in the shape",
        ),
        ([part("t", (4,), (0,), (2,), 1), part("t", (4,), (0,), (2,), 2)], "have the same part of tensor 't'"),
    ],
)
def test_inconsistent_shards_are_refused(offers: list[PartDescription], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        make_plan([[offer] for offer in offers])
    assert words in str(caught.value)


def test_shards_without_elements_are_not_written() -> None:
    """Five ranks share two rows, so three ranks have no elements."""
    offers = [[part("t", (2, 3), (min(r, 2), 0), (int(r < 2), 3))] for r in range(5)]
    plan = make_plan(offers)
    assert [job.description.part for job in plan.jobs] == [(1, 3), (1, 3)]
    nothing = make_plan([[part("t", (0, 3), (0, 0), (0, 3))]] * 2)
    assert len(nothing.jobs) == 1
