"""benchmarks/model.py: its counts of the core's memory accesses, and its predictions."""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

PATH = Path(__file__).parents[2] / "benchmarks/model.py"


@pytest.fixture(scope="module")
def model() -> ModuleType:
    spec = importlib.util.spec_from_file_location("model", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["model"] = module
    spec.loader.exec_module(module)
    if not (module.BUILD / "lines").exists() and not os.environ.get("ALLRANKS_TEST_ALL"):
        pytest.skip("the core's tests are not compiled: make core-tests")
    return module


def test_without_groups_every_rank_reads_every_rank(model: ModuleType) -> None:
    touched = model.Touched.count(model.MACHINES[1], "all_reduce", 8, 64, model.NEVER)
    assert len([pair for pair in touched.lines if pair[0] != pair[1]]) == 64 * 63


@pytest.mark.parametrize("verb", ["all_reduce", "barrier"])
def test_cache_lines_per_rank_do_not_grow_with_ranks_if_grouped(model: ModuleType, verb: str) -> None:
    machine = model.MACHINES[2]
    lines = {}
    for ranks in (48, 96, 192):
        touched = model.Touched.count(machine, verb, 8, ranks, 17)
        assert max(map(len, touched.groups)) <= 16
        lines[ranks] = sum(touched.lines.values()) / ranks
        leaders = {group[0] for group in touched.groups}
        # Cache lines of the verdict, which no rank writes unless a call fails.
        verdict = {(rank, 0): 1 for rank in range(ranks)}.items()
        across = {pair for pair, _ in touched.lines.items() - verdict if machine.near(*pair) == "far"}
        assert all(leaders.issuperset(pair) for pair in across), "only leaders may access another socket"
    assert lines[192] < 2 * lines[48]
    assert lines[192] < 12, "a flat call reads 193 lines"


def test_predicted_call_time_of_128_grouped_ranks_is_within_the_goal(model: ModuleType) -> None:
    machine = model.MACHINES[1]
    flat, groups = (
        model.call_ns(machine, model.Touched.count(machine, "all_reduce", 8, 128, levels_from), 500, by_groups)
        for levels_from, by_groups in ((model.NEVER, False), (17, True))
    )
    assert groups < model.GOAL_US * 1e3 < flat


def test_an_exchange_between_hosts_needs_few_streams(model: ModuleType) -> None:
    rows = {row["hosts"]: row for row in model.between_hosts()}
    assert rows[8]["streams_of_a_leader"] == 7
    assert rows[1000]["streams_of_a_leader"] == 20
