"""``--trace`` on several hosts: one timeline with one clock, although each host has its own clock.

The hosts of the tests are network namespaces of one machine, so they share a clock. The test shifts the recorded times
of another host, as if its clock had another start and ran faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from allranks._trace.files import open_trace, trace_files
from allranks._trace.matching import read_process
from allranks._trace.timeline import build
from support.jobs import Jobs, jobs
from support.sshd import Ssh

STEPS = """
    import time, torch, allranks as dist
    dist.init_process_group()
    rank = dist.get_rank()
    for i in range(300):
        dist.all_reduce(torch.ones(4))
        if i % 10 == 0:
            time.sleep(0.01 * (rank == 2))
    dist.send(torch.ones(3), 2) if rank == 0 else dist.recv(torch.ones(3), 0) if rank == 2 else None
"""


@pytest.fixture
def job(ssh: Ssh, tmp_path: Path) -> Iterator[Jobs]:
    with jobs(ssh.hosts, ssh.environ, tmp_path) as made:
        yield made


def test_ranks_of_all_hosts_share_the_clock_of_the_timeline(job: Jobs) -> None:
    done = job.run(0, "-n", "3", "-H", "node0:1,node1:2", "--trace", "traces", job.write(STEPS), torch=True)
    assert done.code == 0, done.err
    files = trace_files([job.folder / "traces"])
    assert [file.name for file in files] == ["rank-0.trace", "rank-1.trace", "rank-2.trace"]
    processes = [read_process(i, file.name, open_trace(file)) for i, file in enumerate(files)]
    assert [process.host for process in processes] == ["node0", "node1", "node1"]
    start = processes[1].began

    def shifted(ns: int) -> int:
        return ns and ns + 987_654_321_012 + round((ns - start) * 70e-6)

    for i in (1, 2):
        calls = [
            replace(
                call,
                entered_ns=shifted(call.entered_ns),
                met_ns=shifted(call.met_ns),
                returned_ns=shifted(call.returned_ns),
            )
            for call in processes[i].calls
        ]
        processes[i] = replace(processes[i], began=shifted(processes[i].began), calls=calls)
    found = build(processes)
    (_, clock) = found.clocks
    assert (clock.host, clock.ranks) == ("node1", (1, 2))
    assert clock.error is not None
    for each in found.slices:
        process = found.rows[each.row].process
        true = open_trace(files[process]).last(1)[0].entered_ns if each.call is processes[process].calls[-1] else None
        if true is not None:
            assert abs(each.begin + found.zero - true) <= clock.error
    assert found.late[0].rank == 2
    assert [arrow.kind for arrow in found.arrows].count("message") == 1
    print(f"error {clock.error / 1e3:.1f} us")
