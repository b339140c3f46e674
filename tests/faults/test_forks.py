"""Forked children, such as workers of data loaders: they can exit in every way without effect on their parent.

ALLRANKS_FORKS: number of children per rank in the test with random moments; ALLRANKS_FORKS_SEED: its seed.
"""

import contextlib
import gc
import os
import signal
import socket
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch

import allranks as dist
from allranks._base.forks import Socket
from allranks.testing import run_ranks
from support import warm

CHILDREN = int(os.environ.get("ALLRANKS_FORKS", "250"))
SEED = int(os.environ.get("ALLRANKS_FORKS_SEED", "1"))
FORKING = Path(__file__).parent / "forking.py"


def run(script: Path, *arguments: object, ranks: int = 2, options: tuple[str, ...] = ()) -> str:
    """Run a script that must succeed on several ranks, and return its output."""
    words = [sys.executable, "-m", "allranks", "run", "-n", str(ranks), *options, str(script), *map(str, arguments)]
    done = warm.run(words, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "terminate called" not in done.stderr, done.stderr
    assert "Exception ignored" not in done.stderr, done.stderr
    return done.stdout


def in_child(body) -> int:
    """Fork a child that calls ``body``, and return its exit status. A child that hangs is killed."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(60)
            body()
            code = 0
        except BaseException:  # noqa: BLE001 - the exit status reports any error to the parent
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_no_child_keeps_a_socket_that_is_being_closed() -> None:
    """Fork while another thread opens and closes sockets. Without a lock, half of the children kept one."""

    def open_sockets() -> set[str]:
        found = set()
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
                found.add(os.readlink(f"/proc/self/fd/{fd}"))
        return {each for each in found if each.startswith("socket:")}

    def child() -> None:
        assert open_sockets() <= before

    def open_and_close() -> None:
        while not over.is_set():
            Socket(socket.AF_UNIX, socket.SOCK_DGRAM).close()

    before, over = open_sockets(), threading.Event()
    thread = threading.Thread(target=open_and_close)
    thread.start()
    try:
        assert [in_child(child) for _ in range(50)] == [0] * 50
    finally:
        over.set()
        thread.join()


def test_child_can_collect_groups_with_pending_calls() -> None:
    def body() -> list[int]:
        rank = dist.get_rank()
        group = dist.new_group([0, 1])
        work = dist.all_reduce(torch.ones(4), group=group, async_op=True)
        sent = torch.ones(4 << 20)
        sending = dist.isend(sent, 1 - rank, group=group)

        def child() -> None:
            nonlocal group, work, sending
            thread = threading.Thread(target=time.sleep, args=(0,))  # may reuse the memory of a thread of the parent
            thread.start()
            thread.join()
            with pytest.raises(dist.NotInitializedError, match="belongs to the parent process"):
                dist.barrier(group)
            del group, work, sending
            gc.collect()

        codes = [in_child(child) for _ in range(2)]
        got = torch.zeros(4 << 20)
        dist.recv(got, 1 - rank, group=group)
        sending.wait()
        work.wait()
        assert (got == 1).all()
        return codes

    assert run_ranks(2, body) == [[0] * 2] * 2


def test_child_forked_by_a_signal_handler_within_a_call_exits_cleanly(tmp_path: Path) -> None:
    """Fork in a signal handler that then returns or raises in the child. The other rank calls after the fork."""

    def body() -> list[int]:
        children: list[int] = []
        codes = []

        class Enough(Exception):
            pass

        def handler(*_: object) -> None:
            if not children:
                children.append(os.fork())
                if children[0] == 0:
                    signal.alarm(60)
                    signal.signal(signal.SIGALRM, signal.SIG_DFL)
                    if raises:
                        raise Enough
                else:
                    (tmp_path / f"forked {len(codes)}").touch()

        for raises in (False, True):
            for call in (
                lambda: dist.all_reduce(torch.ones(2)),
                lambda: dist.all_reduce(torch.ones(2), async_op=True).wait(),
                lambda: dist.recv(torch.ones(2), 1),
                lambda: dist.irecv(torch.ones(2), 1).wait(),
            ):
                if dist.get_rank() == 0:
                    children.clear()
                    signal.signal(signal.SIGALRM, handler)
                    try:
                        signal.setitimer(signal.ITIMER_REAL, 0.02)
                        call()
                    except (Enough, dist.NotInitializedError) as error:
                        os._exit(0 if isinstance(error, Enough) == raises and children == [0] else 1)
                    if children == [0]:
                        os._exit(2)
                    codes.append(os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]))
            if dist.get_rank() == 1:
                for number, message in enumerate((False, False, True, True), 4 * raises):
                    while not (tmp_path / f"forked {number}").exists():
                        time.sleep(0.01)
                    dist.send(torch.ones(2), 0) if message else dist.all_reduce(torch.ones(2))
        dist.barrier()
        return codes

    assert run_ranks(2, body)[0] == [0] * 8


def test_children_form_their_own_world_without_effect_on_their_parents(tmp_path: Path) -> None:
    """Create worlds of children and of grandchildren through a file, while a call of the parents is pending."""

    def body() -> int:
        rank = dist.get_rank()
        file = tmp_path / "meeting"

        def world(init_method: str) -> None:
            dist.init_process_group(init_method=init_method, rank=rank, world_size=2)
            tensor = torch.full((3,), 1.0 + rank)
            dist.all_reduce(tensor)
            assert tensor.tolist() == [3, 3, 3]
            assert dist.get_rank(dist.new_group([1, 0])) == rank
            dist.destroy_process_group()
            assert not dist.is_initialized()

        def child() -> None:
            world(f"file://{file}")
            assert in_child(lambda: world(f"file://{file}2")) == 0

        pending = dist.all_reduce(torch.ones(1), async_op=True)
        code = in_child(child)
        pending.wait()
        dist.barrier()
        return code

    assert run_ranks(2, body) == [0, 0]


def test_default_group_of_torch_in_a_child_belongs_to_the_parent() -> None:
    """Use the group in a child before and after the parent has used it, and in a world of the child."""

    def body() -> list[int]:
        torchs = torch.distributed

        def child() -> None:
            assert (torchs.is_initialized(), torchs.get_rank(), torchs.get_world_size()) == (True, dist.get_rank(), 2)
            with pytest.raises(dist.NotInitializedError, match="belongs to the parent process"):
                torchs.all_reduce(torch.ones(1))
            dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
            assert (torchs.get_rank(), torchs.get_world_size()) == (0, 1)
            torchs.all_reduce(torch.ones(1))
            dist.destroy_process_group()
            assert not torchs.is_initialized()

        codes = [in_child(child)]
        torchs.barrier()
        codes.append(in_child(child))
        torchs.barrier()
        return codes

    assert run_ranks(2, body) == [[0, 0]] * 2


def test_a_child_uses_its_parents_stores(tmp_path: Path) -> None:
    """Use stores in children, through new connections, while threads of the parent wait for a key."""
    for store in (
        dist.TCPStore("localhost", 0, is_master=True),
        dist.FileStore(str(tmp_path / "store")),
        dist.HashStore(),
    ):
        waiting = [threading.Thread(target=store.get, args=("late",)) for _ in range(2)]
        for thread in waiting:
            thread.start()

        def child(store=store) -> None:
            store.set("child", b"1")
            assert store.get("child") == b"1"
            with pytest.raises(dist.TimeoutError):
                store.wait(["never"], timeout=0.05)
            store.close()
            gc.collect()

        assert [in_child(child) for _ in range(3)] == [0] * 3
        store.set("late", b"")
        for thread in waiting:
            thread.join(60)
        assert store.peek(["child"]) == [None if isinstance(store, dist.HashStore) else b"1"]
        store.close()


def test_child_forked_while_threads_hold_the_file_lock_can_use_the_store(tmp_path: Path) -> None:
    """Fork while threads hold the lock. A child that inherits the lock would wait for itself."""
    store = dist.FileStore(str(tmp_path / "store"))
    ended = threading.Event()

    def keep_asking() -> None:
        while not ended.is_set():
            store.add("asked", 1)

    asking = [threading.Thread(target=keep_asking) for _ in range(3)]
    for thread in asking:
        thread.start()
    try:
        for i in range(40):
            assert in_child(lambda i=i: store.set(f"child {i}", b"1")) == 0
    finally:
        ended.set()
        for thread in asking:
            thread.join()
    assert store.num_keys() == 41
    store.close()


def test_child_forked_within_a_file_store_request_can_use_the_store(tmp_path: Path) -> None:
    """Fork in a signal handler. The child's copy of the request is refused, and its next request succeeds."""
    store = dist.FileStore(str(tmp_path / "store"))
    store.set("before", b"1")
    store.set("during", b"1")
    children: list[int] = []

    def handler(*_: object) -> None:
        children.append(os.fork())
        if children[-1] == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(60)

    before = signal.signal(signal.SIGALRM, handler)
    try:
        for i in range(30):
            refused = False
            signal.setitimer(signal.ITIMER_REAL, 0.0001 + i * 1e-5)
            while len(children) == i:
                try:
                    assert store.get("before") == b"1"
                    store.set("during", b"1")
                except dist.NotInitializedError as error:
                    refused = "FileStore" in str(error)
            if children[-1] == 0:
                right = store.get("before") == b"1"
                os._exit(0 if right and store.num_keys() == 2 else 1)
            assert not refused
            assert os.waitstatus_to_exitcode(os.waitpid(children[-1], 0)[1]) == 0
    finally:
        if 0 in children:
            os._exit(2)
        signal.signal(signal.SIGALRM, before)
    assert store.num_keys() == 2
    store.close()


ENDS = """
import atexit, multiprocessing, os, signal, subprocess, sys, threading, time
import torch
import allranks as dist

def started(): print("started", flush=True)

def use(lock):
    with lock:
        assert dist.get_world_size() == 2

if __name__ == "__main__":
    dist.init_process_group()
    rank = dist.get_rank()
    group = dist.new_group([1, 0])
    pending = [dist.all_reduce(torch.ones(10), group=group, async_op=True), dist.irecv(got := torch.zeros(3), 1 - rank)]
    future = pending[0].get_future()
    kept = dist.empty_shared(1000).fill_(rank)
    expected = {"exit": 0, "sys.exit": 7, "raise": 1, "end": 0, "kill": -9}
    for end, code in expected.items():
        if (pid := os.fork()) == 0:
            signal.alarm(100)
            if end == "exit":
                os._exit(0)
            if end == "sys.exit":
                sys.exit(7)
            if end == "raise":
                sys.excepthook = lambda *_: None
                raise ValueError
            if end == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            break  # the end of the program
        found = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert found == code, (end, found)
    else:
        for method in ("fork", "forkserver", "spawn"):
            context = multiprocessing.get_context(method)
            lock = context.Lock()  # with the resource tracker
            if method == "fork":
                process = context.Process(target=use, args=(lock,))
            else:
                process = context.Process(target=started)
            process.start()
            process.join(100)
            assert process.exitcode == 0, (method, process.exitcode)
        with open("/dev/null") as given:
            for options in ({}, {"close_fds": False}, {"pass_fds": [given.fileno()]}, {"preexec_fn": os.getpid}):
                subprocess.run(["true"], check=True, **options)
        dist.send(torch.ones(3), 1 - rank)
        for work in pending:
            work.wait()
        assert future.wait()[0].tolist() == [2] * 10 and got.tolist() == [1] * 3
        dist.all_reduce(kept)
        assert (kept == 1).all()
        dist.barrier()
        dist.destroy_process_group()
        print("ended", flush=True)
"""


def test_children_can_exit_in_every_way(tmp_path: Path) -> None:
    """Exit by os._exit, sys.exit, an exception, the program end, a signal, multiprocessing and subprocess."""
    script = tmp_path / "ends.py"
    script.write_text(ENDS)
    assert sorted(line[4:] for line in run(script).splitlines()) == ["ended"] * 2 + ["started"] * 4


TRAINING = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

class Numbers(IterableDataset):
    def __iter__(self):
        rank, size = dist.get_rank(), dist.get_world_size()  # in the loader's worker
        return (torch.full((10,), float(each)) for each in range(rank, 24, size))

dist.init_process_group(sys.argv[1])
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(10, 1))
optimizer = torch.optim.SGD(model.parameters(), 1e-4)
seen = []
kept = DataLoader(Numbers(), batch_size=4, num_workers=1, persistent_workers=True)
for epoch in range(4):
    for x in kept if epoch % 2 else DataLoader(Numbers(), batch_size=4, num_workers=1):
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
        seen += x[:, 0].int().tolist()
assert seen == 4 * list(range(dist.get_rank(), 24, 2)), seen
print("ended with", model.module.weight.sum().item())
dist.destroy_process_group()
"""


def test_training_with_data_loaders_gives_the_results_of_gloo(tmp_path: Path) -> None:
    """Train with DistributedDataParallel and DataLoader on gloo, on the plugin, and with --instead-of-gloo."""
    script = tmp_path / "training.py"
    script.write_text(textwrap.dedent(TRAINING))
    gloo, plugin, instead = (
        sorted(line[4:] for line in run(script, name, options=options).splitlines() if "ended" in line)
        for name, options in (("gloo", ()), ("allranks", ()), ("gloo", ("--instead-of-gloo",)))
    )
    assert len(gloo) == 2
    assert gloo == plugin == instead


MASTER = """
import gc, os, signal, sys, threading, time
import torch
import allranks
from torch.utils.data import DataLoader, Dataset

class Data(Dataset):
    def __init__(self, data): self.data = data
    def __len__(self): return 8
    def __getitem__(self, at): return self.data[at].cpu()

if __name__ == "__main__":
    mw = allranks.init_master_worker(workers=2)
    x = torch.ones(100, 100, device="worker:1")
    y = torch.ones(600, 600, device="worker:2")
    generator = torch.Generator(device="worker:1").manual_seed(0)
    square = mw.remote(lambda each: each * each)
    total = 0
    gc.freeze()
    for turn in range(12):
        x = x @ torch.eye(100, device="worker:1")
        future = square(x)
        group = mw.group([1, 2]) if turn % 4 == 0 else None
        end = ("sys.exit", "end")[turn] if turn < 2 else "exit"
        if (pid := os.fork()) == 0:
            signal.alarm(100)
            for use in (lambda: x + 1, lambda: x.sum().item(), lambda: torch.ones(2, device="worker:2"), y.cpu,
                        future.result, mw.synchronize, lambda: mw.group([1, 2]), lambda: print(x),
                        lambda: square(x), lambda: mw.respawn(1)):
                try:
                    use()
                except allranks.NotInitializedError as error:
                    assert "forked" in str(error) and ".cpu()" in str(error), error
                else:
                    os._exit(3)
            threading.Thread(target=gc.collect).start()
            mw.shutdown()
            del x, y, future, square, generator, group, use
            gc.collect()
            if end == "exit":
                os._exit(0)
            if end == "sys.exit":
                sys.exit(0)
            break
        assert os.waitpid(pid, 0)[1] == 0
        total += future.result().sum().item()
    else:
        assert total == 12 * 10000, total
        assert (x.sum() + y.cpu().sum() - 360000).item() == 10000
        data = torch.arange(8.0)
        for workers in (0, 1):
            assert [each.tolist() for each in DataLoader(Data(data), 8, num_workers=workers)] == [list(range(8))]
        try:
            list(DataLoader(Data(data.to("worker:1")), 8, num_workers=1))
        except allranks.NotInitializedError as error:
            assert ".cpu()" in str(error)
        else:
            raise AssertionError("a loader's worker used a tensor on a worker")
        print("ended")
"""


def test_master_with_queued_operations_can_fork(tmp_path: Path) -> None:
    script = tmp_path / "master.py"
    script.write_text(MASTER)
    done = warm.run([sys.executable, str(script)], timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "")


@pytest.mark.parametrize("mode", ["own", "plugin"])
def test_forks_at_random_moments_leave_parents_and_children_working(mode: str) -> None:
    said = run(FORKING, mode, CHILDREN, SEED)
    assert said.count(f"{CHILDREN} children") == 2


def test_ranks_of_run_ranks_have_different_random_state() -> None:
    drawn = run_ranks(2, lambda: (torch.initial_seed(), torch.rand(1).item()), init=False)
    assert drawn[0] is not None
    assert drawn[1] is not None
    assert all(first != second for first, second in zip(*drawn, strict=True))
