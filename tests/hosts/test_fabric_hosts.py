"""Groups whose hosts libfabric connects: tests of TCP between hosts, with providers for ordinary networks."""

from __future__ import annotations

import os

import pytest
import test_hosts
import torch
from test_hosts import on_hosts

import allranks as dist
from allranks._engines.native import fabric
from support.cluster import Cluster
from support.fabrics import FabricLog, needs_libfabric

pytestmark = needs_libfabric


@pytest.fixture(params=["tcp", "udp"])
def provider(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("ALLRANKS_FABRIC", request.param)
    return str(request.param)


@pytest.fixture
def tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLRANKS_FABRIC", "tcp")


def test_sums_are_those_of_tcp(provider: str, three_hosts: Cluster) -> None:
    def body() -> tuple[list[str], list[torch.Tensor]]:
        log = FabricLog()
        dist.destroy_process_group(dist.new_group())  # another group, whose selection is logged
        generator = torch.Generator().manual_seed(dist.get_rank())
        results = [torch.randn(count, generator=generator) for count in (1, 5_000, 300_000)]
        for tensor in results:
            dist.all_reduce(tensor)
        return log.used(), results

    over_fabric = on_hosts(three_hosts, [0, 0, 1, 2], body)
    over_tcp = on_hosts(three_hosts, [0, 0, 1, 2], body, env={"ALLRANKS_FABRIC": "off"})
    for (used, sums), (none, expected) in zip(over_fabric, over_tcp, strict=True):
        assert (used, none) == ([provider], [])
        assert all(torch.equal(one, other) for one, other in zip(sums, expected, strict=True))


def test_killed_rank_is_named_on_every_host(provider: str, three_hosts: Cluster) -> None:
    test_hosts.test_a_killed_rank_is_named_on_every_host(three_hosts, 5_000_000)


def test_stopped_rank_does_not_fail_a_call(tcp: None, three_hosts: Cluster) -> None:
    test_hosts.test_stopped_rank_does_not_fail_a_call(three_hosts)


def test_unplugged_host_is_detected(tcp: None, three_hosts: Cluster) -> None:
    test_hosts.test_unplugged_host_is_detected(three_hosts)


def test_exited_rank_is_reported_and_its_sent_data_arrives(tcp: None, three_hosts: Cluster) -> None:
    test_hosts.test_exited_rank_is_reported_and_its_sent_data_arrives(three_hosts)


def test_messages_from_any_rank_and_in_the_background(tcp: None, three_hosts: Cluster) -> None:
    test_hosts.test_messages_from_any_rank_and_in_the_background(three_hosts)


def test_ctrl_c_interrupts_a_call(tcp: None, three_hosts: Cluster) -> None:
    test_hosts.test_ctrl_c_interrupts_a_call(three_hosts)


@pytest.mark.parametrize("places", [[0, 1, 1, 2]], ids=str)
def test_tensors_may_change_as_soon_as_a_call_returns(tcp: None, three_hosts: Cluster, places: list[int]) -> None:
    test_hosts.test_tensors_may_change_as_soon_as_a_call_returns(three_hosts, places)


@pytest.mark.parametrize("places", [[0, 0, 1, 1]], ids=str)
def test_random_programs_equal_torch(tcp: None, four_hosts: Cluster, places: list[int]) -> None:
    test_hosts.test_random_programs_equal_torch(four_hosts, places)


def test_first_usable_fast_provider_is_selected_if_none_is_named(three_hosts: Cluster) -> None:
    def body() -> list[str]:
        del os.environ["ALLRANKS_FABRIC"]
        fabric.has_devices = lambda: True
        fabric.FAST = ("psm3", "tcp", "udp")
        log = FabricLog()
        group = dist.new_group()
        tensor = torch.ones(1000)
        dist.all_reduce(tensor, group=group)
        assert (tensor == 3).all()
        return log.used()

    assert on_hosts(three_hosts, [0, 1, 2], body, env={"ALLRANKS_FABRIC": "off"}) == [["tcp"]] * 3


def test_tcp_is_used_if_one_host_has_no_fabric(three_hosts: Cluster) -> None:
    def body() -> list[str]:
        os.environ["ALLRANKS_FABRIC"] = "off" if dist.get_rank() == 2 else "tcp"
        log = FabricLog()
        group = dist.new_group()
        tensor = torch.ones(1000)
        dist.all_reduce(tensor, group=group)
        assert (tensor == 3).all()
        return log.texts

    first, *others = on_hosts(three_hosts, [0, 1, 2], body, env={"ALLRANKS_FABRIC": "off"})
    assert len(first) == 1
    assert "the hosts have different fabrics, so TCP connects them: none on node2; tcp on node0, node1." in first[0]
    assert others == [[], []]
