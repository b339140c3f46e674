"""Workers that terminate, stop, or cannot execute an operation.

Operations that depend on the failure raise an error that names the worker. The other workers continue.
"""

from __future__ import annotations

import inspect
import json
import os
import pickle
import resource
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import allranks
from allranks import RemoteError, UsageError, WorkerLost
from allranks.remote.master.master import Master
from allranks.remote.protocol.flags import read
from support import warm


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def healed(mw: Master) -> Iterator[Master]:
    """A master. The fixture replaces workers that the test has killed."""
    yield mw
    for rank in list(mw.lost):
        mw.respawn(rank)
    assert mw.ranks == [1, 2]


def kill(mw: Master, rank: int) -> None:
    os.kill(mw.connections.by_rank[rank].pid, signal.SIGKILL)


def test_failed_operation_poisons_dependent_tensors(mw: Master) -> None:
    table, right, wrong = (torch.zeros(4), torch.tensor([1]), torch.tensor([9]))
    table, right, wrong = table.to("worker:1"), right.to("worker:1"), wrong.to("worker:1")
    for _ in range(2):
        (torch.index_select(table, 0, right) * 2 + 1).sum().item()
    bad_line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
    bad = torch.index_select(table, 0, wrong)
    worse, good = (bad * 2 + 1).sum(), table + 1
    assert torch.equal(good.cpu(), torch.ones(4))
    with pytest.raises(RemoteError) as caught:
        worse.item()
    error = caught.value
    assert (error.rank, error.operation) == (1, "aten::index_select")
    assert error.line == f"{__file__}:{bad_line}"
    assert str(error).startswith(f"aten::index_select failed on worker 1 (queued at {error.line}): ")
    assert "index out of range" in str(error)
    assert "Traceback" in error.traceback
    mw.synchronize()  # raises nothing, because the error has been raised already


def test_synchronize_raises_an_error_that_no_call_has_raised(mw: Master) -> None:
    table, wrong = torch.zeros(4, device="worker:2"), torch.tensor([9], device="worker:2")
    torch.index_select(table, 0, torch.tensor([1], device="worker:2"))
    torch.index_select(table, 0, wrong)
    with pytest.raises(RemoteError, match="index_select failed on worker 2"):
        mw.synchronize()
    mw.synchronize()


def test_failed_in_place_operation_poisons_all_tensors_that_share_memory(mw: Master) -> None:
    base = torch.zeros(2, 4, device="worker:1")
    row, other, apart = base[0], base[1], base.clone()
    index, source = torch.tensor([1], device="worker:1"), torch.ones(1, device="worker:1")
    row.index_add_(0, index, source)
    assert base.t().sum().item() == 1
    index.fill_(9)
    row.index_add_(0, index, source)
    for spoilt in (row, base, other, base.t()):
        with pytest.raises(RemoteError, match="index_add_"):
            spoilt.cpu()
    assert apart.sum().item() == 0


def test_shape_errors_are_raised_immediately(mw: Master) -> None:
    a, b = torch.zeros(3, 4, device="worker:1"), torch.zeros(3, 4, device="worker:1")
    for wrong in (lambda x, y: x @ y, lambda x, y: x.view(5), lambda x, y: torch.cat([x, y.t()]), lambda x, y: x[3]):
        with pytest.raises((RuntimeError, IndexError)) as local:
            wrong(torch.zeros(3, 4), torch.zeros(3, 4))
        with pytest.raises(local.type) as remote:
            wrong(a, b)
        assert str(remote.value).splitlines()[0] == str(local.value).splitlines()[0]
    mw.synchronize()


def test_worker_continues_after_an_allocation_error(mw: Master) -> None:
    with pytest.raises(RuntimeError, match=r"(?i)memory"):
        torch.empty(1 << 50, device="worker:1").fill_(1).sum().item()
    assert torch.ones(2, device="worker:1").sum().item() == 2


def test_failed_allocation_for_a_transfer_is_reported(mw: Master) -> None:
    """Fail the allocation of a small and of a large transfer.

    For the small transfer, the test replaces the allocation function. To fill the memory of the machine instead would
    terminate other processes.
    """

    def fail_once() -> None:
        real = torch.empty_strided

        def fails(*args: object, **kwargs: object) -> torch.Tensor:
            torch.empty_strided = real
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

        torch.empty_strided = fails  # type: ignore[assignment]

    mw.remote(fail_once, on=1)().result()
    lost = torch.ones(3).to("worker:1")
    with pytest.raises(RemoteError, match=r"transfer of a tensor failed on worker 1.*allocate memory"):
        lost.cpu()
    assert torch.ones(3).to("worker:1").sum().item() == 3
    mw.synchronize()

    def limit(spare: int) -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        most = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (used + spare if spare else most, most))

    large = torch.empty(4 << 30, dtype=torch.uint8)  # the upload fails before any of it is sent
    mw.remote(limit, on=1)(64 << 20).result()
    here = inspect.currentframe().f_lineno + 2  # type: ignore[union-attr]
    with pytest.raises(RemoteError, match=r"upload failed on worker 1.*allocate memory") as caught:
        mw.group([1]).scatter(large)
    mw.remote(limit, on=1)(0).result()
    assert caught.value.line == f"{__file__}:{here}"
    much = torch.arange(3 << 20)
    assert torch.equal(much.to("worker:1").cpu(), much)
    mw.synchronize()


def test_worker_killed_with_queued_work_is_reported_and_can_be_replaced(healed: Master) -> None:
    mw = healed
    group = mw.group([1, 2])
    kept, lost = torch.ones(3, device="worker:1"), torch.ones(300, 300, device="worker:2")
    both, generator = group.scatter(torch.zeros(4)), torch.Generator(device="worker:2")
    pid = mw.connections.by_rank[2].pid
    for _ in range(300):
        lost = lost @ lost.t() / 300
    torch.manual_seed(6)
    torch.rand(1, device="worker:2")
    torch.use_deterministic_algorithms(True)
    kill(mw, 2)
    with pytest.raises(WorkerLost, match=rf"worker 2 \(.*pid {pid}\) is lost: killed by signal 9"):
        lost.sum().item()
    for fails in (
        lambda: lost + 1, lambda: torch.zeros(2, device="worker:2"), lambda: kept.to("worker:2"), lambda: both + 1,
        lambda: group.all_reduce_(both), lambda: mw.group([1, 2]), lambda: both.shard(2), lambda: lost.cpu(),
        lambda: mw.remote(os.getpid, on=2)(), lambda: torch.zeros(2).to("worker:2"), lambda: lost.to("worker:1"),
        lambda: torch.randn(2, device="worker:2", generator=generator),
    ):  # fmt: skip
        with pytest.raises(WorkerLost, match="worker 2"):
            fails()
    assert (kept + 1).sum().item() == 6
    mw.synchronize()
    assert mw.ranks == [1]
    mw.respawn(2)
    assert mw.connections.by_rank[2].pid != pid
    commands = {Path(f"/proc/{worker.pid}/cmdline").read_bytes() for worker in mw.connections.by_rank.values()}
    assert len(commands) == 1  # the replacement is forked from the template process, as the first workers were
    # The replacement starts with the seed that was set before the loss.
    assert torch.equal(torch.rand(3, device="worker:2").cpu(), torch.rand(3))
    assert mw.remote(torch.are_deterministic_algorithms_enabled, on=2)().result()
    torch.use_deterministic_algorithms(False)
    assert mw.remote(read, on=2)().result() == read()
    assert torch.equal(kept.to("worker:2").cpu(), torch.ones(3))
    again = mw.group([1, 2])
    ones = torch.ones(2, device=again.device)
    again.all_reduce_(ones)
    assert again.gather(ones).tolist() == [2.0] * 4
    for stale in (lambda: lost + 1, lambda: kept.to("worker:2") + lost[0, :3], lambda: both.shard(2)):
        with pytest.raises(WorkerLost):
            stale()


def test_killed_worker_ends_waits_and_collectives_with_an_error(healed: Master) -> None:
    mw = healed
    group = mw.group([1, 2])
    ones = torch.ones(2, device=group.device)
    group.all_reduce_(ones)
    assert group.gather(ones).tolist() == [2.0] * 4
    slow = mw.remote(time.sleep, on=2)(60)
    group.all_reduce_(ones)
    mine = ones.shard(1)
    here = torch.ones(1, device="worker:1")
    until(lambda: mw.connections.outbox.pending(0) == 0)
    kill(mw, 2)
    with pytest.raises(WorkerLost):
        slow.result()
    with pytest.raises((RemoteError, WorkerLost), match=r"all_reduce|worker 2"):
        mine.cpu()
    assert here.item() == 1


def test_stopped_worker_is_reported_and_can_be_replaced_by_force(healed: Master) -> None:
    mw = healed
    waiting = mw.remote(os.getpid, on=2)
    assert waiting().result() == mw.connections.by_rank[2].pid
    os.kill(mw.connections.by_rank[2].pid, signal.SIGSTOP)
    try:
        with pytest.raises(allranks.TimeoutError, match=r"worker 2 .* has not answered for 0\.5 s; it is stopped"):
            waiting().result(timeout=0.5)
        assert torch.ones(2, device="worker:1").sum().item() == 2
    finally:
        os.kill(mw.connections.by_rank[2].pid, signal.SIGCONT)
    assert waiting().result() == mw.connections.by_rank[2].pid
    os.kill(mw.connections.by_rank[2].pid, signal.SIGSTOP)
    stopped = mw.connections.by_rank[2].pid
    with pytest.raises(UsageError, match=r"worker 2 is running, and its tensors would be lost.\n.*respawn\(2, force"):
        mw.respawn(2)
    mw.respawn(2, force=True)
    assert mw.connections.by_rank[2].pid != stopped
    assert torch.ones(2, device="worker:2").sum().item() == 2


def test_remote_error_has_the_type_of_the_original_exception(mw: Master) -> None:
    class Mine(Exception):
        def __init__(self, number: int, words: str) -> None:
            super().__init__(number, words)
            self.number = number

    def fails(error: Exception) -> None:
        raise error

    for _ in range(2):  # the master waits for the first call of an operation, so its error is raised immediately
        torch.linalg.inv_ex(torch.eye(2, device="worker:1"), check_errors=True)
        torch.ones(2, device="worker:1")[torch.tensor([1], device="worker:1")]
    torch.linalg.inv_ex(torch.zeros(2, 2, device="worker:1"), check_errors=True)
    lost = torch.ones(2, device="worker:1")[torch.tensor([7], device="worker:1")]
    for call, kind, words in (
        (mw.synchronize, torch.linalg.LinAlgError, "singular"),
        (lambda: lost.cpu(), IndexError, "out of bounds"),
        (mw.remote(fails, on=1)(Mine(3, "x")).result, Mine, "x"),
        (mw.remote(fails, on=1)(KeyError("key")).result, KeyError, "key"),
        (mw.remote(fails, on=1)(FileNotFoundError(2, "none", "file")).result, FileNotFoundError, "none"),
        (mw.remote(fails, on=1)(StopIteration(3)).result, StopIteration, "3"),
        (mw.remote(json.loads, on=1)("{").result, json.JSONDecodeError, "Expecting"),
    ):
        with pytest.raises(kind, match=words) as caught:
            call()
        assert isinstance(caught.value, RemoteError)
        assert (caught.value.rank, type(caught.value.__cause__)) == (1, kind)
        assert str(caught.value).startswith(f"{caught.value.operation} failed on worker 1 (queued at {__file__}:")
        again = pickle.loads(pickle.dumps(caught.value))
        assert (type(again), again.line, str(again)) == (RemoteError, caught.value.line, str(caught.value))
    with pytest.raises(Mine) as caught:
        mw.remote(fails, on=1)(Mine(3, "x")).result()
    assert caught.value.__cause__.number == 3  # type: ignore[union-attr]


def test_function_that_exits_loses_its_worker_with_the_exit_code(healed: Master) -> None:
    mw = healed
    for code, said in ((3, "exit code 3"), ("why", "exit code 1"), (None, "exit code 0")):
        with pytest.raises(WorkerLost, match=rf"worker 2 .* is lost: {said}\.\n  Call mw\.respawn\(2\) to replace it"):
            mw.remote(sys.exit, on=2)(code).result()
        mw.respawn(2)


def test_repr_shows_lost_workers_and_tracebacks_hide_internal_frames(healed: Master) -> None:
    mw = healed
    host = socket.gethostname()
    assert repr(mw) == f"Master(workers 1-2 on {host})"
    assert [each for each in dir(mw) if not each.startswith("_")] == [
        "closed", "group", "keep", "lost", "on_lost", "ranks", "remote", "respawn", "shutdown", "synchronize",
    ]  # fmt: skip
    x = torch.ones(2, device="worker:2")
    kill(mw, 2)
    until(lambda: 2 in mw.lost)
    assert repr(mw) == f"Master(worker 1 on {host}; rank 2 lost)"
    assert repr(x).startswith("tensor(..., device='worker:2', size=(2,), dtype=torch.float32): worker 2")
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device") as caught:
        torch.ones(2, device="worker:1") + torch.ones(2)
    assert {each.path for each in caught.traceback} == {Path(__file__)}


def test_ctrl_c_in_a_wait_warns_and_leaves_the_worker_usable(mw: Master) -> None:
    slow = mw.remote(time.sleep, on=1)(2.0)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    before = signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    try:
        with pytest.raises(KeyboardInterrupt):
            torch.ones(1, device="worker:1").item()
    finally:
        signal.signal(signal.SIGALRM, before)
    with pytest.warns(RuntimeWarning, match=r"worker 1 .* still executing .* before Ctrl-C.* s ago.*\n.*force"):
        assert slow.result() is None
    assert torch.full((1,), 7.0, device="worker:1").item() == 7


def test_calls_after_a_shutdown_report_the_shutdown() -> None:
    program = """
import torch, allranks
with allranks.init_master_worker(workers=1) as mw:
    x = torch.ones(2, device="worker:1")
    future = mw.remote(len, on=1)([1, 2])
for wrong in (lambda: x + 1, lambda: x.cpu(), lambda: print(x), lambda: torch.ones(2, device="worker:1"),
              lambda: future.result(), lambda: mw.synchronize(), lambda: mw.group([1]), lambda: mw.respawn(1)):
    try:
        wrong()
    except allranks.AllranksError as error:
        print(type(error).__name__, str(error).splitlines()[0])
mw.shutdown()
with allranks.init_master_worker(workers=2) as mw:
    print(torch.ones(2, device="worker:2").sum().item())
print(mw)
"""
    done = warm.run([sys.executable, "-c", program], timeout=120)
    assert done.stderr == ""
    said = done.stdout.splitlines()
    assert len(said) == 10, said
    assert said.pop() == "Master(shut down)"
    assert all("shut down" in line or "no workers" in line for line in said[:8]), said
    assert said[8] == "2.0"


@pytest.mark.parametrize(
    "name", ["cholesky", "inv", "solve", "lu_factor", "matrix_power", "tensorinv", "_assert_async"]
)
def test_checks_without_a_result_raise_at_their_call_site(mw: Master, name: str) -> None:
    """Call functions that torch checks with a second operator, which returns nothing and only raises the error."""
    calls: dict[str, Callable[[torch.Tensor], object]] = {
        "solve": lambda a: torch.linalg.solve(a, torch.eye(3, device=a.device)),
        "matrix_power": lambda a: torch.linalg.matrix_power(a, -1),
        "tensorinv": lambda a: torch.linalg.tensorinv(a, ind=1),
        "_assert_async": lambda a: torch._assert_async(a.sum() > 0),
    }
    call = calls.get(name) or getattr(torch.linalg, name)
    good, bad = torch.eye(3), torch.diag(torch.tensor([-1.0, 0, 0]))
    expected: list[type[Exception] | None] = []
    found: list[type[Exception] | None] = []
    for device, kinds in (("cpu", expected), ("worker:1", found)):
        for matrix in (good, bad, bad, good, bad):
            try:
                call(matrix.to(device))
                kinds.append(None)
            except RuntimeError as error:
                kinds.append(torch.linalg.LinAlgError if isinstance(error, torch.linalg.LinAlgError) else RuntimeError)
    assert found == expected
    assert None in found
    assert {*found} != {None}


def test_shape_mismatch_raises_at_its_call_site_and_changes_nothing(mw: Master) -> None:
    table, row = torch.zeros(3, 4, device="worker:1"), torch.zeros(5, device="worker:1")
    for _ in range(2):
        table[[0, 1], [0, 1]] = 1.0
        row.put_(torch.tensor([0, 1]).to("worker:1"), torch.ones(2).to("worker:1"))
    with pytest.raises(IndexError, match="shape mismatch"):
        table[[0, 1], [0, 1, 2]] = 5.0
    with pytest.raises(RuntimeError, match="shape mismatch"):
        table[[0, 1], [0, 1]] = torch.ones(3).to("worker:1")
    with pytest.raises(IndexError, match="same number of elements"):
        row.put_(torch.tensor([0, 1]).to("worker:1"), torch.ones(3).to("worker:1"))
    assert (table.sum().item(), row.sum().item()) == (2.0, 2.0)


def test_one_hot_refuses_classes_out_of_range(mw: Master) -> None:
    one_hot = torch.nn.functional.one_hot
    for _ in range(2):
        classes = torch.tensor([0, 2, 1]).to("worker:1")
        assert torch.equal(one_hot(classes, 3).cpu(), torch.eye(3, dtype=torch.int64)[[0, 2, 1]])
        assert one_hot(classes).shape == (3, 3)
        with pytest.raises(RuntimeError, match="smaller than num_classes"):
            one_hot(torch.tensor([0, 5, 1]).to("worker:1"), 3).cpu()
        with pytest.raises(RuntimeError, match="non-negative"):
            one_hot(torch.tensor([0, -1]).to("worker:1"))


def test_storage_cannot_be_created_on_a_worker(mw: Master) -> None:
    with pytest.raises(UsageError, match="a storage cannot be created on worker:1"):
        torch.UntypedStorage(4, device="worker:1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # TypedStorage is deprecated
        with pytest.raises(UsageError, match="a storage cannot be created on worker:1"):
            torch.TypedStorage(4, dtype=torch.float32, device="worker:1")
    assert torch.UntypedStorage(4).nbytes() == torch.UntypedStorage(4, device="cpu").nbytes() == 4


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_master_starts_under_no_grad_and_inference_mode(mode: str) -> None:
    """Start without gradients: the start must run its trial backward on a worker in any mode of the caller."""
    program = f"""
import torch, allranks as ar
if __name__ == "__main__":
    with torch.{mode}(), ar.init_master_worker(workers=1):
        print(torch.ones(3, device="worker:1").sum().item())
"""
    done = warm.run([sys.executable, "-c", program], timeout=100)
    assert (done.returncode, done.stdout) == (0, "3.0\n"), done
