"""Connections between hosts: opened by the rank that needs them first, and closed with the group."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
from test_hosts import on_hosts

import allranks as dist
from support.cluster import Cluster
from support.prompt import PROMPT_S

_ESTABLISHED, _LISTEN = "01", "0A"


def _held(state: str) -> int:
    """Return the number of TCP sockets of this process in a state."""
    links = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if entry.is_symlink()]
    mine = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return len({row[9] for row in rows if row[3] == state} & mine)  # a row can occur twice


def test_ranks_hold_only_connections_that_they_use(three_hosts: Cluster, tmp_path: Path) -> None:
    def body() -> None:
        rank = dist.get_rank()
        leads = rank % 2 == 0
        # Each leader is connected with the two other leaders from the start. Rank 0 also listens for torch's default
        # group, on its own address and on loopback.
        listening = 1 if rank else 3
        assert (_held(_ESTABLISHED), _held(_LISTEN)) == (2 if leads else 0, listening)
        (tmp_path / str(rank)).touch()
        while len(list(tmp_path.iterdir())) < dist.get_world_size():  # a barrier would open connections
            time.sleep(0.01)
        # Rank 0 is stopped while other ranks connect with it. They must wait for it.
        if rank == 5:
            pids = [int(member.pid) for member in dist.group.WORLD.members]
            os.kill(pids[0], signal.SIGSTOP)
            threading.Timer(1.0, os.kill, (pids[0], signal.SIGCONT)).start()
        small = torch.ones(3)
        dist.all_reduce(small)
        assert (small == 6).all()
        assert _held(_ESTABLISHED) == (4 if leads else 0)
        dist.barrier()
        if rank == 1:
            dist.send(small, 3)
        elif rank == 3:
            dist.recv(small, 1)
        dist.barrier()
        assert _held(_ESTABLISHED) == (4 if leads else 1 if rank in (1, 3) else 0)
        dist.barrier()
        # A large call connects each rank with its counterparts on the other hosts.
        large = torch.ones(500_000)
        dist.all_reduce(large)
        assert (large == 6).all()
        held = len(os.listdir("/proc/self/fd")), _held(_ESTABLISHED), threading.active_count()
        assert held[1:] == (4 if leads else 3 if rank in (1, 3) else 2, 3)  # threads: main, connections, wait reports
        work = None
        for i in range(50):
            group = dist.new_group([i % 2, 2 + i % 2, 4])
            if rank in (i % 2, 2 + i % 2, 4):
                other = {i % 2: 2 + i % 2, 2 + i % 2: i % 2}.get(rank)
                if other is not None and i % 5 == 0:  # both connect with each other simultaneously
                    work = dist.isend(torch.full((2,), float(rank)), other, group=group)
                    got = torch.zeros(2)
                    dist.recv(got, other, group=group)
                    assert (got == other).all()
                    work.wait()
                dist.all_reduce(small, dist.ReduceOp.MAX, group=group)
                dist.destroy_process_group(group)
        del group, work
        dist.barrier()
        assert (len(os.listdir("/proc/self/fd")), _held(_ESTABLISHED), threading.active_count()) == held
        dist.barrier()
        dist.destroy_process_group()
        assert (_held(_ESTABLISHED), _held(_LISTEN), threading.active_count()) == (0, 0, 1)

    on_hosts(three_hosts, [0, 0, 1, 1, 2, 2], body)


@pytest.mark.parametrize("victim", [2, 3], ids=["a leader", "another"])
def test_rank_killed_before_the_first_connection_is_reported(three_hosts: Cluster, victim: int) -> None:
    def body() -> float:
        if dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        if dist.get_rank() == 0:
            with pytest.raises(dist.PeerLostError, match="died") as caught:
                dist.recv(torch.ones(1), 1)  # rank 1 is alive, but waits in another call
        else:
            with pytest.raises(dist.PeerLostError, match="died") as caught:
                dist.all_reduce(torch.ones(1))
        assert caught.value.rank == victim
        return time.monotonic() - began

    results = on_hosts(three_hosts, [0, 0, 1, 1, 2], body, may_die={victim})
    assert max(noticed_s for noticed_s in results if noticed_s is not None) < PROMPT_S


def test_unreachable_rank_is_reported_after_the_connect_timeout(three_hosts: Cluster) -> None:
    def body() -> str:
        from allranks._engines.native import tcp as native_tcp

        native_tcp._GIVE_UP_S = 0.5
        (server,) = native_tcp.ConnectionServer._all.values()
        if dist.get_rank() == 0:
            for listener in server._listeners:
                listener.close()
        else:
            (group,) = server._groups.values()
            (address,), port = group.targets[0]
            listens = True
            while listens:
                try:
                    socket.create_connection((address, port), 10).close()
                except ConnectionRefusedError:
                    listens = False
                except ConnectionResetError:
                    continue  # the connection was in the backlog when the listener was closed
        with pytest.raises(dist.PeerLostError) as caught:
            dist.all_reduce(torch.ones(1))
        assert caught.value.rank == 0 or dist.get_rank() == 0
        return str(caught.value)

    texts = on_hosts(three_hosts, [0, 1], body)
    assert "cannot be reached" in texts[0]
    assert "tried port" in texts[1]
    assert "ALLRANKS_IFACE" in texts[1]
    assert three_hosts.hosts[0].address in texts[1]


@pytest.mark.parametrize("how", ["leaves", "dies"])
def test_ranks_continue_after_their_leader_has_exited(three_hosts: Cluster, how: str) -> None:
    def body() -> None:
        rank = dist.get_rank()
        dist.barrier()
        if rank == 1:
            time.sleep(0.2)
            return
        time.sleep(0.5)
        if rank == 2:
            got = torch.zeros(3)
            dist.recv(got, 0)
            dist.send(got, 0)
            if how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            return
        dist.send(torch.ones(3), 2)
        got = torch.zeros(3)
        dist.recv(got, 2)
        assert (got == 1).all()
        began = time.monotonic()
        with pytest.raises(dist.PeerLostError) as caught:
            dist.recv(got, 2)
        assert caught.value.rank == 2
        assert time.monotonic() - began < PROMPT_S

    on_hosts(three_hosts, [0, 1, 1], body, may_die={2} if how == "dies" else set())
