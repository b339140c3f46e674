"""Typical networks of users, and programs that receive only the variables of their shells.

Every rank is a process with its own environment, started on its host. Each host resolves its own name to 127.0.1.1.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.cluster import Cluster, Host, cluster, trouble

SUM = """
import torch, allranks as dist
dist.init_process_group({arguments})
tensor = torch.full((3,), float(dist.get_rank() + 1))
dist.all_reduce(tensor)
print(dist.get_rank(), dist.get_node_local_rank(0), tensor.tolist())
dist.destroy_process_group()
"""

Rank = tuple[Host, dict[str, str]]


@pytest.fixture(autouse=True)
def _hosts_can_be_made(three_hosts: Cluster) -> None:
    """Assert that the hosts can be created. Otherwise the assertion shows the reason."""
    assert not trouble()


def run(folder: Path, ranks: Sequence[Rank], program: str) -> list[str]:
    """Return the output of each rank. All ranks have the home, and therefore the secret, of one user."""
    script = folder / "program.py"
    script.write_text(program)
    home = {"HOME": str(folder), "PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path)}
    started = [host.start([sys.executable, str(script)], {**home, **shell}) for host, shell in ranks]
    try:
        return [process.communicate(timeout=60)[0].strip() for process in started]
    finally:
        for process in started:
            process.kill()


def sums(size: int, local: Sequence[int] | None = None) -> list[str]:
    total = float(size * (size + 1) // 2)
    return [f"{rank} {local[rank] if local else 0} {[total] * 3}" for rank in range(size)]


def env(rank: int, size: int, **more: str) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(size), **more}


def test_an_address_a_shared_file_and_variables_with_three_shells(three_hosts: Cluster, tmp_path: Path) -> None:
    """Join in three ways in the same processes. The last way is that of gloo, which has to find the interface."""
    shared = tmp_path / "meeting"
    shell = {"FIRST": three_hosts.hosts[0].address, "MASTER_ADDR": "node0", "MASTER_PORT": "29513"}
    ranks = [(host, {"R": str(rank), **shell}) for rank, host in enumerate(three_hosts.hosts)]
    program = "from os import environ as E\n"
    for method in ("f'tcp://{E[\"FIRST\"]}:29511'", f"'file://{shared}'"):
        program += SUM.format(arguments=f"init_method={method}, rank=int(E['R']), world_size=3, timeout=40")
    program += "E.update(RANK=E['R'], WORLD_SIZE='3')\n" + SUM.format(arguments="'gloo', timeout=40")
    shared.touch()  # tempfile creates the file, and its owner expects to find it afterwards
    assert run(tmp_path, ranks, program) == ["\n".join([line] * 3) for line in sums(3)]
    assert [path.name for path in tmp_path.iterdir() if "meeting" in path.name] == ["meeting"]
    assert shared.read_bytes() == b""


def test_two_nodes_with_two_ranks_each_as_torchrun_names_them(three_hosts: Cluster, tmp_path: Path) -> None:
    ranks = [
        (
            three_hosts.hosts[rank // 2],
            env(rank, 4, LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2", MASTER_ADDR="node0", MASTER_PORT="29512"),
        )
        for rank in range(4)
    ]
    assert run(tmp_path, ranks, SUM.format(arguments="timeout=40")) == sums(4, [0, 1, 0, 1])


def test_unreachable_addresses_are_skipped(tmp_path: Path) -> None:
    """Two networks that end at the host, with equal addresses on both hosts, and one network that works."""
    with cluster(2) as made:
        for host in made.hosts:
            for name, address in (("docker0", "172.17.0.1/16"), ("inner", "192.168.5.1/24")):
                host.set_up("link", "add", name, "type", "bridge")
                host.set_up("address", "add", address, "dev", name)
                host.set_up("link", "set", name, "up")
        ranks = [(host, env(rank, 2, MASTER_ADDR="node0", MASTER_PORT="29514")) for rank, host in enumerate(made.hosts)]
        assert run(tmp_path, ranks, SUM.format(arguments="timeout=40")) == sums(2)


def test_selected_network_carries_all_connections(tmp_path: Path) -> None:
    with cluster(2) as made:
        for i in range(2):
            made.wire(i, "fast", f"10.88.0.{i + 1}/16")
        program = SUM.format(arguments="timeout=40").replace(
            "dist.destroy", "dist.barrier()\nprint(sorted(tcp()))\ndist.barrier()\ndist.destroy"
        )
        program = (
            "import socket\n"
            "def tcp():\n"
            "    table = [line.split() for line in open('/proc/self/net/tcp')][1:]\n"
            "    turned = [bytes.fromhex(row[2][:8])[::-1] for row in table if row[3] == '01']\n"
            "    return {socket.inet_ntoa(address) for address in turned}\n" + program
        )
        shell = {"MASTER_ADDR": "10.88.0.1", "MASTER_PORT": "29515"}
        named = ("fast", "10.88.0.0/16")
        ranks = [(host, env(rank, 2, ALLRANKS_IFACE=named[rank], **shell)) for rank, host in enumerate(made.hosts)]
        said = run(tmp_path, ranks, program)
    assert [text.splitlines()[0] for text in said] == sums(2)
    peers = [text.splitlines()[1] for text in said]
    assert "10.88.0.2" in peers[0]
    assert "10.88.0.1" in peers[1]
    assert "10.77" not in peers[0] + peers[1]


def test_ipv6_only(tmp_path: Path) -> None:
    with cluster(2, ipv6=True) as made:
        ranks = [(host, env(rank, 2, MASTER_ADDR="node0", MASTER_PORT="29516")) for rank, host in enumerate(made.hosts)]
        assert run(tmp_path, ranks, SUM.format(arguments="timeout=40")) == sums(2)


def test_rank_waits_for_a_name_that_does_not_resolve_yet(tmp_path: Path) -> None:
    with cluster(2) as made:
        names = made.hosts[1].names
        all_names = names.read_text()
        names.write_text("".join(line for line in all_names.splitlines(True) if "node0" not in line))

        def tell() -> None:
            time.sleep(4)
            names.write_text(all_names)

        thread = threading.Thread(target=tell)
        thread.start()
        ranks = [(host, env(rank, 2, MASTER_ADDR="node0", MASTER_PORT="29517")) for rank, host in enumerate(made.hosts)]
        said = run(tmp_path, ranks, SUM.format(arguments="timeout=40"))
        thread.join()
    assert [text.splitlines()[-1] for text in said] == sums(2)
