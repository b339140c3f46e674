"""One-sided windows: put, get and signals without a call of the owner."""

import os
import signal
import threading
import time

import pytest
import torch

import allranks as dist
from allranks.testing import run_ranks

ENGINES = ["native", "tcp"]  # memory of one host; connections, as between hosts
DTYPES = [torch.float32, torch.int64, torch.int8, torch.bfloat16, torch.complex64, torch.float8_e4m3fn]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_put_elements_arrive_before_their_signal(engine: str, ranks: int) -> None:
    def body() -> None:
        me, size = dist.get_rank(), dist.get_world_size()
        to, source = (me + 1) % size, (me - 1) % size
        for dtype in DTYPES:
            for count in (1, 1000, 300_000):
                memory = dist.allocate_tensor(size * count, dtype)
                window = dist.new_window(memory)
                for turn in range(3):
                    given = torch.full((count,), me + 1 + turn).to(dtype)
                    work = window.put(given, to, me * count, async_op=turn == 1)
                    given.zero_()  # the program may change it immediately
                    assert work is None or work.wait()
                    work = window.wait_signal(source, async_op=turn == 2)
                    assert work is None or work.wait()
                    got = window.map_remote_tensor(me)[source * count : (source + 1) * count]
                    want = torch.full((count,), source + 1 + turn).to(dtype)
                    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
                    dist.barrier()
                window.tensor_deregister()

    run_ranks(ranks, body, env={"ALLRANKS_BACKEND": engine})


@pytest.mark.parametrize("engine", ENGINES)
def test_get_reads_the_memory_of_a_rank_that_makes_no_call(engine: str) -> None:
    def body() -> None:
        me = dist.get_rank()
        memory = dist.allocate_tensor((3, 100_000)).copy_(torch.arange(300_000).view(3, -1) + 1000.0 * me)
        window = dist.new_window(memory)
        if me == 0:
            for rank in (2, 1, 0):
                into = torch.empty(2, 50_000).T  # not contiguous
                window.get(into, rank, 100_000)
                assert torch.equal(into, torch.arange(100_000, 200_000).view(50_000, 2) + 1000.0 * rank)
            window.signal(1)
            window.signal(2)
        else:
            time.sleep(0.2)
            window.wait_signal(0)
        window.tensor_deregister()

    run_ranks(3, body, env={"ALLRANKS_BACKEND": engine})


@pytest.mark.parametrize("engine", ENGINES)
def test_each_wait_consumes_one_signal_of_one_rank(engine: str) -> None:
    def body() -> None:
        me = dist.get_rank()
        window = dist.new_window(dist.allocate_tensor(1))
        if me == 0:
            for sender in (2, 1, 1, 2):
                window.wait_signal(sender)
            waiting = window.wait_signal(1, async_op=True)
            assert not waiting.is_completed()
            with pytest.raises(dist.TimeoutError, match=r"no signal of rank 1 arrived in 0\.1 s") as caught:
                window.wait_signal(1, timeout=0.1)
            assert caught.value.ranks == (1,)
        else:
            window.signal(0)
            window.signal(0)
        dist.barrier()
        if me == 1:
            window.signal(0)
        if me == 0:
            waiting.wait()
        window.tensor_deregister()

    run_ranks(3, body, env={"ALLRANKS_BACKEND": engine})


@pytest.mark.parametrize("engine", ENGINES)
def test_threads_of_a_rank_use_windows_at_the_same_time(engine: str) -> None:
    rounds, count = 50, 2000

    def body() -> None:
        me = dist.get_rank()
        windows = [dist.new_window(dist.allocate_tensor((2, count))) for _ in range(3)]

        def use(window: dist.Window) -> None:
            other = torch.empty(count)
            for turn in range(rounds):
                window.put(torch.full((count,), float(turn)), 1 - me, (turn % 2) * count)
                window.wait_signal(1 - me)
                assert (window.map_remote_tensor(me)[turn % 2] == turn).all()
                window.get(other, 1 - me, (turn % 2) * count)
                assert other.min() >= turn  # the other rank has put this or a later turn
                window.signal(1 - me)
                window.wait_signal(1 - me)

        failed: list[BaseException] = []

        def run(window: dist.Window) -> None:
            try:
                use(window)
            except BaseException as error:  # noqa: BLE001 - reported below
                failed.append(error)

        threads = [threading.Thread(target=run, args=(window,)) for window in windows]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed, failed
        for window in windows:
            window.tensor_deregister()

    run_ranks(2, body, env={"ALLRANKS_BACKEND": engine})


def test_windows_of_one_host_map_the_tensors_of_other_ranks() -> None:
    def body() -> None:
        me = dist.get_rank()
        whole = dist.allocate_tensor((4, 3 + me), torch.int32)
        memory = whole[1:3]  # a part, with another size on each rank
        memory.fill_(me)
        window = dist.new_window(memory)
        theirs = window.map_remote_tensor(1 - me)
        assert theirs.shape == (2, 3 + 1 - me)
        assert theirs.dtype == torch.int32
        assert (theirs == 1 - me).all()
        assert window.shares_memory(1 - me)
        dist.barrier()
        theirs.fill_(7)
        dist.barrier()
        assert whole.tolist()[0] == [0] * (3 + me)
        assert (whole[1:3] == 7).all()
        del memory, whole
        assert (window.map_remote_tensor(me) == 7).all()  # the window keeps the memory
        window.tensor_deregister()

    run_ranks(2, body)


@pytest.mark.parametrize("engine", ENGINES)
def test_invalid_access_is_refused_and_changes_nothing(engine: str) -> None:
    def body() -> None:
        me = dist.get_rank()
        window = dist.new_window()
        one = torch.ones(1)
        for call in (
            lambda: window.put(one, 0, 0),
            lambda: window.get(one, 0, 0),
            lambda: window.signal(0),
            lambda: window.wait_signal(0),
            lambda: window.map_remote_tensor(0),
            window.tensor_deregister,
        ):
            with pytest.raises(dist.UsageError, match="not registered"):
                call()
        memory = dist.allocate_tensor(4)
        window.tensor_register(memory)
        for call, text in (
            (lambda: window.put(one, 1 - me, 4), "exceeds the window size"),
            (lambda: window.get(torch.ones(5), 1 - me, 0), "exceeds the window size"),
            (lambda: window.put(one, 1 - me, -1), "nonnegative"),
            (lambda: window.put(one, 1 - me, 2**63), "exceeds the window size"),
            (lambda: window.put(one.double(), 1 - me, 0), "does not match"),
            (lambda: window.put(one, 2, 0), "2 is not a rank"),
            (lambda: window.signal(-1), "-1 is not a rank"),
        ):
            with pytest.raises(dist.UsageError, match=text):
                call()
        dist.barrier()
        assert memory.tolist() == [0, 0, 0, 0]
        window.tensor_deregister()
        with pytest.raises(dist.UsageError, match="not registered"):
            window.put(one, 1 - me, 0)

    run_ranks(2, body, env={"ALLRANKS_BACKEND": engine})


@pytest.mark.parametrize("engine", ENGINES)
def test_a_tensor_that_cannot_be_registered_is_an_error_on_every_rank(engine: str) -> None:
    def body() -> None:
        me = dist.get_rank()
        window = dist.new_window()
        good = dist.allocate_tensor(4)
        for bad, text in (
            (torch.ones(4), "not in shared memory.*\n.*allocate_tensor"),
            (dist.allocate_tensor((2, 2)).T, "not contiguous"),
            ([1.0], "expected a torch.Tensor"),
        ):
            with pytest.raises(dist.AllranksError, match=text if me == 1 else "see the error of rank 1"):
                window.tensor_register(bad if me == 1 else good)  # type: ignore[arg-type]
        window.tensor_register(good)
        with pytest.raises(dist.AllranksError, match="double registration"):
            window.tensor_register(good)
        window.put(torch.ones(1), 1 - me, 3)
        window.wait_signal(1 - me)
        assert good.tolist() == [0, 0, 0, 1]
        window.tensor_deregister()

    run_ranks(2, body, env={"ALLRANKS_BACKEND": engine})


@pytest.mark.parametrize("engine", ENGINES)
def test_the_memory_of_a_rank_may_be_empty(engine: str) -> None:
    def body() -> None:
        me = dist.get_rank()
        window = dist.new_window(dist.allocate_tensor(3 * me))
        nothing = torch.empty(0)
        window.put(nothing, 0, 0)
        window.get(nothing, 0, 0)
        if me == 0:
            window.put(torch.ones(3), 1, 0)
            window.wait_signal(1)
            window.wait_signal(0)
        else:
            window.wait_signal(0)
            assert window.map_remote_tensor(1).tolist() == [1, 1, 1]
        with pytest.raises(dist.UsageError, match="exceeds the window size"):
            window.put(torch.ones(1), 0, 0)
        window.tensor_deregister()

    run_ranks(2, body, env={"ALLRANKS_BACKEND": engine})


def repeat(call) -> None:
    """Call until it raises: the kernel accepts some bytes for a process that has died."""
    while True:
        call()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_lost_rank_is_named_by_each_access(engine: str) -> None:
    def body() -> None:
        window = dist.new_window(dist.allocate_tensor(1_000_000))
        given = torch.ones(1_000_000)
        if dist.get_rank() == 1:
            window.put(given, 0, 0)
            os.kill(os.getpid(), signal.SIGKILL)
        window.wait_signal(1)
        for call in (
            lambda: window.wait_signal(1),
            lambda: window.put(given, 1, 0),
            lambda: window.get(given, 1, 0),
            lambda: window.signal(1),
        ):
            with pytest.raises(dist.PeerLostError) as caught:
                repeat(call)
            assert caught.value.rank == 1

    run_ranks(2, body, env={"ALLRANKS_BACKEND": engine}, may_die=[1])


@pytest.mark.parametrize("call", ["put", "get"])
def test_a_stopped_rank_is_named_at_the_timeout(call: str) -> None:
    def body() -> None:
        group = dist.new_group(timeout=1.0)
        me = dist.get_rank()
        window = dist.new_window(dist.allocate_tensor(4_000_000), group=group)
        window.put(torch.ones(1), 1 - me, 0)  # connects
        window.wait_signal(1 - me)
        pids: list[int] = [0, 0]
        dist.all_gather_object(pids, os.getpid())
        if me == 1:
            dist.barrier()  # rank 0 arrives after it has continued this process
            return
        os.kill(pids[1], signal.SIGSTOP)
        try:
            with pytest.raises(dist.TimeoutError, match="rank 1 did not") as caught:
                repeat(lambda: getattr(window, call)(torch.ones(4_000_000), 1, 0))
            assert caught.value.ranks == (1,)
        finally:
            os.kill(pids[1], signal.SIGCONT)
        with pytest.raises(dist.PeerLostError, match=r"an earlier call was interrupted or timed out|closed|reset"):
            repeat(lambda: window.put(torch.ones(4_000_000), 1, 0))
        dist.barrier()

    run_ranks(2, body, env={"ALLRANKS_BACKEND": "tcp"})


def test_windows_end_with_their_group() -> None:
    def body() -> None:
        before = len(os.listdir("/proc/self/fd"))
        for engine in ENGINES:
            group = dist.new_group(backend=engine)
            window = dist.new_window(dist.allocate_tensor(10), group=group)
            window.put(torch.ones(1), 1 - group.rank(), 0)
            window.wait_signal(1 - group.rank())
            dist.destroy_process_group(group)
            with pytest.raises(dist.NotInitializedError, match="destroyed"):
                window.put(torch.ones(1), 1 - group.rank(), 0)
            del window, group
        deadline = time.monotonic() + 20
        while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < deadline:
            time.sleep(0.05)  # the threads of connections end
        assert len(os.listdir("/proc/self/fd")) <= before

    run_ranks(2, body)


def test_engines_without_windows_say_so() -> None:
    def body() -> None:
        with pytest.raises(dist.UsageError, match=r"the gloo engine has no windows.\n.*native"):
            dist.new_window()

    run_ranks(1, body, env={"ALLRANKS_BACKEND": "gloo"})
