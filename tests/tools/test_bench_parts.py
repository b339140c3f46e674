"""Parts of ``allranks bench``: sizes, data, expected results, and detection of wrong results."""

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

import allranks as dist
from allranks.testing import run_ranks
from allranks.tools import quiet
from allranks.tools.bench import text as words
from allranks.tools.bench.engines import Call, Native
from allranks.tools.bench.measure import BlockPlan, measure
from allranks.tools.bench.options import parse
from allranks.tools.bench.text import human, times
from allranks.tools.bench.verbs import ROOT, VERBS, Data, expected


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("4", [4]),
        ("4..64", [4, 16, 64]),
        ("1K..64M", [1 << shift for shift in range(10, 27, 2)]),
        ("64,4,1K..2K", [4, 64, 1024]),
    ],
)
def test_sizes_option_is_parsed(text: str, sizes: list[int]) -> None:
    assert parse(["all_reduce", "--sizes", text]).sizes == sizes


def test_verbs_and_default_ranks_of_a_run() -> None:
    assert parse(["all"]).verbs == list(VERBS)
    assert parse(["all", "-n", "1"]).verbs == [verb for verb in VERBS if verb != "send"]
    assert parse(["gather"]).verbs == ["gather"]
    assert (parse(["python"]).nproc, parse(["overlap"]).nproc, parse(["all"]).nproc) == (1, 2, 2)


def test_size_counts_all_pieces_of_a_collective() -> None:
    counts = {name: verb.count(1 << 20, 4, 4) for name, verb in VERBS.items()}
    whole = ("all_reduce", "reduce", "broadcast", "send")
    assert counts == {name: 1 << 18 if name in whole else 1 << 16 for name in VERBS} | {"barrier": 0}
    assert all(verb.count(1, 8, 4) == 1 for name, verb in VERBS.items() if name != "barrier")


def test_bus_bandwidth_factors() -> None:
    factors = {name: verb.link(4) for name, verb in VERBS.items()}
    assert factors == {
        "all_reduce": 1.5,
        **dict.fromkeys(("all_gather", "gather", "scatter", "reduce_scatter", "all_to_all"), 0.75),
        **dict.fromkeys(("reduce", "broadcast", "send", "barrier"), 1.0),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_expected_results_equal_plain_torch(dtype: torch.dtype) -> None:
    ranks, count = 3, 1500  # more elements than one period of the data
    data = Data(ranks, dtype, reduces=True)
    ones = [data.of(rank, count) for rank in range(ranks)]
    many = [data.of(rank, ranks * count) for rank in range(ranks)]
    total, totals = sum(ones), sum(many)
    for rank in range(ranks):
        mine = slice(rank * count, (rank + 1) * count)
        right = {
            "all_reduce": total,
            "reduce": total if rank == ROOT else None,
            "broadcast": ones[ROOT],
            "all_gather": torch.cat(ones),
            "gather": torch.cat(ones) if rank == ROOT else None,
            "scatter": many[ROOT][mine],
            "reduce_scatter": totals[mine],
            "all_to_all": torch.cat([each[mine] for each in many]),
            "send": ones[1 - rank] if rank < 2 else None,
            "barrier": None,
        }
        for verb in VERBS:
            found = expected(verb, data, "SUM", rank, ranks, count)
            if right[verb] is None:
                assert found is None, verb
            else:
                assert found is not None
                assert torch.equal(found, right[verb]), verb


@pytest.mark.parametrize(
    ("op", "reduce"),
    [
        ("AVG", lambda stacked: stacked.mean(0)),
        ("PRODUCT", lambda stacked: stacked.prod(0)),
        ("MIN", lambda stacked: stacked.amin(0)),
        ("MAX", lambda stacked: stacked.amax(0)),
    ],
)
def test_expected_results_of_other_ops(op: str, reduce: Callable[[torch.Tensor], torch.Tensor]) -> None:
    data = Data(3, torch.float64, reduces=True)
    assert torch.equal(data.reduced(op, 2000), reduce(torch.stack([data.of(rank, 2000) for rank in range(3)])))


def test_ranks_use_different_data() -> None:
    data = Data(4, torch.float32, reduces=False)
    assert not any(torch.equal(a, b) for a, b in pairwise(data.of(rank, 50) for rank in range(4)))
    assert not torch.equal(data.of(0, 50), data.of(0, 50, 50))
    assert torch.equal(data.of(0, 3000)[1700:], data.of(0, 1300, 1700))


class Careless(Native):
    """Engine that corrupts one output element of rank 1 after each call, and whose barrier does not wait."""

    name = "careless"

    def call(self, verb: str, into: torch.Tensor, out: torch.Tensor, op: str) -> Call:
        right = super().call(verb, into, out, op)

        def spoil() -> None:
            right()
            if dist.get_rank() == 1:
                out[-1] += 1

        return spoil if verb != "barrier" else lambda: None


def test_wrong_results_are_counted() -> None:
    def body() -> dict[str, tuple[int, int]]:
        import os

        cpus = os.sched_getaffinity(0)
        plan = BlockPlan(dist.get_rank(), dist.get_world_size(), cpus, torch.float32, "SUM", 0.001)
        engines = [Native(shared=False), Careless(shared=False)]
        found = {}
        for name, verb in VERBS.items():
            timings = measure(engines, verb, 4096, plan).timings
            found[name] = (timings["native"].wrong, timings["careless"].wrong)
        return found

    found, other = run_ranks(2, body)
    assert found == other
    assert found is not None
    for verb, (right, careless) in found.items():
        assert right == 0, verb
        # One error before and one after the blocks. Output of rank 1 that the verb leaves undefined does not count.
        assert careless == (0 if verb in ("reduce", "gather") else 2), verb


@pytest.mark.parametrize(
    ("ratio", "text"), [(0.124, "0.12x"), (1, "1.00x"), (9.996, "10.0x"), (99.96, "100x"), (1234.5, "1,234x")]
)
def test_ratios_have_three_digits(ratio: float, text: str) -> None:
    assert times(ratio) == text


def test_sizes_are_formatted() -> None:
    assert [human(n) for n in (4, 1024, 1 << 20, 3 << 29)] == ["4 B", "1 KB", "1 MB", "1.5 GB"]


QUIET = quiet.Conditions(cpus=4, load=0.3, waited=0.01, governor="performance", busy=0.1, steal=0.0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, "# quiet: other processes kept 0.10 of 4 CPUs busy, steal 0.0%"),
        ({"busy": None, "steal": None}, "# quiet so far: load 0.3 in the last minute"),
        ({"busy": 1.5}, "other processes kept 1.5 of 4 CPUs busy"),
        ({"steal": 0.08}, "the hypervisor took 8% of the CPUs' time (steal)"),
        ({"governor": "ondemand"}, "the CPUs' frequency changes with the load (governor ondemand)"),
        ({"busy": None, "load": 3.0}, "load 3.0 in the last minute, on 4 CPUs"),
        ({"busy": None, "waited": 0.4}, "processes waited for a CPU in 40% of it"),
        ({"load": 9.0, "waited": 1.0}, "# quiet: "),  # caused by the ranks of the benchmark
        ({"waited": None, "governor": ""}, "# quiet: "),
    ],
)
def test_noise_of_other_processes_is_reported(change: dict[str, Any], said: str) -> None:
    line = words.conditions(replace(QUIET, **change), 2, 4)
    assert said in line
    assert line.startswith("# not quiet: ") == (not said.startswith("#"))
    assert (quiet.READING in line) == line.startswith("# not quiet: ")


def test_shared_cpus_and_cores_are_reported() -> None:
    assert "5 ranks share 4 CPUs" in words.conditions(QUIET, 5, 2)
    assert "3 ranks share 2 cores (hyperthreads)" in words.conditions(QUIET, 3, 2)


def test_busy_time_excludes_own_cpu_time() -> None:
    """Measure the same work twice: declared as work of other processes, and declared as own work."""
    window = quiet.MeasurementWindow()
    began, began_s = time.monotonic(), time.process_time()
    while time.process_time() - began_s < 0.3:
        pass
    others, ours = window.end(0.0).busy, window.end(time.process_time() - began_s).busy
    took = time.monotonic() - began
    assert others is not None
    assert ours is not None
    assert others * took > 0.2  # the kernel counts in ticks of 10 ms
    assert ours < others
