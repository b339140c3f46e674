"""The gloo engine: supported reductions and transfers, groups next to other engines, and its errors.

tests/conformance/test_programs.py compares the values of every verb with torch.distributed.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import allranks as dist
from allranks._engines.c10d.engine import DTYPES, reduces
from allranks.testing import run_ranks
from support import warm

OPS = [op for op in dist.ReduceOp if op is not dist.ReduceOp.PREMUL_SUM]


def again(**options: object) -> None:
    """Destroy the native world and create a world on gloo."""
    dist.destroy_process_group()
    dist.init_process_group(**{"backend": "gloo", "timeout": 30, **options})


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_gloo_reduces_supported_dtypes_as_the_native_engine_does(ranks: int) -> None:
    def body() -> None:
        gloo = dist.new_group(backend="gloo")
        rank, size = dist.get_rank(), dist.get_world_size()
        for dtype in (*DTYPES, torch.int16):
            mine = (torch.arange(6 * size) + rank).remainder(4).to(dtype)
            for op in OPS:
                if not reduces("gloo", dtype, op):
                    for call in (dist.all_reduce, lambda t, **k: dist.reduce(t, 0, **k)):
                        with pytest.raises(dist.UsageError, match=f"gloo engine does not support {op.name}"):
                            call(mine.clone(), op=op, group=gloo)
                    continue
                expected, actual = mine.clone(), mine.clone()
                dist.all_reduce(expected, op)
                dist.all_reduce(actual, op, group=gloo)
                torch.testing.assert_close(actual, expected)
                actual = mine.clone()
                dist.reduce(actual, size - 1, op, group=gloo)
                torch.testing.assert_close(actual, expected if rank == size - 1 else mine)
                part = torch.zeros(6, dtype=dtype)
                dist.reduce_scatter_tensor(part, mine, op, group=gloo)
                torch.testing.assert_close(part, expected[rank * 6 : rank * 6 + 6])
                dist.reduce_scatter(part.zero_(), list(mine.chunk(size)), op, group=gloo)
                torch.testing.assert_close(part, expected[rank * 6 : rank * 6 + 6])

    run_ranks(ranks, body)


def test_any_dtype_and_layout_is_transferred() -> None:
    def body() -> None:
        again()
        rank, size = dist.get_rank(), dist.get_world_size()
        for dtype in (torch.int16, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint64):
            mine = torch.tensor([[rank, 1, 0], [1, rank, 1]]).float().to(dtype).mT
            outputs = [torch.zeros(3, 2).to(dtype) for _ in range(size)]
            dist.all_gather(outputs, mine)
            for i, output in enumerate(outputs):
                assert output.float().tolist() == torch.tensor([[i, 1.0], [1, i], [0, 1]]).to(dtype).float().tolist()
            got = torch.zeros(2, 3).to(dtype).mT
            dist.send(mine, (rank + 1) % size) if rank == 0 else dist.recv(got, rank - 1)
            if rank:
                assert got.float().tolist() == torch.tensor([[rank - 1.0, 1], [1, rank - 1], [0, 1]]).tolist()
                if rank < size - 1:
                    dist.send(mine, rank + 1)
        uneven = [torch.full((i + 1,), -1) for i in range(size)]
        dist.all_gather(uneven, torch.full((rank + 1,), rank))
        assert [t.tolist() for t in uneven] == [[i] * (i + 1) for i in range(size)]
        tensor = torch.tensor([1.0, 2.0])
        dist.all_reduce(tensor, dist.premul_sum(rank + 1))
        assert tensor.tolist() == [6, 12]
        with pytest.raises(dist.UsageError, match="share memory"):
            dist.all_reduce(torch.zeros(1).expand(3))
        assert dist.stats().calls > 10

    run_ranks(3, body)


def test_messages() -> None:
    def body() -> None:
        again()
        rank = dist.get_rank()
        if rank:
            time.sleep(0.2 * rank)
            dist.send(torch.tensor([rank]), 0, tag=7)
            dist.recv(torch.zeros(1), 0)
            return
        got = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
        work = dist.irecv(got[0], tag=7)
        assert not work.is_completed()
        with pytest.raises(dist.TimeoutError, match="The call continues"):
            work.wait(0.05)
        while not work.is_completed():
            time.sleep(0.01)
        assert (work.source_rank(), got[0].item(), work.exception()) == (1, 1, None)
        assert dist.recv(got[1], tag=7) == 2
        assert got[1].item() == 2
        for work in [dist.isend(torch.ones(1), other) for other in (1, 2)]:
            assert work.wait(10)

    run_ranks(3, body)


def test_groups_of_several_engines_coexist() -> None:
    def body() -> None:
        rank = dist.get_rank()
        gloo, native = dist.new_group([0, 2], backend="gloo"), dist.new_group(backend="native")
        assert (dist.get_backend(), dist.get_backend(native)) == ("native", "native")
        if rank != 1:
            assert (dist.get_backend(gloo), dist.get_backend_config(gloo)) == ("gloo", "cpu:gloo")
            alone = dist.new_group([rank], backend="gloo", use_local_synchronization=True)
            dist.barrier(alone)
            both = dist.new_group([0, 2], backend="gloo", use_local_synchronization=True)
            tensor = torch.tensor([rank])
            dist.all_reduce(tensor, group=both)
            assert tensor.item() == 2
            dist.destroy_process_group(both)
        again()
        assert dist.get_backend() == "gloo"
        for backend, name in ((None, "gloo"), ("native", "native"), ("cpu:gloo,cuda:nccl", "gloo")):
            made = dist.new_group([0, 1], backend=backend)
            if rank < 2:
                assert dist.get_backend(made) == name
                objects = [None, None]
                dist.all_gather_object(objects, {"rank": rank}, group=made)
                assert objects == [{"rank": 0}, {"rank": 1}]
        mine, _ = dist.new_subgroups(1, backend="gloo")
        part = dist.split_group(None, [[0], [1, 2]])
        assert (part.size(), part.backend) == (1 if rank == 0 else 2, "gloo")
        dist.barrier(mine)
        with pytest.raises(dist.MismatchError, match="or another engine than rank 0"):
            dist.new_group(backend="native" if rank else "gloo")
        dist.barrier()

    run_ranks(3, body)


def test_different_backends_are_a_mismatch_that_names_the_ranks() -> None:
    def body() -> None:
        with pytest.raises(dist.MismatchError, match="rank 0 for 'gloo'; rank 1 for 'native'"):
            dist.init_process_group("native" if os.environ["RANK"] == "1" else "gloo", timeout=20)
        assert not dist.is_initialized()

    run_ranks(2, body, init=False)


def test_gloo_connects_ranks_of_different_hosts() -> None:
    """Give each rank the identity of another host. Their store then uses TCP with a secret."""

    def body() -> float:
        from allranks._rendezvous import rendezvous

        rendezvous.machine = lambda: f"host of rank {os.environ['RANK']}"
        rendezvous.socket.gethostname = lambda: "127.0.0.1"
        dist.init_process_group("gloo", timeout=20)
        tensor = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(tensor, group=dist.new_group())
        dist.destroy_process_group()
        return tensor.item()

    assert run_ranks(2, body, init=False, env={"GLOO_SOCKET_IFNAME": "lo"}) == [3.0, 3.0]


@pytest.mark.parametrize("verb", ["all_reduce", "recv"])
def test_killed_rank_is_named_with_gloo(verb: str) -> None:
    def body() -> str:
        again()
        dist.barrier()
        if dist.get_rank() == 1:
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(dist.PeerLostError) as caught:
            dist.all_reduce(torch.ones(3)) if verb == "all_reduce" else dist.recv(torch.ones(3), 1)
        assert caught.value.rank == 1
        with pytest.raises(dist.PeerLostError, match="rank 1"):
            dist.barrier()
        return str(caught.value)

    for text in run_ranks(3, body, may_die={1})[::2]:
        assert text.startswith(f"{verb} on group 'world' (rank ")
        assert "rank 1 (" in text
        assert "died" in text


def test_unknown_failure_of_gloo_names_rank_call_and_next_step() -> None:
    def body() -> None:
        def fail() -> None:
            raise RuntimeError("[/gloo/pair.cc:1] writev: broken")

        again()
        dist.group.WORLD.engine.begin_barrier = fail  # type: ignore[union-attr, attr-defined]
        with pytest.raises(dist.AllranksError) as caught:
            dist.barrier()
        assert str(caught.value).splitlines()[:2] == [
            "barrier on group 'world' (rank 0 of 1): gloo: writev: broken",
            "  Check the output of the other ranks. If it shows no failure, set ALLRANKS_DEBUG=DETAIL: the ranks then"
            " compare their calls.",
        ]

    run_ranks(1, body)


def test_debug_mode_compares_calls() -> None:
    def body() -> None:
        again()
        rank = dist.get_rank()
        dist.all_to_all_single(torch.zeros(3), torch.zeros(3))
        dist.broadcast(torch.ones(2), 1)
        with pytest.raises(
            dist.MismatchError, match=r"ranks 0, 2 called all_reduce of 2 x float32, SUM; rank 1 called all"
        ):
            dist.all_reduce(torch.ones(3 if rank == 1 else 2), async_op=True)
        with pytest.raises(
            dist.MismatchError, match="ranks 0-1 called barrier; rank 2 called gather of 1 x float32, root 2"
        ):
            dist.gather(torch.ones(1), list(torch.ones(3, 1)), 2) if rank == 2 else dist.barrier()
        with pytest.raises(
            dist.MismatchError, match=r"rank 0 called all_reduce of 2 x float32, SUM; ranks 1-2 .*, MAX"
        ):
            dist.all_reduce(torch.ones(2), dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [3, 3]

    run_ranks(3, body, env={"ALLRANKS_DEBUG": "1"})


def test_late_rank_causes_a_timeout() -> None:
    def body() -> None:
        again(timeout=0.6)
        if dist.get_rank() == 1:
            time.sleep(1.5)
            with pytest.raises(dist.AllranksError):
                dist.barrier()
            return
        work = dist.all_reduce(torch.ones(1), async_op=True)
        with pytest.raises(dist.TimeoutError, match=r"has not completed after 0.1 s.\n  The call continues"):
            work.wait(timedelta(seconds=0.1))
        with pytest.raises(dist.TimeoutError, match=r"did not call within 0.6 s"):
            work.wait()
        assert isinstance(work.exception(), dist.TimeoutError)

    run_ranks(2, body)


def test_destroy_fails_pending_calls() -> None:
    def body() -> str:
        again(timeout=300)
        if dist.get_rank() == 1:
            with pytest.raises(dist.PeerLostError, match=r"rank 0 \(.*\) has left"):
                dist.recv(torch.ones(1), 0)
            return ""
        works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(3)]
        works.append(dist.irecv(torch.ones(1), 1))
        threading.Timer(0.3, dist.destroy_process_group).start()
        said = []
        for work in works:
            with pytest.raises(dist.AllranksError) as caught:
                work.wait()
            said.append(str(caught.value))
        return "\n".join(said)

    said = run_ranks(2, body)[0]
    assert said.count("the group was destroyed while the call was pending") == 4


def test_ctrl_c_interrupts_a_blocked_call() -> None:
    def body() -> None:
        again(timeout=300)
        if dist.get_rank() == 1:
            time.sleep(3)  # rank 0 is interrupted before
            return
        for wait in (dist.barrier, lambda: dist.recv(torch.ones(1), 1)):
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                wait()

    run_ranks(2, body)


def test_forked_child_exits_without_blocking() -> None:
    def body() -> int:
        again()
        world = dist.group.WORLD
        work = dist.all_reduce(torch.ones(10), async_op=True)
        receiving = dist.irecv(torch.ones(1), 1 - dist.get_rank())
        pid = os.fork()
        if pid == 0:
            try:
                with pytest.raises(dist.NotInitializedError, match="parent process"):
                    world.barrier()
                with pytest.raises(dist.NotInitializedError, match="A forked child can neither"):
                    receiving.wait()
                del world, work, receiving
                import gc

                gc.collect()
                os._exit(0)
            finally:
                os._exit(1)
        deadline = time.monotonic() + 10
        while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert ended[0] == pid, "the child did not exit"
        work.wait()
        dist.send(torch.ones(1), 1) if dist.get_rank() == 0 else receiving.wait()
        dist.send(torch.ones(1), 0) if dist.get_rank() == 1 else receiving.wait()
        return os.waitstatus_to_exitcode(ended[1])

    assert run_ranks(2, body) == [0, 0]


@pytest.mark.parametrize("pending", [False, True])
def test_process_exit_without_destroy_prints_nothing(pending: bool, tmp_path: Path) -> None:
    program = f"""
import os, pathlib, time
import torch, allranks as dist
dist.init_process_group("gloo", timeout=60)
dist.all_reduce(torch.ones(3))
if {pending}:
    works = [dist.irecv(torch.ones(1), 1 - dist.get_rank()), dist.irecv(torch.ones(1), 1 - dist.get_rank(), tag=2)]
    works[0].is_completed()
    works.append(dist.all_reduce(torch.ones(3), async_op=True) if dist.get_rank() else None)
    # Neither ends before the other has begun all of its calls, as begin would then find a peer that is gone.
    begun = [pathlib.Path(__file__).with_name(f"begun.{{os.getppid()}}.{{rank}}") for rank in range(2)]
    begun[dist.get_rank()].touch()
    while not begun[1 - dist.get_rank()].exists():
        time.sleep(0.01)
"""
    script = tmp_path / "ends.py"
    script.write_text(program)
    for _ in range(2):
        done = warm.run(
            [sys.executable, "-m", "allranks", "run", "-n", "2", str(script)],
            timeout=60,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_repeated_groups_leak_no_descriptors_or_threads() -> None:
    def body() -> tuple[int, int]:
        again()

        def held() -> tuple[int, int]:
            return len(os.listdir("/proc/self/fd")), threading.active_count()

        for i in range(6):
            if i == 1:
                before = held()
            made = dist.new_group()
            dist.barrier(made)
            dist.destroy_process_group(made)
        after = held()
        return after[0] - before[0], after[1] - before[1]

    # The difference is negative if the first group was still closing at its count. A leak would count five times.
    assert all(descriptors <= 0 and threads <= 0 for descriptors, threads in run_ranks(2, body))


def test_gloo_opens_only_its_own_loopback_port() -> None:
    """Check that the only listening port is that of gloo, on the loopback interface."""

    def body() -> list[str]:
        again()
        sockets = set()
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
                sockets.add(os.readlink(f"/proc/self/fd/{fd}"))
        with open("/proc/self/net/tcp") as table:
            lines = [line.split() for line in table.readlines()[1:]]
        with open("/proc/self/net/tcp6") as table:
            lines += [line.split() for line in table.readlines()[1:]]
        listening = [line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in sockets]
        dist.barrier()
        return listening

    for listening in run_ranks(2, body):
        assert len(listening) == 1
        assert listening[0].startswith("0100007F:")
