"""The tcp engine: the native engine with TCP between all ranks, on one host. tests/hosts tests several hosts."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
import torch

import allranks as dist
from allranks.testing import run_ranks
from support.marked import wait_for


def _tcp_sockets() -> tuple[list[tuple[str, int]], list[str]]:
    """Return the addresses on which this process listens, and the hosts of its connections."""
    listening, peers = [], []
    for number in os.listdir("/proc/self/fd"):
        try:
            probe = socket.socket(fileno=os.dup(int(number)))
        except OSError:
            continue  # a file
        with probe:
            if probe.family != socket.AF_INET:
                continue
            if probe.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                listening.append(probe.getsockname())
            else:
                peers.append(probe.getpeername()[0])
    return listening, peers


def _takers() -> set[str]:
    """Return the threads of this process that can receive SIGINT.

    If the kernel delivers a signal to a thread other than Python's main thread, the main thread does not wake up.
    """
    found = set()
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/status") as file:
            blocked = next(line.split()[1] for line in file if line.startswith("SigBlk"))
        if not int(blocked, 16) >> (signal.SIGINT - 1) & 1:
            found.add(task)
    return found


def test_ranks_listen_on_one_loopback_port_while_a_group_exists() -> None:
    def body() -> None:
        torch.set_num_threads(1)
        assert _takers() == {str(os.getpid())}
        dist.init_process_group("tcp")
        assert dist.get_backend() == "tcp"
        groups = [dist.new_group() for _ in range(3)]
        for group in (None, *groups):
            tensor = torch.ones(100_000)
            dist.all_reduce(tensor, group=group)
            assert (tensor == 3).all()
        dist.all_reduce(torch.ones(1), async_op=True).wait()
        assert len(os.listdir("/proc/self/task")) > 2
        assert _takers() == {str(os.getpid())}
        listening, peers = _tcp_sockets()
        assert [address for address, _ in listening] == ["127.0.0.1"]
        assert set(peers) == {"127.0.0.1"}
        dist.destroy_process_group()
        assert _tcp_sockets() == ([], [])
        assert threading.active_count() == 1

    run_ranks(3, body, init=False)


def test_tcp_groups_leak_no_descriptors_or_threads() -> None:
    def body() -> None:
        dist.init_process_group("tcp")

        def held() -> tuple[int, int]:
            return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

        dist.barrier()  # connects the ranks
        before = held()
        for _ in range(30):
            group = dist.new_group([0, 1])
            dist.all_reduce(torch.ones(1), group=group)
            dist.destroy_process_group(group)
        assert held() == before
        dist.destroy_process_group()

    run_ranks(2, body, init=False)


def test_forked_child_does_not_hide_the_death_of_its_parent(tmp_path: Path) -> None:
    noticed = tmp_path / "noticed"

    def body() -> None:
        dist.init_process_group("tcp")
        dist.barrier()
        if dist.get_rank() == 1:
            if os.fork() == 0:
                wait_for(noticed.exists, 60, fail=False)
                os._exit(0)
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(dist.PeerLostError, match=r"rank 1 .* died"):
            dist.barrier()
        noticed.touch()

    run_ranks(2, body, init=False, may_die={1}, timeout_s=50)


def test_exit_of_a_forked_child_does_not_affect_its_parent() -> None:
    def body() -> None:
        dist.init_process_group("tcp")
        work = dist.all_reduce(torch.ones(1), async_op=True)
        assert work is not None
        work.wait()
        pid = os.fork()
        if pid == 0:
            with pytest.raises(dist.NotInitializedError):
                dist.barrier()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == 2
        dist.destroy_process_group()

    run_ranks(2, body, init=False)
