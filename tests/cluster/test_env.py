"""Rank, world size and master address from arguments and the environment, and the errors for missing or bad values."""

from __future__ import annotations

import re

import pytest

from allranks._base.errors import ConfigError
from allranks._cluster import env
from allranks._cluster.env import JobEnv, is_master, read_env, split_host_port

FULL = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}


def without(*names: str) -> dict[str, str]:
    return {name: value for name, value in FULL.items() if name not in names}


def test_torchrun_variables_are_read() -> None:
    local = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "NODE_RANK": "7"}
    assert read_env(environ=FULL | local) == JobEnv(1, 4, ("node0", 29500), "", 1, 2, 0)
    assert read_env(environ=FULL | {"NODE_RANK": "7"}).node_rank == 7


def test_port_in_master_addr_is_accepted() -> None:
    """Accept the three commands of the THD documentation, in which workers set MASTER_ADDR=host:port."""
    master = {"WORLD_SIZE": "3", "RANK": "0", "MASTER_PORT": "29500"}
    worker = {"WORLD_SIZE": "3", "RANK": "1", "MASTER_ADDR": "node0:29500"}
    assert read_env(environ=master).master == ("", 29500)
    assert read_env(environ=worker).master == ("node0", 29500)
    assert read_env(environ=worker | {"MASTER_PORT": "29500"}).master == ("node0", 29500)
    assert read_env(environ=worker | {"RANK": "0"}).master == ("node0", 29500)


def test_worker_ignores_master_port_and_rank_0_ignores_master_addr(caplog: pytest.LogCaptureFixture) -> None:
    """Apply the rule of the THD documentation: all ranks can share one environment, and a port can be forwarded."""
    both = FULL | {"MASTER_ADDR": "127.0.0.1:29591", "MASTER_PORT": "29592"}
    assert read_env(environ=both).master == ("127.0.0.1", 29591)
    assert read_env(environ=both | {"MASTER_PORT": "junk"}).master == ("127.0.0.1", 29591)
    assert not caplog.records
    assert read_env(environ=both | {"RANK": "0"}).master == ("", 29592)
    (warning,) = caplog.messages
    assert warning.startswith("rank 0 listens on MASTER_PORT=29592, but ranks with MASTER_ADDR=127.0.0.1:29591")
    assert read_env(environ=both | {"RANK": "0", "MASTER_PORT": "29591"}).master == ("127.0.0.1", 29591)
    assert len(caplog.records) == 1


def test_torchrun_agent_store_is_detected() -> None:
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert read_env(environ=FULL | agent).agent == "allranks/job/2"
    assert read_env(environ=FULL | agent | {"TORCHELASTIC_USE_AGENT_STORE": "False"}).agent == ""
    assert read_env(environ=FULL | agent | {"ALLRANKS_STORE": "unix:@x"}).agent == ""
    assert read_env(environ=FULL | agent, by_env=False).agent == ""


def test_is_master_compares_host_and_port_with_environment() -> None:
    for address in ("node0:29500", "[node0]:29500"):
        assert is_master(address, FULL)
        assert is_master(address, {"MASTER_ADDR": "node0:29500"})
    assert is_master("127.0.0.1:29500", FULL | {"MASTER_ADDR": "localhost"})
    assert is_master(":29500", without("MASTER_ADDR"))
    for address in ("node0", "node0:29501", "node1:29500", "127.0.0.1:29500", "node0:x", ""):
        assert not is_master(address, FULL), address
    for other in ({}, without("MASTER_PORT"), FULL | {"MASTER_PORT": "x"}, FULL | {"MASTER_ADDR": "node0:1"}):
        assert not is_master("node0:29500", other), other


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node0", ("node0", None)),
        ("node0:80", ("node0", 80)),
        ("[::1]:80", ("::1", 80)),
        ("[::1]", ("::1", None)),
        ("fe80::1", ("fe80::1", None)),
        (":80", ("", 80)),
        (" 10.0.0.1:80 ", ("10.0.0.1", 80)),
    ],
)
def test_host_and_port_are_split(text: str, expected: tuple[str, int | None]) -> None:
    assert split_host_port(text, "X") == expected


def test_arguments_override_environment() -> None:
    assert read_env(3, 8, FULL) == JobEnv(3, 8, ("node0", 29500))
    assert read_env(3, environ=FULL).world_size == 4
    assert read_env(world_size=8, environ=FULL).rank == 1
    assert read_env(0, 1, {"RANK": "junk", "WORLD_SIZE": "junk"}) == JobEnv(0, 1)


def test_alone() -> None:
    assert read_env(environ={}) == JobEnv(0, 1)
    assert read_env(environ={"RANK": "", "WORLD_SIZE": ""}) == JobEnv(0, 1)
    assert read_env(environ={"WORLD_SIZE": "1"}) == JobEnv(0, 1)
    assert read_env(world_size=1, environ={}) == JobEnv(0, 1)


def test_launcher_store_needs_no_master_address() -> None:
    place = read_env(environ={"RANK": "1", "WORLD_SIZE": "4", "ALLRANKS_STORE": "unix:@x"})
    assert place == JobEnv(1, 4, None, "unix:@x")


def test_master_address_is_not_read_for_another_init_method() -> None:
    assert read_env(environ=without("MASTER_ADDR", "MASTER_PORT"), by_env=False) == JobEnv(1, 4)
    with pytest.raises(ConfigError, match="RANK and WORLD_SIZE are not set"):
        read_env(environ={}, by_env=False)


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        (
            without("MASTER_ADDR"),
            "MASTER_ADDR is not set (rank 1 of 4). Expected a host name, for example MASTER_ADDR=node0."
            "\n  Set it, or start the ranks with `allranks run -n 4 train.py`.",
        ),
        (
            without("MASTER_PORT"),
            "MASTER_PORT is not set (rank 1 of 4). Expected a port, for example MASTER_PORT=29500.",
        ),
        (without("MASTER_PORT", "MASTER_ADDR"), "MASTER_ADDR and MASTER_PORT are not set (rank 1 of 4)."),
        (without("RANK"), "RANK is not set (world size 4). Expected the number of this process, for example RANK=0."),
        (without("WORLD_SIZE"), "WORLD_SIZE is not set (rank 1)."),
        (without("RANK", "WORLD_SIZE"), "RANK and WORLD_SIZE are not set (rank and world size are unknown)."),
        ({"ALLRANKS_STORE": "unix:@x"}, "RANK and WORLD_SIZE are not set"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_PORT is not set (rank 0 of 2)."),
        (FULL | {"RANK": "one"}, "RANK='one' is not a number. Expected a whole number, 0 or more."),
        (FULL | {"RANK": "4"}, "RANK=4 is out of range. Expected 0..3, as the world size is 4."),
        (FULL | {"RANK": "-1"}, "RANK=-1 is out of range. Expected a whole number, 0 or more."),
        (FULL | {"WORLD_SIZE": "0"}, "WORLD_SIZE=0 is out of range. Expected a whole number, 1 or more."),
        (FULL | {"WORLD_SIZE": "2.0"}, "WORLD_SIZE='2.0' is not a number."),
        (FULL | {"MASTER_PORT": "65536"}, "MASTER_PORT=65536 is out of range. Expected a whole number in 1..65535."),
        (FULL | {"MASTER_PORT": "http"}, "MASTER_PORT='http' is not a number."),
        (FULL | {"MASTER_ADDR": "node0:x"}, "the port in MASTER_ADDR='x' is not a number."),
        (FULL | {"MASTER_ADDR": "node0:"}, "MASTER_ADDR='node0:' ends in a colon."),
        (FULL | {"LOCAL_RANK": "x"}, "LOCAL_RANK='x' is not a number."),
    ],
)
def test_errors_name_variable_value_and_fix(environ: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_env(environ=environ)
    assert text in str(caught.value)


@pytest.mark.parametrize(("rank", "world_size"), [(4, 4), (-2, 4), (1, 1), (0, 0), (0, -2)])
def test_arguments_out_of_range_raise_config_error(rank: int, world_size: int) -> None:
    with pytest.raises(ConfigError, match="is out of range"):
        read_env(rank, world_size, FULL)


def test_every_variable_is_in_the_table_once() -> None:
    names = [variable.name for variable in env.VARIABLES]
    assert len(set(names)) == len(names)
    assert set(FULL) < set(names)
    assert all(variable.set_by and variable.meaning.endswith(".") for variable in env.VARIABLES)


@pytest.mark.parametrize(
    ("address", "port", "master"),
    [
        (" 127.0.0.1\n", " 29500 ", ("127.0.0.1", 29500)),
        ("[::1]", "29500", ("::1", 29500)),
        ("::1", "29500", ("::1", 29500)),
        ("[::1]:29501", "", ("::1", 29501)),
        ("localhost.", "29500", ("localhost", 29500)),
        ("0.0.0.0", "29500", ("localhost", 29500)),
        ("[::]", "29500", ("localhost", 29500)),
        ("10.0.0.1 172.17.0.1 ", "29500", "MASTER_ADDR='10.0.0.1 172.17.0.1' is neither a host name nor an address"),
        ("a,b", "29500", "MASTER_ADDR='a,b' is neither a host name nor an address"),
        ("127.0.0.1", "66660", "MASTER_PORT=66660 is out of range"),
        ("127.0.0.1", "-5", "MASTER_PORT=-5 is out of range"),
    ],
)
def test_master_address_is_normalized_or_rejected(address: str, port: str, master: object) -> None:
    environ = FULL | {"MASTER_ADDR": address, "MASTER_PORT": port}
    if isinstance(master, str):
        with pytest.raises(ConfigError, match=re.escape(master)):
            read_env(environ=environ)
    else:
        assert read_env(environ=environ).master == master
