"""``allranks doctor`` in a job of several hosts, each of which resolves its own name to 127.0.1.1."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

from support.cluster import Cluster
from support.slurm import Slurm

PLACES = (0, 0, 1)


def doctor(
    hosts: Cluster,
    home: Path,
    port: int,
    *options: str,
    ranks: tuple[int, ...] = (0, 1, 2),
    places: tuple[int, ...] = PLACES,
) -> list[tuple]:
    """Return exit code and output of each started rank, of three ranks."""
    shell = {"HOME": str(home), "PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path)}
    where = {"WORLD_SIZE": "3", "MASTER_ADDR": f"node0:{port}", "OMP_NUM_THREADS": "1"}
    started = [
        hosts.hosts[places[rank]].start(
            [sys.executable, "-m", "allranks", "doctor", *options], {**shell, **where, "RANK": str(rank)}
        )
        for rank in ranks
    ]
    try:
        said = [process.communicate(timeout=60)[0] for process in started]
        return [(process.returncode, text) for process, text in zip(started, said, strict=True)]
    finally:
        for process in started:
            process.kill()


def test_doctor_in_a_job_of_srun(slurm: Slurm, tmp_path: Path) -> None:
    figures = tmp_path / "found.json"
    done = slurm.run(
        "srun", "-N2", "-n3", sys.executable, "-m", "allranks", "doctor", "--json", str(figures), "--megabytes", "1",
        HOME=str(tmp_path), PYTHONPATH=os.pathsep.join(sys.path),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    text = done.stdout
    assert text.count("3 ranks on node0, node1\n") == 1
    report = json.loads(figures.read_text())
    assert report["hosts"] == ["node0", "node0", "node1"]
    assert [(pair["first"], pair["second"]) for pair in report["pairs"]["found"]] == [(0, 1), (0, 2), (1, 2)]
    assert all(pair["latency_us"] > 0 and pair["bandwidth_gb_s"] > 0 for pair in report["pairs"]["found"])
    lines = {(line["name"], line["where"]): line for line in report["lines"]}
    for host, address in (("node0", "10.77.0.1"), ("node1", "10.77.0.2")):
        name = lines["host name", host]  # the text differs between the hosts, so each host has its own line
        assert name["verdict"] == "warn"
        assert name["measured"] == f"{host} is 127.0.1.1, which on another host means that host itself"
        assert "GLOO_SOCKET_IFNAME=eth0" in name["advice"]
        assert f"'{address} {host}'" in name["advice"]
    assert lines["torch", ""]["verdict"] == "ok"  # both hosts report the same text
    clock = lines["clock", "node1"]
    assert clock["verdict"] == "ok"  # the hosts share the clock of one machine
    assert float(clock["measured"].split()[0]) < 100
    assert {line["measured"].split(" ")[0] for line in report["lines"] if line["name"] == "latency"} == {
        "in",
        "between",
    }
    assert "warn  host name" in text
    assert "node1:2" in text


def test_a_rank_that_does_not_come(three_hosts: Cluster, tmp_path: Path) -> None:
    here, missing = (0, 1), 2
    for rank, (code, text) in zip(
        here, doctor(three_hosts, tmp_path, 29582, "--timeout", "3", ranks=here), strict=True
    ):
        assert code == 1
        assert "Traceback" not in text
        joined = next(line for line in text.splitlines() if line.startswith("FAIL  join"))
        assert f"rank {rank} on node{PLACES[rank]}" in joined
        assert re.search(rf"ranks? [\d, -]*{missing}\b", joined), joined
        assert f"[rank {rank} on node{PLACES[rank]}] node{PLACES[rank]} is 127.0.1.1" in text


def test_ranks_that_cannot_reach_each_other_are_reported(three_hosts: Cluster, tmp_path: Path) -> None:
    # Both ranks can reach rank 0, the rendezvous.
    for host, other in ((1, 3), (2, 2)):
        three_hosts.hosts[host].set_up("route", "add", "blackhole", f"10.77.0.{other}/32")
    try:
        found = doctor(three_hosts, tmp_path, 29589, "--timeout", "4", places=(0, 1, 2))
    finally:
        for host, other in ((1, 3), (2, 2)):
            three_hosts.hosts[host].set_up("route", "del", "blackhole", f"10.77.0.{other}/32")
    assert [code for code, _ in found] == [1, 1, 1]
    failures = [next(line for line in text.splitlines() if line.startswith("FAIL")) for _, text in found]
    assert "[rank 1 on node1] rank 1 (host node1): rank 2 (node2) did not connect" in failures[1]
    assert "[rank 2 on node2] rank 2 (host node2): rank 1 (node1) did not connect" in failures[2]
    assert failures[0].split()[1] in ("reach", "join")  # rank 0 reaches both ranks, and loses them when they give up
    assert all("Traceback" not in text for _, text in found)
