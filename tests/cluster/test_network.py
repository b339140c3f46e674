"""Addresses and machine identity that a host publishes to the other hosts."""

import ipaddress
import logging

import pytest

from allranks._base.errors import ConfigError
from allranks._cluster.network import MACHINE, fixed_machine, interface_of, machine, nearest_first, published_addresses
from allranks._net.secret import load_secret


def test_published_addresses_are_not_loopback() -> None:
    for address in published_addresses({}):
        assert not ipaddress.ip_address(address).is_loopback
        assert interface_of(address)


def test_interface_is_selected_by_name_or_network() -> None:
    addresses = published_addresses({})
    if not addresses:
        pytest.skip("this machine has no network")
    first = addresses[0]
    assert first in published_addresses({"ALLRANKS_IFACE": interface_of(first)})
    bits = ipaddress.ip_address(first).max_prefixlen
    assert published_addresses({"ALLRANKS_IFACE": f"{first}/{bits}"}) == (first,)
    assert published_addresses({"ALLRANKS_IFACE": f"nothing0, {first}"}) == (first,)


@pytest.mark.parametrize("chosen", ["nothing0", "203.0.113.0/24", "10.0.0.0/99"])
def test_unknown_interface_raises_config_error(chosen: str) -> None:
    with pytest.raises(ConfigError, match="ALLRANKS_IFACE"):
        published_addresses({"ALLRANKS_IFACE": chosen})


def test_addresses_in_local_networks_sort_first() -> None:
    ours = published_addresses({})
    far = "203.0.113.7"
    assert nearest_first((far, *ours))[-1] == far


def test_machine_identity_is_stable() -> None:
    assert machine() == machine()
    assert len(machine()) == 32


def test_identity_fixed_by_agent_is_used() -> None:
    value = fixed_machine()
    agent, identity = value.rsplit(":", 1)
    assert identity == machine({})
    assert machine({MACHINE: f"{agent}:{'0' * 32}"}) == "0" * 32


@pytest.mark.parametrize("field", [0, 1, 2], ids=["pid", "start time", "kernel and network namespace"])
def test_identity_from_another_host_or_exited_agent_is_ignored(field: int) -> None:
    parts = [*fixed_machine().split(":")[:3], "0" * 32]
    parts[field] = "1" if parts[field] != "1" else "2"
    assert machine({MACHINE: ":".join(parts)}) == machine({})


@pytest.mark.parametrize("text", ["", "nonsense", ":::", "1:2:3:4", "x" * 70])
def test_malformed_identity_is_ignored(text: str) -> None:
    assert machine({MACHINE: text}) == machine({})


def test_disabled_secret_logs_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "allranks.store"):
        assert load_secret({"ALLRANKS_INSECURE": "1"})
    assert "any process that can reach the ports" in caplog.text
    assert load_secret({"ALLRANKS_INSECURE": "0", "ALLRANKS_SECRET": "x" * 20}) == b"x" * 20
