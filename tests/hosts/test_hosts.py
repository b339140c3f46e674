"""Groups on several hosts, some with several ranks: the functions of groups on one host, and failures of networks."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import allranks as dist
from allranks.testing import run_ranks
from support.cluster import Cluster
from support.overlaps import call_overlapping
from support.prompt import PROMPT_S

SECRET = "a secret of the tests, long enough"
PLACES = ([0, 1], [0, 0, 1, 1], [0, 1, 1, 2])
# Two to four hosts with one to three ranks each, in the order of the hosts and in other orders.
MANY_PLACES = (*PLACES, [3, 0, 2, 1], [0, 0, 0, 1, 1, 1], [0, 1, 2, 3, 3, 0, 2, 3])
PROGRAMS = 4
STEPS = 8

_ports = itertools.count(29600)


def on_hosts(
    hosts: Cluster, places: list[int], body: Callable[..., Any], *args: Any, timeout_s: float = 60.0, **others: Any
) -> list[Any]:
    """Call ``run_ranks`` with rank r on host ``places[r]``. ``args`` are the arguments of ``body``."""
    port = next(_ports)

    def enter_and_run() -> Any:
        rank = int(os.environ["RANK"])
        hosts.hosts[places[rank]].enter()
        os.environ.pop("ALLRANKS_STORE")
        dist.init_process_group(
            init_method=f"tcp://node{places[0]}:{port}", rank=rank, world_size=len(places), timeout=timeout_s
        )
        try:
            return body(*args)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    # Copied, because the process that forks the ranks has the environment of its start.
    copied = {name: os.environ[name] for name in ("ALLRANKS_FABRIC",) if name in os.environ}
    env = {"ALLRANKS_SECRET": SECRET, **copied, **others.pop("env", {})}
    return run_ranks(len(places), enter_and_run, init=False, env=env, timeout_s=timeout_s + 30, **others)


@pytest.mark.parametrize("places", MANY_PLACES, ids=str)
def test_random_programs_equal_torch(four_hosts: Cluster, places: list[int]) -> None:
    sys.path.insert(0, str(Path(__file__).parent.parent / "conformance"))
    import test_programs as programs

    def made_up(seed: int, size: int) -> list[Any]:
        pick = random.Random(seed)
        return [
            programs.Step(
                verb=(verb := pick.choice(programs.REDUCING + programs.MOVING)),
                dtype=pick.choice(programs.NUMBERS if verb in programs.REDUCING else (*programs.NUMBERS, "bool")),
                shape=(pick.choice([1, 0, 3, 40, 3000, 40_000]), *pick.choice([(), (1,), (2, 3)])),
                layout=pick.choice(programs.LAYOUTS),
                op=pick.choice(["SUM", "MIN", "MAX", "PRODUCT"]),
                root=pick.randrange(size),
                group=pick.choice(["world", "some"] if size > 2 else ["world"]),
                waited="no" if verb in programs.SYNCHRONOUS else pick.choice(["no", "at once", "last"]),
                seed=pick.randrange(8),
            )
            for _ in range(STEPS)
        ]

    def body(store: str) -> list[str]:
        import warnings

        import torch.distributed as peer

        warnings.simplefilter("ignore")  # torch's warning about its own names
        rank, size = dist.get_rank(), dist.get_world_size()
        peer.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
        some = range(1, size)
        groups = {
            "peer": {"world": None, "some": peer.new_group(some)},
            "native": {"world": None, "some": dist.new_group(some)},
        }
        wrong = []
        for seed in range(PROGRAMS if size <= 4 else PROGRAMS // 3):
            if said := programs.difference(groups, ("native", made_up(seed, size))):
                wrong.append(f"program {seed}: {said}")
        peer.destroy_process_group()
        return wrong

    port = next(_ports)
    store = f"tcp://{four_hosts.hosts[places[0]].address}:{port}"
    for rank, wrong in enumerate(on_hosts(four_hosts, places, body, store, timeout_s=90)):
        assert not wrong, f"rank {rank}: {wrong[0]}"


@pytest.mark.parametrize("places", [[0, 0, 1, 1], [0, 1, 1, 2]], ids=str)
def test_operands_and_results_may_overlap(three_hosts: Cluster, places: list[int]) -> None:
    on_hosts(three_hosts, places, lambda: call_overlapping(0, 60, "private"))


@pytest.mark.parametrize("places", PLACES, ids=str)
def test_sums_are_bit_identical_for_any_size_of_call(three_hosts: Cluster, places: list[int]) -> None:
    def body() -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(dist.get_rank())
        mine = torch.randn(300_000, generator=generator) * torch.logspace(-6, 6, 300_000)
        results = []
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            operand = (mine % 1000).to(dtype)
            whole = operand.clone()
            dist.all_reduce(whole)  # in many segments and shards
            parts = operand.clone()
            for part in (parts[:500], parts[500:20_000], parts[20_000:]):
                dist.all_reduce(part)
            assert torch.equal(whole, parts), dtype
            root = operand.clone()
            dist.reduce(root, 1)
            assert torch.equal(root, whole if dist.get_rank() == 1 else operand)
            results.append(whole)
        average = mine.clone()
        dist.all_reduce(average, dist.ReduceOp.AVG)
        torch.testing.assert_close(average * dist.get_world_size(), _sum_of(mine), rtol=1e-4, atol=1e-2)
        results.append(average)
        whole = (mine % 1000 - 500).to(torch.int16)
        summed = whole.long()
        dist.all_reduce(summed)
        dist.all_reduce(whole, dist.ReduceOp.AVG)
        assert torch.equal(whole, summed.to(torch.int16).div(dist.get_world_size(), rounding_mode="trunc"))
        return results

    results = on_hosts(three_hosts, places, body)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def _sum_of(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.clone()
    dist.all_reduce(whole)
    return whole


def test_messages_from_any_rank_and_in_the_background(three_hosts: Cluster) -> None:
    def body() -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        if rank == 0:
            seen = []
            for _ in range(2 * (size - 1)):
                tensor = torch.zeros(3)
                seen.append((dist.recv(tensor, tag=7), tensor[0].item()))
            assert sorted(seen) == sorted((r, 10.0 * r + i) for r in range(1, size) for i in range(2))
        else:
            for i in range(2):
                dist.send(torch.full((3,), 10.0 * rank + i), 0, tag=7)
        # All ranks send to all ranks simultaneously, more than any buffer holds, before any rank waits.
        n = 3_000_000
        outs = {r: torch.full((n,), float(rank * size + r)) for r in range(size) if r != rank}
        ins = {r: torch.empty(n) for r in outs}
        works = [dist.isend(t, r, tag=r) for r, t in outs.items()]
        works += [dist.irecv(t, r, tag=rank) for r, t in ins.items()]
        dist.barrier()
        for work in works:
            work.wait()
        assert all((t == r * size + rank).all() for r, t in ins.items())
        # One thread waits long enough to sleep.
        if rank == size - 1:
            time.sleep(0.5)
            dist.send(torch.ones(1), 0)
        elif rank == 0:
            dist.recv(torch.zeros(1), size - 1)

    on_hosts(three_hosts, [0, 1, 1, 2], body)


@pytest.mark.parametrize("places", [[0, 0, 1], [0, 1, 1]], ids=str)
def test_large_reductions_on_hosts_with_unequal_ranks(three_hosts: Cluster, places: list[int]) -> None:
    def body() -> None:
        n = 2_500_001  # several slabs
        for root in range(3):
            tensor = torch.arange(n, dtype=torch.float32).remainder_(1000).mul_(dist.get_rank() + 1)
            dist.reduce(tensor, root)
            factor = 6 if dist.get_rank() == root else dist.get_rank() + 1
            assert torch.equal(tensor, torch.arange(n, dtype=torch.float32).remainder_(1000).mul_(factor))
        parts = torch.ones(3 * n)
        dist.reduce_scatter_tensor(tensor, parts)
        assert (tensor == 3).all()

    on_hosts(three_hosts, places, body)


@pytest.mark.parametrize("places", [[0, 1], [0, 1, 1, 2]], ids=str)
def test_tensors_may_change_as_soon_as_a_call_returns(three_hosts: Cluster, places: list[int]) -> None:
    def body() -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        n = 1_000_003  # large enough for zero-copy sends, in which the kernel reads the pages of the tensor

        def broadcast(x: torch.Tensor) -> torch.Tensor:
            dist.broadcast(x, 0)
            return x.clone()

        def message(x: torch.Tensor) -> torch.Tensor:
            if rank == 0:
                for peer in range(1, size):
                    dist.send(x, peer)
                return x
            got = torch.empty_like(x)
            time.sleep(0.01)  # keeps the sent data in the kernel for some time
            dist.recv(got, 0)
            return got

        def all_reduce(x: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(x, dist.ReduceOp.MAX)
            return x.clone()

        def all_gather(x: torch.Tensor) -> torch.Tensor:
            whole = x.new_empty(size * n)
            dist.all_gather_into_tensor(whole, x)
            return whole

        def all_to_all(x: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(x[: n // size * size])
            dist.all_to_all_single(out, x[: n // size * size])
            return out

        def scatter(x: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(x)
            dist.scatter(out, [x] * size if rank == 0 else None, 0)
            return out

        def reduce_scatter(x: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(x)
            dist.reduce_scatter(out, [x] * size, dist.ReduceOp.MAX)
            return out

        for i in range(6):
            for verb in (broadcast, message, all_reduce, all_gather, all_to_all, scatter, reduce_scatter):
                given = torch.full((n,), float(i))
                got = verb(given)
                given.fill_(-1)
                assert (got == (-1 if verb is message and rank == 0 else i)).all(), verb.__name__

    on_hosts(three_hosts, places, body)


def test_shared_memory_is_used_only_in_groups_of_one_host(three_hosts: Cluster) -> None:
    def body() -> None:
        rank = dist.get_rank()
        across = dist.empty_shared(100_000)
        across.fill_(rank)
        dist.all_reduce(across)
        assert (across == 6).all()
        assert dist.stats().shared == 0
        mine, _ = dist.new_subgroups(2)
        assert mine is not None
        here = dist.empty_shared(100_000, group=mine)
        here.fill_(rank)
        dist.all_reduce(here, group=mine)
        assert (here == (1 if rank < 2 else 5)).all()
        assert dist.stats(mine).shared == 1
        cross = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
        pair = torch.full((5,), float(rank))
        dist.all_reduce(pair, group=cross)
        assert (pair == (2 if rank % 2 == 0 else 4)).all()
        alone = dist.new_group([rank], use_local_synchronization=True)
        dist.barrier(group=alone)
        local = dist.new_group([1, 2, 3], use_local_synchronization=True)
        if rank:
            dist.all_reduce(pair, group=local)

    on_hosts(three_hosts, [0, 0, 1, 1], body)


@pytest.mark.parametrize("level", ["OFF", "DETAIL"])
def test_mismatch_is_raised_on_all_ranks_and_the_group_continues(three_hosts: Cluster, level: str) -> None:
    def body() -> str:
        rank = dist.get_rank()
        tensor = torch.ones(100_000 if rank == 2 else 100)
        with pytest.raises(dist.MismatchError) as caught:
            dist.all_reduce(tensor)
        assert (tensor == 1).all()
        with pytest.raises(dist.MismatchError):
            dist.broadcast(torch.ones(3), src=rank % 2)
        with pytest.raises(dist.MismatchError):
            dist.barrier() if rank == 1 else dist.all_reduce(tensor)
        ins = [torch.ones(2 if (rank, to) == (3, 0) else 1) for to in range(4)]
        with pytest.raises(dist.MismatchError, match="rank 3 sends 8 bytes to rank 0, which expects 4"):
            dist.all_to_all([torch.empty(1) for _ in range(4)], ins)
        whole = torch.ones(50_000)
        dist.all_reduce(whole)
        assert (whole == 4).all()
        return str(caught.value)

    for text in on_hosts(three_hosts, [0, 1, 1, 2], body, env={"ALLRANKS_DEBUG": level}):
        assert "ranks 0-1, 3 called all_reduce(100 x float32, SUM), rank 2 called all_reduce(100000 x float32" in text
        assert len(re.findall(r"rank \d at .*test_hosts.py:\d+", text)) == 4, text


def test_swapped_calls_are_found_in_debug_mode(three_hosts: Cluster) -> None:
    def body() -> None:
        a, b = torch.ones(4), torch.ones(4)

        def first() -> None:
            dist.all_reduce(a)

        def second() -> None:
            dist.all_reduce(b)

        def both() -> None:
            for call in (second, first) if dist.get_rank() == 3 else (first, second):
                call()

        with pytest.raises(dist.MismatchError, match="different orders"):
            both()

    on_hosts(three_hosts, [0, 0, 1, 2], body, env={"ALLRANKS_DEBUG": "DETAIL"})


@pytest.mark.parametrize("count", [1, 5_000_000])
def test_a_killed_rank_is_named_on_every_host(three_hosts: Cluster, count: int) -> None:
    def body() -> tuple[float, str]:
        tensor = torch.ones(count)
        dist.all_reduce(tensor)
        began = time.monotonic()
        if dist.get_rank() == 2:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
            if count == 1:
                time.sleep(10)

        def forever() -> None:
            while True:
                dist.all_reduce(tensor)

        with pytest.raises(dist.PeerLostError) as caught:
            forever()
        assert caught.value.rank == 2
        return time.monotonic() - began, str(caught.value)

    results = on_hosts(three_hosts, [0, 1, 1, 2], body, may_die={2})
    for noticed_s, text in (results[0], results[1], results[3]):
        assert noticed_s < PROMPT_S
        assert re.search(r"rank 2 \(node1, pid \d+\) died", text)


@pytest.mark.parametrize("count", [10, 400_000])
def test_a_killed_rank_is_named_by_every_verb(three_hosts: Cluster, count: int) -> None:
    def body() -> float:
        rank, size = dist.get_rank(), dist.get_world_size()
        mine, whole = torch.ones(count), torch.ones(count * size)
        pieces = list(whole.chunk(size))
        verbs: list[Callable[[Any], object]] = [
            lambda group: dist.all_reduce(mine, group=group),
            lambda group: dist.reduce(mine, 0, group=group),
            lambda group: dist.broadcast(mine, 1, group=group),
            lambda group: dist.all_gather_into_tensor(whole, mine, group=group),
            lambda group: dist.gather(mine, pieces if rank == 3 else None, 3, group=group),
            lambda group: dist.scatter(mine, pieces if rank == 0 else None, 0, group=group),
            lambda group: dist.reduce_scatter_tensor(mine, whole, group=group),
            lambda group: dist.all_to_all_single(whole, torch.ones(count * size), group=group),
            lambda group: dist.barrier(group=group),
            lambda group: (
                dist.send(mine, 2, group=group) if rank != 2 else [dist.recv(mine, group=group) for _ in "abc"]
            ),
            lambda group: (
                dist.recv(mine, 2, group=group) if rank != 2 else [dist.send(mine, r, group) for r in (0, 1, 3)]
            ),
        ]
        groups = [dist.new_group() for _ in verbs]
        for verb, group in zip(verbs, groups, strict=True):
            verb(group)
        dist.barrier()
        began = time.monotonic()
        if rank == 2:
            threading.Timer(random.uniform(0, 0.1), os.kill, (os.getpid(), signal.SIGKILL)).start()

        def forever(verb: Callable[[Any], object], group: Any) -> None:
            while True:
                verb(group)

        for verb, group in zip(verbs, groups, strict=True):
            with pytest.raises(dist.PeerLostError) as caught:
                forever(verb, group)
            assert caught.value.rank == 2, caught.value
        return time.monotonic() - began

    for noticed_s in [s for s in on_hosts(three_hosts, [0, 1, 1, 2], body, may_die={2}) if s is not None]:
        assert noticed_s < PROMPT_S


def test_death_is_detected_without_pending_calls(three_hosts: Cluster) -> None:
    def body() -> None:
        dist.barrier()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1)
        with pytest.raises(dist.PeerLostError, match="died"):
            dist.send(torch.ones(1), 2 - dist.get_rank())

    on_hosts(three_hosts, [0, 1, 2], body, may_die={1})


def test_exited_rank_is_reported_and_its_sent_data_arrives(three_hosts: Cluster) -> None:
    def body() -> None:
        rank = dist.get_rank()
        large = torch.ones(2_000_000)
        if rank == 1:
            dist.send(large, 0)
            dist.destroy_process_group()
            return
        if rank == 0:
            time.sleep(0.5)
            got = torch.zeros_like(large)
            dist.recv(got, 1)
            assert (got == 1).all()
        with pytest.raises(dist.PeerLostError, match=r"rank 1 \(node1, pid \d+\) has left") as caught:
            dist.barrier()
        assert caught.value.rank == 1

    on_hosts(three_hosts, [0, 1, 2], body)


def test_timeout_reports_the_missing_rank(three_hosts: Cluster) -> None:
    def body() -> None:
        if dist.get_rank() == 2:
            time.sleep(4)
            return
        with pytest.raises(dist.TimeoutError, match=r"rank 2 \(node1") as caught:
            dist.barrier()
        assert not caught.value.ranks or caught.value.ranks == (2,)

    on_hosts(three_hosts, [0, 1, 1, 2], body, timeout_s=2)


def test_ctrl_c_interrupts_a_call(three_hosts: Cluster) -> None:
    def body() -> float:
        began = time.monotonic()
        if dist.get_rank() == 0:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                dist.all_reduce(torch.ones(1))
        elif dist.get_rank() == 1:
            with pytest.raises(dist.PeerLostError, match="Ctrl-C"):
                dist.all_reduce(torch.ones(1))
        else:
            time.sleep(1.5)
            return 0
        return time.monotonic() - began

    assert max(on_hosts(three_hosts, [0, 1, 2], body)) < 1.3


def test_stopped_rank_does_not_fail_a_call(three_hosts: Cluster) -> None:
    def body() -> None:
        pids = [0] * 3
        dist.all_gather_object(pids, os.getpid())
        if dist.get_rank() == 0:
            os.kill(pids[2], signal.SIGSTOP)
            threading.Timer(3, os.kill, (pids[2], signal.SIGCONT)).start()
        tensor = torch.ones(1_000_000)
        for _ in range(20):
            dist.all_reduce(tensor, dist.ReduceOp.MAX)

    on_hosts(three_hosts, [0, 1, 2], body)


def test_unplugged_host_is_detected(three_hosts: Cluster) -> None:
    def body(folder: str) -> float:
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        if dist.get_rank() == 0:
            Path(folder, "ready").touch()
        while not Path(folder, "cut").exists():
            time.sleep(0.01)
        began = time.monotonic()
        if dist.get_rank() == 2:
            time.sleep(17)  # the rank must detect the loss although it is not in a call
        with pytest.raises(dist.PeerLostError, match="cannot be reached"):
            dist.all_reduce(tensor)
        return time.monotonic() - began

    with tempfile.TemporaryDirectory() as folder:

        def cut() -> None:
            while not Path(folder, "ready").exists():
                time.sleep(0.05)
            three_hosts.cut(1)
            Path(folder, "cut").touch()

        thread = threading.Thread(target=cut)
        thread.start()
        try:
            assert max(on_hosts(three_hosts, [0, 1, 2], body, folder)) < 18
        finally:
            thread.join()
            three_hosts.plug(1)


def test_different_secrets_are_reported(three_hosts: Cluster) -> None:
    def body() -> None:
        os.environ["ALLRANKS_SECRET"] = f"the secret of rank {dist.get_rank()}"
        with pytest.raises(dist.AllranksError, match=r"secret|did not connect"):
            dist.new_group(timeout=2)

    on_hosts(three_hosts, [0, 1], body)


def test_the_first_program_with_three_shells(three_hosts: Cluster, tmp_path: Path) -> None:
    """Each host resolves its own name to 127.0.1.1, and ranks receive only the variables of THD."""
    program = tmp_path / "first.py"
    program.write_text(
        "import torch, allranks as dist\n"
        "dist.init_process_group(timeout=40)\n"
        "tensor = torch.full((3,), float(dist.get_rank() + 1))\n"
        "dist.all_reduce(tensor)\n"
        "print(dist.get_rank(), tensor.tolist())\n"
    )
    home = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path)}
    shells = (
        {"WORLD_SIZE": "3", "RANK": "0", "MASTER_PORT": "29500"},
        {"WORLD_SIZE": "3", "RANK": "1", "MASTER_ADDR": "node0:29500"},
        {"WORLD_SIZE": "3", "RANK": "2", "MASTER_ADDR": "node0:29500"},
    )
    started = [
        host.start([sys.executable, str(program)], {**home, **shell})
        for host, shell in zip(three_hosts.hosts, shells, strict=True)
    ]
    said = [process.communicate(timeout=60)[0] for process in started]
    assert said == [f"{rank} [6.0, 6.0, 6.0]\n" for rank in range(3)]


def test_ports_require_the_secret(three_hosts: Cluster) -> None:
    """Check that ranks listen only on the address of their host and refuse connections without the secret."""

    def body() -> list[str]:
        import socket

        from allranks._engines.native import tcp
        from allranks._net.handshake import UNKNOWN, ClientHandshake

        def greeting(hello: tcp.ConnectionSubject) -> bytes:
            return ClientHandshake(tcp.PROTOCOL, b"", hello.pack()).begin()

        (server,) = tcp.ConnectionServer._all.values()
        (group,) = server._groups.values()
        if dist.get_rank() == 0:
            # Connections before rank 1: one is silent, one sends HTTP, one claims to be rank 1 and replays the server's
            # proof.
            where = server._listeners[0].getsockname()
            strangers = [socket.create_connection(where, 10) for _ in range(3)]
            strangers[1].sendall(b"GET / HTTP/1.0\r\n\r\n")
            assert strangers[1].recv(10) == b""
            hello = tcp.ConnectionSubject(group.name, 1, 0, tcp.MESSAGE)
            strangers[2].sendall(tcp.pack_frame(greeting(hello)))
            said = strangers[2].recv(1000)
            strangers[2].sendall(tcp.pack_frame(said[-32:]))
            assert strangers[2].recv(10) == b""
            nobody = socket.create_connection(where, 10)
            nobody.sendall(tcp.pack_frame(greeting(hello._replace(group=bytes(16)))))
            assert nobody.recv(100) == tcp.pack_frame(UNKNOWN)
            for stranger in (*strangers, nobody):
                stranger.close()
            assert "secret" in str(group.refusals)
        dist.barrier()
        dist.send(torch.ones(1), 1) if dist.get_rank() == 0 else dist.recv(torch.ones(1), 0)
        return [listener.getsockname()[0] for listener in server._listeners]

    for host, listened in zip(three_hosts.hosts, on_hosts(three_hosts, [0, 1], body), strict=False):
        assert listened == [host.address]


@pytest.mark.parametrize("places", PLACES, ids=str)
def test_windows_and_tensors_of_different_sizes(three_hosts: Cluster, places: list[int]) -> None:
    def body() -> None:
        me, size = dist.get_rank(), dist.get_world_size()
        memory = dist.allocate_tensor((size, 70_000))
        window = dist.new_window(memory)
        assert [window.shares_memory(rank) for rank in range(size)] == [place == places[me] for place in places]
        for turn in range(5):
            for rank in range(size):
                window.put(torch.full((70_000,), float(10 * me + turn)), rank, 70_000 * me)
            for rank in range(size):
                window.wait_signal(rank)
                assert (memory[rank] == 10 * rank + turn).all()
            dist.barrier()
        theirs = torch.empty(3)
        for rank in range(size):
            window.get(theirs, rank, 70_000 * me)
            assert theirs.tolist() == [10.0 * me + 4] * 3
        others = [rank for rank in range(size) if places[rank] != places[me]]
        for rank in others:
            with pytest.raises(dist.UsageError, match="is on another host"):
                window.map_remote_tensor(rank)
        window.tensor_deregister()

        for unit in (3, 150_000):
            parts = [torch.empty(unit * (rank + 1)) for rank in range(size)]
            dist.all_gather_v(parts, torch.full((unit * (me + 1),), float(me)))
            assert all((part == rank).all() for rank, part in enumerate(parts))
            mine = torch.empty(unit * (me + 1))
            dist.reduce_scatter_v(mine, parts)
            assert (mine == me * size).all()

    on_hosts(three_hosts, places, body)
