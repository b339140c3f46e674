"""Distribution of ranks over hosts."""

from __future__ import annotations

import pytest

from allranks._base.errors import ConfigError
from allranks._cluster.hostlist import Slots, parse_hosts
from allranks.launch.arguments.layout import describe_plan, share_out

CASES = [
    ("a:2,b", None, None, [2, 1]),
    ("a,b", 5, None, [3, 2]),
    ("a:2,b:2", 3, None, [2, 1]),
    ("a:2,b", 3, None, [2, 1]),
    ("a,b", None, 3, [3, 3]),
    ("a:4,b:4", None, 3, [3, 3]),
    ("a,b", 6, 3, [3, 3]),
    ("a,b", None, "auto", [8, 4]),
    ("a,b", None, "gpu", [2, 1]),
    ("a,b,c", 2, None, [1, 1, 0]),
]


@pytest.mark.parametrize(("hosts", "nproc", "per_host", "wanted"), CASES)
def test_ranks_are_distributed_over_hosts(hosts: str, nproc: int | None, per_host: object, wanted: list[int]) -> None:
    has = [(8, 2), (4, 1), (2, 0)]
    slots = parse_hosts(hosts, "-H")
    assert share_out(slots, nproc, per_host, has[: len(slots)]) == wanted  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("hosts", "nproc", "per_host", "message"),
    [
        ("a:2,b:2", 5, None, "5 ranks do not fit: a has 2 slots, b has 2 slots"),
        ("a:2,b", None, 2, None),
        ("a:1,b", None, 2, "2 ranks on each host do not fit: a has 1 slot"),
        ("a,b", 3, 2, "requests 3 ranks"),
        ("a,b", None, "gpu", "b has no GPU"),
    ],
)
def test_too_many_ranks_for_the_hosts_are_rejected(
    hosts: str, nproc: int | None, per_host: object, message: str | None
) -> None:
    slots, has = parse_hosts(hosts, "-H"), [(8, 2), (4, 0)]
    if message is None:
        assert sum(share_out(slots, nproc, per_host, has)) == 4  # type: ignore[arg-type]
        return
    with pytest.raises(ConfigError, match=message):
        share_out(slots, nproc, per_host, has)  # type: ignore[arg-type]


def test_slots_of_a_scheduler_are_not_a_limit() -> None:
    one_each = [Slots("a", 1), Slots("b", 1)]
    assert share_out(one_each, None, None, strict=False) == [1, 1]
    assert share_out(one_each, None, 4, strict=False) == [4, 4]
    assert share_out(one_each, 4, None, strict=False) == [2, 2]
    assert share_out([Slots("a", 3), Slots("b", 1)], 4, None, strict=False) == [3, 1]


def test_description_of_a_plan_lists_the_ranks_of_each_host() -> None:
    assert describe_plan(["node0", "n1", "n2"], [2, 1, 0], "by ssh", "python x.py") == (
        "python x.py, on 3 hosts, started by ssh:\n  node0  ranks 0-1\n  n1     rank 2\n  n2     none"
    )
