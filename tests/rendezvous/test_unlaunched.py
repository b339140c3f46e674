"""Ranks that the launcher of allranks has not started: their ranks from the environment, and their rendezvous.

tests/hosts runs them under real launchers. These tests cover the cases that do not occur there.
"""

from __future__ import annotations

import logging
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from allranks._base.errors import ConfigError, JoinError
from allranks._cluster.env import JobEnv, read_env
from allranks._rendezvous import pmi
from allranks._rendezvous.finders import scheduler
from allranks._rendezvous.rendezvous import JobMeeting, join
from allranks._store import StoreServer

SECRET = {"ALLRANKS_SECRET": "a secret of the tests, long enough"}


def step(rank: int, size: int = 2, job: str = "17") -> dict[str, str]:
    """Environment of a SLURM step with one rank per node. All nodes are addresses of this host."""
    return SECRET | {
        "SLURM_JOB_ID": job,
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": ",".join(f"127.0.0.{node + 1}" for node in range(size)),
        "SLURM_STEP_NUM_NODES": str(size),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_TASKS_PER_NODE": f"1(x{size})",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": str(rank),
    }


def test_slurm_step_is_detected() -> None:
    env = read_env(environ=step(1))
    assert (env.rank, env.world_size, env.local_rank, env.local_world_size, env.node_rank) == (1, 2, 0, 1, 1)
    assert env.place is not None
    assert env.place.kind == "slurm"


def test_explicit_settings_override_detection() -> None:
    hand = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_PORT": "29500"}
    assert read_env(environ=step(1) | hand) == JobEnv(0, 3, ("", 29500))
    assert read_env(0, 1, step(1)) == JobEnv(0, 1)
    assert read_env(world_size=1, environ=step(1)) == JobEnv(0, 1)
    with pytest.raises(ConfigError, match="MASTER_PORT is not set"):
        read_env(0, 2, step(1))
    assert read_env(1, 2, step(1)).place is not None  # equal to the detected values
    store = read_env(environ=step(1) | {"ALLRANKS_STORE": "unix:@x"})
    assert (store.rank, store.world_size, store.store, store.place) == (1, 2, "unix:@x", None)
    master = read_env(environ=step(1) | {"MASTER_ADDR": "node0:29500"})
    assert (master.rank, master.world_size, master.master, master.place) == (1, 2, ("node0", 29500), None)
    elsewhere = read_env(environ=step(1), by_env=False)  # init_method="file:///..."
    assert (elsewhere.rank, elsewhere.world_size, elsewhere.place) == (1, 2, None)
    assert read_env(environ=step(1) | {"ALLRANKS_ENV": "local"}) == JobEnv(0, 1)


def test_unlaunched_process_in_allocation_logs_warning(caplog: pytest.LogCaptureFixture) -> None:
    batch = {"SLURM_JOB_ID": "17", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
    assert read_env(environ=batch) == JobEnv(0, 1)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "srun did not start this process" in caplog.text
    caplog.clear()
    assert read_env(environ=batch | {"ALLRANKS_ENV": "local"}) == JobEnv(0, 1)
    assert read_env(world_size=1, environ=batch) == JobEnv(0, 1)
    assert not caplog.records


def meet(*environs: dict[str, str], timeout_s: float = 20.0) -> list[Any]:
    """Call ``join`` for all environments concurrently. Return the results and errors."""

    def one(environ: dict[str, str]) -> Any:
        try:
            return join(None, timeout_s=timeout_s, environ=environ)
        except (ConfigError, JoinError) as error:
            return error

    with ThreadPoolExecutor(len(environs)) as pool:
        results = list(pool.map(one, environs))
    closing = [threading.Thread(target=result.close) for result in results if isinstance(result, JobMeeting)]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join()
    return results


@pytest.fixture
def few_ports(monkeypatch: pytest.MonkeyPatch) -> range:
    """Make all jobs use the same three free ports."""
    for first in range(23_000, 24_000, 3):
        ports = range(first, first + 3)
        probes = [socket.socket() for _ in ports]
        try:
            for probe, port in zip(probes, ports, strict=True):
                probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        finally:
            for probe in probes:
                probe.close()
        break
    monkeypatch.setattr(scheduler, "job_ports", lambda secret: list(ports))
    return ports


def test_two_jobs_on_the_same_ports_do_not_join_each_other(few_ports: range) -> None:
    with StoreServer.tcp("127.0.0.1", few_ports[0], b"another program's secret").start():
        environs = [step(rank, job=job) for job in ("17", "18") for rank in (0, 1)]
        results = meet(*environs)
    for result, environ in zip(results, environs, strict=True):
        assert isinstance(result, JobMeeting), result
        assert result.rank == int(environ["SLURM_PROCID"])


def test_error_if_all_ports_are_in_use_lists_the_ports(few_ports: range) -> None:
    taken = [StoreServer.tcp("127.0.0.1", port, b"another program's secret") for port in few_ports]
    try:
        zero, one = meet(step(0), step(1), timeout_s=1.0)
    finally:
        for server in taken:
            server.close()
    assert isinstance(zero, ConfigError)
    assert "rank 0 cannot listen on any of the ports on which the other ranks search for it" in str(zero)
    assert f"{few_ports[2]}" in str(zero)
    assert "Set MASTER_ADDR and MASTER_PORT" in str(zero)
    assert isinstance(one, JoinError)
    assert "rank 0 (a server on host 127.0.0.1, at one of the ports " in str(one)


def test_launcher_without_address_of_rank_0_raises_config_error() -> None:
    environ = {"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"}
    with pytest.raises(ConfigError, match=r"mvapich does not provide the address of rank 0\.\n  Set MASTER_ADDR "):
        join(None, timeout_s=1.0, environ=environ)


class Daemon(threading.Thread):
    """Server of PMI_FD for one rank: answers as hydra and the plugin of SLURM do, or with ``strange``."""

    def __init__(self, strange: str = "") -> None:
        super().__init__(daemon=True)
        self.near, self.far = socket.socketpair()
        self.strange = strange
        self.values: dict[str, str] = {}
        self.calls: list[str] = []

    def run(self) -> None:
        with self.far, self.far.makefile("r") as requests:
            for line in requests:
                said = dict(word.split("=", 1) for word in line.split())
                self.calls.append(said["cmd"])
                self.far.sendall(f"{self.strange or self.answer(said)}\n".encode())

    def answer(self, said: dict[str, str]) -> str:
        if said["cmd"] == "put":
            assert len(said["value"]) < 64
            self.values[said["key"]] = said["value"]
        known = said["cmd"] != "get" or said["key"] in self.values
        return {
            "init": "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1",
            "get_maxes": "cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=64",
            "get_my_kvsname": "cmd=my_kvsname rc=0 kvsname=1.0",
            "put": "cmd=put_result rc=0",
            "barrier_in": "cmd=barrier_out rc=0",
            "get": f"cmd=get_result rc={int(not known)} value={self.values.get(said.get('key', ''), '')}",
            "finalize": "cmd=finalize_ack rc=0",
        }[said["cmd"]]


@pytest.fixture
def no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pmi, "_server", None)
    monkeypatch.setattr(pmi.atexit, "register", lambda *args: None)


@pytest.mark.usefixtures("no_connection")
def test_text_longer_than_a_pmi_value_round_trips() -> None:
    daemon = Daemon()
    daemon.start()
    for text in ("x" * 1000 + "y", "short"):
        board = pmi.PmiBroadcast(daemon.near.fileno())
        board.publish(text)
        assert board.read(5.0) == text
    assert daemon.calls.count("init") == 1
    daemon.near.close()


@pytest.mark.usefixtures("no_connection")
@pytest.mark.parametrize("strange", ["cmd=response_to_init rc=-1", "HTTP/1.1 400 Bad Request", "cmd=other rc=0"])
def test_unexpected_pmi_answer_raises_config_error(strange: str) -> None:
    daemon = Daemon(strange)
    daemon.start()
    with pytest.raises(ConfigError, match=f"it answered '{strange}' to 'cmd=init'"):
        pmi.PmiBroadcast(daemon.near.fileno())
    daemon.near.close()


@pytest.mark.usefixtures("no_connection")
def test_closed_pmi_connection_raises_config_error() -> None:
    daemon = Daemon()
    daemon.far.close()
    with pytest.raises(ConfigError, match=r"does not serve PMI-1 on this descriptor: .*\n  Set MASTER_ADDR "):
        pmi.PmiBroadcast(daemon.near.fileno())
    daemon.near.close()
